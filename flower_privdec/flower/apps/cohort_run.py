"""Cohort mode: one node hosts every peer, and a train message is many rounds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from flower_privdec.flower.apps.answers import METRICS
from flower_privdec.flower.apps.strategy import Serverless, log_metrics


class CohortRun(Serverless):
    """All peers as rows of one computation in one node; a train message is many rounds.

    The node keeps the run's folder: the state is a checkpoint on its disk, so a node that died goes on
    where its last evaluation was. Other nodes stay idle.
    """

    MESSAGES: ClassVar[int] = 10
    """About how many messages a run is cut into: each costs some 0.2 s of polling."""

    def _hosts(self, n_nodes: int) -> int:
        return 1

    def _prepare(self) -> int:
        evaluations = self._evaluations()
        stride = -(-len(evaluations) // self.MESSAGES)
        self._until = sorted({*evaluations[stride - 1 :: stride], evaluations[-1]})
        return len(self._until)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the node to go on for some evaluation intervals."""
        (node, peers) = self.nodes[0]
        return [
            self._message(
                node,
                "train.cohort",
                peers,
                folder=str(self.out),
                until=self._until[server_round - 1],
                resume=self.resume or server_round > 1,
            )
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Pass the node's latest metrics on."""
        node, _ = self.nodes[0]
        reply = self._answers(replies, f"rounds up to {self._until[server_round - 1]}")[node]
        metrics = reply.content.metric_records[METRICS]
        log_metrics(metrics)
        return None, metrics

    def _conclude(self) -> None:
        """Leave it to the node, which wrote the summary with its last message."""
