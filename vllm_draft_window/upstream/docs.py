# SPDX-License-Identifier: Apache-2.0
"""Documentation in upstream's places: design page, user guide section, option rows, navigation, zh_CN entries.

Every text is a pair of Markdown files of ours, ``name.md`` and ``name.zh.md``, block for block.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import libcst as cst
import libcst.matchers as m

from .checkout import Tree
from .errors import MissingAnchor, Refused
from .integration import INTEGRATIONS
from .package import TEMPLATES
from .python_source import Source

_SOURCE = "docs/source"
_LOCALE = "docs/source/locale/zh_CN/LC_MESSAGES"
_DESIGN_FOLDER = "developer_guide/Design_Documents"
_DESIGN = f"{_DESIGN_FOLDER}/draft_window"
_GUIDE = "user_guide/feature_guide/speculative_decoding"
_OPTIONS = "user_guide/configuration/additional_config"
_NAVIGATION = "mkdocs.yml"
_TITLES = "docs/hooks/nav_titles.py"

_FENCE = re.compile(r"^\s*(```|~~~)")
_TABLE_RULE = re.compile(r"^\|[\s:|-]+\|$")
_OWN_SECTION = re.compile(r"(draft|sliding)[ -]window|MRV2 status", re.IGNORECASE)
_PO_HEADER = """msgid ""
msgstr ""
"Project-Id-Version: vllm-ascend\\n"
"Language-Team: zh_CN <LL@li.org>\\n"
"Language: zh_CN\\n"
"MIME-Version: 1.0\\n"
"Content-Type: text/plain; charset=utf-8\\n"
"Content-Transfer-Encoding: 8bit\\n"
"Plural-Forms: nplurals=1; plural=0;\\n"
"""


def write_docs(tree: Tree) -> None:
    tree.write(f"{_SOURCE}/{_DESIGN}.md", _text("design.md"))
    tree.write(_NAVIGATION, with_navigation(tree.read(_NAVIGATION)))
    _add_title(tree)
    guide = f"{_SOURCE}/{_GUIDE}.md"
    tree.write(guide, with_section(tree.read(guide), _text("guide.md"), guide))
    options = f"{_SOURCE}/{_OPTIONS}.md"
    tree.write(options, with_option_rows(tree.read(options), _text("options.md"), options))


def write_translations(tree: Tree) -> None:
    for page, name in ((_DESIGN, "design"), (_GUIDE, "guide"), (_OPTIONS, "options")):
        path = f"{_LOCALE}/{page}.po"
        old = tree.get(path) or _PO_HEADER
        new = [
            f'msgid "{_escaped(english)}"\nmsgstr "{_escaped(chinese)}"\n'
            for english, chinese in translated_blocks(_text(f"{name}.md"), _text(f"{name}.zh.md"))
        ]
        tree.write(path, "\n".join([old, *(entry for entry in new if entry not in old)]))


def _text(name: str) -> str:
    methods = ", ".join(f"`{item.speculator}`" for item in INTEGRATIONS)
    return (TEMPLATES / "docs" / name).read_text().replace("@SPECULATORS@", methods)


def with_navigation(text: str) -> str:
    """One more line behind the last design document."""
    entry = f"- {_DESIGN}.md"
    if entry in text:
        return text
    *_, last = [None, *re.finditer(rf"^( *)- {_DESIGN_FOLDER}/\S+\.md\n", text, re.MULTILINE)]
    if last is None:
        raise MissingAnchor(_NAVIGATION, f"an entry of {_DESIGN_FOLDER}")
    return f"{text[: last.end()]}{last[1]}{entry}\n{text[last.end() :]}"


def _add_title(tree: Tree) -> None:
    """Both languages' titles of the page, in the order of the mapping's keys."""
    source = Source(_TITLES, tree.read(_TITLES))
    key = f'"{_DESIGN}.md"'
    mapping = next(
        (node for node in m.findall(source.module, m.Assign(targets=[m.AssignTarget(target=m.Name("TITLES"))]))), None
    )
    if not isinstance(mapping, cst.Assign) or not isinstance(mapping.value, cst.Dict):
        raise MissingAnchor(_TITLES, "the mapping TITLES")
    elements = list(mapping.value.elements)
    keys = [
        e.key.value if isinstance(e, cst.DictElement) and isinstance(e.key, cst.SimpleString) else "" for e in elements
    ]
    if key in keys:
        return
    position = next((i for i, other in enumerate(keys) if other > key), len(keys))
    neighbour = elements[max(position - 1, 0)]
    value = cst.parse_expression('{"en": "Draft Window", "zh": "草稿窗口"}')
    assert isinstance(neighbour, cst.DictElement)
    elements.insert(position, neighbour.with_changes(key=cst.SimpleString(key), value=value))
    source.module = source.module.with_deep_changes(mapping.value, elements=elements)  # type: ignore[assignment]
    tree.write(_TITLES, source.text)


def headings(text: str) -> Iterator[tuple[int, int, str]]:
    """Line number, level and title of every heading outside of code."""
    in_code = False
    for number, line in enumerate(text.splitlines()):
        if _FENCE.match(line):
            in_code = not in_code
        elif not in_code and (match := re.match(r"(#+) +(.*)", line)):
            yield number, len(match[1]), match[2]


def with_section(text: str, section: str, path: str) -> str:
    """Put the section behind the drafting methods, in place of whatever said something of the draft window before."""
    if section in text:
        return text
    lines = text.splitlines(keepends=True)
    tops = [(number, title) for number, level, title in headings(text) if level == 2]
    methods = [i for i, (_, title) in enumerate(tops) if title.startswith("Speculating")]
    if not methods:
        raise MissingAnchor(path, "a section 'Speculating …'")
    own = [(number, level) for number, level, title in headings(text) if level >= 2 and _OWN_SECTION.search(title)]
    if own:
        start, level = own[0]
        later = (number for number, other, _ in headings(text) if number > start and other <= level)
        stop = next(later, len(lines))
    else:
        following = methods[-1] + 1
        start = stop = tops[following][0] if following < len(tops) else len(lines)
    return "".join(lines[:start]) + section + "\n" * (stop < len(lines)) + "".join(lines[stop:])


def with_option_rows(text: str, rows: str, path: str) -> str:
    """Append the rows to the table of options; rows of the same options make room."""
    if rows in text:
        return text
    lines = text.splitlines(keepends=True)
    start = next((n for n, _, title in headings(text) if title.startswith("Configuration options")), None)
    table = [n for n in range(start or 0, len(lines)) if lines[n].startswith("|")]
    if start is None or not table:
        raise MissingAnchor(path, "a table under 'Configuration options'")
    stop = next(n for n in range(table[0], len(lines) + 1) if n == len(lines) or not lines[n].startswith("|"))
    kept = [line for line in lines[:stop] if not line.startswith("| `draft_window")]
    return "".join(kept) + rows + "".join(lines[stop:])


def blocks(text: str) -> list[str]:
    """What upstream translates as one entry: paragraphs, headings, and table rows; no code, no table rules."""
    found: list[str] = []
    in_code, open_block = False, False
    for line in text.splitlines():
        if _FENCE.match(line):
            in_code, open_block = not in_code, False
        elif in_code or not line.strip() or _TABLE_RULE.match(line):
            open_block = False
        elif open_block and not line.startswith("|"):
            found[-1] += f"\n{line}"
        else:
            found.append(line)
            open_block = not line.startswith(("|", "#"))
    return found


def translated_blocks(english: str, chinese: str) -> list[tuple[str, str]]:
    """Pairs of blocks that differ.

    Raises:
        Refused: the two texts do not have the same blocks; ours to mend.
    """
    pairs = blocks(english), blocks(chinese)
    if len(pairs[0]) != len(pairs[1]):
        raise Refused(f"a page has {len(pairs[0])} blocks in English and {len(pairs[1])} in Chinese")
    return [(a, b) for a, b in zip(*pairs, strict=True) if a != b]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def first_table(path: Path, header: str) -> str:
    """The table of a Markdown file of ours whose header line contains a text, for the pull request's own words."""
    lines = path.read_text().splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("|") and header in line), None)
    if start is None:
        raise MissingAnchor(path.name, f"a table with {header!r} in its header")
    stop = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    return "\n".join(lines[start:stop])
