# SPDX-License-Identifier: Apache-2.0
"""Compares the ways of :mod:`tests.parity.paths` row by row, and knows which differences are meant."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tests import oracle
from tests.parity.batches import ParityBatch
from tests.parity.paths import Windowed, tables_of, through_oracle, through_v1, through_v2

ALLOWED = {
    "table width": (
        "Model Runner V1 hands out whole rows of its persistent clone, ceil(W/b) + 1 columns as ever (a chunk longer "
        "than the window: all columns); Model Runner V2's tables end where the longest window ends. What one has more "
        "is zero."
    ),
    "stale padding": (
        "Model Runner V2 is told how many rows are live and empties the others; metadata of Model Runner V1 says so "
        "by a length of 0, and a padding row with another length is windowed as the request that it claims to be."
    ),
}
"""Meant differences between the runners, and where they come from."""


@dataclass(frozen=True)
class Difference:
    """``what`` differs between ``ways`` in one row of a batch."""

    what: str
    ways: str
    batch: ParityBatch
    row: int
    detail: str


def compare(batch: ParityBatch, *, fused: bool) -> list[Difference]:
    """Every difference between the runners, and between each of them and the oracle."""
    ways = {"V1": through_v1(batch), "V2": through_v2(batch, fused=fused)}
    expected = through_oracle(batch)
    found = [difference for name, way in ways.items() for difference in _against_oracle(batch, name, way, expected)]
    return found + _tables_against_each_other(batch, ways["V1"], ways["V2"])


def _against_oracle(batch: ParityBatch, name: str, way: Windowed, expected: Windowed) -> Iterable[Difference]:
    ways = f"{name}, oracle"
    for row in range(len(batch.seq_lens)):
        if row >= batch.num_reqs and batch.seq_lens[row]:
            if way.length[row] != 0:
                yield Difference("stale padding", ways, batch, row, f"length {way.length[row]}")
            continue
        for field in ("start", "length", "exact_host", "host_bound"):
            got, wanted = getattr(way, field)[row], getattr(expected, field)[row]
            if got != wanted:
                yield Difference(field, ways, batch, row, f"{got} instead of {wanted}")
        if not way.length[row] <= way.host_bound[row]:
            yield Difference("host_bound", ways, batch, row, "below the device length")
        of_row = dataclasses.replace(batch.case, queries=batch.queries[row])
        for group, (full, cropped) in enumerate(zip(tables_of(batch), way.tables, strict=True)):
            if way.host_bound[row] > cropped.shape[1] * batch.case.block_sizes[group]:
                yield Difference("host_bound", ways, batch, row, f"past the table of group {group}")
            try:
                oracle.check_table_row(of_row, group, batch.seq_lens[row], full[row], cropped[row])
            except AssertionError as error:
                yield Difference("table", ways, batch, row, f"group {group}: {error}")


def _tables_against_each_other(batch: ParityBatch, v1: Windowed, v2: Windowed) -> list[Difference]:
    found = []
    for group, (first, second) in enumerate(zip(v1.tables, v2.tables, strict=True)):
        common = min(first.shape[1], second.shape[1])
        if first.shape[1] != second.shape[1]:
            detail = f"group {group}: {first.shape[1]} and {second.shape[1]} columns"
            found.append(Difference("table width", "V1, V2", batch, 0, detail))
        for row in range(batch.num_reqs):
            rest = first[row, common:].any() or second[row, common:].any()
            if rest or not np.array_equal(first[row, :common], second[row, :common]):
                found.append(Difference("table", "V1, V2", batch, row, f"group {group}"))
    return found


def by_what(differences: Iterable[Difference]) -> dict[str, list[Difference]]:
    grouped: dict[str, list[Difference]] = {}
    for difference in differences:
        grouped.setdefault(difference.what, []).append(difference)
    return grouped
