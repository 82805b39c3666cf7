"""The mod that makes a Flower ClientApp a peer: its settings, and how it calls the app.

This is the only place in which a peer calls a user's app: `answer_of` calls it, `returned_arrays` checks its answer,
and `keep_metrics` writes the metrics that stay on the peer. An app's failure is an `AppFailedError`, whose details may
reveal its data: a caller that protects the app's examples writes them only into its own log.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict

from flower_privdec.common.arguments import check_kinds, check_numbers, check_paths
from flower_privdec.common.errors import RAISED_BY_USERS, BudgetError, RunError, ScenarioError
from flower_privdec.common.files import CHECKPOINTS, owners_file
from flower_privdec.common.formatting import one_line
from flower_privdec.common.user_code import last_line_of_users
from flower_privdec.flower.error_formatting import USER_ERRORS, line_for_server, reason
from flower_privdec.flower.mods.legacy_client import App, is_legacy, legacy_request, modern_answer, turns_out_legacy
from flower_privdec.flower.mods.peer_messages import (
    DELIVER,
    EVALUATE,
    EVALUATION,
    FLOWERS_MODS,
    INITIAL,
    INTRODUCE,
    JOIN,
    MESH,
    MODEL,
    NEEDED_BY_MODS,
    OURS,
    PEER_MOD_FAILED,
    ROUND,
    SAYS,
    PeerRequest,
    given_record,
    numpy_arrays,
    record_in,
    sent_arrays,
    views_of,
)
from flower_privdec.flower.mods.request_handler import RequestHandler, new_incarnation
from flower_privdec.flower.mods.running_app import evaluate_function
from flower_privdec.flower.node_settings import PeerSettings
from flower_privdec.peer.app_state import (
    Arrays,
    Layout,
    PeerState,
    alone_in,
    file_in,
)
from flower_privdec.peer.app_updates import app_noise, app_privacy
from flower_privdec.privacy.ledger.spending import noting_budgets
from flower_privdec.scenario.app_sections import AppPrivacySection

log = logging.getLogger("flwr.privdec")

MOST_WORDS = 200  # characters of an app's own error

_folder: ContextVar[Path] = ContextVar("folder")

# Whether a mod of this thread has the app evaluate: one that the evaluate message meets on its way then lets it pass.
_is_evaluating: ContextVar[bool] = ContextVar("is_evaluating", default=False)


def peer_folder() -> Path:
    """Return the folder of the peer whose train or evaluate function is running, for what it wants to keep.

    A ledger of its examples, say: `private(..., ledger=peer_folder() / "examples.jsonl")` counts over all rounds, and
    for each peer apart. In a simulation the folder is the run's, as the peer's own ledger is.

    Raises:
        RunError: no function of an app with PeerMod is running.
    """
    try:
        return _folder.get()
    except LookupError:
        raise RunError(
            "peer_folder() is for the functions of an app with PeerMod: call it inside one", code="app.peer-folder"
        ) from None


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Let `peer_folder` be a folder, for as long as an app's function runs."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


class AppFailedError(RunError):
    """An app raised, or answered with an error or with no model of the peer's.

    Attributes:
        what: what the app did, in words that reveal nothing of its data.
        details: what is wrong with it, and what to do; these may reveal its data.
        raised: what it raised; None if it returned.
    """

    def __init__(self, what: str, details: str, raised: BaseException | None = None) -> None:
        super().__init__(f"the app {what}; {details}")
        self.what = what
        self.details = details
        self.raised = raised


def answer_of(
    app: App, message: Message, context: Context, folder: Path, key: str, weighted_by: str = ""
) -> RecordDict:
    """Let an app answer a message, with `peer_folder` set.

    Args:
        key: the name of the message's record that has the model.
        weighted_by: the name under which an app of Flower's old API, which has none, reports its number of examples.

    Raises:
        BudgetError: the app's own ledger allows no more training.
        AppFailedError: it failed, or did not answer with a message.
        RunError: another PeerMod stands before the app's function, and has refused the message.
    """
    given = message.content
    kind = message.metadata.message_type.split(".")[0]
    if not is_legacy(app):
        try:
            return _called(app, message, context, folder)
        except AppFailedError as error:
            if not turns_out_legacy(app, error.raised):
                raise

    message.content = legacy_request(kind, given, key)
    answer = _called(app, message, context, folder)
    return modern_answer(kind, answer, given.array_records[key], key, weighted_by)


def _called(app: App, message: Message, context: Context, folder: Path) -> RecordDict:
    try:
        with working_in(folder):
            reply = app(message, context)
    except BudgetError:
        raise
    except RAISED_BY_USERS as error:
        words = " ".join(str(error).split())[:MOST_WORDS]
        details = _with_remedy(f"{words}{last_line_of_users(error)}".strip())
        raise AppFailedError(f"raised {type(error).__name__}", details, raised=error) from error

    if not isinstance(reply, Message):
        raise AppFailedError(f"returned a {type(reply).__name__}", "it must return Message(..., reply_to=msg)")
    if reply.has_error():
        raise AppFailedError("answered with an error", _with_remedy(reason(reply.error.reason)))
    if REFUSAL in reply.content:
        raise RunError(TWICE, code="flower.peer-mod-twice")
    return reply.content


def _with_remedy(words: str) -> str:
    """Return what an app raised, with what to do if a mod of Flower's beside PeerMod is the cause."""
    if any(name in words for name in NEEDED_BY_MODS):
        return f"{words}: {FLOWERS_MODS}"
    return words


