# SPDX-License-Identifier: Apache-2.0
"""Model Runner V1, Model Runner V2 and the oracle see the same window in the same batches."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("vllm")

from tests.parity import paths
from tests.parity.batches import KINDS, batches
from tests.parity.compare import ALLOWED, by_what, compare


@pytest.mark.parametrize("fused", [False, True], ids=["torch", "fused"])
def test_no_difference_but_the_meant_ones(fused):
    found = by_what(d for batch in batches(per_kind=2 if fused else 12) for d in compare(batch, fused=fused))
    unexpected = {what: rows[0] for what, rows in found.items() if what not in ALLOWED}
    assert not unexpected
    stale = ALLOWED.keys() - found.keys()
    assert not stale, f"no input shows {stale} any more: take it out of the allow-list"


def test_batches_are_what_they_are_called():
    by_kind = {kind: [batch for batch in batches() if batch.kind == kind] for kind in KINDS}
    for batch in (b for of_kind in by_kind.values() for b in of_kind):
        assert all(q <= s for s, q in zip(batch.seq_lens, batch.queries, strict=True))
    assert all(any(q > b.case.window for q in b.queries) for b in by_kind["prefill"][:1])
    assert any(len(set(b.queries)) > 1 and b.case.queries > b.case.window for b in by_kind["mixed"])
    assert all(len(b.seq_lens) > b.num_reqs and not b.seq_lens[-1] for b in by_kind["padded"])
    assert any(max(b.seq_lens) > b.case.limit for b in by_kind["near max_model_len"])
    assert any(len(b.case.block_sizes) > 1 for b in by_kind["decode"])
    assert any(b.case.lookahead for b in by_kind["decode"])


@pytest.mark.parametrize(
    ("field", "what"),
    [("length", "length"), ("exact_host", "exact_host"), ("host_bound", "host_bound"), ("start", "start")],
)
def test_a_wrong_number_is_found(monkeypatch, field, what):
    """The comparison can fail: one number off by one in one row."""
    batch = next(iter(batches()))
    right = paths.through_v1(batch)
    wrong = getattr(right, field).copy()
    wrong[0] += 1
    monkeypatch.setattr("tests.parity.compare.through_v1", lambda _: _replaced(right, **{field: wrong}))
    assert what in by_what(compare(batch, fused=False))


def test_a_wrong_column_is_found(monkeypatch):
    batch = next(iter(batches()))
    right = paths.through_v1(batch)
    tables = tuple(np.roll(table, 1, axis=1) for table in right.tables)
    monkeypatch.setattr("tests.parity.compare.through_v1", lambda _: _replaced(right, tables=tables))
    ways = {d.ways for d in compare(batch, fused=False) if d.what == "table"}
    assert ways == {"V1, oracle", "V1, V2"}


def _replaced(windowed: paths.Windowed, **changes) -> paths.Windowed:
    return dataclasses.replace(windowed, **changes)
