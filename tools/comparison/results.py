# SPDX-License-Identifier: Apache-2.0
"""Finished cells, on disk as they finish, and the tables made of them."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from vllm_draft_window.sweep.cells import Cell
from vllm_draft_window.sweep.verdict import LEVEL, interval, resample

# source, method, column, context
Key = tuple[str, str, str, int]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One column at one context length.

    Attributes:
        source: what ran it, a version of vLLM or the simulation.
        max_tokens: tokens per prompt before which a target step counts.
        tokens: tokens that the target's steps gave, one entry per prompt.
        steps: target steps, one entry per prompt.
        output: digest of the output tokens, which no option may change.
        seconds: wall time.
    """

    source: str
    method: str
    column: str
    context: int
    max_tokens: int
    tokens: tuple[int, ...]
    steps: tuple[int, ...]
    output: str
    seconds: float

    @property
    def key(self) -> Key:
        return self.source, self.method, self.column, self.context

    @property
    def accepted_length(self) -> float:
        """Mean tokens per target step over all prompts: accepted draft tokens plus the target's own."""
        return sum(self.tokens) / sum(self.steps)

    def interval(self) -> tuple[float, float]:
        """Over prompts, of ``LEVEL`` percent."""
        cell = Cell(window=None, context=self.context, tokens=self.tokens, steps=self.steps, seconds=self.seconds)
        return interval(resample(cell))


class ResultFile:
    """One finished result a line."""

    def __init__(self, path: Path, *, max_tokens: int) -> None:
        """Open or begin the file.

        Raises:
            ValueError: it holds results of another ``max_tokens``.
        """
        self._path = path
        self.results: dict[Key, Result] = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            record = json.loads(line)
            result = Result(**record | {"tokens": tuple(record["tokens"]), "steps": tuple(record["steps"])})
            if result.max_tokens != max_tokens:
                raise ValueError(
                    f"--json {path} holds results of --max-tokens {result.max_tokens}; choose another file"
                )
            self.results[result.key] = result

    def add(self, result: Result) -> None:
        self.results[result.key] = result
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")


def different_outputs(results: Sequence[Result]) -> list[Result]:
    """Results whose output tokens are not those of the same prompts with other options."""
    first: dict[tuple[str, int, int], str] = {}
    return [r for r in results if first.setdefault((r.source, r.context, len(r.steps)), r.output) != r.output]


def table(results: Sequence[Result], *, title: str) -> Table:
    """Contexts down, columns across; cells that were not measured stay empty."""
    shown = Table(title=title, caption=f"tokens per target step, with {LEVEL} % intervals over prompts")
    shown.add_column("context length", justify="right")
    names = list(dict.fromkeys(r.column for r in results))
    for name in names:
        shown.add_column(name, justify="right")
    by_cell = {(r.context, r.column): r for r in results}
    for context in sorted({r.context for r in results}):
        row = [by_cell.get((context, name)) for name in names]
        shown.add_row(str(context), *("" if r is None else _text(r) for r in row))
    return shown


def _text(result: Result) -> str:
    low, high = result.interval()
    return f"{result.accepted_length:.2f} [dim]({low:.2f}-{high:.2f})[/]"
