"""Peers that train a Flower app's model and exchange it directly, over the transport of `network`, with no server.

`run_app_peer` runs an unmodified app on a device of its own (`privdec peer --app`); `run_mesh` runs all rounds of a
`Mesh` strategy inside one train message of a SuperNode. Both are an `AppTrainer` in a `RunningPeer`, as a scenario's
peer is another trainer in one: the peer exchanges rows, keeps checkpoints and talks to neighbours, and the trainer
takes the step of a round.

    RunningPeer ──> AppTrainer ──> take_step: charges, clips and noises
                                     └──> the app: a `ClientAppRunner`, or of a mesh the ClientApp around this message

The state of a peer is its rows (core.State), from which each step reads an `AppModel` and writes it back.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import math
import random
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from flower_privdec.common.errors import BudgetError, RunError, ScenarioError
from flower_privdec.common.fields import OwnSection
from flower_privdec.common.files import MODEL, write_atomically
from flower_privdec.common.formatting import one_line
from flower_privdec.common.logs import adopt
from flower_privdec.core import Algorithm, Exchange, Mix, State
from flower_privdec.core.algorithm import Step
from flower_privdec.experiment.agreement import build_exchange
from flower_privdec.experiment.noise_statement import NOISE
from flower_privdec.experiment.spent import json_number
from flower_privdec.flower.error_formatting import only_our_lines
from flower_privdec.flower.launch.local_grid import LocalGrid, OpenedApp, opened_app, with_id
from flower_privdec.flower.mods.peer_messages import numpy_arrays, record_of
from flower_privdec.flower.mods.peer_mod import AppFailedError, answer_of, keep_metrics, returned_arrays
from flower_privdec.flower.node_settings import PeerSettings
from flower_privdec.graph.mixing import Mixing
from flower_privdec.network.peer.driver import Driver, PeerDevice
from flower_privdec.network.peer.foreground import device_of, peer_of, run_in_foreground
from flower_privdec.network.transport.tls import credentials_of
from flower_privdec.peer.app_state import WITNESSED, AppModel, Arrays, Layout, mass_of
from flower_privdec.peer.app_updates import (
    UNPROTECTED,
    PeerLedger,
    local_words,
    noise_for,
    take_step,
    unprotected_words,
)
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.peer.times import Times
from flower_privdec.peer.trainer import rows_path
from flower_privdec.privacy.ledger.ledger import Ledger
from flower_privdec.privacy.ledger.segments import Head, RunName
from flower_privdec.scenario import numbers_hash
from flower_privdec.scenario.app_sections import AppPrivacySection
from flower_privdec.scenario.loading import parse_app_scenario, read_plain
from flower_privdec.scenario.sections import AppScenario, TopologySection

if TYPE_CHECKING:
    from flower_privdec.network.peer.telemetry import Telemetry

log = logging.getLogger("flwr.privdec")

FORMAT = "flower-privdec-initial-1"
INITIAL = "initial.safetensors"
UNMIXED = "unmixed."  # before the number of an array that is not mixed, in a state's rows
ENVIRONMENT = "a Flower app, system entropy"
KEEPS_GRAPH = "the peers of an app keep the graph with which they began"
KEEPS_ROUNDS = "the peers of an app have the rounds of their scenario"
ROUND = "server-round"  # the key of the round in the configs of Flower's strategies
NEEDS = 'start the SuperNode with --node-config \'address="HOST:PORT" certificates="FOLDER" ...\''

Config = dict[str, Any]
TrainApp = Callable[[Arrays, int], Arrays]  # (arrays, round from 1) -> the arrays after training
EvaluateApp = Callable[[Arrays, int], Mapping[str, MetricRecord]]  # (arrays, round) -> metrics by record name


@dataclass(frozen=True)
class InitialArrays:
    """The arrays that all peers of an app start from, and the configs of its train function.

    Attributes:
        arrays: the model's, by name, in the app's order.
        key: the name of the ArrayRecord in the app's messages.
        configs: the ServerApp's ConfigRecords for the train function, by name.
        local: patterns of the names of those that never leave a peer.
    """

    arrays: Mapping[str, np.ndarray]
    key: str = "arrays"
    configs: Mapping[str, Config] = field(default_factory=dict)
    local: Sequence[str] = ()

    @property
    def layout(self) -> Layout:
        """Return names, shapes and types of the arrays, and which never leave a peer."""
        return Layout.of(self.arrays, self.local)

    @property
    def digest(self) -> str:
        """Return the SHA-256 of names, order, types, shapes and numbers, and of the names of local arrays."""
        layout = self.layout
        digest = hashlib.sha256(json.dumps(layout.parts).encode())
        if layout.local:
            digest.update(json.dumps(layout.local).encode())
        for value in self.arrays.values():
            digest.update(np.ascontiguousarray(value).tobytes())
        return digest.hexdigest()


def save_initial(path: Path, initial: InitialArrays) -> None:
    """Write initial arrays to a safetensors file that other peers can load."""

    def encoded(value: object) -> object:
        if isinstance(value, bytes):
            return {"base64": base64.b64encode(value).decode()}
        raise TypeError(f"{type(value).__name__} cannot be in a config")

    facts = {"format": FORMAT, "order": list(initial.arrays), "key": initial.key, "configs": initial.configs}
    arrays = {name: np.array(value, order="C") for name, value in initial.arrays.items()}
    write_atomically(path, save(arrays, {"initial": json.dumps(facts, default=encoded)}), public=True)


def load_initial(path: Path) -> InitialArrays:
    """Read initial arrays from a file; nothing in it is executed.

    Raises:
        ScenarioError: it cannot be read, or is another kind of file.
    """

    def decoded(value: dict[str, Any]) -> Any:
        if value.keys() == {"base64"}:
            return base64.b64decode(value["base64"], validate=True)
        return value

    try:
        with safe_open(path, "np") as file:
            facts = json.loads(file.metadata()["initial"], object_hook=decoded)
            if facts["format"] != FORMAT:
                raise ValueError(f"format {facts['format']!r}, not {FORMAT}")
            arrays = {str(name): file.get_tensor(name) for name in facts["order"]}
            return InitialArrays(arrays, str(facts["key"]), dict(facts["configs"]))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ScenarioError(
            f"{path} holds no initial arrays ({one_line(error)}); give the initial.safetensors of a peer's folder",
            code="app.initial-file",
        ) from error


# --- initial arrays from the app's ServerApp ---


class _FirstMessage(BaseException):
    """Ends a ServerApp at its first message, or with None if it sends none.

    It is a BaseException to pass any `except Exception` of the app.
    """

    def __init__(self, message: Message | None) -> None:
        self.message = message


class _FirstMessageGrid(LocalGrid):
    """Raises the first message that is sent to its nodes."""

    def push_messages(self, messages: Iterable[Message]) -> NoReturn:
        """Raise the first message."""
        raise _FirstMessage(next(iter(messages), None))


def initial_from_server_app(app: OpenedApp, n_peers: int, seed: int) -> InitialArrays:
    """Run an app's ServerApp up to its first train message, and return that message's arrays and configs.

    The generators of Python, NumPy and torch are seeded before, so that all peers compute the same arrays, and reseeded
    from the system's entropy afterwards: no later draw follows from the scenario.

    Raises:
        RunError: it sends another message first, or none.
    """
    grid = _FirstMessageGrid(app.client, n_peers, config={}, run_config=app.run_config)
    context = Context(grid.run.run_id, 0, {}, RecordDict(), dict(app.run_config))

    message = None
    _seed(seed)
    try:
        with only_our_lines():  # strategies log a start that does not happen here
            app.server(grid, context)
    except _FirstMessage as first:
        message = first.message
    finally:
        _seed(None)

    kind = "none" if message is None else message.metadata.message_type
    records = {} if message is None else message.content.array_records
    if message is None or kind.split(".")[0] != "train" or len(records) != 1:
        raise RunError(
            f"the first message of the app's ServerApp is of type {kind!r} and has {len(records)} ArrayRecords; it "
            "must be train with one, as Flower's own strategies send it: take one of those, or give --initial FILE, "
            f"the {INITIAL} of another peer's folder",
            code="app.first-message",
        )

    ((key, record),) = records.items()
    arrays = {name: np.array(value) for name, value in numpy_arrays(record).items()}  # copies, of one's own
    configs = {name: dict(config) for name, config in message.content.config_records.items()}
    return InitialArrays(arrays, key, configs)


def _seed(seed: int | None) -> None:
    """Seed the generators that apps use; None for the system's entropy."""
    random.seed(seed)
    if seed is None:
        np.random.seed(None)  # noqa: NPY002
        torch.seed()
    else:
        np.random.seed(seed % 2**32)  # noqa: NPY002 (the largest seed that it takes)
        torch.manual_seed(seed)


