# SPDX-License-Identifier: Apache-2.0
"""Accepted length against context length of the demo pair, as its model card has it: the picture of the start page."""

import json
from pathlib import Path

from tools.demo_pair import DEMO_PAIR
from vllm_draft_window.reporting import figure_and_axes

PICTURE = Path(__file__).parents[2] / "docs" / "assets" / "acceptance_demo_pair.png"
WINDOW = "512"
_DRAFTS = {"dspark": ("DSpark", "#1f77b4"), "eagle3": ("EAGLE3", "#d62728")}


def draw(path: Path) -> None:
    drafts = json.loads((DEMO_PAIR / "metrics.json").read_text())["drafts"]
    figure, (axes,) = figure_and_axes([256 << i for i in range(6)], width=8, titles=[""])
    for method, (name, color) in _DRAFTS.items():
        lengths = drafts[method]["mean_accepted_length"]
        for window, style, label in ((WINDOW, "-", f"window of {WINDOW}"), ("full", "--", "full draft attention")):
            y = [by_window[window] for by_window in lengths.values()]
            axes.plot([*map(int, lengths)], y, style, marker="o", color=color, label=f"{name}, {label}")
    trained = drafts["dspark"]["context"]
    axes.axvline(trained, color="#888888", linewidth=1, linestyle=":")
    axes.text(trained * 1.04, 0.25, "trained up to here", color="#666666", fontsize=9)
    axes.set_ylim(0, 6.2)
    axes.legend(loc="center right", bbox_to_anchor=(1.0, 0.56), fontsize=9)
    figure.savefig(path, dpi=120)
