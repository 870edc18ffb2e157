# SPDX-License-Identifier: Apache-2.0
"""Edits of Python source by structure: classes, methods and statements are found by what they are, never by line."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import libcst as cst
import libcst.matchers as m

from .checkout import Tree
from .errors import MissingAnchor, Refused

IMPORT = m.SimpleStatementLine(body=[m.OneOf(m.Import(), m.ImportFrom())])
D = TypeVar("D", cst.ClassDef, cst.FunctionDef)
_DOCSTRING = m.SimpleStatementLine(body=[m.Expr(value=m.SimpleString())])


class Source:
    """One Python file while it is edited; errors name its path."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.module = cst.parse_module(text)
        self._imports: list[cst.BaseStatement] = []

    @property
    def text(self) -> str:
        if not self._imports:
            return self.module.code
        body = self.module.body
        first = next(i for i, line in enumerate(body) if m.matches(line, IMPORT))
        return _with_sorted_imports(self.module.with_changes(body=[*body[:first], *self._imports, *body[first:]]).code)

    def add_import(self, *statements: str) -> None:
        self._imports += map(cst.parse_statement, statements)  # type: ignore[arg-type]

    def replace_class(self, class_name: str, statements: Sequence[cst.BaseStatement]) -> None:
        """Put other statements in the place of a class; the first takes over its distance from the code above."""
        node = self.find_class(class_name)
        lead = [line for line in node.leading_lines if line.comment is None]
        own = [line for line in getattr(statements[0], "leading_lines", ()) if line.comment is not None]
        first = statements[0].with_changes(leading_lines=[*lead, *own])
        self.replace(node, first, *statements[1:])

    def add_method(self, class_name: str, code: str, *, before: str) -> None:
        """Put a method, given as unindented code, in front of another one of the class."""
        method = cst.parse_module(code).body[0]
        assert isinstance(method, cst.FunctionDef)
        own = self.find_class(class_name).body.body
        if any(m.matches(item, m.FunctionDef(name=m.Name(method.name.value))) for item in own):
            raise MissingAnchor(self.path, f"a class {class_name} without a method {method.name.value} of its own")
        following = self.find_method(class_name, before)
        self.replace(following, method.with_changes(leading_lines=[cst.EmptyLine(indent=False)]), following)

    def insert_after(self, class_name: str, method: str, anchor: m.BaseMatcherNode, what: str, code: str) -> None:
        """Put statements behind the one statement of a method, at whatever depth, that the anchor matches."""
        statement = self._find_statement(class_name, method, anchor, what)
        self.replace(statement, statement, *_statements(code))

    def insert_before(self, class_name: str, method: str, anchor: m.BaseMatcherNode, what: str, code: str) -> None:
        statement = self._find_statement(class_name, method, anchor, what)
        self.replace(statement, *_statements(code), statement)

    def prepend_to(self, class_name: str, method: str, code: str) -> None:
        """Put statements at the beginning of a method, behind its docstring."""
        first = self.find_method(class_name, method).body.body[0]
        new = _statements(code)
        self.replace(first, *([first, *new] if m.matches(first, _DOCSTRING) else [*new, first]))

    def append_to(self, class_name: str, method: str, code: str) -> None:
        """Put statements at the end of a method."""
        last = self.find_method(class_name, method).body.body[-1]
        self.replace(last, last, *_statements(code))

    def replace_lines(
        self, class_name: str, method: str, anchors: Sequence[m.BaseMatcherNode], what: str, code: str
    ) -> None:
        """Replace consecutive statements of a method that match; comments above the first one go with it."""
        body = self.find_method(class_name, method).body
        lines, count = list(body.body), len(anchors)
        for i in range(len(lines) - count + 1):
            if all(map(m.matches, lines[i : i + count], anchors)):
                blank = [line for line in getattr(lines[i], "leading_lines", ())[:1] if line.comment is None]
                new = _statements(code)
                for first in new[:1]:
                    new[0] = first.with_changes(leading_lines=[*blank, *first.leading_lines])  # type: ignore[attr-defined]
                self.replace(body, body.with_changes(body=[*lines[:i], *new, *lines[i + count :]]))
                return
        raise MissingAnchor(self.path, f"in {class_name}.{method}, {what}")

    def replace_in_class(self, class_name: str, anchor: m.BaseMatcherNode, code: str) -> None:
        """Replace every expression of a class that the anchor matches."""
        node = self.find_class(class_name)
        if not m.findall(node, anchor):
            raise MissingAnchor(self.path, f"in {class_name}, what becomes {code}")
        self.replace(node, m.replace(node, anchor, cst.parse_expression(code)))  # type: ignore[arg-type]

    def replace(self, old: cst.CSTNode, *new: cst.CSTNode) -> None:
        """Replace a node of the module; a statement by any number of others."""
        several = cst.FlattenSentinel(new)
        self.module = self.module.deep_replace(old, new[0] if len(new) == 1 else several)  # type: ignore

    def add_class_attributes(self, class_name: str, code: str) -> None:
        """Put statements behind the class's docstring and attributes, in front of its first method."""
        body = self.find_class(class_name).body.body
        first = next((i for i, item in enumerate(body) if not isinstance(item, cst.SimpleStatementLine)), len(body))
        if first == 0:
            apart = body[0].with_changes(leading_lines=[cst.EmptyLine(indent=False)])
            self.replace(body[0], *_statements(code), apart)
        else:
            last, (new, *more) = body[first - 1], _statements(code)
            if m.matches(last, _DOCSTRING):
                new = new.with_changes(leading_lines=[cst.EmptyLine(indent=False), *new.leading_lines])  # type: ignore[attr-defined]
            self.replace(last, last, new, *more)

    def find_class(self, name: str) -> cst.ClassDef:
        return self._find(cst.ClassDef, name, self.module.body, f"class {name}")

    def find_function(self, name: str) -> cst.FunctionDef:
        return self._find(cst.FunctionDef, name, self.module.body, f"function {name}")

    def find_method(self, class_name: str, name: str) -> cst.FunctionDef:
        return self._find(cst.FunctionDef, name, self.find_class(class_name).body.body, f"method {class_name}.{name}")

    def _find(self, kind: type[D], name: str, body: Sequence[cst.CSTNode], what: str) -> D:
        for node in body:
            if isinstance(node, kind) and node.name.value == name:
                return node
        raise MissingAnchor(self.path, what)

    def _find_statement(self, class_name: str, method: str, anchor: m.BaseMatcherNode, what: str) -> cst.CSTNode:
        found = m.findall(self.find_method(class_name, method), anchor)
        if len(found) != 1:
            raise MissingAnchor(self.path, f"in {class_name}.{method}, {what}")
        return found[0]


