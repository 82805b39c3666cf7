"""A guard around `flower-supernode`: the privacy policy of a device's owner, for any app that a server sends.

A SuperNode (flwr 1.41 to 1.43) runs every message of an app in a process that its SuperExec starts as `flwr-clientapp`,
by PATH. The guard puts a folder with its own `flwr-clientapp` first on that PATH: Flower's, with the functions replaced
that install, load and answer for an app. The commands of all other kinds of task (AgentApps, models, connectors) refuse
there.

    privdec guard ──> guarded_command: writes the folder, starts flower-supernode
    flower-supernode ──> flwr-clientapp (a process for each message)
                            └── run_guarded ──> guarded_runtime: replaces four functions of flwr's
                                                   └── Guard: answers the message, with the app or without

Only the message decides which protection applies, never the app:

- a message of a strategy of this package is answered by a `PeerMod` with the owner's settings; the app's own do
  nothing;
- a train message with one ArrayRecord (FedAvg and others of its form) is charged, the app's update is clipped as a
  whole and noised, and the answer has the arrays that were sent, moved by it, and a number of examples from the policy;
- anything else is refused, and the app is not even imported.

The app is given copies. The update of an app that fails, or answers with other arrays than it was given or with
infinite ones, counts as zero, so its failures tell nothing either. What it raises and its metrics stay in the owner's
log and folder.

Privacy: unit one peer with all its data; adjacency: its update of every message replaced by zero; one Gaussian release
a message, charged on disk before the app runs. Noise is the operating system's. Whether and when a node answers is
open. The app runs as Python in the guard's process: code written to get around the guard can (see `apps` of `Policy`).
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.app.message import make_message
from flwr.clientapp import ClientApp
from flwr.common.config import get_project_dir
from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType
from flwr.supernode.cli import flwr_clientapp
from flwr.supernode.runtime import run_clientapp as runtime
from pydantic import AfterValidator, Field, model_validator

from flower_privdec.common.errors import BudgetError, RunError, ScenarioError
from flower_privdec.common.fields import Section
from flower_privdec.common.files import write_atomically
from flower_privdec.flower.error_formatting import CLIENT_APP_RAISED, USER_ERRORS, error_line, line_for_server
from flower_privdec.flower.mods.peer_messages import PEER_MOD_FAILED, SAYS, numpy_arrays, record_of
from flower_privdec.flower.mods.peer_mod import PeerMod, keep_metrics, returned_arrays, working_in
from flower_privdec.flower.node_settings import PeerSettings
from flower_privdec.peer.app_state import Layout, alone_in
from flower_privdec.peer.app_updates import (
    ADJACENCY,
    SOURCE,
    UNIT,
    PeerLedger,
    PeerSpent,
    protected,
    solved_noise,
    unsound,
    update_release,
)
from flower_privdec.scenario.loading import parse_model, read_text

log = logging.getLogger("flwr.privdec")

SUPERNODE = "flower-supernode"
FORM = "a policy is a mapping (folder, epsilon, delta, clip_norm, ...)"
FAILED = "the guard of this SuperNode could not run the app; see its log"
LEGACY = "fitins.parameters"  # the record of the model for an app with a NumPyClient
LEGACY_REPLY = "fitres"  # how the records of its reply begin
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
EXAMPLES = "num-examples"  # by which FedAvg weights a reply, unless its server says otherwise


def _check_metrics(value: dict[str, float]) -> dict[str, float]:
    if EXAMPLES in value:
        raise ValueError(f"must not have {EXAMPLES!r}, which is `examples` of the policy")
    return value


def _check_apps(value: list[str] | str) -> list[str] | str:
    if value == "any":
        return value
    if isinstance(value, str):
        raise ValueError("must be any, or a list of the SHA-256 of FABs (`sha256sum APP.fab`)")
    for digest in value:
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise ValueError(
                f"must have 64 hexadecimal digits for each FAB, not {digest!r}: `sha256sum APP.fab` has them"
            )
    return value


class Policy(Section):
    """What the owner of a device allows any app.

    Attributes:
        folder: where state, ledger and the app's metrics are kept; of this device's data alone.
        epsilon, delta: the budget of all messages of all apps together.
        clip_norm: C, the most by which one message's update moves a model, in Euclidean norm over all its arrays.
        noise_multiplier: noise std over clip_norm.
        rounds: in place of noise_multiplier: how many updates the budget must last for.
        apps: SHA-256 of the FABs that may run, in hexadecimal; `any` for every app.
        examples: the number of examples that every reply states, whatever the app counts.
        metrics: numbers that every reply to FedAvg states beside it, whatever the app measures.
        local: patterns of the names of arrays that never leave the device in runs of peers; see `PeerMod`.
    """

    folder: Annotated[str, Field(min_length=1)]
    epsilon: PositiveFloat
    delta: Annotated[float, Field(gt=0, lt=1)]
    clip_norm: PositiveFloat
    noise_multiplier: PositiveFloat | None = None
    rounds: Annotated[int, Field(ge=1)] | None = None
    apps: Annotated[list[str] | str, AfterValidator(_check_apps)]
    examples: Annotated[int, Field(ge=1)] = 1
    metrics: Annotated[dict[str, FiniteFloat], AfterValidator(_check_metrics)] = Field(default_factory=dict)
    local: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_noise(self) -> Policy:
        if (self.noise_multiplier is None) == (self.rounds is None):
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier} and rounds={self.rounds}: give one of them, the noise or "
                "the number of updates to solve it for"
            )
        cost = PeerSpent((update_release(self.noise),), self.delta).epsilon
        if cost > self.epsilon:
            raise ValueError(
                f"epsilon={self.epsilon:g} must be at least {cost:.4g}, what one update of noise_multiplier="
                f"{self.noise:.4g} costs; raise the noise"
            )
        return self

    @cached_property
    def noise(self) -> float:
        """Return the noise multiplier of every update."""
        return self.noise_multiplier or solved_noise(self.epsilon, self.delta, self.rounds or 1)

    @property
    def path(self) -> Path:
        """Return the folder."""
        return Path(self.folder).expanduser().absolute()

    def check_app(self, fab: bytes) -> None:
        """Refuse an app that is not in the list; raises RunError."""
        digest = hashlib.sha256(fab).hexdigest()
        if self.apps != "any" and digest not in self.apps:
            raise RunError(
                f"the app's FAB has SHA-256 {digest}, which is not in `apps` of this SuperNode's policy: its owner can "
                "read the app and add that line",
                code="guard.app",
            )

    def node_config(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a node-config with the policy's folder, for a device that is one peer.

        Raises:
            RunError: the node-config names another folder, or the policy's has the ledger of another peer.
        """
        config = {"partition-id": 0, "num-partitions": 1, **given, "folder": str(self.path)}
        own_folder = Path(str(given.get("folder", self.path))).expanduser().absolute()
        if own_folder != self.path:
            raise RunError(
                f"folder={given['folder']!r} of the node-config must be the policy's {str(self.path)!r}, where the "
                "ledger is: leave it out of one of them",
                code="guard.folder",
            )

        # Under another partition-id the device would begin another ledger, and spend its budget twice.
        name = f"peer-{config['partition-id']}"
        others = {path.parent.name for path in self.path.glob(f"peer-*/{SOURCE}.jsonl")} - {name}
        if others:
            raise RunError(
                f"{self.path} has the ledger of {', '.join(sorted(others))}, and this SuperNode is {name}: give each "
                "device's data one folder and one partition-id",
                code="guard.peer",
            )
        return config


