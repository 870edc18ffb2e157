# SPDX-License-Identifier: Apache-2.0
"""The Model Runner V1 shim: vLLM-Ascend's contract, and the token-level oracle."""

import copy
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.v1.attention.backend import CommonAttentionMetadata

from tests import oracle
from tests.oracle import Case
from tests.strategies import batches, cases
from tests.ut.spec_decode.metadata import MIRRORS, make_metadata, make_table
from vllm_ascend.spec_decode.sliding_window import SlidingWindowAdapter

CPU = torch.device("cpu")
PROPERTY = settings(max_examples=2000, deadline=None)


def make_adapter(case: Case, max_num_reqs: int = 8, **kwargs) -> SlidingWindowAdapter:
    return SlidingWindowAdapter(
        case.window,
        case.block_sizes[0],
        max_num_reqs,
        case.lookahead,
        CPU,
        sink_size=case.sink,
        min_context=case.min_context,
        max_model_len=case.max_model_len,
        **kwargs,
    )


def check_rows(case: Case, metadata, seq_lens, full_table, queries=None) -> None:
    """Lengths, exact mirrors and table rows of windowed metadata against the oracle."""
    for row, s in enumerate(seq_lens):
        of_row = case if queries is None else dataclasses.replace(case, queries=queries[row])
        length = oracle.windowed_length(of_row, s)
        assert metadata.seq_lens[row] == length, (of_row, s)
        for name in MIRRORS[:2]:
            assert getattr(metadata, name)[row] == length, (name, of_row, s)
        oracle.check_table_row(of_row, 0, s, full_table[row].numpy(), metadata.block_table_tensor[row].numpy())


# --- the contract -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_contract(dtype):
    adapter = SlidingWindowAdapter(48, 16, 8, 2, CPU)
    clone = adapter._block_table_clone
    table = make_table(8, 30)
    metadata = make_metadata([5, 46, 47, 63, 64, 400], table, dtype=dtype)
    before = {name: getattr(metadata, name) for name in ("seq_lens", *MIRRORS)}
    copies = {name: tensor.clone() for name, tensor in before.items()}
    untouched = {name: getattr(metadata, name) for name in ("slot_mapping", "query_start_loc", "max_query_len")}
    table_copy = table.clone()

    adapter.apply(metadata)

    assert metadata.block_table_tensor.data_ptr() == clone.data_ptr() == adapter._block_table_clone.data_ptr()
    assert clone.dtype == metadata.block_table_tensor.dtype == torch.int32 and clone.is_contiguous()
    assert metadata.block_table_tensor.shape == (6, adapter.max_window_blocks)
    assert adapter.full_block_table is table
    # start = (s + 2 - 48) rounded down to 16
    expected = [5, 46, 47, 63 - 16, 64 - 16, 400 - 352]
    # Of 61, 62 and 63 tokens, 61 still start at 0.
    expected_bound = [5, 46, 47, 61, 64 - 16, 400 - 352]
    for name, tensor in before.items():
        rebound = getattr(metadata, name)
        assert rebound is not tensor and rebound.dtype == tensor.dtype, name
        assert rebound.tolist() == (expected_bound if name.endswith("upper_bound") else expected), name
        assert torch.equal(tensor, copies[name]), f"{name} was written"
    assert len({getattr(metadata, name).data_ptr() for name in before}) == 4, "every mirror is counted up by itself"
    assert torch.equal(table, table_copy)
    for name, value in untouched.items():
        assert getattr(metadata, name) is value
    assert (adapter.window_size, adapter.block_size, adapter._future_offset) == (48, 16, 2)
    assert (adapter.window_blocks, adapter.max_window_blocks) == (3, 4)


def test_absent_mirrors_stay_absent():
    adapter = SlidingWindowAdapter(32, 16, 4, 0, CPU)
    metadata = make_metadata([100, 7], make_table(2, 10))
    for name in MIRRORS:
        setattr(metadata, name, None)
    adapter.apply(metadata)
    assert [getattr(metadata, name) for name in MIRRORS] == [None] * 3
    assert metadata.seq_lens.tolist() == [36, 7]


