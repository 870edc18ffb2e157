# SPDX-License-Identifier: Apache-2.0
"""The tool that writes the vLLM-Ascend pull requests: its edits on small modules, and the whole of it on a checkout.

With a checkout at hand, its branches are linted, type-checked and tested with upstream's own tools, looked for in the
folder that ``VLLM_ASCEND_GATES`` names: the ``bin`` of an environment with upstream's ruff, typos, codespell and mypy.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import libcst as cst
import libcst.matchers as m
import pytest
from typer.testing import CliRunner

from vllm_draft_window.cli import app
from vllm_draft_window.upstream import docs, in_tree, test_config
from vllm_draft_window.upstream.errors import MissingAnchor
from vllm_draft_window.upstream.python_source import Source, assigns
from vllm_draft_window.upstream.series import BRANCHES

REPOSITORY = Path(__file__).parents[3]
CHECKOUT = os.environ.get("VLLM_ASCEND_SRC")
GATES = os.environ.get("VLLM_ASCEND_GATES")
needs_checkout = pytest.mark.skipif(
    CHECKOUT is None, reason="needs a vLLM-Ascend checkout: set VLLM_ASCEND_SRC to its folder and run this file again"
)
needs_gates = pytest.mark.skipif(
    CHECKOUT is None or GATES is None,
    reason="needs VLLM_ASCEND_SRC, and VLLM_ASCEND_GATES, the bin folder of an environment made with "
    "pip install ruff==0.14.0 typos==1.32.0 mypy==1.11.1 codespell==2.4.1 regex",
)

MODULE = '''\
# A header.
import os
from copy import copy

import torch
from vllm.config import VllmConfig

from vllm_ascend.a import first
from vllm_ascend.z import (
    Adapter,
    last,
)


class Old(dict):
    """To be replaced."""


class Proposer(Base):
    def __init__(self):
        super().__init__()
        self.size = None
        self.window = None

    def load(self):
        first()

        # How it is built.
        self.size = os.environ.get("size")
        if self.size is not None:
            self.window = Adapter(self.size)

        last()
'''


def source(text: str = MODULE) -> Source:
    return Source("vllm_ascend/module.py", text)


@pytest.mark.parametrize(
    ("statement", "above", "below"),
    [
        ("from vllm_ascend.m import x", "from vllm_ascend.a import first\n", "from vllm_ascend.z import ("),
        ("from vllm_ascend.zz import x", "    last,\n)\n", "\n\nclass Old"),
        ("from tests.x import y", "VllmConfig\n\n", "from vllm_ascend.a import first"),
        ("import math", "# A header.\n", "import os"),
        ("import regex as re", "from copy import copy\n\n", "import torch"),
        ("import zmq", "import torch\n", "from vllm.config"),
    ],
)
def test_an_import_is_sorted_in_once(statement, above, below):
    edited = source()
    edited.add_import(statement)
    edited.add_import(statement)
    assert f"{above}{statement}\n{below}" in edited.text
    assert edited.text.count(statement) == 1


def test_an_import_joins_the_one_from_its_module():
    edited = source("from a import B, D\n")
    edited.add_import("from a import C")
    assert edited.text == "from a import B, C, D\n"


def test_statements_are_replaced_with_the_comment_above_them():
    edited = source()
    edited.replace_lines("Proposer", "load", [assigns("size"), m.If()], "the adapter", "# Why.\nattach(self)\n")
    assert "        first()\n\n        # Why.\n        attach(self)\n\n        last()\n" in edited.text
    assert "How it is built" not in edited.text and "Adapter(" not in edited.text


def test_statements_and_methods_are_added():
    edited = source()
    edited.add_method("Proposer", "def groups(self):\n    pass\n", before="load")
    edited.insert_after("Proposer", "load", assigns("window"), "the adapter", "check()\n")
    edited.append_to("Proposer", "load", "done()\n")
    edited.add_class_attributes("Old", "size = 1\n")
    edited.add_class_attributes("Proposer", "# Why.\nsize = 1\n")
    assert "\n\n    def groups(self):\n        pass\n\n    def load(self):" in edited.text
    assert "            self.window = Adapter(self.size)\n            check()\n" in edited.text
    assert edited.text.endswith("        last()\n        done()\n")
    assert 'class Old(dict):\n    """To be replaced."""\n\n    size = 1\n' in edited.text
    assert "class Proposer(Base):\n    # Why.\n    size = 1\n\n    def __init__" in edited.text
    compile(edited.text, "edited", "exec")


def test_a_class_makes_room_for_other_statements():
    edited = source()
    edited.replace_class("Old", list(cst.parse_module("# Numbers.\nN = 1\n\n\nclass New:\n    pass\n").body))
    assert ")\n\n\n# Numbers.\nN = 1\n" not in edited.text or "class Old" not in edited.text
    assert "N = 1\n\n\nclass New:\n    pass\n\n\nclass Proposer(Base)" in edited.text


@pytest.mark.parametrize(
    ("edit", "anchor"),
    [
        (lambda s: s.replace_class("Gone", []), "class Gone"),
        (lambda s: s.append_to("Proposer", "gone", "x"), "method Proposer.gone"),
        (lambda s: s.find_function("gone"), "function gone"),
        (lambda s: s.replace_in_class("Proposer", m.Name("gone"), "x"), "in Proposer, what becomes x"),
        (lambda s: s.insert_after("Proposer", "load", m.While(), "the loop", "x\n"), "in Proposer.load, the loop"),
        (lambda s: s.replace_lines("Proposer", "load", [m.While()], "the loop", "x\n"), "in Proposer.load, the loop"),
        (lambda s: s.add_method("Proposer", "def load(self): pass", before="load"), "without a method load"),
    ],
)
def test_a_missing_anchor_is_named(edit, anchor):
    edited = source()
    with pytest.raises(MissingAnchor, match=f"vllm_ascend/module.py: .*{anchor}"):
        edit(edited)
    assert edited.text == MODULE


class Files(dict):
    """Stands for a commit's tree."""

    read, get, write = dict.__getitem__, dict.get, dict.__setitem__


