# SPDX-License-Identifier: Apache-2.0
"""The arithmetic against the token-level oracle. Needs torch, not vLLM."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.cases import full_tables, geometry_of
from tests.oracle import Case
from tests.strategies import batches, cases
from vllm_ascend.draft_window.geometry import WindowGeometry

PROPERTY = settings(max_examples=2000, deadline=None)


def lengths(case: Case, seq_lens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return geometry_of(case).lengths(seq_lens, queries=case.queries, lookahead=case.lookahead)


@PROPERTY
@given(st.data())
def test_length_counts_the_visible_tokens(data):
    case = data.draw(cases(later_steps=True))
    seq_lens = data.draw(batches(case))
    _, length = lengths(case, seq_lens)
    assert length.dtype == np.int32
    assert length.tolist() == [oracle.windowed_length(case, s) for s in seq_lens.tolist()]


@PROPERTY
@given(st.data())
def test_removed_tokens_are_the_gap_between_sink_and_window(data):
    case = data.draw(cases(later_steps=True))
    seq_lens = data.draw(batches(case))
    removed, _ = lengths(case, seq_lens)
    for s, gap in zip(seq_lens.tolist(), removed.tolist(), strict=True):
        visible = oracle.visible_tokens(case, s)
        assert gap == (visible[-1] + 1 - len(visible) if len(visible) else 0)


@PROPERTY
@given(st.data())
def test_torch_and_numpy_agree(data):
    case = data.draw(cases(later_steps=True))
    seq_lens = data.draw(batches(case))
    on_host = lengths(case, seq_lens)
    on_device = lengths(case, torch.from_numpy(seq_lens))
    for host, device in zip(on_host, on_device, strict=True):
        assert device.dtype == torch.int32
        np.testing.assert_array_equal(host, device.numpy())


@PROPERTY
@given(st.data())
def test_queries_may_differ_by_request(data):
    case = data.draw(cases(later_steps=True))
    seq_lens = data.draw(batches(case))
    queries = np.array([data.draw(st.integers(1, case.queries)) for _ in seq_lens], dtype=np.int32)
    _, length = geometry_of(case).lengths(seq_lens, queries=queries, lookahead=case.lookahead)
    for s, q, got in zip(seq_lens.tolist(), queries.tolist(), length.tolist(), strict=True):
        assert got == oracle.windowed_length(dataclasses.replace(case, queries=q), s)


@PROPERTY
@given(st.data())
def test_cropped_table_reaches_exactly_the_visible_tokens(data):
    case = data.draw(cases(later_steps=True))
    seq_lens = data.draw(batches(case))
    geometry = geometry_of(case)
    removed, length = geometry.lengths(torch.from_numpy(seq_lens), queries=case.queries, lookahead=case.lookahead)
    for group, full in enumerate(full_tables(case, len(seq_lens), seed=data.draw(st.integers(0, 1000)))):
        cropped = geometry.crop_block_table(group, torch.from_numpy(full), removed, length, lookahead=case.lookahead)
        assert cropped.dtype == torch.int32 and cropped.shape == (len(seq_lens), geometry.columns[group])
        for row, s in enumerate(seq_lens.tolist()):
            oracle.check_table_row(case, group, s, full[row], cropped[row].numpy())


@PROPERTY
@given(st.data())
def test_columns_hold_the_longest_window_and_no_more_than_a_block_is_wasted(data):
    case = data.draw(cases(later_steps=True))
    geometry = geometry_of(case)
    longest = max(oracle.windowed_length(case, s) for s in range(case.limit + 1))
    for columns, size, full in zip(geometry.columns, case.block_sizes, case.full_columns, strict=True):
        assert columns <= full
        assert columns * size >= min(longest + case.lookahead, full * size)
    assert longest + case.lookahead <= geometry.max_length


@PROPERTY
@given(st.data())
def test_host_bound_is_the_largest_length_in_its_range(data):
    case = data.draw(cases(later_steps=True))
    upper = data.draw(batches(case))
    rejected = data.draw(st.integers(0, 20))
    bound = geometry_of(case).host_bound(upper, max_rejected=rejected, queries=case.queries, lookahead=case.lookahead)
    assert bound.dtype == np.int32
    assert bound.tolist() == [oracle.host_bound(case, u, rejected) for u in upper.tolist()]


@PROPERTY
@given(st.data())
def test_shorter_than_first_cropped_is_the_identity(data):
    case = data.draw(cases(later_steps=True))
    first = geometry_of(case).first_cropped(queries=case.queries, lookahead=case.lookahead)
    changed = [s for s in range(case.limit + 20) if oracle.windowed_length(case, s) != s]
    assert first == min(changed, default=case.limit + 1)


def test_published_formula_without_sink_gate_and_lookahead():
    geometry = WindowGeometry(window=512, block_sizes=(128,), full_columns=(64,), max_model_len=8192, max_queries=8)
    seq_lens = np.arange(8193, dtype=np.int32)
    removed, length = geometry.lengths(seq_lens, queries=8)
    np.testing.assert_array_equal(removed, np.maximum(seq_lens - 512, 0) // 128 * 128)
    np.testing.assert_array_equal(length, seq_lens - removed)
    assert length.max() == 512 + 128 - 1


def test_length_at_a_million_tokens():
    geometry = WindowGeometry(
        window=4032, block_sizes=(16,), full_columns=(65_536,), max_model_len=1_048_576, max_queries=7
    )
    removed, length = geometry.lengths(np.array([1_029_306], dtype=np.int32), queries=7)
    assert (removed.item(), length.item()) == (1_025_264, 4_042)
    assert geometry.columns == (253,)


@pytest.mark.parametrize("window", [1, 7, 130, 1000])
def test_width_when_no_block_divides_the_window(window):
    geometry = WindowGeometry(window=window, block_sizes=(128,), full_columns=(32,), max_model_len=4096, max_queries=1)
    assert geometry.columns == (-(-(window + 127) // 128),)
