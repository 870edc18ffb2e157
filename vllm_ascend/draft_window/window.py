# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""One draft's window at work: in which tensors, and with which bounds, a metadata build happens.

A seam hands upstream's own build to :meth:`WindowedDraft.build`. Nothing here knows a class of upstream's.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from .auto import WindowChooser
from .config import DraftWindow
from .geometry import Rows, WindowGeometry
from .groups import DraftGroups
from .inputs import Bind, BlockTables, InputBuffers, WindowedInputs

Metadata = TypeVar("Metadata")
Build = Callable[[torch.Tensor | None], Metadata]
"""Upstream's build, given the host bound."""


def rows_kept(window: DraftWindow, *, layers: int, can_mask: bool) -> Rows:
    """Which query rows keep their window, of a draft of so many attention layers: all, by a mask, where there is one.

    Args:
        can_mask: the attention backend shows each row its own window; nothing else may be wanted of it.
    """
    if can_mask and not (window.sink_size or window.min_context or window.candidates):
        return Rows.MASKED
    # A parallel drafter's keys and values come from the target's states, not from its own attention.
    return Rows.EVERY if window.max_lookahead and layers > 1 else Rows.NEWEST


class Reader(Protocol):
    """Whose attributes a build reads: a speculator."""

    input_buffers: InputBuffers
    block_tables: BlockTables
    draft_max_seq_len: int


class Counters(Protocol):
    """Whoever counts what the window did; see :class:`.counters.DraftWindowCounters`."""

    def record(self, forwards: int = 1, removed: np.ndarray | None = None) -> None: ...
    def watch(self, chooser: WindowChooser) -> None: ...