def load_policy(path: Path) -> Policy:
    """Read a policy file; its folder becomes absolute.

    Raises:
        ScenarioError: with the line, the value, the rule and the remedy.
    """
    policy = parse_model(Policy, read_text(path, "a policy"), form=FORM, where=str(path))
    return policy.model_copy(update={"folder": str(policy.path)})


class Guard:
    """Answers for an app under a policy, in the place of Flower's ClientApp.

    Args:
        policy: the policy of the device's owner.
        load: imports the app; called for a message that the policy allows, and only after it was charged.
    """

    def __init__(self, policy: Policy, load: Callable[[], ClientApp]) -> None:
        self.policy = policy
        self._load = load
        privacy = {name: getattr(policy, name) for name in ("clip_norm", "epsilon", "delta", "examples", "local")}
        self._peer_mod = PeerMod(noise_multiplier=policy.noise, share_metrics=False, **privacy)

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message by what the policy allows, or by an error that follows only from the message."""
        settings = dict(context.node_config)
        try:
            context.node_config = self.policy.node_config(settings)
            return self._answer(message, context)
        except USER_ERRORS as error:
            log.warning("The guard refused a message: %s", error_line(error))
            return Message(Error(PEER_MOD_FAILED, line_for_server(error, context)), reply_to=message)
        except Exception:
            log.exception("The guard failed")
            return Message(Error(CLIENT_APP_RAISED, FAILED), reply_to=message)
        finally:
            context.node_config = settings  # a SuperNode keeps for the next message what an app leaves in the context

    def _answer(self, message: Message, context: Context) -> Message:
        """Answer a message.

        Raises:
            RunError: the policy does not allow it.
            BudgetError: the budget is spent.
        """
        kind = message.metadata.message_type.partition(".")[0]
        if kind in ("train", "evaluate") and SAYS in message.content.config_records:
            return self._peer_mod(message, context, self._contained)

        if kind != "train":
            raise RunError(
                f"this SuperNode's guard lets nothing out for a message of type {message.metadata.message_type!r}: "
                "evaluate at the server, on public data",
                code="guard.type",
            )
        records = message.content.array_records
        if len(records) != 1:
            raise RunError(
                f"a train message has {len(records)} ArrayRecords and must have one, the model: this SuperNode's guard "
                "protects one update of one model",
                code="guard.model",
            )
        ((name, record),) = records.items()
        node = PeerSettings.of(context, -1, "", None)
        return Message(self._protected_update(name, record, message, context, node), reply_to=message)

    def _protected_update(
        self, name: str, record: ArrayRecord, message: Message, context: Context, node: PeerSettings
    ) -> RecordDict:
        """Charge for one update of a model, let the app make it, and return it clipped and noised.

        Raises:
            RunError: the arrays are not model.
            BudgetError: the budget is spent.
        """
        try:
            given = numpy_arrays(record)
            layout = Layout.of(given)
            start = layout.vector(given)  # float64 [d]
        except (TypeError, ValueError) as error:
            raise RunError(f"the arrays of a train message cannot be read: {error}", code="guard.model") from error
        if not np.isfinite(start).all():
            raise RunError("the arrays of a train message are not finite: lower the learning rate", code="guard.model")

        with alone_in(node.folder), working_in(node.folder):
            # Pay first and durably. A crash may then count an update too many, never one too few.
            index = self._charge(node, context)
            answer = self._contained(message, context).content
            keep_metrics(node.folder, index, "train", answer.metric_records)
            if name != LEGACY:
                self._compare_metrics(answer.metric_records)

            with np.errstate(all="ignore"):  # the app may have made numpy raise
                update = layout.vector(numpy_arrays(answer.array_records[name])) - start
                wrong = unsound(update)
                if wrong:
                    log.warning("%s, so the app's update counts as zero", wrong)
                    update = np.zeros_like(update)
                released = protected(self.policy.clip_norm, self.policy.noise, update)
                model = record_of(layout.arrays(start + released, layout.unmixed(given)))
        return self._reply(name, model)

    def _charge(self, node: PeerSettings, context: Context) -> int:
        """Charge one update on disk, and return its number."""
        privacy = node.binding_privacy(self._peer_mod.privacy_of(context))
        assert privacy is not None
        budget = privacy.epsilon or math.inf
        with PeerLedger(node.folder, "guard", 0, node.peer, privacy.delta, budget) as ledger:
            index = ledger.n_entries + 1
            if not ledger.charge(index, self.policy.noise):
                raise BudgetError(
                    f"the budget of this SuperNode's owner is spent: {ledger.spent}, of {budget:g}",
                    code="guard.budget-spent",
                )
            log.info("Guard: %s", ledger.spent)
        return index

    def _reply(self, name: str, model: ArrayRecord) -> RecordDict:
        """Return a reply of the message's form. The model is all that it has from the app."""
        stated = self.policy.metrics
        if name != LEGACY:
            return RecordDict({name: model, "metrics": MetricRecord({EXAMPLES: self.policy.examples, **stated})})
        return RecordDict(
            {
                f"{LEGACY_REPLY}.parameters": model,
                f"{LEGACY_REPLY}.num_examples": MetricRecord({"num_examples": self.policy.examples}),
                f"{LEGACY_REPLY}.metrics": ConfigRecord({**stated}),
                f"{LEGACY_REPLY}.status": ConfigRecord({"code": 0, "message": ""}),
            }
        )

    def _compare_metrics(self, measured: Mapping[str, MetricRecord]) -> None:
        """Tell the owner if the app's metrics have other names than the policy's; an app that failed has none."""
        named = {name for record in measured.values() for name in record} - {EXAMPLES}
        if measured and named != set(self.policy.metrics):
            log.warning(
                "The app's metrics are %s, and `metrics` of this device's policy are %s. FedAvg ends a run in which "
                "nodes have metrics of different names: give each of the app's a number in the policy",
                sorted(named),
                sorted(self.policy.metrics),
            )

    def _contained(self, message: Message, context: Context) -> Message:
        """Let the app answer a copy of a message; return arrays that fit those given, and metrics, which stay here.

        If it fails or answers something else, the arrays are those that were given.
        """
        given = {name: deepcopy(record) for name, record in message.content.array_records.items()}
        copy = make_message(deepcopy(message.metadata), deepcopy(message.content))
        answer = RecordDict({**given})
        is_training = message.metadata.message_type.startswith("train")
        try:
            with _inert_peer_mods():
                reply = self._load()(copy, context)
            if reply.has_error():
                raise RunError(f"the app answered with an error: {reply.error.reason}")
            arrays = _fitting_arrays(reply.content, given, is_training)
            metrics = {name: MetricRecord(dict(record)) for name, record in reply.content.metric_records.items()}
            answer.update({**metrics, **arrays})
        except KeyboardInterrupt:
            raise
        except BaseException:  # SystemExit as well: an app that ends the process would tell something by it
            log.exception("The app failed, so its update counts as zero")

        return Message(answer, reply_to=message)