def test_vllms_own_metadata_is_not_made_to_synchronise():
    """There ``seq_lens_cpu`` is a property that copies ``seq_lens`` from the device."""
    adapter = SlidingWindowAdapter(32, 16, 4, 0, CPU)
    metadata = make_metadata([100, 7], make_table(2, 10), cls=CommonAttentionMetadata)
    metadata._seq_lens_cpu = None
    adapter.apply(metadata)
    assert metadata._seq_lens_cpu is None and "seq_lens_cpu" not in vars(metadata)
    assert metadata.seq_lens.tolist() == [36, 7]


def test_metadata_with_the_named_attributes_alone_is_enough():
    adapter = SlidingWindowAdapter(32, 16, 4, 0, CPU)
    table = make_table(2, 10)
    metadata = SimpleNamespace(block_table_tensor=table, seq_lens=torch.tensor([100, 7], dtype=torch.int32))
    adapter.apply(metadata)
    assert sorted(vars(metadata)) == ["block_table_tensor", "seq_lens"]
    assert torch.equal(metadata.block_table_tensor[0, :3], table[0, 4:7])


def test_nothing_is_read_back_from_the_device():
    """Tensors on ``meta`` hold no data: reading one back raises."""
    adapter = SlidingWindowAdapter(32, 16, 4, 3, torch.device("meta"))
    metadata = make_metadata([100, 7], make_table(2, 10), queries=[40, 1])
    for name in ("seq_lens", "block_table_tensor", "query_start_loc"):
        setattr(metadata, name, getattr(metadata, name).to("meta"))
    adapter.apply(metadata)
    assert metadata.seq_lens.is_meta and metadata.block_table_tensor.is_meta
    assert metadata._seq_lens_cpu.tolist() == [52, 7]


# --- the oracle -------------------------------------------------------------------------------------------------------


@PROPERTY
@given(st.data())
def test_every_row_is_what_the_oracle_expects(data):
    case = data.draw(cases(max_groups=1))
    seq_lens = data.draw(batches(case))
    queries = [data.draw(st.integers(1, case.queries)) for _ in seq_lens]
    rejected = [data.draw(st.integers(0, 4)) for _ in seq_lens]
    bound_gap = data.draw(st.integers(4, 20))
    adapter = make_adapter(case, max_num_reqs=len(seq_lens), max_rejected=bound_gap)
    # A slice of a wider table, as block tables often are.
    table = make_table(len(seq_lens) + 1, case.full_columns[0] + 3)[:, : case.full_columns[0]]
    metadata = make_metadata(seq_lens, table, queries=queries, rejected=rejected)
    upper = metadata.seq_lens_cpu_upper_bound.tolist()
    adapter.apply(metadata)
    check_rows(case, metadata, seq_lens.tolist(), table, queries)
    for row, bound in enumerate(metadata.seq_lens_cpu_upper_bound.tolist()):
        of_row = dataclasses.replace(case, queries=queries[row])
        assert bound == oracle.host_bound(of_row, upper[row], bound_gap)
        columns = min(metadata.block_table_tensor.shape[1], case.full_columns[0])
        assert metadata.seq_lens[row] <= bound <= columns * case.block_sizes[0]