def test_our_modules_without_what_only_the_wheel_needs():
    geometry = in_tree.ours("crop.py")
    compile(geometry, "geometry", "exec")
    assert "class WindowGeometry:" in geometry and "Crop" not in geometry
    statements, imports = in_tree.adapter()
    code = cst.Module(statements).code
    compile(code, "adapter", "exec")
    assert "sink" not in code and "min_context" not in code and "class SlidingWindowAdapter" in code
    assert "from vllm_ascend.draft_window.geometry import WindowGeometry" in imports
    everything = [code, geometry, in_tree.ours("host_planned.py")]
    for template in in_tree.TEMPLATES.rglob("*.*"):
        everything.append(template.read_text())
    for word in ("shim", "plugin", "mixin", "twin", "CUDA", "H200"):
        assert not any(re.search(rf"\b{word}s?\b", text, re.IGNORECASE) for text in everything), word


def test_a_dependency_is_added_to_every_module_that_has_the_other():
    path = ".github/workflows/scripts/test_config.yaml"
    entry = "- name: {}\n  optional: false\n  source_file_dependencies:\n    - {}\n  tests:\n    - tests/ut\n\n"
    files = Files({path: entry.format("a", "x/a.py") + entry.format("b", "x/b.py")})
    for _ in range(2):
        test_config.add_dependency(files, "x/new", beside=["x/a.py"])
    assert files[path] == entry.format("a", "x/a.py\n    - x/new") + entry.format("b", "x/b.py")
    with pytest.raises(MissingAnchor, match="a module that depends on x/gone.py"):
        test_config.add_dependency(files, "x/other", beside=["x/gone.py"])


GUIDE = "# Guide\n\n## Speculating using A\n\n```shell\n## no heading\n```\n\n## Other\n\ntext\n"


def test_a_section_stands_behind_the_methods_and_replaces_its_older_self():
    files = Files({docs._GUIDE: GUIDE})
    docs.add_section(files, "## Window\n\nold\n")
    assert files[docs._GUIDE] == GUIDE.replace("## Other", "## Window\n\nold\n\n## Other")
    docs.add_section(files, "## Window\n\nnew\n")
    assert files[docs._GUIDE] == GUIDE.replace("## Other", "## Window\n\nnew\n\n## Other")
    with pytest.raises(MissingAnchor, match="a section 'Speculating"):
        docs.add_section(Files({docs._GUIDE: "# Guide\n"}), "## Window\n")


def test_a_row_ends_the_table_of_options():
    files = Files({docs._OPTIONS: "### Configuration options\n\n| Name |\n|---|\n| `a` |\n\nafter\n"})
    docs.add_option(files, "| `b` |\n")
    assert "| `a` |\n| `b` |\n\nafter" in files[docs._OPTIONS]


# The command, on a checkout that is not one, and on a real one.


def run(checkout: Path, *args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["upstream-pr", "--checkout", str(checkout), "--series", "draft-window", *args])
    return result.exit_code, " ".join(result.output.split())


