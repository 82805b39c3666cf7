"""Flower strategies without a global model, for apps whose ClientApp is a peer (`PeerMod`).

The life of a strategy:

1. **Construction** checks every option. Nothing is known of the peers yet.
2. **`start`** of an object, whichever class defines it, is `_start_on_peers`: it checks the arguments, finds the peers
   and their graph, and keeps what is then known as one `PeerRun`.
3. **The rounds** are Flower's own loop, or the copy of it that a subclass has as its `start`. The loop calls the hooks
   below and sends through a `PeerGrid`, which knows which peers answered, which are late and which are gone.
4. **The end** hands out the shares that are still on their way, and computes the peers' mean.

A round has one message to each peer if nobody acts on its evaluation (`PeerRun.evaluates_along`): the message that lets
a peer evaluate round r goes on to let it train in round r + 1. So it is sent when the loop evaluates round r, and what
came back is kept until the loop trains round r + 1 (`NextRound`). The loop calls every hook as ever. Otherwise, and in
the last round, an evaluation has messages of its own.

What subclasses of this package change is named in `PushSum` under "hooks".
"""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from flower_privdec.common.arguments import check_calls, check_kinds, check_numbers, check_paths, check_whole
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.common.formatting import peer_ranges
from flower_privdec.flower.error_formatting import one_line_failure
from flower_privdec.flower.launch.local_grid import simulates
from flower_privdec.flower.mods.peer_messages import (
    DELIVER,
    EVALUATE,
    EVALUATION,
    MASS,
    ROUND,
    SAYS,
    PeerReport,
    numpy_arrays,
    record_of,
)
from flower_privdec.flower.node_settings import FOLDER, safe_name
from flower_privdec.flower.strategies.peer_network import (
    PeerNetwork,
    RelayStore,
    formatted,
    log_privacy,
    masses_in,
    matrix_of,
    total_mass,
)
from flower_privdec.graph.mixing import UNDIRECTED, Mixing
from flower_privdec.graph.mixing_speed import MOST_MEASURED, disagreement_left
from flower_privdec.graph.participation import Participation, build_participation
from flower_privdec.graph.topology import CompleteTopology, Topology, build_topology
from flower_privdec.peer.app_pairs import UNTOLD
from flower_privdec.peer.app_state import Layout, run_frames
from flower_privdec.rows.keys import keyed_generator

log = logging.getLogger("flwr.privdec")

Aggregate = Callable[[list[RecordDict], str], MetricRecord]
EvaluateMean = Callable[[int, ArrayRecord], MetricRecord | None]

OPTION = "flower.option"  # the code of an error
OURS = "flower_privdec."  # the modules of this package
HOOKS = ("start", "configure_train", "aggregate_train", "configure_evaluate")  # what a global model goes through
IN_ROUNDS = (*HOOKS, "aggregate_evaluate", "_run_rounds", "_told_to_all")  # what a class may change of the rounds

# The arguments of `start`, from the installed flwr: 1.43 adds should_stop, which passes through to Flower's loop.
START = {name: part for name, part in inspect.signature(Strategy.start).parameters.items() if name != "self"}

# --- metrics ---


def comparable(replies: Iterable[Message], key: str, along: bool = False) -> list[RecordDict]:
    """Return what an average can be taken of: the metrics that most peers report, with a weight each.

    Args:
        replies: the peers' answers; those without metrics say nothing.
        key: the key of the weight. If a peer has none, or one is not a number >= 0, or all are 0, all count alike.
        along: whether to take the metrics of an evaluation from answers that also have those of training.

    Returns:
        Records of the same names, each a number or a list as long as the others'; a peer that reports others is left
        out, and named in the log.
    """
    metrics_of: dict[int, tuple[str, MetricRecord]] = {}  # by node: the record's name and the record
    for reply in replies:
        if reply.has_error():
            continue
        for name, record in reply.content.items():
            if isinstance(record, MetricRecord) and name.startswith(EVALUATION) == along:
                metrics_of[reply.metadata.src_node_id] = (name.removeprefix(EVALUATION), record)
                break

    shapes = {node: _shape(metrics, key) for node, (_, metrics) in metrics_of.items()}
    all_shapes = list(shapes.values())
    usual = max(all_shapes, key=all_shapes.count, default=[])
    odd = [node for node, shape in shapes.items() if shape != usual]
    if odd:
        log.warning("the metrics of SuperNodes %s are not those that the others report, and left out", odd)

    alike = [named for node, named in metrics_of.items() if shapes[node] == usual]
    weights = [_weight(metrics.get(key)) for _, metrics in alike]
    are_weighted = all(weight is not None for weight in weights) and sum(weight or 0 for weight in weights) > 0
    if are_weighted:
        return [RecordDict({name: metrics}) for name, metrics in alike]
    return [RecordDict({name: MetricRecord({**metrics, key: 1})}) for name, metrics in alike]


def _shape(metrics: MetricRecord, key: str) -> list[tuple[str, int]]:
    """Return the names of metrics, and how long each list is; -1 for a number."""
    shape = []
    for name, value in metrics.items():
        if name != key:
            shape.append((name, len(value) if isinstance(value, list) else -1))
    return sorted(shape)


def _weight(value: object) -> float | None:
    if isinstance(value, int | float) and 0 <= value < math.inf:
        return float(value)
    return None


# --- checks ---


