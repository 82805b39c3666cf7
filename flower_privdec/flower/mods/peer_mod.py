"""The mod that makes a Flower ClientApp a peer: `ClientApp(mods=[PeerMod(...)])`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict

from flower_privdec.common.arguments import check_kinds, check_paths
from flower_privdec.errors import RAISED_BY_USERS, BudgetError, RunError
from flower_privdec.flower.apps.nodes import reason
from flower_privdec.flower.launch.error_formatting import CLIENT_APP_RAISED, MENDABLE, said
from flower_privdec.flower.mods.app_calls import UnfitAnswerError, returned_arrays, working_in
from flower_privdec.flower.mods.layout import Layout, numpy_arrays
from flower_privdec.flower.mods.orders import (
    DELIVER,
    EVALUATE,
    INBOX,
    INITIAL,
    INTRODUCE,
    JOIN,
    MESH,
    ROUND,
    SAYS,
    Asked,
)
from flower_privdec.flower.mods.peer_file import alone_in
from flower_privdec.flower.mods.peer_place import PeerPlace
from flower_privdec.flower.mods.protecting import PeerPrivacy
from flower_privdec.flower.mods.request_handler import Desk, keep_metrics
from flower_privdec.flower.serverless.mesh import MeshApp, run_mesh

log = logging.getLogger("flwr.privdec")
App = Callable[[Message, Context], Message]

NO_STRATEGY = (
    "the message comes from no strategy of flower_privdec (or from another version): start PushSum or Gossip in the "
    "ServerApp, or take PeerMod out"
)


class PeerMod:
    """Keep a peer's model between rounds, mix it with its neighbours', and protect what leaves.

    In every round the mod adds the neighbours' shares to (x, w), lets the app's own train function start from
    z = x / w in place of a global model, and takes what it returns as the peer's update u = z' - z:

        x ← x + w · (u · min(1, C / ‖u‖) + N(0, σ² C² I)),    then  (x, w) W[j, i]  to each out-neighbour j

    The app's evaluate function is given z. One mod object serves both: `ClientApp(mods=[PeerMod(...)])`, or
    `@app.train(mods=[peer])` and `@app.evaluate(mods=[peer])`. Arrays of any framework do; those of whole numbers stay
    with the peer. State, ledger and identity are files in the peer's folder: the node-config's `folder`, or `folder`
    here; in a simulation by default where the strategy says.

    Args:
        clip_norm: C, the most by which one round's update moves the model; None for no protection.
        noise_multiplier: σ, noise std over C; None to solve it from epsilon for the rounds that the strategy plans.
        epsilon: budget of the peer over all rounds and runs; a round that would exceed it is not trained. A SuperNode's
            own `epsilon` and `delta` in its node-config hold whatever the app says.
        delta: δ.
        folder: where the peer's folder is, unless its node-config has one.
        seal: whether shares are sealed end to end (`sealing`), and open ones refused; by default wherever the peer is
            not one of a simulation.
        share_metrics: whether the app's metrics (losses, accuracies, numbers of examples) of private data leave, which
            no ε covers. By default a protected peer keeps them in metrics.jsonl in its folder, and another sends them:
            say False where the app's own training protects its examples. Where they stay, so does what the app says
            when it fails. Of what it answers beside metrics and the model's arrays nothing leaves.

    Raises:
        ScenarioError: a value of the wrong kind or out of its range, or a clip norm without noise, or noise without a
            clip norm.

    Privacy: unit one peer with all its data; adjacency: its update of every round replaced by zero; one Gaussian
    release a round, charged on disk before the update is made, in a round that fails or is repeated too. It holds
    against whoever sees all that the peer sends: relay, neighbours, everybody. Whether a peer takes part, when, how
    long that takes and whether its app fails is open. Noise is the operating system's.

    Deviations from the paper: the update is weighed by w, where Stochastic Gradient Push adds a gradient as it is:
    several local steps over a small w would overshoot. Where w = 1, as on the directed exponential graph with everybody
    active, it is the same.

    Source: Assran et al. 2019, Stochastic Gradient Push, Algorithm 1; Gossip: the same with doubly stochastic weights.
    """

    def __init__(
        self,
        *,
        clip_norm: float | None = None,
        noise_multiplier: float | None = None,
        epsilon: float | None = None,
        delta: float = 1e-5,
        folder: Path | str | None = None,
        seal: bool | None = None,
        share_metrics: bool | None = None,
    ) -> None:
        check_paths({"folder": folder})
        check_kinds({"seal": seal, "share_metrics": share_metrics}, (bool,), "True, False or None")
        self.privacy = PeerPrivacy(clip_norm, noise_multiplier, epsilon, delta)
        self.folder = None if folder is None else Path(folder)
        self.seal = seal
        self.keeps_metrics = self.privacy.on if share_metrics is None else not share_metrics
        self.withholds = self.privacy.on or self.keeps_metrics

    def __call__(self, message: Message, context: Context, app: App) -> Message:
        """Answer a message in the app's place, and let it answer what is its own."""
        try:
            return self._answer(message, context, app)
        except MENDABLE as error:
            return Message(Error(CLIENT_APP_RAISED, said(error)), reply_to=message)

    def _answer(self, message: Message, context: Context, app: App) -> Message:
        asked = Asked.of(message.content, NO_STRATEGY)
        place = PeerPlace.of(context, asked, self.folder)
        with alone_in(place.folder):
            desk = Desk(asked, place, self.privacy, not place.simulated if self.seal is None else self.seal)
            theirs = self._work(desk, message, context, app)
            return Message(RecordDict({**theirs, **desk.answer()}), reply_to=message)

    def _work(self, desk: Desk, message: Message, context: Context, app: App) -> dict[str, MetricRecord]:
        """Do what is asked, and return what of the app's own answer goes along."""
        kind, content, theirs = desk.asked.kind, message.content, RecordDict()
        if kind == INTRODUCE:
            return {}
        if kind == JOIN:
            desk.join(content)
            return {}
        if kind == MESH:
            self._mesh(desk, message, context, app)
            return {}
        state = desk.take_mail(content)

        def call(arrays: ArrayRecord) -> RecordDict:
            theirs.update(self._call(desk, arrays, message, context, app))
            return theirs

        if kind == ROUND:
            desk.take_part(lambda arrays: self._trained(desk, call(arrays), state.layout))
        elif kind == EVALUATE and state.w > 0:
            call(state.layout.record(state.model(), state.kept))
        elif kind == DELIVER:
            desk.deliver()
        return self._leaving(desk, theirs)

    def _mesh(self, desk: Desk, message: Message, context: Context, app: App) -> None:
        """Run all rounds with the other peers directly, and keep what they come to, unless that was done before.

        Raises:
            RunError: the message has no initial arrays, or the rounds cannot be run.
        """
        content, asked = message.content, desk.asked
        if desk.state is not None:
            if desk.state.round_index != asked.rounds:
                raise RunError(
                    f"peer {desk.place.peer} has a state of run {asked.run!r} after round {desk.state.round_index} of "
                    f"{asked.rounds}, which a mesh cannot go on from: give the run another name"
                )
            return
        if INITIAL not in content.array_records:
            raise RunError("the message has no initial arrays; start a strategy of flower_privdec with some")
        layout = Layout.of(numpy_arrays(content.array_records[INITIAL]))
        told = {name: dict(config) for name, config in content.config_records.items() if name != SAYS}

        def train(arrays: ArrayRecord, server_round: int) -> ArrayRecord:
            configs = {name: ConfigRecord({**config, "server-round": server_round}) for name, config in told.items()}
            message.content = RecordDict({**configs})
            answer = self._call(desk, arrays, message, context, app)
            keep_metrics(desk.place.folder, server_round, "train", answer.metric_records)
            return self._trained(desk, answer, layout)

        desk.state = run_mesh(asked, desk.place, self.privacy, content.array_records[INITIAL], MeshApp(train))

    def _call(self, desk: Desk, arrays: ArrayRecord, message: Message, context: Context, app: App) -> RecordDict:
        """Let the app's own function answer, with the peer's model where it looks for the global one.

        Raises:
            RunError: it answers with an error or with nothing, or raises one whose words are withheld.
        """
        own = {name: record for name, record in message.content.items() if name not in (SAYS, INITIAL, INBOX)}
        copies = {name: ConfigRecord(dict(r)) if isinstance(r, ConfigRecord) else r for name, r in own.items()}
        message.content = RecordDict({desk.asked.arrays: arrays, **copies})
        try:
            with working_in(desk.place.folder):
                reply = app(message, context)
        except BudgetError:
            log.exception("peer %s: the app's own budget", desk.place.peer)
            raise
        except RAISED_BY_USERS as error:
            if not self.withholds:
                raise
            log.exception("peer %s: the app's function failed", desk.place.peer)
            raise self._failed(desk, f"raised {type(error).__name__}", "") from None
        if not isinstance(reply, Message):
            raise self._failed(desk, f"returned a {type(reply).__name__}", "it must return Message(..., reply_to=msg)")
        if reply.has_error():
            raise self._failed(desk, "answered with an error", reason(reply.error.reason))
        return reply.content

    def _trained(self, desk: Desk, content: RecordDict, layout: Layout) -> ArrayRecord:
        """Return the arrays of the train function's answer.

        Raises:
            RunError: there are none, or several and none under the key, or others than were given.
        """
        try:
            return returned_arrays(content, desk.asked.arrays, layout)
        except UnfitAnswerError as error:
            raise self._failed(desk, error.what, error.details) from None

    def _failed(self, desk: Desk, what: str, details: str) -> RunError:
        """Return an error that says what an app did; details may tell of its data, and stay where all such does."""
        if details and self.withholds:
            log.warning("peer %s: its app %s: %s", desk.place.peer, what, details)
        words = "see its own log" if self.withholds else details
        return RunError(f"the app of peer {desk.place.peer} {what}; {words}")

    def _leaving(self, desk: Desk, theirs: RecordDict) -> dict[str, MetricRecord]:
        """Return what of the app's answer leaves: its metrics, unless they are of private data."""
        if self.keeps_metrics:
            keep_metrics(desk.place.folder, desk.asked.round_index, desk.asked.kind, theirs.metric_records)
            return {}
        return dict(theirs.metric_records)