def _fitting_arrays(content: RecordDict, given: Mapping[str, ArrayRecord], is_training: bool) -> dict[str, ArrayRecord]:
    """Return the records of an app's answer under the names of those that it was given.

    Raises:
        UnfitAnswerError: the arrays are others than it was given.
    """
    layouts = {name: Layout.of(numpy_arrays(record)) for name, record in given.items()}
    arrays = {name: content.array_records[name] for name in given if name in content.array_records}

    # The answer to a train message with one model has one model, which may have another name.
    if is_training and len(given) == 1:
        (name,) = given
        key = f"{LEGACY_REPLY}.parameters" if name == LEGACY else name
        returned = returned_arrays(content, key, layouts[name])
        arrays[name] = ArrayRecord({part: Array(value) for part, value in returned.items()})

    for name, record in arrays.items():
        returned_arrays(RecordDict({name: record}), name, layouts[name])
    return arrays


@contextmanager
def _inert_peer_mods() -> Iterator[None]:
    """Let the app's own `PeerMod`s pass messages through: the owner's is around the whole app."""

    def pass_through(mod: PeerMod, message: Message, context: Context, app: Callable[..., Message]) -> Message:
        return app(message, context)

    original = PeerMod.__call__
    PeerMod.__call__ = pass_through  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        PeerMod.__call__ = original  # type: ignore[method-assign]


