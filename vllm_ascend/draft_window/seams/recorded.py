# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""What FULL graphs and fused loops spare the host: a build that a replay does not need, a launch that it contains.

Only vLLM on CUDA has it: builders that merely refer to their inputs (FlashAttention, 0.26 to 0.31), a refresh of
metadata that upstream records (0.32 and later), and all later forwards as one loop (0.28 and later). Without this
module the host launches and builds before each replay.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch

from ..inputs import swapped
from ..window import WindowedDraft
from . import vllm as versions
from .autoregressive import TargetDependentSeam
from .parallel import ParallelSeam
from .speculator import Metadata, SpeculatorSeam


class DeferredBuild:
    """Metadata of a forward that may not run: where its graph is replayed instead, nothing is built at all."""

    __slots__ = ("build",)

    def __init__(self, build: Callable[[], Metadata]) -> None:
        self.build = build


def built(metadata: Metadata | DeferredBuild) -> Metadata:
    """What a forward reads."""
    return metadata.build() if isinstance(metadata, DeferredBuild) else metadata


class DeferringWindow(WindowedDraft):
    """A window whose builds wait for the forward that needs them."""

    # Upstream builds before every replay, for builders that keep a state. Where they merely refer to the windowed
    # tensors, which are fresh, a graph that is replayed needs no build.
    defers_builds = False

    def run(self, refresh: Callable[[], None], build: Callable[[], Any]) -> Any:
        if not self.defers_builds:
            return super().run(refresh, build)
        refresh()
        return DeferredBuild(build)


class RecordedWindow(DeferringWindow):
    """One whose graphs contain its launch, which waits too."""

    def run(self, refresh: Callable[[], None], build: Callable[[], Any]) -> Any:
        now = partial(WindowedDraft.run, self, refresh, build)
        return DeferredBuild(now) if self.defers_builds else now()

    def recorded(self, forward: Callable[..., None]) -> Callable[..., None]:
        """With the launch at its head."""
        if not self.defers_builds:
            return forward

        def refresh_and_forward(num_reqs: int, *args: Any, **kwargs: Any) -> None:
            self.refresh(num_reqs, step=0)
            forward(num_reqs, *args, **kwargs)

        return refresh_and_forward


class DeferringSeam(SpeculatorSeam):
    """Has a window whose builds may wait; who forwards, builds what waited."""

    window_class: type[DeferringWindow]

    def make_window(self, *args: Any, **kwargs: Any) -> WindowedDraft:
        window = self.window_class(*args, **kwargs)
        # From 0.32 on upstream leaves builds out by itself.
        window.defers_builds = not versions.records_refresh() and builds_only_refer(self.attn_groups)
        return window


class RecordedParallelSeam(DeferringSeam, ParallelSeam):
    """In front of vLLM's own DFlash and DSpark."""

    window_class = RecordedWindow

    def _generate_draft(self, num_reqs: int, num_tokens: int, attn_metadata: Any, *args: Any, **kwargs: Any) -> None:
        super()._generate_draft(num_reqs, num_tokens, built(attn_metadata), *args, **kwargs)

    def _update_draft_decode_metadata(self, attn_metadata: dict[str, Any], num_reqs: int) -> None:
        """vLLM 0.32 and later: recorded into the FULL graph, with the launch."""
        if self.window is not None:
            _refresh(self, self.window, num_reqs, step=0)
        super()._update_draft_decode_metadata(attn_metadata, num_reqs)


class RecordedTargetDependentSeam(DeferringSeam, TargetDependentSeam):
    """In front of vLLM's own EAGLE, EAGLE3 and MTP. A graph of one later forward is replayed for all of them."""

    window_class = DeferringWindow
    # The forward that comes next, within a loop over forwards that may be recorded as one graph.
    fused_step: int | None = None

    def build_first_step(
        self, batch: InputBatch, num_tokens: int, desc: BatchExecutionDescriptor | None = None
    ) -> Metadata:
        metadata = super().build_first_step(batch, num_tokens, desc)
        return built(metadata) if desc is None else metadata

    def _generate_fused_drafts(
        self, num_reqs: int, num_tokens: int, attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        """vLLM 0.28 and later: all later forwards in one loop, where a FULL graph may hold all of them."""
        if self.window is not None:
            _refresh(self, self.window, num_reqs, step=1)
        with swapped(self, fused_step=1):
            super()._generate_fused_drafts(num_reqs, num_tokens, built(attn_metadata), *args, **kwargs)

    def _generate_draft(self, num_reqs: int, num_tokens: int, attn_metadata: Any, *args: Any, **kwargs: Any) -> None:
        """One later forward. It advances the lengths; within the loop no build follows that would window them."""
        super()._generate_draft(num_reqs, num_tokens, built(attn_metadata), *args, **kwargs)
        if self.fused_step is not None and self.window is not None:
            self.fused_step += 1
            if self.fused_step < self.num_speculative_steps:
                _refresh(self, self.window, num_reqs, step=self.fused_step)


def builds_only_refer(attn_groups: Any) -> bool:
    """Let the draft's builders merely refer to lengths and tables, so that these may be filled after the build.

    FlashAttention's computes an ahead-of-time schedule from lengths, which spreads long contexts over the device. A
    windowed draft has none, and vLLM drops the schedule too for a draft with a sliding window of its own. False, and
    nothing is changed, where some builder does more.
    """
    builders = [group.get_metadata_builder() for groups in attn_groups for group in groups]
    only_refer = all(map(versions.refers_only, builders))
    for builder in builders if only_refer else ():
        builder.aot_schedule = False
    return only_refer


def _refresh(speculator: Any, window: WindowedDraft, num_reqs: int, *, step: int) -> None:
    """The launch, and what backends with blocks smaller than the table's make of it."""
    window.refresh(num_reqs, step=step)
    for group_id, table in zip(window.inputs.group_ids, window.inputs.block_tables, strict=True):
        for group in speculator.attn_groups[group_id]:
            if versions.splits_blocks(group):
                group.map_to_kernel_block_table(table[:num_reqs])
