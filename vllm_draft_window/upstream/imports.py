# SPDX-License-Identifier: Apache-2.0
"""Imports at the place that isort's order gives them, so that upstream's linter has nothing to move."""

import sys
from collections.abc import Sequence

import libcst as cst
from libcst.helpers import get_full_name_for_node

FIRST_PARTY = ("tests", "tools", "vllm_ascend")

_Key = tuple[int, int, str]


def add_import(module: cst.Module, statement: str) -> cst.Module:
    """Add an import statement of one name, sorted in; nothing changes where it is imported already."""
    line = cst.parse_statement(statement)
    assert isinstance(line, cst.SimpleStatementLine)
    for other in module.body:
        if _same(line, other):
            return module
        if (joined := _joined(line, other)) is not None:
            return module.with_deep_changes(other, body=[joined])  # type: ignore[return-value]
    key = _key(line)
    body = list(module.body)
    start, stop = _run_for(body, key)
    position = next((i for i in range(start, stop) if _key(body[i]) > key), stop)
    blank = [cst.EmptyLine(indent=False)]
    before = _key(body[position - 1]) if position > start else None
    after = _key(body[position]) if position < stop else None
    if after is not None and after[0] == key[0]:
        if before is None or before[0] != key[0]:  # takes the place of the first of its section, and its blank line
            following = body[position]
            line = line.with_changes(leading_lines=following.leading_lines)  # type: ignore[attr-defined]
            body[position] = following.with_changes(leading_lines=[])
    elif before is not None and before[0] != key[0]:
        line = line.with_changes(leading_lines=blank)
    elif before is None and after is not None:
        body[position] = body[position].with_changes(leading_lines=blank)
    body.insert(position, line)
    return module.with_changes(body=body)


def _run_for(body: Sequence[cst.CSTNode], key: _Key) -> tuple[int, int]:
    """Start and end of the run of imports that the key belongs to: the one with its section, else the nearest."""
    definitions = (i for i, line in enumerate(body) if isinstance(line, cst.ClassDef | cst.FunctionDef))
    end = next(definitions, len(body))
    runs: list[tuple[int, int]] = []
    for i, line in enumerate(body[:end]):
        if is_import(line):
            adjacent = runs and runs[-1][1] == i
            runs[-1:] = [(runs[-1][0], i + 1)] if adjacent else [*runs[-1:], (i, i + 1)]
    if not runs:
        first = 1 if body and _is_docstring(body[0]) else 0
        return first, first
    for start, stop in runs:
        if any(_key(body[i])[0] == key[0] for i in range(start, stop)):
            return start, stop
    return runs[-1] if _key(body[runs[-1][1] - 1]) < key else runs[0]


def import_in(line: cst.CSTNode) -> cst.Import | cst.ImportFrom | None:
    """The import that a line consists of, if it does."""
    statement = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
    return statement if isinstance(statement, cst.Import | cst.ImportFrom) else None


def is_import(line: cst.CSTNode) -> bool:
    return import_in(line) is not None


def _is_docstring(line: cst.CSTNode) -> bool:
    return (
        isinstance(line, cst.SimpleStatementLine)
        and isinstance(line.body[0], cst.Expr)
        and isinstance(line.body[0].value, cst.SimpleString)
    )


def _key(line: cst.CSTNode) -> _Key:
    """Section, plain imports before ``from``, module."""
    assert isinstance(line, cst.SimpleStatementLine)
    statement = line.body[0]
    if isinstance(statement, cst.ImportFrom):
        name = "." * len(statement.relative) + (
            get_full_name_for_node(statement.module) or "" if statement.module else ""
        )
        kind = 1
    else:
        assert isinstance(statement, cst.Import)
        name, kind = statement.names[0].evaluated_name, 0
    top = name.split(".")[0]
    if name.startswith("."):
        section = 3
    elif top in FIRST_PARTY:
        section = 2
    else:
        section = 0 if top in sys.stdlib_module_names else 1
    return section, kind, name.lower()


def _same(wanted: cst.SimpleStatementLine, other: cst.CSTNode) -> bool:
    new, there = import_in(wanted), import_in(other)
    if new is None or there is None or _key(wanted) != _key(other):
        return False
    return _names(new) <= _names(there)


def _joined(wanted: cst.SimpleStatementLine, other: cst.CSTNode) -> cst.ImportFrom | None:
    """The other statement with the wanted name among its own, where it imports from the same module."""
    new, there = import_in(wanted), import_in(other)
    if not isinstance(new, cst.ImportFrom) or not isinstance(there, cst.ImportFrom) or _key(wanted) != _key(other):
        return None
    assert not isinstance(new.names, cst.ImportStar) and not isinstance(there.names, cst.ImportStar)
    aliases, name = list(there.names), new.names[0]
    position = sum(alias.evaluated_name < name.evaluated_name for alias in aliases)
    pattern = aliases[min(position, len(aliases) - 2)] if len(aliases) > 1 else None
    comma = pattern.comma if pattern is not None else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    if position == len(aliases):
        aliases[-1], name = aliases[-1].with_changes(comma=comma), name.with_changes(comma=aliases[-1].comma)
    else:
        name = name.with_changes(comma=comma)
    return there.with_changes(names=[*aliases[:position], name, *aliases[position:]])


def _names(statement: cst.Import | cst.ImportFrom) -> set[tuple[str, str | None]]:
    if isinstance(statement.names, cst.ImportStar):
        return set()
    return {(alias.evaluated_name, alias.evaluated_alias) for alias in statement.names}