def run_guarded(policy_json: str) -> None:
    """Run `flwr-clientapp` with an app's loading and every reply under a policy; the script of the guard's PATH.

    The app is installed to a folder of this process, so that no app that was installed before takes its place.
    """
    policy = Policy.model_validate_json(policy_json)
    with TemporaryDirectory(prefix="privdec-guard-") as home:
        os.environ["FLWR_HOME"] = home
        guarded_runtime(policy)
        flwr_clientapp()


def guarded_runtime(policy: Policy) -> None:
    """Replace the functions of Flower's ClientApp process by which an app comes in and a reply goes out.

    Their names are those of flwr 1.41 to 1.43; in a version without one, this raises before any app is loaded.
    """
    functions = vars(runtime)
    install = functions["install_from_fab"]
    load = functions["get_load_client_app_fn"]
    push = functions["push_message"]
    finish = functions["push_task_output"]

    # Of this process's one message: why it was refused, where its app is, and what the guard replied.
    refusals: list[str] = []
    installed: list[Path] = []
    replies: list[Message] = []

    def checked_install(fab: bytes, **options: Any) -> Path:
        try:
            policy.check_app(fab)
        except RunError as error:
            refusals.append(error_line(error))
            raise
        installed.append(install(fab, **options))
        return installed[-1]

    def guarded_load(**options: Any) -> Callable[..., Callable[..., Message]]:
        def loader(*fab: str) -> Callable[..., Message]:
            if get_project_dir(*fab) != installed[-1]:
                refusals.append(f"the run is of app {fab[0]!r} {fab[1]}, and its FAB is another app")
                raise RunError(refusals[-1])

            def answer(message: Message, context: Context) -> Message:
                replies.append(Guard(policy, lambda: load(**options)(*fab))(message, context))
                return replies[-1]

            return answer

        return loader

    def guarded_push(client: Any, message: Message, context: Context) -> None:
        # Any other reply is an error of Flower's, whose words may be the app's.
        if not any(message is reply for reply in replies):
            error = Error(CLIENT_APP_RAISED, refusals[-1] if refusals else FAILED)
            message = make_message(message.metadata, error=error)
        push(client, message, context)

    def quiet_finish(client: Any, context: Context | None, sub_status: str, details: str) -> None:
        # The details are the app's traceback, which the SuperLink would show.
        finish(client=client, context=context, sub_status=sub_status, details=FAILED if details else "")

    functions.update(
        install_from_fab=checked_install,
        get_load_client_app_fn=guarded_load,
        push_message=guarded_push,
        push_task_output=quiet_finish,
    )


