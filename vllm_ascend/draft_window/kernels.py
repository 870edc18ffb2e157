# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""One fused launch that windows the lengths and the block tables of all draft KV cache groups.

The step is host-bound on short contexts, where a dozen small operations cost more than the window saves. Pointers are
passed one by one instead of in a device tensor of addresses: such a tensor would lose its content when the KV cache
pool sleeps and wakes up.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.triton_utils import tl, triton

from .geometry import Rows, WindowGeometry
from .inputs import Bind

GROUPS_PER_LAUNCH = 4
_COLUMNS_PER_PASS = 256


class WindowLaunch:
    """The launch for one set of persistent tensors, all int32 with contiguous rows.

    Drafts with more than :data:`GROUPS_PER_LAUNCH` KV cache groups take one launch per that many groups.
    """

    def __init__(
        self,
        geometry: WindowGeometry,
        # seq_lens [max_num_reqs], query_start_loc [> max_num_reqs], windowed seq_lens [max_num_reqs]
        lengths: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        # num_groups x [max_num_reqs, full_columns]
        full_tables: Sequence[torch.Tensor],
        # num_groups x [max_num_reqs, columns]
        out_tables: Sequence[torch.Tensor],
        bind: Bind | None = None,
        # [max_num_reqs], W of each row where they differ
        windows: torch.Tensor | None = None,
    ) -> None:
        self._geometry = geometry
        largest = 0 if windows is None else geometry.window
        by_row = (*lengths, lengths[0] if windows is None else windows)
        self._launches = []
        for first in range(0, len(full_tables), GROUPS_PER_LAUNCH):
            groups = range(first, min(first + GROUPS_PER_LAUNCH, len(full_tables)))
            # Unused slots repeat a real group: a launch needs valid pointers, the kernel ignores them.
            slots = [groups[min(i, len(groups) - 1)] for i in range(GROUPS_PER_LAUNCH)]
            full, out = [full_tables[g] for g in slots], [out_tables[g] for g in slots]
            shape = (geometry.limit, geometry.alignment, geometry.aligned_sink, geometry.gate(0), len(groups))
            newest = geometry.rows is Rows.NEWEST
            sizes = (geometry.block_sizes[g] for g in slots)
            constants = (
                *shape,
                newest,
                largest,
                *sizes,
                *(table.shape[1] for table in (*full, *out)),
                _COLUMNS_PER_PASS,
            )
            self._launches.append(Launch(_window_kernel, (*by_row, *full, *out), constants, bind))

    def __call__(self, *, num_reqs: int, num_rows: int, queries: int | None, lookahead: int = 0) -> None:
        """Write ``num_rows`` rows; those from ``num_reqs`` on become empty. No ``queries``: each row has its own."""
        reach = self._geometry.reach(0, lookahead)
        for launch in self._launches:
            launch(num_rows, num_reqs, reach, lookahead, queries or 0)


class Launch:
    """Holds a kernel's arguments: nothing that Triton looks at changes between calls."""

    def __init__(self, kernel: Any, tensors: tuple[torch.Tensor, ...], constants: tuple, bind: Bind | None) -> None:
        self._kernel, self._tensors, self._constants, self._bind = kernel, tensors, constants, bind
        self.bound: Callable[..., None] | None = None

    def __call__(self, num_rows: int, *arguments: Any) -> None:
        if self.bound is not None:
            self.bound(num_rows, *arguments)
            return
        compiled = self._kernel[(num_rows,)](*self._tensors, *arguments, *self._constants)
        if self._bind is not None:
            self.bound = self._bind(compiled, self._tensors, self._constants)


@triton.jit(do_not_specialize=["num_reqs", "reach", "lookahead", "uniform_queries"])
def _window_kernel(
    seq_lens_ptr, query_start_loc_ptr, out_seq_lens_ptr, windows_ptr,
    full_0_ptr, full_1_ptr, full_2_ptr, full_3_ptr,
    out_0_ptr, out_1_ptr, out_2_ptr, out_3_ptr,
    num_reqs, reach, lookahead, uniform_queries,
    LIMIT: tl.constexpr, ALIGNMENT: tl.constexpr, SINK: tl.constexpr, GATE: tl.constexpr, NUM_GROUPS: tl.constexpr,
    NEWEST: tl.constexpr, LARGEST: tl.constexpr,
    SIZE_0: tl.constexpr, SIZE_1: tl.constexpr, SIZE_2: tl.constexpr, SIZE_3: tl.constexpr,
    FULL_0: tl.constexpr, FULL_1: tl.constexpr, FULL_2: tl.constexpr, FULL_3: tl.constexpr,
    COLUMNS_0: tl.constexpr, COLUMNS_1: tl.constexpr, COLUMNS_2: tl.constexpr, COLUMNS_3: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    seq_len = tl.load(seq_lens_ptr + row)
    seq_len = tl.where(row < num_reqs, seq_len, 0)
    seq_len = tl.minimum(tl.maximum(seq_len, 0), LIMIT)
    queries = tl.load(query_start_loc_ptr + row + 1) - tl.load(query_start_loc_ptr + row)
    queries = tl.maximum(queries, 0)  # a padding row's may be anything
    queries = tl.where(uniform_queries > 0, uniform_queries, queries)
    if LARGEST > 0:
        reach += tl.load(windows_ptr + row) - LARGEST
    reach = tl.maximum(reach, queries) if NEWEST else reach + queries

    start = tl.maximum(seq_len - reach, 0) // ALIGNMENT * ALIGNMENT
    cropped = (start > SINK) & (seq_len + lookahead >= GATE)
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
    full_ptr, out_ptr, row, removed, end,
    SINK: tl.constexpr, SIZE: tl.constexpr, FULL: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
