"""What is shown of other libraries, in a table that is read from the headers of `findings/*.sh`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "findings"
TITLE = re.compile(r"(?P<version>\S+ \d+(?:\.\d+)+): (?P<title>.*)")
PARAGRAPH = re.compile(r"(?ms)^(?P<name>Expected|Seen|Here)(?: \([^)]*\))?: (?P<text>.*?)(?=\n\n|\n(?:Seen|Here): |\Z)")


class HeaderError(ValueError):
    """A script's header lacks something that its row needs."""


@dataclass(frozen=True)
class Shown:
    """The header of a script.

    Attributes:
        version: the library and its version, as flwr 1.42.0.
        title: what is wrong, in one sentence.
        expected: what a good guess says.
        seen: what is true.
        here: what this project does about it.
    """

    version: str
    title: str
    expected: str
    seen: str
    here: str


def header_of(path: Path) -> Shown:
    """Read a script's header.

    Raises:
        HeaderError: the header lacks its title or one of its paragraphs.
    """
    head = path.read_text(encoding="utf-8").partition("\nset ")[0]
    text = "\n".join(re.findall(r"(?m)^#(?!!) ?(.*)$", head))
    title = TITLE.match(text)
    if title is None:
        raise HeaderError(f"{path.name} must begin with `# LIBRARY VERSION: what is wrong`")

    # A source in parentheses may follow a paragraph's name, and runs over lines.
    said = {found["name"]: " ".join(found["text"].split()) for found in PARAGRAPH.finditer(text)}
    for name in ("Expected", "Seen", "Here"):
        if name not in said:
            raise HeaderError(f"{path.name} must have a paragraph `# {name}: ...` in its header")
    return Shown(title["version"], title["title"], said["Expected"], said["Seen"], said["Here"])


def findings_table() -> str:
    """Return the table as Markdown, a row for each script."""
    rows = ["| a good guess says | what is true | version | what this project does | script |", "|---|---|---|---|---|"]
    for path in sorted(FOLDER.glob("*.sh")):
        shown = header_of(path)
        cells = (shown.expected, shown.seen, shown.version, shown.here, f"`{path.name}`")
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)
