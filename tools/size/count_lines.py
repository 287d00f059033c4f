"""Counts the lines of code of each package, and how long its functions are.

    python tools/size/count_lines.py
    python tools/size/count_lines.py per_sample_grad/engine grab_xla

Code is counted by syntax tree and tokens: a line counts if anything on it is neither a
comment nor part of a docstring, so that explaining and blank lines are free.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "per_sample_grad", "grab_xla", "variable_batch_size", "rigl_xla", "xla_replica",
)  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


class Size(NamedTuple):
    """The lines of some files.

    Attributes:
        code: Lines with code.
        docstrings: Lines of docstrings.
        lines: All lines, also comments and blank ones.
        functions: The lines of code of each function, the inner ones within it.
    """

    code: int
    docstrings: int
    lines: int
    functions: tuple[int, ...]

    @property
    def median_function(self) -> float:
        """The median length of a function in lines of code; 0 without any."""
        return statistics.median(self.functions) if self.functions else 0.0


def _docstring(node: ast.AST) -> range:
    """Returns the numbers of the lines that a definition's docstring is on."""
    if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)) and node.body:
        first = node.body[0]
        is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        if is_text and isinstance(first.value.value, str):
            return range(first.lineno, (first.end_lineno or first.lineno) + 1)
    return range(0)


def size_of_source(source: str) -> Size:
    """Returns the size of one module's text.

    Raises:
        SyntaxError: It is not a Python module.
    """
    tree = ast.parse(source)
    documented = {line for node in ast.walk(tree) for line in _docstring(node)}
    written: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            written.update(range(token.start[0], token.end[0] + 1))
    code = written - documented
    functions = [
        len(code.intersection(range(node.lineno, (node.end_lineno or 0) + 1)))
        for node in ast.walk(tree)
        if isinstance(node, _FUNCTIONS)
    ]
    return Size(len(code), len(documented), len(source.splitlines()), tuple(functions))


def size_of(path: Path) -> Size:
    """Returns the size of all modules below a folder, or of one file.

    Raises:
        FileNotFoundError: There is nothing at ``path``.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: name a folder or a file of this repository, such "
            f"as {PACKAGES[0]}"
        )
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    sizes = [size_of_source(file.read_text(encoding="utf-8")) for file in files]
    return total(sizes)


def total(sizes: list[Size]) -> Size:
    """Returns the sum of sizes."""
    return Size(
        sum(each.code for each in sizes),
        sum(each.docstrings for each in sizes),
        sum(each.lines for each in sizes),
        tuple(length for each in sizes for length in each.functions),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "paths", nargs="*", default=[*PACKAGES, "test"],
        help="folders or files in this repository; default: all packages, and test",
    )  # fmt: skip
    paths = parser.parse_args().paths
    try:
        rows = {path: size_of(ROOT / path) for path in paths}
    except FileNotFoundError as error:
        sys.exit(str(error))
    rows["all packages"] = total([s for path, s in rows.items() if path != "test"])
    print(f"{'':28}{'code':>8}{'docstrings':>12}{'lines':>8}{'function, median':>18}")
    for path, size in rows.items():
        print(
            f"{path:28}{size.code:8,}{size.docstrings:12,}{size.lines:8,}"
            f"{size.median_function:18.1f}"
        )


if __name__ == "__main__":
    main()