def returned_arrays(content: Mapping[str, Any], key: str, layout: Layout) -> Arrays:
    """Return the arrays of a train function's answer.

    Args:
        content: the answer.
        key: under which they are, if there are several.
        layout: the layout of the arrays that it was given.

    Raises:
        AppFailedError: there are none, or several and none under the key, or others than were given. They may come in
            another order: as in FedAvg, an array is known by its name.
    """
    records = {name: record for name, record in content.items() if isinstance(record, ArrayRecord)}
    if key not in records and len(records) != 1:
        raise AppFailedError(
            "returned no model",
            f"its answer has {len(records) or 'no'} ArrayRecord{'s' * (len(records) > 1)} and none named {key!r}: "
            f"return RecordDict({{{key!r}: ArrayRecord(...)}})",
        )

    returned = records[key] if key in records else next(iter(records.values()))
    arrays: Arrays = {}
    try:
        arrays = views_of(returned)
        difference = layout.misfit(arrays)
    except (TypeError, ValueError) as error:  # what Flower says of arrays of another framework
        difference = f"they cannot be read as NumPy's: {one_line(error)}"

    if difference and len(returned) != len(layout.parts):
        # Many clients with personal layers of their own return fewer arrays than a server sends them.
        difference = (
            f"{len(returned)} for {len(layout.parts)} ({difference}): start the strategy from an ArrayRecord of only "
            "those that the app returns; or let it return all, and keep its own by PeerMod(local=...)"
        )
    if difference:
        raise AppFailedError("returned other arrays than it was given", difference)

    return layout.ordered(arrays)


def keep_metrics(folder: Path, round_index: int, kind: str, records: Mapping[str, Mapping[str, Any]]) -> None:
    """Append an app's metrics to a file in the peer's own folder, which is never sent."""
    append_metrics(folder, metric_lines(round_index, kind, records))


