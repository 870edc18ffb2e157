# SPDX-License-Identifier: Apache-2.0
"""The wheel: it adds files to vLLM-Ascend's package tree, replaces none, works where there is no such tree, and brings
a program that runs where nothing else is installed.
"""

import email
import importlib.metadata
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]
OURS = "vllm_ascend/draft_window/"
GEOMETRY = "vllm_ascend.draft_window.geometry"


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
    names = [name for name in wheel.namelist() if not name.startswith(("vllm_draft_window/", "vllm_draft_window-"))]
    assert OURS + "geometry.py" in names
    assert [name for name in names if not name.startswith(OURS)] == ["vllm_ascend/spec_decode/sliding_window.py"]


# The program, where nothing is installed but the wheel and what it depends on.


def needed_by(*names: str) -> Iterator[str]:
    """The distributions and, recursively, those that they need here; ``packaging`` knows which apply."""
    for name in names:
        yield name
        needs = map(Requirement, importlib.metadata.requires(name) or ())
        yield from needed_by(
            *(need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""}))
        )


@pytest.fixture(scope="module")
def bare_environment(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bare")
    wheel.extractall(folder)
    (metadata,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    needs = map(Requirement, email.message_from_bytes(wheel.read(metadata)).get_all("Requires-Dist"))
    for name in {*needed_by(*(need.name for need in needs if need.marker is None))}:
        for file in importlib.metadata.files(name):
            top = file.parts[0]
            if top != ".." and not (folder / top).exists():
                (folder / top).symlink_to(importlib.metadata.distribution(name).locate_file(top))
    return folder


def run_program(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-S", "-m", "vllm_draft_window", *arguments]
    environment = {"PYTHONPATH": str(folder), "COLUMNS": "120"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)


def test_help_of_the_program_in_a_bare_environment(bare_environment):
    result = run_program(bare_environment, "--help")
    assert result.returncode == 0, result.stderr
    for command in ("doctor", "plan", "sweep", "bench", "parity", "upstream-pr"):
        assert f"│ {command} " in result.stdout, result.stdout
    for command in ("doctor", "plan", "sweep", "bench", "parity", "upstream-pr"):
        assert "--help" in run_program(bare_environment, command, "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["sweep"], "draft-window sweep needs numpy: pip install 'vllm-draft-window[tools]'"),
        (["parity"], "draft-window parity needs vllm: run it with the Python that serves, or install vLLM"),
        (["parity", "--engines"], "draft-window: the demo pair, which --engines runs, comes with a clone"),
    ],
)
def test_what_is_missing_is_one_line(bare_environment, arguments, line):
    result = run_program(bare_environment, *arguments)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(line) and result.stderr.count("\n") == 1


def test_parity_needs_no_clone(wheel, tmp_path):
    """The wheel carries the oracle and the batches, and installs no package called tests."""
    pytest.importorskip("vllm")
    wheel.extractall(tmp_path)
    # -S: not this clone, which is on the path of its environment.
    path = os.pathsep.join([str(tmp_path), *(p for p in sys.path if "site-packages" in p)])
    command = [sys.executable, "-S", "-m", "vllm_draft_window", "parity", "--per-kind", "1"]
    result = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "0 of 13 comparisons differ where they should not." in result.stdout


# Where the entry point finds its package, or does not; each says what a user sees in the log.

REGISTER = """
import sys
sys.path.append({entry_point!r})  # as any site-packages, behind the checkout
import vllm_draft_window
vllm_draft_window.register()
speculators = sys.modules.get("vllm.v1.worker.gpu.spec_decode.speculator")  # slow to import, and only to be hooked
print("hooked", speculators is not None and speculators.DraftModelSpeculator.__new__ is not object.__new__)
"""


def register_beside(folder: Path) -> tuple[bool, list[str]]:
    """Whether the plugin hooked vLLM where ``vllm_ascend`` is found in ``folder``, and what it logged of the window."""
    pytest.importorskip("vllm")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "TRITON_"))}
    environment |= {"PYTHONPATH": str(folder), "VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1"}
    code = REGISTER.format(entry_point=str(REPOSITORY))
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, cwd=folder
    )
    lines = (result.stdout + result.stderr).splitlines()
    return "hooked True" in lines, [line for line in lines if "Draft window" in line]


