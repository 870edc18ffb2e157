# SPDX-License-Identifier: Apache-2.0
"""Random-weight Qwen3 target and DSpark or DFlash draft, as folders that vLLM loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .spec import PairSizes

MARKOV_RANK = 32
# A random target attends almost evenly to a long context, so that its output would hardly depend on the KV cache. A
# larger q_norm sharpens attention: a target that reads a wrong block then shows in the tokens.
SHARPNESS = 4.0


def write_target(folder: Path, sizes: PairSizes) -> None:
    """Write the target."""
    generator = torch.Generator().manual_seed(sizes.seed)
    weights = {"model." + name: t for name, t in _stack(sizes, sizes.layers, generator, sharpness=SHARPNESS).items()}
    weights["model.embed_tokens.weight"] = _normal(generator, sizes.vocab, sizes.hidden, std=1.0)
    weights["lm_head.weight"] = _normal(generator, sizes.vocab, sizes.hidden)
    config = _qwen3_config(sizes, sizes.layers) | {"architectures": ["Qwen3ForCausalLM"]}
    _write(folder, config, weights)


def write_draft(folder: Path, sizes: PairSizes) -> None:
    """Write the draft; it shares the target's embedding and head."""
    generator = torch.Generator().manual_seed(sizes.seed + 1)
    features = len(sizes.target_layer_ids) * sizes.hidden
    weights = _stack(sizes, sizes.draft_layers, generator, sharpness=1.0)
    weights["fc.weight"] = _normal(generator, sizes.hidden, features)
    weights["hidden_norm.weight"] = torch.ones(sizes.hidden)
    config = _qwen3_config(sizes, sizes.draft_layers) | {"mask_token_id": sizes.vocab - 1}
    if sizes.method == "dspark":
        weights["markov_head.markov_w1.weight"] = _normal(generator, sizes.vocab, MARKOV_RANK)
        weights["markov_head.markov_w2.weight"] = _normal(generator, sizes.vocab, MARKOV_RANK)
        config |= {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": sizes.draft_tokens,
            "markov_head_type": "vanilla",
            "markov_rank": MARKOV_RANK,
            "num_target_layers": sizes.layers,
            "sample_from_anchor": True,
            "target_layer_ids": sizes.target_layer_ids,
        }
    else:
        config |= {"architectures": ["DFlashDraftModel"], "dflash_config": _dflash_config(sizes)}
    _write(folder, config, weights)


def write_native(folder: Path, draft: Path, sizes: PairSizes, window: int) -> None:
    """Copy a draft with vLLM's own sliding window switched on in its config; the weights are linked."""
    config = json.loads((draft / "config.json").read_text())
    config["dflash_config"] = _dflash_config(sizes) | {"use_swa": True, "swa_window_size": window}
    _write(folder, config, None)
    link = folder / "model.safetensors"
    link.unlink(missing_ok=True)
    link.symlink_to((draft / "model.safetensors").resolve())


def _dflash_config(sizes: PairSizes) -> dict[str, Any]:
    return {"mask_token_id": sizes.vocab - 1, "target_layer_ids": sizes.target_layer_ids}


def _qwen3_config(sizes: PairSizes, layers: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": 3 * sizes.hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": sizes.max_positions,
        # Transformers 4 reads the first, transformers 5 the second.
        "rope_theta": 1e7,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def _stack(sizes: PairSizes, layers: int, generator: torch.Generator, *, sharpness: float) -> dict[str, torch.Tensor]:
    """Decoder layers and the final norm under their published names."""
    hidden, mlp = sizes.hidden, 3 * sizes.hidden
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    weights = {"norm.weight": torch.ones(hidden)}
    shapes = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    for layer in (f"layers.{i}." for i in range(layers)):
        for name, shape in shapes.items():
            weights[f"{layer}{name}.weight"] = _normal(generator, *shape)
        weights[f"{layer}self_attn.q_norm.weight"] = torch.full((sizes.head_dim,), sharpness)
        weights[f"{layer}self_attn.k_norm.weight"] = torch.ones(sizes.head_dim)
        weights[f"{layer}input_layernorm.weight"] = torch.ones(hidden)
        weights[f"{layer}post_attention_layernorm.weight"] = torch.ones(hidden)
    return weights


def _normal(generator: torch.Generator, rows: int, columns: int, std: float | None = None) -> torch.Tensor:
    """Random weight ``[rows, columns]``, scaled by its fan-in unless told otherwise."""
    return torch.randn(rows, columns, generator=generator) * (columns**-0.5 if std is None else std)


def _write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor] | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if weights is not None:
        tensors = {name: tensor.bfloat16().contiguous() for name, tensor in weights.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
