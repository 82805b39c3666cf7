"""Flower strategies without a global model, for apps whose ClientApp is a peer (`PeerMod`)."""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import wraps
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
from flower_privdec.flower.mods.peer_mod import DELIVER, EVALUATE, MASS, ROUND, SAYS, PeerReport
from flower_privdec.flower.mods.peer_state import Layout, numpy_arrays, run_frames
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
from flower_privdec.graph.topology import Topology, build_participation, build_topology
from flower_privdec.rows.keys import keyed_generator

log = logging.getLogger("flwr.privdec")
log.setLevel(logging.INFO)


def comparable(replies: Iterable[Message], key: str) -> list[RecordDict]:
    """Return what an average can be taken of: the metrics that most peers report, with a weight each.

    Args:
        replies: the peers' answers; those without metrics say nothing.
        key: of the weight. Where some have none, or it is no number >= 0, or all are zero, all count alike.

    Returns:
        Records of the same names, each a number or a list as long as the others'; who reports others is left out, and
        named in the log.
    """
    first = {r.metadata.src_node_id: next(iter(r.content.metric_records.items()), None) for r in replies if _good(r)}
    metrics_of = {node: named for node, named in first.items() if named is not None}
    shapes = {  # the names and how long each list is, -1 for a number
        node: sorted((name, len(x) if isinstance(x, list) else -1) for name, x in metrics.items() if name != key)
        for node, (_, metrics) in metrics_of.items()
    }
    kinds = list(shapes.values())
    usual = max(kinds, key=kinds.count, default=[])
    if odd := [node for node, shape in shapes.items() if shape != usual]:
        log.warning("the metrics of SuperNodes %s are not those that the others report, and left out", odd)
    alike = [named for node, named in metrics_of.items() if shapes[node] == usual]
    weights = [_weight(metrics.get(key)) for _, metrics in alike]
    weighed = all(weight is not None for weight in weights) and sum(weight or 0 for weight in weights) > 0
    return [RecordDict({name: m if weighed else MetricRecord({**m, key: 1})}) for name, m in alike]


def _good(reply: Message) -> bool:
    return not reply.has_error()


