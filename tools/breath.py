"""Measure how densely code is written: `python -m tools.breath [--files] [FOLDER | FILE | PACKAGE ...]`.

Prints one row for each folder, file or installed package (default: every room of this package, and all of it). It is
a thermometer: a low figure says where a reader is likely to have to read twice. Put a well-written package beside it,
e.g. `python -m tools.breath flower_privdec h11 trio`; a number has no meaning alone, and is no quota.

Lines of code are lines with a token other than a comment or a docstring. A node is an expression of the syntax tree;
its contexts and operators do not count. A long function is one whose body has 15 lines or more after its docstring.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "flower_privdec"
LONG = 15  # lines of a function's body
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Density:
    """The counts of some code, which add up over files."""

    code_lines: int = 0
    comment_lines: int = 0
    nodes: int = 0
    conditional_expressions: int = 0
    parallel_assignments: int = 0
    long_functions: int = 0
    long_without_pause: int = 0

    def __add__(self, other: Density) -> Density:
        """Return the counts of both."""
        return Density(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def row(self) -> list[str]:
        """Return the columns: lines, comments per 100, nodes a line, two counts per 1,000, a share in percent."""
        lines = max(self.code_lines, 1)
        return [
            f"{self.code_lines:,}",
            f"{100 * self.comment_lines / lines:.1f}",
            f"{self.nodes / lines:.2f}",
            f"{1000 * self.conditional_expressions / lines:.1f}",
            f"{1000 * self.parallel_assignments / lines:.1f}",
            f"{100 * self.long_without_pause / max(self.long_functions, 1):.0f} of {self.long_functions}",
        ]


def density_of(source: str) -> Density:
    """Return the counts of one file's text."""
    tree = ast.parse(source)
    docstrings = _docstring_lines(tree)
    code, comments = _lines_of(source)
    code -= docstrings

    density = Density(code_lines=len(code), comment_lines=len(comments))
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and node.lineno not in docstrings:
            density.nodes += 1
        if isinstance(node, ast.IfExp):
            density.conditional_expressions += 1
        if isinstance(node, ast.Assign) and _is_parallel(node):
            density.parallel_assignments += 1
        if isinstance(node, Function):
            _count_function(node, code, density)
    return density


def _is_parallel(node: ast.Assign) -> bool:
    """Whether an assignment gives several names a value each; one call's result taken apart is not parallel."""
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def _count_function(node: Function, code: set[int], density: Density) -> None:
    """Add a function to the long ones, and to those without a pause if no line of its body is blank or a comment."""
    body = [statement for statement in node.body if not _is_docstring(statement)]
    if not body:
        return

    first = body[0].lineno
    last = body[-1].end_lineno or first
    if last - first + 1 < LONG:
        return

    density.long_functions += 1
    # A line within a string of several lines has no token that starts on it: `_lines_of` counts it as code.
    if all(line in code for line in range(first, last + 1)):
        density.long_without_pause += 1


def _lines_of(source: str) -> tuple[set[int], set[int]]:
    """Return the numbers of the lines with code, and of those with nothing but a comment."""
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return code, comments - code


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines of all docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | Function):
            continue
        if node.body and _is_docstring(node.body[0]):
            docstring = node.body[0]
            lines.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


def _is_docstring(node: ast.stmt) -> bool:
    """Whether a statement is a string that stands alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def files_of(place: str) -> list[Path]:
    """Return the Python files of a folder, a file, or an installed package by its name, without its tests."""
    path = Path(place)
    if path.is_file():
        return [path]
    if not path.is_dir():
        spec = importlib.util.find_spec(place)
        if spec is None or spec.origin is None:
            raise SystemExit(f"{place}: no folder, file or installed package has this name")
        path = Path(spec.origin).parent
    files = sorted(path.rglob("*.py"))
    return [file for file in files if not any("test" in part for part in file.relative_to(path).parts)]


def places_of(arguments: list[str]) -> Iterator[tuple[str, list[Path]]]:
    """Yield what to measure as a name and its files: the arguments, or every room and then the whole package."""
    if arguments:
        for place in arguments:
            yield place, files_of(place)
        return

    for room in sorted(path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()):
        yield room.name, sorted(room.rglob("*.py"))
    yield PACKAGE.name, sorted(PACKAGE.rglob("*.py"))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.breath", description="Measure how densely code is written.")
    parser.add_argument("places", nargs="*", help="folders, files or installed packages; default: each room")
    parser.add_argument("--files", action="store_true", help="print a row for each file too, the densest first")
    options = parser.parse_args()

    table = Table(box=None)
    table.add_column("")
    for name in (
        "lines of code",
        "comments per 100",
        "nodes a line",
        "conditional expr. per 1,000",
        "parallel assign. per 1,000",
        "% of long functions without a pause",
    ):
        table.add_column(name, justify="right")

    for name, files in places_of(options.places):
        measured = {file: density_of(file.read_text(encoding="utf-8")) for file in files}
        if options.files:
            for file, density in sorted(measured.items(), key=lambda item: -item[1].nodes / max(item[1].code_lines, 1)):
                table.add_row(str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file), *density.row())
        table.add_row(name, *sum(measured.values(), Density()).row())
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
