# SPDX-License-Identifier: Apache-2.0
"""A million random windows at once, against an oracle that counts whole blocks for all rows together."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from tests.oracle import Case
from tests.parity.published import PublishedWindow
from tests.ut.spec_decode.metadata import make_metadata, make_table
from tests.vllm_inputs import Batch
from vllm_ascend.spec_decode.sliding_window import SlidingWindowAdapter

ROWS = 2000
_COLUMNS = 48


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One (W, b, K, q) and :data:`ROWS` requests.

    Attributes:
        seq_lens: s, int64, [ROWS]; some of them past the table.
        step: the proposal's step whose newest token has to be found, 1 to K, int64, [ROWS]; 0 where K is.
        rejected: how far the host is ahead, int64, [ROWS].
    """

    case: Case
    seq_lens: np.ndarray
    step: np.ndarray
    rejected: np.ndarray


def samples(count: int, *, seed: int = 0) -> Iterator[Sample]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        size = int(rng.choice([1, 3, 16, 32, 48, 64, 128]))
        lookahead = int(rng.choice([0, 0, 1, 3, 5, 7]))
        # A verification brings K + 1 tokens, a parallel drafter up to as many as its window has.
        longest = max(lookahead + 2, size * _COLUMNS * 3 // 4)
        # A fifth of the windows barely holds one forward.
        window = int(rng.integers(lookahead + 1, 2 * lookahead + 3 if rng.random() < 0.2 else longest))
        queries = lookahead + 1 if lookahead else int(rng.integers(1, min(window, 9) + 1))
        limit = size * _COLUMNS
        case = Case(
            window=window,
            block_sizes=(size,),
            full_columns=(_COLUMNS,),
            max_model_len=limit,
            queries=queries,
            lookahead=lookahead,
        )
        yield Sample(
            case=case,
            seq_lens=rng.integers(queries, limit + 10, ROWS).clip(min=queries),
            step=rng.integers(1, lookahead + 1, ROWS) if lookahead else np.zeros(ROWS, dtype=np.int64),
            rejected=rng.integers(0, 4, ROWS),
        )


def first_visible(case: Case, seq_lens: np.ndarray) -> np.ndarray:
    """Position of the first token of the oldest block that holds a visible token, [ROWS].

    The newest query token is ``K`` past the last; the window and every query token of this forward are visible.
    """
    newest = seq_lens + case.lookahead - 1
    oldest_wanted = np.maximum(np.minimum(newest - case.window + 1, seq_lens - case.queries), 0)
    return oldest_wanted - oldest_wanted % case.block_sizes[0]


def expected(sample: Sample, full_table: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths [ROWS] and cropped table [ROWS, columns], found by asking for each column's first token."""
    case, size = sample.case, sample.case.block_sizes[0]
    seq_lens = np.minimum(sample.seq_lens, case.limit)
    first = first_visible(case, seq_lens)
    # [ROWS, columns], absolute position of the first token that the cropped table's column holds
    token = first[:, None] + np.arange(columns) * size
    read = (token < (seq_lens + case.lookahead)[:, None]) & (token < case.limit)
    block = np.minimum(token, case.limit - 1) // size
    return seq_lens - first, np.where(read, np.take_along_axis(full_table, block, axis=1), 0)


def v1(sample: Sample, full_table: torch.Tensor, window: SlidingWindowAdapter | PublishedWindow | None = None):
    """Metadata after the shim, or after another adapter with the same ``apply``."""
    case = sample.case
    if window is None:
        window = SlidingWindowAdapter(
            case.window,
            case.block_sizes[0],
            ROWS,
            case.lookahead,
            full_table.device,
            max_rejected=int(sample.rejected.max()),
        )
    metadata = make_metadata(sample.seq_lens, full_table, queries=case.queries, rejected=sample.rejected.tolist())
    window.apply(metadata)
    return metadata


def v2(sample: Sample, full_table: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and table of Model Runner V2's windowed tensors."""
    inputs = Batch(sample.case, sample.seq_lens.astype(np.int32), fused=False)
    inputs.block_tables.input_block_tables[0][:ROWS] = full_table
    inputs.refresh(num_reqs=ROWS, num_rows=ROWS)
    return inputs.windowed.seq_lens.numpy(), inputs.windowed.block_tables[0].numpy()


PUBLISHED_DIFFERENCES = {
    "look-ahead": "later steps read columns that the published formula leaves zero",
    "small window": "W - K is below the query tokens of one forward: the published length does not hold them",
    "past the table": "lengths beyond the block table are clamped before the window, not after",
}
"""Inputs on which the shim differs from the published formula on purpose; everywhere else it must not."""


def causes(sample: Sample) -> dict[str, np.ndarray]:
    """Which of :data:`PUBLISHED_DIFFERENCES` may show in which row, by the inputs alone; bool, [ROWS]."""
    case, s = sample.case, sample.seq_lens
    size = case.block_sizes[0]
    length = s - first_visible(dataclasses.replace(case, queries=0), s)
    return {
        "look-ahead": (length + case.lookahead + size - 1) // size > (length + size - 1) // size,
        "small window": np.full(ROWS, case.window - case.lookahead < case.queries),
        "past the table": s > case.limit,
    }


def table_of(sample: Sample, seed: int) -> torch.Tensor:
    return make_table(ROWS, sample.case.full_columns[0], seed=seed)


def rows_that_differ(theirs, ours) -> np.ndarray:
    """Rows in which two windowed metadata differ in what draft attention reads; bool, [ROWS]."""
    columns = min(theirs.block_table_tensor.shape[1], ours.block_table_tensor.shape[1])
    tables = [m.block_table_tensor[:, :columns].numpy() for m in (theirs, ours)]
    differs = (theirs.seq_lens != ours.seq_lens).numpy() | (tables[0] != tables[1]).any(axis=1)
    return differs | (theirs._seq_lens_cpu != ours._seq_lens_cpu).numpy()
