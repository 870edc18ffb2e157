# SPDX-License-Identifier: Apache-2.0
"""The tool that writes the vLLM-Ascend pull request: its edits on small modules, and the whole of it on a checkout."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import libcst.matchers as m
import pytest
from typer.testing import CliRunner

from vllm_draft_window.cli import app
from vllm_draft_window.upstream import docs, package
from vllm_draft_window.upstream.errors import MissingAnchor, Refused
from vllm_draft_window.upstream.integration import INTEGRATIONS, add_option_fields
from vllm_draft_window.upstream.python_source import Source
from vllm_draft_window.upstream.steps import STEPS

CHECKOUT = os.environ.get("VLLM_ASCEND_SRC")
needs_checkout = pytest.mark.skipif(
    CHECKOUT is None, reason="needs a vLLM-Ascend checkout: set VLLM_ASCEND_SRC to its folder and run this file again"
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


def assignment(name: str) -> m.BaseMatcherNode:
    target = m.Attribute(value=m.Name("self"), attr=m.Name(name))
    return m.SimpleStatementLine(body=[m.Assign(targets=[m.AssignTarget(target=target)])])


def test_base_class_goes_in_front_once():
    edited = source()
    edited.prepend_base("Proposer", "Mixin")
    edited.prepend_base("Proposer", "Mixin")
    assert edited.text == MODULE.replace("class Proposer(Base)", "class Proposer(Mixin, Base)")


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


def test_an_import_that_opens_the_first_section_of_its_kind():
    edited = source("import torch\n\n\nclass A:\n    pass\n")
    edited.add_import("from vllm_ascend.m import x", "# noqa: F401")
    assert edited.text.startswith("import torch\n\nfrom vllm_ascend.m import x  # noqa: F401\n\n\nclass A")


def test_an_imported_name_goes_alone():
    edited = source()
    edited.drop_imported_name("Adapter")
    assert edited.text == MODULE.replace("    Adapter,\n", "")
    edited.drop_imported_name("last")
    assert "vllm_ascend.z" not in edited.text


def test_statements_are_replaced_with_the_comment_above_them():
    edited = source()
    edited.replace_lines("Proposer", "load", [assignment("size"), m.If()], "the adapter", "\n# Why.\nattach(self)\n")
    assert "        first()\n\n        # Why.\n        attach(self)\n\n        last()\n" in edited.text
    assert "How it is built" not in edited.text and "Adapter(" not in edited.text


def test_decorator_method_and_statement():
    edited = source()
    for _ in range(2):
        edited.decorate("Proposer", "load", "hooks.loading")
    edited.add_method("Proposer", "\ndef groups(self):\n    pass\n", before="load")
    super_init = m.Call(func=m.Attribute(value=m.Call(func=m.Name("super"))))
    edited.insert_after("Proposer", "__init__", super_init, "super().__init__()", "report()\n")
    assert edited.text.count("    @hooks.loading\n    def load(self):") == 1
    assert "\n\n    def groups(self):\n        pass\n\n    @hooks" in edited.text
    assert "super().__init__()\n        report()\n" in edited.text
    compile(edited.text, "edited", "exec")


@pytest.mark.parametrize(
    ("edit", "anchor"),
    [
        (lambda s: s.prepend_base("Gone", "Mixin"), "class Gone"),
        (lambda s: s.remove_class("Gone"), "class Gone"),
        (lambda s: s.decorate("Proposer", "gone", "d"), "method Proposer.gone"),
        (lambda s: s.drop_imported_name("Gone"), "an import of Gone"),
        (lambda s: s.insert_after("Proposer", "load", m.Name("gone"), "the call", "x\n"), "in Proposer.load, the call"),
        (lambda s: s.replace_lines("Proposer", "load", [m.While()], "the loop", "x\n"), "in Proposer.load, the loop"),
        (lambda s: s.add_class_attributes("Proposer", ["x = 1"]), "an attribute at the top of Proposer"),
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

    def files_with(self, text, folder):
        return [path for path, content in self.items() if text in content and path.startswith(folder)]


def test_attributes_stand_in_front_of_the_methods():
    edited = source("class A:\n    x: int\n\n    def f(self):\n        pass\n")
    edited.add_class_attributes("A", ["y: int = 0"])
    assert edited.text == "class A:\n    x: int\n    y: int = 0\n\n    def f(self):\n        pass\n"


def test_option_fields_where_a_model_declares_the_first_one():
    text = "class Options(BaseModel, extra='forbid'):\n    draft_window_size: int | None = None\n    other: int = 0\n"
    files = Files({"vllm_ascend/config.py": text, "vllm_ascend/user.py": "x.get('draft_window_size')\n"})
    for _ in range(2):
        add_option_fields(files)
    lines = files["vllm_ascend/config.py"].splitlines()
    names = [line.split(":")[0].strip() for line in lines[1:]]
    options = ["draft_window_size", "draft_window_sink_size", "draft_window_min_context", "draft_window_mtp"]
    assert names == [*options, "other"]
    assert files["vllm_ascend/user.py"] == "x.get('draft_window_size')\n"


def test_model_runner_v1_without_the_hooks_into_an_installed_package():
    text = package.mrv1_in_tree((package.REPOSITORY / package.PACKAGE / "mrv1.py").read_text())
    compile(text, "mrv1", "exec")
    for absent in ("install", "sys.modules", "additional_config", "import sys"):
        assert absent not in text
    for public in ("attach", "report", "attach_to_groups", "crop_each_group", "compare_full_lengths"):
        assert f"def {public}(" in text and f"_{public}(" not in text.replace(f"def {public}(", "")
    with pytest.raises(MissingAnchor, match="function _attach"):
        package.mrv1_in_tree('"""Nothing."""\n')


def _defined(module: str) -> set[str]:
    """What a module of the package, named with dots, has at its top level."""
    tree = ast.parse((package.REPOSITORY / f"{module.replace('.', '/')}.py").read_text())
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
    return names


@pytest.mark.parametrize("template", sorted(path.name for path in package.TEMPLATES.glob("test_*.py.txt")))
def test_templates_use_names_that_the_package_has(template):
    tree = ast.parse(re.sub(r"^@\w+@$", "", (package.TEMPLATES / template).read_text(), flags=re.MULTILINE))
    dotted = package.PACKAGE.replace("/", ".")
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(dotted):
            continue
        if node.module == dotted:
            modules |= {alias.asname or alias.name: f"{dotted}.{alias.name}" for alias in node.names}
        else:
            assert {alias.name for alias in node.names} <= _defined(node.module), node.module
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            assert node.attr in _defined(modules[node.value.id]), f"{node.value.id}.{node.attr}"


def test_mixins_are_where_the_integration_imports_them_from():
    for module, name in {mixin for item in INTEGRATIONS for mixin in item.mixins}:
        assert name in _defined(f"{package.PACKAGE.replace('/', '.')}.{module}")


def test_copied_tests_import_their_helpers_where_upstream_has_them():
    text = package.with_moved_imports(
        "# SPDX-License-Identifier: Apache-2.0\nimport re\n\nimport pytest\n\nfrom tests import oracle\n"
        "from tests.oracle import Case\nfrom tests.ut.spec_decode.metadata import make_table\n"
        "from vllm_ascend.x import y\n"
    )
    assert text.splitlines()[2:] == [
        "",
        "import pytest",
        "import regex as re",
        "",
        "from tests.ut.draft_window import oracle",
        "from tests.ut.draft_window.oracle import Case",
        "from tests.ut.spec_decode.draft_window_metadata import make_table",
        "from vllm_ascend.x import y",
    ]


GUIDE = "# Guide\n\n## Speculating using A\n\n```shell\n## no heading\n```\n\n## Other\n\ntext\n"


def test_guide_section_stands_behind_the_methods_and_replaces_an_older_one():
    section = "## Draft Window\n\nnew\n"
    added = docs.with_section(GUIDE, section, "guide.md")
    assert added == GUIDE.replace("## Other", f"{section}\n## Other")
    assert docs.with_section(added, section, "guide.md") == added
    older = GUIDE.replace("## Other", "## Sliding-Window Draft\n\nold\n\n### MRV2 status\n\nnone\n\n## Other")
    assert docs.with_section(older, section, "guide.md") == added
    with pytest.raises(MissingAnchor, match="guide.md: a section 'Speculating"):
        docs.with_section("# Guide\n", section, "guide.md")


def test_option_rows_and_navigation_are_added_once():
    table = "### Configuration options\n\n| Name |\n|---|\n| `a` |\n\nafter\n"
    rows = docs.with_option_rows(table, "| `draft_window_size` |\n", "options.md")
    assert rows == table.replace("| `a` |\n", "| `a` |\n| `draft_window_size` |\n")
    assert docs.with_option_rows(rows, "| `draft_window_size` |\n", "options.md") == rows
    menu = "nav:\n  - D:\n    - developer_guide/Design_Documents/a.md\n  - E:\n"
    added = docs.with_navigation(menu)
    assert added == menu.replace("a.md\n", "a.md\n    - developer_guide/Design_Documents/draft_window.md\n")
    assert docs.with_navigation(added) == added
    with pytest.raises(MissingAnchor, match="mkdocs.yml"):
        docs.with_navigation("nav:\n")


@pytest.mark.parametrize("name", ["design", "guide", "options"])
def test_both_languages_have_the_same_blocks(name):
    pairs = docs.translated_blocks(docs._text(f"{name}.md"), docs._text(f"{name}.zh.md"))
    assert pairs and all(any("\u4e00" <= c <= "\u9fff" for c in chinese) for _, chinese in pairs)
    with pytest.raises(Refused, match="1 blocks in English and 2 in Chinese"):
        docs.translated_blocks("a", "b\n\nc")


# The command, on a checkout that is not one, and on a real one.


def run(checkout: Path, *args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["upstream-pr", "--checkout", str(checkout), "--branch", "draft-window", *args])
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
    assert code == 2 and f"{INTEGRATIONS[0].path} is not in the checkout" in output
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


@needs_checkout
def test_writes_signed_off_commits_that_lint_with_upstreams_configuration(clone):
    base = git(clone, "rev-parse", "HEAD")
    code, output = run(clone)
    assert code == 0, output
    assert git(clone, "branch", "--show-current") == "draft-window"
    commits = git(clone, "log", "--format=%s%x09%(trailers:key=Signed-off-by,valueonly,separator=;)", f"{base}..HEAD")
    subjects = [line.split("\t")[0] for line in reversed(commits.splitlines())]
    assert subjects == [step.subject for step in STEPS if step.subject in subjects] and len(subjects) >= 7
    assert all(line.endswith("A Reviewer <reviewer@example.org>") for line in commits.splitlines())
    assert git(clone, "status", "--porcelain") == ""
    changed = [path for path in git(clone, "diff", "--name-only", base).splitlines() if path.endswith(".py")]
    run_ruff = [sys.executable, "-m", "ruff"]
    ruff = [*run_ruff, "check", "--quiet", *changed], [*run_ruff, "format", "--check", "--quiet", *changed]
    for command in ruff:
        result = subprocess.run(command, cwd=clone, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
    text = (clone / ".git" / "PULL_REQUEST.md").read_text()
    assert "### How was this patch tested?" in text and "**not run**" in text and not re.search(r"@[A-Z_]+@", text)
    assert "draft_window_sink_size" not in (clone / "vllm_ascend/spec_decode/llm_base_proposer.py").read_text()
    for item in INTEGRATIONS:
        bases = ", ".join(mixin for _, mixin in item.mixins)
        assert f"class {item.speculator}({bases}, " in (clone / item.path).read_text()


@needs_checkout
def test_a_second_run_has_nothing_to_do_and_another_content_is_refused(clone):
    assert run(clone)[0] == 0
    tip = git(clone, "rev-parse", "HEAD")
    for switch in (["switch", "draft-window"], ["switch", "--detach", "HEAD~1"]):
        git(clone, *switch, "--quiet")
        code, output = run(clone)
        assert code == 0 and "Nothing to do: draft-window has this content already" in output
    assert git(clone, "rev-parse", "draft-window") == tip
    git(clone, "switch", "--quiet", "draft-window")
    (clone / "mkdocs.yml").write_text("other\n")
    git(clone, "commit", "--quiet", "--amend", "--no-edit", "--all")
    code, output = run(clone)
    assert code == 2 and "the branch draft-window exists with other content" in output


@needs_checkout
def test_says_which_anchor_moved(clone):
    path = clone / "vllm_ascend" / "spec_decode" / "llm_base_proposer.py"
    path.write_text(path.read_text().replace("def attn_update_stack_num_spec_norm(", "def renamed("))
    git(clone, "commit", "--quiet", "--all", "-m", "upstream moved")
    code, output = run(clone)
    assert code == 2
    assert "llm_base_proposer.py: method AscendSpecDecodeBaseProposer.attn_update_stack_num_spec_norm" in output
    assert git(clone, "branch", "--list", "draft-window") == ""
