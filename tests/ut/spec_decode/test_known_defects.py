# SPDX-License-Identifier: Apache-2.0
"""The six known faults of vLLM-Ascend's adapter, each with the input that shows it, and what the shim does there."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from tests import oracle
from tests.oracle import Case
from tests.ut.spec_decode.metadata import make_metadata, make_table
from vllm_ascend.spec_decode.sliding_window import SlidingWindowAdapter

CPU = torch.device("cpu")


def apply(adapter: SlidingWindowAdapter, seq_lens, table, **kwargs):
    metadata = make_metadata(seq_lens, table, **kwargs)
    adapter.apply(metadata)
    return metadata


# --- 1: `needed` ignored the look-ahead -------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [512, 4096])
def test_1_later_steps_find_the_block_of_their_newest_token(window):
    """``window=4096`` covers the context: the window should be the identity, and the last step read block 0."""
    lookahead, size = 3, 128
    table = make_table(1, 32)
    adapter = SlidingWindowAdapter(window, size, 1, lookahead, CPU)
    for s in (127, 128, 639, 640, 1023, *range(1, 2001, 37)):
        metadata = apply(adapter, [s], table)
        length, row = int(metadata.seq_lens[0]), metadata.block_table_tensor[0]
        for step in range(lookahead):
            newest = length + step  # position of the token that step + 1 writes, in the cropped table
            assert row[newest // size] == table[0, (s + step) // size], (s, step)


# --- 2: several KV groups shared one clone and windowed the lengths again and again -----------------------------------


def test_2_groups_have_their_own_tables_and_one_start():
    case = Case(window=256, block_sizes=(128,), full_columns=(40,), max_model_len=5120)
    seq_lens = [255, 256, 257, 383, 384, 385, 1000, 4097]
    adapter = SlidingWindowAdapter(256, 128, 8, 0, CPU)
    tables = [make_table(8, 40, seed=seed) for seed in range(3)]
    metadata = make_metadata(seq_lens, tables[0])
    upper_bound = metadata.seq_lens_cpu_upper_bound
    built = []
    for table in tables:  # as vLLM-Ascend's DSpark proposer goes through its groups
        metadata = copy.copy(metadata)
        metadata.block_table_tensor = table
        adapter.apply(metadata)
        assert adapter.full_block_table is table
        built.append(metadata)
    for table, of_group in zip(tables, built, strict=True):
        for row, s in enumerate(seq_lens):
            assert of_group.seq_lens[row] == oracle.windowed_length(case, s)
            oracle.check_table_row(case, 0, s, table[row].numpy(), of_group.block_table_tensor[row].numpy())
        assert of_group.seq_lens_cpu_upper_bound is built[0].seq_lens_cpu_upper_bound is not upper_bound
    assert len({of_group.block_table_tensor.data_ptr() for of_group in built}) == 3
    # Once more, in any order: nothing moves.
    for table, of_group in reversed(list(zip(tables, built, strict=True))):
        once = copy.deepcopy(of_group)
        adapter.apply(of_group)
        assert adapter.full_block_table is table
        assert torch.equal(of_group.block_table_tensor, once.block_table_tensor)
        assert torch.equal(of_group.seq_lens, once.seq_lens)


def test_2_groups_that_share_unwindowed_lengths():
    adapter = SlidingWindowAdapter(256, 128, 2, 0, CPU)
    tables = [make_table(2, 40, seed=seed) for seed in range(2)]
    first = make_metadata([1000, 4097], tables[0])
    second = dataclasses.replace(first, block_table_tensor=tables[1])
    adapter.apply(first)
    adapter.apply(second)
    assert torch.equal(first.seq_lens, second.seq_lens)
    for table, metadata in zip(tables, (first, second), strict=True):
        assert torch.equal(metadata.block_table_tensor[0, :3], table[0, 5:8])


def test_2_groups_keep_their_addresses_over_the_steps():
    adapter = SlidingWindowAdapter(256, 128, 2, 0, CPU)
    tables = [make_table(2, 40, seed=seed) for seed in range(3)]
    addresses = set()
    for s in range(900, 905):
        metadata, of_step = make_metadata([s, s + 7], tables[0]), []
        for table in tables:
            metadata = copy.copy(metadata)
            metadata.block_table_tensor = table[:]  # a new view at every step, as a runner makes it
            adapter.apply(metadata)
            of_step.append(metadata.block_table_tensor.data_ptr())
        addresses.add(tuple(of_step))
    assert len(addresses) == 1


def test_2_groups_with_blocks_of_different_sizes_start_at_the_same_token():
    case = Case(window=256, block_sizes=(64, 128), full_columns=(80, 40), max_model_len=5120)
    seq_lens = [255, 256, 257, 383, 384, 385, 1000, 4097]
    adapter = SlidingWindowAdapter(256, 128, 8, 0, CPU)
    tables = [make_table(8, columns, seed=columns) for columns in case.full_columns]
    metadata = apply(adapter, seq_lens, tables[1])
    cropped = [adapter.crop_group(tables[0], block_size=64), metadata.block_table_tensor]
    for row, s in enumerate(seq_lens):
        assert metadata.seq_lens[row] == oracle.windowed_length(case, s)
        for group in range(2):
            oracle.check_table_row(case, group, s, tables[group][row].numpy(), cropped[group][row].numpy())


# --- 3: nothing was validated -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [-8, 0, 1, 2, 3])
def test_3_a_window_below_the_look_ahead_is_refused(window):
    with pytest.raises(ValueError, match=rf"draft_window_size={window} .* at least 4"):
        SlidingWindowAdapter(window, 128, 8, 3, CPU)


@pytest.mark.parametrize(("window", "lookahead"), [(4, 3), (1, 0)])
def test_3_the_smallest_window_leaves_something_to_read(window, lookahead):
    table = make_table(1, 64)
    adapter = SlidingWindowAdapter(window, 16, 1, lookahead, CPU)
    for s in range(1, 200):
        metadata = apply(adapter, [s], table)
        assert metadata.seq_lens[0] >= 1 and metadata._seq_lens_cpu[0] >= 1


@pytest.mark.parametrize("lookahead", [0, 3])
def test_3_every_query_row_of_a_long_chunk_sees_itself(lookahead):
    """Prefill chunks longer than the window, beside a decode; the decode's table keeps its persistent address."""
    case = Case(window=512, block_sizes=(128,), full_columns=(64,), max_model_len=8192, lookahead=lookahead)
    table = make_table(2, 64)
    adapter = SlidingWindowAdapter(512, 128, 2, lookahead, CPU)
    address = apply(adapter, [3000, 3000], table).block_table_tensor.data_ptr()
    computed = 0
    for chunk in (768, 768, 768, 327):
        computed += chunk
        metadata = apply(adapter, [computed, 3000], table, queries=[chunk, 1])
        for row, (s, q) in enumerate(((computed, chunk), (3000, 1))):
            of_row = dataclasses.replace(case, queries=q)
            assert metadata.seq_lens[row] == metadata._seq_lens_cpu[row] == oracle.windowed_length(of_row, s) >= q
            oracle.check_table_row(of_row, 0, s, table[row].numpy(), metadata.block_table_tensor[row].numpy())
    assert apply(adapter, [3000, 3000], table).block_table_tensor.data_ptr() == address


