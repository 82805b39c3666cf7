"""The owner's guard around any app: what hostile apps and servers try, each shown to work without it."""

from __future__ import annotations

import hashlib
import os
import subprocess
from asyncio import CancelledError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.app.message import make_message
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common.recorddict_compat import fitins_to_recorddict, recorddict_to_fitres
from flwr.compat.common.typing import FitIns
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.constant import TASK_TYPE_TO_COMMAND
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.runtime import run_clientapp as runtime
from pages import fences
from paths import ROOT
from raising import raises
from routing_peers import client, zeros

from flower_privdec.common.errors import BudgetError, RunError, ScenarioError
from flower_privdec.flower import LocalGrid, PeerMod, PushSum
from flower_privdec.flower.launch import guard as guard_module
from flower_privdec.flower.launch.guard import Guard, Policy, guarded_command, guarded_runtime, load_policy
from flower_privdec.flower.launch.local_grid import with_id
from flower_privdec.flower.mods.peer_messages import MASS
from flower_privdec.peer.app_updates import spent_so_far
from flower_privdec.privacy.ledger.segments import read_chain

SECRET = 424242.0  # no noise of these tests comes near it
SIZE = 4
TINY: dict[str, Any] = {"epsilon": 1e6, "delta": 1e-5, "clip_norm": 1.0, "noise_multiplier": 0.01, "apps": "any"}


def a_policy(folder: Path, **changes: Any) -> Policy:
    return Policy(folder=str(folder), **{**TINY, **changes})


def a_message(kind: str = "train", **records: Any) -> Message:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    content = RecordDict({"arrays": zeros(SIZE), "config": ConfigRecord({"server-round": 1}), **records})
    return with_id(Message(content, 100, kind))


def a_context(**node_config: Any) -> Context:
    return Context(1, 100, node_config, RecordDict(), {})


def an_app(answer: Callable[[Message, Context], RecordDict], **options: Any) -> ClientApp:
    """Return an app that answers every kind of message by one function."""
    app = ClientApp(**options)

    def reply(message: Message, context: Context) -> Message:
        return Message(answer(message, context), reply_to=message)

    for register in (app.train, app.evaluate, app.query, lambda: app.train("other")):
        register()(reply)
    return app


def guarded(folder: Path, app: ClientApp, **changes: Any) -> Guard:
    return Guard(a_policy(folder, **changes), lambda: app)


def charges(folder: Path, peer: int = 0) -> int:
    path = folder / f"peer-{peer}" / "peer-updates.jsonl"
    return len(read_chain(path)[1]) if path.exists() else 0


def values(reply: Message, name: str = "arrays") -> np.ndarray:
    return reply.content.array_records[name].to_numpy_ndarrays()[0]


def shows(reply: Message) -> bool:
    """Return whether the secret is anywhere in what a server is sent: content, error or metadata."""
    text = repr(reply.metadata.__dict__) + (repr(reply.error) if reply.has_error() else "")
    records = reply.content if reply.has_content() else RecordDict()
    text += repr([[name, *map(repr, record.items())] for name, record in records.items()])
    arrays = [array for name in set(records.array_records) - {MASS} for array in records.array_records[name].values()]
    numbers = [array.numpy() for array in arrays if array.stype != "privdec.share"]  # sealed, as MASS is masked
    near = any(np.any(np.abs(value.astype(float)) > SECRET / 2) for value in numbers)
    return near or str(int(SECRET)) in text


def model(value: float = SECRET) -> dict[str, Any]:
    return {"arrays": ArrayRecord([np.full(SIZE, value)])}


def raising(error: Callable[[str], BaseException]) -> Callable[[Message, Context], RecordDict]:
    def answer(message: Message, context: Context) -> RecordDict:
        raise error(str(SECRET))

    return answer


def renamed_group(message: Message, context: Context) -> RecordDict:
    message.metadata.__dict__["_group_id"] = str(SECRET)
    return RecordDict(model(0.0))


def in_place(message: Message, context: Context) -> RecordDict:
    message.content["config"]["told"] = SECRET
    message.content["more"] = MetricRecord({"told": SECRET})
    return RecordDict(model(0.0))


