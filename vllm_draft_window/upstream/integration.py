# SPDX-License-Identifier: Apache-2.0
"""The edits that make vLLM-Ascend use the package: base classes, proposers, the worker, option fields, CI routing."""

import re
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from .checkout import Tree
from .errors import MissingAnchor
from .package import PACKAGE, SHIM, TEMPLATES, write_unit_tests
from .python_source import Source

MODULE = PACKAGE.replace("/", ".")


Mixin = tuple[str, str]
"""Module of the package and class."""


@dataclass(frozen=True)
class Integration:
    """One speculator of Model Runner V2 and the mixins that become its first base classes."""

    path: str
    speculator: str
    mixins: tuple[Mixin, ...]


_V2 = "vllm_ascend/worker/v2/spec_decode"
_PARALLEL = (("seams.ascend", "AscendParallelSeam"),)
_AUTOREGRESSIVE = (("seams.ascend", "AscendTargetDependentSeam"),)
INTEGRATIONS = (
    Integration(f"{_V2}/dspark/speculator.py", "AscendDSparkSpeculator", _PARALLEL),
    Integration(f"{_V2}/dflash/speculator.py", "AscendDFlashSpeculator", _PARALLEL),
    Integration(f"{_V2}/eagle/speculator.py", "AscendEagleSpeculator", _AUTOREGRESSIVE),
    Integration(f"{_V2}/mtp/speculator.py", "AscendMTPSpeculator", _AUTOREGRESSIVE),
)

_WORKER = "vllm_ascend/worker/worker.py"
_UTILS = "vllm_ascend/spec_decode/utils.py"
_PROPOSER = "vllm_ascend/spec_decode/llm_base_proposer.py"
_DSPARK_PROPOSER = "vllm_ascend/spec_decode/dspark_proposer.py"
_ROUTING = ".github/workflows/scripts/test_config.yaml"
_BASE = "AscendSpecDecodeBaseProposer"
_OPTION_FIELDS = {
    "draft_window_sink_size": "int = 0",
    "draft_window_min_context": "int = 0",
    "draft_window_mtp": "bool = False",
}

_LOADED = """
# Same options and rules as in Model Runner V2. Why a window is off, the worker has said.
draft_window = decide(self.vllm_config)
if isinstance(draft_window, DraftWindow):
    mrv1.attach(self, draft_window, self.kernel_block_size)
    mrv1.report(self)
"""
# On the class too: a proposer may be used before __init__ has come to them, and unit tests leave __init__ out.
_FIELDS = ("draft_window_size: int | None = None", "sliding_window: Any = None")
_KNOWING_GROUPS = """
@mrv1.attach_to_groups
def initialize_attn_backend(self, *args: Any, **kwargs: Any) -> None:
    super().initialize_attn_backend(*args, **kwargs)
"""


def _self_attribute(name: str) -> m.Attribute:
    return m.Attribute(value=m.Name("self"), attr=m.Name(name))


def _assignment(name: str) -> m.BaseMatcherNode:
    target = m.AssignTarget(target=_self_attribute(name))
    return m.SimpleStatementLine(body=[m.Assign(targets=[target]) | m.AnnAssign(target=_self_attribute(name))])


def integrate_speculators(tree: Tree) -> None:
    for item in INTEGRATIONS:
        source = Source(item.path, tree.read(item.path))
        for module, mixin in reversed(item.mixins):
            source.add_import(f"from {MODULE}.{module} import {mixin}")
            source.prepend_base(item.speculator, mixin)
        tree.write(item.path, source.text)


def report_at_start(tree: Tree) -> None:
    """The worker says once why a window cannot act, whatever the runner and the method."""
    tree.write(f"{PACKAGE}/report.py", (TEMPLATES / "report.py.txt").read_text())
    source = Source(_WORKER, tree.read(_WORKER))
    source.add_import(f"from {MODULE}.report import report_window_off")
    super_init = m.Call(func=m.Attribute(value=m.Call(func=m.Name("super")), attr=m.Name("__init__")))
    source.insert_after("NPUWorker", "__init__", super_init, "super().__init__(…)", "report_window_off(vllm_config)\n")
    tree.write(_WORKER, source.text)


