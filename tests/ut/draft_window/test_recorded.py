# SPDX-License-Identifier: Apache-2.0
"""Builds that wait for their forward, and a launch that a FULL graph records. The backend that allows it needs a GPU.

So the speculator here is a stand-in that does what upstream's does with metadata, over the real seam and window.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from tests import oracle
from tests.oracle import Case
from tests.vllm_inputs import Batch
from vllm_ascend.draft_window.config import DraftWindow
from vllm_ascend.draft_window.groups import DraftGroups
from vllm_ascend.draft_window.seams.recorded import (
    DeferringWindow,
    RecordedParallelSeam,
    RecordedTargetDependentSeam,
    RecordedWindow,
    builds_only_refer,
    built,
)

CASE = Case(window=64, block_sizes=(16,), full_columns=(64,), max_model_len=1024, queries=7)


class FlashAttentionMetadataBuilder:
    aot_schedule = True


class OtherMetadataBuilder:
    aot_schedule = True


def groups(builder):
    return [[], [SimpleNamespace(get_metadata_builder=lambda: builder)]]


class Graphs:
    """A manager of one graph for 4 requests: it keeps the forward and the metadata that it was captured with."""

    def needs_capture(self):
        return True

    def capture(self, forward_fn, input_buffers, block_tables, max_model_len):
        self.graph = lambda: forward_fn(4, 28, {"layer": input_buffers.seq_lens[:4]}, None)
        self.planned_for = max_model_len
        self.graph()

    def run_fullgraph(self, desc):
        self.graph()


class Upstream:
    """Records, per forward, the lengths that its metadata leads to, and the largest that a build was told."""

    def __init__(self, batch: Batch):
        self.input_buffers, self.block_tables = batch.input_buffers, batch.block_tables
        self.max_model_len = self.draft_max_seq_len = 1024
        self.read: list[list[int] | None] = []
        self.builds: list[int] = []

    def _build_draft_attn_metadata(self, num_reqs, num_reqs_padded, num_tokens_padded, **_):
        self.builds.append(self.draft_max_seq_len)
        return {"layer": self.input_buffers.seq_lens[:num_reqs_padded]}

    def _generate_draft(self, num_reqs, num_tokens, attn_metadata, slot_mappings):
        self.read.append(None if attn_metadata is None else attn_metadata["layer"].tolist())

    def capture(self):
        self.query_cudagraph_manager.capture(
            self._generate_draft, self.input_buffers, self.block_tables, max_model_len=self.max_model_len
        )


def make_window(window_class, batch: Batch, *, method, queries, max_queries, lookahead):
    options = dict(size=64, sink_size=0, min_context=0, queries_per_request=queries, max_lookahead=lookahead)
    window = window_class(
        DraftWindow(method=method, **options),
        DraftGroups(group_ids=(0,), block_sizes=(16,), full_columns=(64,), native_window=None),
        batch.input_buffers,
        batch.block_tables,
        max_model_len=1024,
        queries=queries,
        max_queries=max_queries,
        max_rejected=14,
        fused=False,
    )
    window.defers_builds = True
    return window


class Speculator(RecordedParallelSeam, Upstream):
    def __init__(self, batch: Batch):
        Upstream.__init__(self, batch)
        self.window = make_window(RecordedWindow, batch, method="dspark", queries=7, max_queries=7, lookahead=0)
        self.query_cudagraph_manager = Graphs()


class TokenByToken(RecordedTargetDependentSeam, Upstream):
    """K = 4: a first forward over 5 tokens of each request, then three of one."""

    def __init__(self, batch: Batch):
        Upstream.__init__(self, batch)
        self.window = make_window(DeferringWindow, batch, method="eagle3", queries=1, max_queries=1024, lookahead=3)

    def first(self, seq_lens, desc):
        """The first forward, by a graph or without."""
        starts = np.arange(len(seq_lens) + 1, dtype=np.int32) * 5
        batch = SimpleNamespace(
            num_reqs=len(seq_lens),
            seq_lens_cpu_upper_bound=torch.tensor(seq_lens, dtype=torch.int32),
            query_start_loc_np=starts,
        )
        return self.build_first_step(batch, 5 * len(seq_lens), desc)


def speculator_with(seq_lens):
    batch = Batch(CASE, torch.tensor(seq_lens, dtype=torch.int32).numpy(), fused=False, max_num_reqs=4)
    return Speculator(batch), batch


def windowed(seq_lens):
    return [oracle.windowed_length(CASE, s) for s in seq_lens]


def test_only_flash_attention_may_build_before_the_windowed_tensors_are_written():
    builder, other = FlashAttentionMetadataBuilder(), OtherMetadataBuilder()
    assert builds_only_refer(groups(builder)) and not builder.aot_schedule
    assert not builds_only_refer(groups(other)) and other.aot_schedule
    assert not builds_only_refer(groups(object()))


def test_build_waits_for_its_forward():
    speculator, _ = speculator_with([1000, 50])
    metadata = speculator._build_draft_attn_metadata(2, 4, 28)
    assert not speculator.window.inputs.seq_lens.any() and not speculator.builds
    speculator._generate_draft(2, 28, metadata, None)
    assert speculator.read == [windowed([1000, 50, 0, 0])]
    assert speculator.builds == [speculator.window.geometry.longest(7, 0)]


def test_build_from_which_nothing_is_cut_reads_the_originals():
    speculator, _ = speculator_with([50, 40])
    speculator.draft_max_seq_len = 57
    speculator._generate_draft(2, 14, speculator._build_draft_attn_metadata(2, 2, 14), None)
    assert speculator.read == [[50, 40]] and speculator.builds == [57]
    assert not speculator.window.inputs.seq_lens.any()


def test_forward_without_attention_has_nothing_to_build():
    """Memory profiling, before there is anything to attend to."""
    speculator, _ = speculator_with([1000, 50])
    speculator._generate_draft(2, 14, None, None)
    assert speculator.read == [None]
    assert not speculator.window.inputs.seq_lens.any()


def test_replay_follows_batches_that_shrink_and_grow_without_a_build():
    speculator, batch = speculator_with([1000, 50])
    manager = speculator.query_cudagraph_manager
    speculator.capture()
    assert speculator.query_cudagraph_manager is manager, "the stand-in is gone after the capture"
    assert manager.planned_for == speculator.window.geometry.max_length
    for seq_lens in ([1001, 51], [333], [334, 900, 77, 5], [40, 30]):
        batch.set_lengths(torch.tensor(seq_lens, dtype=torch.int32).numpy())
        speculator.draft_max_seq_len = max(seq_lens)
        speculator._build_draft_attn_metadata(len(seq_lens), 4, 28)
        manager.run_fullgraph(None)
        assert speculator.read[-1] == windowed(seq_lens + [0] * (4 - len(seq_lens)))
    assert not speculator.builds


def test_replayed_forwards_of_a_proposal_find_fresh_lengths_without_a_build(monkeypatch):
    monkeypatch.setattr("vllm_ascend.draft_window.seams.autoregressive.builds_by_descriptor", lambda: False)
    case = replace(CASE, queries=5, lookahead=3)
    for seq_lens in ([1000, 50], [333], [334, 900, 77, 5], [40, 30]):
        lengths = torch.tensor(seq_lens, dtype=torch.int32)
        batch = Batch(case, lengths.numpy(), fused=False, max_num_reqs=4)
        speculator = TokenByToken(batch)
        speculator.window.captured, reads = True, speculator.window.inputs.seq_lens
        desc = SimpleNamespace(num_reqs=4, num_tokens=20)
        speculator.first(seq_lens, desc)
        empty = [0] * (4 - len(seq_lens))
        assert reads.tolist() == [oracle.windowed_length(case, s) for s in seq_lens] + empty
        for step in (1, 2, 3):
            batch.set_lengths((lengths + step).numpy())
            waiting = speculator._build_draft_attn_metadata(len(seq_lens), 4, 4, lengths, step)
            later = replace(case, queries=1, lookahead=3 - step)
            assert reads.tolist() == [oracle.windowed_length(later, s + step) for s in seq_lens] + empty
        assert not speculator.builds
        # Without a graph a forward gets what its graph would have read.
        assert built(waiting)["layer"].tolist() == reads.tolist() and len(speculator.builds) == 1
        assert speculator.first(seq_lens, None)["layer"].data_ptr() == reads.data_ptr()
