# SPDX-License-Identifier: Apache-2.0
"""What the two model runners agree on, line by line: what ``draft-window parity`` prints.

The batches, the oracle and the comparisons are those of the tests beside it.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity import engine_jobs, million
from tests.parity.batches import KINDS, batches
from tests.parity.compare import ALLOWED, by_what, compare
from tests.parity.published import PublishedWindow


@dataclass(frozen=True)
class Row:
    """One line of the report; ``differences`` that are not ``meant`` are faults."""

    compared: str
    ways: str
    rows: int
    differences: int
    meant: bool
    where_from: str


def rows(per_kind: int, examples: dict[str, str], *, engines: bool) -> Iterator[Row]:
    """The report, line by line; ``examples`` gets one of each kind of difference."""
    yield from _batches(per_kind, examples)
    yield from _published()
    if engines:
        yield from _engines()


def _batches(per_kind: int, examples: dict[str, str]) -> Iterator[Row]:
    """Realistic batches, one line per kind, and one per meant difference."""
    allowed = dict.fromkeys(ALLOWED, 0)
    total = 0
    for kind in KINDS:
        of_kind = [batch for batch in batches(per_kind=per_kind) if batch.kind == kind]
        found = by_what(difference for batch in of_kind for difference in compare(batch, fused=False))
        rows = sum(len(batch.seq_lens) for batch in of_kind)
        total += rows
        unexpected = [rows for what, rows in found.items() if what not in ALLOWED]
        for what, differences in found.items():
            first = differences[0]
            examples.setdefault(what, f"{first.ways}: {first.detail} in row {first.row} of {first.batch}")
            if what in allowed:
                allowed[what] += len(differences)
        yield Row(
            f"{kind}: start, length, tables, host lengths", "V1, V2, oracle", rows, sum(map(len, unexpected)), False, ""
        )
    for what, count in allowed.items():
        yield Row(f"all batches: {what}", "V1, V2", total, count, True, ALLOWED[what])


def _published() -> Iterator[Row]:
    """The shim beside the published formula on random windows."""
    counts = dict.fromkeys(million.PUBLISHED_DIFFERENCES, 0)
    total = unexplained = 0
    for seed, sample in enumerate(million.samples(50)):
        table, case = million.table_of(sample, seed), sample.case
        theirs = million.v1(
            sample,
            table,
            PublishedWindow(case.window, case.block_sizes[0], million.ROWS, case.lookahead, table.device),
        )
        differs = million.rows_that_differ(theirs, million.v1(sample, table))
        explained = million.causes(sample)
        for cause, rows in explained.items():
            counts[cause] += int((differs & rows).sum())
        unexplained += int((differs & ~np.logical_or.reduce(list(explained.values()))).sum())
        total += million.ROWS
    yield Row("random windows: everything else", "shim, published formula", total, unexplained, False, "")
    for cause, count in counts.items():
        where_from = million.PUBLISHED_DIFFERENCES[cause]
        yield Row(f"random windows: {cause}", "shim, published formula", total, count, True, where_from)


def _engines() -> Iterator[Row]:
    """Real engines, each runner in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = engine_jobs.jobs(Path(folder))
        v1 = engine_jobs.run("v1", list(jobs.values()), Path(folder))
        v2 = engine_jobs.run("v2", [jobs[name] for name in engine_jobs.IN_BOTH + engine_jobs.NEAR], Path(folder))
    for name in engine_jobs.IN_BOTH + engine_jobs.NEAR:
        near = name in engine_jobs.NEAR
        for key in ("tokens",) if near else ("tokens", "drafts", "accepted_per_position", "proposals"):
            differences, meant = _count_differences(v1[name][key], v2[name][key]), 0
            if key == "proposals":
                differences, meant = engine_jobs.compare_proposals(v1[name], v2[name])
            compared, size = f"engine {name}: {key.replace('_', ' ')}", _size(v1[name][key])
            yield Row(compared, "V1, V2", size, differences, False, "")
            if meant:
                yield Row(compared, "V1, V2", size, meant, True, "V1's start counts rejected tokens in later steps")
    for name, record in v1.items():
        if record["checked_builds"]:
            # The comparison raises in the engine, so a record means that nothing differed.
            yield Row(f"engine {name}: metadata builds", "V1, oracle", record["checked_builds"], 0, False, "")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, list) else 1


def _count_differences(one: Any, other: Any) -> int:
    if not isinstance(one, list):
        return int(one != other)
    return sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))
