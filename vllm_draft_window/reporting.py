# SPDX-License-Identifier: Apache-2.0
"""Acceptance against context length, as a table and as the axes of a plot."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
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
    table = Table(title=title, caption=f"tokens per target step, with {INTERVALS}")
    for heading in ("context length", *headings.values()):
        table.add_column(heading, justify="right")
    for context in sorted({context for column, context in cells if column in headings}):
        row = [cells.get((column, context)) for column in headings]
        table.add_row(str(context), *("" if cell is None else str(cell) for cell in row))
    return table


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
