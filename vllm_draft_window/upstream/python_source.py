# SPDX-License-Identifier: Apache-2.0
"""Edits of Python source by structure: classes, methods and imports are found by name, never by line.

Every edit takes a module and answers the edited one, which is the same object where there is nothing to do.
"""

from collections.abc import Callable, Sequence

import libcst as cst
import libcst.matchers as m

from .errors import MissingAnchor
from .imports import add_import, import_in, is_import


class Source:
    """One Python file while it is edited; errors name its path."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.module = cst.parse_module(text)

    @property
    def text(self) -> str:
        return self.module.code

    def add_import(self, statement: str, comment: str = "") -> None:
        self.module = add_import(self.module, statement, comment)

    def drop_imported_name(self, name: str) -> None:
        """Take one name out of the import that brings it."""
        for at, line in enumerate(self.module.body):
            statement = import_in(line)
            if statement is None or isinstance(statement.names, cst.ImportStar):
                continue
            kept = [alias for alias in statement.names if alias.evaluated_name != name]
            if len(kept) == len(statement.names):
                continue
            if not kept:
                before, after = self.module.body[:at], self.module.body[at + 1 :]
                if after and not after[0].leading_lines:  # type: ignore[union-attr]
                    # The blank line that sets the imports apart from a docstring.
                    after = [after[0].with_changes(leading_lines=line.leading_lines), *after[1:]]  # type: ignore[union-attr]
                self.module = self.module.with_changes(body=[*before, *after])
                return
            last = kept[-1].with_changes(comma=statement.names[-1].comma)
            shorter = statement.with_changes(names=[*kept[:-1], last])
            self._replace(line, line.with_changes(body=[shorter]))
            return
        raise MissingAnchor(self.path, f"an import of {name}")

    def drop_unused_imports(self) -> None:
        code = self.module.with_changes(body=[line for line in self.module.body if not is_import(line)])
        used = {name.value for name in m.findall(code, m.Name()) if isinstance(name, cst.Name)}
        for line in self.module.body:
            statement = import_in(line)
            if statement is None or isinstance(statement.names, cst.ImportStar):
                continue
            for alias in statement.names:
                if (alias.evaluated_alias or alias.evaluated_name).split(".")[0] not in used:
                    self.drop_imported_name(alias.evaluated_name)

    def prepend_base(self, class_name: str, base: str) -> None:
        node = self.find_class(class_name)
        if any(m.matches(other.value, m.Name(base)) for other in node.bases):
            return
        self._replace(node, node.with_changes(bases=[cst.Arg(cst.Name(base)), *node.bases]))

    def remove_class(self, class_name: str) -> None:
        node = self.find_class(class_name)
        body = list(self.module.body)
        body.remove(node)
        self.module = self.module.with_changes(body=body)

    def decorate(self, class_name: str, method: str, decorator: str) -> None:
        node = self.find_method(class_name, method)
        wanted = cst.Decorator(cst.parse_expression(decorator))
        if not any(d.decorator.deep_equals(wanted.decorator) for d in node.decorators):
            self._replace(node, node.with_changes(decorators=[wanted, *node.decorators]))

    def add_method(self, class_name: str, code: str, *, before: str) -> None:
        """Put a method, given as unindented code, in front of another one of the class."""
        method = cst.parse_module(code).body[0]
        assert isinstance(method, cst.FunctionDef)
        if method.name.value in self._methods(self.find_class(class_name)):
            raise MissingAnchor(self.path, f"a class {class_name} without a method {method.name.value} of its own")
        following = self.find_method(class_name, before)
        added = method.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
        self._replace_statements((following, [added, following]))

    def insert_after(self, class_name: str, method: str, anchor: m.BaseMatcherNode, what: str, code: str) -> None:
        """Put statements behind the first simple statement of a method that has the anchor in it."""
        statement = self._find_line(class_name, method, anchor, what)
        added = cst.parse_module(code).body
        self._replace_statements((statement, [statement, *added]))

    def replace_lines(
        self, class_name: str, method: str, anchors: Sequence[m.BaseMatcherNode], what: str, code: str
    ) -> None:
        """Replace the consecutive statements of a method that match; comments above the first one go with it."""
        body = self._body(self.find_method(class_name, method))
        for i in range(len(body) - len(anchors) + 1):
            found = body[i : i + len(anchors)]
            if all(m.matches(line, anchor) for line, anchor in zip(found, anchors, strict=True)):
                new = cst.parse_module(code.lstrip())
                old_lead = getattr(found[0], "leading_lines", ())
                blank = [line for line in old_lead[:1] if line.comment is None]
                first = new.body[0].with_changes(leading_lines=[*blank, *new.header])
                added = [first, *new.body[1:]]
                self._replace_statements((found[0], added), *((line, []) for line in found[1:]))
                return
        raise MissingAnchor(self.path, f"in {class_name}.{method}, {what}")

    def add_class_attributes(self, class_name: str, lines: Sequence[str]) -> None:
        """Put statements behind the class's docstring and attributes, in front of its first method."""
        body = self.find_class(class_name).body.body
        first_method = next((i for i, item in enumerate(body) if isinstance(item, cst.FunctionDef)), len(body))
        if first_method == 0:
            raise MissingAnchor(self.path, f"a docstring or an attribute at the top of {class_name}")
        self.add_lines(body[first_method - 1], lines)

    def add_lines(self, after: cst.CSTNode, lines: Sequence[str]) -> None:
        """Put simple statements behind one that is in the module."""
        self._replace_statements((after, [after, *map(cst.parse_statement, lines)]))

    def find_class(self, class_name: str) -> cst.ClassDef:
        for node in self.module.body:
            if isinstance(node, cst.ClassDef) and node.name.value == class_name:
                return node
        raise MissingAnchor(self.path, f"class {class_name}")

    def find_method(self, class_name: str, method: str) -> cst.FunctionDef:
        found = self._methods(self.find_class(class_name)).get(method)
        if found is None:
            raise MissingAnchor(self.path, f"method {class_name}.{method}")
        return found

    @staticmethod
    def _methods(node: cst.ClassDef) -> dict[str, cst.FunctionDef]:
        return {item.name.value: item for item in node.body.body if isinstance(item, cst.FunctionDef)}

    @staticmethod
    def _body(method: cst.FunctionDef) -> Sequence[cst.BaseStatement]:
        return method.body.body if isinstance(method.body, cst.IndentedBlock) else ()

    def _find_line(self, class_name: str, method: str, anchor: m.BaseMatcherNode, what: str) -> cst.BaseStatement:
        for line in self._body(self.find_method(class_name, method)):
            if isinstance(line, cst.SimpleStatementLine) and m.findall(line, anchor):
                return line
        raise MissingAnchor(self.path, f"in {class_name}.{method}, {what}")

    def _replace(self, old: cst.CSTNode, new: cst.CSTNode) -> None:
        self._replace_statements((old, [new]))

    def _replace_statements(self, *replacements: tuple[cst.CSTNode, Sequence[cst.CSTNode]]) -> None:
        module = self.module.visit(_Flatten(replacements))
        assert isinstance(module, cst.Module)
        self.module = module


