# SPDX-License-Identifier: Apache-2.0
"""Batches as a server sees them: one generator for both runners, the oracle and the report."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tests.oracle import Case


@dataclass(frozen=True, kw_only=True)
class ParityBatch:
    """One batch.

    Attributes:
        kind: what it stands for, a row of the report.
        case: window, groups and limits; its ``queries`` are the most query tokens of one request.
        seq_lens: un-windowed lengths, one per row; rows from ``num_reqs`` on are padding.
        queries: query tokens, one per row, 0 for padding.
        rejected: tokens by which the host's optimistic length is ahead, one per row.
        num_reqs: live rows.
    """

    kind: str
    case: Case
    seq_lens: tuple[int, ...]
    queries: tuple[int, ...]
    rejected: tuple[int, ...]
    num_reqs: int

    @property
    def max_rejected(self) -> int:
        return max(self.case.lookahead, self.case.queries if self.case.lookahead == 0 else 0)


# window, block sizes of the draft's KV groups, look-ahead, query tokens of a decode
_DRAFTS = {
    "dflash": (256, (16,), 0, 8),
    "dflash-odd": (250, (128,), 0, 8),
    "dspark-groups": (256, (64, 128), 0, 7),
    "dspark-three-groups": (96, (16, 32, 48), 0, 7),
    "eagle3": (512, (128,), 3, 4),
    "eagle3-small-window": (6, (4,), 3, 4),
    "eagle3-one-token-blocks": (20, (1,), 7, 8),
}
_MAX_MODEL_LEN = 3000
KINDS = ("decode", "prefill", "mixed", "padded", "stale padding", "near max_model_len", "window over context")


def batches(*, per_kind: int = 6, seed: int = 0) -> Iterator[ParityBatch]:
    """``per_kind`` batches of every kind for every draft, always the same ones for a seed."""
    for number, (window, sizes, lookahead, queries) in enumerate(_DRAFTS.values()):
        case = Case(
            window=window,
            block_sizes=sizes,
            full_columns=tuple(-(-_MAX_MODEL_LEN // size) for size in sizes),
            max_model_len=_MAX_MODEL_LEN,
            queries=queries,
            lookahead=lookahead,
        )
        for kind in KINDS:
            rng = np.random.default_rng((seed, number, KINDS.index(kind)))
            for _ in range(per_kind):
                yield _draw(kind, case, rng)


def _draw(kind: str, case: Case, rng: np.random.Generator) -> ParityBatch:
    live = int(rng.integers(1, 9))
    rows = live + (int(rng.integers(1, 5)) if "padding" in kind or kind == "padded" else 0)
    seq_lens = _lengths(case, rng, live)
    queries = np.full(live, case.queries)
    if kind == "window over context":
        case = replace(case, window=_MAX_MODEL_LEN + case.lookahead)
    elif kind == "near max_model_len":
        # A parallel drafter counts its query tokens on top of the context, without asking for the limit.
        seq_lens = rng.integers(_MAX_MODEL_LEN - 20, _MAX_MODEL_LEN + (case.queries if not case.lookahead else 0), live)
    elif kind in ("prefill", "mixed"):
        # Chunks around the window's length and beyond it; in a mixed batch decodes stand beside them.
        chunks = rng.integers(1, 4 * case.window, live)
        queries = np.where(rng.random(live) < (1.0 if kind == "prefill" else 0.5), chunks, queries)
        seq_lens = np.maximum(seq_lens, queries)
        case = replace(case, queries=int(queries.max()))
    seq_lens = np.maximum(seq_lens, np.minimum(queries, _MAX_MODEL_LEN))
    queries = np.minimum(queries, seq_lens)
    rejected = rng.integers(0, 1 + max(case.lookahead, 3), live)
    tail = np.zeros(rows - live, dtype=np.int64)
    if kind == "stale padding":
        tail = _lengths(case, rng, rows - live)
    return ParityBatch(
        kind=kind,
        case=case,
        seq_lens=(*seq_lens.tolist(), *tail.tolist()),
        queries=(*queries.tolist(), *[0] * (rows - live)),
        rejected=(*rejected.tolist(), *[0] * (rows - live)),
        num_reqs=live,
    )


def _lengths(case: Case, rng: np.random.Generator, count: int) -> np.ndarray:
    """Half anywhere, half where something changes: the window's end, and edges of blocks."""
    block = case.block_sizes[-1]
    edges = case.window - case.lookahead + block * rng.integers(0, 4, count) + rng.integers(-2, 3, count)
    anywhere = rng.integers(1, _MAX_MODEL_LEN + 1, count)
    return np.clip(np.where(rng.random(count) < 0.5, edges, anywhere), 1, _MAX_MODEL_LEN)
