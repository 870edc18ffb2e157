# SPDX-License-Identifier: Apache-2.0
"""What a sweep leaves behind: JSON, CSV and a plot."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_draft_window.reporting import INTERVALS, figure_and_axes, plot_cells

from .verdict import Cells, Verdict, Window, WindowCell


def name(window: Window) -> str:
    return "off" if window is None else str(window)


def heading(window: Window) -> str:
    return "window off" if window is None else f"W={window}"


def rows(cells: Cells, windows: Sequence[Window], contexts: Sequence[int]) -> list[dict[str, Any]]:
    """One row per cell."""
    return [_row(window, context, cells[window, context]) for window in windows for context in contexts]


def _row(window: Window, context: int, cell: WindowCell) -> dict[str, Any]:
    low, high = cell.interval
    return {
        "window": name(window),
        "context": context,
        "accepted_length": round(cell.accepted_length, 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "prompts": len(cell.steps),
        "target_steps": sum(cell.steps),
        "seconds": round(cell.seconds, 2),
    }


def write(
    folder: Path,
    cells: Cells,
    windows: Sequence[Window],
    contexts: Sequence[int],
    *,
    settings: dict[str, Any],
    verdict: Verdict,
) -> list[Path]:
    """Write ``sweep.json``, ``sweep.csv`` and ``sweep.png``; returns their paths."""
    content = rows(cells, windows, contexts)
    paths = [folder / f"sweep.{suffix}" for suffix in ("json", "csv", "png")]
    report = {"settings": settings, "recommendation": verdict._asdict(), "rows": content}
    paths[0].write_text(json.dumps(report, indent=2) + "\n")
    with paths[1].open("w", newline="") as file:
        writer = csv.DictWriter(file, list(content[0]))
        writer.writeheader()
        writer.writerows(content)
    plot(paths[2], cells, windows, contexts)
    return paths


def plot(path: Path, cells: Cells, windows: Sequence[Window], contexts: Sequence[int]) -> None:
    """One line per window, with intervals."""
    figure, (axes,) = figure_and_axes(contexts, width=7, titles=[f"Acceptance against context ({INTERVALS})"])
    for i, window in enumerate(windows):
        style = {"color": "0.25", "linestyle": "--", "marker": "s"} if window is None else {"marker": "o"}
        row = [cells[window, context] for context in contexts]
        plot_cells(axes, row, shift=i - (len(windows) - 1) / 2, intervals=True, label=heading(window), **style)
    axes.set_ylim(bottom=1)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=150)
