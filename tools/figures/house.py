# SPDX-License-Identifier: Apache-2.0
"""Which data flows through which room, from the options to the draft's attention: the picture of the house's page."""

from pathlib import Path

from matplotlib.figure import Figure

from .step import arrow, box

PICTURE = Path(__file__).parents[2] / "docs" / "assets" / "house.png"
_ROOM, _THEIRS = "#f4b6b0", "#dfe7f1"

# Text and whose it is.
_START = [
    ("plugin.py\nhooks the speculator's\nconstructor", _ROOM),
    ("options.py\nadditional_config,\nread strictly", _ROOM),
    ("config.py, startup.py\none window in force, or\noff; one line says it", _ROOM),
    ("groups.py\nwhich KV cache groups\nhold draft layers", _ROOM),
    ("inputs.py\nwindowed lengths and\ntables, allocated once", _ROOM),
]
_STEP = [
    ("speculator\nbuilds metadata for\na draft forward", _THEIRS),
    ("seams/\nhand that build over;\nvllm.py knows versions", _ROOM),
    ("window.py\nhost bounds, counters", _ROOM),
    ("kernels.py\none launch: lengths and\ntables by geometry.py", _ROOM),
    ("attention reads\nthe sink and the\nnewest W tokens", _THEIRS),
]


def draw(path: Path) -> None:
    figure = Figure(figsize=(11, 3.8), dpi=120, layout="tight")
    axes = figure.subplots()
    axes.axis("off")
    axes.set_xlim(0, 12.5)
    axes.set_ylim(-0.3, 4.2)
    for y, title, row in ((2.5, "Once, at start-up", _START), (0.2, "In every proposal", _STEP)):
        axes.text(0.1, y + 1.45, title, fontsize=11, weight="bold", va="center")
        for i, (text, color) in enumerate(row):
            x = 0.1 + 2.5 * i
            box(axes, x, y, 2.1, 1.15, text, color)
            if i:
                arrow(axes, (x - 0.35, y + 0.57), (x - 0.03, y + 0.57))
    axes.text(12.2, -0.15, "red: this project   blue: vLLM", fontsize=8.5, ha="right", color="#666666")
    figure.savefig(path)
