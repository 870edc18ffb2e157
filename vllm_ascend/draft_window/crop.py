# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""Where a draft's window begins, and which columns of the block table it leaves.

Symbols: ``s`` sequence length that draft attention would read, ``q`` query tokens of this forward, ``K`` look-ahead
(positions beyond ``s`` that later steps of the same proposal read), ``W`` window, ``b`` alignment (least common
multiple of the draft groups' block sizes), all in tokens. ::

    s      = min(s, limit)
    start  = floor(max(s - max(W - K, q), 0) / b) * b
    length = s - start
    column c of a cropped table holds column c + start / b of the full one

All steps of a proposal share one start, since ``s + K`` is the same for them. Needs torch only.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

IntArray = TypeVar("IntArray", np.ndarray, torch.Tensor)


@dataclass(frozen=True, kw_only=True)
class WindowCrop:
    """Window, alignment and block-table shape of one draft model.

    Attributes:
        window: W, newest tokens that stay visible.
        block_sizes: tokens per block-table column, one entry per draft KV cache group.
        full_columns: columns of the full block table, one entry per draft KV cache group.
        max_model_len: longest sequence that the engine serves.
        max_queries: most query tokens of one request in one forward.
        max_lookahead: largest K.
        max_rejected: most rejected draft tokens that host lengths may count. Where these decide the start, the window
            grows by as many.
    """

    window: int
    block_sizes: tuple[int, ...]
    full_columns: tuple[int, ...]
    max_model_len: int
    max_queries: int
    max_lookahead: int = 0
    max_rejected: int = 0

    @cached_property
    def alignment(self) -> int:
        """b: the groups share one ``seq_lens`` tensor in the metadata build, so they must share one start."""
        return math.lcm(*self.block_sizes)

    @cached_property
    def limit(self) -> int:
        """Longest length that may be read. Near ``max_model_len`` a stock length can run past the block table."""
        return min(self.max_model_len, *(c * b for c, b in zip(self.full_columns, self.block_sizes, strict=True)))

    @cached_property
    def max_length(self) -> int:
        """Upper bound of every windowed length plus its look-ahead."""
        return self.longest(self.max_queries, self.max_lookahead) + self.max_lookahead

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """Columns of the cropped block tables, one entry per draft KV cache group."""
        return tuple(
            min(-(-self.max_length // size), full)
            for size, full in zip(self.block_sizes, self.full_columns, strict=True)
        )

    def longest(self, queries: int, lookahead: int = 0) -> int:
        """Upper bound of the windowed lengths of a forward with at most ``queries`` query tokens per request."""
        return min(self.reach(queries, lookahead) + self.max_rejected + self.alignment - 1, self.limit)

    def reach(self, queries: Any, lookahead: int) -> Any:
        """How far back from ``s`` a request reads: K of the W tokens lie beyond ``s``, and every query row stays."""
        room = self.window - lookahead
        return max(room, queries) if isinstance(queries, int) else queries.clip(min=room)

    def lengths(self, seq_lens: IntArray, *, queries: int | IntArray, lookahead: int = 0) -> tuple[IntArray, IntArray]:
        """Cut the window for a batch.

        Args:
            seq_lens: s, int32, shape [num_reqs]; 0 marks a padding row.
            queries: q, one number, or int32 of shape [num_reqs].
            lookahead: K.

        Returns:
            ``(start, length)``, both like ``seq_lens``: tokens in front of the window, and what is left to read.
        """
        return self.cut(seq_lens, self.reach(queries, lookahead))

    def cut(self, seq_lens: IntArray, reach: Any) -> tuple[IntArray, IntArray]:
        """The same for a known reach."""
        # [num_reqs]
        seq_lens = _clip(seq_lens, 0, self.limit)
        start = _whole_blocks(_clip(seq_lens - reach, 0, self.limit), self.alignment) * self.alignment
        return start, seq_lens - start

    def removed_by_host(self, seq_lens: np.ndarray, *, queries: int | np.ndarray, lookahead: int = 0) -> np.ndarray:
        """Tokens to take out, by host lengths up to ``max_rejected`` ahead: never more than the device's would say.

        Host and device both cut there, so no block edge can come between them.
        """
        removed, _ = self.lengths(seq_lens - self.max_rejected, queries=queries, lookahead=lookahead)
        return removed

    def host_bound(
        self, upper_bound: np.ndarray, *, max_rejected: int | np.ndarray, queries: int | np.ndarray, lookahead: int = 0
    ) -> np.ndarray:
        """Windowed length that no device length in ``[upper_bound - max_rejected, upper_bound]`` exceeds.

        The windowed length rises up to ``reach + b - 1`` and falls back at every block edge: a range with an edge in it
        holds that peak.
        """
        removed, _ = self.lengths(upper_bound - max_rejected, queries=queries, lookahead=lookahead)
        peak = self.reach(queries, lookahead) + self.alignment - 1
        return np.minimum(_clip(upper_bound, 0, self.limit) - removed, peak)

    def crop_block_table(
        self,
        group: int,
        # [num_reqs, full_columns]
        full_table: torch.Tensor,
        # [num_reqs]
        removed: torch.Tensor,
        # [num_reqs]
        length: torch.Tensor,
        *,
        lookahead: int = 0,
    ) -> torch.Tensor:
        """The cropped table of one group, [num_reqs, columns], ids unchanged; 0 where a request reads nothing."""
        size, full_columns = self.block_sizes[group], full_table.shape[1]
        # [columns]
        column, longer_than = self._column_constants(group, lookahead, full_table.device)
        # [num_reqs, columns]
        source = column + _whole_blocks(removed, size).unsqueeze(1)
        real = length.unsqueeze(1) > longer_than
        if lookahead:  # reads of later steps may lie past the table, what is there never does
            real &= source < full_columns
        return full_table.gather(1, source.clip_(max=full_columns - 1)) * real

    def _column_constants(self, group: int, lookahead: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of a group's columns, int64, and the length above which a request needs each, int32; both [columns].

        A request needs a column that its last look-ahead position reaches. A padding row has no look-ahead either: it
        must not point at anything.
        """
        key = (group, lookahead, device)
        if key not in self._constants:
            column = torch.arange(self.columns[group], device=device)
            self._constants[key] = column, (column * self.block_sizes[group] - lookahead).clip(min=0).int()
        return self._constants[key]

    @cached_property
    def _constants(self) -> dict[tuple[int, int, torch.device], tuple[torch.Tensor, torch.Tensor]]:
        return {}


def _clip(values: IntArray, low: Any, high: Any) -> IntArray:
    """``values.clip``; NumPy's method costs three times the two functions, and may change the type of integers."""
    if isinstance(values, np.ndarray):
        return np.minimum(np.maximum(values, low), high)
    return values.clip(low, high)


def _whole_blocks(tokens: IntArray, size: int) -> IntArray:
    """``tokens // size``; a shift costs half of a division, which some devices leave to the host."""
    return tokens >> (size.bit_length() - 1) if size & (size - 1) == 0 else tokens // size