def use_shim(tree: Tree) -> None:
    """Replace the adapter; its old name keeps working."""
    source = Source(_UTILS, tree.read(_UTILS))
    source.remove_class("SlidingWindowAdapter")
    source.add_import(f"from {_dotted(SHIM)} import SlidingWindowAdapter", "# noqa: F401 (its former place)")
    tree.write(_UTILS, source.text)


def integrate_proposers(tree: Tree) -> None:
    source = Source(_PROPOSER, tree.read(_PROPOSER))
    adapter = m.Call(func=m.Name("SlidingWindowAdapter"))
    loading: list[m.BaseMatcherNode] = [
        _assignment("draft_window_size"),
        m.If(body=m.MatchIfTrue(lambda body: bool(m.findall(body, adapter)))),
    ]
    source.replace_lines(_BASE, "load_model", loading, "the SlidingWindowAdapter of draft_window_size", _LOADED)
    source.add_class_attributes(_BASE, _FIELDS)
    source.drop_imported_name("SlidingWindowAdapter")
    source.add_method(_BASE, _KNOWING_GROUPS, before="build_draft_attn_metadata")
    source.decorate(_BASE, "build_draft_attn_metadata", "mrv1.crop_each_group")
    source.decorate(_BASE, "attn_update_stack_num_spec_norm", "mrv1.compare_full_lengths")
    source.add_import(f"from {MODULE} import mrv1")
    source.add_import(f"from {MODULE}.config import DraftWindow")
    source.add_import(f"from {MODULE}.startup import decide")
    tree.write(_PROPOSER, source.text)

    # Groups its layers itself, without calling the base class.
    source = Source(_DSPARK_PROPOSER, tree.read(_DSPARK_PROPOSER))
    source.decorate("AscendDSparkProposer", "initialize_attn_backend", "mrv1.attach_to_groups")
    source.add_import(f"from {MODULE} import mrv1")
    tree.write(_DSPARK_PROPOSER, source.text)


def add_option_fields(tree: Tree) -> None:
    """Where a model of the additional config declares ``draft_window_size``, it must know the other options too."""
    for path in tree.files_with("draft_window_size", "vllm_ascend/"):
        source = Source(path, tree.read(path))
        for name in [node.name.value for node in source.module.body if isinstance(node, cst.ClassDef)]:
            _add_fields(source, source.find_class(name))
        tree.write(path, source.text)


def _add_fields(source: Source, node: cst.ClassDef) -> None:
    fields = {}
    for line in node.body.body:
        if m.matches(line, m.SimpleStatementLine(body=[m.AnnAssign(target=m.Name())])):
            fields[line.body[0].target.value] = line  # type: ignore[attr-defined, union-attr]
    if "draft_window_size" not in fields:
        return
    missing = [f"{name}: {rest}" for name, rest in _OPTION_FIELDS.items() if name not in fields]
    source.add_lines(fields["draft_window_size"], missing)


def write_tests(tree: Tree) -> None:
    cases = []
    for item in INTEGRATIONS:
        mixins = ", ".join(f'"{mixin}"' for _, mixin in item.mixins)
        cases.append(f'    ("{item.path.split("/")[-2]}", "{item.speculator}", [{mixins}]),')
    write_unit_tests(tree, "\n".join(cases))


def _dotted(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def route_tests(tree: Tree) -> None:
    """The shim's file selects the spec-decode tests; everything under ``worker/v2`` is routed by its folder."""
    text = tree.read(_ROUTING)
    if f"- {SHIM}\n" in text:
        return
    module = re.compile(r"(- name: spec_decode_base\n(?:  .*\n)*?  source_file_dependencies:\n)((?:    - .*\n)+)")
    if not module.search(text):
        raise MissingAnchor(_ROUTING, "module spec_decode_base with source_file_dependencies")
    tree.write(_ROUTING, module.sub(lambda found: f"{found[0]}    - {SHIM}\n", text, count=1))
