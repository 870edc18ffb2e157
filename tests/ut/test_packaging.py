# SPDX-License-Identifier: Apache-2.0
"""The wheel: it adds files to vLLM-Ascend's package tree, replaces none, and also works where there is no such tree."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
OURS = "vllm_ascend/worker/v2/spec_decode/draft_window/"
GEOMETRY = "vllm_ascend.worker.v2.spec_decode.draft_window.geometry"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, REPOSITORY]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def python(code: str, path: Path) -> str:
    # -S: nothing of this environment but torch and numpy, which follow on the path.
    environment = {"PYTHONPATH": os.pathsep.join([str(path), *(p for p in sys.path if "site-packages" in p)])}
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True, check=True, cwd=path
    )
    return result.stdout.strip()


def test_no_init_file_in_a_folder_that_upstream_owns(wheel):
    names = [name for name in wheel.namelist() if name.startswith("vllm_ascend/")]
    assert OURS + "geometry.py" in names
    assert [name for name in names if not name.startswith(OURS)] == ["vllm_ascend/spec_decode/sliding_window.py"]


def test_entry_point(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert wheel.read(name).decode().split() == [
        "[vllm.general_plugins]",
        "draft_window",
        "=",
        f"{OURS.replace('/', '.')}plugin:register",
    ]


@pytest.mark.parametrize("upstream_is_there", [False, True], ids=["alone", "beside-upstream"])
def test_import(wheel, upstream_is_there, tmp_path):
    wheel.extractall(tmp_path)
    if upstream_is_there:
        for folder in ("", "spec_decode", "worker", "worker/v2", "worker/v2/spec_decode"):
            (tmp_path / "vllm_ascend" / folder / "__init__.py").write_text(f"owner = 'upstream {folder}'\n")
    imported = python(
        f"import {GEOMETRY} as g, vllm_ascend as v; print(g.__file__, getattr(v, 'owner', None))", tmp_path
    )
    assert imported == f"{tmp_path / OURS / 'geometry.py'} {'upstream ' if upstream_is_there else None}".strip()


@pytest.mark.skipif(
    "VLLM_ASCEND_SRC" not in os.environ, reason="set VLLM_ASCEND_SRC to a vLLM-Ascend checkout to compare its files"
)
def test_no_file_of_upstream_is_replaced(wheel):
    upstream = Path(os.environ["VLLM_ASCEND_SRC"])
    assert (upstream / "vllm_ascend" / "__init__.py").exists()
    assert [name for name in wheel.namelist() if (upstream / name).exists()] == []
