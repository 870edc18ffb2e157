# SPDX-License-Identifier: Apache-2.0
"""The bytes-bound floor: device memory bandwidth as measured, and the bytes that a decode step has to read."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from .spec import PairSizes


def copy_bandwidth(device: str, *, repetitions: int = 20) -> float:
    """Bytes read plus bytes written per second by a large device-to-device copy; the median repetition."""
    size = 2 << 30 if device == "cuda" else 32 << 20
    # Not zeros: some devices are faster on them.
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for i in range(repetitions + 3):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        if i >= 3:
            seconds.append(time.perf_counter() - begin)
    del source, target
    if device == "cuda":
        torch.cuda.empty_cache()
    return 2 * size / sorted(seconds)[len(seconds) // 2]


def floor_ms(
    sizes: PairSizes, contexts: Sequence[int], bandwidth: float, *, window: int | None, block_size: int
) -> float:
    """Time to read the KV cache once: all target layers, and what the draft may see of its own layers.

    Weights are left out: they cost the same in every configuration and fit a fraction of a millisecond.
    """
    visible = contexts if window is None else [min(c, window + block_size) for c in contexts]
    layer_tokens = sizes.layers * sum(contexts) + sizes.draft_layers * sum(visible)
    return layer_tokens * sizes.kv_bytes_per_layer / bandwidth * 1e3