ATTACKS: dict[str, Callable[[Message, Context], RecordDict]] = {
    "a raw update": lambda message, context: RecordDict(model()),
    "metrics": lambda message, context: RecordDict({**model(0.0), "metrics": MetricRecord({"loss": SECRET})}),
    "the number of examples": lambda message, context: RecordDict(
        {**model(0.0), "metrics": MetricRecord({"num-examples": int(SECRET)})}
    ),
    "a config record": lambda message, context: RecordDict({**model(0.0), "told": ConfigRecord({"data": [SECRET]})}),
    "another array record": lambda message, context: RecordDict({**model(0.0), "told": model()["arrays"]}),
    "the name of a record": lambda message, context: RecordDict({str(SECRET): model(0.0)["arrays"]}),
    "the name of an array": lambda message, context: RecordDict(
        {"arrays": ArrayRecord({str(SECRET): Array(np.zeros(SIZE))})}
    ),
    "whole numbers": lambda message, context: RecordDict(
        {"arrays": ArrayRecord([np.full(SIZE, int(SECRET), dtype=np.int64)])}
    ),
    "another shape": lambda message, context: RecordDict({"arrays": ArrayRecord([np.full(int(SIZE * 2), SECRET)])}),
    "1e25": lambda message, context: RecordDict(model(1e25)),
}
every_attack = pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())


@every_attack
def test_an_apps_answer_does_not_leave(attack: Callable[[Message, Context], RecordDict], tmp_path: Path) -> None:
    app = an_app(attack)
    assert shows(app(a_message(), a_context()))
    reply = guarded(tmp_path, app)(a_message(), a_context())
    assert not shows(reply)
    assert set(reply.content) == {"arrays", "metrics"}
    assert dict(reply.content["metrics"]) == {"num-examples": 1}  # type: ignore[arg-type]
    assert list(reply.content.array_records["arrays"]) == ["0"]
    assert values(reply).shape == (SIZE,)
    assert values(reply).dtype == np.float64
    assert charges(tmp_path) == 1


@pytest.mark.parametrize("kind", ["train", "train.other", "evaluate", "query"])
@pytest.mark.parametrize("error", [ValueError, BudgetError, RunError, SystemExit, CancelledError, GeneratorExit])
def test_an_apps_error_does_not_leave(kind: str, error: type[BaseException], tmp_path: Path) -> None:
    reply = guarded(tmp_path, an_app(raising(error)))(a_message(kind), a_context())
    assert not shows(reply)
    assert reply.has_content() == kind.startswith("train")  # a failure looks like a zero update


@pytest.mark.parametrize("answer", [renamed_group, in_place])
def test_an_app_is_given_a_copy_of_the_message(answer: Callable[..., RecordDict], tmp_path: Path) -> None:
    message = a_message()
    before = dict(message.metadata.__dict__)
    reply = guarded(tmp_path, an_app(answer))(message, a_context())
    assert not shows(reply)
    assert message.metadata.__dict__ == before
    assert set(message.content) == {"arrays", "config"}


@pytest.mark.parametrize("kind", ["evaluate", "query", "query.other", "system", "get_parameters"])
def test_only_training_messages_reach_the_app(kind: str, tmp_path: Path) -> None:
    app = an_app(lambda message, context: RecordDict({"metrics": MetricRecord({"accuracy": SECRET})}))
    if kind in ("evaluate", "query"):
        assert shows(app(a_message(kind), a_context()))
    message = a_message()
    message.metadata.__dict__["_message_type"] = kind
    reply = Guard(a_policy(tmp_path), lambda: pytest.fail("imported"))(message, a_context())
    assert reply.has_error()
    assert "guard lets nothing out" in reply.error.reason
    assert charges(tmp_path) == 0


def test_an_update_is_clipped_as_a_whole_and_noised(tmp_path: Path) -> None:
    two = {"arrays": ArrayRecord({"a": Array(np.ones(3)), "n": Array(np.array(7)), "b": Array(np.ones((2, 2), "f4"))})}

    def answer(message: Message, context: Context) -> RecordDict:
        given = message.content["arrays"].items()  # type: ignore[union-attr]
        return RecordDict(
            {"arrays": ArrayRecord({name: Array(np.asarray(array.numpy() + 100)) for name, array in given})}
        )

    reply = guarded(tmp_path, an_app(answer))(a_message(**two), a_context())
    a, n, b = (reply.content.array_records["arrays"][name].numpy() for name in ("a", "n", "b"))
    moved = np.concatenate([a - 1, b.reshape(-1) - 1])
    assert abs(np.linalg.norm(moved) - 1) < 0.1
    assert np.allclose(moved, 1 / np.sqrt(7), atol=0.08)
    assert n == 7
    assert b.dtype == np.float32


