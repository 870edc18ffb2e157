# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""The draft window's arithmetic with all of its options, for the host and for plain torch.

``crop.py`` cuts the plain window. Here a sink (the first ``S`` tokens stay visible) and a length gate come on top::

    sink    = ceil(S / b) * b
    removed = start - sink   if start > sink and s + K - max_lookahead >= min_context   else 0
    length  = s - removed
    column c of a group reads column c (c < sink / b_g) or c + removed / b_g of the full block table

How far back a forward reaches depends on whose W it has to keep, see :class:`Rows`::

    NEWEST   reach = max(W - K, q)
    EVERY    reach = W - K + q - 1
    MASKED   reach = W + q - 1

W may be smaller for some requests: bounds and columns are those of the largest, so nothing else changes.

Cutting ``removed`` tokens out of the middle says everything: both edges are multiples of ``b``, so every group can cut
at the same token, and a request from which nothing is removed keeps its lengths and its columns. The gate looks at
``s + K``, which all steps of a proposal share. So does the start, but not with a mask: then every step moves on, since
each row sees its own W whatever was removed.

Needs torch only. The fused Triton launch in ``kernels.py`` computes the same on the device.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
import torch

from .crop import IntArray, WindowCrop, _clip


class Rows(Enum):
    """Which query rows of one forward keep their window."""

    NEWEST = "the newest keeps W - K tokens, the others at least the rows before them"
    EVERY = "each keeps W - K tokens: a draft of several layers caches what it computed for all of them"
    MASKED = "each sees exactly W tokens, because the attention backend masks what the crop leaves"


@dataclass(frozen=True, kw_only=True)
class WindowGeometry(WindowCrop):
    """A :class:`WindowCrop` that may spare a sink, and requests below a length.

    Attributes:
        sink: S, first tokens that stay visible.
        min_context: requests shorter than this are not windowed; look-ahead beyond ``s`` does not count.
        rows: which query rows keep their window.
    """

    sink: int = 0
    min_context: int = 0
    rows: Rows = Rows.NEWEST

    @cached_property
    def aligned_sink(self) -> int:
        return -(-self.sink // self.alignment) * self.alignment

    def gate(self, lookahead: int) -> int:
        """Smallest ``s`` that the length gate lets be windowed; 0 without a gate."""
        return self.min_context + self.max_lookahead - lookahead if self.min_context else 0

    def longest(self, queries: int, lookahead: int = 0) -> int:
        """Upper bound of the windowed lengths of a forward with at most ``queries`` query tokens per request."""
        cropped = self.reach(queries, lookahead) + self.alignment - 1 + self.aligned_sink
        return min(max(cropped, self.gate(lookahead) - 1) + self.max_rejected, self.limit)

    def reach(self, queries: Any, lookahead: int, windows: Any = None) -> Any:
        """How far back from ``s`` a request reads before rounding. An int for ints, an array where one is given.

        Args:
            windows: W of each request, [num_reqs], where they differ.
        """
        room = self.window if windows is None else windows
        if self.rows is not Rows.MASKED:
            room = room - lookahead
        if self.rows is Rows.NEWEST:
            many, other = (queries, room) if isinstance(room, int) else (room, queries)
            return max(many, other) if isinstance(many, int) else many.clip(min=other)
        # A padding row's queries may be anything.
        return room - 1 + (queries if isinstance(queries, int) else queries.clip(min=0))

    def first_cropped(self, *, queries: int, lookahead: int = 0) -> int:
        """Smallest ``s`` that the window changes; shorter requests keep their lengths and tables bit for bit."""
        reach = self.reach(queries, lookahead)
        # Above `limit` nothing is removed yet, but the length is clamped.
        return min(max(reach + self.aligned_sink + self.alignment, self.gate(lookahead)), self.limit + 1)

    def lengths(
        self, seq_lens: IntArray, *, queries: int | IntArray, lookahead: int = 0, windows: IntArray | None = None
    ) -> tuple[IntArray, IntArray]:
        """As without the options; ``(removed, length)``: tokens taken out behind the sink, and what is left to read.

        Args:
            windows: W of each request, [num_reqs], where they differ.
        """
        start, length = self.cut(seq_lens, self.reach(queries, lookahead, windows))
        if not (self.sink or self.min_context):
            return start, length
        # [num_reqs]
        seq_lens = start + length
        cropped = (start > self.aligned_sink) & (seq_lens >= self.gate(lookahead))
        removed = (start - self.aligned_sink) * cropped
        return removed, seq_lens - removed

    def host_bound(
        self, upper_bound: np.ndarray, *, max_rejected: int | np.ndarray, queries: int | np.ndarray, lookahead: int = 0
    ) -> np.ndarray:
        """As without the options; the teeth begin behind the sink, and the length gate is one more edge."""
        if not (self.sink or self.min_context):
            return super().host_bound(upper_bound, max_rejected=max_rejected, queries=queries, lookahead=lookahead)
        upper, lower = (_clip(bound, 0, self.limit) for bound in (upper_bound, upper_bound - max_rejected))
        reach, gate = self.reach(queries, lookahead) + self.aligned_sink, self.gate(lookahead)
        past_edge = (upper - reach) % self.alignment
        tooth = np.where(past_edge < upper - lower, self.alignment - 1, past_edge)
        bound = np.where(upper < np.maximum(reach + self.alignment, gate), upper, reach + tooth)
        across = (lower < gate) & (upper >= gate)
        return np.where(across, np.maximum(bound, gate - 1), bound)

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
        cropped = super().crop_block_table(group, full_table, removed, length, lookahead=lookahead)
        if self.aligned_sink:
            of_sink = slice(min(self.aligned_sink // self.block_sizes[group], cropped.shape[1]))
            _, longer_than = self._column_constants(group, lookahead, full_table.device)
            cropped[:, of_sink] = full_table[:, of_sink] * (length.unsqueeze(1) > longer_than[of_sink])
        return cropped
