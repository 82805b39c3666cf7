"""A user's ClientApp, unmodified, called by a peer in place of Flower."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_privdec.common.formatting import one_line
from flower_privdec.errors import RAISED_BY_USERS, BudgetError, RunError, ScenarioError
from flower_privdec.flower.launch.error_formatting import reason
from flower_privdec.flower.launch.local_grid import LocalGrid, message_to
from flower_privdec.flower.mods.peer_state import Layout, numpy_arrays
from flower_privdec.flower.mods.private_update import UnfitAnswerError, returned_arrays, working_in
from flower_privdec.flower.serverless.initial_arrays import InitialArrays

log = logging.getLogger("flwr.privdec")

ROUND = "server-round"  # as Flower's strategies call it in the configs that they send


class TrainedApp(Protocol):
    """What a peer needs of an app."""

    def train(self, arrays: ArrayRecord, server_round: int) -> ArrayRecord:
        """Return the arrays after a round's training.

        Args:
            server_round: from 1.

        Raises:
            RunError: it cannot.
            BudgetError: the app's own ledger allows no more training.
        """

    def evaluate(self, arrays: ArrayRecord, server_round: int) -> Mapping[str, MetricRecord]:
        """Return what the app says of arrays; nothing where it cannot say."""


class DrivenApp:
    """A ClientApp whose train and evaluate functions are called as a SuperNode would call them.

    What its context's state keeps is kept as long as the process, as on a SuperNode.

    Args:
        client: the app.
        initial: says under which key its functions look for the arrays, and what the ServerApp tells them.
        peer, n_peers: which of how many: the node-config's partition-id and num-partitions.
        folder: the peer's own.
        node_config: more of the device's own configuration.
        run_config: of the app.
        train_config, evaluate_config: laid over what the functions are told.

    Raises:
        ScenarioError: a config has a value that no config may have.
    """

    def __init__(
        self,
        client: ClientApp,
        initial: InitialArrays,
        peer: int,
        n_peers: int,
        folder: Path,
        *,
        node_config: Mapping[str, Any] | None = None,
        run_config: Mapping[str, Any] | None = None,
        train_config: Mapping[str, Any] | None = None,
        evaluate_config: Mapping[str, Any] | None = None,
    ) -> None:
        config = {peer: {"folder": str(folder), **(node_config or {})}}
        grid = LocalGrid(client, n_peers, config=config, run_config=dict(run_config or {}))
        self._client, self._peer, self._folder, self._key = client, peer, folder, initial.key
        self._node, self._context = list(grid.contexts.items())[peer]
        self._deaf = False
        self._train = {name: dict(config) for name, config in initial.configs.items()} or {"config": {}}
        first = next(iter(self._train))
        self._train[first] |= dict(train_config or {})
        self._evaluate = {first: dict(evaluate_config or {})}
        for kind in ("train", "evaluate"):
            self._content(kind, ArrayRecord(), 1)  # which refuses what no config may have

    def _content(self, kind: str, arrays: ArrayRecord, server_round: int) -> RecordDict:
        configs = self._train if kind == "train" else self._evaluate
        try:
            first = next(iter(configs))
            told = {name: ConfigRecord({**values, ROUND: server_round}) for name, values in configs.items()}
            others = {name: ConfigRecord(dict(configs[name])) for name in configs if name != first}
        except (TypeError, ValueError) as error:
            raise ScenarioError(f"{kind}_config: {one_line(error)}; give numbers, text or lists of one type") from error
        return RecordDict({self._key: arrays, first: told[first], **others})

    def train(self, arrays: ArrayRecord, server_round: int) -> ArrayRecord:
        """See TrainedApp."""
        try:
            reply = self._call("train", arrays, server_round)
        except BudgetError:
            log.exception("peer %s: the app's own budget", self._peer)
            raise
        except RAISED_BY_USERS as error:
            log.exception("peer %s: the app's train function failed", self._peer)
            raise RunError(
                f"the app of peer {self._peer} raised {type(error).__name__} in round {server_round}, see above; mend "
                "it, and run the same command with --resume"
            ) from error
        if reply.has_error():
            raise RunError(f"the app of peer {self._peer} answered with an error; {reason(reply.error.reason)}")
        try:
            return returned_arrays(reply.content, self._key, Layout.of(numpy_arrays(arrays)))
        except UnfitAnswerError as error:
            raise RunError(f"the app of peer {self._peer} {error.what}; {error.details}") from None

    def evaluate(self, arrays: ArrayRecord, server_round: int) -> Mapping[str, MetricRecord]:
        """See TrainedApp: what cannot be evaluated is said once, and stops no training."""
        try:
            reply = self._call("evaluate", arrays, server_round)
            if not reply.has_error():
                return reply.content.metric_records
            why = reason(reply.error.reason)
        except RAISED_BY_USERS as error:
            why = one_line(error)
        if not self._deaf:
            log.warning("peer %s: the app does not evaluate (%s)", self._peer, why)
        self._deaf = True
        return {}

    def _call(self, kind: str, arrays: ArrayRecord, server_round: int) -> Message:
        message = message_to(self._node, kind, self._content(kind, arrays, server_round))
        with working_in(self._folder):
            reply = self._client(message, self._context)
        if not isinstance(reply, Message):
            raise RunError(f"it returned a {type(reply).__name__}, and must return Message(..., reply_to=msg)")
        return reply
