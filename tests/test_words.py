"""The field's words: names and prose that a reader of this field knows, in the package and in tools."""

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

FILES = [path for folder in ("flower_privdec", "tools") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "simulations").rglob("*.md")])
# A local variable is named by what it holds.
VAGUE_NAMES = {"found", "said", "kept", "each", "told", "asked", "somebody", "nobody", "whoever", "whom"}
# One thing has one name, the one that the field uses.
PRIVATE_WORDS = re.compile(
    r"\b(anew|whoever|whomever|whom|somebody|nobody|purse|courier|mailroom|census|crew|dealt|dealing|parcels?|crossings?|mishaps?"
    r"|punctuality|headroom|reckon(?:s|ed)?|lone peers?|own part|mail|mailbox|stranded|spoiled"
    r"|begin anew|begins anew|began anew|lets? go of|letting go of)\b",
    re.IGNORECASE,
)


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def names_bound(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each local name that a file binds, with its line: assignments, loop targets and arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


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


def test_a_local_name_says_what_it_holds() -> None:
    names = [(where(path, line), name) for path in FILES for name, line in names_bound(tree_of(path))]
    assert [place for place, name in names if name in VAGUE_NAMES] == []


@pytest.mark.slow
def test_prose_in_code_uses_the_fields_words() -> None:
    lines = [(where(path, line), text) for path in FILES for text, line in prose(path)]
    assert [place for place, text in lines if PRIVATE_WORDS.search(text)] == []


def test_pages_use_the_fields_words() -> None:
    lines = [(path, *line) for path in PAGES for line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)]
    assert [where(path, number) for path, number, text in lines if PRIVATE_WORDS.search(text)] == []


PACKAGE = ROOT / "flower_privdec"
ROOMS = {path.name for path in PACKAGE.iterdir()} | {path.stem for path in PACKAGE.rglob("*.py")}


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
    names, package = names_in_code(), [path for path in FILES if PACKAGE in path.parents]
    lines = [(where(path, line), text) for path in package for text, line in prose(path)]
    quoted = [(place, name) for place, text in lines for name in re.findall(r"`([A-Za-z_][\w.]*)`", text)]
    assert [(place, name) for place, name in quoted if not set(name.split(".")) <= names] == []


def test_tests_match_error_codes_not_wordings() -> None:
    """`raises` of tests/support takes the code; the wording of the system's own errors alone may be matched."""
    nodes = [(path, node) for path in sorted((ROOT / "tests").rglob("*.py")) for node in ast.walk(tree_of(path))]
    calls = [(path, node) for path, node in nodes if isinstance(node, ast.Call)]
    matching = [(path, call) for path, call in calls if any(keyword.arg == "match" for keyword in call.keywords)]
    assert [where(path, call.lineno) for path, call in matching if ast.unparse(call.args[0]) != "OSError"] == []