# --- calling the app ---


class ClientAppRunner:
    """Calls the train and evaluate functions of an unmodified ClientApp, as a SuperNode would.

    The context's state is kept as long as the process, as on a SuperNode.

    Args:
        client: the app.
        scenario: n_peers, train_config and evaluate_config; the configs override the first ConfigRecord's.
        initial: the name of the ArrayRecord in the app's messages, and the ServerApp's configs.
        peer: its number, the node-config's partition-id.
        folder: the peer's own.
        node_config: more of the device's own configuration.
        run_config: the run-config of the app.

    Raises:
        ScenarioError: a config has a value that no ConfigRecord can hold.
    """

    def __init__(
        self,
        client: ClientApp,
        scenario: AppScenario,
        initial: InitialArrays,
        peer: int,
        folder: Path,
        node_config: Mapping[str, Any] | None = None,
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        config = {peer: {"folder": str(folder), **(node_config or {})}}
        grid = LocalGrid(client, scenario.n_peers, config=config, run_config=dict(run_config or {}))
        self._client = client
        self._peer = peer
        self._folder = folder
        self._key = initial.key
        self._node, self._context = list(grid.contexts.items())[peer]
        self._evaluate_failed = False

        # The scenario's settings go into the first ConfigRecord, which apps read.
        train = {name: dict(config) for name, config in initial.configs.items()} or {"config": {}}
        self._first = next(iter(train))
        train[self._first] |= scenario.train_config
        self._configs = {"train": train, "evaluate": {self._first: dict(scenario.evaluate_config)}}
        for kind in self._configs:
            self._content(kind, {}, 1)  # raises before the run if a config is wrong

    def _content(self, kind: str, arrays: Arrays, server_round: int) -> RecordDict:
        try:
            configs = {name: ConfigRecord(dict(values)) for name, values in self._configs[kind].items()}
        except (TypeError, ValueError) as error:
            raise ScenarioError(
                f"{kind}_config: {one_line(error)}; give numbers, text or lists of one type", code="app.config"
            ) from error
        configs[self._first][ROUND] = server_round
        return RecordDict({self._key: record_of(arrays), **configs})

    def train(self, arrays: Arrays, server_round: int) -> Arrays:
        """Return the arrays after a round's training.

        Raises:
            RunError: the app raised, or its reply is an error or another model.
            BudgetError: the app's own ledger allows no more training.
        """
        try:
            content = self._call("train", arrays, server_round)
        except BudgetError:
            log.exception("peer %s: the app's own budget", self._peer)
            raise
        except AppFailedError as error:
            named = f"the app of peer {self._peer} {error.what}"
            if error.raised is None:
                raise RunError(f"{named}; {error.details}", code="app.failed") from None
            log.error("peer %s: the app's train function failed", self._peer, exc_info=error.raised)
            raise RunError(
                f"{named} in round {server_round}, see above; mend it, and run the same command again",
                code="app.failed",
            ) from error.raised

        try:
            return returned_arrays(content, self._key, Layout.of(arrays))
        except AppFailedError as error:
            raise RunError(f"the app of peer {self._peer} {error.what}; {error.details}", code="app.answer") from None

    def evaluate(self, arrays: Arrays, server_round: int) -> Mapping[str, MetricRecord]:
        """Return the app's metrics; a failure is logged once, returns none, and does not stop the training."""
        try:
            return self._call("evaluate", arrays, server_round).metric_records
        except AppFailedError as error:
            why = error.details if error.raised is None else one_line(error.raised)
        except BudgetError as error:
            why = one_line(error)
        if not self._evaluate_failed:
            log.warning("peer %s: the app does not evaluate (%s)", self._peer, why)
        self._evaluate_failed = True
        return {}

    def _call(self, kind: str, arrays: Arrays, server_round: int) -> RecordDict:
        message = with_id(Message(self._content(kind, arrays, server_round), self._node, kind))
        return answer_of(self._client, message, self._context, self._folder, self._key)


# --- a peer ---


class AppTraining(Algorithm):
    """Stochastic Gradient Push, with an app's training in the place of a gradient step; see `PeerMod`."""

    name = "app"
    weights = "column-stochastic"
    open_rows = ("x", "w")

    def __init__(self, train: Step, mix: Mix) -> None:
        self.program = (train, mix)


class AppTrainer:
    """Trains an app's model as a peer's step; see Trainer.

        x ← x + w · (u · min(1, C / ‖u‖) + N(0, σ² C² I)),  u = train(z) - z,  z = x / w

    The peer's folder holds, besides a peer's usual files, initial.safetensors (public), model.safetensors (z and the
    arrays that are not mixed, at the last evaluation) and metrics.jsonl (the app's evaluation metrics, which do not
    leave).

    Args:
        scenario: with the digest of the initial arrays.
        peer: its number.
        folder: the peer's own.
        initial: the arrays that all peers start from.
        train: the app's train function.
        evaluate: its evaluate function; None for no evaluation.
        private: the peer's privacy; None for no protection.

    Attributes:
        idle: why it does not train now; empty if it does.
        steps_taken: see Trainer.

    Raises:
        ScenarioError: the scenario's graph or participation cannot be built.

    Privacy: that of `PeerMod`: unit one peer with all its data; adjacency: its update of every round replaced by zero;
    one Gaussian release a round, charged on disk before the app trains, and again if a round is repeated after a
    crash. It holds against all neighbours together, and against an observer of all their traffic.
    """

    device = torch.device("cpu")
    pair_secrets = None
    pair_plan = None
    constants = ""

    def __init__(
        self,
        scenario: AppScenario,
        peer: int,
        folder: Path,
        initial: InitialArrays,
        train: TrainApp,
        evaluate: EvaluateApp | None,
        private: AppPrivacySection | None,
    ) -> None:
        torch.set_num_threads(scenario.compute.threads)
        self.scenario = scenario
        self.idle = ""
        self.ledger: PeerLedger | None = None
        self._peer = peer
        self._folder = folder
        self._initial = initial
        self._layout = initial.layout
        self._train_app = train
        self._evaluate_app = evaluate
        self._private = private
        self.steps_taken = 0
        self._exhausted = False  # whether a budget allows no more training

        self._mix = Mix(("x", "w"))
        self.algorithm = AppTraining(lambda _, state: self._train(state), self._mix)
        mixing, self.participation = build_exchange(scenario, self.algorithm)
        assert mixing is not None
        self.mixing: Mixing = mixing

        digest = numbers_hash(scenario)
        self.run = RunName(digest[:32], digest, ENVIRONMENT)
        self._ledger_folder = folder / "ledger"
        if private is not None and private.ledger is not None:
            self._ledger_folder = Path(private.ledger)

    @property
    def witnessed_ledger(self) -> Ledger | None:
        return self.ledger

    def reserve(self) -> tuple[int, Head | None]:
        """See Trainer; nothing is paid in advance: an app trains far longer than its charge takes to reach the disk."""
        head = None if self.ledger is None else self.ledger.head
        return 0, head

    def charge_witnessed(self, witnessed: Mapping[int, int]) -> int:
        if self.ledger is None or self._private is None:
            return 0
        return self.ledger.charge_witnessed(witnessed, self._private, self._own_rounds)

    def charge_confirmed(self, confirmed: Mapping[int, int], reported: Mapping[int, int]) -> int:
        """See Trainer; `privdec peer --app` refuses the option that asks for it."""
        raise NotImplementedError

    def open(self, state: State | None, paid: int, head: Head | None) -> State:
        private = self._private
        if private is not None:
            # Each start names its lines apart, so that a round that is repeated after a crash is charged again.
            start = secrets.randbits(62)
            budget = private.epsilon or math.inf
            self.ledger = PeerLedger(self._ledger_folder, self.scenario.name, start, self._peer, private.delta, budget)
        try:
            if self.ledger is not None and state is None:
                self.ledger.check_budget(self._noise)
            elif self.ledger is not None:
                self.ledger.check_head(head)
            if not (self._folder / INITIAL).exists():
                save_initial(self._folder / INITIAL, self._initial)
        except BaseException:
            self.close()
            raise

        if state is None:
            return self._first_state()
        return state

    def _first_state(self) -> State:
        """Return the state before round 0: x [1, d], w [1], unprotected [1], and the bytes of each unmixed array.

        `unprotected` counts the updates without noise, so that a run that continues with privacy reports them.
        """
        layout = self._layout
        arrays = self._initial.arrays
        x = torch.from_numpy(layout.vector(arrays).astype(layout.dtype))[None]
        rows = {"x": x, "w": torch.ones(1, dtype=x.dtype), "unprotected": torch.zeros(1, dtype=torch.int64)}
        rows |= _unmixed_rows(layout.unmixed(arrays))
        return State(np.array([self._peer]), rows=rows)

    def use_mixing(self, mixing: Mixing) -> None:
        """See Trainer; no step depends on it."""

    def is_active(self, round_index: int) -> bool:
        """See Trainer: it participates, within its budget."""
        if self._exhausted or not self.participation.active(round_index)[self._peer]:
            return False
        return self.ledger is None or self.ledger.allows(self._noise)

    @cached_property
    def _noise(self) -> float:
        """Return the noise multiplier: the scenario's, or the least that keeps the budget over this peer's rounds."""
        private = self._private
        assert private is not None
        return noise_for(private, self._own_rounds)

    @property
    def _own_rounds(self) -> int:
        """Return how many rounds the peer takes part in: who does is public, so it pays only for its own."""
        rounds = self.scenario.rounds
        if self.scenario.participation.kind == "all":
            return rounds
        active = self.participation.active
        return sum(bool(active(k)[self._peer]) for k in range(rounds))

    def advance(self, state: State) -> Exchange | None:
        # The program has two places: 0 is the step, 1 the exchange.
        if state.at == 0:
            self._train(state)
            state.at = 1
        if state.at == 1:
            state.waiting = True
            return self._mix
        state.at = 0
        state.round_index = state.round_index + 1
        return None

    def _train(self, state: State) -> None:
        """Take a round's step, if this peer is active, has some mass, and can pay for it."""
        k = state.round_index
        if self._exhausted or not self.participation.active(k)[self._peer]:
            return

        clip_norm = None
        noise = 0.0
        if self._private is not None:
            clip_norm = self._private.clip_norm
            noise = self._noise

        # Flower counts rounds from 1.
        server_round = k + 1
        model = self._model(state)
        no_step = take_step(
            model, lambda arrays: self._train_app(arrays, server_round), server_round, self.ledger, clip_norm, noise
        )
        if no_step is not None:
            self.idle = no_step.why
            self._exhausted = no_step.for_good
            if no_step.for_good:
                log.warning("peer %s, round %s: %s", self._peer, server_round, no_step.why)
            return

        self.idle = ""
        self.steps_taken += 1
        state.rows["x"][0].copy_(torch.from_numpy(model.x))
        state.rows["unprotected"].fill_(model.unprotected)
        state.rows.update(_unmixed_rows(model.unmixed))

    def _model(self, state: State) -> AppModel:
        """Return a copy of the mass and of the arrays that are not mixed."""
        x = state.rows["x"][0].numpy().copy()
        w = float(state.rows["w"][0])

        unmixed = {}
        for number, (name, kind, shape) in enumerate(self._layout.unmixed_parts):
            row = state.rows[f"{UNMIXED}{number}"][0]  # bytes
            unmixed[name] = row.numpy().view(kind).reshape(shape).copy()

        unprotected = int(state.rows["unprotected"][0])
        return AppModel(self._peer, self._layout, mass_of(x, w), unmixed, unprotected=unprotected)

    def result(self, state: State) -> AppModel:
        """Return the mass as it is now, and the arrays that are not mixed."""
        return self._model(state)

    def evaluate(self, state: State) -> None:
        """See Trainer: save the model, call the app's evaluate function, and hand in rows if the scenario says so.

        Privacy: the app's metrics are of private examples, and stay in the folder; no loss is reported.
        """
        model = self._model(state)
        if model.w > 0:
            self.finish(state)
            if self._evaluate_app is not None:
                arrays = model.layout.arrays(model.model(), model.unmixed)
                metrics = self._evaluate_app(arrays, state.round_index)
                records = {name: dict(metric) for name, metric in metrics.items()}
                keep_metrics(self._folder, state.round_index, "evaluate", records)

        if self.scenario.network.hands_in:
            rows = {name: state.rows[name].numpy() for name in ("x", "w")}
            content = save(rows, {"privdec": json.dumps(self._spent(state))})
            write_atomically(rows_path(self._folder, state.round_index), content)

    def finish(self, state: State) -> None:
        """See Trainer; the model includes shares that came after the last round."""
        model = self._model(state)
        if model.w > 0:
            arrays = model.layout.arrays(model.model(), model.unmixed)
            content = save({name: np.array(value, order="C") for name, value in arrays.items()})
            write_atomically(self._folder / MODEL, content)

    def status(self, state: State) -> dict[str, Any]:
        """See Trainer; with the unit of ε, and why the peer does not train if it does not."""
        budget = None if self._private is None else self._private.epsilon
        status: dict[str, Any] = {"loss": None, **self._spent(state)}
        return status | {"idle": self.idle, "budget": budget, "noise": NOISE["system"]}

    def _spent(self, state: State) -> dict[str, Any]:
        """Return ε as JSON has it, and in words with its unit."""
        if self.ledger is None:
            return {"epsilon": json_number(math.inf), "privacy": UNPROTECTED}
        unprotected = int(state.rows["unprotected"][0])
        if unprotected:
            return {"epsilon": json_number(math.inf), "privacy": unprotected_words(unprotected)}
        words = f"{self.ledger.spent}{local_words(self._layout.local)}"
        return {"epsilon": json_number(self.ledger.spent.epsilon), "privacy": words}

    def close(self) -> None:
        if self.ledger is not None:
            self.ledger.close()


def _unmixed_rows(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return arrays that are not mixed, of any type, as rows of bytes, [1, n] each."""
    rows = {}
    for number, value in enumerate(arrays.values()):
        flat = np.array(value, order="C").reshape(-1).view(np.uint8)
        rows[f"{UNMIXED}{number}"] = torch.from_numpy(flat)[None]
    return rows


def app_peer(
    scenario: AppScenario,
    device: PeerDevice,
    initial: InitialArrays,
    train: TrainApp,
    evaluate: EvaluateApp | None = None,
    *,
    private: AppPrivacySection | None = None,
) -> RunningPeer:
    """Return a peer of an app that runs in the mode of the scenario's network; see RunningPeer and AppTrainer.

    Args:
        private: the peer's privacy, in place of the scenario's.

    Raises:
        ScenarioError: the initial arrays are not finite or not those that the scenario names, or see RunningPeer.
        BudgetError: see RunningPeer.
    """
    if device.insecure_seeds:
        raise ScenarioError(
            "--insecure-seeds draws batches, and an app draws its own: leave it out", code="app.insecure-seeds"
        )
    layout = initial.layout
    if not np.isfinite(layout.vector(initial.arrays)).all() or layout.odd_local(initial.arrays):
        raise ScenarioError(
            "the initial arrays are not finite: check how the model is made", code="app.initial-not-finite"
        )
    digest = initial.digest
    if scenario.initial not in (None, digest):
        raise ScenarioError(
            f"initial={scenario.initial} names other initial arrays than those here, {digest}: give --initial FILE, "
            f"the {INITIAL} of another peer's folder",
            code="app.initial-differs",
        )

    # Peers whose digests differ refuse each other, because it is part of what they agree on.
    named = scenario.model_copy(update={"initial": digest})
    private = private or scenario.private
    trainer = AppTrainer(named, device.peer, device.folder, initial, train, evaluate, private)
    return peer_of(trainer, device)


def run_app_peer(
    app: Path,
    scenario: AppScenario,
    peer: int,
    folder: Path,
    certificates: Path,
    *,
    initial: Path | None = None,
    node_config: Sequence[str] = (),
    listen: str | None = None,
    with_parent: bool = False,
    charge_missing: bool = False,
    telemetry: Telemetry | None = None,
) -> None:
    """Run one peer of an app in the foreground, until its rounds are done, SIGTERM or Ctrl-C.

    Args:
        app: the folder of a Flower app, with its pyproject.toml; nothing in it is changed.
        folder: the peer's own.
        certificates: see `run_peer`.
        initial: the initial.safetensors of another peer's folder; by default the app's ServerApp makes the arrays.
        node_config: the node-config of this device, as KEY=VALUE.
        listen, with_parent, charge_missing, telemetry: see `run_peer`.

    Raises:
        ScenarioError: an argument is wrong; nothing was started.
        RunError: the run could not go on, or the app failed; all is on disk.
        StoppedError: it was stopped by a signal.
    """
    device = device_of(scenario, peer, folder, certificates, listen=listen)
    device = replace(device, stays={"add": KEEPS_GRAPH, "extend": KEEPS_ROUNDS})
    config = node_config_of(node_config)
    with opened_app(app, scenario.run_config) as opened:
        # A peer that is started again goes on with the arrays that it began with.
        path = folder / INITIAL
        if initial is None and path.exists():
            initial = path
        if initial is not None:
            arrays = load_initial(initial)
            source = f"read from {initial}"
        else:
            arrays = initial_from_server_app(opened, scenario.n_peers, scenario.seed)
            source = f"of the app's ServerApp, drawn with seed {scenario.seed}; saved in {path}"
        arrays = replace(arrays, local=scenario.local)
        adopt("flwr")
        log.info("initial arrays %s: %s", arrays.digest[:16], source)

        runner = ClientAppRunner(opened.client, scenario, arrays, peer, folder, config, opened.run_config)
        running = app_peer(scenario, device, arrays, runner.train, runner.evaluate)
        run_in_foreground(running, scenario.evaluation.every, with_parent, charge_missing, telemetry=telemetry)
        log.info("privacy of peer %d: %s", peer, running.status()["privacy"])


def node_config_of(pairs: Sequence[str]) -> Mapping[str, Any]:
    """Return a device's own configuration from KEY=VALUE, each value YAML.

    Raises:
        ScenarioError: one is not such a pair.
    """
    config = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        value = None
        if equals:
            value, _ = read_plain(text, "--node-config", one_value=True)
        if not key.strip() or not isinstance(value, str | int | float):
            raise ScenarioError(
                f"--node-config {pair!r} must be KEY=VALUE, the value text, a number, true or false",
                code="app.node-config",
            )
        config[key.strip()] = value
    return config


# --- a mesh of SuperNodes ---


def run_mesh(
    run: str,
    scenario: str,
    initial: InitialArrays,
    settings: PeerSettings,
    privacy: AppPrivacySection | None,
    train: TrainApp,
) -> AppModel:
    """Run a SuperNode's peer over direct connections, from its start or its last checkpoint, and return its mass.

    The SuperLink and the ServerApp introduce the nodes: they send addresses, the graph and the number of rounds. They
    name no path, no code and no key: certificates come from the node's own node-config, so an untrusted server cannot
    impersonate a node; the budget is the node's own; and the node listens only where its own node-config says.

    Args:
        run: the run's name.
        scenario: the scenario of the train message, as YAML.
        privacy: held to the budget of the node's owner.

    Raises:
        RunError: the run could not go on, or the scenario asks for more than a server may decide.
        ScenarioError: certificates or arrays do not fit.
        BudgetError: the ledger cannot be trusted, or is in use.
    """
    agreed = _checked_scenario(run, scenario, settings)
    assert agreed.network.peers is not None
    assert settings.certificates is not None
    # The ledger is the peer's own, of all its runs; in the mesh's folder each run would have another.
    if privacy is None:
        private = None
    else:
        private = privacy.model_copy(update={"ledger": str(settings.folder)})

    folder = mesh_folder(settings, run)
    credentials = credentials_of(agreed, settings.certificates, settings.peer)
    addresses = tuple(peer.address for peer in agreed.network.peers)
    # The ServerApp waits for an answer: a peer that met nobody says so, and does not wait for ever.
    times = Times.of(agreed.network)
    times = replace(times, give_up=times.start)
    device = PeerDevice(
        settings.peer, folder, credentials, addresses, witnessed=settings.folder / WITNESSED, times=times
    )
    for charges in [True, False] if settings.charge_witnessed else [False]:
        running = app_peer(agreed, device, initial, train, private=private)
        driver = Driver(running)
        try:
            driver.open(begin=not charges)
            if charges:
                log.warning("peer %s charged %s lines that its ledger lacked", settings.peer, driver.charge_witnessed())
                continue
            driver.run()
            assert isinstance(running.trainer, AppTrainer)
            return running.trainer.result(running.state)
        finally:
            driver.close()
    raise AssertionError


def mesh_folder(settings: PeerSettings, run: str) -> Path:
    """Return the folder of a mesh's checkpoints in that of its peer."""
    return settings.folder / f"mesh-{run}"


def _checked_scenario(run: str, text: str, settings: PeerSettings) -> AppScenario:
    """Return the scenario of a train message; raises RunError if it has what a server may not decide."""
    scenario = parse_app_scenario(text, where="the scenario of the train message")
    topology = scenario.topology
    peers = scenario.network.peers
    problem = ""
    code = "mesh.scenario"
    if not settings.address or settings.certificates is None:
        problem = f"peer {settings.peer} has no address or no certificates of its own; {NEEDS}"
        code = "mesh.address"
    elif not isinstance(topology, TopologySection) or topology.file_to_read is not None:
        problem = "the scenario of the train message names code or a file in topology, which no message may"
    elif isinstance(scenario.network.codec, OwnSection) or ":" in scenario.network.transport:
        problem = (
            "the scenario of the train message names code in network.codec or network.transport, which no message may"
        )
    elif scenario.private is not None or scenario.network.hands_in or scenario.run_config:
        problem = "the scenario of the train message has privacy, hand_in or run_config, which are the node's own"
    elif scenario.name != run or scenario.n_peers != settings.n_peers or peers is None:
        problem = (
            f"the scenario of the train message is of {scenario.name!r} with {scenario.n_peers} peers, and this is run "
            f"{run!r} with {settings.n_peers}; it must list the addresses of them all"
        )
    elif (address := peers[settings.peer].address) != settings.address:
        problem = f"the train message has this node at {address}, and its node-config at {settings.address}"

    if problem:
        raise RunError(problem, code=code)

    return scenario
