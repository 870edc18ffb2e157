# SPDX-License-Identifier: Apache-2.0
"""An EAGLE3 draft for the demo target, put together from weights that are there: nothing is trained.

It runs the target's last layer once more on the features of the layer before, so it proposes what it has just seen;
runs of spaces in source code accept that. Its attention reads the whole context, which is what the tests are about.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tools.demo_pair import DEMO_PAIR

LAST_LAYER = 3
_QWEN_ONLY = ("architectures", "model_type", "use_sliding_window", "tie_word_embeddings")


def speculation(folder: Path, *, num_tokens: int) -> dict[str, Any]:
    """``speculative_config`` of the draft, which is written into ``folder``."""
    target = load_file(DEMO_PAIR / "target" / "model.safetensors")
    config = json.loads((DEMO_PAIR / "target" / "config.json").read_text())
    hidden = config["hidden_size"]
    prefix = f"model.layers.{LAST_LAYER}."
    weights = {
        f"midlayer.{name.removeprefix(prefix)}": tensor
        for name, tensor in target.items()
        if name.startswith(prefix) and "q_norm" not in name and "k_norm" not in name
    }
    weights["midlayer.hidden_norm.weight"] = weights["midlayer.input_layernorm.weight"].clone()
    for name in ("q_proj", "k_proj", "v_proj"):
        key = f"midlayer.self_attn.{name}.weight"
        # The first half of the input is the token's embedding: a little of it, so that tokens matter too.
        weights[key] = torch.cat([weights[key] * 0.1, weights[key]], dim=1)
    newest_feature = torch.eye(hidden, dtype=weights[key].dtype)
    weights["fc.weight"] = torch.cat([torch.zeros(hidden, 2 * hidden, dtype=newest_feature.dtype), newest_feature], 1)
    weights["norm.weight"] = target["model.norm.weight"]
    weights["embed_tokens.weight"] = target["model.embed_tokens.weight"]
    weights["lm_head.weight"] = target["model.embed_tokens.weight"].clone()

    config = {key: value for key, value in config.items() if key not in _QWEN_ONLY} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": config["vocab_size"],
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return {"method": "eagle3", "model": str(folder), "num_speculative_tokens": num_tokens}
