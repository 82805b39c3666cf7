"""Communication graphs: who may send to whom in a round.

A round's edges are int64 [m, 2] of (sender, receiver), sorted, unique, without self loops. A graph is built by its
name, or by a user's own function; draws are keyed by the seed.
"""

from __future__ import annotations

import inspect
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from flower_privdec.common.catalogue import TOPOLOGIES, GraphSection
from flower_privdec.common.deferred import scipy
from flower_privdec.common.errors import ScenarioError, did_you_mean
from flower_privdec.common.fields import section_from
from flower_privdec.common.user_code import load_own, require, users_code
from flower_privdec.rows.keys import keyed_generator

EdgeArray: TypeAlias = npt.NDArray[np.int64]
Peers: TypeAlias = npt.NDArray[np.int64]


@runtime_checkable
class Topology(Protocol):
    """A graph whose edges may change from round to round; an undirected one lists each edge in both directions."""

    @property
    def name(self) -> str:
        """The name it has in a scenario."""

    @property
    def n_peers(self) -> int:
        """How many peers it joins, numbered from 0."""

    @property
    def directed(self) -> bool:
        """Whether some edge may lack its reverse."""

    @property
    def period(self) -> int | None:
        """After how many rounds the edges repeat; 1 is static, None is fresh at random every round."""

    def edges(self, round_index: int) -> EdgeArray:
        """Return the edges of a round, [m, 2] (sender, receiver)."""

    def support(self) -> EdgeArray:
        """Return every edge that some round may use."""


def edge_array(pairs: npt.ArrayLike, n_peers: int, *, symmetric: bool = False) -> EdgeArray:
    """Sort pairs (sender, receiver) into an edge array, without repeats, read-only.

    Args:
        pairs: [m, 2] peer ids.
        n_peers: the ids run from 0 to n_peers - 1.
        symmetric: add the reverse of every pair.

    Returns:
        int64 [m', 2], sorted by sender and then receiver.
    """
    array = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
    if symmetric:
        array = np.concatenate([array, array[:, ::-1]])

    # One number for each pair, which sorts as the pairs do: unique numbers are faster than unique rows.
    codes = np.unique(array[:, 0] * n_peers + array[:, 1])
    edges = np.stack(np.divmod(codes, n_peers), axis=1)
    edges.flags.writeable = False
    return edges


def shift_edges(n_peers: int, offsets: npt.ArrayLike) -> EdgeArray:
    """Return the edges of the circulant graph in which peer i sends to i + offset, modulo n, for each offset."""
    senders, ahead = np.meshgrid(np.arange(n_peers), np.asarray(offsets, dtype=np.int64), indexing="ij")
    return edge_array(np.stack([senders, (senders + ahead) % n_peers], axis=-1), n_peers)


def networkx() -> Any:
    """Import networkx, which takes long and which most runs do not need.

    Raises:
        ScenarioError: a small peer has it not.
    """
    return require("networkx", "this graph", "pip install networkx")


@dataclass(frozen=True, eq=False)
class StaticTopology:
    """The same edges every round."""

    name: str
    n_peers: int
    directed: bool
    all_edges: EdgeArray
    period: int | None = 1

    def edges(self, round_index: int) -> EdgeArray:
        """Return the edges, whatever the round."""
        return self.all_edges

    def support(self) -> EdgeArray:
        """Return the edges."""
        return self.all_edges


@dataclass(frozen=True)
class CompleteTopology:
    """All peers send to all others; the n (n - 1) edges are listed on request only."""

    name: str
    n_peers: int
    directed: bool = False
    period: int | None = 1

    def edges(self, round_index: int) -> EdgeArray:
        """Return all n (n - 1) ordered pairs."""
        return self.support()

    def support(self) -> EdgeArray:
        """Return all n (n - 1) ordered pairs."""
        return np.argwhere(~np.eye(self.n_peers, dtype=bool))


@dataclass(frozen=True)
class DirectedExponential:
    """The one-peer directed exponential graph: in round k each peer sends to the one 2^(k mod p) ahead.

    p = floor(log2(n - 1)) + 1 (Assran et al. 2019, Stochastic Gradient Push, appendix A), so that the offsets are all
    powers of two below n. On n = 2^m peers push-sum over it reaches the exact mean in m rounds.
    """

    n_peers: int
    name: str = "directed-exponential"
    directed: bool = True

    @property
    def period(self) -> int:
        """Return p, the number of offsets it goes through."""
        return (self.n_peers - 1).bit_length()

    def edges(self, round_index: int) -> EdgeArray:
        """Return the n edges of a round."""
        exponent = round_index % self.period
        return shift_edges(self.n_peers, [2**exponent])

    def support(self) -> EdgeArray:
        """Return the edges of all offsets together."""
        return shift_edges(self.n_peers, 2 ** np.arange(self.period))


