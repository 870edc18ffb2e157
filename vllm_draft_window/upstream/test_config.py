# SPDX-License-Identifier: Apache-2.0
"""Which tests upstream's CI runs for a change: more source files for modules of its test configuration."""

import re
from collections.abc import Collection

from .checkout import Tree
from .errors import MissingAnchor

_PATH = ".github/workflows/scripts/test_config.yaml"
_MODULE = re.compile(r"(- name: .*\n(?:  .*\n)*?  source_file_dependencies:\n)((?:    - .*\n)+)")


def add_dependency(tree: Tree, source: str, *, beside: Collection[str]) -> None:
    """Let every module that depends on one of the files ``beside`` depend on ``source`` too."""
    text = tree.read(_PATH)

    def with_source(found: re.Match[str]) -> str:
        wanted = any(f"    - {path}\n" in found[2] for path in beside)
        return f"{found[0]}    - {source}\n" if wanted and f"    - {source}\n" not in found[2] else found[0]

    edited = _MODULE.sub(with_source, text)
    if f"    - {source}\n" not in edited:
        raise MissingAnchor(_PATH, f"a module that depends on {' or '.join(beside)}")
    tree.write(_PATH, edited)