class _Flatten(cst.CSTTransformer):
    """Replaces statements, each by any number of others."""

    def __init__(self, replacements: Sequence[tuple[cst.CSTNode, Sequence[cst.CSTNode]]]) -> None:
        super().__init__()
        self._replacements = replacements

    def on_visit(self, node: cst.CSTNode) -> bool:
        # Nothing that is replaced lies deeper, and expressions are most of a file.
        return isinstance(node, cst.Module | cst.ClassDef | cst.FunctionDef | cst.IndentedBlock)

    def on_leave(self, original_node, updated_node):  # type: ignore[no-untyped-def]
        for old, new in self._replacements:
            if original_node is old:
                return cst.FlattenSentinel(new) if new else cst.RemoveFromParent()
        return super().on_leave(original_node, updated_node)


def keep_definitions(
    source: Source, keep: Callable[[str], bool], rename: dict[str, str], docstring: str
) -> None:  # of one of our own modules
    """Keep the functions that are wanted, under new names, with another module docstring.

    Raises:
        MissingAnchor: a function to rename is not in the module.
    """
    functions = {node.name.value for node in source.module.body if isinstance(node, cst.FunctionDef)}
    for name in rename:
        if name not in functions:
            raise MissingAnchor(source.path, f"function {name}")
    body = [node for node in source.module.body if not isinstance(node, cst.FunctionDef) or keep(node.name.value)]
    body[0] = cst.parse_statement(f'"""{docstring}"""\n')  # type: ignore[assignment]
    module = source.module.with_changes(body=body).visit(_Rename(rename))
    assert isinstance(module, cst.Module)
    source.module = module


class _Rename(cst.CSTTransformer):
    def __init__(self, names: dict[str, str]) -> None:
        super().__init__()
        self._names = names

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        return updated_node.with_changes(value=self._names.get(updated_node.value, updated_node.value))