@dataclass(frozen=True, eq=False)
class RandomEdges:
    """Some undirected edges of a supergraph, drawn again each round without replacement.

    Each round's draw is keyed by (seed, round), so any process can draw any round.
    """

    supergraph: Topology
    count: int
    seed: int
    name: str = "random-edges"
    directed: bool = False
    period: int | None = None

    @property
    def n_peers(self) -> int:
        """How many peers it joins."""
        return self.supergraph.n_peers

    def edges(self, round_index: int) -> EdgeArray:
        """Return the round's edges, each in both directions."""
        generator = keyed_generator(self.seed, "random-edges", round_index)
        chosen = generator.choice(len(self.candidates), size=self.count, replace=False, shuffle=False)
        return edge_array(self.candidates[chosen], self.n_peers, symmetric=True)

    def support(self) -> EdgeArray:
        """Return the supergraph's edges."""
        return self.supergraph.support()

    @cached_property
    def candidates(self) -> EdgeArray:
        """Return one (smaller, larger) pair for every edge of the supergraph."""
        edges = self.supergraph.support()
        return edges[edges[:, 0] < edges[:, 1]]


@dataclass(frozen=True, eq=False)
class MemberTopology:
    """A graph over some of the peers that there ever were; the others have no edge.

    Args:
        among: the graph, of as many peers as there are members.
        members: their numbers, ascending: the i-th of them has the i-th place in that graph.
        n_peers: how many numbers were ever given.
    """

    among: Topology
    members: tuple[int, ...]
    n_peers: int

    @property
    def name(self) -> str:
        """The name that the graph has in a scenario."""
        return self.among.name

    @property
    def directed(self) -> bool:
        """Whether some edge may lack its reverse."""
        return self.among.directed

    @property
    def period(self) -> int | None:
        """After how many rounds the edges repeat."""
        return self.among.period

    def edges(self, round_index: int) -> EdgeArray:
        """Return the edges of a round, between members' numbers."""
        return self._numbered(self.among.edges(round_index))

    def support(self) -> EdgeArray:
        """Return every edge that some round may use, between members' numbers."""
        return self._numbered(self.among.support())

    def _numbered(self, edges: EdgeArray) -> EdgeArray:
        return edge_array(np.asarray(self.members, dtype=np.int64)[edges], self.n_peers)


MOST_NAMED = 8  # peers that an error lists


def check_topology(topology: Topology) -> None:
    """Refuse a graph on which what one peer knows can never reach some other peer.

    Agreement needs the union of all rounds' edges to be strongly connected.

    Raises:
        ScenarioError: naming peers that are cut off, and the remedy.
    """
    if isinstance(topology, CompleteTopology):
        return

    # Search from the first peer along the edges, and against them: if both reach everybody, the graph is strongly
    # connected.
    everybody = np.asarray(getattr(topology, "members", np.arange(topology.n_peers)))
    edges = topology.support()
    for ends, sense in ((edges, "can never hear from"), (edges[:, ::-1], "can never be heard by")):
        is_cut_off = ~_reached(ends, topology.n_peers, int(everybody[0]))
        cut_off = everybody[is_cut_off[everybody]]
        if len(cut_off):
            named = ", ".join(str(peer) for peer in cut_off[:MOST_NAMED])
            if len(cut_off) > MOST_NAMED:
                named += f" and {len(cut_off) - MOST_NAMED} more"
            peers = "peer" if len(cut_off) == 1 else "peers"
            raise ScenarioError(
                f"topology.name={topology.name} can never agree: {peers} {named} {sense} "
                "peer 0; add edges until every peer reaches every other (the graph must be strongly connected)",
                code="topology.disconnected",
            )


