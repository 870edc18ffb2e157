# SPDX-License-Identifier: Apache-2.0
"""A tiny target with an MTP head (MiMo's layout), random weights: enough to look at what its attention reads."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, MLP, HEADS, KV_HEADS, HEAD, LAYERS, VOCAB = 128, 128, 2, 1, 64, 2, 260


def write(folder: Path) -> Path:
    """Write the checkpoint, which is target and draft in one; returns ``folder``."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(VOCAB, HIDDEN),
    }
    for prefix in [f"model.layers.{i}." for i in range(LAYERS)] + ["model.mtp_layers.0."]:
        for name, rows in (("q", HEADS * HEAD), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD)):
            weights[f"{prefix}self_attn.{name}_proj.weight"] = matrix(rows, HIDDEN)
            weights[f"{prefix}self_attn.{name}_proj.bias"] = torch.zeros(rows)
        weights[f"{prefix}self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD)
        weights |= {f"{prefix}mlp.{name}_proj.weight": matrix(MLP, HIDDEN) for name in ("gate", "up")}
        weights[f"{prefix}mlp.down_proj.weight"] = matrix(HIDDEN, MLP)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(HIDDEN)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"model.mtp_layers.0.{name}.weight"] = torch.ones(HIDDEN)
    weights["model.mtp_layers.0.input_proj.weight"] = matrix(HIDDEN, 2 * HIDDEN)

    config = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": 1,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
