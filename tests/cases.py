# SPDX-License-Identifier: Apache-2.0
"""The geometry and the block tables that belong to a case of the oracle."""

import numpy as np

from tests.oracle import Case
from vllm_ascend.draft_window.geometry import Rows, WindowGeometry

MAX_BLOCK_ID = 2**31 - 1


def geometry_of(case: Case) -> WindowGeometry:
    return WindowGeometry(
        window=case.window,
        block_sizes=case.block_sizes,
        full_columns=case.full_columns,
        max_model_len=case.max_model_len,
        max_queries=case.queries,
        max_lookahead=case.lookahead if case.first_lookahead is None else case.first_lookahead,
        sink=case.sink,
        min_context=case.min_context,
        rows=Rows.MASKED if case.masked else Rows.EVERY if case.keeps_every_row else Rows.NEWEST,
    )


def full_tables(case: Case, num_rows: int, seed: int) -> list[np.ndarray]:
    """Full block tables with ids over the whole int32 range; every column is non-zero, as stale columns may be."""
    rng = np.random.default_rng(seed)
    return [
        rng.integers(1, MAX_BLOCK_ID, size=(num_rows, columns), dtype=np.int32, endpoint=True)
        for columns in case.full_columns
    ]
