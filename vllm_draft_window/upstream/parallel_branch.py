# SPDX-License-Identifier: Apache-2.0
"""Branch 2: the draft window of DSpark and DFlash on Model Runner V2."""

from typing import Any

import libcst as cst
import libcst.matchers as m

from .checkout import Tree
from .docs import add_option, add_section
from .in_tree import PACKAGE, ours, template
from .python_source import edited
from .test_config import add_dependency

V2 = "vllm_ascend/worker/v2"
_SPECULATORS = {
    f"{V2}/spec_decode/dspark/speculator.py": "AscendDSparkSpeculator",
    f"{V2}/spec_decode/dflash/speculator.py": "AscendDFlashSpeculator",
}
_ATTN_UTILS = f"{V2}/attn_utils.py"
_WRAPPER = "build_attn_metadata_wrapper"

_SET = """
self.draft_window = make_draft_window(
    self.vllm_config,
    self.attn_groups,
    block_tables,
    queries=self.num_query_per_req,
    max_queries=self.num_query_per_req,
)
"""


def write_window(tree: Tree) -> None:
    tree.write(f"{PACKAGE}/host_planned.py", ours("host_planned.py"))
    tree.write("tests/ut/worker/v2/test_host_planned_window.py", template("parallel/test_host_planned_window.py.txt"))


def window_speculators(tree: Tree) -> None:
    tree.write(f"{V2}/spec_decode/draft_window.py", template("parallel/draft_window.py.txt"))
    _let_builds_be_windowed(tree)
    for path, speculator in _SPECULATORS.items():
        with edited(tree, path) as source:
            source.add_class_attributes(speculator, "draft_window: HostPlannedWindow | None = None\n")
            source.append_to(speculator, "set_attn", _SET)
            wrapper = m.Call(func=m.Name(_WRAPPER), args=[])
            source.replace_in_class(speculator, wrapper, f"{_WRAPPER}(windowed_build(self))")
            source.add_import(
                "from vllm_ascend.draft_window.host_planned import HostPlannedWindow",
                "from vllm_ascend.worker.v2.spec_decode.draft_window import make_draft_window, windowed_build",
            )
    add_dependency(tree, PACKAGE, beside=[V2])
    tree.write("tests/ut/worker/v2/test_draft_window.py", template("parallel/test_draft_window.py.txt"))


def write_docs(tree: Tree) -> None:
    add_section(tree, template("parallel/guide.md").replace("@AUTOREGRESSIVE@", "not windowed"))
    add_option(tree, template("parallel/option.md"))


def write_e2e_test(tree: Tree) -> None:
    folder = "tests/e2e/pull_request/one_card/model_runner_v2"
    tree.write(f"{folder}/test_draft_window.py", template("parallel/test_e2e.py.txt"))


def _let_builds_be_windowed(tree: Tree) -> None:
    """The context that gives vLLM's speculators Ascend's build takes what windows it."""
    parameters: Any = cst.parse_statement("def _(windowed: Callable[..., dict[str, Any]] | None = None): ...")
    build = cst.parse_statement(
        "build = build_attn_metadata if windowed is None else partial(windowed, build_attn_metadata)"
    )
    swap = m.Assign(value=m.Name("build_attn_metadata"))
    with edited(tree, _ATTN_UTILS) as source:
        function = source.find_function(_WRAPPER)
        swapped: Any = m.replace(function, swap, lambda node, _: node.with_changes(value=cst.Name("build")))  # type: ignore
        docstring, *rest = swapped.body.body
        body = swapped.body.with_changes(body=[docstring, build, *rest])
        source.replace(function, swapped.with_changes(params=parameters.params, body=body))
        source.add_import("from collections.abc import Callable", "from functools import partial")
