"""Flower apps whose clients are peers, and grids that lose, delay and read what is sent, for tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from uuid import uuid4

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_privdec.flower import LocalGrid, PeerMod
from flower_privdec.flower.mods.peer_messages import SAYS, PeerReport, PeerRequest
from flower_privdec.peer.app_state import PeerState
from flower_privdec.pushsum.exactly_once import FrozenShare
from flower_privdec.pushsum.frames import FrameCodec

# What a message says, one value of bytes, as a test reads and changes it.


def request_in(message: Message) -> PeerRequest:
    """Return what a strategy's message asks for."""
    return PeerRequest.of(message.content, "it is no request", "test")


def report_in(content: RecordDict) -> PeerReport:
    """Return what a peer's answer reports."""
    return PeerReport.of(content, "it is no report", "test")


def ask_otherwise(message: Message, **fields: Any) -> None:
    """Change fields of what a message asks for."""
    message.content[SAYS] = replace(request_in(message), **fields).record()


def report_otherwise(content: RecordDict, **fields: Any) -> None:
    """Change fields of what an answer reports."""
    content[SAYS] = replace(report_in(content), **fields).record()


Step = Callable[[list[np.ndarray], int, int], list[np.ndarray]]  # arrays, peer, round -> arrays


def client(step: Step, *, mod: PeerMod | None = None, **options: Any) -> ClientApp:
    """Return an app whose train function is a step; it evaluates how large its first array is."""
    app = ClientApp(mods=[mod or PeerMod(**options)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = message.content["arrays"].to_numpy_ndarrays()
        done = message.content["config"]["server-round"]
        trained = step(arrays, context.node_config["partition-id"], done)
        metrics = MetricRecord({"num-examples": 1, "loss": 0.25})
        return Message(RecordDict({"arrays": ArrayRecord(trained), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        size = float(np.abs(message.content["arrays"].to_numpy_ndarrays()[0]).max())
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "size": size})}), reply_to=message)

    return app


def values_of(peer: int, size: int = 3) -> np.ndarray:
    """Return what a peer's model is moved to, in numbers that are no sums of powers of two."""
    return np.sqrt(np.arange(1.0, size + 1)) * (peer + 1) ** 2 / 3


def sets_its_values_once(arrays: list[np.ndarray], peer: int, server_round: int) -> list[np.ndarray]:
    """Move the model to the peer's own values in round 1, and leave it alone after that."""
    return [values_of(peer, arrays[0].size)] if server_round == 1 else arrays


def zeros(size: int = 3) -> ArrayRecord:
    return ArrayRecord([np.zeros(size)])


def first(record: ArrayRecord) -> np.ndarray:
    return record.to_numpy_ndarrays()[0]


def frozen_share(sender: PeerState, receiver: PeerState, frames: FrameCodec) -> bytes:
    """Return the frame of a new share from one state to another, half of the sender's mass."""
    sender.shares.introduce(receiver.peer, receiver.shares.incarnation)
    assert sender.shares.split(1, {receiver.peer: 0.5}) == [receiver.peer]
    sender.shares.committed(sender.shares.snapshot(1))
    return b"".join(frames.encode(sender.shares.shares_to_send()[-1]))


def receive(state: PeerState, frames: FrameCodec, frame: bytes) -> bool:
    """Absorb the share of a frame, and return whether it was new."""
    share = frames.decode(frame)
    assert isinstance(share, FrozenShare)
    return state.shares.receive(share) and bool(state.shares.absorb())


class ReadingGrid(LocalGrid):
    """Keeps every byte that passes the ServerApp."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[bytes] = []

    def _deliver(self, message: Message) -> Message:
        self.read(message)
        reply = super()._deliver(message)
        self.read(reply)
        return reply

    def read(self, message: Message) -> None:
        if not message.has_error():
            for name, record in message.content.items():
                if name != "privdec.initial":  # it is public
                    self.seen += [
                        bytes(array.data) for array in getattr(record, "values", list)() if hasattr(array, "data")
                    ]
                    self.seen.append(repr(record).encode())
                    if name == SAYS:
                        self.seen += _bytes_said(record)


def _bytes_said(record: ConfigRecord) -> list[bytes]:
    """Return every text and every value of bytes in what a message says."""
    said = list[bytes]()
    for value in json.loads(record["fields"]).values():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str):
                said.append(one.encode("latin-1", "replace"))
    return said


class LossyGrid(LocalGrid):
    """Loses messages, answers, or holds answers back for a while, as `fate(number of the message, message)` says.

    Fates: "ok", "lost" (the node hears nothing), "unanswered" (the answer is lost) and "late" (it comes two sendings
    later).
    """

    def __init__(self, fate: Callable[[int, Message], str], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fate, self.count, self.sendings = fate, 0, 0
        self.kept_back: list[tuple[int, str, Message]] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self.sendings += 1
        ids = []
        for message in messages:
            name = str(uuid4())
            message.metadata.__dict__["_message_id"] = name
            ids.append(name)
            self.count += 1
            fate = self.fate(self.count, message)
            if fate == "lost":
                continue
            reply = self._deliver(message)
            if fate == "ok":
                self._replies[name] = reply
            elif fate == "late":
                self.kept_back.append((self.sendings + 2, name, reply))
        for when, name, reply in list(self.kept_back):
            if when <= self.sendings:
                self._replies[name] = reply
                self.kept_back.remove((when, name, reply))
        return ids


def failing(message: Message, context: Context) -> Message:
    """Answer that something is wrong, as a node whose app raised."""
    return Message(Error(2, "the disk is on fire"), reply_to=message)
