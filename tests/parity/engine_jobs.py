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
METHODS = {"dflash": 7, "eagle3": 3}
PAST_THE_END = ["eagle3-near-off", f"eagle3-near-{WINDOW}"]
"""Runs whose draft tokens past the longest sequence differ between the runners, with or without a window: V1 moves such
a request to position 0, V2 holds it at the last one. Nobody ever accepts these tokens."""
IN_BOTH = [f"{method}-{kind}" for method in METHODS for kind in ("off", f"{WINDOW}", f"near-{WINDOW}")]
IN_BOTH += [name for name in PAST_THE_END if name not in IN_BOTH]
"""Runs that both runners do."""


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
        named[f"{method}-near-{WINDOW}"] = NEAR_LIMIT | {"method": method, "window": WINDOW}
    for name, job in named.items():
        method = job["method"]
        job |= {"name": name, "num_tokens": METHODS.get(method, 0), "folder": str(folder / str(method))}
    return named


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