# --- 4: host and device lengths drifted apart -------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "size", "s"), [(512, 128, 634), (2048, 128, 2170), (512, 16, 522)])
def test_4_the_optimistic_mirror_bounds_the_device(window, size, s):
    adapter = SlidingWindowAdapter(window, size, 1, 3, CPU)
    metadata = apply(adapter, [s], make_table(1, 4096 // size), rejected=3)
    assert metadata.seq_lens[0] <= metadata.seq_lens_cpu_upper_bound[0] <= adapter.max_window_blocks * size


@pytest.mark.parametrize(("lookahead", "max_rejected"), [(3, None), (0, 3), (0, None)])
def test_4_no_length_escapes_its_bound(lookahead, max_rejected):
    s = np.repeat(np.arange(1, 6001), 4)
    rejected = np.tile(np.arange(4), 6000)
    adapter = SlidingWindowAdapter(512, 128, len(s), lookahead, CPU, max_rejected=max_rejected)
    metadata = apply(adapter, s, make_table(1, 64).expand(len(s), -1), rejected=rejected.tolist())
    bound = metadata.seq_lens_cpu_upper_bound
    assert (metadata.seq_lens <= bound).all() and bound.max() <= adapter.max_window_blocks * 128
    assert torch.equal(metadata.seq_lens, metadata._seq_lens_cpu), "exact mirrors stay exact"
    naive = s + rejected - np.maximum(s + rejected + lookahead - 512, 0) // 128 * 128
    assert (naive < metadata.seq_lens.numpy()).sum() > 200, "a bound by its own start would have been too small"


# --- 5: the guard near max_model_len compared windowed lengths --------------------------------------------------------


def lengthen(metadata, max_model_len: int) -> None:
    """What vLLM-Ascend's proposers do between two steps."""
    for name in ("seq_lens", "_seq_lens_cpu", "seq_lens_cpu"):
        longer = getattr(metadata, name) + 1
        setattr(metadata, name, longer.masked_fill(longer > max_model_len, 1))


def test_5_later_steps_past_max_model_len_read_one_token():
    window, size, lookahead, max_model_len = 512, 128, 7, 4096
    seq_lens = [4088, 4089, 4095, 4096, 600, 40]
    full = make_metadata(seq_lens, make_table(6, 32))
    windowed = copy.copy(full)
    adapter = SlidingWindowAdapter(window, size, 6, lookahead, CPU, max_model_len=max_model_len)
    adapter.apply(windowed)
    removed = full.seq_lens - windowed.seq_lens
    for _ in range(1, lookahead):
        adapter.before_next_step(windowed, max_model_len)
        lengthen(windowed, max_model_len)
        lengthen(full, max_model_len)
        guarded = full.seq_lens <= lookahead
        expected = torch.where(guarded, full.seq_lens, full.seq_lens - removed)
        for name in ("seq_lens", "_seq_lens_cpu", "seq_lens_cpu"):
            assert torch.equal(getattr(windowed, name), expected), name
    assert guarded.tolist() == [False, False, True, True, False, False]


def test_5_without_help_the_guard_would_never_fire():
    metadata = make_metadata([4096], make_table(1, 32))
    SlidingWindowAdapter(512, 128, 1, 7, CPU).apply(metadata)
    lengthen(metadata, 4096)
    assert metadata.seq_lens[0] > 1


def test_5_the_limit_counts_where_the_metadata_knows_no_longest_length():
    """As vLLM-Ascend's EAGLE proposer makes it: ``max_seq_len`` is 0."""
    adapter = on_host(max_rejected=0)
    metadata = make_metadata([4095], make_table(1, 32))
    metadata.max_seq_len = 0
    adapter.apply(metadata)
    adapter.before_next_step(metadata, 4095)
    assert metadata.seq_lens.tolist() == metadata._seq_lens_cpu.tolist() == [0]


def test_5_far_from_the_limit_nothing_is_touched():
    adapter = SlidingWindowAdapter(512, 128, 1, 7, CPU)
    metadata = make_metadata([2000], make_table(1, 32))
    adapter.before_next_step(metadata, 4096)  # nothing was windowed yet
    adapter.apply(metadata)
    before = metadata.seq_lens
    adapter.before_next_step(metadata, 4096)
    assert metadata.seq_lens is before


@pytest.mark.parametrize("max_model_len", [None, 4090])
def test_5_lengths_past_the_table_are_clamped_before_the_window(max_model_len):
    limit = max_model_len or 4096
    case = Case(window=512, block_sizes=(128,), full_columns=(32,), max_model_len=limit, lookahead=0)
    table = make_table(5, 32)
    adapter = SlidingWindowAdapter(512, 128, 5, 0, CPU, max_model_len=max_model_len)
    seq_lens = [4088, 4089, 4095, 4096, 4103]
    metadata = apply(adapter, seq_lens, table, rejected=9)
    for row, s in enumerate(seq_lens):
        assert metadata.seq_lens[row] == metadata._seq_lens_cpu[row] == oracle.windowed_length(case, s)
        oracle.check_table_row(case, 0, s, table[row].numpy(), metadata.block_table_tensor[row].numpy())


# --- 6: padding for a full graph added a row that did not fit ---------------------------------------------------------


def test_6_one_row_more_than_a_full_batch_fits_the_persistent_table():
    adapter = SlidingWindowAdapter(256, 128, 8, 3, CPU)
    table = make_table(9, 40)
    address = apply(adapter, [1000] * 8, table).block_table_tensor.data_ptr()
    metadata = apply(adapter, [1000] * 8 + [0], table)
    assert metadata.block_table_tensor.data_ptr() == address == adapter._block_table_clone.data_ptr()
    assert metadata.seq_lens[-1] == 0 and not metadata.block_table_tensor[-1].any()


def test_6_larger_batches_make_the_table_grow():
    adapter = SlidingWindowAdapter(256, 128, 8, 3, CPU)
    table = make_table(20, 40)
    first = apply(adapter, [1000] * 8, table)
    large = apply(adapter, [1000] * 20, table)
    assert large.block_table_tensor.shape == (20, adapter.max_window_blocks)
    assert torch.equal(large.block_table_tensor[:8], first.block_table_tensor)
    assert adapter._block_table_clone.data_ptr() == large.block_table_tensor.data_ptr()


def test_6_tail_rows_are_empty_after_a_larger_batch():
    adapter = SlidingWindowAdapter(256, 128, 20, 3, CPU)
    table = make_table(20, 40)
    apply(adapter, [2000] * 20, table)
    metadata = apply(adapter, [2000] * 3 + [0] * 17, table)
    assert metadata.seq_lens[3:].tolist() == metadata._seq_lens_cpu[3:].tolist() == [0] * 17
    assert not metadata.block_table_tensor[3:].any()


# --- where attention reads its lengths on the host, the host decides --------------------------------------------------


def on_host(window=512, size=128, rows=1, lookahead=3, max_rejected=3) -> SlidingWindowAdapter:
    return SlidingWindowAdapter(
        window, size, rows, lookahead, CPU, max_rejected=max_rejected, read_from="_seq_lens_cpu", max_model_len=8192
    )


def test_a_mirror_that_is_ahead_under_async_scheduling_keeps_what_the_device_keeps():
    """By its own start, the mirror of 637 became 509, and the device's 634 lost its newest 125 tokens."""
    metadata = make_metadata([634], make_table(1, 64), rejected=3)
    metadata._seq_lens_cpu = metadata.seq_lens_cpu_upper_bound.clone()
    on_host().apply(metadata)
    assert (metadata.seq_lens.item(), metadata._seq_lens_cpu.item()) == (634, 637)


@pytest.mark.parametrize("window", [512, 130])
def test_host_and_device_start_at_one_block_and_nothing_of_the_window_is_lost(window):
    lookahead, size, most = 3, 128, 6
    s = np.repeat(np.arange(1, 3001), most + 1)
    rejected = np.tile(np.arange(most + 1), 3000)
    table = make_table(1, 64).expand(len(s), -1)
    adapter = on_host(window, rows=len(s), max_rejected=most)
    metadata = make_metadata(s, table)
    metadata._seq_lens_cpu = torch.from_numpy((s + rejected).astype(np.int32))
    adapter.apply(metadata)
    removed = s - metadata.seq_lens.numpy()
    assert (removed % size == 0).all()
    np.testing.assert_array_equal(metadata._seq_lens_cpu.numpy(), s + rejected - removed)
    assert (removed <= np.maximum(s + lookahead - window, 0)).all(), "the newest W tokens"
    assert metadata._seq_lens_cpu.max() + lookahead <= adapter.max_window_blocks * size
    np.testing.assert_array_equal(metadata.block_table_tensor[:, 0].numpy(), table[0].numpy()[removed // size])


def test_a_parallel_drafters_own_host_lengths_decide_and_other_mirrors_do_not():
    """vLLM-Ascend 0.26 gives its MLA drafts host lengths that count the query tokens; the other mirrors never do."""
    adapter = SlidingWindowAdapter(512, 128, 2, 0, CPU, max_rejected=14, read_from="parallel_draft_seq_lens_cpu")
    table = make_table(2, 64)
    metadata = make_metadata([1000, 700], table)
    metadata.parallel_draft_seq_lens_cpu = torch.tensor([1007, 700], dtype=torch.int32)
    adapter.apply(metadata)
    starts = [(1007 - 14 - 512) // 128 * 128, (700 - 14 - 512) // 128 * 128]
    assert metadata.seq_lens.tolist() == [1000 - starts[0], 700 - starts[1]]
    assert metadata.parallel_draft_seq_lens_cpu.tolist() == [1007 - starts[0], 700 - starts[1]]
    metadata = make_metadata([1000, 700], table)
    metadata._seq_lens_cpu = torch.tensor([10, 20], dtype=torch.int32)  # not looked at
    adapter.apply(metadata)
    assert metadata.seq_lens.tolist() == [1000 - 384, 700 - 128]
