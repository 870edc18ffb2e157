# SPDX-License-Identifier: Apache-2.0
"""The engine runs that both model runners are compared on; shared by the tests and the parity report."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.parity.engine_child import MARKER

REPOSITORY = Path(__file__).parents[2]
WINDOW = 64
# Shorter than the window, across it by a few tokens, and far beyond it, in one batch.
MIXED = {"contexts": [5, 62, 150, 331, 700], "max_tokens": 20}
# Proposals that reach past the longest sequence that the engine serves.
NEAR_LIMIT = {"contexts": [990, 1000, 1010, 1015], "max_tokens": 30}
# Many proposals whose rejected tokens lie across a block edge.
EDGES = {"contexts": [900, 900, 900, 900], "max_tokens": 30}
METHODS = {"dflash": 7, "eagle3": 3}
REJECTED_TAILS = [f"eagle3-{WINDOW}", f"eagle3-edges-{WINDOW}"]
"""Runs in which the runners' starts may differ, see :func:`compare_proposals`."""
IN_BOTH = ["dflash-off", f"dflash-{WINDOW}", "eagle3-off", *REJECTED_TAILS]
"""Runs of which everything is compared."""
NEAR = [f"dflash-near-{WINDOW}", "eagle3-near-off", f"eagle3-near-{WINDOW}"]
"""Runs of which the tokens are compared: with or without a window, V1 stops drafting near the end and V2 does not."""


def jobs(folder: Path) -> dict[str, dict[str, Any]]:
    """All jobs by name; drafts are written below ``folder``."""
    named: dict[str, dict[str, Any]] = {
        "none": MIXED | {"method": None, "window": None},
        "none-near": NEAR_LIMIT | {"method": None, "window": None},
    }
    for method in METHODS:
        named[f"{method}-off"] = MIXED | {"method": method, "window": None}
        named[f"{method}-{WINDOW}"] = MIXED | {"method": method, "window": WINDOW}
        # Without a window stock DFlash reads past its block table here.
        if method != "dflash":
            named[f"{method}-near-off"] = NEAR_LIMIT | {"method": method, "window": None}
            named[f"{method}-edges-{WINDOW}"] = EDGES | {"method": method, "window": WINDOW}
        named[f"{method}-near-{WINDOW}"] = NEAR_LIMIT | {"method": method, "window": WINDOW}
    for name, job in named.items():
        method = job["method"]
        job |= {"name": name, "num_tokens": METHODS.get(method, 0), "folder": str(folder / str(method))}
    return named


def compare_proposals(v1: dict[str, Any], v2: dict[str, Any]) -> tuple[int, int]:
    """Count proposals that differ between the runners: unexplained ones, and those that are meant to.

    Model Runner V1 has one start per proposal, from lengths that still count the rejected tokens; V2's later steps know
    better. Where a block edge lies between the two, V2 sees a block more from the second step on.
    """
    unexplained = meant = 0
    for one, other, straddles in zip(v1["proposals"], v2["proposals"], v2["straddles"], strict=True):
        for a, b, across in zip(one, other, straddles, strict=True):
            if a != b:
                explained = across and a[0] == b[0]
                meant, unexplained = meant + explained, unexplained + (not explained)
    return unexplained, meant


def run(runner: str, jobs: list[dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    """Records by job name, from one process of ``runner``.

    Raises:
        RuntimeError: the process ended without records, with what it had to say.
    """
    path = folder / f"{runner}.json"
    path.write_text(json.dumps(jobs))
    child = subprocess.run(
        [sys.executable, "-m", "tests.parity.engine_child", runner, str(path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [line for line in child.stdout.splitlines() if line.startswith(MARKER)]
    if not lines:
        raise RuntimeError(f"{runner} ended with {child.returncode}:\n{child.stderr[-4000:]}")
    return {record["name"]: record for record in json.loads(lines[0].removeprefix(MARKER))}