class WindowedDraft:
    """The window of one draft model.

    Attributes:
        window: what is in force.
        geometry: the arithmetic.
        inputs: the windowed tensors.
        chooser: draws each request's size, where there are several.
        captured: FULL graphs read the windowed tensors, so these must be fresh at every replay.
        capturing: graphs are being captured, on dummy batches.
    """

    captured = False
    capturing = False

    def __init__(
        self,
        window: DraftWindow,
        groups: DraftGroups,
        input_buffers: InputBuffers,
        block_tables: BlockTables,
        *,
        max_model_len: int,
        queries: int,
        max_queries: int,
        extra_queries: int = 0,
        rows: Rows = Rows.NEWEST,
        max_rejected: int,
        host_decides: bool = False,
        counters: Counters | None = None,
        fused: bool = True,
        bind: Bind | None = None,
    ) -> None:
        """Allocate the windowed tensors.

        Args:
            queries: query tokens per request of a forward whose requests all bring as many.
            max_queries: most query tokens of one request in any forward.
            rows: which query rows of a forward keep their window.
            extra_queries: tokens that a proposal's first forward has beyond the target's.
            max_rejected: most tokens by which host lengths can be ahead of the device's.
            host_decides: the start follows from host lengths, so the window has room for ``max_rejected`` tokens more.
            fused: see :class:`.inputs.WindowedInputs`, also for ``bind``.
        """
        self.window = window
        self.geometry = WindowGeometry(
            window=window.size,
            sink=window.sink_size,
            min_context=window.min_context,
            block_sizes=groups.block_sizes,
            full_columns=groups.full_columns,
            max_model_len=max_model_len,
            max_queries=max_queries,
            max_lookahead=window.max_lookahead,
            max_rejected=max_rejected if host_decides else 0,
            rows=rows,
        )
        smallest = self.geometry
        self.chooser: WindowChooser | None = None
        if window.start is not None:
            smallest = replace(self.geometry, window=window.candidates[0])
            self.chooser = WindowChooser(
                window.candidates,
                start=window.start,
                max_num_reqs=len(input_buffers.seq_lens),
                max_model_len=max_model_len,
                device=input_buffers.seq_lens.device,
                fused=fused,
                bind=bind,
            )
            if counters is not None:
                counters.watch(self.chooser)
        windows = None if self.chooser is None else self.chooser.windows
        self.inputs = WindowedInputs(
            self.geometry, input_buffers, block_tables, groups.group_ids, fused=fused, bind=bind, windows=windows
        )
        self._queries, self._extra_queries = queries, extra_queries
        self._max_rejected, self._counters = max_rejected, counters
        # Requests with more query tokens, and later forwards, are cropped from larger lengths on. The host stops
        # counting at the limit; a device length that it stands for may lie past the block table.
        shortest_cropped = smallest.first_cropped(queries=queries, lookahead=window.max_lookahead)
        self._shortest_cropped = min(shortest_cropped, self.geometry.limit)

    def may_crop(self, max_seq_len: int) -> bool:
        """Whether the window may remove something from a batch whose lengths do not exceed ``max_seq_len``."""
        return max_seq_len >= self._shortest_cropped

    def may_hide(self, max_seq_len: int) -> bool:
        """Whether it may hide something: a mask does before a whole block can be cropped, in the draft's own builds."""
        masked = self.geometry.rows is Rows.MASKED
        return max_seq_len > self.window.size if masked else self.may_crop(max_seq_len)

    def lookahead(self, step: int) -> int:
        """K of the forward ``step`` of a proposal: all its forwards share one start."""
        first = self.window.max_lookahead
        return max(first - max(step - self._extra_queries, 0), 0) if first else 0

    def build(
        self,
        build: Build[Metadata],
        reader: Reader,
        upper_bound: torch.Tensor | None,
        num_reqs: int,
        num_rows: int,
        step: int = 0,
        query_start_loc: np.ndarray | None = None,
        replayed: bool = False,
    ) -> Metadata:
        """Run upstream's build: on the windowed tensors, or on the originals where nobody could tell the difference.

        Args:
            upper_bound: host bound without ``step``, which the build adds, int32 [>= num_reqs].
            num_rows: requests and the padding rows behind them.
            step: tokens by which the build's lengths exceed those of the target's forward.
            query_start_loc: cumulative query tokens, int32 [num_reqs + 1], where a first forward's are given.
            replayed: a FULL graph may be replayed after the build, and reads the windowed tensors.
        """
        crops = self.may_crop(reader.draft_max_seq_len)
        if not (crops or replayed):
            return build(upper_bound)
        queries = self._queries if step or query_start_loc is None else np.diff(query_start_loc)
        lookahead = self.lookahead(step)

        def refresh() -> None:
            uniform = queries if isinstance(queries, int) else None
            self.inputs.refresh(num_reqs=num_reqs, num_rows=num_rows, queries=uniform, lookahead=lookahead)

        def build_windowed() -> Metadata:
            bound = upper_bound
            if crops and bound is not None:
                # [num_reqs]; upstream counts the extra tokens in from the second forward on only.
                full = bound[:num_reqs].numpy() + max(step, self._extra_queries)
                windowed = self.geometry.host_bound(
                    full, max_rejected=self._max_rejected, queries=queries, lookahead=lookahead
                )
                bound = torch.from_numpy(windowed - step)
            longest = queries if isinstance(queries, int) else int(queries.max())
            max_seq_len = min(reader.draft_max_seq_len, self.geometry.longest(longest, lookahead))
            with self.inputs.in_place_of_originals(reader, draft_max_seq_len=max_seq_len):
                return build(bound)

        return self.run(refresh, build_windowed)

    def run(self, refresh: Callable[[], None], build: Callable[[], Any]) -> Any:
        """When to launch, and when to build: now."""
        refresh()
        return build()

    def refresh(self, num_reqs: int, *, step: int = 0) -> None:
        """The launch alone, for a graph that records it. Rows without a request have length 0 there."""
        self.inputs.refresh(num_reqs=num_reqs, num_rows=num_reqs, queries=self._queries, lookahead=self.lookahead(step))

    def recorded(self, forward: Callable[..., None]) -> Callable[..., None]:
        """What a FULL graph records as its forward."""
        return forward

    def count(self, upper_bound: np.ndarray, queries: np.ndarray, num_forwards: int) -> None:
        """Count one proposal by what the host knows of its requests, whichever way its forwards get their metadata.

        Args:
            upper_bound: lengths of the target's forward, as the host bounds them, int32 [num_reqs].
            queries: query tokens of the target's forward, int32 [num_reqs].
            num_forwards: draft forwards of this proposal.
        """
        if self._counters is None or not num_forwards:
            return
        record, later = self._counters.record, num_forwards - 1
        if not self.window.max_lookahead:  # the only forward, behind the target's tokens
            return record(1, self._removed(upper_bound + self._queries, self._queries, lookahead=0))
        first = upper_bound + self._extra_queries
        record(1, self._removed(first, queries + self._extra_queries, lookahead=self.lookahead(0)))
        if later:  # what is removed stays the same over all of them
            step = self._extra_queries + 1
            record(later, self._removed(upper_bound + step, self._queries, lookahead=self.lookahead(step)))

    def _removed(self, lengths: np.ndarray, queries: int | np.ndarray, *, lookahead: int) -> np.ndarray | None:
        """Tokens that no forward with lengths up to these reads, [num_reqs]; ``None`` for none at all."""
        if not self.may_crop(int(lengths.max(initial=0))):
            return None
        bound = self.geometry.host_bound(lengths, max_rejected=self._max_rejected, queries=queries, lookahead=lookahead)
        return np.minimum(lengths, self.geometry.limit) - bound
