# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""One fused launch that windows the lengths and the block tables of all draft KV cache groups.

The step is host-bound on short contexts, where a dozen small operations cost more than the window saves. Pointers are
passed one by one instead of in a device tensor of addresses: such a tensor would lose its content when the KV cache
pool sleeps and wakes up.
"""

from collections.abc import Sequence

import torch
from vllm.triton_utils import tl, triton

from .geometry import WindowGeometry

GROUPS_PER_LAUNCH = 4
_COLUMNS_PER_PASS = 256


def launch_window(
    geometry: WindowGeometry,
    *,
    # [>= num_rows]
    seq_lens: torch.Tensor,
    # num_groups x [>= num_rows, full_columns]
    full_tables: Sequence[torch.Tensor],
    # [>= num_rows]
    out_seq_lens: torch.Tensor,
    # num_groups x [>= num_rows, columns]
    out_tables: Sequence[torch.Tensor],
    num_reqs: int,
    num_rows: int,
    queries: int,
    lookahead: int = 0,
    # [>= num_rows + 1], cumulative; where given, it holds the query tokens and `queries` is ignored
    query_start_loc: torch.Tensor | None = None,
) -> None:
    """Write windowed lengths and block tables for ``num_rows`` rows; rows from ``num_reqs`` on become empty.

    Every tensor is int32, rows are contiguous. Drafts with more than :data:`GROUPS_PER_LAUNCH` KV cache groups take
    one launch per that many groups.
    """
    for first in range(0, len(full_tables), GROUPS_PER_LAUNCH):
        group_ids = range(first, min(first + GROUPS_PER_LAUNCH, len(full_tables)))
        # Unused slots repeat a real group: a launch needs valid pointers, the kernel ignores them.
        slots = [group_ids[min(i, len(group_ids) - 1)] for i in range(GROUPS_PER_LAUNCH)]
        _window_kernel[(num_rows,)](
            seq_lens,
            seq_lens if query_start_loc is None else query_start_loc,
            out_seq_lens,
            *(full_tables[g] for g in slots),
            *(out_tables[g] for g in slots),
            num_reqs,
            max(geometry.window - lookahead, queries) if query_start_loc is None else geometry.window - lookahead,
            lookahead,
            LIMIT=geometry.limit,
            ALIGNMENT=geometry.alignment,
            SINK=geometry.aligned_sink,
            MIN_CONTEXT=geometry.min_context,
            HAS_QUERY_START_LOC=query_start_loc is not None,
            NUM_GROUPS=len(group_ids),
            SIZE_0=geometry.block_sizes[slots[0]],
            SIZE_1=geometry.block_sizes[slots[1]],
            SIZE_2=geometry.block_sizes[slots[2]],
            SIZE_3=geometry.block_sizes[slots[3]],
            FULL_0=full_tables[slots[0]].shape[1],
            FULL_1=full_tables[slots[1]].shape[1],
            FULL_2=full_tables[slots[2]].shape[1],
            FULL_3=full_tables[slots[3]].shape[1],
            COLUMNS_0=out_tables[slots[0]].shape[1],
            COLUMNS_1=out_tables[slots[1]].shape[1],
            COLUMNS_2=out_tables[slots[2]].shape[1],
            COLUMNS_3=out_tables[slots[3]].shape[1],
            BLOCK=_COLUMNS_PER_PASS,
        )


@triton.jit(do_not_specialize=["num_reqs", "reach", "lookahead"])
def _window_kernel(
    seq_lens_ptr,
    query_start_loc_ptr,
    out_seq_lens_ptr,
    full_0_ptr,
    full_1_ptr,
    full_2_ptr,
    full_3_ptr,
    out_0_ptr,
    out_1_ptr,
    out_2_ptr,
    out_3_ptr,
    num_reqs,
    reach,
    lookahead,
    LIMIT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SINK: tl.constexpr,
    MIN_CONTEXT: tl.constexpr,
    HAS_QUERY_START_LOC: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    SIZE_3: tl.constexpr,
    FULL_0: tl.constexpr,
    FULL_1: tl.constexpr,
    FULL_2: tl.constexpr,
    FULL_3: tl.constexpr,
    COLUMNS_0: tl.constexpr,
    COLUMNS_1: tl.constexpr,
    COLUMNS_2: tl.constexpr,
    COLUMNS_3: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    seq_len = tl.load(seq_lens_ptr + row)
    seq_len = tl.where(row < num_reqs, seq_len, 0)
    seq_len = tl.minimum(tl.maximum(seq_len, 0), LIMIT)
    if HAS_QUERY_START_LOC:
        queries = tl.load(query_start_loc_ptr + row + 1) - tl.load(query_start_loc_ptr + row)
        reach = tl.maximum(reach, queries)

    start = tl.maximum(seq_len - reach, 0) // ALIGNMENT * ALIGNMENT
    cropped = (start > SINK) & (seq_len >= MIN_CONTEXT)
    removed = tl.where(cropped, start - SINK, 0)
    length = seq_len - removed
    tl.store(out_seq_lens_ptr + row, length)

    # A padding row has no look-ahead either: it must not point at anything.
    end = tl.where(length > 0, length + lookahead, 0)
    _crop_row(full_0_ptr, out_0_ptr, row, removed, end, SINK, SIZE_0, FULL_0, COLUMNS_0, BLOCK)
    if NUM_GROUPS > 1:
        _crop_row(full_1_ptr, out_1_ptr, row, removed, end, SINK, SIZE_1, FULL_1, COLUMNS_1, BLOCK)
    if NUM_GROUPS > 2:
        _crop_row(full_2_ptr, out_2_ptr, row, removed, end, SINK, SIZE_2, FULL_2, COLUMNS_2, BLOCK)
    if NUM_GROUPS > 3:
        _crop_row(full_3_ptr, out_3_ptr, row, removed, end, SINK, SIZE_3, FULL_3, COLUMNS_3, BLOCK)


@triton.jit
def _crop_row(
    full_ptr,
    out_ptr,
    row,
    removed,
    end,
    SINK: tl.constexpr,
    SIZE: tl.constexpr,
    FULL: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    shift = removed // SIZE
    needed = (end + SIZE - 1) // SIZE
    # A table of a million tokens times thousands of rows passes 2^31 elements.
    full_row_ptr = full_ptr + row.to(tl.int64) * FULL
    out_row_ptr = out_ptr + row.to(tl.int64) * COLUMNS
    for first in range(0, COLUMNS, BLOCK):
        column = first + tl.arange(0, BLOCK)
        source = column + tl.where(column >= SINK // SIZE, shift, 0)
        real = (column < needed) & (source < FULL)
        block_id = tl.load(full_row_ptr + source, mask=real, other=0)
        tl.store(out_row_ptr + column, block_id, mask=column < COLUMNS)
