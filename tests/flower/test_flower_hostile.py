"""Flower apps in hostile hands: wrong input, apps that tell, relays and nodes that lie, disks that fail or forget."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.lib import format as npy
from paths import ROOT
from peer_states import state_in
from raising import raises
from routing_peers import ReadingGrid, client, first, report_in, report_otherwise, request_in, zeros
from torch import nn

from flower_privdec.common.errors import BudgetError, RunError, ScenarioError
from flower_privdec.flower import FedDeper, Gossip, LocalGrid, PeerMod, PushSum, group_norm, public_key, run_in_process
from flower_privdec.flower.mods import request_handler
from flower_privdec.flower.mods.peer_messages import PeerRequest, pack_bytes, unpack_bytes
from flower_privdec.flower.strategies.push_sum import comparable
from flower_privdec.peer import app_updates
from flower_privdec.peer.app_state import state_path
from flower_privdec.privacy.ledger import ledger as ledger_module

APP = ROOT / "simulations" / "adapted-quickstart-sklearn" / "before"
PROTECTED: dict[str, Any] = {"clip_norm": 1.0, "noise_multiplier": 5.0}
every = pytest.mark.parametrize("strategy", [PushSum, Gossip, FedDeper])


def npy_header(shape: tuple[int, ...], descr: str = "<f8") -> bytes:
    """Return what np.save writes before numbers, of any shape and type; with none after it."""
    file = io.BytesIO()
    npy.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


def moves(arrays: list[np.ndarray], peer: int, server_round: int) -> list[np.ndarray]:
    return [arrays[0] + 0.25]


def start(folder: Path, rounds: int, app: Callable[..., Message], *, name: str = "run", n_peers: int = 2) -> PushSum:
    strategy = PushSum(name=name, fraction_evaluate=0.0)
    strategy.start(LocalGrid(app, n_peers, folder=folder), zeros(), rounds)
    return strategy


# Wrong input: one line, before anything is sent.

MODS = [
    {"clip_norm": "1", "noise_multiplier": 1.0},
    {"clip_norm": True, "noise_multiplier": 1.0},
    {"clip_norm": 1.0, "noise_multiplier": "1"},
    {"clip_norm": 1.0, "epsilon": [3]},
    {"delta": "x"},
    {"delta": None},
    {"folder": 5},
    {"seal": "yes"},
    {"share_metrics": 1},
]
STRATEGIES = [
    {"topology": 5},
    {"topology": None},
    {"topology": "rinf"},
    {"topology_options": [1]},
    {"topology_options": {"sides": 3}},
    *({name: value} for name in ("fraction_train", "fraction_evaluate", "patience") for value in ("x", None, True)),
    {"fraction_train": float("nan")},
    {"patience": -1},
    {"seed": 1.5},
    {"seed": None},
    {"name": 5},
    {"folder": 5},
    {"weighted_by_key": 5},
    {"weighted_by_key": None},
    {"train_metrics_aggr_fn": 5},
]
STARTS = {
    "flower.start": [
        {"grid": None},
        {"initial_arrays": None},
        {"initial_arrays": [np.zeros(3)]},
        {"num_rounds": -1},
        {"num_rounds": None},
        {"timeout": 0},
        {"timeout": float("nan")},
    ],
    "argument.kind": [
        {"num_rounds": "3"},
        {"num_rounds": 1.5},
        {"timeout": "x"},
        {"train_config": {"a": 1}},
        {"evaluate_config": 5},
        {"evaluate_fn": 5},
    ],
}
CALLS: list[Callable[[], object]] = [
    lambda: LocalGrid(client(moves), 0),
    lambda: LocalGrid(client(moves), 1.5),
    lambda: LocalGrid(client(moves), 2, folder=5),
    lambda: LocalGrid("app", 2),
    lambda: run_in_process(5, 2),
    lambda: run_in_process(None, 2),
    lambda: run_in_process(APP, 0),
    lambda: run_in_process(APP, "2"),
    lambda: run_in_process(APP, 2, config=[1]),
    lambda: run_in_process(APP, 2, config={"num-server-rounds": "x"}),
    lambda: group_norm(5),
    lambda: group_norm(nn.BatchNorm1d(4), 1.5),
    lambda: group_norm(nn.BatchNorm1d(4), None),
    lambda: public_key(5),
    lambda: public_key("/dev/null"),
]


@pytest.mark.parametrize(
    "call",
    [
        *(lambda given=given: PeerMod(**given) for given in MODS),
        *(lambda given=given: PushSum(**given) for given in STRATEGIES),
        *(lambda given=given: FedDeper(**given) for given in STRATEGIES),
        *(lambda given=given: Gossip(**({"topology": "ring"} | given)) for given in STRATEGIES),
        *CALLS,
    ],
)
def test_wrong_input_is_named_in_one_line(call: Callable[[], object]) -> None:
    with pytest.raises(ScenarioError) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("code", "given"), [(code, given) for code in STARTS for given in STARTS[code]], ids=str)
def test_an_impossible_start_asks_no_node(code: str, given: dict[str, Any]) -> None:
    asked: list[Message] = []
    grid = LocalGrid(lambda message, context: asked.append(message), 2)
    with raises(ScenarioError, code, next(iter(given))):
        PushSum(patience=0.1).start(**{"grid": grid, "initial_arrays": zeros()} | given)
    assert asked == []


def test_the_result_of_evaluate_fn_is_checked() -> None:
    with raises(RunError, "flower.evaluate-fn", names="a dict"):
        PushSum().start(LocalGrid(client(moves), 2), zeros(), 1, evaluate_fn=lambda *_: {"accuracy": "high"})


@pytest.mark.parametrize(
    ("component", "named"), [("nowhere.at_all:app", "nowhere"), ("sklearn_digits.client_app:ap", "'ap'")]
)
def test_a_component_that_is_not_there_is_named(component: str, named: str, tmp_path: Path) -> None:
    shutil.copytree(APP, tmp_path / "app", ignore=shutil.ignore_patterns("__pycache__"))
    project = tmp_path / "app" / "pyproject.toml"
    project.write_text(project.read_text().replace("sklearn_digits.client_app:app", component))
    with raises(ScenarioError, "app.component", names=named):
        run_in_process(tmp_path / "app", 2)


# What leaves a protected peer.

SECRET, TEXT = 0.7310585786300049, "patient 17 has it"
SAID = {  # every record of a reply; what the mod says in its own is a `PeerReport`, which has no other fields
    "privdec.says": {"fields"},
    "privdec.outbox": None,
    "privdec.mass": {"mass"},
}


def telling(seal: bool) -> ClientApp:
    """Return an app that tells of its data wherever something can be put."""
    app = ClientApp(mods=[PeerMod(**PROTECTED, seal=seal)])

    def told() -> dict[str, Any]:
        return {
            "metrics": MetricRecord({"num-examples": 17171717, "loss": SECRET, "all": [SECRET, 17171717.0]}),
            "said": ConfigRecord({"words": TEXT, "bytes": TEXT.encode()}),
            "privdec.mass.": MetricRecord({"mass": SECRET}),
            "more": ArrayRecord({TEXT: Array(np.array([SECRET]))}),
        }

    @app.train()
    def train(message: Message, context: Context) -> Message:
        weights, counter = message.content["arrays"].to_numpy_ndarrays()
        trained = ArrayRecord([weights + SECRET, counter + 17171717])
        context.state["own"] = ConfigRecord({"words": TEXT})
        return Message(RecordDict({"arrays": trained, **told()}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict(told()), reply_to=message)

    return app


class InspectingGrid(ReadingGrid):
    """Keeps the records of every reply as well."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.replies: list[RecordDict] = []

    def read(self, message: Message) -> None:
        super().read(message)
        assert not message.has_error()
        if message.metadata.reply_to_message_id:
            self.replies.append(message.content)