def _reached(edges: EdgeArray, n_peers: int, begin: int = 0) -> np.ndarray:
    """Return which peers can be reached from one of them along edges, bool [n_peers]."""
    order = np.argsort(edges[:, 0], kind="stable")
    heads = edges[order, 1]
    first = np.searchsorted(edges[order, 0], np.arange(n_peers + 1))

    reached = np.zeros(n_peers, dtype=bool)
    reached[begin] = True
    newest = np.array([begin])
    while len(newest):
        # The edges that leave the newest peers, one range of `heads` for each.
        starts = first[newest]
        lengths = first[newest + 1] - starts
        before = np.cumsum(lengths) - lengths
        leaving = np.repeat(starts - before, lengths) + np.arange(lengths.sum())
        others = heads[leaving]
        newest = np.unique(others[~reached[others]])
        reached[newest] = True
    return reached


def joint_connectivity(topology: Topology, horizon: int = 64) -> int | None:
    """Find the smallest B such that the union of any B consecutive rounds is strongly connected.

    Args:
        horizon: how many rounds of a graph drawn at random are looked at; a periodic graph needs none.

    Returns:
        B in rounds, at most the period (or the horizon); None if even all those rounds do not suffice.
    """
    if isinstance(topology, CompleteTopology):
        return 1
    periodic = topology.period is not None
    length = topology.period or horizon
    rounds = [topology.edges(k) for k in range(length)]

    def every_window_connects(size: int) -> bool:
        # The windows of a periodic graph go round its end; those of drawn rounds end with them.
        n_starts = length
        if not periodic:
            n_starts = length - size + 1
        for start in range(n_starts):
            window = [rounds[(start + k) % length] for k in range(size)]
            graph = _adjacency(window, topology.n_peers)
            components = scipy.sparse.csgraph.connected_components(graph, connection="strong", return_labels=False)
            if components != 1:
                return False
        return True

    # A longer window connects if a shorter one does, so the smallest is found by bisection.
    smallest = bisect_left(range(1, length + 1), True, key=every_window_connects) + 1
    if smallest > length:
        return None
    return smallest


def _adjacency(rounds: Sequence[EdgeArray], n_peers: int) -> scipy.sparse.csr_array:
    edges = np.concatenate(rounds)
    ones = np.ones(len(edges))
    return scipy.sparse.csr_array((ones, (edges[:, 0], edges[:, 1])), shape=(n_peers, n_peers))


MOST_EDGES = 4_000_000  # in both directions; networkx takes a minute and 2 GiB for them


def check_edges(count: float, name: str, n_peers: int) -> None:
    """Refuse more edges than can be listed, before they are.

    Raises:
        ScenarioError: there are too many; it says how many.
    """
    if count > MOST_EDGES:
        raise ScenarioError(
            f"topology.name={name} has about {count:.2g} edges with n_peers={n_peers}, and at most {MOST_EDGES:,} "
            "can be listed; take fewer peers, a sparser graph, or complete, which needs no list",
            code="topology.too-many-edges",
        )


class Graph:
    """A graph that a scenario can name: a class with its name, its line and its keys, which builds it for n peers.

    It takes part as a built-in if its file lies in `flower_privdec/graph/graphs`, and as a user's own by its module.

    Args:
        section: its keys.

    Attributes:
        name: what a scenario calls it.
        line: what `privdec list` says of it.
        Section: declares its keys.
    """

    name: str = ""
    line: str = ""
    Section: ClassVar[type[GraphSection]] = GraphSection

    def __init__(self, section: Any) -> None:
        self.section = section

    def edge_count(self, n_peers: int) -> float:
        """Estimate how many edges `build` lists, so that too many are refused beforehand; 0 if it lists none."""
        return 0

    def build(self, n_peers: int, seed: int) -> Any:
        """Return the graph, in one of the forms that `as_topology` takes.

        Args:
            n_peers: how many peers it joins, at least 2.
            seed: for random graphs.
        """
        raise NotImplementedError(f"{type(self).__name__} must define build(self, n_peers, seed)")


def whole_number(key: str, value: object, least: int) -> int:
    """Return a graph's key as an int; refuse it unless it is a whole number >= least.

    A scenario's keys are checked when it is loaded. One that Python gave (`build_topology`) is checked here.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ScenarioError(f"topology.{key}={value!r} must be a whole number >= {least}", code="topology.whole-number")
    if value < least:
        raise ScenarioError(f"topology.{key}={value} must be >= {least}", code="topology.too-small")
    return int(value)


def chance(key: str, value: object, *, zero: bool = False) -> float:
    """Return a graph's key as a float; refuse it unless it is a probability, and 0 unless `zero` allows that."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        interval = "[0, 1]" if zero else "(0, 1]"
        raise ScenarioError(f"topology.{key}={value!r} must be in {interval}", code="topology.chance")
    if value == 0 and not zero:
        raise ScenarioError(
            f"topology.{key}={value} must be > 0: without edges the peers never agree", code="topology.chance"
        )
    return float(value)


