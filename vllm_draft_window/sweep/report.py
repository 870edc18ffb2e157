# SPDX-License-Identifier: Apache-2.0
"""What a sweep leaves behind: a table, JSON, CSV and a plot."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from .verdict import LEVEL, Cells, Verdict, interval, resample


def name(window: int | None) -> str:
    return "off" if window is None else str(window)


def rows(cells: Cells, windows: Sequence[int | None], contexts: Sequence[int]) -> list[dict[str, Any]]:
    """One row per cell."""
    result = []
    for window in windows:
        for context in contexts:
            cell = cells[window, context]
            low, high = interval(resample(cell))
            result.append(
                {
                    "window": name(window),
                    "context": context,
                    "accepted_length": round(cell.accepted_length, 4),
                    "low": round(low, 4),
                    "high": round(high, 4),
                    "prompts": len(cell.steps),
                    "target_steps": sum(cell.steps),
                    "seconds": round(cell.seconds, 2),
                }
            )
    return result


def table(cells: Cells, windows: Sequence[int | None], contexts: Sequence[int], *, title: str) -> Table:
    result = Table(
        title=f"Mean accepted length · {title}",
        caption=f"tokens per target step, with {LEVEL} % intervals over prompts",
    )
    result.add_column("context length", justify="right")
    for window in windows:
        result.add_column("window off" if window is None else f"W={window}", justify="right")
    for context in contexts:
        texts = []
        for window in windows:
            cell = cells[window, context]
            low, high = interval(resample(cell))
            texts.append(f"{cell.accepted_length:.2f} [dim]({low:.2f}-{high:.2f})[/]")
        result.add_row(str(context), *texts)
    return result


def write(
    folder: Path,
    cells: Cells,
    windows: Sequence[int | None],
    contexts: Sequence[int],
    *,
    settings: dict[str, Any],
    verdict: Verdict,
) -> list[Path]:
    """Write ``sweep.json``, ``sweep.csv`` and ``sweep.png``; returns their paths."""
    content = rows(cells, windows, contexts)
    paths = [folder / f"sweep.{suffix}" for suffix in ("json", "csv", "png")]
    recommendation = {"window": verdict.window, "reason": verdict.reason}
    report = {"settings": settings, "recommendation": recommendation, "rows": content}
    paths[0].write_text(json.dumps(report, indent=2) + "\n")
    with paths[1].open("w", newline="") as file:
        writer = csv.DictWriter(file, list(content[0]))
        writer.writeheader()
        writer.writerows(content)
    _plot(paths[2], cells, windows, contexts)
    return paths


def _plot(path: Path, cells: Cells, windows: Sequence[int | None], contexts: Sequence[int]) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for i, window in enumerate(windows):
        # Lines side by side, so that intervals of one context length do not hide each other.
        x = [context * 1.025 ** (i - (len(windows) - 1) / 2) for context in contexts]
        y = [cells[window, context].accepted_length for context in contexts]
        bounds = [interval(resample(cells[window, context])) for context in contexts]
        errors = [
            [max(0.0, value - low) for value, (low, _) in zip(y, bounds, strict=True)],
            [max(0.0, high - value) for value, (_, high) in zip(y, bounds, strict=True)],
        ]
        style: dict[str, Any] = (
            {"color": "0.25", "linestyle": "--", "marker": "s"} if window is None else {"marker": "o"}
        )
        label = "window off" if window is None else f"W = {window}"
        axes.errorbar(x, y, yerr=errors, label=label, capsize=3, markersize=4, linewidth=1.4, **style)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(contexts)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("context length, tokens")
    axes.set_ylabel("accepted length, tokens per target step")
    axes.set_ylim(bottom=1)
    axes.set_title(f"Acceptance against context ({LEVEL} % intervals over prompts)", fontsize=11)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=150)
