# SPDX-License-Identifier: Apache-2.0
"""Builds that wait for their forward, and a launch that a FULL graph records. The backend that allows it needs a GPU.

So the speculator here is a stand-in that does what upstream's does with metadata, over the real mixin and twins.
"""

from types import SimpleNamespace

import torch

from tests import oracle
from tests.oracle import Case
from tests.vllm_inputs import Batch
from vllm_ascend.draft_window.groups import let_builds_only_refer
from vllm_ascend.draft_window.parallel import ParallelDraftWindow

CASE = Case(window=64, block_sizes=(16,), full_columns=(64,), max_model_len=1024, queries=7)


class FlashAttentionMetadataBuilder:
    aot_schedule = True


class OtherMetadataBuilder:
    aot_schedule = True


def groups(builder):
    return [[], [SimpleNamespace(get_metadata_builder=lambda: builder)]]


class Upstream:
    """Records, per forward, the lengths that its metadata leads to, and the largest that a build was told."""

    def __init__(self):
        self.read: list[list[int] | None] = []
        self.builds: list[int] = []

    def _build_draft_attn_metadata(self, num_reqs, num_reqs_padded, num_tokens_padded, **_):
        self.builds.append(self.draft_max_seq_len)
        return {"layer": self.input_buffers.seq_lens[:num_reqs_padded]}

    def _generate_draft(self, num_reqs, num_tokens, attn_metadata, slot_mappings):
        self.read.append(None if attn_metadata is None else attn_metadata["layer"].tolist())

    def capture(self):
        self.graph_metadata = {"layer": self.input_buffers.seq_lens[:4]}
        self.replay()

    def replay(self):
        self._generate_draft(4, 28, self.graph_metadata, None)


class Speculator(ParallelDraftWindow, Upstream):
    def __init__(self, batch: Batch):
        Upstream.__init__(self)
        self.input_buffers, self.block_tables = batch.input_buffers, batch.block_tables
        self.windowed_inputs = batch.windowed
        self.num_query_per_req, self.max_model_len, self.draft_max_seq_len = 7, 1024, 1024
        self._first_cropped = 80
        self._counters = SimpleNamespace(record=lambda *_: None)
        self.query_cudagraph_manager = SimpleNamespace(needs_capture=lambda: True)
        self._forward_builds = True
        self.attn_groups = groups(FlashAttentionMetadataBuilder())


def speculator_with(seq_lens):
    batch = Batch(CASE, torch.tensor(seq_lens, dtype=torch.int32).numpy(), fused=False, max_num_reqs=4)
    return Speculator(batch), batch


def windowed(seq_lens):
    return [oracle.windowed_length(CASE, s) for s in seq_lens]


def test_only_flash_attention_may_build_before_the_twins_are_written():
    builder, other = FlashAttentionMetadataBuilder(), OtherMetadataBuilder()
    assert let_builds_only_refer(groups(builder)) and not builder.aot_schedule
    assert not let_builds_only_refer(groups(other)) and other.aot_schedule
    assert not let_builds_only_refer(groups(object()))


def test_build_waits_for_its_forward():
    speculator, batch = speculator_with([1000, 50])
    metadata = speculator._build_draft_attn_metadata(2, 4, 28)
    assert not batch.windowed.seq_lens.any() and not speculator.builds
    speculator._generate_draft(2, 28, metadata, None)
    assert speculator.read == [windowed([1000, 50, 0, 0])]
    assert speculator.builds == [batch.windowed.geometry.longest(7, 0)]


def test_build_from_which_nothing_is_cut_reads_the_originals():
    speculator, batch = speculator_with([50, 40])
    speculator.draft_max_seq_len = 57
    speculator._generate_draft(2, 14, speculator._build_draft_attn_metadata(2, 2, 14), None)
    assert speculator.read == [[50, 40]] and speculator.builds == [57]
    assert not batch.windowed.seq_lens.any()


def test_forward_without_attention_has_nothing_to_build():
    """Memory profiling, before there is anything to attend to."""
    speculator, batch = speculator_with([1000, 50])
    speculator._generate_draft(2, 14, None, None)
    assert speculator.read == [None]
    assert not batch.windowed.seq_lens.any()


def test_replay_follows_batches_that_shrink_and_grow_without_a_build():
    speculator, batch = speculator_with([1000, 50])
    speculator.capture()
    for seq_lens in ([1001, 51], [333], [334, 900, 77, 5]):
        batch.set_lengths(torch.tensor(seq_lens, dtype=torch.int32).numpy())
        speculator._build_draft_attn_metadata(len(seq_lens), 4, 28)
        speculator._capturing = True  # a replay runs what was recorded while capturing
        speculator.replay()
        speculator._capturing = False
        assert speculator.read[-1] == windowed(seq_lens + [0] * (4 - len(seq_lens)))
    assert not speculator.builds