@contextmanager
def edited(tree: Tree, path: str) -> Iterator[Source]:
    """One file of the tree, written back at the end of the block."""
    source = Source(path, tree.read(path))
    yield source
    tree.write(path, source.text)


def _statements(code: str) -> list[cst.BaseStatement]:
    """Comments above the first statement belong to it."""
    module = cst.parse_module(code.lstrip("\n"))
    return [line.with_changes(leading_lines=module.header) for line in module.body[:1]] + [*module.body[1:]]  # type: ignore


def _with_sorted_imports(code: str) -> str:
    """As upstream's linter wants them: a name that is imported twice is imported once."""
    options = ["--isolated", "--quiet", "--select", "I", "--fix", "--config", "line-length=120"]
    ours = ["--config", 'lint.isort.known-first-party=["tests", "vllm_ascend"]']
    command = [sys.executable, "-m", "ruff", "check", *options, *ours, "-"]
    result = subprocess.run(command, input=code, capture_output=True, encoding="utf-8")
    if result.returncode:
        raise Refused(f"imports could not be sorted: {result.stderr.strip()}")
    return result.stdout


def assigns(attribute: str, owner: str = "self") -> m.SimpleStatementLine:
    """Matches a statement that assigns to an attribute."""
    target = m.Attribute(value=m.Name(owner), attr=m.Name(attribute))
    return m.SimpleStatementLine(body=[m.Assign(targets=[m.AssignTarget(target=target)]) | m.AnnAssign(target=target)])


def mentions(node: m.BaseMatcherNode) -> m.MatchIfTrue:
    """Matches whatever has such a node in it."""
    return m.MatchIfTrue(lambda tree: bool(m.findall(tree, node)))