def git(folder: Path, *args: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *args], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def bare(tmp_path, monkeypatch) -> Path:
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.delenv(f"{name}_NAME", raising=False)
    folder = tmp_path / "checkout"
    (folder / "vllm_ascend" / "worker").mkdir(parents=True)
    (folder / "vllm_ascend" / "worker" / "__init__.py").touch()
    (folder / "Dockerfile").write_text("ARG VLLM_TAG=v0.27.1\n")
    git(tmp_path, "init", "--quiet", "--initial-branch", "main", str(folder))
    git(folder, "config", "user.name", "A Reviewer")
    git(folder, "config", "user.email", "reviewer@example.org")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "first")
    return folder


def test_refuses_what_is_no_checkout(tmp_path, bare):
    assert run(tmp_path / "gone") == (2, f"Refused: {tmp_path / 'gone'} is not a folder")
    assert "is not a git checkout" in run(tmp_path)[1]
    assert "not the top folder of a vLLM-Ascend checkout" in run(bare / "vllm_ascend")[1]
    assert "is no commit of" in run(bare, "--base", "nowhere")[1]


def test_refuses_local_changes(bare):
    (bare / "Dockerfile").write_text("changed")
    (bare / "untracked.py").touch()
    code, output = run(bare)
    assert code == 2 and "has 2 local change(s) (Dockerfile, untracked.py); commit, stash or remove them" in output