def undirected(name: str, graph: Any) -> Topology:
    """Return a networkx graph as a topology; its nodes are numbered in their order."""
    numbered = networkx().convert_node_labels_to_integers(graph, ordering="sorted")
    return both_ways(name, graph.number_of_nodes(), np.array(numbered.edges, dtype=np.int64))


def both_ways(name: str, n_peers: int, pairs: npt.ArrayLike) -> Topology:
    """Return the topology in which both peers of each pair send to the other."""
    return StaticTopology(name, n_peers, False, edge_array(pairs, n_peers, symmetric=True))


def build_topology(name: str, n_peers: int, *, seed: int = 0, **options: Any) -> Topology:
    """Build the graph that a scenario names.

    Args:
        name: one of `TOPOLOGIES`, or `package.module:name` of a user's own, see `build_own_topology`.
        n_peers: how many peers it joins, at least 2.
        options: keys of the graph's Section; for a user's own, `arguments` by name.

    Returns:
        The topology, with its options checked; `check_topology` says whether it can agree.

    Raises:
        ScenarioError: an unknown name or option, or a value that breaks a rule.

    Examples:
        >>> graph = build_topology("directed-exponential", 8)
        >>> graph.edges(1)[:3].tolist()  # in round 1 each peer sends to the one 2 ahead
        [[0, 2], [1, 3], [2, 4]]
        >>> graph.period
        3
    """
    if ":" not in name:
        TOPOLOGIES.check(name, "topology.name")
    if isinstance(n_peers, bool) or not isinstance(n_peers, int | np.integer) or n_peers < 1:
        raise ScenarioError(f"n_peers={n_peers!r} must be a whole number >= 1", code="topology.n-peers")
    if n_peers == 1:
        raise ScenarioError(
            f"n_peers=1 on topology {name}: a graph needs at least 2 peers; use algorithm local",
            code="topology.one-peer",
        )
    if ":" in name:
        return build_own_topology(name, int(n_peers), seed, **options)

    part: Any = TOPOLOGIES[name]
    valid = part.Section.model_fields
    takes_others = part.Section.model_config.get("extra") == "allow"
    for key in options:
        if key not in valid and not takes_others:
            takes = f"it takes {', '.join(valid)}" if valid else "it takes none"
            raise ScenarioError(
                f"topology.{key} is not an option of {name}: {takes}{did_you_mean(key, valid)}",
                code="topology.unknown-option",
            )

    # Values are not validated again: those of a scenario were, and a graph checks what it takes from Python.
    graph: Graph = part(part.Section.model_construct(**options))
    check_edges(graph.edge_count(int(n_peers)), name, int(n_peers))
    where = f"topology.name={name}"
    return as_topology(graph.build(int(n_peers), seed), name, int(n_peers), where)


def sample_edges(
    graph: Topology,
    count: int,
    seed: int,
    source: str = "participation.kind=edges",
    key: str = "participation.count",
) -> RandomEdges:
    """Return a graph of some edges of another one, drawn again each round; `source` and `key` name settings in errors.

    Raises:
        ScenarioError: the other graph is directed, changes from round to round, or has fewer edges.
    """
    if graph.directed or graph.period != 1 or graph.name == "server":
        raise ScenarioError(
            f"{source} on topology {graph.name} must draw from a graph that is undirected and the same every round; "
            "take topology complete or ring",
            code="topology.supergraph",
        )

    if isinstance(graph, CompleteTopology):
        check_edges(graph.n_peers * (graph.n_peers - 1.0), graph.name, graph.n_peers)
    topology = RandomEdges(graph, count, seed)
    if count > len(topology.candidates):
        raise ScenarioError(
            f"{key}={count} must be <= {len(topology.candidates)}, the undirected edges of topology {graph.name}",
            code="topology.edge-count",
        )

    return topology


