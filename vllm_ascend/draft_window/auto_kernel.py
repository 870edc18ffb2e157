# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""One fused launch that credits the last proposals and draws the next windows; computes what ``auto.py`` writes down.

A program per row. What rows add is counted in integers, so that their order does not matter, and merged by the row that
is done last: until then every row draws from the record of the steps before.
"""

from typing import TYPE_CHECKING

import torch
from vllm.triton_utils import tl, triton

from .auto import BLUR, BORROWED, FIRST_BUCKET_TOKENS, MEMORY, NOISE_SCALE
from .inputs import Bind
from .kernels import Launch

if TYPE_CHECKING:
    from .auto import WindowChooser


class ChooserLaunch:
    """The launch over one chooser's persistent tensors."""

    def __init__(self, chooser: "WindowChooser", bind: Bind | None) -> None:
        tensors = (
            chooser._sizes,
            chooser._record,
            chooser._added,
            chooser.history,
            chooser._cell,
            chooser._clock,
            chooser.windows,
        )
        num_buckets, num_arms, _ = chooser.history.shape
        constants = (
            num_buckets,
            num_arms,
            triton.next_power_of_2(num_arms),
            triton.next_power_of_2(num_buckets * num_arms),
            chooser._start,
            FIRST_BUCKET_TOKENS,
            BLUR,
            BORROWED,
            MEMORY,
            NOISE_SCALE,
        )
        self._launch = Launch(_choose_kernel, tensors, constants, bind)

    def __call__(self, num_reqs: int, *batch: torch.Tensor) -> None:
        """Choose for a batch's ``idx_mapping``, ``seq_lens``, ``num_sampled`` and ``cu_num_logits``."""
        # They are new tensors in every step, of types that never change: a bound launch is told where they are.
        self._launch(num_reqs, *(batch if self._launch.bound is None else [t.data_ptr() for t in batch]), num_reqs)


_PER_BATCH = ["idx_mapping_ptr", "seq_lens_ptr", "num_sampled_ptr", "cu_num_logits_ptr", "num_reqs"]


@triton.jit(do_not_specialize=_PER_BATCH)
def _choose_kernel(
    sizes_ptr,
    record_ptr,
    added_ptr,
    history_ptr,
    cell_ptr,
    clock_ptr,
    windows_ptr,
    idx_mapping_ptr,
    seq_lens_ptr,
    num_sampled_ptr,
    cu_num_logits_ptr,
    num_reqs,
    NUM_BUCKETS: tl.constexpr,
    NUM_ARMS: tl.constexpr,
    ARMS: tl.constexpr,
    CELLS: tl.constexpr,
    START: tl.constexpr,
    FIRST_BUCKET: tl.constexpr,
    BLUR_SHARE: tl.constexpr,
    BORROWED_PROPOSALS: tl.constexpr,
    MEMORY_PROPOSALS: tl.constexpr,
    NOISE: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + row)
    sampled = tl.load(num_sampled_ptr + row).to(tl.int32)
    num_logits = tl.load(cu_num_logits_ptr + row + 1) - tl.load(cu_num_logits_ptr + row)

    cell = tl.load(cell_ptr + slot)
    credited = (cell >= 0) & (num_logits > 1) & (sampled > 0)
    tl.atomic_add(added_ptr + cell * 2, sampled, mask=credited)
    tl.atomic_add(added_ptr + cell * 2 + 1, 1, mask=credited)

    bucket = 0
    for edge in tl.static_range(NUM_BUCKETS - 1):
        bucket += (seq_len > (FIRST_BUCKET << edge)).to(tl.int32)
    # [ARMS]
    arm = tl.arange(0, ARMS)
    exists = arm < NUM_ARMS
    below = tl.load(sizes_ptr + arm - 1, mask=exists & (arm > 0), other=0)
    useful = exists & (below < seq_len)
    own_ptr = record_ptr + (bucket * NUM_ARMS + arm) * 2
    tokens = tl.load(own_ptr, mask=exists, other=0.0)
    proposals = tl.load(own_ptr + 1, mask=exists, other=0.0)
    has_shorter = exists & (bucket > 0)
    shorter_tokens = tl.load(own_ptr - NUM_ARMS * 2, mask=has_shorter, other=0.0)
    shorter_proposals = tl.load(own_ptr - NUM_ARMS * 2 + 1, mask=has_shorter, other=0.0)
    borrowed = tl.minimum(BORROWED_PROPOSALS / tl.maximum(shorter_proposals, 1.0), 1.0)
    tokens += shorter_tokens * borrowed
    proposals += shorter_proposals * borrowed

    mean = tokens / tl.maximum(proposals, 1e-6)
    tried = useful & (proposals > 0)
    best = tl.max(tl.where(tried, mean, 0.0), axis=0)
    mean = tl.where(proposals > 0, mean, best)
    step = tl.load(clock_ptr)
    noise = _noise(step, row, arm, NOISE)
    score = mean + BLUR_SHARE * best * noise / tl.sqrt(tl.maximum(proposals, 1.0))
    drawn = tl.argmax(tl.where(useful, score, float("-inf")), axis=0)
    first = tl.minimum(tl.sum(useful.to(tl.int32), axis=0) - 1, START)
    drawn = tl.where(best > 0, drawn, first)

    tl.store(cell_ptr + slot, tl.where(sampled > 0, bucket * NUM_ARMS + drawn, -1))
    tl.store(windows_ptr + row, tl.load(sizes_ptr + drawn))

    # Every row has read the record by the time it is counted here, so the last one may change it.
    tl.debug_barrier()
    if tl.atomic_add(clock_ptr + 1, 1) == num_reqs - 1:
        # [CELLS]
        cells = tl.arange(0, CELLS)
        real = cells < NUM_BUCKETS * NUM_ARMS
        for what in tl.static_range(2):
            offsets = cells * 2 + what
            added = tl.load(added_ptr + offsets, mask=real, other=0, cache_modifier=".cg")
            tl.store(history_ptr + offsets, tl.load(history_ptr + offsets, mask=real, other=0) + added, mask=real)
            record = tl.load(record_ptr + offsets, mask=real, other=0.0)
            tl.store(record_ptr + offsets, record + added, mask=real)
            tl.store(added_ptr + offsets, 0, mask=real)
        tl.debug_barrier()
        for index in range(NUM_BUCKETS):
            bucket_ptr = record_ptr + (index * NUM_ARMS + arm) * 2
            counts = tl.load(bucket_ptr + 1, mask=exists, other=0.0)
            faded = tl.where(tl.max(counts, axis=0) >= MEMORY_PROPOSALS, 0.5, 1.0)
            tl.store(bucket_ptr, tl.load(bucket_ptr, mask=exists, other=0.0) * faded, mask=exists)
            tl.store(bucket_ptr + 1, counts * faded, mask=exists)
        tl.store(clock_ptr, step + 1)
        tl.store(clock_ptr + 1, 0)


@triton.jit
def _noise(step, row, arm, NOISE: tl.constexpr):
    """About standard normal: four bytes of a hash, added up."""
    x = step.to(tl.uint32) * 0x9E3779B1 + row.to(tl.uint32) * 0x85EBCA77 + arm.to(tl.uint32) * 0xC2B2AE3D
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    total = (x & 255) + ((x >> 8) & 255) + ((x >> 16) & 255) + (x >> 24)
    return (total.to(tl.int32) - 510).to(tl.float32) * NOISE
