"""A graph of your own as a text file: a line `sender receiver` for each edge, and comments after #."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flower_privdec.common.catalogue import GraphSection
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.fields import PathText
from flower_privdec.common.files import tried
from flower_privdec.common.formatting import shown
from flower_privdec.graph.topology import Graph, StaticTopology, Topology, edge_array

LONGEST = 64 << 20  # bytes of an edge list


class EdgeListGraph(Graph):
    """The edges of a text file."""

    name = "edge-list"
    line = "from a `file` of `sender receiver` lines, `directed` or not"

    class Section(GraphSection):
        """The edges of a text file.

        Attributes:
            file: has a line `sender receiver` for each edge.
            directed: whether its edges go one way; left out, they do unless each stands there in both directions.
        """

        file: PathText | None = None
        directed: bool | None = None

    section: Section

    def build(self, n_peers: int, seed: int) -> Topology:
        """Read the file."""
        file = self.section.file
        directed = self.section.directed
        if file is None:
            message = "topology.file is missing: edge-list reads its edges from a text file; add it"
            raise ScenarioError(message, code="topology.file")
        if directed is not None and not isinstance(directed, bool):
            raise ScenarioError(f"topology.directed={directed!r} must be true or false", code="topology.option")

        pairs = list(read_pairs(file, n_peers))
        if not pairs:
            raise ScenarioError(
                f"topology.file={file} has no edges; write one `sender receiver` pair per line", code="topology.file"
            )
        if directed is None:
            # The same list as a Python object is undirected, too.
            there = {tuple(pair) for pair in pairs}
            directed = any((receiver, sender) not in there for sender, receiver in there)
        return StaticTopology(self.name, n_peers, directed, edge_array(pairs, n_peers, symmetric=not directed))


def read_pairs(file: str | Path, n_peers: int) -> Iterator[list[int]]:
    """Yield each pair [sender, receiver] of a text file.

    Raises:
        ScenarioError: with the line that is not a pair of two peers.
    """
    try:
        with Path(file).expanduser().open("rb") as binary:
            content = binary.read(LONGEST + 1)
        lines = content.decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        message = f"topology.file={tried(file)} cannot be read ({reason}); name a text file of edges"
        raise ScenarioError(message, code="topology.file") from None
    if len(content) > LONGEST:
        raise ScenarioError(
            f"topology.file={file} has more than {LONGEST >> 20} MiB: give a sparser graph", code="topology.file"
        )

    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue

        where = f"topology.file={file} line {number}"
        ids = [int(word) for word in words if word.isdecimal() and word.isascii() and len(word) < 19]
        if len(words) != 2 or len(ids) != 2:
            message = f"{where}: {shown(' '.join(words))} must be two peer ids, `sender receiver`"
            raise ScenarioError(message, code="topology.edge")
        if max(ids) >= n_peers:
            message = f"{where}: peer {max(ids)} must be < n_peers={n_peers}; ids start at 0"
            raise ScenarioError(message, code="topology.edge")
        if ids[0] == ids[1]:
            message = f"{where}: peer {ids[0]} sends to itself; leave it out, self weights are implied"
            raise ScenarioError(message, code="topology.edge")
        yield ids
