# SPDX-License-Identifier: Apache-2.0
"""The demo pair's sweep: the picture of the page's own table."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_draft_window.sweep.report import plot

DOCS = Path(__file__).parents[2] / "docs"
PICTURE = DOCS / "assets" / "sweep_demo_pair.png"
WINDOWS = (None, 256, 512, 1024)


def draw(path: Path) -> None:
    cells = published()
    plot(path, cells, WINDOWS, sorted({context for _, context in cells}))


def published() -> dict[Any, Any]:
    """By window and context, what the table says: a line of means, then a line of intervals."""
    table = re.findall(r"^│ +(\d+) │(.*)│\n│ +│(.*)│$", (DOCS / "sweep.md").read_text(), re.MULTILINE)
    cells = {}
    for context, means, intervals in table:
        bounds = re.findall(r"\(([\d.]+)-([\d.]+)\)", intervals)
        for window, mean, (low, high) in zip(WINDOWS, means.split("│"), bounds, strict=True):
            cells[window, int(context)] = SimpleNamespace(
                context=int(context), accepted_length=float(mean), interval=(float(low), float(high))
            )
    return cells
