# SPDX-License-Identifier: Apache-2.0
"""The options compared on both drafts: the acceptance page's picture, from the results that are beside it."""

from pathlib import Path

from tools.comparison.plot import plot
from tools.comparison.results import Result
from vllm_draft_window.measuring.cells import CellFile

ASSETS = Path(__file__).parents[2] / "docs" / "assets"
PICTURE = ASSETS / "acceptance_options.png"


def draw(path: Path) -> None:
    plot(path, CellFile(ASSETS / "acceptance_options.jsonl", Result, {"max_tokens": 24}, option="place").cells.values())
