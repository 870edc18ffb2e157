# SPDX-License-Identifier: Apache-2.0
"""A target and its draft of random weights, as folders that vLLM loads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

DRAFT_LAYERS = {"dspark": 5, "dflash": 5, "eagle3": 1, "mtp": 1}
"""Methods, and the layers that their drafts usually have."""
MARKOV_RANK = 32
BYTES_PER_VALUE = 2  # bfloat16
# A random target attends almost evenly to a long context, so that its output would hardly depend on the KV cache.
# Larger queries sharpen attention: a target that reads a wrong block then shows in the tokens.
SHARPNESS = 4.0

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class PairSizes:
    """Sizes of a target and its draft."""

    method: str = "dspark"
    layers: int = 10
    draft_layers: int = 5
    hidden: int = 1024
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 1024
    draft_tokens: int = 7
    max_positions: int = 1_048_576
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in DRAFT_LAYERS:
            raise ValueError(f"method={self.method} is none of {', '.join(DRAFT_LAYERS)}")
        if self.layers <= self.draft_layers:
            raise ValueError(f"layers={self.layers} must be above draft_layers={self.draft_layers}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if DRAFT_LAYERS[self.method] == 1 != self.draft_layers:
            raise ValueError(f"draft_layers={self.draft_layers} must be 1 for {self.method}")
        if self.method == "eagle3" and self.layers < 4:
            raise ValueError(f"layers={self.layers} must be at least 4 for eagle3")

    @property
    def kv_bytes_per_layer(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * BYTES_PER_VALUE

    def kv_cache_bytes(self, tokens: int) -> int:
        """Bytes of a KV cache that holds ``tokens``; vLLM may pad both kinds of layers to groups of the same size."""
        group = min(self.layers, self.draft_layers)
        layers = sum(-(-count // group) * group for count in (self.layers, self.draft_layers))
        return int(1.02 * tokens * layers * self.kv_bytes_per_layer) + (64 << 20)

    @property
    def target_layer_ids(self) -> list[int]:
        """Target layers whose output the draft reads: spread out, the last one excluded.

        As many as the draft has layers: vLLM 0.26 sizes a DSpark draft's input by that number. EAGLE3 reads what goes
        into three layers, all of which must differ.
        """
        last = self.layers - 2
        if self.method == "eagle3":
            return [1, 1 + last // 2, 1 + last]
        return [i * last // max(self.draft_layers - 1, 1) for i in range(self.draft_layers)]


def write_target(folder: Path, sizes: PairSizes) -> None:
    """Write the target, with an MTP head where that is the draft."""
    mtp = sizes.method == "mtp"  # MiMo's layout: Qwen2, and one layer more as the head
    base, layers = ("qwen2", sizes.layers + 1) if mtp else ("qwen3", sizes.layers)
    config, weights = _random(sizes, base, layers, seed=sizes.seed, sharpness=SHARPNESS)
    config["architectures"] = ["MiMoForCausalLM" if mtp else "Qwen3ForCausalLM"]
    if mtp:
        config |= {"num_nextn_predict_layers": 1, "num_hidden_layers": sizes.layers}
        head = "model.mtp_layers.0."
        weights = {name.replace(f"model.layers.{sizes.layers}.", head): weight for name, weight in weights.items()}
        weights[f"{head}input_proj.weight"] = _normal(sizes.hidden, 2 * sizes.hidden)
        weights |= {f"{head}{name}_layernorm.weight": torch.ones(sizes.hidden) for name in ("token", "hidden", "final")}
    _write(folder, config, weights)


def write_draft(folder: Path, sizes: PairSizes, *, native_window: int | None = None) -> None:
    """Write a draft that shares the target's embedding and head.

    Args:
        native_window: ask vLLM for sliding-window layers in the config; the weights are the same.
    """
    base = "llama" if sizes.method == "eagle3" else "qwen3"
    config, weights = _random(sizes, base, sizes.draft_layers, seed=sizes.seed + 1)
    weights = {
        name.removeprefix("model."): w for name, w in weights.items() if "embed" not in name and "head" not in name
    }
    weights["fc.weight"] = _normal(sizes.hidden, len(sizes.target_layer_ids) * sizes.hidden)
    weights["hidden_norm.weight"] = torch.ones(sizes.hidden)
    if sizes.method == "eagle3":
        weights["layers.0.hidden_norm.weight"] = weights.pop("hidden_norm.weight")
        for name in ("q", "k", "v"):  # the first half of the input is the token's embedding
            key = f"layers.0.self_attn.{name}_proj.weight"
            weights[key] = torch.cat([_normal(*weights[key].shape), weights[key]], dim=1)
        weights = {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()}
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": sizes.vocab}
        config |= {"eagle_aux_hidden_state_layer_ids": sizes.target_layer_ids}
        native: dict[str, Any] = {
            "layer_types": ["sliding_attention"] * sizes.draft_layers,
            "sliding_window": native_window,
        }
    else:
        dflash = {"mask_token_id": sizes.vocab - 1, "target_layer_ids": sizes.target_layer_ids}
        native = {"dflash_config": dflash | {"use_swa": True, "swa_window_size": native_window}}
        if sizes.method == "dspark":
            weights |= {f"markov_head.markov_w{i}.weight": _normal(sizes.vocab, MARKOV_RANK) for i in (1, 2)}
            config |= dflash | {"architectures": ["Qwen3DSparkModel"], "markov_head_type": "vanilla"}
            config |= {"markov_rank": MARKOV_RANK, "block_size": sizes.draft_tokens, "sample_from_anchor": True}
            config |= {"num_target_layers": sizes.layers}
        else:
            config |= {"architectures": ["DFlashDraftModel"], "mask_token_id": sizes.vocab - 1, "dflash_config": dflash}
    _write(folder, config if native_window is None else config | native, weights)


def _random(
    sizes: PairSizes, model_type: str, layers: int, *, seed: int, sharpness: float = 1.0
) -> tuple[dict[str, Any], Weights]:
    """Config and random weights of a decoder as transformers has it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": 3 * sizes.hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.max_positions,
        # Transformers 4 reads the first, transformers 5 the second.
        "rope_theta": 1e7,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    torch.manual_seed(seed)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).state_dict()
    weights = {}
    for name, weight in shapes.items():
        if weight.dim() == 2:
            weights[name] = _normal(weight.shape[0], weight.shape[1], std=1.0 if "embed" in name else None)
        else:
            weights[name] = torch.zeros(weight.shape) if name.endswith("bias") else torch.ones(weight.shape)
        if name.endswith("q_norm.weight" if model_type == "qwen3" else "q_proj.weight"):
            weights[name] *= sharpness
    return config, weights


def _normal(rows: int, columns: int, std: float | None = None) -> torch.Tensor:
    """Random weight ``[rows, columns]``, scaled by its fan-in unless told otherwise."""
    return torch.randn(rows, columns) * (columns**-0.5 if std is None else std)


def _write(folder: Path, config: dict[str, Any], weights: Weights) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: tensor.bfloat16().contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
