# SPDX-License-Identifier: Apache-2.0
"""Accepted length against context length of the demo pair's drafts, as its model card tells: the start page's picture.

::

    python -m tools.figures.acceptance
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

REPOSITORY = Path(__file__).parents[2]
METRICS = REPOSITORY / "checkpoints" / "demo-pair" / "metrics.json"
PICTURE = REPOSITORY / "docs" / "assets" / "acceptance_demo_pair.png"
WINDOW = "512"
_NAMES = {"dspark": "DSpark", "eagle3": "EAGLE3"}
_COLOURS = {"dspark": "#1f77b4", "eagle3": "#d62728"}


def draw(path: Path) -> None:
    drafts = json.loads(METRICS.read_text())["drafts"]
    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=120)
    for method, name in _NAMES.items():
        lengths = drafts[method]["mean_accepted_length"]
        contexts = sorted(lengths, key=int)
        x = [int(context) for context in contexts]
        for window, style, label in ((WINDOW, "-", f"window of {WINDOW}"), ("full", "--", "full draft attention")):
            y = [lengths[context][window] for context in contexts]
            axes.plot(x, y, style, marker="o", color=_COLOURS[method], label=f"{name}, {label}")
    trained = drafts["dspark"]["context"]
    axes.axvline(trained, color="#888888", linewidth=1, linestyle=":")
    axes.text(trained * 1.04, 0.25, "trained up to here", color="#666666", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [f"{context:,}" for context in x])
    axes.minorticks_off()
    axes.set_ylim(0, 6.2)
    axes.set_xlabel("context length, tokens")
    axes.set_ylabel("mean accepted length")
    axes.grid(alpha=0.3)
    axes.legend(loc="center right", bbox_to_anchor=(1.0, 0.56), fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    draw(PICTURE)
