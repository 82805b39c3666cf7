"""The shares that a strategy holds between two messages: it reads for whom they are, and no more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord

from flower_privdec.flower.mods.orders import Told, pack_bytes, unpack_bytes

Label = tuple[int, int, int]  # of a share: sender, the sender's epoch, number


@dataclass
class Mailroom:
    """What is on its way, and what has arrived.

    All of it is in memory: when the ServerApp dies, the senders hand in again what has not arrived.

    Attributes:
        held: the shares for each receiver, by label.
        taken: the last number that a receiver has, by (sender, the sender's epoch, receiver).
        epochs: of each peer's state.
    """

    held: dict[int, dict[Label, bytes]] = field(default_factory=dict)
    taken: dict[Label, int] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)

    def hear(self, told: Told, outbox: ArrayRecord | None) -> None:
        """Take in what a peer says it has, what it refused, and what it sends."""
        if self.epochs.get(told.peer, told.epoch) != told.epoch:
            self.held.pop(told.peer, None)  # it was for a state that is lost
        self.epochs[told.peer] = told.epoch
        mine = self.held.setdefault(told.peer, {})
        for sender, epoch, number in zip(told.senders, told.sender_epochs, told.taken, strict=True):
            self.taken[sender, epoch, told.peer] = number
            for label in [each for each in mine if each[:2] == (sender, epoch) and each[2] <= number]:
                del mine[label]
        for label in [each for each in mine if _name(each) in told.refused_keys]:
            del mine[label]  # its sender hands it in again
        for name, share in unpack_bytes(outbox):
            receiver, _, count = name.partition(".")
            if count.isdecimal() and receiver.isdecimal() and int(receiver) in self.epochs:
                self.held.setdefault(int(receiver), {})[told.peer, told.epoch, int(count)] = share

    def inbox(self, receiver: int) -> ArrayRecord:
        """Return what waits for a peer, each sender's in their order."""
        return pack_bytes({_name(label): share for label, share in sorted(self.held.get(receiver, {}).items())})

    def waiting(self, receiver: int) -> int:
        """Return how many shares wait for a peer."""
        return len(self.held.get(receiver, {}))

    def words_for(self, sender: int) -> dict[str, Any]:
        """Return what a peer is told of its own shares: which are held here, and which have arrived."""
        epoch = self.epochs.get(sender, 0)
        held = [(to, label[2]) for to, labels in self.held.items() for label in labels if label[:2] == (sender, epoch)]
        taken = [(to, e, number) for (who, e, to), number in self.taken.items() if (who, e) == (sender, epoch)]
        return {
            "held_by": [to for to, _ in held],
            "held": [number for _, number in held],
            "taken_by": [to for to, _, _ in taken],
            "taken_epochs": [e for _, e, _ in taken],
            "taken": [number for _, _, number in taken],
        }


def _name(label: Label) -> str:
    return ".".join(map(str, label))
