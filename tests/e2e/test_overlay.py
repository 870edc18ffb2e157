# SPDX-License-Identifier: Apache-2.0
"""The engine contracts on a vLLM that has no CPU build: its Python over the compiled extensions of this environment's.

All in one process of its own, which finds that vLLM first on its path.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from vllm_draft_window.cpu_engine import SITE_DIR

HERE = Path(__file__).parent
TREE = os.environ.get("VLLM_TREE")
# Between them every kind of draft, the first forward and the later ones, capture, restoring, and faults put in.
FILES = ["test_lossless.py", "test_autoregressive.py", "test_contracts.py", "test_autoregressive_graphs.py"]
FILES += ["test_negative_controls.py", "test_counters.py"]

pytestmark = pytest.mark.skipif(
    TREE is None,
    reason="needs a tree of vLLM 0.33: bash tools/overlay_vllm.sh 0.33.0 .venv-test-0.32.0 TREE; set VLLM_TREE to it",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, list[ElementTree.Element]]:
    """Test cases by file."""
    report = tmp_path_factory.mktemp("overlay") / "report.xml"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1",
         f"--junitxml={report}", *(str(HERE / name) for name in FILES)],
        cwd=HERE.parents[1],
        # SITE_DIR: vLLM looks at models in processes of their own.
        env={key: value for key, value in os.environ.items() if key != "VLLM_TREE"}
        | {"PYTHONPATH": f"{TREE}{os.pathsep}{SITE_DIR}"},
        capture_output=True,
        text=True,
        timeout=840,
    )  # fmt: skip
    assert report.exists(), run.stdout[-6000:] + run.stderr[-2000:]
    cases: dict[str, list[ElementTree.Element]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        cases.setdefault(Path(case.get("file") or "").name, []).append(case)
    return cases


@pytest.mark.parametrize("file", FILES)
def test_on_the_overlay(results, file):
    cases = results.get(file, [])
    failed = {case.get("name"): node.text for case in cases for node in case if node.tag in ("failure", "error")}
    assert not failed, "\n\n".join(f"{name}:\n{text}" for name, text in failed.items())
    assert any(case.find("skipped") is None for case in cases), f"nothing of {file} ran"
