"""Read a graph from a text file: one `sender receiver` pair per line, `#` starts a comment."""

from __future__ import annotations

from pathlib import Path

from flower_privdec.common.formatting import shown
from flower_privdec.errors import ScenarioError

LONGEST = 64 << 20  # bytes


def read_edge_list(path: str | Path, n_peers: int) -> list[tuple[int, int]]:
    """Read the pairs of an edge list.

    Args:
        path: the file; relative paths start where the command runs.
        n_peers: the ids run from 0 to n_peers - 1.

    Returns:
        The pairs (sender, receiver) in file order; a pair may appear twice.

    Raises:
        ScenarioError: a file that cannot be read, or a malformed line, named by its number.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(LONGEST + 1)
        lines = content.decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ScenarioError(f"topology.file={path} cannot be read ({reason}); name a text file of edges") from None
    if len(content) > LONGEST:
        raise ScenarioError(f"topology.file={path} has more than {LONGEST >> 20} MiB: give a sparser graph")
    pairs = [
        _pair(written.split(), f"topology.file={path} line {number}", n_peers)
        for number, line in enumerate(lines, start=1)
        if (written := line.partition("#")[0].strip())
    ]
    if not pairs:
        raise ScenarioError(f"topology.file={path} has no edges; write one `sender receiver` pair per line")
    return pairs


def _is_id(word: str) -> bool:
    return word.isdecimal() and word.isascii() and len(word) < 19


def _pair(words: list[str], where: str, n_peers: int) -> tuple[int, int]:
    if len(words) != 2 or not all(_is_id(word) for word in words):
        raise ScenarioError(f"{where}: {shown(' '.join(words))} must be two peer ids, `sender receiver`")
    sender, receiver = (int(word) for word in words)
    if max(sender, receiver) >= n_peers:
        raise ScenarioError(f"{where}: peer {max(sender, receiver)} must be < n_peers={n_peers}; ids start at 0")
    if sender == receiver:
        raise ScenarioError(f"{where}: peer {sender} sends to itself; leave it out, self weights are implied")
    return sender, receiver
