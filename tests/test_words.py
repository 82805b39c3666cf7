"""Names in prose and tests: what a docstring quotes is there, a test's name is short, and errors are known by code."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from paths import ROOT

from tools.rooms import tree_of

PACKAGE = ROOT / "flower_privdec"
ROOMS = {path.name for path in PACKAGE.iterdir()} | {path.stem for path in PACKAGE.rglob("*.py")}
TESTS = sorted((ROOT / "tests").rglob("*.py"))
LONGEST_NAME = 9  # words


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


@cache
def tokens_of(path: Path) -> list[tokenize.TokenInfo]:
    """Return the names, strings and comments of a Python file."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return [token for token in tokens if token.type in (tokenize.NAME, tokenize.STRING, tokenize.COMMENT)]


def prose(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the strings and comments of a Python file, with their lines."""
    for token in tokens_of(path):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for offset, line in enumerate(token.string.splitlines()):
                yield line, token.start[0] + offset


def names_in_code() -> set[str]:
    """Return every name and word of a short string in the package's code, and the names of its rooms."""
    return ROOMS | {
        word
        for path in PACKAGE.rglob("*.py")
        for token in tokens_of(path)
        if token.type == tokenize.NAME or (token.type == tokenize.STRING and "\n" not in token.string)
        for word in re.findall(r"\w+", token.string)
    }


@pytest.mark.slow
def test_a_docstring_names_what_is_there() -> None:
    """A module, function or key that prose puts in backticks occurs in the code."""
    names = names_in_code()
    lines = [(where(path, line), text) for path in sorted(PACKAGE.rglob("*.py")) for text, line in prose(path)]
    quoted = [(place, name) for place, text in lines for name in re.findall(r"`([A-Za-z_][\w.]*)`", text)]
    assert [(place, name) for place, name in quoted if not set(name.split(".")) <= names] == []


def test_a_tests_name_has_under_ten_words() -> None:
    names = re.compile(r"^ *def test_(\w+)", re.MULTILINE)
    named = [(path.name, name) for path in TESTS for name in names.findall(path.read_text(encoding="utf-8"))]
    assert [each for each in named if len(each[1].split("_")) > LONGEST_NAME] == []


@pytest.mark.slow
def test_tests_match_error_codes_not_wordings() -> None:
    """`raises` of tests/support takes the code; the wording of the system's own errors alone may be matched."""
    nodes = [(path, node) for path in TESTS for node in ast.walk(tree_of(path))]
    calls = [(path, node) for path, node in nodes if isinstance(node, ast.Call)]
    raising = [(path, call) for path, call in calls if ast.unparse(call.func).endswith("raises")]  # and not warns
    matching = [(path, call) for path, call in raising if any(keyword.arg == "match" for keyword in call.keywords)]
    assert [where(path, call.lineno) for path, call in matching if ast.unparse(call.args[0]) != "OSError"] == []
