# SPDX-License-Identifier: Apache-2.0
"""Drafts of every layout that vLLM's parallel drafters know, made from the weights of the demo draft."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tools.demo_pair import DEMO_PAIR

TARGET = DEMO_PAIR / "target"
NUM_TOKENS = 7

# name -> (method, keys that change in the draft's config.json)
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dspark-anchor": ("dspark", {}),
    "dspark-1+N": ("dspark", {"sample_from_anchor": False}),
    "dspark-causal": ("dspark", {"dflash_config": {"causal": True}}),
    "dflash": ("dflash", {}),
    # one layer of each kind: two KV cache groups, the second with a sliding window of its own
    "dspark-two-groups": (
        "dspark",
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 48, "use_sliding_window": True},
    ),
}


def speculation(layout: str, folder: Path, *, num_tokens: int = NUM_TOKENS, **changes: Any) -> dict[str, Any]:
    """``speculative_config`` for one layout; the draft is written into ``folder``."""
    method, keys = LAYOUTS[layout]
    config = json.loads((DEMO_PAIR / "draft" / "config.json").read_text())
    dflash = config["dflash_config"] | keys.get("dflash_config", {})
    config |= keys | changes | {"dflash_config": dflash}
    weights = load_file(DEMO_PAIR / "draft" / "model.safetensors")
    if method == "dflash":
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith("markov_head")}
        del config["mask_token_id"], config["target_layer_ids"]
        config["architectures"] = ["DFlashDraftModel"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return {"method": method, "model": str(folder), "num_speculative_tokens": num_tokens}
