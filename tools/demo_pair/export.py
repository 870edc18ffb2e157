# SPDX-License-Identifier: Apache-2.0
"""Write and read the demo models as Hugging Face folders that vLLM loads."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from .dspark import DSparkDraft, dspark_config
from .eagle3 import Eagle3Draft, eagle3_config
from .modeling import Draft, Target
from .tokenizer import save_tokenizer


def new_draft(method: str) -> Draft:
    """A draft with random weights."""
    return DSparkDraft(dspark_config()) if method == "dspark" else Eagle3Draft(eagle3_config())


def round_to_bfloat16(model: nn.Module) -> None:
    """Round the weights in place, so that what is measured is what is shipped."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def save_target(target: Target, folder: Path) -> int:
    """Write the target and its tokenizer; returns the size of its weights in bytes."""
    target.config.architectures = ["Qwen3ForCausalLM"]
    size = _save(target, folder, target.config, without="lm_head.weight")
    target.generation_config.save_pretrained(folder)
    save_tokenizer(folder)
    return size


def save_draft(draft: Draft, folder: Path) -> int:
    """Write a draft, whose embedding and head were trained with it; returns the size of its weights in bytes."""
    return _save(draft, folder, draft.config)


def load_target(folder: Path) -> Target:
    """Read a target written by :func:`save_target`."""
    return Target.from_pretrained(folder, dtype=torch.float32)


def load_draft(folder: Path) -> Draft:
    """Read a draft written by :func:`save_draft`."""
    config = AutoConfig.from_pretrained(folder)
    draft: Draft = DSparkDraft(config) if config.architectures == ["Qwen3DSparkModel"] else Eagle3Draft(config)
    draft.load_state_dict({name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()})
    return draft


def _save(model: nn.Module, folder: Path, config: PretrainedConfig, *, without: str = "") -> int:
    """Write config and weights, these in bfloat16; ``without`` names one that is tied to another."""
    config.save_pretrained(folder)
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != without
    }
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    # safetensors creates files that only their owner can read.
    path.chmod(0o644)
    return path.stat().st_size
