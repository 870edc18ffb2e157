# SPDX-License-Identifier: Apache-2.0
"""Documentation in upstream's pages: a section of the user guide, a row of the options."""

import re
from collections.abc import Iterator

from .checkout import Tree
from .errors import MissingAnchor

_GUIDE = "docs/source/user_guide/feature_guide/speculative_decoding.md"
_OPTIONS = "docs/source/user_guide/configuration/additional_config.md"
_FENCE = re.compile(r"^\s*(```|~~~)")


def add_section(tree: Tree, section: str) -> None:
    """Put a section behind the last that begins with "Speculating", or in place of one of the same title."""
    text = tree.read(_GUIDE)
    lines = text.splitlines(keepends=True)
    tops = [*_sections(text), (len(lines), "")]
    title = section.partition("\n")[0].lstrip("# ")
    methods = [i for i, (_, other) in enumerate(tops) if other.startswith("Speculating") or other == title]
    if not methods:
        raise MissingAnchor(_GUIDE, "a section 'Speculating …'")
    replaces = tops[methods[-1]][1] == title
    start, stop = tops[methods[-1] + (not replaces)][0], tops[methods[-1] + 1][0]
    tail = "\n" if stop < len(lines) else ""
    head = "" if replaces or start < len(lines) else "\n"
    tree.write(_GUIDE, "".join(lines[:start]) + head + section + tail + "".join(lines[stop:]))


def add_option(tree: Tree, row: str) -> None:
    """Put a row at the end of the table of the options."""
    lines = tree.read(_OPTIONS).splitlines(keepends=True)
    heading = next((i for i, line in enumerate(lines) if line.startswith("### Configuration options")), len(lines))
    table = [i for i in range(heading, len(lines)) if lines[i].startswith("|")]
    ends = next((i for i in table if not lines[i + 1 : i + 2] or not lines[i + 1].startswith("|")), None)
    if ends is None:
        raise MissingAnchor(_OPTIONS, "the table under 'Configuration options'")
    tree.write(_OPTIONS, "".join([*lines[: ends + 1], row, *lines[ends + 1 :]]))


def _sections(text: str) -> Iterator[tuple[int, str]]:
    """Line number and title of every heading of level 2 outside of code."""
    in_code = False
    for number, line in enumerate(text.splitlines()):
        if _FENCE.match(line):
            in_code = not in_code
        elif not in_code and line.startswith("## "):
            yield number, line[3:].strip()
