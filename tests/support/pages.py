"""The project's pages taken apart: their fences, links and headings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *DOCS]
FENCE = re.compile(r"^```(?P<kind>\w+)?(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Fence:
    """A fenced block of a page.

    Attributes:
        kind: the language.
        title: the file that a reader is to save it as, or None.
        line: of its first line in the page.
    """

    kind: str
    title: str | None
    text: str
    line: int


@dataclass(frozen=True)
class Command:
    """A command that a page shows, and the lines it shows below it."""

    words: list[str]
    output: list[str]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def fences(page: Path) -> list[Fence]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Fence(found["kind"] or "", found["title"], found["text"], text.count("\n", 0, found.start("text")) + 1)
        for found in FENCE.finditer(text)
    ]


def commands(fence: Fence) -> Iterator[Command]:
    """Yield the commands of a console block."""
    for block in re.split(r"^\$ ", fence.text, flags=re.MULTILINE)[1:]:
        first, *output = block.rstrip("\n").split("\n")
        yield Command(shlex.split(first), output)


def links(page: Path) -> list[str]:
    """Return where a page's links lead, but for other sites and code."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = [found["target"] for found in LINK.finditer(text)]
    return [target for target in targets if not re.match(r"https?:", target)]


def anchors(page: Path) -> set[str]:
    """Return the names of a page's headings, as links to them are written."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}