def metric_lines(round_index: int, kind: str, records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return an app's metrics as lines of the file in which they stay."""
    return [json.dumps({"round": round_index, "of": kind, **metrics}) + "\n" for metrics in records.values()]


def append_metrics(folder: Path, lines: Sequence[str]) -> None:
    """Append lines of metrics to the file in the peer's own folder, in one write.

    A disk that does not take them costs these lines and nothing else: the update was paid for, and goes on its way.
    """
    if not lines:
        return
    path = file_in(folder, "metrics.jsonl")
    content = "".join(lines).encode()

    # Without a buffer: what the disk did not take is known here, and not when the file is closed.
    try:
        with open(path, "ab", buffering=0, opener=owners_file) as file:
            before = file.tell()
            if file.write(content) < len(content):
                file.truncate(before)  # the next line would be joined to half of one
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        log.warning(
            "%s cannot be written (%s), so that metrics of the app are lost; training goes on: make room there",
            path,
            error.strerror or one_line(error),
        )


LOCAL = "must be a pattern of arrays' names such as 'head.*', a list of them, or 'run-config:KEY'"
Setting = float | str | Callable[[Context], float | None] | None
RUN_CONFIG = "run-config:"
MOST_EXAMPLES = 2.0**40
LEAST_EXAMPLES = 2.0**-10  # by which a peer without examples counts


def is_key(value: object) -> bool:
    """Return whether a setting names a key of the run-config."""
    return isinstance(value, str) and value.startswith(RUN_CONFIG) and value != RUN_CONFIG


def setting_of(name: str, given: Setting, context: Context) -> float | None:
    """Return a setting's number: as given, or from a function of the context, or from a key of the run-config.

    Raises:
        RunError: the run-config has no such key, or the value is not a number.
    """
    value: Any = given
    if callable(given):
        try:
            value = given(context)
        except RAISED_BY_USERS as error:
            log.exception("%s: the function that gives it failed", name)
            what = f"{type(error).__name__}{last_line_of_users(error)}; see the node's own log"
            raise RunError(f"{name}: the function that gives it raised {what}", code="flower.setting") from None

    if isinstance(value, str):
        key = value.removeprefix(RUN_CONFIG)
        if not is_key(value) or key not in context.run_config:
            raise RunError(
                f"{name}={value!r} must be a number, a function of the context, or 'run-config:KEY' with one of the "
                f"app's keys, {sorted(context.run_config)}",
                code="flower.setting",
            )
        value = context.run_config[key]

    number: Any = value.item() if isinstance(value, np.generic) else value
    if number is not None and (isinstance(number, bool) or not isinstance(number, int | float)):
        raise RunError(f"{name}={value!r} of this run must be a number, without quotes", code="flower.setting")

    return number


def _checked_local(local: object) -> tuple[str, ...]:
    """Return `local` as a tuple of patterns and keys of the run-config; raises ScenarioError if it is another thing."""
    if local is None:
        return ()
    given: tuple[object, ...] = (local,)
    if isinstance(local, list | tuple):
        given = tuple(local)
    if not all(isinstance(pattern, str) and pattern for pattern in given):
        raise ScenarioError(f"local={local!r} {LOCAL}; leave it out if all arrays are shared", code="app.local")
    return tuple(map(str, given))


_privacy_of = lru_cache(maxsize=64, typed=True)(app_privacy)  # most messages of a run have the same numbers


TWICE = (
    "PeerMod stands twice before the app's function: keep one, in ClientApp(mods=[...]), or in @app.train(mods=[...]) "
    "and @app.evaluate(mods=[...])"
)
NO_STRATEGY = (
    "the message comes from no strategy of flower_privdec: start PushSum or Gossip in the ServerApp, and keep PeerMod "
    "to what they call, @app.train(mods=[peer]) and @app.evaluate(mods=[peer])"
)
REFUSAL = "flower_privdec"  # the record of an answer that refuses a message, and its only key


class PeerMod:
    """Keep a peer's model between rounds, mix it with its neighbours', and protect what leaves.

    In every round the mod adds the neighbours' shares to (x, w), lets the app's own train function start from
    z = x / w in place of a global model, and takes what it returns as the peer's update u = z' - z:

        x ← x + w · (u · min(1, C / ‖u‖) + N(0, σ² C² I)),    then  (x, w) W[j, i]  to each out-neighbour j

    The app's evaluate function is given z. One mod object serves both: `ClientApp(mods=[PeerMod(...)])`, or
    `@app.train(mods=[peer])` and `@app.evaluate(mods=[peer])`. Arrays of any framework do; those of whole numbers stay
    with the peer. State, ledger and identity are files in the peer's folder: the node-config's `folder`, or `folder`
    here; in a simulation by default the one that the strategy names.

    Args:
        clip_norm: C, the most by which one round's update moves the model; None for no protection. It and the four
            numbers below may also be "run-config:KEY", or a function of the context.
        noise_multiplier: σ, noise std over C; None to solve it from epsilon for the rounds that the strategy plans.
        epsilon: budget of the peer over all rounds and runs; a round that would exceed it is not trained. A SuperNode's
            own `epsilon` and `delta` in its node-config hold whatever the app says.
        delta: δ.
        folder: where the peer's folder is, unless its node-config has one.
        seal: whether shares are sealed end to end (`PeerSeal`), and open ones refused; by default wherever the peer is
            not one of a simulation.
        examples: the number of examples by which the peer counts, and which every receiver of a share learns. By
            default it is what the app reports if its metrics leave, and 1 if they do not. ε does not cover it.
        noise: {"kind": "cancelling", "colluding": q} for noise that cancels between the peers of a round
            (`peer.app_pairs`), so that their mean has hardly more than a trusted server would add. ε then holds against
            an adversary who sees all messages and has all secrets of up to q peers; what holds if all others collude is
            printed beside it. Two keys more: "absent", of how many peers less in a round no peer adds more noise than
            planned (0); and "strength" ("auto"), see `AppNoiseSection`. A SuperNode's owner allows it by `known-peers`
            and `colluding` in the node-config.
        local: patterns of the names of arrays that never leave the peer, such as "head.*" or ["head.*", "*bn*"], or
            "run-config:KEY" with one pattern or none: its personal layers. They are part of its state, and both of the
            app's functions are given the model with them in place. The names are those of the ServerApp's ArrayRecord.
        share_metrics: whether the app's metrics (losses, accuracies, numbers of examples) of private data leave, which
            no ε covers. By default a protected peer keeps them in metrics.jsonl in its folder, and another sends them:
            say False if the app's own training protects its examples. If they stay, so does what the app says
            when it fails. Of what it answers beside metrics and the model's arrays nothing leaves.

    Raises:
        ScenarioError: a value of the wrong type or out of range, or a clip norm without noise, or noise without a
            clip norm.

    Privacy: unit one peer with all its data; adjacency: its update of every round replaced by zero; one Gaussian
    release a round, charged on disk before the update is made, in a round that fails or is repeated too. It holds
    against any reader of all that the peer sends: relay, neighbours, strangers. Whether a peer takes part, when, how
    long that takes and whether its app fails is open. Noise is the operating system's. Local arrays are never sent, and
    not noised. That the shared arrays are trained beside them changes nothing: C bounds an update whatever made it.
    Metrics of a model with local arrays are of private data like any other.

    Deviations from the paper: the update is weighed by w, where Stochastic Gradient Push adds a gradient as it is:
    several local steps over a small w would overshoot. If w = 1, as on the directed exponential graph with everybody
    active, it is the same.

    Source: Assran et al. 2019, Stochastic Gradient Push, Algorithm 1; Gossip: the same with doubly stochastic weights.
    """

    def __init__(
        self,
        *,
        clip_norm: Setting = None,
        noise_multiplier: Setting = None,
        epsilon: Setting = None,
        delta: Setting = 1e-5,
        examples: Setting = None,
        noise: Mapping[str, Any] | None = None,
        local: str | Sequence[str] | None = None,
        folder: Path | str | None = None,
        seal: bool | None = None,
        share_metrics: bool | None = None,
    ) -> None:
        check_paths({"folder": folder})
        check_kinds({"noise": noise}, (Mapping,), "a dict, such as {'kind': 'cancelling', 'colluding': 2}, or None")
        check_kinds({"seal": seal, "share_metrics": share_metrics}, (bool,), "True, False or None")
        self._settings = {
            "clip_norm": clip_norm,
            "noise_multiplier": noise_multiplier,
            "epsilon": epsilon,
            "delta": delta,
        }
        self._examples = examples
        self._local = _checked_local(local)

        # What is a function or a key of the run-config is checked when a message comes.
        given = {**self._settings, "examples": examples}
        later = {name for name, value in given.items() if callable(value) or is_key(value)}
        check_numbers({name: value for name, value in given.items() if name not in later})
        self._noise = None if noise is None else app_noise(noise)
        if not later & self._settings.keys():
            app_privacy(**self._settings, noise=self._noise)  # type: ignore[arg-type]

        is_protected = any(value is not None for name, value in self._settings.items() if name != "delta")
        self.folder = None if folder is None else Path(folder)
        self.seal = seal
        self.keeps_metrics = is_protected if share_metrics is None else not share_metrics
        self.withholds = is_protected or self.keeps_metrics

    def privacy_of(self, context: Context) -> AppPrivacySection | None:
        """Return what the app asks for in a run; None for no protection.

        Raises:
            RunError, ScenarioError: a setting is missing or wrong.
        """
        numbers = {name: setting_of(name, value, context) for name, value in self._settings.items()}
        return _privacy_of(**numbers, noise=self._noise)

    def local_of(self, context: Context) -> tuple[str, ...]:
        """Return the patterns of the arrays that never leave the peer in a run.

        Raises:
            RunError: the run-config has no such key, or no text.
        """
        patterns = []
        for given in self._local:
            value: object = given
            if is_key(given):
                value = context.run_config.get(given.removeprefix(RUN_CONFIG))
            if not isinstance(value, str):
                raise RunError(
                    f"local={given!r} {LOCAL} with one of the app's keys, {sorted(context.run_config)}, whose value is "
                    "a text",
                    code="flower.setting",
                )
            if value:
                patterns.append(value)
        return tuple(patterns)

    def __call__(self, message: Message, context: Context, app: App) -> Message:
        """Answer a message; the app answers only what is left to it, training and evaluating."""
        if _is_evaluating.get():
            return app(message, context)
        if SAYS not in message.content:
            return self._refused(message)
        try:
            return self._answer(message, context, app)
        except USER_ERRORS as error:
            return Message(Error(PEER_MOD_FAILED, line_for_server(error, context)), reply_to=message)

    @staticmethod
    def _refused(message: Message) -> Message:
        """Refuse a message of another strategy, such as FedAvg's, in a way that ends its run.

        Flower's strategies log an error of a node and go on: a run in which all nodes refused would seem to succeed,
        with an empty model. An answer without arrays and metrics makes them stop.
        """
        log.error("%s message refused: %s", message.metadata.message_type, NO_STRATEGY)
        return Message(RecordDict({REFUSAL: ConfigRecord({REFUSAL: NO_STRATEGY})}), reply_to=message)

    def _answer(self, message: Message, context: Context, app: App) -> Message:
        request = PeerRequest.of(message.content, NO_STRATEGY, "flower.no-strategy")
        node = PeerSettings.of(context, request.peer, request.folder, self.folder)
        with alone_in(node.folder):
            seals = not node.simulated if self.seal is None else self.seal
            privacy = self.privacy_of(context)
            examples = self._stated_examples(request, context)
            local = self.local_of(context)

            with closing(RequestHandler(request, node, privacy, seals, examples, context.state, local)) as peer:
                peer.fields["keeps_metrics"] = self.keeps_metrics
                try:
                    from_app = self._work(peer, message, context, app)
                finally:
                    append_metrics(node.folder, peer.kept_metrics)

                # This puts the state on disk first: nothing leaves a peer that it could forget.
                answer = Message(RecordDict({**from_app, **peer.answer()}), reply_to=message)
                peer.cache_state()
                return answer

    def _work(self, peer: RequestHandler, message: Message, context: Context, app: App) -> dict[str, MetricRecord]:
        """Handle a request; return the part of the app's own answer that leaves the peer."""
        kind = peer.request.kind
        content = message.content
        from_app: dict[str, Any] = {}
        if kind == INTRODUCE:
            peer.fields["evaluates_along"] = evaluate_function(app) is not None
            return {}
        if kind == JOIN:
            peer.join(content)
            return {}
        if kind == MESH:
            self._mesh(peer, message, context, app)
            return {}
        state = peer.absorb_inbox(content)
        evaluated = self._evaluate_along(peer, message, context, app)
        given = {name: record for name, record in content.items() if not name.startswith(OURS)}

        def call(model: ArrayRecord) -> Mapping[str, Any]:
            from_app.update(self._call(peer, model, given, message, context, app).items())
            return from_app

        def train(arrays: Arrays) -> Arrays:
            trained = self._trained(peer, call(given_record(arrays)), state.layout)
            if peer.request.weighted_by:
                state.recount(self._count(peer, from_app, context))
            return trained

        if kind == ROUND:
            peer.take_part(content, train)
            self._renew_local_arrays(peer, state, from_app)
        elif kind == EVALUATE:
            model = self._evaluated(state, content)
            if model is not None:
                call(model)
        elif kind == DELIVER:
            peer.deliver()
        return self._leaving(peer, from_app, kind, peer.request.round_index) | evaluated

    def _evaluate_along(
        self, peer: RequestHandler, message: Message, context: Context, app: App
    ) -> dict[str, MetricRecord]:
        """Let the app evaluate the model of the round before, if that is requested; return the metrics to send.

        An app that fails at it trains all the same, as it does if it is asked in a message of its own.
        """
        request = peer.request
        state = peer.state
        evaluate = evaluate_function(app) if request.evaluated_round else None
        if evaluate is None or state is None or not peer.is_due:
            return {}
        content = message.content
        given = {
            name.removeprefix(EVALUATION): record
            for name, record in content.items()
            if name.startswith(EVALUATION) and isinstance(record, ConfigRecord)
        }
        model = self._evaluated(state, RecordDict())
        if model is None:
            return {}

        metadata = message.metadata
        category = metadata.message_type
        metadata.message_type = MessageType.EVALUATE
        token = _is_evaluating.set(True)
        try:
            answer = self._call(peer, model, given, message, context, evaluate)
        except USER_ERRORS as error:
            peer.fields["unevaluated"] = line_for_server(error, context)
            return {}
        finally:
            _is_evaluating.reset(token)
            metadata.message_type = category
            message.content = content
        metrics = self._leaving(peer, answer, EVALUATE, request.evaluated_round)
        return {EVALUATION + name: record for name, record in metrics.items()}

    @staticmethod
    def _evaluated(state: PeerState, content: RecordDict) -> ArrayRecord | None:
        """Return the model to evaluate: the one that the message has, or the peer's; None if it has none yet."""
        sent = record_in(content, MODEL, ArrayRecord)
        if sent is not None:
            if not state.layout.local:
                return sent
            # It lacks the peer's personal layers.
            arrays = sent_arrays(sent)
            if difference := state.layout.misfit(arrays):
                raise RunError(
                    f"the model to evaluate is another than peer {state.peer}'s: {difference}", code="flower.evaluated"
                )
            return given_record(state.layout.arrays(state.layout.vector(arrays), state.unmixed))

        if not state.w > 0:
            return None
        own = state.average if state.average_weight else state.given_model()
        return given_record(state.layout.arrays(own, state.unmixed))

    def _mesh(self, peer: RequestHandler, message: Message, context: Context, app: App) -> None:
        """Run all rounds with the other peers directly, and keep the resulting state.

        If the peer is done and others are not, it runs again from its last checkpoint, so that they can reach it. If
        all are done, or it has no checkpoint, it does nothing.
        """
        from flower_privdec.flower.serverless import InitialArrays, mesh_folder, run_mesh  # over torch

        content = message.content
        request = peer.request
        done = peer.state
        if done is not None:
            if done.round_index != request.rounds:
                raise RunError(
                    f"peer {peer.node.peer} has a state of run {request.run!r} after round {done.round_index} "
                    f"of {request.rounds}, which a mesh cannot continue from: give the run another name"
                )
            all_are_done = len(request.neighbors) == peer.node.n_peers  # those that have a state of the run
            if all_are_done or not (mesh_folder(peer.node, request.run) / CHECKPOINTS).exists():
                return
        if INITIAL not in content.array_records:
            raise RunError("the message has no initial arrays; start a strategy of flower_privdec with some")
        initial = InitialArrays(sent_arrays(content.array_records[INITIAL]), request.arrays, local=peer.local)
        layout = initial.layout
        sent_configs = {name: dict(config) for name, config in content.config_records.items() if name != SAYS}

        def train(arrays: Arrays, server_round: int) -> Arrays:
            # In Flower a train message has the number of its round; here one message serves all rounds.
            configs = {
                name: ConfigRecord({**config, "server-round": server_round}) for name, config in sent_configs.items()
            }
            answer = self._call(peer, given_record(arrays), configs, message, context, app)
            keep_metrics(peer.node.folder, server_round, "train", answer.metric_records)
            return self._trained(peer, answer, layout)

        mixed = run_mesh(request.run, request.scenario, initial, peer.node, peer.privacy, train)
        peer.state = PeerState.after_rounds(mixed, request.run, request.rounds, new_incarnation())
        if done is not None:
            peer.state.handed = done.handed

    def _stated_examples(self, request: PeerRequest, context: Context) -> float:
        """Return by how many examples the peer counts, if its noise cancels: others must know that before the round.

        Raises:
            RunError: it is not known before the app has trained.
        """
        if self._noise is None or not request.weighted_by:
            return 1.0
        count = setting_of("examples", self._examples, context)
        if count is None and not self.keeps_metrics:
            raise RunError(
                f"a peer whose metrics leave counts by {request.weighted_by}, which its app reports after it has "
                "trained, and noise that cancels needs that number before: give PeerMod examples=..., or leave "
                "share_metrics out",
                code="flower.noise-examples",
            )
        if count is None or not 0 < count < MOST_EXAMPLES:
            return 1.0
        return float(count)

    def _count(self, peer: RequestHandler, answer: Mapping[str, Any], context: Context) -> float:
        """Return the public number of examples by which a peer counts: the owner's, else the app's if it leaves."""
        count: Any = setting_of("examples", self._examples, context)
        if count is None and not self.keeps_metrics:
            metrics: Mapping[str, Any] = next((each for each in answer.values() if isinstance(each, MetricRecord)), {})
            count = metrics.get(peer.request.weighted_by)
        if count is None:
            return 1.0
        if isinstance(count, int | float) and 0 <= count < MOST_EXAMPLES:
            # A peer without examples counts for next to nothing, but it needs some weight to hold a model.
            return float(count) or LEAST_EXAMPLES
        words = "peer %s: %s=%r must be at least 0 and below %.0f: the peer counts by 1 in this round"
        log.warning(words, peer.node.peer, peer.request.weighted_by, count, MOST_EXAMPLES)
        return 1.0

    def _call(
        self,
        peer: RequestHandler,
        model: ArrayRecord,
        given: Mapping[str, Any],
        message: Message,
        context: Context,
        app: App,
    ) -> RecordDict:
        """Let the app's own function answer, with the peer's model under the name of the global one.

        Args:
            given: the message's other records for the app.
        """
        records: dict[str, Any] = {peer.request.arrays: model}
        for name, record in given.items():
            # An app may write into its configs, which the next call is given again.
            records[name] = record.copy() if isinstance(record, ConfigRecord) else record
        message.content = RecordDict(records)
        if peer.state is not None and peer.state.local_arrays:
            message.content[peer.request.local_record] = given_record(peer.state.local_arrays)
        with noting_budgets() as budgets:
            try:
                keys = (peer.request.arrays, peer.request.weighted_by)
                return answer_of(app, message, context, peer.node.folder, *keys)
            except BudgetError:
                log.exception("peer %s: the app's own budget", peer.node.peer)
                raise
            except AppFailedError as error:
                raise self._explained(peer, error) from None
            finally:
                peer.note_app_budgets(budgets)

    def _explained(self, peer: RequestHandler, error: AppFailedError) -> RunError:
        """Return the error to answer with when an app failed; its words stay in the log if its data are protected."""
        raised = error.raised
        if raised is None:
            return self._failed(peer, error.what, error.details)

        line = last_line_of_users(raised)
        if line or self.withholds:
            log.error("peer %s: its app %s%s", peer.node.peer, error.what, line, exc_info=raised)
        return self._failed(peer, error.what, "" if self.withholds else error.details)

    def _trained(self, peer: RequestHandler, content: Mapping[str, Any], layout: Layout) -> Arrays:
        """Return the arrays of the train function's answer; see `returned_arrays`."""
        try:
            return returned_arrays(content, peer.request.arrays, layout)
        except AppFailedError as error:
            raise self._failed(peer, error.what, error.details) from None

    def _renew_local_arrays(self, peer: RequestHandler, state: PeerState, answer: Mapping[str, Any]) -> None:
        """Keep the record of a train function's answer that never leaves, if it is the model's and finite."""
        name = peer.request.local_record
        record = answer.get(name)
        if not state.local_arrays or not isinstance(record, ArrayRecord):
            return
        arrays = numpy_arrays(record)
        if difference := state.layout.misfit(arrays):
            raise self._failed(peer, f"returned another {name} than the model's", difference)
        if np.isfinite(state.layout.vector(arrays)).all():
            state.local_arrays = state.layout.ordered(arrays)

    def _failed(self, peer: RequestHandler, what: str, details: str) -> RunError:
        """Return an error that says what an app did. Details may reveal its data: only log them, if it is withheld."""
        if not self.withholds:
            return RunError(f"its app {what}: {details}")
        if details:
            log.warning("peer %s: its app %s: %s", peer.node.peer, what, details)
        return RunError(f"its app {what}; see its own log")

    def _leaving(
        self, peer: RequestHandler, from_app: Mapping[str, Any], kind: str, round_index: int
    ) -> dict[str, MetricRecord]:
        """Return the part of the app's answer that leaves: its metrics, unless they are of private data.

        Args:
            kind, round_index: what the metrics that stay are noted to be of.
        """
        metrics = {name: record for name, record in from_app.items() if isinstance(record, MetricRecord)}
        if not self.keeps_metrics:
            return metrics
        peer.kept_metrics += metric_lines(round_index, kind, metrics)
        return {}
