"""Read a graph from a text file: one `sender receiver` pair per line, `#` starts a comment."""

from __future__ import annotations

from pathlib import Path

from flower_privdec.errors import ScenarioError


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
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ScenarioError(f"file={path} cannot be read ({reason}); name a text file of edges") from None
    pairs = [
        _pair(content.split(), f"file={path} line {number}", n_peers)
        for number, line in enumerate(lines, start=1)
        if (content := line.partition("#")[0].strip())
    ]
    if not pairs:
        raise ScenarioError(f"file={path} has no edges; write one `sender receiver` pair per line")
    return pairs


def _pair(words: list[str], where: str, n_peers: int) -> tuple[int, int]:
    if len(words) != 2 or not all(word.isdecimal() and word.isascii() for word in words):
        raise ScenarioError(f"{where}: {' '.join(words)!r} must be two peer ids, `sender receiver`")
    sender, receiver = (int(word) for word in words)
    if max(sender, receiver) >= n_peers:
        raise ScenarioError(f"{where}: peer {max(sender, receiver)} must be < n_peers={n_peers}; ids start at 0")
    if sender == receiver:
        raise ScenarioError(f"{where}: peer {sender} sends to itself; leave it out, self weights are implied")
    return sender, receiver