def guarded_command(policy: Policy, command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Write the guard's executables to the policy's folder; return the words to run, and variables to set.

    Raises:
        ScenarioError: the command is not a flower-supernode, or runs apps in processes that others start.
        RunError: the folder cannot be written to.
    """
    if not command or Path(command[0]).name != SUPERNODE:
        raise ScenarioError(
            f"{' '.join(command[:1])!r} must be {SUPERNODE}, with its arguments: privdec guard POLICY {SUPERNODE} ...",
            code="guard.command",
        )

    # As flower-supernode reads it: with or without "=", and abbreviated.
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--isolation", nargs="?", default="subprocess")
    isolation = parser.parse_known_args(list(command[1:]))[0].isolation
    if isolation != "subprocess":
        raise ScenarioError(
            f"--isolation {isolation} must be subprocess under a guard: else a SuperExec that the guard does not start "
            "runs the app; leave --isolation out",
            code="guard.isolation",
        )

    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    executable = shutil.which(command[0], path=search)
    if executable is None:
        raise ScenarioError(f"{command[0]} is not there; pip install flower-privdec", code="guard.command")

    # The script's first lines are a command to sh and a string to Python. Python itself cannot stand after "#!", where
    # its path may be too long, or have blanks in it.
    bin_folder = policy.path / "bin"
    script = (
        f"#!/bin/sh\n'''exec' {shlex.quote(sys.executable)} \"$0\" \"$@\"\n' '''\n"
        "from flower_privdec.flower.launch.guard import run_guarded\n\n"
        f"run_guarded({policy.model_dump_json()!r})\n"
    )
    refusal = '#!/bin/sh\necho "privdec guard: $(basename "$0") is refused, only ClientApps run here" >&2\nexit 1\n'
    try:
        policy.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        bin_folder.mkdir(exist_ok=True)
        for kind, name in TASK_TYPE_TO_COMMAND.items():
            content = script if kind == TaskType.CLIENT_APP else refusal
            write_atomically(bin_folder / name, content.encode())
            (bin_folder / name).chmod(0o700)
    except OSError as error:
        raise RunError(f"folder={policy.folder!r} cannot be written to ({error.strerror}); give another") from error
    return [executable, *command[1:]], {"PATH": os.pathsep.join([str(bin_folder), search])}


def policy_line(policy: Policy) -> str:
    """Return in one line what a policy allows."""
    apps = "any app" if policy.apps == "any" else f"{len(policy.apps)} apps"
    return (
        f"guard: epsilon = {policy.epsilon:g} at delta = {policy.delta:g} for all messages of {apps} (unit: {UNIT}; "
        f"adjacency: {ADJACENCY}), noise multiplier {policy.noise:.4g}, clip norm {policy.clip_norm:g}; ledger in "
        f"{policy.path}"
    )
