# SPDX-License-Identifier: Apache-2.0
"""Tables of figures, and acceptance against context length as one of them and as the axes of a plot."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import JustifyMethod
from rich.table import Table

from .measuring.cells import LEVEL, Cell

INTERVALS = f"{LEVEL} % intervals over prompts"


def acceptance_table(
    # by column, context
    cells: Mapping[tuple[Any, int], Cell],
    # column -> heading
    headings: Mapping[Any, str],
    *,
    title: str,
) -> Table:
    """Contexts down, columns across; cells that were not measured stay empty."""
    contexts = sorted({context for column, context in cells if column in headings})
    rows = [[str(context), *(str(cells.get((column, context), "")) for column in headings)] for context in contexts]
    caption = f"tokens per target step, with {INTERVALS}"
    return table(["context length", *headings.values()], rows, title=title, caption=caption)


def table(
    headings: Iterable[str], rows: Iterable[Sequence[str]], *, first: JustifyMethod = "right", **options: Any
) -> Table:
    """Columns aligned right, but for the ``first``; ``options`` are those of rich's tables."""
    shown = Table(**options)
    for i, heading in enumerate(headings):
        shown.add_column(heading, justify="right" if i else first)
    for row in rows:
        shown.add_row(*row)
    return shown


def figure_and_axes(contexts: Collection[int], *, width: float, titles: Sequence[str]) -> tuple[Any, list[Any]]:
    """A figure with axes side by side, one for each title, contexts in powers of two along each."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    figure = Figure(figsize=(width, 4.2), layout="constrained")
    panels = list(figure.subplots(1, len(titles), sharey=True, squeeze=False)[0])
    for axes, title in zip(panels, titles, strict=True):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(sorted(contexts)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xlabel("context length, tokens")
        axes.set_title(title, fontsize=11)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("accepted length, tokens per target step")
    return figure, panels


def plot_cells(axes: Any, cells: Sequence[Cell], *, shift: float = 0.0, intervals: bool = False, **style: Any) -> None:
    """One line over the contexts; ``shift`` moves it aside, so that intervals do not hide each other."""
    x = [cell.context * 1.025**shift for cell in cells]
    y = [cell.accepted_length for cell in cells]
    errors = None
    if intervals:
        # [2, cells]: how far down and up
        low, high = np.transpose([cell.interval for cell in cells])
        errors = np.clip([y - low, high - y], 0, None)
    axes.errorbar(x, y, yerr=errors, **{"capsize": 3, "linewidth": 1.4, "markersize": 4, **style})
