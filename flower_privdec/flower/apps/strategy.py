"""Strategies without a global model: they find the nodes, hand out work and route; none of them combines."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flower_privdec.engine.recorder import evaluation_rounds
from flower_privdec.errors import RunError
from flower_privdec.flower.apps.nodes import answered, find_nodes
from flower_privdec.flower.apps.records import ORDER, Order
from flower_privdec.scenario import Scenario, to_yaml

log = logging.getLogger("flwr.privdec")
log.setLevel(logging.INFO)

A_MONTH = 30 * 86400.0


@contextmanager
def _short_logs() -> Iterator[None]:
    """Silence the lines that Flower's base strategy logs every round; ours go on."""
    flower = logging.getLogger("flwr")
    level = flower.level
    flower.setLevel(logging.WARNING)
    try:
        yield
    finally:
        flower.setLevel(level)


class Serverless(Strategy):
    """What the strategies share: no model, no aggregation, and no node whose failure goes unnoticed.

    `result.arrays` stays empty and `evaluate_fn` is refused: there is no global model. Models, metrics,
    ledgers and the summary are in the run's folder.

    Args:
        scenario: what to train.
        out: the run's folder.
        base: the folder from which the scenario's relative paths start; by default the current one.
        resume: go on from the checkpoint in `out`.
    """

    def __init__(self, scenario: Scenario, out: Path, *, base: Path | None = None, resume: bool = False) -> None:
        self.scenario, self._text = scenario, to_yaml(scenario)
        self.base = (base or Path.cwd()).absolute()
        self.out = (self.base / out).absolute()
        self.resume = resume
        self.nodes: list[tuple[int, np.ndarray]] = []

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 0,
        timeout: float = A_MONTH,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the scenario to its end; Flower's rounds are messages here, as many as it takes.

        Args:
            grid: the nodes.
            initial_arrays, num_rounds, train_config, evaluate_config: unused; the scenario says it all.
            timeout: seconds to wait for the answers to one message.
            evaluate_fn: must be None.

        Raises:
            RunError: when a node fails or does not answer.
        """
        if evaluate_fn is not None:
            raise RunError("evaluate_fn has no global model to evaluate here; read metrics.jsonl in the folder")
        found = find_nodes(grid)
        shares = np.array_split(np.arange(self.scenario.n_peers), self._hosts(len(found)))
        self.nodes = list(zip(found, shares, strict=False))
        os.chdir(self.base)
        messages = self._prepare()
        with _short_logs():
            result = super().start(grid, ArrayRecord(), messages, timeout, train_config, evaluate_config)
        self._conclude()
        log.info("Done: %s", self.out / "summary.json")
        return result

    def summary(self) -> None:
        """Log what runs where."""
        scenario = self.scenario
        log.info("%s: %s peers on %s SuperNode(s)", type(self).__name__, scenario.n_peers, len(self.nodes))
        log.info("%s, %s rounds of %s", scenario.name, scenario.rounds, scenario.algorithm.name)
        log.info("Results: %s (there is no global model: result.arrays stays empty)", self.out)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask nothing: nodes do not evaluate on private data, for that would be a release."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return nothing."""
        return None

    @abstractmethod
    def _hosts(self, n_nodes: int) -> int:
        """Return on how many of the nodes peers are hosted."""

    @abstractmethod
    def _prepare(self) -> int:
        """Get ready, and return how many train messages a node will be sent."""

    @abstractmethod
    def _conclude(self) -> None:
        """Write what is left to write."""

    def _evaluations(self, after: int = 0) -> list[int]:
        """Return after which rounds, beyond `after`, the models are tried."""
        rounds = evaluation_rounds(self.scenario.rounds, self.scenario.evaluation.every)
        return [round_index for round_index in rounds if round_index > after]

    def _message(self, node: int, kind: str, peers: np.ndarray, **fields: Any) -> Message:
        order = Order(self._text, peers=peers.tolist(), base=str(self.base), **fields)
        return Message(RecordDict({ORDER: order.record()}), node, kind, ttl=A_MONTH)

    def _answers(self, replies: Iterable[Message], asked: str) -> dict[int, Message]:
        names = {node: f"the SuperNode of {name_peers(peers)} ({asked})" for node, peers in self.nodes}
        return answered(replies, names)


def name_peers(peers: np.ndarray) -> str:
    """Return what a message calls a share of peers."""
    return f"peer {peers[0]}" if len(peers) == 1 else f"peers {peers[0]} to {peers[-1]}"


def log_metrics(metrics: MetricRecord) -> None:
    """Log one line about an evaluation."""
    means = [key for key in sorted(metrics) if key.endswith(".mean_model")]
    log.info(
        "round %s: %s, consensus distance %.3g, epsilon %.4g",
        metrics["round"],
        ", ".join(f"{key.removesuffix('.mean_model')} {metrics[key]:.3g}" for key in means),
        metrics["consensus_distance"],
        metrics["epsilon"],
    )