def test_noise_of_a_release_follows_the_policy(tmp_path: Path) -> None:
    message = a_message(arrays=zeros(20_000))
    app = an_app(lambda message, context: RecordDict({"arrays": message.content["arrays"]}))
    guard = guarded(tmp_path, app, clip_norm=0.5, noise_multiplier=2.0)
    one, other = (values(guard(message, a_context())) for _ in range(2))
    assert abs(one.std() - 1.0) < 0.03
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.04  # 5.7 standard deviations
    assert charges(tmp_path) == 2  # the same message twice is a second draw, which is charged


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_an_update_that_is_no_number_counts_as_zero(wrong: float, tmp_path: Path) -> None:
    reply = guarded(tmp_path, an_app(lambda message, context: RecordDict(model(wrong))))(a_message(), a_context())
    assert np.abs(values(reply)).max() < 0.1
    assert charges(tmp_path) == 1


@pytest.mark.parametrize("value", [0.0, np.finfo(float).max])
def test_raising_numpy_errors_reveals_no_overflow(value: float, tmp_path: Path) -> None:
    """Its setting outlasts it, and the update of a private example may be the largest number that there is."""

    def answer(message: Message, context: Context) -> RecordDict:
        np.seterr(all="raise")
        return RecordDict(model(value))

    def step(arrays: list[np.ndarray], peer: int, server_round: int) -> list[np.ndarray]:
        np.seterr(all="raise")
        return [np.full(SIZE, value)]

    with np.errstate():
        reply = guarded(tmp_path, an_app(answer))(a_message(arrays=ArrayRecord([-np.ones(SIZE)])), a_context())
        config = {peer: {"folder": str(tmp_path / "peers")} for peer in range(2)}
        grid = LocalGrid(client(step, clip_norm=1.0, noise_multiplier=0.01), 2, config=config)
        PushSum(name="law", fraction_evaluate=0.0).start(grid, ArrayRecord([-np.ones(SIZE)]), 2)
    assert not reply.has_error()
    assert abs(np.linalg.norm(values(reply) + 1) - 1) < 0.1
    assert [charges(tmp_path / "peers", peer) for peer in (0, 1)] == [2, 2]


def test_a_message_without_a_model_is_refused_uncharged(tmp_path: Path) -> None:
    guard = Guard(a_policy(tmp_path), lambda: pytest.fail("imported"))
    wrong: list[dict[str, Any]] = [
        {"more": zeros(2)},
        {"arrays": ArrayRecord([np.full(3, np.nan)])},
        {"arrays": ArrayRecord([np.zeros(3, dtype=np.int64)])},
        {"arrays": ArrayRecord({"a": Array("float64", (3,), "torch", b"...")})},
    ]
    for records in wrong:
        assert guard(a_message(**records), a_context()).has_error(), records
    assert charges(tmp_path) == 0


def test_the_budget_ends_training_across_restarts(tmp_path: Path) -> None:
    app = an_app(lambda message, context: RecordDict(model(0.0)))
    settings: dict[str, Any] = {"epsilon": 4.0, "delta": 1e-3, "rounds": 3, "noise_multiplier": None}
    replies = [guarded(tmp_path, app, **settings)(a_message(), a_context()) for _ in range(5)]
    assert [reply.has_content() for reply in replies] == [True, True, True, False, False]
    assert "budget of this SuperNode's owner is spent" in replies[-1].error.reason
    assert charges(tmp_path) == 3
    assert spent_so_far(tmp_path / "peer-0", 1e-3).epsilon <= 4.0


def test_the_charge_is_on_disk_before_the_app(tmp_path: Path) -> None:
    def answer(message: Message, context: Context) -> RecordDict:
        assert charges(tmp_path) == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded(tmp_path, an_app(answer))(a_message(), a_context())
    reply = guarded(tmp_path, an_app(lambda message, context: RecordDict(model(0.0))))(a_message(), a_context())
    assert reply.has_content()
    assert charges(tmp_path) == 2


def test_a_ledger_that_cannot_be_written_lets_nothing_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    guard = Guard(a_policy(tmp_path), lambda: pytest.fail("imported"))
    monkeypatch.setattr("flower_privdec.privacy.ledger.ledger.os.fsync", full)
    assert guard(a_message(), a_context()).has_error()


