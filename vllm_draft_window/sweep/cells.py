# SPDX-License-Identifier: Apache-2.0
"""Finished cells of a sweep, on disk as they finish, so that an interrupted sweep goes on where it was."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One window at one context length.

    Attributes:
        window: tokens; ``None`` is without a window.
        context: prompt length, tokens.
        tokens: tokens that the target's steps gave, one entry per prompt.
        steps: target steps, one entry per prompt.
        seconds: wall time.
    """

    window: int | None
    context: int
    tokens: tuple[int, ...]
    steps: tuple[int, ...]
    seconds: float

    @property
    def accepted_length(self) -> float:
        """Mean tokens per target step over all prompts: accepted draft tokens plus the target's own."""
        return sum(self.tokens) / sum(self.steps)


class CellFile:
    """JSON lines: the sweep's settings, then one finished cell a line."""

    def __init__(self, path: Path, settings: dict[str, Any], *, fresh: bool = False) -> None:
        """Open or create the file.

        Raises:
            ValueError: the file cannot be written, or belongs to a sweep with other settings.
        """
        self.path = path
        self.cells: dict[tuple[int | None, int], Cell] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [] if fresh or not path.exists() else self._complete_lines()
            if not lines:
                path.write_text(json.dumps(settings) + "\n")
                return
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror}; choose another --out") from None
        written = json.loads(lines[0])
        differing = sorted(key for key in written.keys() | settings.keys() if written.get(key) != settings.get(key))
        if differing:
            raise ValueError(
                f"{path} belongs to a sweep with another {', '.join(differing)}; "
                f"choose another --out, or --fresh to begin again"
            )
        for line in lines[1:]:
            record = json.loads(line)
            self._keep(Cell(**record | {"tokens": tuple(record["tokens"]), "steps": tuple(record["steps"])}))

    def add(self, cell: Cell) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(cell)) + "\n")
        self._keep(cell)

    def missing(self, windows: Iterable[int | None], contexts: Iterable[int]) -> dict[int | None, list[int]]:
        """Contexts without a finished cell, by window; windows without any are left out."""
        wanted = {window: [n for n in contexts if (window, n) not in self.cells] for window in windows}
        return {window: missing for window, missing in wanted.items() if missing}

    def _keep(self, cell: Cell) -> None:
        self.cells[cell.window, cell.context] = cell

    def _complete_lines(self) -> list[str]:
        """A line without its end was being written when the sweep was killed."""
        text = self.path.read_text()
        complete = text[: text.rfind("\n") + 1]
        if complete != text:
            self.path.write_text(complete)
        return complete.splitlines()