def build_own_topology(target: str, n_peers: int, seed: int, arguments: Mapping[str, Any] | None = None) -> Topology:
    """Build a user's graph: by a function of n_peers and its arguments, or by a `Graph` whose keys the arguments are.

    Args:
        target: where the function or the class lies, `package.module:name`.
        seed: given to a function with a parameter of this name, unless the arguments have one.

    Raises:
        ScenarioError: the part cannot be had, fails, or gives something else than a graph (see `as_topology`).
    """
    arguments = arguments or {}
    part = load_own(target, "topology.module")
    where = f"topology.module={target!r}"
    with users_code(f"{where} could not be built with {dict(arguments)}", "code.fails"):
        if isinstance(part, type) and issubclass(part, Graph):
            own = part(section_from(part.Section, arguments, where))
            graph = own.build(n_peers, seed)
        else:
            options = dict(arguments)
            if _takes_seed(part):
                options.setdefault("seed", seed)
            graph = part(n_peers, **options)
    return as_topology(graph, target, n_peers, where)


def _takes_seed(function: Any) -> bool:
    try:
        return "seed" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return False


def as_topology(graph: Any, name: str, n_peers: int, where: str) -> Topology:
    """Return a graph as a topology, in whichever form a user's part or a `Graph` gave it.

    Args:
        graph: a networkx graph or digraph on the nodes 0 to n_peers - 1, for each peer those it sends to (a list of
            lists, or a mapping), or a `Topology`, which may change from round to round.
        name: what a scenario calls the graph.
        where: how errors name the part, such as topology.module='graphs:mine'.

    Raises:
        ScenarioError: it is something else, or has other peers.
    """
    if isinstance(graph, Topology):
        if graph.n_peers != n_peers:
            message = f"{where} gives a graph of {graph.n_peers} peers: it must have n_peers={n_peers}"
            raise ScenarioError(message, code="topology.own")
        return graph

    symmetric = False
    known = sys.modules.get("networkx")  # who made such a graph has imported it
    if known is not None and isinstance(graph, known.Graph):
        nodes = list(graph.nodes)
        symmetric = not graph.is_directed()
        if len(nodes) != n_peers or not all(_is_peer(node, n_peers) for node in nodes):
            raise ScenarioError(
                f"{where} gives a graph of {len(nodes)} nodes ({', '.join(map(repr, nodes[:3]))}, ...): they must be "
                f"0 to {n_peers - 1}; networkx.convert_node_labels_to_integers numbers them",
                code="topology.own",
            )
        pairs = [(int(sender), int(receiver)) for sender, receiver in graph.edges()]
    else:
        pairs = _pairs_of_lists(graph, n_peers, where)

    loops = [sender for sender, receiver in pairs if sender == receiver]
    if loops:
        message = f"{where}: peer {loops[0]} sends to itself; leave it out, self weights are implied"
        raise ScenarioError(message, code="topology.own")

    edges = edge_array(pairs, n_peers, symmetric=symmetric)

    # It is undirected if the reverse of every edge is there, so that adding all of them adds none.
    with_reverses = edge_array(edges, n_peers, symmetric=True)
    directed = len(with_reverses) > len(edges)
    return StaticTopology(name, n_peers, directed, edges)


def _pairs_of_lists(lists: Any, n_peers: int, where: str) -> list[tuple[int, int]]:
    """Return the pairs of lists of out-neighbours: a sequence in the order of the peers, or a mapping by peer."""
    rule = "it must be a networkx graph, or for each peer a list of those it sends to"
    no_lists = ScenarioError(f"{where} gives no lists for {n_peers} peers: {rule}", code="topology.own")
    if isinstance(lists, Mapping):
        if set(lists) != set(range(n_peers)):
            raise no_lists
        lists = [lists[peer] for peer in range(n_peers)]
    if not isinstance(lists, Sequence) or len(lists) != n_peers:
        raise no_lists

    for peer, receivers in enumerate(lists):
        is_list = isinstance(receivers, Sequence | set | frozenset | np.ndarray) and not isinstance(receivers, str)
        if not is_list or not all(_is_peer(receiver, n_peers) for receiver in receivers):
            message = f"{where}: peer {peer} sends to {receivers!r}, not peers of 0 to {n_peers - 1}: {rule}"
            raise ScenarioError(message, code="topology.own")
    return [(peer, int(receiver)) for peer, receivers in enumerate(lists) for receiver in receivers]


def _is_peer(value: object, n_peers: int) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and 0 <= int(value) < n_peers  # type: ignore[call-overload]