def test_an_app_changes_neither_settings_nor_budget(tmp_path: Path) -> None:
    def answer(message: Message, context: Context) -> RecordDict:
        context.node_config |= {"epsilon": 1e9, "folder": "/tmp/elsewhere", "partition-id": 5}
        return RecordDict(model())

    app, context = an_app(answer, mods=[PeerMod()]), a_context(epsilon=1e6)
    context.run_config |= {"epsilon": 1e9, "clip_norm": 1e9, "noise_multiplier": 1e-9}
    guard = guarded(tmp_path, app)
    assert not any(shows(guard(a_message(), context)) for _ in range(2))
    assert context.node_config == {"epsilon": 1e6}
    assert charges(tmp_path) == 2
    stricter = guarded(tmp_path, app)(a_message(), a_context(epsilon=1.0))
    assert stricter.has_error()
    assert charges(tmp_path) == 2


def test_a_folder_belongs_to_one_peer_and_policy(tmp_path: Path) -> None:
    guard = guarded(tmp_path, an_app(lambda message, context: RecordDict(model(0.0))))
    assert guard(a_message(), a_context()).has_content()
    other = guard(a_message(), a_context(**{"partition-id": 1, "num-partitions": 2}))
    assert other.has_error()
    assert "peer-0" in other.error.reason
    elsewhere = guard(a_message(), a_context(folder="/elsewhere"))
    assert elsewhere.has_error()
    assert "folder='elsewhere'" in elsewhere.error.reason  # and no folder above it
    assert charges(tmp_path) == 1