@PROPERTY
@given(st.data())
def test_a_window_as_long_as_the_context_changes_nothing(data):
    case = data.draw(cases(max_groups=1))
    case = dataclasses.replace(case, window=case.limit + case.lookahead, sink=0, min_context=0)
    seq_lens = np.minimum(data.draw(batches(case)), case.limit)
    table = make_table(len(seq_lens), case.full_columns[0])
    metadata = make_metadata(seq_lens, table, queries=case.queries)
    before = {name: getattr(metadata, name) for name in ("seq_lens", *MIRRORS)}
    make_adapter(case, max_num_reqs=len(seq_lens)).apply(metadata)
    for name, tensor in before.items():
        assert torch.equal(getattr(metadata, name), tensor), name
    size = case.block_sizes[0]
    for row, s in enumerate(seq_lens.tolist()):
        read = min(-(-(s + case.lookahead) // size) if s else 0, case.full_columns[0])
        assert torch.equal(metadata.block_table_tensor[row, :read], table[row, :read])
        assert not metadata.block_table_tensor[row, read:].any()


# --- calling it again, growing, reusing -------------------------------------------------------------------------------


def test_second_apply_changes_nothing():
    adapter = SlidingWindowAdapter(32, 16, 4, 3, CPU)
    table = make_table(3, 20)
    metadata = make_metadata([300, 31, 47], table)
    adapter.apply(metadata)
    once = copy.deepcopy(metadata)
    for _ in range(2):
        adapter.apply(metadata)
        assert adapter.full_block_table is table
        for name in ("seq_lens", "block_table_tensor", *MIRRORS):
            assert torch.equal(getattr(metadata, name), getattr(once, name)), name


def test_second_apply_after_the_lengths_moved_to_another_buffer():
    """vLLM-Ascend's proposers copy the windowed lengths into a buffer of theirs."""
    adapter = SlidingWindowAdapter(32, 16, 4, 3, CPU)
    table = make_table(3, 20)
    metadata = make_metadata([300, 31, 47], table)
    adapter.apply(metadata)
    once = copy.deepcopy(metadata)
    metadata.seq_lens = metadata.seq_lens.clone()
    adapter.apply(metadata)
    assert adapter.full_block_table is table
    for name in ("seq_lens", "block_table_tensor", *MIRRORS):
        assert torch.equal(getattr(metadata, name), getattr(once, name)), name


def test_lengths_that_changed_in_place_are_windowed_anew():
    adapter = SlidingWindowAdapter(32, 16, 4, 0, CPU)
    table, lengths = make_table(1, 40), torch.tensor([100], dtype=torch.int32)
    for s in (100, 40, 333):
        lengths.fill_(s)
        metadata = make_metadata([s], table)
        metadata.seq_lens = lengths
        adapter.apply(metadata)
        check_rows(Case(window=32, block_sizes=(16,), full_columns=(40,), max_model_len=640), metadata, [s], table)
        assert metadata.block_table_tensor.data_ptr() == adapter._block_table_clone.data_ptr()


def test_a_row_that_a_longer_request_used_before_holds_nothing_of_it():
    case = Case(window=256, block_sizes=(16,), full_columns=(320,), max_model_len=5120)
    adapter = make_adapter(case, max_num_reqs=1)
    table = make_table(1, 320)
    for s in (5000, 40, 300, 7):
        metadata = make_metadata([s], table)
        adapter.apply(metadata)
        check_rows(case, metadata, [s], table)


def test_a_narrower_table_finds_no_stale_columns():
    adapter = SlidingWindowAdapter(64, 16, 2, 0, CPU)
    adapter.apply(make_metadata([600], make_table(1, 40)))
    metadata = make_metadata([20], make_table(1, 2))
    adapter.apply(metadata)
    assert metadata.block_table_tensor[0].count_nonzero() == 2


def test_a_table_with_fewer_rows_than_lengths():
    adapter = SlidingWindowAdapter(64, 16, 4, 0, CPU)
    adapter.apply(make_metadata([600] * 4, make_table(4, 40)))
    metadata = make_metadata([600, 0, 0], make_table(1, 40))
    adapter.apply(metadata)
    assert metadata.block_table_tensor.shape[0] == 3
    assert not metadata.block_table_tensor[1:].any()


def test_empty_batch():
    adapter = SlidingWindowAdapter(64, 16, 4, 3, CPU)
    metadata = make_metadata([], make_table(4, 40))
    adapter.apply(metadata)
    assert metadata.block_table_tensor.shape == (0, adapter.max_window_blocks)
    assert len(metadata.seq_lens) == len(metadata.seq_lens_cpu_upper_bound) == 0


@pytest.mark.parametrize("ids", [[65_535, 65_536, 1_048_576, 2**31 - 1]])
def test_large_block_ids_pass_unchanged(ids):
    adapter = SlidingWindowAdapter(256, 128, 1, 0, CPU)
    metadata = make_metadata([511], torch.tensor([ids], dtype=torch.int32))
    adapter.apply(metadata)
    assert metadata.block_table_tensor[0, :3].tolist() == ids[1:]
