"""The messages of the packages' errors, read from their source: the page Errors."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

VALUE = "…"  # where a message has a value
INTRODUCTION = """\
Errors
======

What the packages' errors say, by the module that makes them, so that the search finds
them by their words. A value stands where … is, and :doc:`/docs/troubleshooting` says
what some of them mean.
"""


def exceptions(trees: list[ast.Module]) -> set[str]:
    """Returns the names of the exceptions that modules call or derive from others."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    names = {"Exception", "SystemExit"}
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute):
            names |= {*re.findall(r"\w+Error$", ast.unparse(node))}
    for node in classes * 3:  # as deep as they are derived from each other
        if {ast.unparse(base).rpartition(".")[2] for base in node.bases} & names:
            names.add(node.name)
    return names


class Texts:
    """What the expressions of a module may be as texts."""

    def __init__(self, tree: ast.Module) -> None:
        self.values: dict[str, list[ast.expr]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                name = ast.unparse(node.targets[0])
                self.values.setdefault(name, []).append(node.value)
            if isinstance(node, ast.For):  # over the rows of a table
                names = getattr(node.target, "elts", [])
                for row in getattr(node.iter, "elts", []):
                    for target, value in zip(names, getattr(row, "elts", [])):
                        self.values.setdefault(ast.unparse(target), []).append(value)
            if isinstance(node, ast.FunctionDef):
                ends = [end for end in ast.walk(node) if isinstance(end, ast.Return)]
                values = [end.value for end in ends if end.value]
                self.values.setdefault(f"{node.name}()", []).extend(values)

    def of(self, node: ast.expr, within: tuple[str, ...] = ()) -> list[str]:
        """Returns the texts that an expression may be; … where that is not known."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [node.value]
        if isinstance(node, ast.IfExp):
            return self.of(node.body, within) + self.of(node.orelse, within)
        if isinstance(node, ast.FormattedValue):
            return self.of(node.value, within)
        parts = node.values if isinstance(node, ast.JoinedStr) else []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            parts = [node.left, node.right]
        if parts:
            choices = itertools.product(*[self.of(part, within) for part in parts])
            return ["".join(choice) for choice in choices]
        called = ast.unparse(node.func) + "()" if isinstance(node, ast.Call) else ""
        name = (called or ast.unparse(node)).removeprefix("self.")
        values = self.values.get(name, []) if name not in within else []
        return [t for each in values for t in self.of(each, (*within, name))] or [VALUE]


def messages(tree: ast.Module, kinds: set[str]) -> Iterator[tuple[str, str]]:
    """Yields the kinds and the texts of a module's exceptions, raised or returned."""
    texts = Texts(tree)
    for node in ast.walk(tree):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        kind = " or ".join(name for name in re.findall(r"\w+", called) if name in kinds)
        for argument in node.args if kind else []:
            for text in texts.of(argument):
                if len(re.findall(r"\w{2,}", text)) > 1:
                    yield kind, " ".join(text.replace("`", "'").split())


def page(root: Path, packages: list[str]) -> str:
    """Returns the page of the packages in a folder, as reStructuredText."""
    files = [file for name in packages for file in sorted(root.glob(f"{name}/**/*.py"))]
    trees = [ast.parse(file.read_text("utf-8")) for file in files]
    kinds = exceptions(trees)
    lines = [INTRODUCTION]
    for number, (file, tree) in enumerate(zip(files, trees)):
        package, *rest = file.relative_to(root).with_suffix("").parts
        if number == 0 or package != files[number - 1].relative_to(root).parts[0]:
            lines += ["", package, "-" * len(package)]
        module = ".".join([package, *rest]).removesuffix(".__init__")
        found = dict.fromkeys(messages(tree, kinds))
        lines += ["", module, "~" * len(module), ""] if found else []
        lines += [f"- {kind}: ``{text}``" for kind, text in found]
    return "\n".join([*lines, ""])