def lay_out_upstream(folder: Path) -> Path:
    """The package folders of an installed vLLM-Ascend, each a regular package."""
    package = folder / "vllm_ascend"
    for name in ("", "spec_decode"):
        (package / name).mkdir(exist_ok=True)
        (package / name / "__init__.py").touch()
    return package


def test_the_wheel_in_the_folders_of_an_installed_vllm_ascend_takes_effect(wheel, tmp_path):
    lay_out_upstream(tmp_path)
    wheel.extractall(tmp_path)
    assert register_beside(tmp_path) == (True, [])


def test_a_source_checkout_elsewhere_gets_one_line_that_names_the_tool(tmp_path):
    package = lay_out_upstream(tmp_path)
    hooked, lines = register_beside(tmp_path)
    assert not hooked and len(lines) == 1
    assert f"Draft window off: {package} has no vllm_ascend.draft_window" in lines[0]
    assert "draft-window upstream-pr --checkout" in lines[0]


def test_a_vllm_ascend_with_the_window_merged_needs_no_hooks(wheel, tmp_path):
    lay_out_upstream(tmp_path)
    wheel.extractall(tmp_path)
    (tmp_path / OURS / "plugin.py").unlink()
    assert register_beside(tmp_path) == (False, [])


def test_an_unsupported_vllm_gets_one_line(monkeypatch, window_lines):
    vllm = pytest.importorskip("vllm")
    import vllm_draft_window
    from vllm_ascend.draft_window import plugin

    monkeypatch.setattr(vllm, "__version__", "0.25.1")
    monkeypatch.setattr(plugin, "_reporting", lambda _: pytest.fail("nothing is to be hooked"))
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu.spec_decode.speculator", None)
    vllm_draft_window.register()
    assert window_lines == [
        ("WARNING", "Draft window off: vLLM 0.25.1 is not supported, 0.26 or later is needed; upgrade vLLM.")
    ]


@pytest.mark.skipif(
    "VLLM_ASCEND_SRC" not in os.environ,
    reason="set VLLM_ASCEND_SRC to a vLLM-Ascend checkout to install the wheel into",
)
def test_the_wheel_in_the_folders_of_the_real_vllm_ascend(wheel, tmp_path):
    """Laid out as an installation: the checkout's package, the wheel's files merged in."""
    upstream = Path(os.environ["VLLM_ASCEND_SRC"])
    for path in (upstream / "vllm_ascend").rglob("*.py"):
        link = tmp_path / path.relative_to(upstream)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    assert register_beside(tmp_path)[0] is False
    wheel.extractall(tmp_path)
    assert register_beside(tmp_path) == (True, [])


def test_entry_point(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert wheel.read(name).decode().split("\n\n") == [
        "[console_scripts]\ndraft-window = vllm_draft_window.cli:main",
        "[vllm.general_plugins]\ndraft_window = vllm_draft_window:register\n",
    ]


@pytest.mark.parametrize("upstream_is_there", [False, True], ids=["alone", "beside-upstream"])
def test_import(wheel, upstream_is_there, tmp_path):
    wheel.extractall(tmp_path)
    if upstream_is_there:
        for folder in ("", "spec_decode"):
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


@pytest.mark.xdist_group("together")
def test_pinned_versions_keep_groups_on_one_worker(request):
    """Some versions of pytest and pytest-xdist ignore a group in silence, and start its engines on every worker."""
    if request.config.getoption("dist", "no") != "loadgroup" and not getattr(request.config, "workerinput", None):
        pytest.skip("with -n 2 --dist loadgroup, as in tools/test.sh")
    assert request.node.nodeid.endswith("@together")
