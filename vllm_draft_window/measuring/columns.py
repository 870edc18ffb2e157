# SPDX-License-Identifier: Apache-2.0
"""One engine or server after another, every context length through each, with a bar that counts prompts."""

import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .interrupt import interrupts_kept

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Measure = Callable[[int, Callable[[], None]], T]
"""Context length and what to call after each prompt -> what was measured."""


def measure_columns(
    console: Console,
    # column -> context lengths
    columns: Mapping[K, Collection[int]],
    opened: Callable[[K], AbstractContextManager[Measure[T]]],
    *,
    prompts: int,
    name: Callable[[K], str] = str,
) -> Iterator[tuple[K, int, T, float]]:
    """Yield column, context length, what was measured and its seconds, each when it is there; opens a column once."""
    counts = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    times = TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn()
    with interrupts_kept() as check, Progress(*counts, *times, console=console) as progress:
        task = progress.add_task("", total=prompts * sum(map(len, columns.values())))
        for column, contexts in columns.items():
            check()
            progress.update(task, description=f"{name(column)}: starting")
            with opened(column) as measure:
                for context in contexts:
                    check()
                    progress.update(task, description=f"{name(column)}: {context} tokens")
                    started = time.perf_counter()
                    measured = measure(context, lambda: progress.advance(task))
                    yield column, context, measured, time.perf_counter() - started
