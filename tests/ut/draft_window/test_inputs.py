# SPDX-License-Identifier: Apache-2.0
"""The windowed tensors on real vLLM buffers: the fused launch, plain torch and the oracle agree bit for bit."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.oracle import Case
from tests.strategies import batches, cases
from tests.vllm_inputs import Batch
from vllm_ascend.draft_window import inputs, kernels

PROPERTY = settings(max_examples=2000, deadline=None)
FUSED = pytest.mark.parametrize("fused", [True, False], ids=["triton", "torch"])
SMALL = Case(window=256, block_sizes=(16,), full_columns=(512,), max_model_len=8192, queries=7)


def check_rows(batch: Batch, seq_lens: np.ndarray) -> None:
    """Every row of the windowed tensors against the oracle."""
    for row, s in enumerate(seq_lens.tolist()):
        assert batch.windowed.seq_lens[row] == oracle.windowed_length(batch.case, s)
        for group, cropped in enumerate(batch.windowed.block_tables):
            full = batch.block_tables.input_block_tables[group][row].numpy()
            oracle.check_table_row(batch.case, group, s, full, cropped[row].numpy())


@pytest.mark.slow
@PROPERTY
@given(st.data())
def test_fused_launch_equals_the_oracle(data):
    case = data.draw(cases(max_groups=4, later_steps=True))
    seq_lens = data.draw(batches(case))
    batch = Batch(case, seq_lens, fused=True, seed=data.draw(st.integers(0, 1000)))
    batch.refresh(num_reqs=len(seq_lens), num_rows=len(seq_lens))
    check_rows(batch, seq_lens)


@PROPERTY
@given(st.data())
def test_plain_torch_equals_the_oracle_with_padding_rows(data):
    case = data.draw(cases(later_steps=True))
    seq_lens = data.draw(batches(case))
    live = data.draw(st.integers(0, len(seq_lens)))
    batch = Batch(case, seq_lens, fused=False, seed=data.draw(st.integers(0, 1000)))
    batch.refresh(num_reqs=live, num_rows=len(seq_lens))
    check_rows(batch, np.where(np.arange(len(seq_lens)) < live, seq_lens, 0))


@pytest.mark.slow
@settings(max_examples=700, deadline=None)  # of up to three batches each
@given(st.data())
def test_fused_launch_equals_plain_torch_after_any_history_of_batches(data):
    """Rows are reused by longer and shorter requests and by padding; nothing of the past may shine through."""
    case = data.draw(cases(max_groups=6, later_steps=True))
    history = data.draw(st.lists(batches(case), min_size=1, max_size=3))
    rows = max(map(len, history))
    fused, plain = (Batch(case, history[0], fused=f, max_num_reqs=rows) for f in (True, False))
    for seq_lens in history:
        live = data.draw(st.integers(0, len(seq_lens)))
        for batch in (fused, plain):
            batch.set_lengths(seq_lens)
            batch.refresh(num_reqs=live, num_rows=len(seq_lens))
        assert torch.equal(fused.windowed.seq_lens, plain.windowed.seq_lens)
        for a, b in zip(fused.windowed.block_tables, plain.windowed.block_tables, strict=True):
            assert torch.equal(a, b)


@FUSED
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_each_row_may_have_a_window_of_its_own(fused, data):
    """Bounds and columns stay those of the largest window."""
    case = data.draw(cases(later_steps=True))
    seq_lens = data.draw(batches(case))
    smallest = max(case.queries, (case.first_lookahead or 0) + 1)
    sizes = data.draw(st.lists(st.integers(smallest, case.window), min_size=len(seq_lens), max_size=len(seq_lens)))
    batch = Batch(case, seq_lens, fused=fused, windows=torch.tensor(sizes, dtype=torch.int32))
    batch.refresh(num_reqs=len(seq_lens), num_rows=len(seq_lens))
    for row, (s, size) in enumerate(zip(seq_lens.tolist(), sizes, strict=True)):
        of_row = dataclasses.replace(case, window=size)
        assert batch.windowed.seq_lens[row] == oracle.windowed_length(of_row, s)
        for group, cropped in enumerate(batch.windowed.block_tables):
            full = batch.block_tables.input_block_tables[group][row].numpy()
            oracle.check_table_row(of_row, group, s, full, cropped[row].numpy())


@FUSED
def test_query_start_loc_gives_each_request_its_own_query_length(fused):
    """A prefill chunk longer than the window keeps all its query rows, next to a decode in the same batch."""
    case = dataclasses.replace(SMALL, queries=300)
    queries = np.array([300, 1, 20], dtype=np.int32)
    seq_lens = np.array([900, 900, 20], dtype=np.int32)
    batch = Batch(case, seq_lens, fused=fused)
    batch.set_queries(queries)
    batch.windowed.refresh(num_reqs=3, num_rows=3, queries=None)
    expected = [
        oracle.windowed_length(dataclasses.replace(case, queries=q), s)
        for q, s in zip(queries.tolist(), seq_lens.tolist(), strict=True)
    ]
    assert batch.windowed.seq_lens.tolist() == expected


@FUSED
@pytest.mark.parametrize("num_groups", [1, 2, 4, 5, 9])
def test_any_number_of_groups(fused, num_groups):
    case = Case(
        window=64,
        block_sizes=tuple(8 << (i % 2) for i in range(num_groups)),
        full_columns=tuple(64 >> (i % 2) for i in range(num_groups)),
        max_model_len=512,
    )
    seq_lens = np.array([3, 500, 64, 65, 200], dtype=np.int32)
    batch = Batch(case, seq_lens, fused=fused)
    batch.refresh(num_reqs=5, num_rows=5)
    check_rows(batch, seq_lens)


def test_one_launch_windows_lengths_and_all_groups(monkeypatch):
    launches = []
    real = kernels._window_kernel
    monkeypatch.setattr(kernels, "_window_kernel", {(5,): lambda *args: launches.append(real[(5,)](*args))})
    case = Case(window=64, block_sizes=(8, 16, 8, 16), full_columns=(64, 32, 64, 32), max_model_len=512)
    batch = Batch(case, np.array([3, 500, 64, 65, 200], dtype=np.int32), fused=True)
    batch.refresh(num_reqs=5, num_rows=5)
    assert len(launches) == 1


@FUSED
def test_no_rows_is_no_work(fused):
    batch = Batch(SMALL, np.array([5000], dtype=np.int32), fused=fused)
    batch.refresh(num_reqs=0, num_rows=0)
    assert not batch.windowed.seq_lens.any()


@FUSED
def test_originals_are_never_written(fused):
    seq_lens = np.array([5000, 40, 300], dtype=np.int32)
    batch = Batch(SMALL, seq_lens, fused=fused)
    before = [t.clone() for t in (batch.input_buffers.seq_lens, *batch.block_tables.input_block_tables)]
    for _ in range(2):  # a FULL graph on Ascend builds twice in one step
        batch.refresh(num_reqs=3, num_rows=3)
        with batch.windowed.in_place_of_originals(batch):
            pass
        check_rows(batch, seq_lens)
    after = (batch.input_buffers.seq_lens, *batch.block_tables.input_block_tables)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_build_reads_windowed_tensors_and_originals_come_back_also_after_an_exception():
    batch = Batch(SMALL, np.array([5000], dtype=np.int32), fused=False)
    buffers, tables = batch.input_buffers, batch.block_tables
    originals = buffers.seq_lens, tables.input_block_tables

    def build_that_fails():
        with batch.windowed.in_place_of_originals(batch):
            assert batch.input_buffers.seq_lens is batch.windowed.seq_lens
            assert batch.block_tables.input_block_tables == batch.windowed.block_tables
            assert batch.block_tables.slot_mappings is tables.slot_mappings
            assert (buffers.seq_lens, tables.input_block_tables) == originals, "the target reads them meanwhile"
            raise RuntimeError("the build failed")

    with pytest.raises(RuntimeError, match="the build failed"):
        build_that_fails()
    assert batch.input_buffers is buffers and batch.block_tables is tables


def test_groups_without_draft_layers_keep_their_table():
    batch = Batch(
        dataclasses.replace(SMALL, block_sizes=(16, 16, 16), full_columns=(512, 512, 512)),
        np.array([5000], dtype=np.int32),
        fused=False,
    )
    originals = list(batch.block_tables.input_block_tables)
    one_group = type(batch.windowed)(
        dataclasses.replace(batch.windowed.geometry, block_sizes=(16,), full_columns=(512,)),
        batch.input_buffers,
        batch.block_tables,
        [1],
        fused=False,
    )
    with one_group.in_place_of_originals(batch):
        assert batch.block_tables.input_block_tables[0] is originals[0]
        assert batch.block_tables.input_block_tables[1] is one_group.block_tables[0]
        assert batch.block_tables.input_block_tables[2] is originals[2]


class ReadOnly:
    """As an attribute that a newer vLLM has made a property."""

    first, last = 1, 2

    @property
    def middle(self):
        return 3


def test_swapping_is_all_or_nothing():
    owner = ReadOnly()
    with pytest.raises(AttributeError), inputs.swapped(owner, first=10, middle=30, last=20):
        pytest.fail("the body runs although an attribute could not be set")
    assert (owner.first, owner.middle, owner.last) == (1, 3, 2)