@every
@pytest.mark.parametrize("seal", [False, True], ids=["open", "sealed"])
def test_only_noised_and_public_values_leave_a_protected_peer(
    strategy: type[PushSum], seal: bool, tmp_path: Path
) -> None:
    grid = InspectingGrid(telling(seal), 4, folder=tmp_path)
    initial = ArrayRecord([np.zeros(3), np.zeros(2, int)])
    topology = {PushSum: "directed-exponential", Gossip: "ring", FedDeper: "server"}[strategy]
    result = strategy(topology).start(grid, initial, 2, evaluate_fn=lambda *_: None)
    assert len(grid.replies) > 20
    for content in grid.replies:
        assert set(content) <= set(SAID)
        assert report_in(content).n_peers == 4
        for name, record in content.items():
            assert SAID[name] is None or set(record) <= SAID[name]
    seen = b"".join(grid.seen)
    for number in (SECRET, 17171717.0):
        assert np.float64(number).tobytes() not in seen
        assert np.float32(number).tobytes() not in seen
    assert b"17171717" not in seen
    assert TEXT.encode() not in seen
    assert result.train_metrics_clientapp == result.evaluate_metrics_clientapp == {}
    assert result.arrays.to_numpy_ndarrays()[1].tolist() == [0, 0]  # whole numbers stay at home
    assert "0.731" in (tmp_path / "peer-0" / "metrics.jsonl").read_text()


