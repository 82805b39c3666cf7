"""What Flower adds to a method that this package overrides is met here, not by a user.

A newer flwr may give a hook another argument, with a default; an override without it raises a TypeError as soon as an
app uses it. So each override has to take everything that the installed flwr's method takes. `SINCE` lists what only
newer versions have, which the overrides take already.
"""

from __future__ import annotations

import inspect
import pkgutil
import time
from collections.abc import Iterator
from importlib import import_module

import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from raising import raises

import flower_privdec.flower
from flower_privdec.common.errors import RunError
from flower_privdec.flower import LocalGrid
from flower_privdec.flower.apps.server_app import Relay, ScenarioStrategy

pytestmark = pytest.mark.versions

Override = tuple[type, str, type]  # a class of this package, a method, and the class of Flower's that has it too

SINCE = [
    (LocalGrid.pull_messages, "reply_to_message_ids"),  # 1.43
    (ScenarioStrategy.start, "should_stop"),  # 1.43
]


def overrides() -> Iterator[Override]:
    """Yield every public method of this package's classes that one of Flower's has too."""
    for module in pkgutil.walk_packages(flower_privdec.flower.__path__, "flower_privdec.flower."):
        for kind in vars(import_module(module.name)).values():
            if inspect.isclass(kind) and kind.__module__ == module.name:
                yield from _overrides_of(kind)


def _overrides_of(kind: type) -> Iterator[Override]:
    for base in kind.__mro__[1:]:
        if not base.__module__.startswith("flwr."):
            continue
        for name in vars(kind).keys() & vars(base).keys():
            if not name.startswith("_") and inspect.isfunction(vars(base)[name]):
                yield kind, name, base


def missing(ours: inspect.Signature, theirs: inspect.Signature) -> list[str]:
    """Return the arguments that one method takes, by position or by name, and the other does not."""
    taken = set(ours.parameters)
    positional = [name for name, one in ours.parameters.items() if one.kind is not one.KEYWORD_ONLY]
    lacking = []
    for place, (name, one) in enumerate(theirs.parameters.items()):
        is_moved = one.kind is one.POSITIONAL_OR_KEYWORD and name in positional and positional.index(name) != place
        if name not in taken or is_moved:
            lacking.append(name)
    return lacking


def test_overrides_take_all_that_flower_passes():
    found = list(overrides())
    names = {(kind.__name__, name) for kind, name, _ in found}
    assert {("PushSum", "configure_train"), ("LocalGrid", "pull_messages"), ("ScenarioStrategy", "start")} <= names

    for kind, name, base in found:
        lacks = missing(inspect.signature(getattr(kind, name)), inspect.signature(getattr(base, name)))
        assert not lacks, f"{base.__module__}.{base.__name__}.{name} takes {lacks}, {kind.__name__}.{name} does not"


def test_missing_arguments_are_seen():
    def theirs(self: object, a: int, b: int = 0, *, c: int = 0) -> None: ...
    def shorter(self: object, a: int, *, c: int = 0) -> None: ...
    def moved(self: object, b: int = 0, a: int = 0, *, c: int = 0) -> None: ...

    signatures = [inspect.signature(method) for method in (theirs, shorter, moved)]
    assert [missing(one, signatures[0]) for one in signatures] == [[], ["b"], ["a", "b"]]


@pytest.mark.parametrize(("method", "argument"), SINCE)
def test_arguments_of_newer_versions_are_taken(method, argument):
    assert argument in inspect.signature(method).parameters


# --- what they do ---


def replies(grid: LocalGrid, n: int) -> list[str]:
    return list(grid.push_messages([Message(RecordDict(), 100 + node, "train") for node in range(n)]))


def answering(seconds_of_node: dict[int, float]) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        time.sleep(seconds_of_node.get(context.node_id, 0.0))
        content = RecordDict({"metrics": MetricRecord({"node": context.node_id})})
        return Message(content, reply_to=message)

    return app


def nodes_of(messages: list[Message]) -> list[int]:
    return [message.metadata.src_node_id for message in messages]


def test_replies_are_pulled_by_either_name_once():
    grid = LocalGrid(answering({}), 3)
    first, second, third = replies(grid, 3)
    assert nodes_of(list(grid.pull_messages([first]))) == [100]
    assert nodes_of(list(grid.pull_messages(message_ids=[first, second]))) == [101]
    assert nodes_of(list(grid.pull_messages(reply_to_message_ids=[]))) == []
    assert nodes_of(list(grid.pull_messages())) == [102]
    with pytest.raises(TypeError):
        grid.pull_messages([third], message_ids=[third])


def test_a_late_reply_is_left_for_later():
    grid = LocalGrid(answering({101: 0.2}), 3)
    messages = [Message(RecordDict(), 100 + node, "train") for node in range(3)]
    assert nodes_of(grid.send_and_receive(messages, timeout=0.1)) == [100, 102]
    assert nodes_of(list(grid.pull_messages())) == [101]


def test_a_scenario_refuses_to_stop_early(tiny, tmp_path):
    with raises(RunError, "strategy.should-stop"):
        Relay(tiny(), tmp_path).start(LocalGrid(answering({}), 4), should_stop=lambda number, result: True)
