# SPDX-License-Identifier: Apache-2.0
"""What the demo target itself says of tokens, in float32 and without an engine."""

from __future__ import annotations

from functools import cache

import torch

from . import DEMO_PAIR
from .export import load_target
from .modeling import Target


@torch.inference_mode()
def logits_of_last(tokens: list[int], count: int, device: str) -> torch.Tensor:
    """Logits that the last ``count`` tokens were chosen from, each after all tokens before it, ``[count, vocab]``."""
    inputs = torch.tensor([tokens[:-1]], device=device)
    return _target(device)(inputs, use_cache=False, logits_to_keep=count).logits[0]


@cache
def _target(device: str) -> Target:
    return load_target(DEMO_PAIR / "target").to(torch.device(device)).eval()  # type: ignore[arg-type]
