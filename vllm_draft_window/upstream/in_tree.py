# SPDX-License-Identifier: Apache-2.0
"""Our modules as they stand in vLLM-Ascend's tree: the plain ones, under the names of those that have more options."""

import re
from pathlib import Path

import libcst as cst
import libcst.matchers as m

from .python_source import IMPORT

OURS = Path(__file__).parents[2] / "vllm_ascend" / "draft_window"
TEMPLATES = Path(__file__).parent / "templates"
PACKAGE = "vllm_ascend/draft_window"

_NAMES = {
    "draft_window.crop": "draft_window.geometry",
    "WindowCrop": "WindowGeometry",
    "WindowAdapter": "SlidingWindowAdapter",
}


def template(name: str) -> str:
    return (TEMPLATES / name).read_text()


def ours(module: str) -> str:
    """One of our modules, with the names that it has there."""
    return re.sub(rf"\b({'|'.join(_NAMES)})\b", lambda found: _NAMES[found[0]], (OURS / module).read_text())


def adapter() -> tuple[list[cst.BaseStatement], list[str]]:
    """The statements that take the place of upstream's adapter, and the imports that they need."""
    module = cst.parse_module(ours("adapter.py"))
    imports = [module.code_for_node(line).strip() for line in module.body if m.matches(line, IMPORT)]
    code = [line for line in module.body[1:] if not m.matches(line, IMPORT)]
    return code, imports  # type: ignore[return-value]
