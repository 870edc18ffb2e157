# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""Persistent windowed lengths and block tables, swapped in around a metadata build.

The originals are never written: the target reads the same block tables, a FULL graph on Ascend builds twice per step,
and slot mappings keep coming from the full table.
"""

from collections.abc import Sequence
from typing import Any

import torch

from .geometry import WindowGeometry


class swapped:  # lower case like contextlib.suppress
    """Context manager: set each ``(owner, attribute, value)``, and set the old values back whatever the body raises.

    A class instead of a generator, because it stands in the host-bound part of every step.
    """

    __slots__ = ("_old", "_swaps")

    def __init__(self, *swaps: tuple[Any, str, Any]) -> None:
        self._swaps = swaps
        self._old: list[Any] = []

    def __enter__(self) -> None:
        self._old = [getattr(owner, name) for owner, name, _ in self._swaps]
        for owner, name, value in self._swaps:
            setattr(owner, name, value)

    def __exit__(self, *_: object) -> None:
        for (owner, name, _), old in zip(self._swaps, self._old, strict=True):
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
        # [max_num_reqs + 1]
        query_start_loc: torch.Tensor | None = None,
        fused: bool = True,
    ) -> None:
        """Bind to the draft's ``InputBuffers`` and the runner's ``BlockTables``, whose tensors are persistent.

        Args:
            group_ids: KV cache groups that hold draft layers, in the order of ``geometry.block_sizes``.
            query_start_loc: cumulative query tokens, for drafts whose requests bring different numbers of them.
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
        self._query_start_loc = query_start_loc
        # By whether each request has its own number of query tokens.
        self._launches: dict[bool, Any] = {}
        if fused:
            from .kernels import WindowLaunch

            for per_request in (False, True)[: 1 if query_start_loc is None else 2]:
                self._launches[per_request] = WindowLaunch(
                    geometry,
                    seq_lens=self._full_seq_lens,
                    full_tables=self._full_tables,
                    out_seq_lens=self.seq_lens,
                    out_tables=self.block_tables,
                    query_start_loc=query_start_loc if per_request else None,
                )
        # Groups without draft layers keep their table: the build indexes the list by KV cache group.
        tables = list(block_tables.input_block_tables)
        for group_id, table in zip(group_ids, self.block_tables, strict=True):
            tables[group_id] = table
        self._twins = ((input_buffers, "seq_lens", self.seq_lens), (block_tables, "input_block_tables", tables))
        self._originals = tuple((owner, name, getattr(owner, name)) for owner, name, _ in self._twins)

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
        if self._launches:
            launch = self._launches[queries is None]
            launch(num_reqs=num_reqs, num_rows=num_rows, queries=queries or 0, lookahead=lookahead)
            return
        # [num_rows]
        live = self._full_seq_lens[:num_rows].clone()
        live[num_reqs:] = 0
        per_request = self._query_start_loc[: num_rows + 1].diff() if queries is None else queries  # type: ignore[index]
        removed, length = self.geometry.lengths(live, queries=per_request, lookahead=lookahead)
        self.seq_lens[:num_rows].copy_(length)
        for group, (full, out) in enumerate(zip(self._full_tables, self.block_tables, strict=True)):
            cropped = self.geometry.crop_block_table(group, full[:num_rows], removed, length, lookahead=lookahead)
            out[:num_rows].copy_(cropped)

    def in_place_of_originals(self, *more: tuple[Any, str, Any]) -> swapped:
        """A build inside reads the twins; ``more`` are further ``(owner, attribute, value)`` to set meanwhile."""
        return swapped(*self._twins, *more)

    def originals(self) -> swapped:
        """Inside ``in_place_of_originals``: what runs here sees and advances the originals."""
        return swapped(*self._originals)