def check_strategy(given: Mapping[str, Any]) -> None:
    """Refuse options of the wrong type or out of range.

    Args:
        given: the options of `PushSum` by name.

    Raises:
        ScenarioError: the message names the value and the rule.
    """
    fractions = {name: given[name] for name in ("fraction_train", "fraction_evaluate", "patience")}
    whole = {name: given[name] for name in ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")}
    for name, value in (fractions | whole | {"seed": given["seed"]}).items():
        if value is None:
            raise ScenarioError(f"{name}=None must be a number; leave it out for the usual one", code=OPTION)
    check_numbers(fractions)
    check_whole({"seed": given["seed"], **whole})
    check_paths({"folder": given["folder"]})

    texts = {name: value for name, value in given.items() if name == "name" or name.endswith("_key")}
    check_kinds(texts, (str,), "a text")
    for name, value in texts.items():
        if value is None and name != "name":
            remedy = ', or "" for all to count alike' if name == "weighted_by_key" else ""
            raise ScenarioError(f"{name}=None must be a text{remedy}; leave it out for the usual one", code=OPTION)

    check_calls({name: value for name, value in given.items() if name.endswith("_fn")})
    check_kinds({"topology_options": given["topology_options"]}, (Mapping,), "a dict, such as {'degree': 4}")

    topology = given["topology"]
    problem = ""
    if not isinstance(topology, str) and not all(hasattr(topology, name) for name in ("n_peers", "directed", "edges")):
        problem = f"topology={topology!r} must be a name that `privdec list` shows, or a Topology"
    if not 0 < given["fraction_train"] <= 1:
        problem = (
            f"fraction_train={given['fraction_train']} must be in (0, 1], the share of peers in a round: peers that "
            "do not train do not mix either"
        )
    if not 0 <= given["fraction_evaluate"] <= 1:
        problem = f"fraction_evaluate={given['fraction_evaluate']} must be in [0, 1]"
    if not given["patience"] >= 0:
        problem = f"patience={given['patience']} must be >= 0 seconds"
    for name, value in whole.items():
        if value < 0:
            problem = f"{name}={value} must be >= 0"
    if problem:
        raise ScenarioError(problem, code=OPTION)


def check_start(given: Mapping[str, Any]) -> None:
    """Refuse what `start` cannot begin with.

    Args:
        given: its arguments, by name.

    Raises:
        ScenarioError: the message names the value and the rule.
    """
    grid = given["grid"]
    arrays = given["initial_arrays"]
    rounds = given["num_rounds"]
    timeout = given["timeout"]

    problem = ""
    if not isinstance(grid, Grid):
        problem = f"grid is a {type(grid).__name__}: give the one that the ServerApp's main function is given"
    elif not isinstance(arrays, ArrayRecord):
        problem = f"initial_arrays is a {type(arrays).__name__}: give ArrayRecord(model.state_dict()) or so"
    elif not any(math.prod(array.shape) for array in arrays.values()):
        problem = "initial_arrays has no numbers: give the ArrayRecord of a model that has parameters"
    elif rounds is None or timeout is None:
        problem = "num_rounds and timeout must be numbers; leave them out for the usual ones"
    if problem:
        raise ScenarioError(problem, code="flower.start")

    check_whole({"num_rounds": rounds})
    check_numbers({"timeout": timeout})
    if not (rounds >= 0 and timeout > 0):
        raise ScenarioError(f"num_rounds={rounds} must be >= 0 and timeout={timeout} > 0 seconds", code="flower.start")

    check_kinds({name: given[name] for name in ("train_config", "evaluate_config")}, (ConfigRecord,), "a ConfigRecord")
    check_calls({"evaluate_fn": given["evaluate_fn"]})


# --- a run ---


def _equal(one: ArrayRecord, other: ArrayRecord) -> bool:
    """Return whether two records have equal arrays of the same names."""
    if one.keys() != other.keys():
        return False
    return all(np.array_equal(one[name].numpy(), other[name].numpy(), equal_nan=True) for name in one)


def _is_users(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is neither Flower's loop nor one of this package's."""
    return hook is not Strategy.start and not hook.__module__.startswith(OURS)


@Grid.register
class PeerGrid:
    """Sends the messages of a strategy's loop to the peers; everything else is the grid's.

    Args:
        strategy: whose run it is.
        grid: the nodes.
    """

    def __init__(self, strategy: PushSum, grid: Grid) -> None:
        self._strategy = strategy
        self._grid = grid

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Return the peers' replies, without late ones to earlier messages; see `PeerNetwork.ask`.

        Raises:
            RunError: a message is none of this strategy's.
        """
        return self._strategy.exchange(messages)


@dataclass
class NextRound:
    """A round whose messages were sent with the evaluation of the round before.

    Attributes:
        server_round: the round.
        replies: what came back; None before it did.
    """

    server_round: int
    replies: list[Message] | None = None


@dataclass
class PeerRun:
    """One run of a strategy, from when its peers are found until `start` returns.

    Attributes:
        network: the peers.
        initial: the arrays that all peers begin with.
        layout: the layout of those arrays.
        unmixed: those of them that are not mixed.
        rounds: the number of rounds of the whole run.
        graph: over all peers.
        participation: who takes part in which round.
        sealed: whether the peers seal what they send, so that only sums of masked numbers are open.
        train_config, evaluate_config: for the app's functions.
        evaluate_fn: the app's, for the mean.
        overridden: which hooks a user's subclass overrides.
        wants_mean: whether the mean is computed in every round, and not only at the end.
        evaluates_along: whether the message that lets a peer evaluate goes on to let it train: if all peers can, all
            train in every round, and nothing of the app's or of a subclass runs between the two.
        first_round: from 1; later if a run of the same name goes on.
        recipients: the peers that were sent the round's message.
        counted: those of them that answered the last time, which get shares and are in the round's mean.
        paused: peers that took no step in the last round that they answered: no noise of others is to cancel theirs.
        exhausted: why a peer's budget allows it no more training, by peer.
        last_mean: the last mean; None before the first.
        mean_of: the round of that mean; -1 before the first.
        next_round: what of the next round was sent ahead; None if nothing was.
        terms: how peers mix, by the round of the graph's period and the peers.
        has_noted_privacy: whether the log says what stays with the peers.
        has_noted_change: whether the log says that a changed mean does not reach the peers.
    """

    network: PeerNetwork
    initial: ArrayRecord
    layout: Layout
    unmixed: Mapping[str, np.ndarray]
    rounds: int
    graph: Topology
    participation: Participation
    sealed: bool
    train_config: ConfigRecord
    evaluate_config: ConfigRecord
    evaluate_fn: EvaluateMean | None
    overridden: list[str]
    wants_mean: bool
    evaluates_along: bool
    first_round: int = 1
    recipients: list[int] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    paused: set[int] = field(default_factory=set)
    exhausted: dict[int, str] = field(default_factory=dict)
    last_mean: ArrayRecord | None = None
    mean_of: int = -1
    next_round: NextRound | None = None
    terms: dict[tuple[int, tuple[int, ...]], tuple[list[tuple[int, int, float]], bool]] = field(default_factory=dict)
    has_noted_privacy: bool = False
    has_noted_change: bool = False

    def record(self, mass: np.ndarray) -> ArrayRecord:
        """Return the model of a mass (x, w), [d + 1], as the app knows it; unmixed arrays as they were initially."""
        return record_of(self.layout.arrays(mass[:-1] / mass[-1], self.unmixed))

    def mean(self, answers: Mapping[int, Message], peers: Iterable[int]) -> ArrayRecord | None:
        """Return the mean Σ x / Σ w over some peers' answers; None if `total_mass` is None."""
        total = total_mass(masses_in(answers, self.layout.size, self.sealed), set(peers), self.sealed)
        return None if total is None else self.record(total)

    @property
    def has_stopped(self) -> bool:
        """Return whether no peer trains any more, because what its budget allows is spent."""
        return bool(self.exhausted) and self.exhausted.keys() == self.network.reports.keys()


class PushSum(Strategy):
    """Let every peer train its own model and average them over a directed graph by push-sum.

        (x_i, w_i) ← Σ_j W_ij (x_j, w_j),  z_i = x_i / w_i,  W_ij = 1 / (out_j + 1) of the round's active peers

    It takes the place of one of Flower's: `PushSum(topology="directed-exponential").start(grid, arrays, ...)`. It finds
    the peers, sends each in every round its receivers, and relays the shares to them, of which it combines none.

    `start` takes the arguments of Flower's and returns its Result: `num_rounds` are those of the whole run, with those
    before a restart; `timeout` is in seconds for the answers of one round; `train_config` and `evaluate_config` reach
    the app's functions with `server-round` added; `evaluate_fn` is given the round and the mean over the peers that
    took part in it. It raises RunError if nodes are not peers, claim the same partition, or none of them answers, or
    all fail; and ScenarioError if the graph cannot be, or not with so many peers.

    Rounds run as in Flower's `Strategy.start`, which calls the same hooks with the same arguments; a subclass may
    override them, `start` too. No global model exists. The network's mean Σ x / Σ w takes its place in `evaluate_fn`,
    `aggregate_train`, `configure_train` and `configure_evaluate`, and is computed in each round if one of these is
    given or overridden; what a subclass's `aggregate_train` returns goes to `evaluate_fn` and not to the peers. At the
    end `result.arrays` holds the mean, and `peer_arrays` each peer's own model, unless peers seal what they send.
    Then the mean is a sum of masked numbers, and a peer's own model stays in its folder.

    A peer counts by its number of examples, as in FedAvg, if its app's metrics leave the peer: (x_i, w_i) begins as
    (n_i x, n_i), and W_ij is min(1, n_i / n_j) times as large, so that w_i stays near n_i. Otherwise peers count alike;
    `PeerMod(examples=...)` states another number.

    A peer evaluates round r when it has the message of round r + 1, before it trains, which spares a message: the same
    model, and the same metrics in the result. An evaluation has messages of its own in the last round; and in every
    round if `evaluate_fn` or `should_stop` is given, a hook is overridden, or fewer than all peers train, because
    something may look at a round before the next one is trained.

    A node that does not answer delays the others by the timeout, once: it gets and gives no shares until it
    answers, however late, or until a node with the same partition-id takes its place. What was on its way to it is
    kept; what it sent and no peer received, it hands in again (`pushsum.exactly_once`: why no mass is lost).

    Args:
        topology: the graph's name, as `privdec list` has them, or a graph of your own.
        topology_options: the options of a named graph, such as degree.
        fraction_train: the share of peers that train and mix in a round, in (0, 1], drawn afresh each round.
        fraction_evaluate: the share of peers that evaluate their own model after a round.
        min_train_nodes, min_evaluate_nodes: at least so many do, if there are as many.
        min_available_nodes: with so many the run begins, if others have not answered within `patience`.
        seed: the seed of the graph and of who takes part.
        name: of the run; a run of the same name goes on where it stopped, as far as its peers still know it. By
            default each call of `start` is a new one, with the ledgers of those before.
        folder: where a *simulation's* peers keep state and ledgers; by default privdec-peers/NAME in the current
            folder. A deployed node's is its own to say.
        patience: seconds to wait for the nodes at the start.
        weighted_by_key, arrayrecord_key, configrecord_key, train_metrics_aggr_fn, evaluate_metrics_aggr_fn: as of
            Flower's FedAvg; without the key, and under the key "", all count alike.

    Attributes:
        peer_arrays: after the end, each peer's own model, by peer; empty if they are sealed.
        network: the peers of the run.

    Raises:
        ScenarioError: an option of the wrong type or out of range, or a graph without such weights.

    Source: Kempe et al. 2003; Assran et al. 2019, Stochastic Gradient Push, Algorithm 1.
    """

    weights: ClassVar[str] = "column-stochastic"
    local_record: ClassVar[str] = ""  # see `PeerRequest`
    weighted: ClassVar[bool] = True  # whether peers count by weighted_by_key

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a class in which another strategy stands before this package's, whose hooks it would hide.

        Raises:
            ScenarioError: naming both.
        """
        super().__init_subclass__(**options)
        for place, base in enumerate(cls.__mro__):
            if base.__module__.startswith(OURS):
                break
            if base.__module__.startswith("flwr."):
                ours = next(later for later in cls.__mro__[place:] if later.__module__.startswith(OURS))
                raise ScenarioError(
                    f"class {cls.__name__}: {base.__name__} stands before {ours.__name__} and would take its place: "
                    f"write class {cls.__name__}({ours.__name__}), and override its hooks",
                    code="flower.strategy-class",
                )

    def __init__(
        self,
        topology: str | Topology = "directed-exponential",
        *,
        topology_options: Mapping[str, Any] | None = None,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        seed: int = 0,
        name: str | None = None,
        folder: Path | str | None = None,
        patience: float = 300.0,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: Aggregate | None = None,
        evaluate_metrics_aggr_fn: Aggregate | None = None,
    ) -> None:
        check_strategy({name: value for name, value in locals().items() if name != "self"})
        self.topology = topology
        self.topology_options = dict(topology_options or {})
        self.fraction_train = fraction_train
        self.fraction_evaluate = fraction_evaluate
        self.seed = seed
        self.min_train_nodes = min_train_nodes
        self.min_evaluate_nodes = min_evaluate_nodes
        self.min_available_nodes = min_available_nodes
        self.name = name
        self.folder = folder
        self.patience = patience
        self.weighted_by_key = weighted_by_key
        self.arrayrecord_key = arrayrecord_key
        self.configrecord_key = configrecord_key
        self.train_metrics_aggr_fn = train_metrics_aggr_fn or aggregate_metricrecords
        self.evaluate_metrics_aggr_fn = evaluate_metrics_aggr_fn or aggregate_metricrecords
        self.peer_arrays: dict[int, ArrayRecord] = {}
        self._current: PeerRun | None = None
        self._check_graph()

        # Many Flower apps override `start` with a copy of Flower's loop, and never call super().start. So a loop cannot
        # be trusted to find the peers first. Who calls `start` of this object calls `_start_on_peers`, which finds them
        # and then runs the loop that its class has. Inside the classes `start` and super().start are plain methods.
        self.start = self._start_on_peers  # type: ignore[method-assign]

    # --- hooks of this package's strategies ---

    def _check_graph(self) -> None:
        """Refuse a graph that the strategy cannot use, as soon as it can be told."""
        if self._is_named():
            build_topology(str(self.topology), 8, seed=self.seed, **self.topology_options)

    def _told_to_all(self, n_peers: int) -> dict[str, Any]:
        """Return what the strategy tells the peers in every message, besides the run; see `PeerRequest`."""
        return {}

    def _needs_mean(self) -> bool:
        """Return whether the strategy itself needs the mean of every round."""
        return False

    def _first_round(self) -> int:
        """Return the round to go on with: the last again if a peer missed it, for no peer takes part twice."""
        rounds = [self.reports[peer].round_index for peer in self.network.there]
        last = max(rounds)
        is_done = min(rounds) == last or last == 0
        return last + 1 if is_done else last

    def _run_rounds(self, loop: Callable[[], Any]) -> Any:
        """Relay all rounds, and return what the loop returns, with the peers' mean in its arrays."""
        run = self._run
        network = run.network
        is_new = all(report.incarnation == 0 for report in self.reports.values())
        network.join(run.initial, founding=is_new)

        run.first_round = self._first_round()
        name = network.common["run"]
        if run.first_round > run.rounds > 0:
            log.warning("Run %r has its %s rounds already: give a larger num_rounds, or another name", name, run.rounds)
        elif run.first_round > 1:
            log.info("Run %r goes on with round %s", name, run.first_round)

        result = loop()
        arrays = self._deliver() or ArrayRecord()
        if isinstance(result, Result):
            result.arrays = arrays
        return result

    def _links(self, round_index: int) -> dict[int, list[tuple[int, float]]]:
        """Return the receivers of each peer's shares in a round, with weights; only peers that respond have any."""
        counted = self._run.counted
        links: dict[int, list[tuple[int, float]]] = {peer: [] for peer in range(self.network.n_peers)}
        if len(counted) < 2:
            return links

        examples = {peer: self.reports[peer].examples for peer in counted}
        total = sum(examples.values())
        terms, is_mean = self._terms(round_index)
        for sender, receiver, weight in terms:
            if sender == receiver:
                continue
            # A peer of few examples gets less from one of many, so that its weight stays near their number.
            share = weight * min(1.0, examples[receiver] / examples[sender])
            if is_mean:  # all are joined to all, and get the mean weighted by examples at once
                share = examples[receiver] / total
            links[sender].append((receiver, share))
        return links

    def _terms(self, round_index: int) -> tuple[list[tuple[int, int, float]], bool]:
        """Return how the peers that respond mix in a round: sender, receiver and weight; and whether all get the mean.

        Rounds of a graph that repeats itself, with the same peers, are computed once.
        """
        run = self._run
        period = run.graph.period
        key = (round_index % period if period else round_index, tuple(run.counted))
        if key not in run.terms:
            present = np.zeros(self.network.n_peers, dtype=bool)
            present[run.counted] = True
            matrix, is_mean = matrix_of(run.graph, self.weights, round_index, present)
            if not period or len(run.terms) >= period:
                run.terms.clear()
            run.terms[key] = (list(matrix.terms()), is_mean)
        return run.terms[key]

    def _deliver(self) -> ArrayRecord | None:
        """Hand out the shares in transit, and return the mean over all peers that are there.

        If masked means were asked for round by round it is the last of those: each state enters one sum.
        """
        run = self._run
        last = max(report.round_index for report in self.reports.values())
        mean, _ = self._delivered_mean(self.network.members(), self.network.responsive_peers(), last)
        if run.has_stopped:
            log.info("Training stopped: %s", formatted(run.exhausted))
        log_privacy(self.reports)
        return mean or run.last_mean

    # --- the run ---

    def _start_on_peers(self, *args: Any, **options: Any) -> Any:
        """Find the peers, run Flower's or a subclass's loop on a grid that speaks to them, and deliver their mean."""
        loop = type(self).start
        signature = inspect.signature(loop)
        signature.bind(self, *args, **options)  # raises what Python does for arguments that the loop does not take
        given = dict(zip(START, args, strict=False)) | options

        # The loop's own defaults, such as another number of rounds, count as if they were given.
        facts: dict[str, Any] = {}
        for name, part in START.items():
            default = signature.parameters.get(name, part).default
            facts[name] = None if default is inspect.Parameter.empty else default
        facts |= given
        check_start(facts)

        with one_line_failure():
            self._current = self._find_peers(facts)
            given["grid"] = PeerGrid(self, facts["grid"])
            if facts["evaluate_fn"] is not None:
                given["evaluate_fn"] = self._evaluate
            try:
                return self._run_rounds(partial(loop, self, **given))
            except KeyError as error:
                if error.args != (self.arrayrecord_key,) or not self._run.sealed:
                    raise
                raise RunError(
                    f"a hook of {type(self).__name__} read {self.arrayrecord_key!r} of a reply: peers seal their "
                    "models, and only the mean is known, which super().aggregate_train(...) returns",
                    code="flower.sealed-model",
                ) from error

    def _find_peers(self, facts: Mapping[str, Any]) -> PeerRun:
        """Find the peers, and build their graph.

        Args:
            facts: the arguments of `start`, with their defaults.
        """
        initial = facts["initial_arrays"]
        rounds = int(facts["num_rounds"])
        arrays = numpy_arrays(initial)
        layout = Layout.of(arrays)
        network = self._find_network(facts["grid"], layout, rounds, facts["timeout"])
        layout = network.layout
        sealed = network.sealed
        graph, participation = self._graph(network.n_peers)
        if any(report.cancels for report in network.reports.values()):
            network.common["round_size"] = self._sampled(self.fraction_train, self.min_train_nodes, network.n_peers)
            network.common["disagreement"] = self._disagreement(graph, participation)

        evaluate_fn = facts["evaluate_fn"]
        overridden = [hook for hook in HOOKS if _is_users(getattr(type(self), hook))]
        wants_mean = evaluate_fn is not None or bool(overridden) or self._needs_mean()
        return PeerRun(
            network=network,
            initial=initial,
            layout=layout,
            unmixed=layout.unmixed(arrays),
            rounds=rounds,
            graph=graph,
            participation=participation,
            sealed=sealed,
            train_config=facts["train_config"] or ConfigRecord(),
            evaluate_config=facts["evaluate_config"] or ConfigRecord(),
            evaluate_fn=evaluate_fn,
            overridden=overridden,
            wants_mean=wants_mean,
            evaluates_along=self._evaluates_along(network, participation, facts),
        )

    def _evaluates_along(self, network: PeerNetwork, participation: Participation, facts: Mapping[str, Any]) -> bool:
        """Return whether peers evaluate a round in the message of the next one; see `PeerRun`."""
        is_watched = any(facts.get(name) is not None for name in ("evaluate_fn", "should_stop"))
        is_changed = any(getattr(type(self), name) is not getattr(PushSum, name) for name in IN_ROUNDS)
        if is_watched or is_changed or participation.kind != "all":
            return False
        return all(report.evaluates_along for report in network.reports.values())

    def _find_network(self, grid: Grid, layout: Layout, rounds: int, timeout: float) -> PeerNetwork:
        """Return the peers of a run, all of which were met, or as many as came in time."""
        first_name = self.name or f"run-{grid.run.run_id}"
        common: dict[str, Any] = {
            "folder": "",
            "arrays": self.arrayrecord_key,
            "rounds": rounds,
            "local_record": self.local_record,
            "weighted_by": self.weighted_by_key if self.weighted else "",
        }
        if simulates(grid):
            parent = Path(self.folder or os.environ.get(FOLDER) or "privdec-peers")
            common["folder"] = str(parent.absolute() / safe_name(first_name))

        for again in count(1):
            name = first_name if again == 1 else f"{first_name}-{again}"
            relay_store = RelayStore(run_frames(name, layout))
            network = PeerNetwork(grid, {"run": name, **common}, timeout, relay_store, layout, self.configrecord_key)
            network.find(self.patience, self.min_available_nodes)
            # Without a name of its own every start is another run. If the peers have a state of this one, the app
            # has started a strategy before in the same run of Flower's.
            is_new = not any(report.incarnation for report in network.reports.values())
            if self.name or is_new:
                break
        network.common |= self._told_to_all(network.n_peers)
        return network

    def _graph(self, n_peers: int) -> tuple[Topology, Participation]:
        """Return the graph over so many peers, and who takes part in which round."""
        graph = self.topology
        if isinstance(graph, str):
            graph = build_topology(graph, n_peers, seed=self.seed, **self.topology_options)
        if graph.n_peers != n_peers:
            raise ScenarioError(
                f"topology {graph.name} joins {graph.n_peers} peers, and the SuperNodes are {n_peers}",
                code="nodes.graph",
            )

        n_active = self._sampled(self.fraction_train, self.min_train_nodes, n_peers)
        if n_active == n_peers:
            participation = build_participation("all", n_peers, self.seed, None)
        else:
            participation = build_participation("uniform", n_peers, self.seed, n_active / n_peers)
        checked = Mixing(graph, self.weights, participation)  # raises if these do not go together
        return checked.topology, participation

    def _disagreement(self, graph: Topology, participation: Participation) -> float:
        """Return how much of the variance of noise that sums to 0 is in the models when a round begins."""
        if isinstance(graph, CompleteTopology):
            return 0.0  # all get the mean
        if graph.n_peers > MOST_MEASURED:
            return UNTOLD
        return disagreement_left(Mixing(graph, self.weights, participation))

    def _is_named(self) -> bool:
        """Return whether the graph is given by a name that any number of peers has."""
        return isinstance(self.topology, str) and self.topology not in ("torus", "edge-list", "random-regular")

    @staticmethod
    def _sampled(fraction: float, least: int, total: int) -> int:
        """Return how many of some peers a fraction is, at least so many, as FedAvg has it."""
        # 0.29 * 100 is 28.999999999999996, and must be 29.
        share = int(round(fraction * total, 9))
        return min(total, max(1, share, least))

    def _evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Let `evaluate_fn` evaluate a round's mean, if there is a new one: a round before a restart has none."""
        run = self._run
        round_of_arrays = run.mean_of if server_round else run.first_round - 1
        if run.evaluate_fn is None or server_round != round_of_arrays:
            return None

        metrics: Any = run.evaluate_fn(server_round, arrays)
        if isinstance(metrics, dict):
            with suppress(TypeError, ValueError):  # the error below names what it is
                metrics = MetricRecord(metrics)
        if metrics is not None and not isinstance(metrics, MetricRecord):
            raise RunError(
                f"evaluate_fn returned a {type(metrics).__name__}: it must be a MetricRecord, a dict of numbers, or "
                "None",
                code="flower.evaluate-fn",
            )
        return metrics

    @property
    def _run(self) -> PeerRun:
        """Return the run that `start` began.

        Raises:
            RunError: `start` was not called, for example because another strategy wraps this one.
        """
        if self._current is None:
            name = type(self).__name__
            raise RunError(
                f"{name} is not started: call {name}(...).start(grid, arrays, ...) itself. A wrapper such as Flower's "
                "DifferentialPrivacyServerSideFixedClipping has no global model to add noise to; each peer adds its "
                "own: ClientApp(mods=[PeerMod(clip_norm=..., epsilon=...)])",
                code="flower.not-started",
            )
        return self._current

    @property
    def network(self) -> PeerNetwork:
        """Return the peers of the run; raises RunError before `start`."""
        return self._run.network

    @property
    def reports(self) -> dict[int, PeerReport]:
        """Return the last report of each peer: its ε in words, and why it stopped training."""
        return self.network.reports

    def initialize_parameters(self, client_manager: object) -> None:
        """Refuse Flower's legacy interface, in which a `server_fn` returns the strategy.

        Raises:
            RunError: with the lines to write.
        """
        raise RunError(
            "the ServerApp has a server_fn, Flower's legacy interface: write app = ServerApp() and @app.main() before "
            "def main(grid, context), which calls PushSum(...).start(grid, ArrayRecord(...), num_rounds=...)",
            code="flower.server-fn",
        )

    def summary(self) -> None:
        """Log who takes part and how."""
        if self._current is None:
            log.info("%s on %s", type(self).__name__, getattr(self.topology, "name", self.topology))
            return
        run = self._current
        n_peers = run.network.n_peers
        log.info("%s on %s: %s peers, %s rounds", type(self).__name__, run.graph.name, n_peers, run.rounds)
        log.info("Run %r; %s", run.network.common["run"], self._folders())
        log.info("Shares are %s", "sealed between the peers" if run.sealed else "open to this ServerApp")
        if run.layout.local:
            log.info(
                "%s never leave their peer (PeerMod's local). In the mean and in peer_arrays they are as initially, so "
                "judge a peer's whole model by the app's evaluate function, and not by evaluate_fn",
                ", ".join(run.layout.local),
            )

    def _folders(self) -> str:
        """Return where peers keep state and ledgers, and for how long."""
        grid = self.network.grid
        folder = getattr(grid, "folder", None)
        if not simulates(grid):
            return "each peer keeps state and ledger in the folder of its own node-config"
        if folder is None:
            other = "; each run has another: give the strategy a name for a budget over several"
            if self.name:
                other = ""
            return f"a simulation's peers keep state and ledgers in {self.network.common['folder']}{other}"
        if getattr(grid, "is_temporary", False):
            return "state and ledgers are temporary: this budget counts only this run; give LocalGrid a folder"
        return f"peers keep state and ledgers in {folder}"

    # --- a round ---

    def exchange(self, messages: Iterable[Message]) -> list[Message]:
        """Send a round's messages and return the peers' replies; for subclasses with open models as FedAvg's have.

        Raises:
            RunError: a message was not made by this strategy.
        """
        run = self._run
        ahead = run.next_round
        if ahead is not None and ahead.replies is not None:
            run.next_round = None
            return ahead.replies

        sent = list(messages)
        if any(SAYS not in message.content for message in sent):
            raise RunError(
                f"{type(self).__name__} sent a message of its own making, which no peer understands: change or leave "
                "out those that super().configure_train(...) and super().configure_evaluate(...) return",
                code="flower.own-message",
            )

        replies = run.network.ask(sent)
        if ahead is not None:
            ahead.replies = [*replies.values(), *run.network.failures]
            return ahead.replies
        if "aggregate_train" in run.overridden and not run.sealed:
            # The subclass looks for each peer's model where FedAvg's replies have it.
            for reply in replies.values():
                if MASS not in reply.content:
                    continue
                mass = masses_in({0: reply}, run.layout.size, sealed=False).get(0)
                if mass is not None and mass[-1] > 0:
                    reply.content[self.arrayrecord_key] = run.record(mass)
        return [*replies.values(), *run.network.failures]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message for each peer that takes part: its frames, and the receivers of its shares; no arrays."""
        ahead = self._run.next_round
        if ahead is not None and ahead.server_round == server_round:
            return []  # `exchange` has the replies already

        contents = self._begun_round(server_round, config)
        self._note_changed_mean(arrays)
        return self._round_messages(server_round, contents, evaluators=[])

    def _begun_round(self, server_round: int, config: ConfigRecord) -> dict[int, RecordDict]:
        """Begin a round, and return what a message to each peer that takes part has for the app's train function."""
        run = self._run
        network = run.network
        network.round_index = server_round
        run.recipients = []
        run.counted = []
        if server_round > run.rounds:
            raise RunError(
                f"round {server_round} is after num_rounds={run.rounds}, for which each peer's noise was solved: "
                "give start the number of all rounds",
                code="flower.more-rounds",
            )
        if server_round < run.first_round or run.has_stopped:
            return {}

        # Nodes may have come or gone since the last round.
        network.update_members(network.timeout)
        network.join(run.initial, founding=False)
        network.greet()

        config["server-round"] = server_round
        active = run.participation.active(server_round - 1)
        run.recipients = [peer for peer in network.members() if active[peer]]
        run.counted = [peer for peer in network.responsive_peers() if active[peer]]
        return {peer: RecordDict({self.configrecord_key: config}) for peer in run.recipients}

    def _round_messages(
        self, server_round: int, contents: Mapping[int, RecordDict], evaluators: Iterable[int]
    ) -> list[Message]:
        """Return the messages of a round that has begun.

        Args:
            contents: what each peer that takes part is sent for its app.
            evaluators: those of them that are to evaluate the round before first.
        """
        run = self._run
        network = run.network
        links = self._links(server_round - 1)
        evaluated_round = dict.fromkeys(evaluators, server_round - 1)

        # Whose noise may cancel: that of the others stays in the models if a peer takes no step, or does not answer.
        pairing = [peer for peer in run.counted if peer not in run.paused]
        announced = {peer: network.relay_store.announcements(peer, pairing) for peer in pairing}
        return [
            network.message(
                peer,
                "train",
                ROUND,
                content,
                round_index=server_round,
                evaluated_round=evaluated_round.get(peer, 0),
                wants_mass=run.wants_mean,
                mean_of=run.counted if run.sealed else [],
                receivers=[receiver for receiver, _ in links[peer]],
                weights=[weight for _, weight in links[peer]],
                **announced.get(peer, {}),
            )
            for peer, content in contents.items()
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the mean over the peers that took part, only for evaluation, and the metrics that came."""
        run = self._run
        network = run.network
        if not run.recipients:
            return None, None

        network.raise_if_all_fail(run.recipients)
        answers = {network.peer_at(reply.metadata.src_node_id): reply for reply in replies if not reply.has_error()}
        trained = 0
        for peer in answers:
            report = self.reports[peer]
            trained += report.trained
            run.paused.discard(peer)
            if not report.trained:
                run.paused.add(peer)
            if report.exhausted:
                run.exhausted[peer] = report.stopped
        self._note_privacy(answers)

        troubles = network.troubles()
        suffix = f" ({troubles})" if troubles else ""
        log.info("aggregate_train: %s of %s peers trained%s", trained, network.n_peers, suffix)

        mean = None
        if run.wants_mean:
            mean = run.mean(answers, run.counted)
        if mean is not None:
            run.last_mean = mean
            run.mean_of = server_round
        return mean, self._metrics(answers.values(), self.train_metrics_aggr_fn)

    def _note_privacy(self, answers: Iterable[int]) -> None:
        """Log once what stays with the peers: metrics, and the numbers of examples by which they could count."""
        if self._run.has_noted_privacy:
            return
        self._run.has_noted_privacy = True

        reports = {peer: self.reports[peer] for peer in answers}
        silent = [peer for peer, report in reports.items() if report.keeps_metrics]
        if silent:
            log.info(
                "The metrics of %s stay in metrics.jsonl of each peer's folder: train_metrics_aggr_fn and "
                "evaluate_metrics_aggr_fn are not given them. Without their %s they count alike: weighting by it "
                "would disclose how many examples a peer has to all who get shares; PeerMod(examples=...) states it",
                peer_ranges(silent),
                self.weighted_by_key or "number of examples",
            )
        weighted = [peer for peer, report in reports.items() if report.examples != 1]
        if weighted and len(weighted) < len(reports):
            log.warning("%s count by numbers of examples, and the others by 1", peer_ranges(weighted))

    def _note_changed_mean(self, arrays: ArrayRecord) -> None:
        """Warn once if a subclass's `aggregate_train` returns other arrays than the peers' mean."""
        run = self._run
        if run.has_noted_change or run.last_mean is None or "aggregate_train" not in run.overridden:
            return
        if arrays is run.last_mean or _equal(arrays, run.last_mean):
            return
        run.has_noted_change = True
        log.warning(
            "%s.aggregate_train returns other arrays than the peers' mean. They go to evaluate_fn and to no peer, for "
            "each keeps its own model: change in the app's train function what a peer computes",
            type(self).__name__,
        )

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message for each peer that is to evaluate its own model, with its frames.

        If they evaluate along, it is that of the next round, and goes to all that take part in it.
        """
        run = self._run
        network = run.network
        self._note_changed_mean(arrays)
        responsive = network.responsive_peers()
        if not run.recipients or self.fraction_evaluate == 0 or not responsive:
            return []

        config["server-round"] = server_round
        n_chosen = self._sampled(self.fraction_evaluate, self.min_evaluate_nodes, len(responsive))
        shuffled = keyed_generator(self.seed, "evaluate", server_round).permutation(responsive)
        chosen: list[int] = shuffled[:n_chosen].tolist()

        is_followed = server_round < run.rounds and not run.has_stopped
        if run.evaluates_along and is_followed:
            contents = self._begun_round(server_round + 1, run.train_config)
            evaluators = contents.keys() & set(chosen)
            for peer in evaluators:
                contents[peer][EVALUATION + self.configrecord_key] = config
            run.next_round = NextRound(server_round + 1)
            return self._round_messages(server_round + 1, contents, evaluators)

        messages = []
        for peer in chosen:
            content = RecordDict({self.configrecord_key: config})
            messages.append(network.message(peer, "evaluate", EVALUATE, content, round_index=server_round))
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the metrics of the peers whose metrics leave them."""
        return self._metrics(replies, self.evaluate_metrics_aggr_fn, along=self._run.next_round is not None)

    def _metrics(self, replies: Iterable[Message], aggregate: Aggregate, along: bool = False) -> MetricRecord | None:
        alike = comparable(replies, self.weighted_by_key, along)
        if not alike:
            return None
        return aggregate(alike, self.weighted_by_key)

    def _delivered_mean(
        self, receivers: Iterable[int], peers: list[int], server_round: int
    ) -> tuple[ArrayRecord | None, dict[int, Message]]:
        """Send receivers their shares in transit, and return a round's mean over some peers, and the answers."""
        run = self._run
        network = run.network
        is_wanted = not run.sealed or run.last_mean is None
        request = {"wants_mass": is_wanted, "mean_of": peers if run.sealed else [], "round_index": server_round}
        messages = [network.message(peer, "train", DELIVER, RecordDict(), **request) for peer in receivers]
        answers = network.ask(messages)

        if not run.sealed:
            masses = sorted(masses_in(answers, run.layout.size, run.sealed).items())
            self.peer_arrays = {peer: run.record(mass) for peer, mass in masses if mass[-1] > 0}
        mean = run.mean(answers, peers) if is_wanted else None
        return mean, answers


class Gossip(PushSum):
    """Let every peer train its own model and average them over an undirected graph, with doubly stochastic weights.

        x_i ← Σ_j W_ij x_j,  W_ij = 1 / (1 + max(deg_i, deg_j)) of the round's active peers, the rest to itself

    The weight w of push-sum goes along: it is 1, and leaves it only if a message is late, whose part is then not
    missed. The arguments are those of PushSum.

    Raises:
        ScenarioError: the graph is directed.

    Source: Xiao and Boyd 2004 (Metropolis weights).
    """

    weights = "metropolis"

    def _check_graph(self) -> None:
        """Refuse a directed graph at once, if its name tells."""
        graph = self.topology
        if isinstance(graph, str) and self._is_named():
            graph = build_topology(graph, 8, **self.topology_options)
        if not isinstance(graph, str) and graph.directed and self.weights in UNDIRECTED:
            raise ScenarioError(
                f"topology {graph.name!r} of Gossip must be undirected, for its weights to be doubly stochastic; take "
                "PushSum, or an undirected graph such as ring",
                code="mixing.directed",
            )
