# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""The draft window's arithmetic: the only place where it is written down for the host and for plain torch.

Symbols, as in the design page: ``s`` sequence length that draft attention would read, ``q`` query tokens of this
forward, ``K`` look-ahead (positions beyond ``s`` that later steps of the same proposal read), ``W`` window, ``S`` sink,
``b`` alignment (least common multiple of the draft groups' block sizes), all in tokens. ::

    s       = min(s, limit)
    start   = floor(max(s - max(W - K, q), 0) / b) * b
    sink    = ceil(S / b) * b
    removed = start - sink   if start > sink and s + K - max_lookahead >= min_context   else 0
    length  = s - removed
    column c of a group reads column c (c < sink / b_g) or c + removed / b_g of the full block table

Cutting ``removed`` tokens out of the middle says everything: both edges are multiples of ``b``, so every group can cut
at the same token, and a request from which nothing is removed keeps its lengths and its columns.

Start and gate look at ``s + K``, which all steps of a proposal share: what is removed stays fixed over the steps.

Needs torch only. The fused Triton launch in ``kernels.py`` computes the same on the device.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

IntArray = TypeVar("IntArray", np.ndarray, torch.Tensor)


@dataclass(frozen=True, kw_only=True)
class WindowGeometry:
    """Window, alignment and block-table shape of one draft model.

    Attributes:
        window: W, newest tokens that stay visible.
        block_sizes: tokens per block-table column, one entry per draft KV cache group.
        full_columns: columns of the full block table, one entry per draft KV cache group.
        max_model_len: longest sequence that the engine serves.
        max_queries: most query tokens of one request in one forward.
        max_lookahead: largest K.
        sink: S, first tokens that stay visible.
        min_context: requests shorter than this are not windowed; look-ahead beyond ``s`` does not count.
    """

    window: int
    block_sizes: tuple[int, ...]
    full_columns: tuple[int, ...]
    max_model_len: int
    max_queries: int
    max_lookahead: int = 0
    sink: int = 0
    min_context: int = 0

    @cached_property
    def alignment(self) -> int:
        """b: the groups share one ``seq_lens`` tensor in the metadata build, so they must share one start."""
        return math.lcm(*self.block_sizes)

    @cached_property
    def aligned_sink(self) -> int:
        return -(-self.sink // self.alignment) * self.alignment

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
        cropped = self.reach(queries, lookahead) + self.alignment - 1 + self.aligned_sink
        return min(max(cropped, self.gate(lookahead) - 1), self.limit)

    def gate(self, lookahead: int) -> int:
        """Smallest ``s`` that the length gate lets be windowed; 0 without a gate."""
        return self.min_context + self.max_lookahead - lookahead if self.min_context else 0

    def reach(self, queries: Any, lookahead: int) -> Any:
        """How far back from ``s`` a request reads before rounding: K of the W tokens lie beyond ``s``, every query row
        stays. An int for an int, an array for an array."""
        room = self.window - lookahead
        return max(room, queries) if isinstance(queries, int) else queries.clip(min=room)

    def first_cropped(self, *, queries: int, lookahead: int = 0) -> int:
        """Smallest ``s`` that the window changes; shorter requests keep their lengths and tables bit for bit."""
        reach = self.reach(queries, lookahead)
        # Above `limit` nothing is removed yet, but the length is clamped.
        return min(max(reach + self.aligned_sink + self.alignment, self.gate(lookahead)), self.limit + 1)

    def lengths(self, seq_lens: IntArray, *, queries: int | IntArray, lookahead: int = 0) -> tuple[IntArray, IntArray]:
        """Cut the window for a batch.

        Args:
            seq_lens: s, int32, shape [num_reqs]; 0 marks a padding row.
            queries: q, one number, or int32 of shape [num_reqs].
            lookahead: K.

        Returns:
            ``(removed, length)``, both like ``seq_lens``: tokens taken out behind the sink, and what is left to read.
        """
        reach = self.reach(queries, lookahead)
        # [num_reqs]
        seq_lens = _clip(seq_lens, 0, self.limit)
        start = _round_down(_clip(seq_lens - reach, 0, self.limit), self.alignment)
        if not (self.sink or self.min_context):
            return start, seq_lens - start
        cropped = (start > self.aligned_sink) & (seq_lens >= self.gate(lookahead))
        removed = (start - self.aligned_sink) * cropped
        return removed, seq_lens - removed

    def host_bound(
        self, upper_bound: np.ndarray, *, max_rejected: int | np.ndarray, queries: int | np.ndarray, lookahead: int = 0
    ) -> np.ndarray:
        """Windowed length that no device length in ``[upper_bound - max_rejected, upper_bound]`` exceeds.

        The host counts tokens that the device may have rejected. The windowed length is a sawtooth in ``s``: beyond the
        first crop it rises from ``sink + reach`` to ``sink + reach + b - 1`` and falls back at every block edge, so a
        range that holds an edge holds the peak before it. The length gate is one more edge.

        Args:
            upper_bound: optimistic host lengths, int32, shape [num_reqs], or several mirrors [num_mirrors, num_reqs].
            max_rejected: R, most tokens by which the host can be ahead; 0 where it is exact. One number, or one for
                each mirror, shape [num_mirrors, 1].

        Returns:
            int32, the shape of ``upper_bound``.
        """
        upper = _clip(upper_bound, 0, self.limit)
        lower = _clip(upper_bound - max_rejected, 0, self.limit)
        reach, gate = self.reach(queries, lookahead), self.gate(lookahead)
        past_edge = (upper - reach) % self.alignment
        tooth = np.where(past_edge < upper - lower, self.alignment - 1, past_edge)
        first_cropped = np.maximum(reach + self.aligned_sink + self.alignment, gate)
        bound = np.where(upper < first_cropped, upper, self.aligned_sink + reach + tooth)
        if gate:
            across = (lower < gate) & (upper >= gate)
            bound = np.where(across, np.maximum(bound, gate - 1), bound)
        return bound

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
        """Plain-torch twin of the fused launch: the cropped table of one group, [num_reqs, columns], ids unchanged."""
        size, full_columns = self.block_sizes[group], full_table.shape[1]
        # [columns]
        column, longer_than = self._column_constants(group, lookahead, full_table.device)
        # [num_reqs, 1]
        shift = _whole_blocks(removed, size).unsqueeze(1)
        if self.aligned_sink:
            shift = shift * (column >= self.aligned_sink // size)
        # [num_reqs, columns]
        source = column + shift
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


def _round_down(tokens: IntArray, size: int) -> IntArray:
    """``tokens // size * size``."""
    return tokens & -size if size & (size - 1) == 0 else tokens // size * size
