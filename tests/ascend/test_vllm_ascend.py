# SPDX-License-Identifier: Apache-2.0
"""Runs every ``check_*.py`` of this folder on a vLLM-Ascend checkout, in one process of its own.

That process has ``torch_npu`` mocked and vLLM patched by vLLM-Ascend, so that no other test could run in it. One file
by itself, with ``VLLM_ASCEND_SRC`` set::

    VLLM_ASCEND_MOCKED=1 VLLM_PLUGINS= python -m pytest -o python_files='check_*.py' tests/ascend/check_graphs.py
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.ascend.conftest import CHECKOUT

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]

pytestmark = pytest.mark.skipif(
    CHECKOUT is None,
    reason="needs a vLLM-Ascend checkout: clone vllm-project/vllm-ascend at or after 2026-08-22 "
    "and set VLLM_ASCEND_SRC to its folder",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, list[ElementTree.Element]]:
    """Test cases of the mocked process, by file."""
    report = tmp_path_factory.mktemp("ascend") / "report.xml"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "python_files=check_*.py",
         "-o", "junit_family=xunit1", f"--junitxml={report}", str(HERE)],
        cwd=REPOSITORY,
        env=os.environ | {"VLLM_ASCEND_MOCKED": "1", "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        timeout=840,
    )  # fmt: skip
    assert report.exists(), run.stdout[-6000:] + run.stderr[-2000:]
    cases: dict[str, list[ElementTree.Element]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        cases.setdefault(Path(case.get("file") or case.get("classname", "")).name, []).append(case)
    return cases


@pytest.mark.parametrize("file", sorted(path.name for path in HERE.glob("check_*.py")))
def test_on_vllm_ascend(results, file):
    cases = results.get(file, [])
    failed = {case.get("name"): node.text for case in cases for node in case if node.tag in ("failure", "error")}
    assert not failed, "\n\n".join(f"{name}:\n{text}" for name, text in failed.items())
    assert cases, f"{file} was not collected: {sorted(results)}"
