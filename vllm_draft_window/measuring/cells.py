# SPDX-License-Identifier: Apache-2.0
"""Acceptance of one configuration at one context length, its interval over prompts, and a file of such cells."""

import json
from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

LEVEL = 95
"""Percent of an interval."""
RESAMPLES = 4000


C = TypeVar("C", bound="Cell")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One configuration at one context length.

    Attributes:
        context: prompt length, tokens.
        tokens: tokens that the target's steps gave, one entry per prompt.
        steps: target steps, one entry per prompt.
        seconds: wall time.
    """

    context: int
    tokens: tuple[int, ...]
    steps: tuple[int, ...]
    seconds: float

    @classmethod
    def of(cls: "type[C]", counted: Iterable[tuple[int, int]], **fields: Any) -> "C":
        """From tokens and target steps of each prompt."""
        tokens, steps = zip(*counted, strict=True)
        return cls(tokens=tokens, steps=steps, **fields)

    @property
    def key(self) -> Hashable:
        """Where the cell belongs in its table."""
        raise NotImplementedError

    @property
    def accepted_length(self) -> float:
        """Mean tokens per target step over all prompts: accepted draft tokens plus the target's own."""
        return sum(self.tokens) / sum(self.steps)

    @cached_property
    def resampled(self) -> np.ndarray:
        """Accepted lengths of ``RESAMPLES`` draws of prompts with replacement, [RESAMPLES].

        Cells of one context length draw the same prompts, so that their difference is a paired one.
        """
        from scipy.stats import bootstrap

        def accepted_length(tokens: np.ndarray, steps: np.ndarray, axis: int = -1) -> np.ndarray:
            return tokens.sum(axis) / steps.sum(axis)

        return bootstrap(
            (self.tokens, self.steps),
            accepted_length,
            paired=True,
            n_resamples=RESAMPLES,
            method="percentile",
            rng=np.random.default_rng(self.context),
        ).bootstrap_distribution

    @property
    def interval(self) -> tuple[float, float]:
        """Of the accepted length, over prompts."""
        return interval(self.resampled)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.accepted_length:.2f} [dim]({low:.2f}-{high:.2f})[/]"


def interval(samples: np.ndarray) -> tuple[float, float]:
    """Percentile interval of ``LEVEL`` percent."""
    low, high = np.percentile(samples, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return float(low), float(high)


def read_cells(lines: Iterable[str], kind: type[C]) -> tuple[dict[str, Any], dict[Any, C]]:
    """The settings that a :class:`CellFile` was made with, and its cells by key."""
    settings, *records = map(json.loads, lines)
    cells = [kind.of(zip(record.pop("tokens"), record.pop("steps"), strict=True), **record) for record in records]
    return settings, {cell.key: cell for cell in cells}


class CellFile(Generic[C]):
    """JSON lines: settings, then one finished cell a line, so that an interrupted run goes on where it was."""

    def __init__(
        self, path: Path, kind: type[C], settings: dict[str, Any], *, option: str, fresh: bool | None = None
    ) -> None:
        """Open or create the file that ``option`` names; ``fresh`` drops what is in it, if there is such an option.

        Raises:
            ValueError: it cannot be written, or belongs to a run with other settings.
        """
        self.path = path
        self.cells: dict[Any, C] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [] if fresh or not path.exists() else self._complete_lines()
            if not lines:
                path.write_text(json.dumps(settings) + "\n")
                return
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror}; choose another {option}") from None
        written, self.cells = read_cells(lines, kind)
        differing = sorted(key for key in written.keys() | settings.keys() if written.get(key) != settings.get(key))
        if differing:
            again = "" if fresh is None else ", or --fresh to begin again"
            raise ValueError(
                f"{path} belongs to a run with another {', '.join(differing)}; choose another {option}{again}"
            )

    def add(self, cell: C) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(cell)) + "\n")
        self.cells[cell.key] = cell

    def _complete_lines(self) -> list[str]:
        """A line without its end was being written when the run was killed."""
        text = self.path.read_text()
        complete = text[: text.rfind("\n") + 1]
        if complete != text:
            self.path.write_text(complete)
        return complete.splitlines()
