# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""One fused launch that windows the lengths and the block tables of all draft KV cache groups.

The step is host-bound on short contexts, where a dozen small operations cost more than the window saves; so the launch
itself is prepared once. Pointers are passed one by one instead of in a device tensor of addresses: such a tensor would
lose its content when the KV cache pool sleeps and wakes up.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.triton_utils import tl, triton

from .geometry import WindowGeometry

GROUPS_PER_LAUNCH = 4
_COLUMNS_PER_PASS = 256
_KNOWN_TRITON = ((3, 4), (3, 9))


class WindowLaunch:
    """The launch for one set of persistent tensors, all int32 with contiguous rows.

    Drafts with more than :data:`GROUPS_PER_LAUNCH` KV cache groups take one launch per that many groups.
    """

    def __init__(
        self,
        geometry: WindowGeometry,
        *,
        # [max_num_reqs]
        seq_lens: torch.Tensor,
        # num_groups x [max_num_reqs, full_columns]
        full_tables: Sequence[torch.Tensor],
        # [max_num_reqs]
        out_seq_lens: torch.Tensor,
        # num_groups x [max_num_reqs, columns]
        out_tables: Sequence[torch.Tensor],
        # [max_num_reqs + 1], cumulative; where given, it tells the query tokens of each request
        query_start_loc: torch.Tensor | None = None,
    ) -> None:
        self._geometry = geometry
        self._uniform = query_start_loc is None
        lengths = (seq_lens, seq_lens if query_start_loc is None else query_start_loc, out_seq_lens)
        self._launches = []
        for first in range(0, len(full_tables), GROUPS_PER_LAUNCH):
            groups = range(first, min(first + GROUPS_PER_LAUNCH, len(full_tables)))
            # Unused slots repeat a real group: a launch needs valid pointers, the kernel ignores them.
            slots = [groups[min(i, len(groups) - 1)] for i in range(GROUPS_PER_LAUNCH)]
            full, out = [full_tables[g] for g in slots], [out_tables[g] for g in slots]
            constants = (
                geometry.limit,
                geometry.alignment,
                geometry.aligned_sink,
                geometry.gate(0),
                not self._uniform,
                len(groups),
                *(geometry.block_sizes[g] for g in slots),
                *(table.shape[1] for table in full),
                *(table.shape[1] for table in out),
                _COLUMNS_PER_PASS,
            )
            self._launches.append(_Launch((*lengths, *full, *out), constants))

    def __call__(self, *, num_reqs: int, num_rows: int, queries: int = 1, lookahead: int = 0) -> None:
        """Write ``num_rows`` rows; rows from ``num_reqs`` on become empty."""
        # With a query_start_loc, the kernel knows the queries of each request and takes them in.
        reach = self._geometry.reach(queries if self._uniform else 0, lookahead)
        for launch in self._launches:
            launch(num_rows, num_reqs, reach, lookahead)


class _Launch:
    """Binds the kernel's arguments once: nothing that Triton looks at changes between calls."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], constants: tuple[Any, ...]) -> None:
        self._tensors, self._constants = tensors, constants
        self._bound: Callable[..., None] | None = None

    def __call__(self, num_rows: int, *scalars: int) -> None:
        if self._bound is not None:
            self._bound(num_rows, *scalars)
            return
        compiled = _window_kernel[(num_rows,)](*self._tensors, *scalars, *self._constants)
        # Elsewhere (interpreter, triton-ascend) a compiled kernel takes other arguments, or there is none.
        if torch.version.cuda is not None and self._tensors[0].is_cuda:
            addresses = tuple(tensor.data_ptr() for tensor in self._tensors)
            self._bound = bind(compiled, addresses, self._constants, self._tensors[0].device.index)


def bind(
    compiled: Any, addresses: tuple[int, ...], constants: tuple[Any, ...], device_index: int
) -> Callable[..., None]:
    """``launch(num_rows, *scalars)`` of a compiled CUDA kernel, by the shortest way that its Triton is known to have.

    ``compiled[grid](...)`` costs three times as much: it prepares metadata for launch hooks and calls both chains of
    them, empty or not. ``run`` is what is left without hooks, and what Triton's own ``JITFunction`` calls; its first
    nine parameters are the same from Triton 3.4 to 3.9. Profilers that rely on Triton's hooks do not see the launch.
    """
    if not _KNOWN_TRITON[0] <= _version(triton) <= _KNOWN_TRITON[1]:
        return lambda num_rows, *scalars: compiled[(num_rows, 1, 1)](*addresses, *scalars, *constants)
    from triton.runtime import driver

    run, stream_of = compiled.run, driver.active.get_current_stream
    no_metadata, no_enter_hook, no_exit_hook = None, None, None
    head = (compiled.function, compiled.packed_metadata, no_metadata, no_enter_hook, no_exit_hook, *addresses)

    def launch(num_rows: int, *scalars: int) -> None:
        run(num_rows, 1, 1, stream_of(device_index), *head, *scalars, *constants)

    return launch


def _version(module: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in module.__version__.split(".")[:2])


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
    GATE: tl.constexpr,
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
