# SPDX-License-Identifier: Apache-2.0
"""Our own files as they belong into vLLM-Ascend's tree, where no plugin hooks anything from outside."""

from pathlib import Path

import libcst as cst

from .checkout import Tree
from .imports import add_import, is_import
from .python_source import Source, keep_definitions

REPOSITORY = Path(__file__).parents[2]
TEMPLATES = Path(__file__).parent / "templates"

PACKAGE = "vllm_ascend/draft_window"
SHIM = "vllm_ascend/spec_decode/sliding_window.py"

_PLUGIN_ONLY = {"plugin.py", "strict_config.py", "counters.py", "bound_launch.py", "seams/recorded.py"}
_MRV1 = "mrv1.py"
_MRV1_HOOKS = ("install", "_loading", "_has_loop_of_its_own")
_MRV1_PUBLIC = ("attach", "report", "attach_to_groups", "crop_each_group", "compare_full_lengths")
_MRV1_DOCSTRING = """Model Runner V1: the options and rules of Model Runner V2 for its proposers.

A proposer gets its adapter from :func:`attach`. Three of its methods need help, each by a decorator: where KV groups
become known, where DSpark builds metadata per KV group from tables that the adapter never saw, and where a later step
compares lengths, windowed by then, with ``max_model_len``.
"""

_COPYRIGHT = "# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project"

UNIT_TESTS = "tests/ut/draft_window"
MRV1_TESTS = "tests/ut/spec_decode"
# Ours -> upstream's. Tests that need hypothesis, which upstream does not install, stay here.
COPIED_TESTS = {
    "tests/oracle.py": f"{UNIT_TESTS}/oracle.py",
    "tests/ut/draft_window/test_config.py": f"{UNIT_TESTS}/test_config.py",
    "tests/ut/draft_window/test_options.py": f"{UNIT_TESTS}/test_options.py",
    "tests/ut/draft_window/test_public_cases.py": f"{UNIT_TESTS}/test_public_cases.py",
    "tests/ut/spec_decode/metadata.py": f"{MRV1_TESTS}/draft_window_metadata.py",
    "tests/ut/spec_decode/test_known_defects.py": f"{MRV1_TESTS}/test_draft_window_defects.py",
}
_TEMPLATE_TESTS = {
    "test_geometry.py": f"{UNIT_TESTS}/test_geometry.py",
    "test_speculators.py": f"{UNIT_TESTS}/test_speculators.py",
    "test_draft_window_proposers.py": f"{MRV1_TESTS}/test_draft_window_proposers.py",
}
_MOVED_IMPORTS = {
    "from tests import oracle": f"from {UNIT_TESTS.replace('/', '.')} import oracle",
    "from tests.oracle import": f"from {UNIT_TESTS.replace('/', '.')}.oracle import",
    "from tests.ut.spec_decode.metadata import": f"from {MRV1_TESTS.replace('/', '.')}.draft_window_metadata import",
    "import re": "import regex as re",  # upstream's linter forbids the other
}


def write_package(tree: Tree) -> None:
    """The package without the plugin's parts."""
    for path in sorted((REPOSITORY / PACKAGE).rglob("*.py")):
        name = path.relative_to(REPOSITORY / PACKAGE).as_posix()
        if name not in _PLUGIN_ONLY | {_MRV1}:
            tree.write(f"{PACKAGE}/{name}", path.read_text())


def write_mrv1(tree: Tree) -> None:
    """The shim, and the rules for Model Runner V1 without the hooks into an installed vLLM-Ascend."""
    tree.write(SHIM, (REPOSITORY / SHIM).read_text())
    tree.write(f"{PACKAGE}/{_MRV1}", mrv1_in_tree((REPOSITORY / PACKAGE / _MRV1).read_text()))


def mrv1_in_tree(text: str) -> str:
    source = Source(f"{PACKAGE}/{_MRV1}", text)
    renames = {f"_{name}": name for name in _MRV1_PUBLIC}
    keep_definitions(source, lambda name: name not in _MRV1_HOOKS, renames, _MRV1_DOCSTRING)
    unhooked = [line for line in source.module.body if not _assigns(line, "_PROPOSERS")]
    source.module = source.module.with_changes(body=unhooked)
    source.drop_unused_imports()
    return source.text


def write_unit_tests(tree: Tree, cases: str) -> None:
    """Ours with upstream's imports, and those that only make sense in upstream's tree.

    Args:
        cases: lines of a list that name the speculators to test.
    """
    for ours, theirs in COPIED_TESTS.items():
        tree.write(theirs, with_moved_imports((REPOSITORY / ours).read_text()))
    for name, theirs in _TEMPLATE_TESTS.items():
        tree.write(theirs, (TEMPLATES / f"{name}.txt").read_text().replace("@CASES@", cases))
    # The folders' own names would otherwise be top-level packages for pytest.
    for folder in (UNIT_TESTS, *map(str, Path(UNIT_TESTS).parents)):
        if folder == UNIT_TESTS and tree.get(f"{folder}/__init__.py") is None:
            tree.write(f"{folder}/__init__.py", "")


def with_moved_imports(text: str) -> str:
    """A test file with its helpers' new places, its imports still sorted, and upstream's second header line."""
    module = cst.parse_module(text)
    for old, new in _MOVED_IMPORTS.items():
        while found := _find_import(module, old):
            line, names = found
            module = add_import(_without(module, line), new + names)
    text = module.code
    return text if _COPYRIGHT in text else text.replace("\n", f"\n{_COPYRIGHT}\n", 1)


def _find_import(module: cst.Module, beginning: str) -> tuple[cst.SimpleStatementLine, str] | None:
    """The import statement that is ``beginning``, or goes on after its ``import``; with what it goes on with."""
    for line in module.body:
        if isinstance(line, cst.SimpleStatementLine) and is_import(line):
            code = module.code_for_node(line.with_changes(leading_lines=[])).strip()
            if code == beginning or (beginning.endswith("import") and code.startswith(beginning)):
                return line, code[len(beginning) :]
    return None


def _without(module: cst.Module, line: cst.SimpleStatementLine) -> cst.Module:
    """Drop an import; the blank line that opened its section stays with the next one."""
    body = list(module.body)
    position = body.index(line)
    following = body[position + 1]
    if line.leading_lines and isinstance(following, cst.SimpleStatementLine) and is_import(following):
        body[position + 1] = following.with_changes(leading_lines=following.leading_lines or line.leading_lines)
    del body[position]
    return module.with_changes(body=body)


def _assigns(line: cst.CSTNode, name: str) -> bool:
    if not isinstance(line, cst.SimpleStatementLine) or not isinstance(line.body[0], cst.Assign):
        return False
    target = line.body[0].targets[0].target
    return isinstance(target, cst.Name) and target.value == name
