# SPDX-License-Identifier: Apache-2.0
"""Acceptance against context length, one panel per draft."""

from collections.abc import Iterable
from pathlib import Path

from .results import Result

# Colour and line by column; columns that share a line on purpose differ in their markers.
STYLES = {
    "off": ("0.25", "--", "s"),
    "window": ("tab:blue", "-", "o"),
    "sink 4": ("tab:orange", "-", "^"),
    "sink 64": ("tab:green", ":", "v"),
    "gate 1024": ("tab:purple", ":", "x"),
    "step 0 only": ("tab:red", "-.", "D"),
    "steps >= 1 only": ("tab:brown", "-.", "P"),
}


def plot(path: Path, all_results: Iterable[Result]) -> None:
    """Draw the first source's results as lines and the others' as rings."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    every = list(all_results)
    results, rings = ([r for r in every if (r.source == every[0].source) is first] for first in (True, False))
    methods = list(dict.fromkeys(r.method for r in results))
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    panels = figure.subplots(1, len(methods), sharey=True, squeeze=False)[0]
    for axes, method in zip(panels, methods, strict=True):
        own = [r for r in results if r.method == method]
        contexts = sorted({r.context for r in own})
        for column, (color, line, marker) in STYLES.items():
            cells = sorted((r for r in own if r.column == column), key=lambda r: r.context)
            if cells:
                x, y = [r.context for r in cells], [r.accepted_length for r in cells]
                axes.plot(x, y, color=color, linestyle=line, marker=marker, markersize=5, linewidth=1.4, label=column)
            measured = [r for r in rings if (r.method, r.column) == (method, column)]
            x, y = [r.context for r in measured], [r.accepted_length for r in measured]
            axes.scatter(x, y, s=130, facecolors="none", edgecolors=color, linewidths=1.2)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(contexts))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xlabel("context length, tokens")
        axes.set_title(method, fontsize=11)
        axes.grid(alpha=0.3)
        axes.set_ylim(1, 1.1 * max(r.accepted_length for r in results))
    panels[0].set_ylabel("accepted length, tokens per target step")
    # The panel with most columns names all of them.
    handles, labels = max((axes.get_legend_handles_labels() for axes in panels), key=lambda found: len(found[1]))
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=150)
