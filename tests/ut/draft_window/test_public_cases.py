# SPDX-License-Identifier: Apache-2.0
"""Small failing inputs from public reports of draft windows, with their right values. Needs torch, not vLLM."""

import numpy as np
import pytest
import torch

from tests import oracle
from tests.oracle import Case
from vllm_ascend.draft_window.geometry import WindowGeometry


def geometry(window, block_size=128, *, columns=64, max_model_len=8192, queries=1, lookahead=0, **more):
    return WindowGeometry(
        window=window,
        block_sizes=(block_size,),
        full_columns=(columns,),
        max_model_len=max_model_len,
        max_queries=queries,
        max_lookahead=lookahead,
        **more,
    )


def crop(geo, seq_lens, *, lookahead=0, queries=1, full=None):
    """Lengths and table of the first group; the full table counts its columns from 1 unless given."""
    if full is None:
        full = torch.arange(1, geo.full_columns[0] + 1, dtype=torch.int32).repeat(len(seq_lens), 1)
    removed, length = geo.lengths(torch.tensor(seq_lens, dtype=torch.int32), queries=queries, lookahead=lookahead)
    return length, geo.crop_block_table(0, full, removed, length, lookahead=lookahead), full


@pytest.mark.parametrize("s", [127, 128, 639, 640, 1023])
def test_later_steps_of_a_proposal_read_real_blocks(s):
    """They grow by one on the cropped table of the first; at a block edge they used to read column 0."""
    geo = geometry(512, lookahead=3)
    length, table, full = crop(geo, [s], lookahead=3)
    for step in range(4):
        assert table[0, (length[0] + step - 1) // 128] == full[0, (s + step - 1) // 128]
    if s + 3 <= 512:
        needed = -(-(s + 3) // 128)
        assert table[0, :needed].tolist() == full[0, :needed].tolist()


@pytest.mark.parametrize(("window", "block_size", "device_len"), [(512, 128, 634), (2048, 128, 2170), (512, 16, 522)])
def test_host_bound_stays_above_the_device_when_a_block_edge_lies_between(window, block_size, device_len):
    geo = geometry(window, block_size, columns=512, lookahead=3)
    _, device = geo.lengths(np.array([device_len], dtype=np.int32), queries=1, lookahead=3)
    upper = np.array([device_len + 3], dtype=np.int32)
    _, naive = geo.lengths(upper, queries=1, lookahead=3)
    bound = geo.host_bound(upper, max_rejected=3, queries=1, lookahead=3)
    assert naive < device <= bound <= geo.columns[0] * block_size


@pytest.mark.parametrize("s", [255, 256, 257, 383, 384, 385, 1000, 4097])
def test_two_groups_with_two_block_sizes_share_one_start(s):
    geo = WindowGeometry(window=256, block_sizes=(64, 128), full_columns=(128, 64), max_model_len=8192, max_queries=1)
    removed, length = geo.lengths(torch.tensor([s], dtype=torch.int32), queries=1)
    assert removed % 128 == 0 and length == s - removed
    for group, size in enumerate(geo.block_sizes):
        full = torch.arange(1, geo.full_columns[group] + 1, dtype=torch.int32)[None]
        table = geo.crop_block_table(group, full, removed, length)
        assert table[0, 0] == full[0, removed // size]
        assert table[0, (length - 1) // size] == full[0, (s - 1) // size]


def test_large_block_ids_pass_unchanged():
    ids = [65535, 65536, 1048576, 2147483647]
    _, table, _ = crop(geometry(256, columns=4, max_model_len=512), [511], full=torch.tensor([ids], dtype=torch.int32))
    assert table.dtype == torch.int32
    assert table[0, :3].tolist() == ids[1:]


@pytest.mark.parametrize("lookahead", [0, 7])
def test_padded_rows_are_empty_even_after_a_larger_batch(lookahead):
    length, table, _ = crop(geometry(256, 16, columns=512, lookahead=7), [0] * 17, lookahead=lookahead)
    assert not length.any() and not table.any()


@pytest.mark.parametrize("s", [768, 1536, 2304, 2631])
def test_prefill_chunk_longer_than_the_window_keeps_its_query_rows(s):
    queries = 327 if s == 2631 else 768
    geo = geometry(512, queries=768, lookahead=3)
    length, _, _ = crop(geo, [s], queries=queries, lookahead=3)
    assert length[0] >= queries


@pytest.mark.parametrize("s", [4088, 4089, 4095, 4096, 4103])
def test_near_max_model_len_no_column_outside_the_full_table(s):
    geo = geometry(512, columns=32, max_model_len=4096, queries=7)
    length, table, full = crop(geo, [s], queries=7)
    first_column = (min(s, 4096) - 512) // 128
    assert length[0] == min(s, 4096) - first_column * 128
    assert table[0].tolist() == full[0, first_column:].tolist() + [0] * (first_column - 27)


def test_row_reused_by_shorter_requests_shows_nothing_of_the_long_one():
    case = Case(window=256, block_sizes=(16,), full_columns=(512,), max_model_len=8192)
    geo = geometry(256, 16, columns=512)
    table = torch.zeros(1, geo.columns[0], dtype=torch.int32)
    for s in [5000, 40, 300, 7]:
        _, cropped, full = crop(geo, [s])
        table.copy_(cropped)
        oracle.check_table_row(case, 0, s, full[0].numpy(), table[0].numpy())


@pytest.mark.parametrize(
    ("window", "block_size", "s"),
    [(130, 128, 258), (130, 128, 383), (130, 128, 385), (1000, 128, 2047), (100, 16, 215)],
)
def test_newest_block_is_present_when_no_block_divides_the_window(window, block_size, s):
    length, table, full = crop(geometry(window, block_size, columns=512), [s])
    assert table[0, (length[0] - 1) // block_size] == full[0, (s - 1) // block_size] != 0


@pytest.mark.parametrize("lookahead", [0, 3, 7])
@pytest.mark.parametrize("s", [1, 127, 128, 1000, 4096])
def test_window_as_long_as_the_context_changes_nothing(s, lookahead):
    geo = geometry(4096, lookahead=7)
    length, table, full = crop(geo, [s], lookahead=lookahead)
    needed = -(-(s + lookahead) // 128)
    upper = np.array([s], dtype=np.int32)
    assert length[0] == s == geo.host_bound(upper, max_rejected=7, queries=1, lookahead=lookahead)[0]
    assert table[0, :needed].tolist() == full[0, :needed].tolist()
