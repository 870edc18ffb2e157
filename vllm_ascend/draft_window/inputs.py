# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""Persistent windowed lengths and block tables, and the stand-ins through which a metadata build reads them.

The originals are never written, and neither are the objects that hold them: the target reads the same block tables, a
FULL graph on Ascend builds twice per step, and slot mappings keep coming from the full table.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Protocol

import torch

from .geometry import WindowGeometry

Bind = Callable[[Any, tuple[torch.Tensor, ...], tuple[Any, ...]], Callable[..., None] | None]
"""Makes a shorter launch of a compiled kernel, its tensors and its constants; ``None`` where there is none."""


class InputBuffers(Protocol):
    """A draft's lengths [max_num_reqs] and query offsets [> max_num_reqs], int32."""

    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor


class BlockTables(Protocol):
    """The runner's block tables as attention reads them: num_kv_cache_groups x [max_num_reqs, columns], int32."""

    input_block_tables: Sequence[torch.Tensor]


class swapped:  # lower case like contextlib.suppress
    """Context manager: give ``owner`` other attributes, and its own back whatever the body raises.

    All or nothing: where one cannot be set, those before it are set back and the error is raised. A class instead of a
    generator, because it stands in the host-bound part of every step.
    """

    __slots__ = ("_new", "_old", "_owner")

    def __init__(self, owner: object, **attributes: Any) -> None:
        self._owner, self._new = owner, attributes

    def __enter__(self) -> None:
        self._old: dict[str, Any] = {}
        try:
            for name, value in self._new.items():
                old = getattr(self._owner, name)
                setattr(self._owner, name, value)
                self._old[name] = old
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for name, value in self._old.items():
            setattr(self._owner, name, value)


class WindowedInputs:
    """Windowed lengths and block tables of a draft; allocated once, so that graphs can keep their addresses.

    Attributes:
        geometry: the arithmetic in force.
        group_ids: KV cache groups that hold draft layers.
        seq_lens: windowed lengths, int32, [max_num_reqs].
        block_tables: cropped tables, one per draft group, int32, [max_num_reqs, columns].
        stand_ins: the draft's ``input_buffers`` and ``block_tables`` with windowed tensors in them, by these names.
    """

    def __init__(
        self,
        geometry: WindowGeometry,
        input_buffers: InputBuffers,
        block_tables: BlockTables,
        group_ids: Sequence[int],
        *,
        fused: bool = True,
        bind: Bind | None = None,
        windows: torch.Tensor | None = None,
    ) -> None:
        """Bind to the draft's ``InputBuffers`` and the runner's ``BlockTables``, whose tensors are persistent.

        Args:
            group_ids: KV cache groups that hold draft layers, in the order of ``geometry.block_sizes``.
            fused: use the fused launch; otherwise the same in plain torch.
            bind: how to shorten the fused launch, where the device knows a way.
            windows: W of each row, int32, [max_num_reqs], where they differ; read by every launch.
        """
        self.geometry = geometry
        self.group_ids = tuple(group_ids)
        self._windows = windows
        self._full_seq_lens, self._query_start_loc = input_buffers.seq_lens, input_buffers.query_start_loc
        # num_groups x [max_num_reqs, full_columns]
        self._full_tables = [block_tables.input_block_tables[i] for i in group_ids]
        self.seq_lens = torch.zeros_like(self._full_seq_lens)
        self.block_tables = [
            table.new_zeros(table.shape[0], columns)
            for table, columns in zip(self._full_tables, geometry.columns, strict=True)
        ]
        self._launch: Callable[..., None] | None = None
        if fused:
            from .kernels import WindowLaunch

            lengths = (self._full_seq_lens, self._query_start_loc, self.seq_lens)
            self._launch = WindowLaunch(geometry, lengths, self._full_tables, self.block_tables, bind, windows)
        # Groups without draft layers keep their table: the build indexes the list by KV cache group.
        tables = list(block_tables.input_block_tables)
        for group_id, table in zip(group_ids, self.block_tables, strict=True):
            tables[group_id] = table
        # Shallow copies, which share every tensor but the windowed ones.
        buffers_stand_in, tables_stand_in = copy(input_buffers), copy(block_tables)
        buffers_stand_in.seq_lens, tables_stand_in.input_block_tables = self.seq_lens, tables
        self.stand_ins = {"input_buffers": buffers_stand_in, "block_tables": tables_stand_in}

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.seq_lens, *self.block_tables))

    def refresh(self, *, num_reqs: int, num_rows: int, queries: int | None, lookahead: int = 0) -> None:
        """Window the first ``num_rows`` rows into the persistent tensors; rows from ``num_reqs`` on become empty.

        Args:
            queries: query tokens of every request; ``None`` takes those of each from ``query_start_loc``.
        """
        if num_rows == 0:
            return
        if self._launch is not None:
            self._launch(num_reqs=num_reqs, num_rows=num_rows, queries=queries, lookahead=lookahead)
            return
        # [num_rows]
        live = self._full_seq_lens[:num_rows].clone()
        live[num_reqs:] = 0
        per_request = self._query_start_loc[: num_rows + 1].diff() if queries is None else queries
        windows = None if self._windows is None else self._windows[:num_rows]
        removed, length = self.geometry.lengths(live, queries=per_request, lookahead=lookahead, windows=windows)
        self.seq_lens[:num_rows].copy_(length)
        for group, (full, out) in enumerate(zip(self._full_tables, self.block_tables, strict=True)):
            cropped = self.geometry.crop_block_table(group, full[:num_rows], removed, length, lookahead=lookahead)
            out[:num_rows].copy_(cropped)

    def in_place_of_originals(self, reader: object, **more: Any) -> swapped:
        """Inside, ``reader.input_buffers`` and ``reader.block_tables`` are the stand-ins; ``more`` are set too."""
        return swapped(reader, **self.stand_ins, **more)