def test_refuses_without_a_name_to_sign_off(bare, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    git(bare, "config", "--unset", "user.email")
    assert "set git's user.name and user.email first" in run(bare)[1]


def test_says_what_is_missing_and_writes_nothing(bare):
    code, output = run(bare)
    assert code == 2 and "test_config.yaml is not in the checkout" in output
    assert git(bare, "branch", "--format", "%(refname:short)") == "main"
    assert git(bare, "status", "--porcelain") == ""


def test_refuses_a_checkout_for_an_older_vllm(bare):
    (bare / "Dockerfile").write_text("ARG VLLM_TAG=v0.25.1\n")
    git(bare, "commit", "--quiet", "-am", "older")
    assert "this checkout is for vLLM v0.25.1; the draft window needs 0.26 or later" in run(bare)[1]


@pytest.fixture
def clone(tmp_path) -> Path:
    folder = tmp_path / "vllm-ascend"
    git(tmp_path, "clone", "--quiet", "--shared", CHECKOUT, str(folder))
    git(folder, "config", "user.name", "A Reviewer")
    git(folder, "config", "user.email", "reviewer@example.org")
    return folder


def branches_of(clone: Path) -> list[str]:
    return git(clone, "for-each-ref", "--format=%(refname:short)", "refs/heads/draft-window-*").splitlines()


@needs_checkout
def test_writes_stacked_branches_of_signed_off_commits(clone):
    base = git(clone, "rev-parse", "HEAD")
    code, output = run(clone)
    assert code == 0, output
    names = branches_of(clone)
    assert names == [f"draft-window-{branch.name}" for branch in BRANCHES][: len(names)] and len(names) >= 2
    assert git(clone, "branch", "--show-current") == names[-1] and git(clone, "status", "--porcelain") == ""
    previous = base
    for name, branch, most in zip(names, BRANCHES, (700, 1300, 800), strict=False):
        log = git(clone, "log", "--format=%s%x09%(trailers:key=Signed-off-by,valueonly)", f"{previous}..{name}")
        commits = [line.split("\t") for line in log.splitlines() if line]
        assert [subject for subject, _ in reversed(commits)] == [step.subject for step in branch.steps]
        assert all(signed == "A Reviewer <reviewer@example.org>" for _, signed in commits)
        assert changed_lines(clone, f"{previous}..{name}") <= most
        for commit in git(clone, "rev-list", f"{previous}..{name}").splitlines():
            assert changed_lines(clone, f"{commit}~..{commit}") <= 500
        text = (clone / ".git" / "pull-requests" / name / "PULL_REQUEST.md").read_text()
        assert "### How was this patch tested?" in text and "Not run: anything on an NPU" in text
        previous = name


def changed_lines(clone: Path, commits: str) -> int:
    rows = [line.split("\t") for line in git(clone, "diff", "--numstat", commits).splitlines()]
    return sum(int(added) + int(deleted) for added, deleted, _ in rows)


@needs_checkout
def test_a_second_run_has_nothing_to_do_and_another_content_is_refused(clone):
    assert run(clone)[0] == 0
    names = branches_of(clone)
    tips = [git(clone, "rev-parse", name) for name in names]
    for switch in (["switch", names[0]], ["switch", "--detach", "HEAD~1"]):
        git(clone, *switch, "--quiet")
        code, output = run(clone)
        assert code == 0 and "Nothing to do: the branches have this content already" in output
    assert [git(clone, "rev-parse", name) for name in names] == tips
    git(clone, "switch", "--quiet", names[-1])
    (clone / "mkdocs.yml").write_text("other\n")
    git(clone, "commit", "--quiet", "--amend", "--no-edit", "--all")
    code, output = run(clone)
    assert code == 2 and f"the branch {names[-1]} exists with other content" in output


@needs_checkout
def test_says_which_anchor_moved(clone):
    path = clone / "vllm_ascend" / "spec_decode" / "llm_base_proposer.py"
    path.write_text(path.read_text().replace("def attn_update_stack_num_spec_norm(", "def renamed("))
    git(clone, "commit", "--quiet", "--all", "-m", "upstream moved")
    code, output = run(clone)
    assert code == 2
    assert "llm_base_proposer.py: method AscendSpecDecodeBaseProposer.attn_update_stack_num_spec_norm" in output
    assert branches_of(clone) == []


def gate(clone: Path, tool: str, *args: str) -> subprocess.CompletedProcess:
    command = [sys.executable] if tool.endswith(".py") else []
    path = str(clone / tool) if "/" in tool else str(Path(GATES or "") / tool)
    return subprocess.run([*command, path, *args], cwd=clone, capture_output=True, text=True)


def mypy_errors(clone: Path, commit: str) -> list[str]:
    """As upstream's ``tools/mypy.sh`` calls it; without line numbers, which move."""
    git(clone, "checkout", "--quiet", commit)
    args = ["--follow-imports", "skip", "--check-untyped-defs", "--python-executable", sys.executable]
    output = "".join(gate(clone, "mypy", *args, folder).stdout for folder in ("vllm_ascend", "tests"))
    return sorted(re.sub(r":\d+:", ":", line) for line in output.splitlines() if ": error:" in line)


@needs_gates
def test_upstreams_lint_job_has_nothing_to_say(clone):
    base = git(clone, "rev-parse", "HEAD")
    assert run(clone)[0] == 0
    for name in branches_of(clone):
        git(clone, "switch", "--quiet", name)
        changed = git(clone, "diff", "--name-only", base).splitlines()
        python = [path for path in changed if path.endswith(".py")]
        for tool, *args in (
            ("ruff", "check", "--quiet", *python),
            ("ruff", "format", "--check", "--quiet", *python),
            ("typos", "--force-exclude", *changed),
            ("codespell", "--toml", "pyproject.toml", "-L", "CANN,cann,ND,AND", *changed),
            ("tools/check_python_src_init.py",),
            ("tools/check_boolean_context_manager.py", *python),
            ("tools/check_logger.sh",),
        ):
            result = gate(clone, tool, *args)
            assert result.returncode == 0, f"{name}: {tool}: {result.stdout}{result.stderr}"


@needs_gates
def test_mypy_finds_no_error_more(clone):
    base = git(clone, "rev-parse", "HEAD")
    before = mypy_errors(clone, base)
    assert run(clone)[0] == 0
    for name in branches_of(clone):
        new = [error for error in mypy_errors(clone, name) if error not in before]
        assert not new, f"{name}: {new}"


# Loaded by pytest beside the checkout's own conftest, which mocks torch_npu before anything imports it.
_NAMES_ONLY = """
import importlib.util
import sys

if importlib.util.find_spec("torchvision") is None:  # image processors, which nothing here uses, import it
    sys.path.append({stand_ins!r})
    from npu import _NamesOnly

    sys.meta_path.append(_NamesOnly("torchvision"))
"""


@needs_checkout
def test_the_branches_own_tests_pass(clone, tmp_path):
    base = git(clone, "rev-parse", "HEAD")
    assert run(clone)[0] == 0
    changed = git(clone, "diff", "--name-only", base).splitlines()
    tests = [path for path in changed if path.startswith("tests/ut/")]
    (tmp_path / "names_only.py").write_text(_NAMES_ONLY.format(stand_ins=str(REPOSITORY / "tests" / "ascend")))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "TRITON_"))}
    environment |= {"PYTHONPATH": f"{clone}{os.pathsep}{tmp_path}", "VLLM_PLUGINS": ""}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "names_only", "-p", "no:cacheprovider", *tests],
        cwd=clone, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


@pytest.mark.engine
@needs_checkout
def test_the_series_runs_in_the_simulated_engine(clone):
    assert run(clone)[0] == 0
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "python_files=check_*.py",
         "tests/ascend/series"],
        cwd=REPOSITORY,
        env=os.environ | {"VLLM_ASCEND_SRC": str(clone), "VLLM_ASCEND_MOCKED": "1", "VLLM_PLUGINS": ""},
        capture_output=True, text=True, timeout=880,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