class GuardedGrid(LocalGrid):
    """Two deployed nodes, each under a guard with a folder of its own."""

    def __init__(self, folder: Path, app: ClientApp, **changes: Any) -> None:
        super().__init__(app, 2, config={i: {"folder": str(folder / str(i))} for i in range(2)})
        self.guards = {100 + i: guarded(folder / str(i), app, **changes) for i in range(2)}
        self.seen: list[Message] = []

    def _deliver(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        self.seen.append(self.guards[node](message, self.contexts[node]))
        return self.seen[-1]


@pytest.mark.parametrize("mods", [[PeerMod()], [PeerMod(clip_norm=1e9, noise_multiplier=1e-9, share_metrics=True)], []])
def test_the_owners_peer_mod_replaces_the_apps(mods: list[Any], tmp_path: Path) -> None:
    def answer(message: Message, context: Context) -> RecordDict:
        if message.metadata.message_type == "evaluate":
            raise type(f"Secret{SECRET:.0f}", (Exception,), {})
        return RecordDict({**model(), "metrics": MetricRecord({"num-examples": int(SECRET)})})

    grid = GuardedGrid(tmp_path, an_app(answer, mods=mods))
    strategy = PushSum("complete", fraction_evaluate=1.0)
    result = strategy.start(grid, zeros(SIZE), 2)
    assert not any(shows(reply) for reply in grid.seen)
    assert charges(tmp_path / "0", 0) == charges(tmp_path / "1", 1) == 2
    assert 1.5 < np.linalg.norm(result.arrays.to_numpy_ndarrays()[0]) < 2.5  # two updates of norm 1, one way
    assert all(np.isfinite(report.epsilon) for report in strategy.reports.values())
    if mods:  # the app's own settings show the model
        plain = LocalGrid(an_app(answer, mods=mods), 2, folder=tmp_path / "plain")
        assert (
            np.abs(PushSum("complete", fraction_evaluate=0.0).start(plain, zeros(SIZE), 2).arrays["0"].numpy()).max()
            > 1e4
        )


@pytest.mark.versions
def test_fedavg_takes_a_guarded_node_beside_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def measured(message: Message, context: Context) -> RecordDict:
        return RecordDict({**model(1.0), "metrics": MetricRecord({"num-examples": 1, "loss": SECRET})})

    def run(**policy: Any) -> MetricRecord | None:
        app = an_app(measured)
        guard = guarded(tmp_path, app, **policy)

        def some_guarded(message: Message, context: Context) -> Message:
            if context.node_config["partition-id"] == 0:
                context.node_config = {}
                return guard(message, context)
            return app(message, context)

        strategy = FedAvg(fraction_evaluate=0.0)
        result = strategy.start(LocalGrid(some_guarded, 3), zeros(SIZE), num_rounds=1)  # type: ignore[arg-type]
        return result.train_metrics_clientapp.get(1)

    metrics = run(metrics={"loss": 3.0})
    assert metrics is not None
    assert metrics["loss"] == pytest.approx((2 * SECRET + 3) / 3)
    assert "metrics" not in caplog.text

    # Flower wants the same names of all.
    with pytest.raises(InconsistentMessageReplies):
        run()
    assert "The app's metrics are ['loss'], and `metrics` of this device's policy are []" in caplog.text


def test_numpy_clients_are_answered_in_their_form(tmp_path: Path) -> None:
    from flwr.client import NumPyClient

    class Client(NumPyClient):
        def fit(self, parameters: list[np.ndarray], config: Any) -> tuple[list[np.ndarray], int, dict[str, Any]]:
            return [array + 0.5 for array in parameters], int(SECRET), {"loss": SECRET}

    app = ClientApp(client_fn=lambda context: Client().to_client())
    content = fitins_to_recorddict(FitIns(ndarrays_to_parameters([np.zeros(SIZE)]), {}), True)
    message = with_id(Message(content, 100, "train"))
    assert shows(app(message, a_context()))
    reply = guarded(tmp_path, app)(message, a_context())
    fitted = recorddict_to_fitres(reply.content, True)
    assert not shows(reply)
    assert fitted.num_examples == 1
    assert fitted.metrics == {}
    assert np.allclose(parameters_to_ndarrays(fitted.parameters)[0], 0.5, atol=0.08)


# What Flower's process of a ClientApp does, with the functions of the guard.


class Process:
    """Flower's functions of a ClientApp process, replaced as the guard replaces them."""

    def __init__(self, policy: Policy, app: ClientApp, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[Message] = []
        self.details: list[str] = []
        self.installed: list[bytes] = []
        for name in ("install_from_fab", "get_load_client_app_fn", "push_message", "push_task_output"):
            monkeypatch.setattr(runtime, name, getattr(self, f"_{name}"))
        self._app = app
        guarded_runtime(policy)

    def _install_from_fab(self, fab: bytes, **options: Any) -> Path:
        self.installed.append(fab)
        return guard_module.get_project_dir("me/app", "1.0.0", hashlib.sha256(fab).hexdigest())

    def _get_load_client_app_fn(self, **options: Any) -> Any:
        return lambda *fab: self._app

    def _push_message(self, client: Any, message: Message, context: Context) -> None:
        self.sent.append(message)

    def _push_task_output(self, details: str, **options: Any) -> None:
        self.details.append(details)

    def run(self, fab: bytes, fab_id: str = "me/app") -> Message:
        """Do what `run_clientapp` does, and return what was sent."""
        message, context, details = a_message(), a_context(), ""
        try:
            runtime.install_from_fab(fab, skip_prompt=True)
            load = runtime.get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
            reply = load(fab_id, "1.0.0", hashlib.sha256(fab).hexdigest())(message=message, context=context)
        except Exception as error:
            details = str(error)
            reply = Message(Error(0, details), reply_to=message)
        runtime.push_message(None, reply, context)
        runtime.push_task_output(client=None, context=context, sub_status="", details=details)
        return self.sent[-1]


def test_only_listed_apps_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256(b"good").hexdigest()
    process = Process(a_policy(tmp_path, apps=[digest]), an_app(ATTACKS["a raw update"]), monkeypatch)
    refused = process.run(b"bad")
    assert refused.has_error()
    assert hashlib.sha256(b"bad").hexdigest() in refused.error.reason
    assert process.installed == []
    assert charges(tmp_path) == 0
    assert not shows(process.run(b"good"))
    assert process.installed == [b"good"]
    assert charges(tmp_path) == 1


def test_a_run_naming_another_app_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(a_policy(tmp_path), an_app(ATTACKS["a raw update"]), monkeypatch)
    refused = process.run(b"good", "../other/app".replace("/", "", 1))
    assert refused.has_error()
    assert "another app" in refused.error.reason
    assert charges(tmp_path) == 0


def test_words_of_a_failure_that_flower_would_send_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(a_policy(tmp_path), an_app(ATTACKS["a raw update"]), monkeypatch)
    told = Message(Error(0, f"<class 'ValueError'>:<'{SECRET}'>"), reply_to=a_message())
    runtime.push_message(None, told, a_context())
    runtime.push_task_output(client=None, context=None, sub_status="failed", details=str(SECRET))
    assert shows(told)
    assert not shows(process.sent[-1])
    assert str(SECRET) not in process.details[-1]


def test_only_the_guards_own_answer_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(a_policy(tmp_path), an_app(ATTACKS["a raw update"]), monkeypatch)
    raw = make_message(a_message().metadata, content=RecordDict(model()))
    runtime.push_message(None, raw, a_context())
    assert process.sent[-1].has_error()
    assert not shows(process.sent[-1])


def test_only_a_client_app_is_accepted(tmp_path: Path) -> None:
    words, variables = guarded_command(a_policy(tmp_path), ["flower-supernode", "--insecure"])
    assert Path(words[0]).name == "flower-supernode"
    assert words[1:] == ["--insecure"]
    folder = Path(variables["PATH"].split(os.pathsep)[0])
    assert {path.name for path in folder.iterdir()} == set(TASK_TYPE_TO_COMMAND.values())
    for name in set(TASK_TYPE_TO_COMMAND.values()) - {"flwr-clientapp"}:
        refused = subprocess.run([name], env=variables, capture_output=True, text=True, check=False)
        assert refused.returncode == 1
        assert f"{name} is refused" in refused.stderr


@pytest.mark.parametrize(
    ("command", "code", "names"),
    [
        ([], "guard.command", "flower-supernode"),
        (["flower-superexec"], "guard.command", "flower-superexec"),
        (["flower-supernode", "--isolation", "process"], "guard.isolation", "process"),
        (["flower-supernode", "--iso=process"], "guard.isolation", "process"),
    ],
)
def test_a_command_that_the_guard_cannot_hold_is_refused(
    command: list[str], code: str, names: str, tmp_path: Path
) -> None:
    with raises(ScenarioError, code, names):
        guarded_command(a_policy(tmp_path), command)


GOOD = {"folder": "state", "epsilon": "8", "delta": "1e-5", "clip_norm": "1.0", "rounds": "10", "apps": "any"}


@pytest.mark.parametrize(
    ("changes", "code", "names"),
    [
        ({"clip_nrom": "1"}, "scenario.extra_forbidden", "clip_nrom.*did you mean 'clip_norm'"),
        ({"epsilon": "0"}, "scenario.greater_than", "line|yaml:2: epsilon=0 must be > 0"),
        ({"epsilon": ".inf"}, "scenario.finite_number", "epsilon"),
        ({"delta": "1"}, "scenario.less_than", "delta=1"),
        ({"clip_norm": "text"}, "scenario.float_type", "clip_norm='text' must be a number"),
        ({"apps": "all"}, "scenario.value_error", "apps='all' must be any, or a list"),
        ({"apps": "[abc]"}, "scenario.value_error", "abc"),
        ({"noise_multiplier": "1"}, "scenario.value_error", "noise_multiplier=1.0 and rounds=10"),
        ({"rounds": None}, "scenario.value_error", "rounds=None"),
        ({"rounds": None, "noise_multiplier": "0.1"}, "scenario.value_error", "epsilon=8 must be at least"),
        ({"folder": None}, "scenario.missing", "'folder' is missing"),
        ({"examples": "0"}, "scenario.greater_than_equal", "examples=0"),
        ({"metrics": "{num-examples: 3}"}, "scenario.value_error", "`examples`"),
        ({"metrics": "{loss: .inf}"}, "scenario.finite_number", "loss=inf"),
    ],
)
def test_a_typo_in_a_policy_gets_a_remedy(
    changes: dict[str, str | None], code: str, names: str, tmp_path: Path
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in GOOD.items()))
    assert load_policy(path).noise > 0
    assert Path(load_policy(path).folder).is_absolute()
    path.write_text("".join(f"{key}: {value}\n" for key, value in {**GOOD, **changes}.items() if value is not None))
    with raises(ScenarioError, code, names):
        load_policy(path)


def test_the_policy_of_the_guide_is_one(tmp_path: Path) -> None:
    guide = fences(ROOT / "docs" / "how-to" / "flower-deployed.md")
    (text,) = (fence.text for fence in guide if fence.title == "policy.yaml")
    (tmp_path / "policy.yaml").write_text(text.replace("~", str(tmp_path)))
    policy = load_policy(tmp_path / "policy.yaml")
    reply = Guard(policy, lambda: an_app(ATTACKS["a raw update"]))(a_message(), a_context())
    assert not shows(reply)
    assert reply.content.metric_records["metrics"]["num-examples"] == 600
    assert charges(policy.path) == 1
