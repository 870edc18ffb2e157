# SPDX-License-Identifier: Apache-2.0
"""Our modules as they stand in vLLM-Ascend's tree: same code, without what only the wheel needs."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

import libcst as cst

from .imports import is_import

OURS = Path(__file__).parents[2] / "vllm_ascend"
TEMPLATES = Path(__file__).parent / "templates"
PACKAGE = "vllm_ascend/draft_window"

# Options that the pull request does not have, and the plain arithmetic in place of the one with these options.
_WHEEL_OPTIONS = ("sink_size", "min_context")
_PLAIN = {"WindowCrop": "WindowGeometry"}


def template(name: str) -> str:
    return (TEMPLATES / name).read_text()


def geometry() -> str:
    return renamed((OURS / "draft_window" / "crop.py").read_text(), _PLAIN)


def host_planned() -> str:
    return (OURS / "draft_window" / "host_planned.py").read_text()


def adapter() -> tuple[list[cst.BaseStatement], list[str]]:
    """The statements that take the place of upstream's adapter, and the imports that they need."""
    module = cst.parse_module((OURS / "spec_decode" / "sliding_window.py").read_text())
    module = without_options(module, _WHEEL_OPTIONS)
    imports = [module.code_for_node(line).strip() for line in module.body if is_import(line)]
    code = [line for line in module.body[1:] if not is_import(line)]
    return code, imports  # type: ignore[return-value]


def renamed(text: str, names: Mapping[str, str]) -> str:
    return re.sub(rf"\b({'|'.join(names)})\b", lambda found: names[found[0]], text)


def without_options(module: cst.Module, names: Collection[str]) -> cst.Module:
    """Drop parameters, with their line of the docstring, what is assigned from them, and what they are passed on as."""
    return module.visit(_WithoutOptions(names))  # type: ignore[return-value]


class _WithoutOptions(cst.CSTTransformer):
    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._values = {*names, *(f"self._{name}" for name in names)}
        self._documented = re.compile(rf"^ *({'|'.join(names)}): .*\n", re.MULTILINE)

    def leave_Param(self, original_node: cst.Param, updated_node: cst.Param):  # type: ignore[no-untyped-def]
        return cst.RemoveFromParent() if original_node.name.value in self._values else updated_node

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg):  # type: ignore[no-untyped-def]
        return cst.RemoveFromParent() if self._is_option(original_node.value) else updated_node

    def leave_SimpleStatementLine(self, original_node, updated_node):  # type: ignore[no-untyped-def]
        statement = original_node.body[0]
        dropped = isinstance(statement, cst.Assign) and self._is_option(statement.value)
        return cst.RemoveFromParent() if dropped else updated_node

    def leave_SimpleString(self, original_node: cst.SimpleString, updated_node: cst.SimpleString) -> cst.SimpleString:
        return updated_node.with_changes(value=self._documented.sub("", updated_node.value))

    def _is_option(self, value: cst.BaseExpression) -> bool:
        return isinstance(value, cst.Name | cst.Attribute) and cst.Module([]).code_for_node(value) in self._values
