# SPDX-License-Identifier: Apache-2.0
"""What the draft must see, token by token, written from one sentence and nothing of the implementation:

    *The newest query token sees the sink and the newest W tokens, rounded out to whole blocks.*

Of a draft that keeps what it computed for every query token, that is said of the first query token instead; where the
attention backend masks, of the first one and without the draft tokens to come, and each query token sees exactly its
own newest W of what is left. Every query token also sees itself and the query tokens of its own forward, and a request
below the length gate sees everything. The gate looks at the request without its draft tokens: of ``first_lookahead``
draft tokens at the start of the proposal, ``lookahead`` are still to come and the others are part of the length by now.
The oracle marks tokens visible one by one, then says which physical cache slot each logical position of the cropped
table has to reach. It knows no start, no shift and no formula for a length.
"""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """One batch shape; the fields are those of the design page."""

    window: int
    block_sizes: tuple[int, ...]
    full_columns: tuple[int, ...]
    max_model_len: int
    queries: int = 1
    lookahead: int = 0
    sink: int = 0
    min_context: int = 0
    first_lookahead: int | None = None
    keeps_every_row: bool = False
    masked: bool = False

    @property
    def limit(self) -> int:
        return min(self.max_model_len, *(n * b for n, b in zip(self.full_columns, self.block_sizes, strict=True)))


def visible_tokens(case: Case, seq_len: int) -> np.ndarray:
    """Positions that draft attention may read, in order; int64, one entry per visible token."""
    seq_len = min(seq_len, case.limit)
    # [seq_len]
    position = np.arange(seq_len)
    drafted = 0 if case.first_lookahead is None else case.first_lookahead - case.lookahead
    if seq_len - drafted < case.min_context:
        return position
    first_query = seq_len - case.queries
    if case.masked:
        counted_from = first_query
    else:
        counted_from = case.lookahead + (first_query if case.keeps_every_row else seq_len - 1)
    wanted = (position < case.sink) | (counted_from - position < case.window) | (position >= first_query)
    # All groups share one sequence length, so a block is whole only where it is whole for every group.
    block = position // math.lcm(*case.block_sizes)
    read = np.zeros(seq_len, dtype=bool)
    read[block[wanted]] = True
    return position[read[block]]


def windowed_length(case: Case, seq_len: int) -> int:
    return len(visible_tokens(case, seq_len))


def physical_slots(table_row: np.ndarray, block_size: int, positions: np.ndarray) -> np.ndarray:
    """Cache slots (block id times block size plus offset) that a table row gives for logical positions."""
    return table_row[positions // block_size].astype(np.int64) * block_size + positions % block_size


def check_table_row(case: Case, group: int, seq_len: int, full_row: np.ndarray, cropped_row: np.ndarray) -> None:
    """Assert that the cropped row reaches exactly the visible tokens and the look-ahead, and nothing else."""
    size = case.block_sizes[group]
    visible = visible_tokens(case, seq_len)
    future = min(seq_len, case.limit) + np.arange(case.lookahead if len(visible) else 0)
    future = future[future // size < len(full_row)]
    tokens = np.concatenate([visible, future])
    logical = np.arange(len(tokens))
    columns_read = -(-len(tokens) // size)
    assert columns_read <= len(cropped_row), f"{columns_read} columns are read, the table has {len(cropped_row)}"
    np.testing.assert_array_equal(
        physical_slots(cropped_row, size, logical), physical_slots(full_row, size, tokens), err_msg=f"{case} {seq_len}"
    )
    assert not cropped_row[columns_read:].any(), f"columns past the needed ones are not zero: {case} {seq_len}"


def host_bound(case: Case, upper_bound: int, max_rejected: int) -> int:
    """Largest windowed length over every device length that the host's optimistic one may stand for."""
    return max(windowed_length(case, s) for s in range(max(upper_bound - max_rejected, 0), upper_bound + 1))
