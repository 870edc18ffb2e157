# SPDX-License-Identifier: Apache-2.0
"""Write and read the demo models as Hugging Face folders that vLLM loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from .dspark import DSparkConfig, DSparkDraft
from .eagle3 import Eagle3Config, Eagle3Draft
from .layers import ModelConfig
from .modeling import BOS_TOKEN_ID, MASK_TOKEN_ID, Draft, DraftConfig, Target
from .tokenizer import save_tokenizer

# Ours -> as Hugging Face writes it.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
    "rope_theta": "rope_theta",
}


def round_to_bfloat16(model: nn.Module) -> None:
    """Round the weights in place, so that what is measured is what is shipped."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def save_target(target: Target, folder: Path) -> int:
    """Write the target; returns the size of its weights in bytes."""
    config = _model_keys(target.config) | {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": BOS_TOKEN_ID, "eos_token_id": BOS_TOKEN_ID, "do_sample": False},
    )
    save_tokenizer(folder)
    return _save(target, folder, config)


def save_draft(draft: Draft, folder: Path, *, num_target_layers: int) -> int:
    """Write a draft; returns the size of its weights in bytes."""
    if isinstance(draft, DSparkDraft):
        keys = _dspark_keys(draft.config, num_target_layers)
    else:
        keys = _eagle3_keys(draft.config)
    # A draft ships its own embedding and head: both were trained with it.
    return _save(draft, folder, _model_keys(draft.config) | keys | {"tie_word_embeddings": False})


def _dspark_keys(config: DSparkConfig, num_target_layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": config.num_draft_tokens,
        "markov_head_type": "vanilla",
        "markov_rank": config.markov_rank,
        "mask_token_id": MASK_TOKEN_ID,
        "num_target_layers": num_target_layers,
        "sample_from_anchor": True,
        "target_layer_ids": list(config.target_layer_ids),
        # vLLM 0.26 sizes the draft's `fc` by the layers named here.
        "dflash_config": {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": list(config.target_layer_ids)},
    }


def _eagle3_keys(config: DraftConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.vocab_size,
        # Here the numbers are those of the layers that the features enter.
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
    }


def load_target(folder: Path) -> Target:
    """Read a target written by :func:`save_target`."""
    target = Target(ModelConfig(**_sizes(folder)))
    target.load_state_dict(_weights(folder))
    return target


def load_draft(folder: Path) -> Draft:
    """Read a draft written by :func:`save_draft`."""
    written = json.loads((folder / "config.json").read_text())
    draft: Draft
    if "Qwen3DSparkModel" in written["architectures"]:
        draft = DSparkDraft(
            DSparkConfig(
                **_sizes(folder),
                num_draft_tokens=written["block_size"],
                markov_rank=written["markov_rank"],
                target_layer_ids=tuple(written["target_layer_ids"]),
            )
        )
    else:
        layer_ids = tuple(i - 1 for i in written["eagle_aux_hidden_state_layer_ids"])
        draft = Eagle3Draft(Eagle3Config(**_sizes(folder), target_layer_ids=layer_ids))
    draft.load_state_dict(_weights(folder))
    return draft


def _model_keys(config: ModelConfig) -> dict[str, Any]:
    keys = {
        "model_type": "qwen3" if config.qk_norm else "llama",
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        "hidden_act": "silu",
        "attention_bias": False,
        # Transformers 4 reads rope_theta, transformers 5 this.
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": BOS_TOKEN_ID,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    return keys | {"use_sliding_window": False} if config.qk_norm else keys


def _sizes(folder: Path) -> dict[str, Any]:
    written = json.loads((folder / "config.json").read_text())
    return {ours: written[theirs] for ours, theirs in _SIZES.items()} | {"qk_norm": written["model_type"] == "qwen3"}


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}


def _save(model: nn.Module, folder: Path, config: dict[str, Any]) -> int:
    _write_json(folder / "config.json", config)
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()
    }
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    # safetensors creates files that only their owner can read.
    path.chmod(0o644)
    return path.stat().st_size


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
