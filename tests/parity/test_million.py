# SPDX-License-Identifier: Apache-2.0
"""10^6 random (s, W, b, K, step): both runners against a vectorised oracle, the shim against the published formula."""

import numpy as np
import pytest

pytest.importorskip("vllm")

from tests.parity import million
from tests.parity.million import PUBLISHED_DIFFERENCES, ROWS, causes, expected, samples, table_of
from tests.parity.published import PublishedWindow

SAMPLES = 10**6 // ROWS


def newest_block(sample, table: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Block id under the newest token of the sample's step, read through a cropped table, [ROWS]."""
    column = (length + sample.step - 1) // sample.case.block_sizes[0]
    return np.take_along_axis(table, column[:, None], axis=1)[:, 0]


def test_both_runners_against_the_oracle():
    rows = 0
    for seed, sample in enumerate(samples(SAMPLES)):
        case, table = sample.case, table_of(sample, seed)
        metadata = million.v1(sample, table)
        cropped = metadata.block_table_tensor.numpy()
        length, wanted = expected(sample, table.numpy(), cropped.shape[1])
        np.testing.assert_array_equal(metadata.seq_lens.numpy(), length, err_msg=str(case))
        np.testing.assert_array_equal(metadata._seq_lens_cpu.numpy(), length, err_msg=str(case))
        np.testing.assert_array_equal(cropped, wanted, err_msg=str(case))
        bound = metadata.seq_lens_cpu_upper_bound.numpy()
        assert (bound >= length).all() and bound.max() <= min(cropped.shape[1], 48) * case.block_sizes[0], case

        v2_length, v2_table = million.v2(sample, table)
        common = min(v2_table.shape[1], cropped.shape[1])
        np.testing.assert_array_equal(v2_length, length, err_msg=str(case))
        np.testing.assert_array_equal(v2_table[:, :common], wanted[:, :common], err_msg=str(case))
        assert not wanted[:, common:].any()

        # The step's newest token, found without the window.
        position = np.minimum(sample.seq_lens, case.limit) + sample.step - 1
        inside = position < case.limit
        ids = np.take_along_axis(table.numpy(), np.minimum(position, case.limit - 1)[:, None] // case.block_sizes[0], 1)
        found = newest_block(sample, np.pad(cropped, ((0, 0), (0, 8))), length)
        np.testing.assert_array_equal(found[inside], ids[inside, 0], err_msg=str(case))
        rows += ROWS
    assert rows == 10**6


def test_the_published_formula_differs_where_it_is_meant_to_and_nowhere_else():
    seen = dict.fromkeys(PUBLISHED_DIFFERENCES, 0)
    for seed, sample in enumerate(samples(SAMPLES // 4, seed=1)):
        case, table = sample.case, table_of(sample, seed)
        published = PublishedWindow(case.window, case.block_sizes[0], ROWS, case.lookahead, table.device)
        theirs, ours = million.v1(sample, table, published), million.v1(sample, table)
        differs = million.rows_that_differ(theirs, ours)
        explained = causes(sample)
        assert not differs[~np.logical_or.reduce(list(explained.values()))].any(), case
        for cause, rows in explained.items():
            others = np.logical_or.reduce([r for name, r in explained.items() if name != cause])
            seen[cause] += int((differs & rows & ~others).sum())
    assert all(seen.values()), f"no longer a difference, so take it out of the list: {seen}"
