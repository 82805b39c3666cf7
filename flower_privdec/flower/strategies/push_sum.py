"""Flower strategies without a global model, for apps whose ClientApp is a peer (`PeerMod`)."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from flower_privdec.common.arguments import check_calls, check_kinds, check_numbers, check_paths, check_whole
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.flower.error_formatting import one_line_failure
from flower_privdec.flower.mods.peer_mod import DELIVER, EVALUATE, ROUND, PeerReport
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
    metrics_of = {r.metadata.src_node_id: next(iter(r.content.metric_records.values())) for r in replies if _has(r)}
    shapes = {node: _shape(metrics, key) for node, metrics in metrics_of.items()}
    kinds = list(shapes.values())
    usual = max(kinds, key=kinds.count, default=())
    if odd := [node for node, shape in shapes.items() if shape != usual]:
        log.warning("the metrics of SuperNodes %s are not those that the others report, and left out", odd)
    alike = [metrics for node, metrics in metrics_of.items() if shapes[node] == usual]
    weights = [_weight(metrics.get(key)) for metrics in alike]
    weighed = all(weight is not None for weight in weights) and sum(weight or 0 for weight in weights) > 0
    return [RecordDict({"metrics": m if weighed else MetricRecord({**m, key: 1})}) for m in alike]


def _has(reply: Message) -> bool:
    return bool(reply.content.metric_records)


def _shape(metrics: MetricRecord, key: str) -> tuple[tuple[str, int], ...]:
    """Return the names and how long each list is, -1 for a number."""
    sizes = {name: len(value) if isinstance(value, list) else -1 for name, value in metrics.items() if name != key}
    return tuple(sorted(sizes.items()))


def _weight(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 <= value < math.inf else None


def check_strategy(given: Mapping[str, Any]) -> None:
    """Refuse options of the wrong kind or out of their range.

    Args:
        given: those of `PushSum`, by name.

    Raises:
        ScenarioError: naming the value and the rule.
    """
    shares = {name: given[name] for name in ("participation", "fraction_evaluate", "patience")}
    for name, value in (shares | {"seed": given["seed"]}).items():
        if value is None:
            raise ScenarioError(f"{name}=None must be a number; leave it out for the usual one")
    check_numbers(shares)
    check_whole({"seed": given["seed"]})
    check_paths({"folder": given["folder"]})
    texts = {name: value for name, value in given.items() if name == "name" or name.endswith("_key")}
    check_kinds(texts, (str,), "a text")
    check_calls({name: value for name, value in given.items() if name.endswith("_fn")})
    check_kinds({"topology_options": given["topology_options"]}, (Mapping,), "a dict, such as {'degree': 4}")
    topology = given["topology"]
    if not isinstance(topology, str) and not all(hasattr(topology, name) for name in ("n_peers", "directed", "edges")):
        raise ScenarioError(f"topology={topology!r} must be a name that `privdec list` shows, or a Topology")
    if not 0 < given["participation"] <= 1:
        raise ScenarioError(f"participation={given['participation']} must be in (0, 1], the share of peers in a round")
    if not 0 <= given["fraction_evaluate"] <= 1:
        raise ScenarioError(f"fraction_evaluate={given['fraction_evaluate']} must be in [0, 1]")
    if not given["patience"] >= 0:
        raise ScenarioError(f"patience={given['patience']} must be >= 0 seconds")


def check_start(
    grid: object, arrays: object, rounds: object, timeout: object, configs: Mapping[str, object], evaluate_fn: object
) -> None:
    """Refuse what `start` cannot begin with.

    Raises:
        ScenarioError: naming the value and the rule.
    """
    if not isinstance(grid, Grid):
        raise ScenarioError(
            f"grid is a {type(grid).__name__}: give the one that the ServerApp's main function is given"
        )
    if not isinstance(arrays, ArrayRecord):
        raise ScenarioError(f"initial_arrays is a {type(arrays).__name__}: give ArrayRecord(model.state_dict()) or so")
    if rounds is None or timeout is None:
        raise ScenarioError("num_rounds and timeout must be numbers; leave them out for the usual ones")
    check_whole({"num_rounds": rounds})
    check_numbers({"timeout": timeout})
    if not (rounds >= 0 and timeout > 0):  # type: ignore[operator]
        raise ScenarioError(f"num_rounds={rounds} must be >= 0 and timeout={timeout} > 0 seconds")
    check_kinds(configs, (ConfigRecord,), "a ConfigRecord")
    check_calls({"evaluate_fn": evaluate_fn})


Aggregate = Callable[[list[RecordDict], str], MetricRecord]
EvaluateMean = Callable[[int, ArrayRecord], MetricRecord | None]


class PushSum(Strategy):
    """Let every peer train its own model and average them over a directed graph by push-sum.

        (x_i, w_i) ← Σ_j W_ij (x_j, w_j),  z_i = x_i / w_i,  W_ij = 1 / (out_j + 1) of the round's active peers

    It takes the place of one of Flower's: `PushSum(topology="directed-exponential").start(grid, arrays, ...)`. It finds
    the peers, sends each in every round its receivers, and relays the shares to them, of which it combines none.

    No global model exists. The network's mean Σ x / Σ w is computed for `evaluate_fn` alone, and is what
    `result.arrays` holds at the end; `peer_arrays` then has each peer's own model, where peers do not seal what they
    send. Where they do, the mean is a sum of masked numbers, and a peer's own model stays in its folder.

    A node that does not answer delays the others by the timeout, once: it gets and gives no shares until it
    answers, however late, or until a node with the same partition-id takes its place. What was on its way to it is
    kept; what it sent and no peer received, it hands in again (`pushsum.exactly_once`: why no mass is lost).

    Args:
        topology: the graph's name, as `privdec list` has them, or a graph of your own.
        topology_options: of a named graph, as degree.
        participation: the share of peers that train and mix in a round, in (0, 1], drawn afresh each round.
        fraction_evaluate: the share of peers that evaluate their own model after a round.
        seed: of the graph and of who takes part.
        name: of the run; a run of the same name goes on where it stopped, as far as its peers still know it. By
            default each Flower run is a new one.
        folder: where a *simulation's* peers keep state and ledgers; by default privdec-peers/NAME in the current
            folder. A deployed node's is its own to say.
        patience: seconds to wait for the nodes at the start.
        weighted_by_key, arrayrecord_key, configrecord_key, train_metrics_aggr_fn, evaluate_metrics_aggr_fn: as of
            Flower's FedAvg; metrics without the key count alike.

    Attributes:
        peer_arrays: after the end, each peer's own model, by peer; empty where they are sealed.
        network: the peers of the run.

    Raises:
        ScenarioError: an option of the wrong kind or out of its range, or a graph without such weights.

    Source: Kempe et al. 2003; Assran et al. 2019, Stochastic Gradient Push, Algorithm 1.
    """

    weights: ClassVar[str] = "column-stochastic"
    local_record: ClassVar[str] = ""  # see `PeerRequest`

    def __init__(
        self,
        topology: str | Topology = "directed-exponential",
        *,
        topology_options: Mapping[str, Any] | None = None,
        participation: float = 1.0,
        fraction_evaluate: float = 1.0,
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
        self.participation, self.fraction_evaluate, self.seed = participation, fraction_evaluate, seed
        self.name, self.folder, self.patience = name, folder, patience
        self.weighted_by_key, self.arrayrecord_key = weighted_by_key, arrayrecord_key
        self.configrecord_key = configrecord_key
        self.train_metrics_aggr_fn = train_metrics_aggr_fn or aggregate_metricrecords
        self.evaluate_metrics_aggr_fn = evaluate_metrics_aggr_fn or aggregate_metricrecords
        self.peer_arrays: dict[int, ArrayRecord] = {}
        self._check_graph()

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
        given = {"train_config": train_config, "evaluate_config": evaluate_config}
        check_start(grid, initial_arrays, num_rounds, timeout, given, evaluate_fn)
        self._train_config, self._evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        self._evaluate_fn, self._wants_mean, self._result = evaluate_fn, evaluate_fn is not None, Result()
        with one_line_failure():
            self._begin(grid, initial_arrays, num_rounds, timeout)
            self._result.arrays = self._run() or ArrayRecord()
        return self._result

    def _run(self) -> ArrayRecord | None:
        """Relay all rounds, once the peers are found, and return the peers' mean."""
        self.network.join(self._initial, founding=all(report.incarnation == 0 for report in self.reports.values()))
        first = self._first_round()
        if first == 1:
            self._evaluate_mean(0, self._initial)
        for server_round in range(first, self._rounds + 1):
            self._round(server_round)
            if self._all_stopped():
                break
        return self._deliver()

    def _begin(self, grid: Grid, arrays: ArrayRecord, rounds: int, timeout: float) -> None:
        """Find the peers, and build their graph."""
        self._layout, self._initial, self._rounds = Layout.of(numpy_arrays(arrays)), arrays, rounds
        self._unmixed, self._exhausted = self._layout.unmixed(numpy_arrays(arrays)), dict[int, str]()
        self._last_mean: ArrayRecord | None = None
        run = self.name or f"run-{grid.run.run_id}"
        folder = Path(self.folder or os.environ.get(FOLDER) or "privdec-peers").absolute() / safe_name(run)
        common = {"run": run, "folder": str(folder), "arrays": self.arrayrecord_key, "rounds": rounds}
        common["local_record"] = self.local_record
        self.network = PeerNetwork(grid, common, timeout, RelayStore(run_frames(run, self._layout)))
        self.network.find(self.patience)
        self._sealed = self.network.sealed
        self._build_graph(self.network.n_peers)
        self.summary()

    @property
    def reports(self) -> dict[int, PeerReport]:
        """Return the last report of each peer: its ε in words, and why it stopped training."""
        return self.network.reports

    def _build_graph(self, n_peers: int) -> None:
        graph, options = self.topology, self.topology_options
        graph = build_topology(graph, n_peers, seed=self.seed, **options) if isinstance(graph, str) else graph
        if graph.n_peers != n_peers:
            raise ScenarioError(f"topology {graph.name} joins {graph.n_peers} peers, and the SuperNodes are {n_peers}")
        fraction = None if self.participation == 1 else self.participation
        self._active = build_participation("uniform" if fraction else "all", n_peers, self.seed, fraction)
        self._graph = Mixing(graph, self.weights, self._active).topology  # which checks that they go together

    def _first_round(self) -> int:
        """Return the round to go on with: again the last, where a peer missed it, for none takes part twice."""
        rounds = [self.reports[peer].round_index for peer in self.network.there]
        return max(rounds) + (min(rounds) == max(rounds) or max(rounds) == 0)

    def summary(self) -> None:
        """Log who takes part and how."""
        n_peers, common = self.network.n_peers, self.network.common
        log.info("%s on %s: %s peers, %s rounds", type(self).__name__, self._graph.name, n_peers, self._rounds)
        log.info("Run %r; a simulation's peers keep state and ledgers in %s", common["run"], common["folder"])
        log.info("Shares are %s", "sealed between the peers" if self._sealed else "open to this ServerApp")

    # A round.

    def _round(self, server_round: int) -> None:
        network, arrays = self.network, self._initial
        network.update_members(network.timeout)
        network.join(arrays, founding=False)
        network.greet()
        trained = network.ask(self.configure_train(server_round, arrays, self._train_config, network.grid))
        mean, metrics = self.aggregate_train(server_round, trained.values())
        if metrics:
            self._result.train_metrics_clientapp[server_round] = metrics
        self._evaluate_peers(server_round)
        self._evaluate_mean(server_round, mean)

    def _evaluate_peers(self, server_round: int) -> None:
        """Let some peers evaluate their own models."""
        network, config = self.network, self._evaluate_config
        evaluated = network.ask(self.configure_evaluate(server_round, self._initial, config, network.grid))
        if metrics := self.aggregate_evaluate(server_round, evaluated.values()):
            self._result.evaluate_metrics_clientapp[server_round] = metrics

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message for each peer that takes part: its frames, and the receivers of its shares; no arrays."""
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
        for sender, receiver, weight in matrix_of(self._graph, self.weights, round_index, present).terms():
            if sender != receiver:
                links[sender].append((receiver, weight))
        return links

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the mean over the peers that took part, for evaluation alone, and the metrics that came."""
        self.network.raise_if_all_fail(self._asked)
        answers = {self.network.peer_at(reply.metadata.src_node_id): reply for reply in replies}
        trained = sum(self.reports[peer].trained for peer in answers)
        self._exhausted |= {peer: self.reports[peer].stopped for peer in answers if self.reports[peer].exhausted}
        troubles = self.network.troubles()
        log.info(
            "[ROUND %s/%s] %s of %s peers trained%s",
            server_round,
            self._rounds,
            trained,
            self.network.n_peers,
            f" ({troubles})" if troubles else "",
        )
        mean = self._mean(answers, self._counted) if self._wants_mean else None
        self._last_mean = mean or self._last_mean
        return mean, self._metrics(answers.values(), self.train_metrics_aggr_fn)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message for each peer that is to evaluate its own model, with its frames."""
        config["server-round"] = server_round
        well = self.network.responsive_peers()
        count = math.ceil(round(self.fraction_evaluate * len(well), 9))
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

    def _evaluate_mean(self, server_round: int, mean: ArrayRecord | None) -> None:
        evaluate_fn = self._evaluate_fn
        metrics = None if mean is None or evaluate_fn is None else evaluate_fn(server_round, mean)
        if metrics is not None and not isinstance(metrics, MetricRecord):
            raise RunError(f"evaluate_fn returned a {type(metrics).__name__}: it must be a MetricRecord, or None")
        if metrics is not None:
            line = ", ".join(f"{key} {value:.4g}" for key, value in metrics.items() if not isinstance(value, list))
            log.info("[ROUND %s/%s] the peers' mean: %s", server_round, self._rounds, line)
            self._result.evaluate_metrics_serverapp[server_round] = metrics

    def _all_stopped(self) -> bool:
        """Return whether no peer trains any more, for what its budget allows is spent, and log it."""
        stopped = self._exhausted.keys() == self.reports.keys()
        if stopped:
            log.info("Training stops: %s", formatted(self._exhausted))
        return stopped

    def _deliver(self) -> ArrayRecord | None:
        """Hand out the shares in transit, and return the mean over all peers that are there.

        Where masked means were asked for round by round it is the last of those: each state enters one sum.
        """
        last = max(report.round_index for report in self.reports.values())
        mean, _ = self._delivered_mean(self.network.members(), self.network.responsive_peers(), last)
        log_privacy(self.reports)
        return mean or self._last_mean

    def _delivered_mean(
        self, receivers: Iterable[int], peers: list[int], server_round: int
    ) -> tuple[ArrayRecord | None, dict[int, Message]]:
        """Send peers their shares in transit, and return the mean over some of them, and the answers.

        Args:
            receivers: of the messages.
            peers: of whose masses the mean is.
            server_round: whose mean it is.
        """
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
                "PushSum, or an undirected graph such as ring"
            )
