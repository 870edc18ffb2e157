# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for windows, groups and batches."""

import numpy as np
from hypothesis import strategies as st

from tests.oracle import Case


@st.composite
def cases(draw: st.DrawFn, *, max_groups: int = 3, later_steps: bool = False) -> Case:
    """Small and awkward on purpose: windows that no block divides, sinks, gates, and models barely longer than W.

    With ``later_steps``, the case may be any step of its proposal, not just one with all the look-ahead before it, and
    any rows may keep their window, as in Model Runner V2.
    """
    block_sizes = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 8, 16]), min_size=1, max_size=max_groups)))
    first_lookahead = draw(st.integers(0, 7))
    lookahead = draw(st.integers(0, first_lookahead)) if later_steps else first_lookahead
    queries = draw(st.integers(1, 9))
    window = draw(st.integers(max(queries, first_lookahead + 1), 70))
    max_model_len = draw(st.integers(queries, 400))
    # A real table covers max_model_len; a group may be wider than the others.
    full_columns = tuple(-(-max_model_len // size) + draw(st.integers(0, 2)) for size in block_sizes)
    masked = later_steps and draw(st.booleans())
    return Case(
        window=window,
        block_sizes=block_sizes,
        full_columns=full_columns,
        max_model_len=max_model_len,
        queries=queries,
        lookahead=lookahead,
        first_lookahead=first_lookahead,
        sink=0 if masked else draw(st.sampled_from([0, 0, 1, 4, 17])),
        min_context=0 if masked else draw(st.sampled_from([0, 0, 30, 200])),
        keeps_every_row=later_steps and draw(st.booleans()),
        masked=masked,
    )


@st.composite
def batches(draw: st.DrawFn, case: Case) -> np.ndarray:
    """Lengths of a batch, int32: padding rows, lengths around the limit and past it."""
    lengths = st.one_of(
        st.just(0),
        st.integers(case.queries, case.max_model_len + 8),
        st.integers(max(case.queries, case.limit - 3), case.limit + 8),
    )
    return np.array(draw(st.lists(lengths, min_size=1, max_size=5)), dtype=np.int32)
