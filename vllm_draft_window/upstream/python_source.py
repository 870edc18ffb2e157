# SPDX-License-Identifier: Apache-2.0
"""Edits of Python source by structure: classes, methods and statements are found by what they are, never by line."""

import subprocess
import sys
from collections.abc import Sequence

import libcst as cst
import libcst.matchers as m

from .errors import MissingAnchor, Refused

IMPORT = m.SimpleStatementLine(body=[m.OneOf(m.Import(), m.ImportFrom())])
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

    def add_import(self, statement: str) -> None:
        self._imports.append(cst.parse_statement(statement))  # type: ignore[arg-type]

    def replace_class(self, class_name: str, statements: Sequence[cst.BaseStatement]) -> None:
        """Put other statements in the place of a class; the first takes over its distance from the code above."""
        node = self.find_class(class_name)
        lead = [line for line in node.leading_lines if line.comment is None]
        own = [line for line in getattr(statements[0], "leading_lines", ()) if line.comment is not None]
        first = statements[0].with_changes(leading_lines=[*lead, *own])
        self._replace((node, [first, *statements[1:]]))

    def add_method(self, class_name: str, code: str, *, before: str) -> None:
        """Put a method, given as unindented code, in front of another one of the class."""
        method = cst.parse_module(code).body[0]
        assert isinstance(method, cst.FunctionDef)
        if method.name.value in self._methods(self.find_class(class_name)):
            raise MissingAnchor(self.path, f"a class {class_name} without a method {method.name.value} of its own")
        following = self.find_method(class_name, before)
        added = method.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
        self._replace((following, [added, following]))

    def insert_after(self, class_name: str, method: str, anchor: m.BaseMatcherNode, what: str, code: str) -> None:
        """Put statements behind the one statement of a method, at whatever depth, that the anchor matches."""
        statement = self._find_statement(class_name, method, anchor, what)
        self._replace((statement, [statement, *_statements(code)]))

    def insert_before(self, class_name: str, method: str, anchor: m.BaseMatcherNode, what: str, code: str) -> None:
        statement = self._find_statement(class_name, method, anchor, what)
        self._replace((statement, [*_statements(code), statement]))

    def prepend_to(self, class_name: str, method: str, code: str) -> None:
        """Put statements at the beginning of a method, behind its docstring."""
        body = self.find_method(class_name, method).body
        assert isinstance(body, cst.IndentedBlock)
        first = body.body[0]
        new = [first, *_statements(code)] if m.matches(first, _DOCSTRING) else [*_statements(code), first]
        self._replace((first, new))

    def append_to(self, class_name: str, method: str, code: str) -> None:
        """Put statements at the end of a method."""
        body = self.find_method(class_name, method).body
        assert isinstance(body, cst.IndentedBlock)
        self._replace((body.body[-1], [body.body[-1], *_statements(code)]))

    def replace_lines(
        self, class_name: str, method: str, anchors: Sequence[m.BaseMatcherNode], what: str, code: str
    ) -> None:
        """Replace consecutive statements of a method that match; comments above the first one go with it."""
        body = self.find_method(class_name, method).body
        lines = body.body if isinstance(body, cst.IndentedBlock) else ()
        for i in range(len(lines) - len(anchors) + 1):
            found = lines[i : i + len(anchors)]
            if all(m.matches(line, anchor) for line, anchor in zip(found, anchors, strict=True)):
                blank = [line for line in getattr(found[0], "leading_lines", ())[:1] if line.comment is None]
                new = _statements(code)
                for first in new[:1]:
                    new[0] = first.with_changes(leading_lines=[*blank, *first.leading_lines])  # type: ignore[attr-defined]
                self._replace((found[0], new), *((line, []) for line in found[1:]))
                return
        raise MissingAnchor(self.path, f"in {class_name}.{method}, {what}")

    def replace_in_class(self, class_name: str, anchor: m.BaseMatcherNode, code: str) -> None:
        """Replace every expression of a class that the anchor matches."""
        node = self.find_class(class_name)
        if not m.findall(node, anchor):
            raise MissingAnchor(self.path, f"in {class_name}, what becomes {code}")
        self.replace_statement(node, m.replace(node, anchor, cst.parse_expression(code)))  # type: ignore[arg-type]

    def replace_statement(self, old: cst.CSTNode, new: cst.CSTNode) -> None:
        self._replace((old, [new]))

    def add_class_attributes(self, class_name: str, code: str) -> None:
        """Put statements behind the class's docstring and attributes, in front of its first method."""
        body = self.find_class(class_name).body.body
        first = next((i for i, item in enumerate(body) if not isinstance(item, cst.SimpleStatementLine)), len(body))
        if first == 0:
            apart = body[0].with_changes(leading_lines=[cst.EmptyLine(indent=False)])
            self._replace((body[0], [*_statements(code), apart]))
        else:
            last, (new, *more) = body[first - 1], _statements(code)
            if m.matches(last, _DOCSTRING):
                new = new.with_changes(leading_lines=[cst.EmptyLine(indent=False), *new.leading_lines])  # type: ignore[attr-defined]
            self._replace((last, [last, new, *more]))

    def find_class(self, class_name: str) -> cst.ClassDef:
        for node in self.module.body:
            if isinstance(node, cst.ClassDef) and node.name.value == class_name:
                return node
        raise MissingAnchor(self.path, f"class {class_name}")

    def find_function(self, name: str) -> cst.FunctionDef:
        for node in self.module.body:
            if isinstance(node, cst.FunctionDef) and node.name.value == name:
                return node
        raise MissingAnchor(self.path, f"function {name}")

    def find_method(self, class_name: str, method: str) -> cst.FunctionDef:
        found = self._methods(self.find_class(class_name)).get(method)
        if found is None:
            raise MissingAnchor(self.path, f"method {class_name}.{method}")
        return found

    @staticmethod
    def _methods(node: cst.ClassDef) -> dict[str, cst.FunctionDef]:
        return {item.name.value: item for item in node.body.body if isinstance(item, cst.FunctionDef)}

    def _find_statement(self, class_name: str, method: str, anchor: m.BaseMatcherNode, what: str) -> cst.CSTNode:
        found = m.findall(self.find_method(class_name, method), anchor)
        if len(found) != 1:
            raise MissingAnchor(self.path, f"in {class_name}.{method}, {what}")
        return found[0]

    def _replace(self, *replacements: tuple[cst.CSTNode, Sequence[cst.CSTNode]]) -> None:
        module = self.module.visit(_Replacements(replacements))
        assert isinstance(module, cst.Module)
        self.module = module


class _Replacements(cst.CSTTransformer):
    """Replaces statements, each by any number of others."""

    def __init__(self, replacements: Sequence[tuple[cst.CSTNode, Sequence[cst.CSTNode]]]) -> None:
        super().__init__()
        self._replacements = replacements

    def on_visit(self, node: cst.CSTNode) -> bool:
        # Expressions are most of a file, and nothing in them is replaced here.
        return not isinstance(node, cst.BaseSmallStatement | cst.BaseExpression)

    def on_leave(self, original_node, updated_node):  # type: ignore[no-untyped-def]
        for old, new in self._replacements:
            if original_node is old:
                return cst.FlattenSentinel(new) if new else cst.RemoveFromParent()
        return updated_node


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