def test_a_peer_shares_only_the_metrics_it_names(tmp_path: Path) -> None:
    said = {"metrics": MetricRecord({"loss": 0.5}), "said": ConfigRecord({"words": TEXT})}
    app = answers(holding(np.ones(3), **said), PeerMod(**PROTECTED, share_metrics=True))
    grid = InspectingGrid(app, 2, folder=tmp_path)
    result = PushSum(fraction_evaluate=0.0).start(grid, zeros(), 1)
    assert result.train_metrics_clientapp[1]["loss"] == 0.5
    assert {name for content in grid.replies for name in content} == {"metrics", "privdec.says", "privdec.outbox"} | {
        "privdec.mass"
    }
    assert TEXT.encode() not in b"".join(grid.seen)


def answers(reply: Callable[[Message], Any], mod: PeerMod) -> ClientApp:
    app = ClientApp(mods=[mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return reply(message)

    return app


def raising(error: BaseException) -> Callable[[Message], Message]:
    def reply(message: Message) -> Message:
        raise error

    return reply


def holding(*arrays: np.ndarray, **more: Any) -> Callable[[Message], Message]:
    return lambda message: Message(RecordDict({"arrays": ArrayRecord(list(arrays)), **more}), reply_to=message)


FAILURES = {
    "raises": (raising(ValueError(TEXT)), "raised ValueError"),
    "exits": (raising(SystemExit(TEXT)), "raised SystemExit"),
    "no file": (raising(FileNotFoundError(2, TEXT)), "raised FileNotFoundError"),
    "an error": (lambda message: Message(Error(0, TEXT), reply_to=message), "answered with an error"),
    "nothing": (lambda message: None, "returned a NoneType"),
    "no model": (lambda message: Message(RecordDict(), reply_to=message), "returned no model"),
    "shape": (holding(np.zeros(17)), "returned other arrays"),
    "order": (holding(np.zeros(2), np.zeros(17)), "returned other arrays"),
    "whole": (holding(np.zeros(3, int)), "returned other arrays"),
    "unreadable": (
        lambda m: Message(RecordDict({"arrays": ArrayRecord({"0": Array("f8", (3,), TEXT, b"17")})}), reply_to=m),
        "returned other arrays",
    ),
}


@pytest.mark.parametrize("options", [PROTECTED, {"share_metrics": False}], ids=["peer", "examples"])
@pytest.mark.parametrize(("reply", "said"), FAILURES.values(), ids=FAILURES)
def test_a_failing_protected_apps_words_stay_local(
    reply: Callable[[Message], Any],
    said: str,
    options: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with raises(RunError, "nodes.all-failed", said) as error:
        start(tmp_path, 1, answers(reply, PeerMod(**options)))
    assert "17" not in str(error.value)
    assert "see its own log" in str(error.value)
    assert "\n" not in str(error.value)
    assert any(word in caplog.text for word in (TEXT, "must be", "17", "must return", "returned no model"))


@pytest.mark.parametrize("name", ["an error", "nothing", "no model", "shape", "unreadable"])
def test_an_unprotected_app_is_told_its_error(name: str, tmp_path: Path) -> None:
    with raises(RunError, "nodes.all-failed", FAILURES[name][1]) as error:
        start(tmp_path, 1, answers(FAILURES[name][0], PeerMod()))
    assert "\n" not in str(error.value)
    assert "see its own log" not in str(error.value)


@pytest.mark.parametrize("options", [{}, PROTECTED], ids=["open", "protected"])
def test_a_raising_app_is_named_with_its_path(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the error where the app is not protected, and in the log of the peer's own node."""

    def reads(message: Message) -> Any:
        return np.load("site/7.npy")

    with raises(RunError, "nodes.all-failed", names="its app raised FileNotFoundError") as error:
        start(tmp_path, 1, answers(reads, PeerMod(**options)))
    line = f"({__file__}, line {reads.__code__.co_firstlineno + 1}, tried {Path('site/7.npy').absolute()})"
    assert f"its app raised FileNotFoundError {line}" in caplog.text
    assert (line in str(error.value)) == ("site/7.npy" in str(error.value)) == (not options)


# Noise.


def test_peers_and_rounds_share_no_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, noised = [], app_updates.exactly_noised

    def keeping(update: np.ndarray, std: float) -> np.ndarray:
        drawn.append(noised(update, std) - update)
        return update + drawn[-1]

    monkeypatch.setattr(app_updates, "exactly_noised", keeping)
    grid = LocalGrid(client(lambda arrays, *_: arrays, **PROTECTED), 4, folder=tmp_path)
    PushSum(fraction_evaluate=0.0).start(grid, zeros(400), 3)
    alike = np.corrcoef(np.stack(drawn)) - np.eye(12)
    assert np.abs(alike).max() < 0.35  # seven standard deviations
    assert np.std(drawn) == pytest.approx(5.0, rel=0.1)


def test_noise_beyond_float32_leaves_the_model_unchanged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grid = LocalGrid(client(moves, clip_norm=1e38, noise_multiplier=1e4), 2, folder=tmp_path)
    strategy = PushSum(fraction_evaluate=0.0)
    strategy.start(grid, ArrayRecord([np.zeros(3, np.float32)]), 2)
    assert first(strategy.peer_arrays[0]).tolist() == [0.0, 0.0, 0.0]
    assert "infinite, so its update counts as zero" in caplog.text
    assert strategy.reports[0].epsilon > 0


# The ledger between rounds.


@pytest.mark.parametrize("fate", ["deleted", "rolled back"])
def test_a_ledger_that_lost_payments_is_refused(fate: str, tmp_path: Path) -> None:
    app = client(moves, **PROTECTED)
    start(tmp_path, 1, app)
    ledgers = [tmp_path / f"peer-{peer}" / "peer-updates.jsonl" for peer in (0, 1)]
    old = [ledger.read_bytes() for ledger in ledgers]
    start(tmp_path, 3, app)
    whole = [ledger.read_bytes() for ledger in ledgers]
    for ledger, content in zip(ledgers, old, strict=True):
        ledger.unlink() if fate == "deleted" else ledger.write_bytes(content)
    missing = 3 if fate == "deleted" else 2
    with raises(RunError, "nodes.all-failed", rf"peer-0/peer-updates.jsonl lacks {missing} lines"):
        start(tmp_path, 5, app)
    for ledger, content in zip(ledgers, whole, strict=True):
        ledger.write_bytes(content)
    assert start(tmp_path, 4, app).reports[0].round_index == 4


@pytest.mark.parametrize("fate", ["ledger", "state"])
def test_a_full_disk_releases_nothing_and_is_named(fate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = client(moves, **PROTECTED)
    start(tmp_path, 1, app)
    before = state_in(tmp_path / "peer-0", "run")

    save = request_handler.save_state

    def full(*given: Any, **options: Any) -> Any:
        if fate == "ledger" or given[1].round_index > before.round_index:
            raise OSError(28, "No space left on device")
        return save(*given, **options)

    with monkeypatch.context() as patch:
        no_space = SimpleNamespace(**{**vars(os), "write": full})
        patch.setattr(*((ledger_module, "os", no_space) if fate == "ledger" else (request_handler, "save_state", full)))
        with raises(RunError, "nodes.all-failed", "No space left on device") as error:
            start(tmp_path, 2, app)
    assert "\n" not in str(error.value)
    after = state_in(tmp_path / "peer-0", "run")
    assert after.x.tolist() == before.x.tolist()
    told = start(tmp_path, 2, app).reports[0]  # a round that was paid and lost is paid again
    assert f"{2 + (fate == 'state')} Gaussian updates" in told.spent


def test_unprotected_updates_are_never_called_protected(tmp_path: Path) -> None:
    start(tmp_path, 1, client(moves))
    told = start(tmp_path, 2, client(moves, **PROTECTED)).reports[0]
    assert told.epsilon == np.inf
    assert "1 update of this run had no protection" in told.spent


def test_changed_clip_norm_and_noise_are_charged_as_used(tmp_path: Path) -> None:
    start(tmp_path, 1, client(moves, **PROTECTED))
    told = start(tmp_path, 2, client(moves, clip_norm=9.0, noise_multiplier=2.0)).reports[0]
    assert "1 Gaussian update of noise multiplier 2 and 1 Gaussian update of noise multiplier 5" in told.spent


def test_an_apps_own_budget_ends_training_not_relaying(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def reply(message: Message) -> Message:
        if message.content["config"]["server-round"] > 1:
            raise BudgetError(TEXT)
        return holding(np.ones(3))(message)

    strategy = start(tmp_path, 5, answers(reply, PeerMod(share_metrics=False)))
    stopped = "its app's own budget allows no more training; it only exchanges"
    assert f"0 of 2 peers trained (peers 0, 1: {stopped})" in caplog.text
    assert f"Training stopped: peers 0, 1: {stopped}" in caplog.text
    assert strategy.reports[0].round_index == 2  # a part of the mass went on its way all the same
    assert first(strategy.peer_arrays[0]).tolist() == [1.0, 1.0, 1.0]


# Relays and nodes that lie.


class LyingGrid(LocalGrid):
    """Changes what node 100 answers to a kind of message."""

    def __init__(self, lie: Callable[[RecordDict], None], kinds: set[str], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lie, self.kinds = lie, kinds

    def _deliver(self, message: Message) -> Message:
        kind, node = request_in(message).kind, message.metadata.dst_node_id
        reply = super()._deliver(message)
        if node == 100 and kind in self.kinds and not reply.has_error():
            self.lie(reply.content)
        return reply


def says(**fields: Any) -> Callable[[RecordDict], None]:
    return lambda content: report_otherwise(content, **fields)


@pytest.mark.parametrize("fields", [{"peer": -1}, {"peer": 3}, {"n_peers": 2**62}, {"n_peers": 0}, {"n_peers": -4}])
def test_a_node_outside_the_number_of_peers_is_named(fields: dict[str, int]) -> None:
    grid = LyingGrid(says(**fields), {"introduce"}, client(moves), 3)
    with raises(RunError, "nodes.partition-id"):
        PushSum(patience=0.1).start(grid, zeros(), 1)


def mass_of(value: Array) -> Callable[[RecordDict], None]:
    return lambda content: content.update({"privdec.mass": ArrayRecord({"mass": value})})


LIES: dict[str, Callable[[RecordDict], None]] = {
    "another peer": says(peer=1),
    "other lists": says(refused=["one", "two"]),
    "no words": lambda content: content.pop("privdec.says"),
    "a longer mass": mass_of(Array(np.ones(9))),
    "a mass of no numbers": mass_of(Array(np.array([np.nan, 0.0, np.inf, 1.0]))),
    "a mass that cannot be read": mass_of(Array("float64", (4,), "numpy.ndarray", b"no array")),
}


@pytest.mark.parametrize("seal", [False, True], ids=["open", "sealed"])
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_one_lying_node_ends_no_run(lie: Callable[[RecordDict], None], seal: bool) -> None:
    means = []
    grid = LyingGrid(lie, {"round", "deliver"}, client(moves, seal=seal), 4)
    strategy = PushSum(fraction_evaluate=0.0)
    result = strategy.start(grid, zeros(), 3, evaluate_fn=lambda _, arrays: means.append(first(arrays)))
    assert all(np.isfinite(each).all() for each in means)
    assert seal or len(means) == 4  # of the others, where it is not masked
    assert [strategy.reports[peer].round_index for peer in (1, 2, 3)] == [3, 3, 3]
    assert all(np.isfinite(array).all() for array in result.arrays.to_numpy_ndarrays())


@pytest.mark.parametrize("lists", [{"keys": []}, {"receivers": [1, 2]}, {"held": [1]}, {"incarnations": []}])
def test_an_order_with_unequal_lists_is_refused(lists: dict[str, Any], tmp_path: Path) -> None:
    app = client(moves, **PROTECTED)
    start(tmp_path, 1, app)
    common = {"round_index": 2, "rounds": 2, "neighbors": [1], "incarnations": [5], "keys": [b"k"]}
    asked = PeerRequest("round", "run", 0, **common | {"receivers": [1], "weights": [0.5]} | lists)
    grid = LocalGrid(app, 2, folder=tmp_path)
    (reply,) = grid.send_and_receive([Message(RecordDict({"privdec.says": asked.record()}), 100, "train")])
    assert "differ in length" in reply.error.reason
    assert "\n" not in reply.error.reason


NONSENSE = {
    "nothing": b"",
    "short": b"prvd",
    "zeros": bytes(96),
    "no version": b"prvd" + bytes(92),
    "text": b"text" * 40,
}


@pytest.mark.parametrize("frame", NONSENSE.values(), ids=NONSENSE)
@pytest.mark.parametrize("kind", ["introduce", "round"])
def test_a_node_with_invalid_frames_is_named_others_continue(
    frame: bytes, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lie(content: RecordDict) -> None:
        report_otherwise(content, acknowledgements=[frame])
        content["privdec.outbox"] = pack_bytes({"1.1": frame})

    start(tmp_path, 1, client(moves), n_peers=3)
    strategy = PushSum(name="run", fraction_evaluate=0.0)
    strategy.start(LyingGrid(lie, {kind}, client(moves), 3, folder=tmp_path), zeros(), 3)
    assert [strategy.reports[peer].round_index for peer in (1, 2)] == [3, 3]
    assert "peer 0 handed in what is not relayed: a frame" in caplog.text


ENDLESS = npy_header((2**70, 4))
BAD_ARRAYS = {
    "nothing": b"",
    "an archive": b"PK\x03\x04 none",
    "an archive with nothing in it": b"PK\x05\x06" + bytes(18),
    "no dimension": ENDLESS,
    "four terabytes": npy_header((2**40,)),
    "a pickle": npy_header((4,), "|O"),
}


@pytest.mark.parametrize("content", BAD_ARRAYS.values(), ids=BAD_ARRAYS)
def test_a_mean_is_without_arrays_that_cannot_be_read(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lie(answer: RecordDict) -> None:
        if "privdec.mass" in answer:
            answer["privdec.mass"] = ArrayRecord({"mass": Array("float64", (4,), "numpy.ndarray", content)})

    strategy = PushSum(name="run", fraction_evaluate=0.0)
    grid = LyingGrid(lie, {"round", "deliver"}, client(moves), 3, folder=tmp_path)
    result = strategy.start(grid, zeros(), 2)
    assert first(result.arrays) == pytest.approx(0.5)
    assert "what peer 0 handed in for the mean" in caplog.text


@pytest.mark.parametrize("content", BAD_ARRAYS.values(), ids=BAD_ARRAYS)
@pytest.mark.parametrize(("kind", "record"), [("join", "privdec.initial"), ("round", "privdec.model")])
def test_a_peer_refuses_arrays_that_cannot_be_read(kind: str, record: str, content: bytes, tmp_path: Path) -> None:
    if kind == "round":
        start(tmp_path, 1, client(moves))
    grid = LocalGrid(client(moves), 2, folder=tmp_path)
    arrays = ArrayRecord({"0": Array("float64", (3,), "numpy.ndarray", content)})
    request = PeerRequest(kind, "run", 0, round_index=2, founding=True)
    message = Message(RecordDict({"privdec.says": request.record(), record: arrays}), 100, "train")
    [reply] = grid.send_and_receive([message])
    assert "array '0' of the message cannot be read" in reply.error.reason


def test_a_renewed_state_reuses_no_mask(tmp_path: Path) -> None:
    app = client(moves, seal=True)
    start(tmp_path, 1, app)
    grid, peers = LocalGrid(app, 2, folder=tmp_path), (0, 1)
    keys = [bytes.fromhex(public_key(tmp_path / f"peer-{peer}")) for peer in peers]
    path = state_path(tmp_path / "peer-0", "run")
    states = [state_in(tmp_path / f"peer-{peer}", "run") for peer in peers]
    incarnations = [state.shares.incarnation for state in states]
    common = {"neighbors": [0, 1], "incarnations": incarnations, "keys": keys}
    masses = []
    for _ in range(2):
        path.unlink()
        asked = PeerRequest("deliver", "run", 0, wants_mass=True, round_index=2**62, mean_of=[0, 1], **common)
        join = PeerRequest("join", "run", 0, founding=True)
        for order, more in ((join, {"privdec.initial": zeros()}), (asked, {})):
            content = RecordDict({"privdec.says": order.record(), **more})
            (reply,) = grid.send_and_receive([Message(content, 100, "train")])
        masses.append(reply.content["privdec.mass"]["mass"].numpy())
    apart = (masses[0] - masses[1]).view(np.int64)  # of two rows that differ by less than one
    assert np.abs(apart[0].astype(float)).min() > 2.0**40


class TamperingGrid(LocalGrid):
    """A relay that drops, cuts, repeats, mixes up and changes shares, by chance."""

    def __init__(self, seed: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.random, self.honest, self.seen = np.random.default_rng(seed), False, list[bytes]()

    def _deliver(self, message: Message) -> Message:
        inbox = message.content.array_records.get("privdec.inbox")
        if inbox and not self.honest:
            shares = dict(unpack_bytes(inbox))
            self.seen += shares.values()
            message.content["privdec.inbox"] = pack_bytes(dict(self._mixed(shares)))
        return super()._deliver(message)

    def _mixed(self, shares: dict[str, bytes]) -> list[tuple[str, bytes]]:
        mixed = []
        for name, share in shares.items():
            place, how = self.random.integers(len(share)), self.random.integers(6)
            old = self.seen[self.random.integers(len(self.seen))]
            changed = share[:place] + bytes([share[place] ^ 1]) + share[place + 1 :]
            mixed += [
                [],
                [(name, share[:place])],
                [(name, share), (f"{name}1", share)],
                [(name, old)],
                [(name, changed)],
                [(f"{name}0", old), (name, share)],
            ][how]
        self.random.shuffle(mixed)
        return mixed


@every
@pytest.mark.parametrize("seed", range(3))
def test_a_hostile_relay_makes_and_loses_no_mass(strategy: type[PushSum], seed: int, tmp_path: Path) -> None:
    app = client(moves, seal=True)
    grid = TamperingGrid(seed, app, 4, folder=tmp_path)
    topology = "ring" if strategy is Gossip else "directed-exponential"
    for rounds in (6, 7):  # the last one is honest, and all that was refused comes again
        grid.honest = rounds == 7
        strategy(topology, name="run", fraction_evaluate=0.0).start(grid, zeros(), rounds)
    states = [state_in(tmp_path / f"peer-{peer}", "run") for peer in range(4)]
    assert sum(state.w for state in states) == pytest.approx(4.0, rel=1e-12)
    assert grid.seen


def test_metrics_that_differ_between_peers_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def reply(node: int, **metrics: Any) -> Message:
        message = Message(RecordDict(), node, "train")
        message.metadata.__dict__["_message_id"] = str(node)
        return Message(RecordDict({"m": MetricRecord(metrics)}), reply_to=message)

    usual = [reply(node, loss=1.0, n=2) for node in (1, 2)]
    for odd in ({"loss": [1.0, 2.0], "n": 2}, {"accuracy": 1.0, "n": 2}, {}):
        assert len(comparable([reply(0, **odd), *usual], "n")) == 2
    assert "[0] are not those that the others report" in caplog.text
    for weights in ((0, 0), (-1, 2), (np.nan, 1)):
        given = [reply(node, loss=1.0, n=weight) for node, weight in enumerate(weights)]
        assert [each["m"]["n"] for each in comparable(given, "n")] == [1, 1]
    assert comparable([], "n") == []