def _weight(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 <= value < math.inf else None


def check_strategy(given: Mapping[str, Any]) -> None:
    """Refuse options of the wrong kind or out of their range.

    Args:
        given: those of `PushSum`, by name.

    Raises:
        ScenarioError: naming the value and the rule.
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
        ScenarioError: naming the value and the rule.
    """
    grid, arrays, rounds, timeout = (given[name] for name in ("grid", "initial_arrays", "num_rounds", "timeout"))
    problem = ""
    if not isinstance(grid, Grid):
        problem = f"grid is a {type(grid).__name__}: give the one that the ServerApp's main function is given"
    elif not isinstance(arrays, ArrayRecord):
        problem = f"initial_arrays is a {type(arrays).__name__}: give ArrayRecord(model.state_dict()) or so"
    elif not arrays:
        problem = "initial_arrays is empty: give the ArrayRecord of a model that has parameters"
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


Aggregate = Callable[[list[RecordDict], str], MetricRecord]
EvaluateMean = Callable[[int, ArrayRecord], MetricRecord | None]
OPTION = "flower.option"  # the code of an error
HOOKS = ("start", "configure_train", "aggregate_train", "configure_evaluate")  # what a global model goes through


OURS = "flower_privdec."  # modules
START = {name: part for name, part in inspect.signature(Strategy.start).parameters.items() if name != "self"}


def _over_peers(start: Callable[..., Any]) -> Callable[..., Any]:
    """Return a subclass's `start`, of the arguments of Flower's at least, to be run on the peers."""

    @wraps(start)
    def started(self: PushSum, *args: Any, **options: Any) -> Any:
        named = dict(zip(START, args, strict=False)) | options
        own = inspect.signature(start).parameters
        defaults = {name: own.get(name, part).default for name, part in START.items()}
        facts = {name: None if value is inspect.Parameter.empty else value for name, value in defaults.items()}
        return self._over_peers(lambda **given: start(self, **given), facts | named, named)

    return started


@Grid.register
class PeerGrid:
    """Sends the messages of a strategy's hooks to the peers; all else is the grid's.

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
        """Return the peers' replies, the late ones of earlier messages aside; see `PeerNetwork.ask`.

        Raises:
            RunError: a message is none of this strategy's.
        """
        return self._strategy.exchange(messages)


class PushSum(Strategy):
    """Let every peer train its own model and average them over a directed graph by push-sum.

        (x_i, w_i) ← Σ_j W_ij (x_j, w_j),  z_i = x_i / w_i,  W_ij = 1 / (out_j + 1) of the round's active peers

    It takes the place of one of Flower's: `PushSum(topology="directed-exponential").start(grid, arrays, ...)`. It finds
    the peers, sends each in every round its receivers, and relays the shares to them, of which it combines none.

    Rounds run as in Flower's `Strategy.start`, which calls the same hooks with the same arguments; a subclass may
    override them, `start` too. No global model exists. The network's mean Σ x / Σ w takes its place in `evaluate_fn`,
    `aggregate_train`, `configure_train` and `configure_evaluate`, and is computed in each round where one of these is
    given or overridden; what a subclass's `aggregate_train` returns goes to `evaluate_fn` and not to the peers. At the
    end `result.arrays` holds the mean, and `peer_arrays` each peer's own model, where peers do not seal what they send.
    Where they do, the mean is a sum of masked numbers, and a peer's own model stays in its folder.

    A peer counts by its number of examples, as in FedAvg, where its app's metrics leave the peer: (x_i, w_i) begins as
    (n_i x, n_i), and W_ij is min(1, n_i / n_j) times as large, so that w_i stays near n_i. Otherwise peers count alike;
    `PeerMod(examples=...)` states another number.

    A node that does not answer delays the others by the timeout, once: it gets and gives no shares until it
    answers, however late, or until a node with the same partition-id takes its place. What was on its way to it is
    kept; what it sent and no peer received, it hands in again (`pushsum.exactly_once`: why no mass is lost).

    Args:
        topology: the graph's name, as `privdec list` has them, or a graph of your own.
        topology_options: of a named graph, as degree.
        fraction_train: the share of peers that train and mix in a round, in (0, 1], drawn afresh each round.
        fraction_evaluate: the share of peers that evaluate their own model after a round.
        min_train_nodes, min_evaluate_nodes: so many do at least, of those that there are.
        min_available_nodes: with so many the run begins, when others have not answered within `patience`.
        seed: of the graph and of who takes part.
        name: of the run; a run of the same name goes on where it stopped, as far as its peers still know it. By
            default each call of `start` is a new one, with the ledgers of those before.
        folder: where a *simulation's* peers keep state and ledgers; by default privdec-peers/NAME in the current
            folder. A deployed node's is its own to say.
        patience: seconds to wait for the nodes at the start.
        weighted_by_key, arrayrecord_key, configrecord_key, train_metrics_aggr_fn, evaluate_metrics_aggr_fn: as of
            Flower's FedAvg; without the key, and under the key "", all count alike.

    Attributes:
        peer_arrays: after the end, each peer's own model, by peer; empty where they are sealed.
        network: the peers of the run.

    Raises:
        ScenarioError: an option of the wrong kind or out of its range, or a graph without such weights.

    Source: Kempe et al. 2003; Assran et al. 2019, Stochastic Gradient Push, Algorithm 1.
    """

    weights: ClassVar[str] = "column-stochastic"
    local_record: ClassVar[str] = ""  # see `PeerRequest`
    weighted: ClassVar[bool] = True  # whether peers count by weighted_by_key

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
        self.topology, self.topology_options = topology, dict(topology_options or {})
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
        self._peers: PeerNetwork | None = None
        self._check_graph()

    def __init_subclass__(cls, **options: Any) -> None:
        """Let a subclass's own `start` run its rounds on the peers."""
        super().__init_subclass__(**options)
        if "start" in cls.__dict__:
            cls.start = _over_peers(cls.start)  # type: ignore[method-assign]

    def _is_named(self) -> bool:
        """Return whether the graph is given by a name that any number of peers has."""
        return isinstance(self.topology, str) and self.topology not in ("torus", "edge-list", "random-regular")

    def _check_graph(self) -> None:
        """Refuse a graph that the strategy cannot use, as soon as it can be told."""
        if self._is_named():
            build_topology(str(self.topology), 8, seed=self.seed, **self.topology_options)

    # The run.

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateMean | None = None,
    ) -> Result:
        """Run to the end, as Flower's own strategies do.

        Args:
            grid: the nodes.
            initial_arrays: the model that all peers begin with.
            num_rounds: of the whole run, those before a restart with them.
            timeout: seconds to wait for a round's answers.
            train_config, evaluate_config: handed to the app's functions, with `server-round` added.
            evaluate_fn: given the round and the mean over the peers that took part in it.

        Returns:
            The mean over all peers, and the metrics that came.

        Raises:
            RunError: nodes are no peers, or claim the same partition, or none of them answers; or all fail.
            ScenarioError: the graph cannot be, or not with so many peers.
        """
        given = {name: value for name, value in locals().items() if name in START}
        result: Result = self._over_peers(super().start, given, given)
        return result

    def _over_peers(self, rounds: Callable[..., Any], facts: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
        """Find the peers, run Flower's or a subclass's rounds on a grid that speaks to them, and deliver their mean.

        `given` is what the rounds are called with, and `facts` the same with their defaults.
        """
        if isinstance(facts["grid"], PeerGrid):  # a subclass's start, which is on the peers already
            return rounds(**given)
        check_start(facts)
        with one_line_failure():
            self._begin(facts, facts["grid"])
            peers: dict[str, Any] = {"grid": PeerGrid(self, facts["grid"])}
            if facts["evaluate_fn"] is not None:
                peers["evaluate_fn"] = self._evaluate
            try:
                return self._run(lambda: rounds(**{**given, **peers}))
            except KeyError as error:
                if error.args != (self.arrayrecord_key,) or not self._sealed:
                    raise
                raise RunError(
                    f"a hook of {type(self).__name__} read {self.arrayrecord_key!r} of a reply: peers seal their "
                    "models, and the mean alone is known, which super().aggregate_train(...) returns",
                    code="flower.sealed-model",
                ) from error

    def _run(self, rounds: Callable[[], Any]) -> Any:
        """Relay all rounds, once the peers are found, and return the result with the peers' mean."""
        self.network.join(self._initial, founding=all(report.incarnation == 0 for report in self.reports.values()))
        self._first = self._first_round()
        run = self.network.common["run"]
        if self._first > self._rounds > 0:
            log.warning(
                "Run %r has its %s rounds already: give a larger num_rounds, or another name", run, self._rounds
            )
        elif self._first > 1:
            log.info("Run %r goes on with round %s", run, self._first)
        result = rounds()
        arrays = self._deliver() or ArrayRecord()
        if isinstance(result, Result):
            result.arrays = arrays
        return result

    def _evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Let `evaluate_fn` evaluate a round's mean, where there is a new one: a round before a restart has none."""
        if self._evaluate_fn is None or server_round != (self._mean_of if server_round else self._first - 1):
            return None
        metrics = self._evaluate_fn(server_round, arrays)
        if isinstance(metrics, dict):
            with suppress(TypeError, ValueError):  # which the error below names
                metrics = MetricRecord(metrics)
        if metrics is not None and not isinstance(metrics, MetricRecord):
            raise RunError(
                f"evaluate_fn returned a {type(metrics).__name__}: it must be a MetricRecord, a dict of numbers, or "
                "None",
                code="flower.evaluate-fn",
            )
        return metrics

    def _begin(self, given: Mapping[str, Any], grid: Grid) -> None:
        """Find the peers, and build their graph."""
        arrays, rounds, timeout = (given[name] for name in ("initial_arrays", "num_rounds", "timeout"))
        self._layout, self._initial, self._rounds = Layout.of(numpy_arrays(arrays)), arrays, int(rounds)
        self._unmixed, self._exhausted = self._layout.unmixed(numpy_arrays(arrays)), dict[int, str]()
        self._given, self._evaluate_fn = given, given["evaluate_fn"]
        self._overridden = [hook for hook in HOOKS if not getattr(type(self), hook).__module__.startswith(OURS)]
        self._wants_mean = self._evaluate_fn is not None or bool(self._overridden)
        self._last_mean: ArrayRecord | None = None
        self._mean_of, self._asked, self._counted = -1, list[int](), list[int]()
        self._noted = False
        first = self.name or f"run-{grid.run.run_id}"
        folder = Path(self.folder or os.environ.get(FOLDER) or "privdec-peers").absolute() / safe_name(first)
        common = {
            "folder": str(folder) if simulates(grid) else "",
            "arrays": self.arrayrecord_key,
            "rounds": self._rounds,
        }
        common |= {"local_record": self.local_record, "weighted_by": self.weighted_by_key if self.weighted else ""}
        for again in count(1):
            run = first if again == 1 else f"{first}-{again}"
            relay_store = RelayStore(run_frames(run, self._layout))
            self._peers = PeerNetwork(grid, {"run": run, **common}, timeout, relay_store, self.configrecord_key)
            self.network.find(self.patience, self.min_available_nodes)
            if self.name or not any(report.incarnation for report in self.reports.values()):
                break  # else the app started a strategy before, and this is another run of the same peers
        self._sealed = self.network.sealed
        self._build_graph(self.network.n_peers)

    @property
    def network(self) -> PeerNetwork:
        """Return the peers of the run.

        Raises:
            RunError: `start` was not called, as where another strategy wraps this one.
        """
        if self._peers is None:
            name = type(self).__name__
            raise RunError(
                f"{name} is not started: call {name}(...).start(grid, arrays, ...) itself. A wrapper such as Flower's "
                "DifferentialPrivacyServerSideFixedClipping has no global model to add noise to; each peer adds its "
                "own: ClientApp(mods=[PeerMod(clip_norm=..., epsilon=...)])",
                code="flower.not-started",
            )
        return self._peers

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

    @property
    def reports(self) -> dict[int, PeerReport]:
        """Return the last report of each peer: its ε in words, and why it stopped training."""
        return self.network.reports

    def _build_graph(self, n_peers: int) -> None:
        graph = self.topology
        options = self.topology_options
        graph = build_topology(graph, n_peers, seed=self.seed, **options) if isinstance(graph, str) else graph
        if graph.n_peers != n_peers:
            raise ScenarioError(
                f"topology {graph.name} joins {graph.n_peers} peers, and the SuperNodes are {n_peers}",
                code="nodes.graph",
            )
        count = self._sampled(self.fraction_train, self.min_train_nodes, n_peers)
        kind = ("all", None) if count == n_peers else ("uniform", count / n_peers)
        self._active = build_participation(kind[0], n_peers, self.seed, kind[1])
        self._graph = Mixing(graph, self.weights, self._active).topology  # which checks that they go together

    def _first_round(self) -> int:
        """Return the round to go on with: again the last, where a peer missed it, for none takes part twice."""
        rounds = [self.reports[peer].round_index for peer in self.network.there]
        return max(rounds) + (min(rounds) == max(rounds) or max(rounds) == 0)

    @staticmethod
    def _sampled(fraction: float, least: int, count: int) -> int:
        """Return how many of some peers a fraction is, at least so many, as FedAvg has it."""
        return min(count, max(1, int(round(fraction * count, 9)), least))

    def summary(self) -> None:
        """Log who takes part and how."""
        if self._peers is None:
            log.info("%s on %s", type(self).__name__, getattr(self.topology, "name", self.topology))
            return
        n_peers = self.network.n_peers
        run = self.network.common["run"]
        log.info("%s on %s: %s peers, %s rounds", type(self).__name__, self._graph.name, n_peers, self._rounds)
        log.info("Run %r; %s", run, self._folders())
        log.info("Shares are %s", "sealed between the peers" if self._sealed else "open to this ServerApp")

    def _folders(self) -> str:
        """Return where peers keep state and ledgers, and for how long."""
        folder = getattr(self.network.grid, "folder", None)
        if not simulates(self.network.grid):
            return "each peer keeps state and ledger in the folder of its own node-config"
        if folder is None:
            other = "" if self.name else "; each run has another: give the strategy a name for a budget over several"
            return f"a simulation's peers keep state and ledgers in {self.network.common['folder']}{other}"
        if getattr(self.network.grid, "is_temporary", False):
            return "state and ledgers are temporary: this budget counts this run alone; give LocalGrid a folder"
        return f"peers keep state and ledgers in {folder}"

    # A round.

    def exchange(self, messages: Iterable[Message]) -> list[Message]:
        """Send a round's messages and return the peers' replies; for subclasses with open models as FedAvg's have.

        Raises:
            RunError: a message was not made by this strategy.
        """
        sent = list(messages)
        if any(SAYS not in message.content for message in sent):
            raise RunError(
                f"{type(self).__name__} sent a message of its own making, which no peer understands: change or leave "
                "out those that super().configure_train(...) and super().configure_evaluate(...) return",
                code="flower.own-message",
            )
        replies = self.network.ask(sent)
        if "aggregate_train" in self._overridden and not self._sealed:
            for reply in replies.values():
                mass = masses_in({0: reply}, self._layout.size, sealed=False).get(0) if MASS in reply.content else None
                if mass is not None and mass[-1] > 0:
                    reply.content[self.arrayrecord_key] = self._record(mass)
        return [*replies.values(), *self.network.failures]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message for each peer that takes part: its frames, and the receivers of its shares; no arrays."""
        self.network.round_index = server_round
        self._asked = []
        self._counted = []
        if server_round > self._rounds:
            raise RunError(
                f"round {server_round} is after num_rounds={self._rounds}, for which each peer's noise was solved: "
                "give start the number of all rounds",
                code="flower.more-rounds",
            )
        if server_round < self._first or self._all_stopped():
            return []
        self.network.update_members(self.network.timeout)
        self.network.join(self._initial, founding=False)
        self.network.greet()
        config["server-round"] = server_round
        active = self._active.active(server_round - 1)
        self._asked = [peer for peer in self.network.members() if active[peer]]
        self._counted = [peer for peer in self.network.responsive_peers() if active[peer]]
        links = self._links(server_round - 1)
        return [
            self.network.message(
                peer,
                "train",
                ROUND,
                RecordDict({self.configrecord_key: config}),
                round_index=server_round,
                wants_mass=self._wants_mean,
                mean_of=self._counted if self._sealed else [],
                receivers=[to for to, _ in links[peer]],
                weights=[weight for _, weight in links[peer]],
            )
            for peer in self._asked
        ]

    def _links(self, round_index: int) -> dict[int, list[tuple[int, float]]]:
        """Return the receivers of each peer's shares in a round, with weights: responsive peers alone."""
        present = np.zeros(self.network.n_peers, dtype=bool)
        present[self._counted] = True
        links: dict[int, list[tuple[int, float]]] = {peer: [] for peer in range(len(present))}
        if present.sum() < 2:
            return links
        counts = {peer: self.reports[peer].examples for peer in self._counted}
        matrix, is_mean = matrix_of(self._graph, self.weights, round_index, present)
        for sender, receiver, weight in matrix.terms():
            if sender != receiver:
                ours = counts[sender]
                theirs = counts[receiver]
                weight = theirs / sum(counts.values()) if is_mean else weight * min(1.0, theirs / ours)
                links[sender].append((receiver, weight))
        return links

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the mean over the peers that took part, for evaluation alone, and the metrics that came."""
        if not self._asked:
            return None, None
        self.network.raise_if_all_fail(self._asked)
        answers = {self.network.peer_at(reply.metadata.src_node_id): reply for reply in replies if _good(reply)}
        trained = sum(self.reports[peer].trained for peer in answers)
        self._exhausted |= {peer: self.reports[peer].stopped for peer in answers if self.reports[peer].exhausted}
        self._note_privacy(answers)
        troubles = self.network.troubles()
        log.info(
            "aggregate_train: %s of %s peers trained%s",
            trained,
            self.network.n_peers,
            f" ({troubles})" if troubles else "",
        )
        mean = self._mean(answers, self._counted) if self._wants_mean else None
        if mean is not None:
            self._last_mean = mean
            self._mean_of = server_round
        return mean, self._metrics(answers.values(), self.train_metrics_aggr_fn)

    def _note_privacy(self, answers: Iterable[int]) -> None:
        """Log once what stays with the peers: metrics, and the numbers of examples by which they could count."""
        if self._noted:
            return
        self._noted, reports = True, {peer: self.reports[peer] for peer in answers}
        if silent := [peer for peer, report in reports.items() if report.keeps_metrics]:
            log.info(
                "The metrics of %s stay in metrics.jsonl of each peer's folder: train_metrics_aggr_fn and "
                "evaluate_metrics_aggr_fn are not given them. Without their %s they count alike: weighting by it "
                "would disclose how many examples a peer has to all who get shares; PeerMod(examples=...) states it",
                peer_ranges(silent),
                self.weighted_by_key or "number of examples",
            )
        weighed = [peer for peer, report in reports.items() if report.examples != 1]
        if weighed and len(weighed) < len(reports):
            log.warning("%s count by numbers of examples, and the others by 1", peer_ranges(weighed))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message for each peer that is to evaluate its own model, with its frames."""
        well = self.network.responsive_peers()
        if not self._asked or self.fraction_evaluate == 0 or not well:
            return []
        config["server-round"] = server_round
        count = self._sampled(self.fraction_evaluate, self.min_evaluate_nodes, len(well))
        chosen = keyed_generator(self.seed, "evaluate", server_round).permutation(well)[:count].tolist()
        contents = {peer: RecordDict({self.configrecord_key: config}) for peer in chosen}
        return [
            self.network.message(peer, "evaluate", EVALUATE, contents[peer], round_index=server_round)
            for peer in chosen
        ]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the metrics of the peers that say them."""
        return self._metrics(replies, self.evaluate_metrics_aggr_fn)

    def _metrics(self, replies: Iterable[Message], aggregate: Aggregate) -> MetricRecord | None:
        alike = comparable(replies, self.weighted_by_key)
        return aggregate(alike, self.weighted_by_key) if alike else None

    def _all_stopped(self) -> bool:
        """Return whether no peer trains any more, for what its budget allows is spent."""
        return bool(self._exhausted) and self._exhausted.keys() == self.reports.keys()

    def _deliver(self) -> ArrayRecord | None:
        """Hand out the shares in transit, and return the mean over all peers that are there.

        Where masked means were asked for round by round it is the last of those: each state enters one sum.
        """
        last = max(report.round_index for report in self.reports.values())
        mean, _ = self._delivered_mean(self.network.members(), self.network.responsive_peers(), last)
        if self._all_stopped():
            log.info("Training stopped: %s", formatted(self._exhausted))
        log_privacy(self.reports)
        return mean or self._last_mean

    def _delivered_mean(
        self, receivers: Iterable[int], peers: list[int], server_round: int
    ) -> tuple[ArrayRecord | None, dict[int, Message]]:
        """Send receivers their shares in transit, and return a round's mean over some peers, and the answers."""
        network = self.network
        wanted = not self._sealed or self._last_mean is None
        common = {"wants_mass": wanted, "mean_of": peers if self._sealed else [], "round_index": server_round}
        messages = [network.message(peer, "train", DELIVER, RecordDict(), **common) for peer in receivers]
        answers = network.ask(messages)
        if not self._sealed:
            masses = sorted(masses_in(answers, self._layout.size, self._sealed).items())
            self.peer_arrays = {peer: self._record(mass) for peer, mass in masses if mass[-1] > 0}
        return self._mean(answers, peers) if wanted else None, answers

    def _mean(self, answers: Mapping[int, Message], peers: Iterable[int]) -> ArrayRecord | None:
        total = total_mass(masses_in(answers, self._layout.size, self._sealed), set(peers), self._sealed)
        return None if total is None else self._record(total)

    def _record(self, mass: np.ndarray) -> ArrayRecord:
        return self._layout.record(mass[:-1] / mass[-1], self._unmixed)


class Gossip(PushSum):
    """Let every peer train its own model and average them over an undirected graph, with doubly stochastic weights.

        x_i ← Σ_j W_ij x_j,  W_ij = 1 / (1 + max(deg_i, deg_j)) of the round's active peers, the rest to itself

    The weight w of push-sum goes along: it is 1, and leaves it only where a message is late, whose part is then not
    missed. The arguments are those of PushSum.

    Raises:
        ScenarioError: the graph is directed.

    Source: Xiao and Boyd 2004 (Metropolis weights).
    """

    weights = "metropolis"

    def _check_graph(self) -> None:
        """Refuse a directed graph at once, where its name tells."""
        graph = self.topology
        if isinstance(graph, str) and self._is_named():
            graph = build_topology(graph, 8, **self.topology_options)
        if not isinstance(graph, str) and graph.directed and self.weights in UNDIRECTED:
            raise ScenarioError(
                f"topology {graph.name!r} of Gossip must be undirected, for its weights to be doubly stochastic; take "
                "PushSum, or an undirected graph such as ring",
                code="mixing.directed",
            )
