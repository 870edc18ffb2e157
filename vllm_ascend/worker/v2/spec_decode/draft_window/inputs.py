# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""Persistent windowed lengths and block tables, swapped in around a metadata build.

The originals are never written: the target reads the same block tables, a FULL graph on Ascend builds twice per step,
and slot mappings keep coming from the full table.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from .geometry import WindowGeometry


@contextmanager
def swapped(*swaps: tuple[Any, str, Any]) -> Iterator[None]:
    """Set each ``(owner, attribute, value)`` for the body, and set the old values back whatever the body raises."""
    old_values = [getattr(owner, name) for owner, name, _ in swaps]
    try:
        for owner, name, value in swaps:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), old in zip(swaps, old_values, strict=True):
            setattr(owner, name, old)


class WindowedInputs:
    """Windowed twins of a draft's lengths and block tables; allocated once, so that graphs can keep their addresses.

    Attributes:
        geometry: the arithmetic in force.
        group_ids: KV cache groups that hold draft layers.
        seq_lens: windowed lengths, int32, [max_num_reqs].
        block_tables: cropped tables, one per draft group, int32, [max_num_reqs, columns].
    """

    def __init__(
        self,
        geometry: WindowGeometry,
        input_buffers: Any,
        block_tables: Any,
        group_ids: Sequence[int],
        *,
        fused: bool = True,
    ) -> None:
        """Bind to the draft's ``InputBuffers`` and the runner's ``BlockTables``, whose tensors are persistent.

        Args:
            group_ids: KV cache groups that hold draft layers, in the order of ``geometry.block_sizes``.
            fused: use the fused launch; otherwise its plain-torch twin.
        """
        self.geometry = geometry
        self.group_ids = tuple(group_ids)
        # [max_num_reqs]
        self._full_seq_lens: torch.Tensor = input_buffers.seq_lens
        # num_groups x [max_num_reqs, full_columns]
        self._full_tables: list[torch.Tensor] = [block_tables.input_block_tables[i] for i in group_ids]
        # [max_num_reqs]
        self.seq_lens = torch.zeros_like(self._full_seq_lens)
        # num_groups x [max_num_reqs, columns]
        self.block_tables = [
            table.new_zeros(table.shape[0], columns)
            for table, columns in zip(self._full_tables, geometry.columns, strict=True)
        ]
        self._fused = fused
        # Groups without draft layers keep their table: the build indexes the list by KV cache group.
        tables = list(block_tables.input_block_tables)
        for group_id, table in zip(group_ids, self.block_tables, strict=True):
            tables[group_id] = table
        self._swaps = ((input_buffers, "seq_lens", self.seq_lens), (block_tables, "input_block_tables", tables))

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.seq_lens, *self.block_tables))

    def refresh(self, *, num_reqs: int, num_rows: int, queries: int, lookahead: int = 0) -> None:
        """Window the first ``num_rows`` rows into the persistent tensors; rows from ``num_reqs`` on become empty."""
        if num_rows == 0:
            return
        if self._fused:
            from .kernels import launch_window

            launch_window(
                self.geometry,
                seq_lens=self._full_seq_lens,
                full_tables=self._full_tables,
                out_seq_lens=self.seq_lens,
                out_tables=self.block_tables,
                num_reqs=num_reqs,
                num_rows=num_rows,
                queries=queries,
                lookahead=lookahead,
            )
            return
        # [num_rows]
        live = self._full_seq_lens[:num_rows].clone()
        live[num_reqs:] = 0
        removed, length = self.geometry.lengths(live, queries=queries, lookahead=lookahead)
        self.seq_lens[:num_rows].copy_(length)
        for group, (full, out) in enumerate(zip(self._full_tables, self.block_tables, strict=True)):
            cropped = self.geometry.crop_block_table(group, full[:num_rows], removed, length, lookahead=lookahead)
            out[:num_rows].copy_(cropped)

    def in_place_of_originals(self, *more: tuple[Any, str, Any]) -> AbstractContextManager[None]:
        """A build inside reads the twins; ``more`` are further ``(owner, attribute, value)`` to set meanwhile."""
        return swapped(*self._swaps, *more)
