# SPDX-License-Identifier: Apache-2.0
"""Acceptance against context length, one panel per draft."""

from collections.abc import Collection
from pathlib import Path

from vllm_draft_window.reporting import figure_and_axes, plot_cells

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


def plot(path: Path, all_results: Collection[Result]) -> None:
    """Draw the first source's results as lines and the others' as rings."""
    every = sorted(all_results, key=lambda r: r.context)
    source = next(iter(all_results)).source
    results, rings = ([r for r in every if (r.source == source) is first] for first in (True, False))
    methods = sorted({r.method for r in results})
    figure, panels = figure_and_axes({r.context for r in results}, width=10.5, titles=methods)
    for axes, method in zip(panels, methods, strict=True):
        for column, (color, line, marker) in STYLES.items():
            own, others = ([r for r in part if (r.method, r.column) == (method, column)] for part in (results, rings))
            if own:
                plot_cells(axes, own, color=color, linestyle=line, marker=marker, markersize=5, label=column)
            x, y = [r.context for r in others], [r.accepted_length for r in others]
            axes.scatter(x, y, s=130, facecolors="none", edgecolors=color, linewidths=1.2)
    panels[0].set_ylim(1, 1.1 * max(r.accepted_length for r in results))
    # The panel with most columns names all of them.
    handles, labels = max((axes.get_legend_handles_labels() for axes in panels), key=lambda found: len(found[1]))
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=150)
