"""A peer's mass (x, w) and its mail, as a machine without files and messages: no share is lost, none is added twice.

Each share takes its part off the sender's mass and stays with the sender, frozen, until the receiver has said that it
is in *its* mass on disk; until then the sender hands in the same bytes again wherever the relay does not hold them. A
receiver takes the next number of each sender alone, so a share that comes twice is not added, one that comes before
its time is refused and comes again, and it says what it has in every answer. So whichever messages are lost, late or
repeated, and whoever is killed and started again, over all peers Σ mass + Σ shares not yet taken stays Σ at the
beginning + Σ updates. (In floating point each addition rounds; the number subtracted here is the one added there.)

A state that is lost begins anew under another epoch, with x = 0 and w = 0: it trains when its first share has come.
What had been on its way to the lost one is stranded, x with w, which moves no ratio. A state that is restored from an
older copy is found out by what others say they had from it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from flower_privdec.errors import RunError
from flower_privdec.flower.mods.layout import Layout
from flower_privdec.flower.mods.share_frame import Seal, ShareHeader, Unseal, frame, pack_body, unframe, unpack_body
from flower_privdec.pushsum.exactly_once import RefusedError


@dataclass
class OutLink:
    """What a peer remembers of those it sends to.

    Attributes:
        epoch: the receiver's, that the numbers are about.
        sent: the number of the last share.
        frozen: the shares of which the receiver has not yet said that it has them, by number.
    """

    epoch: int
    sent: int = 0
    frozen: dict[int, bytes] = field(default_factory=dict)


@dataclass
class PeerState:
    """All that a peer has to remember of a run.

    Attributes:
        run, peer: whose it is.
        layout: of the model's arrays.
        x, w: the mass; z = x / w is the model.
        kept: the arrays that are not mixed.
        epoch: of this state, at random.
        round_index: the last round it took part in; 0 before the first.
        links: to those it sends to.
        received: the last number taken, by sender and by the sender's epoch.
        stranded: how many shares went to states that were lost.
        handed: the serial of the last mean that it had a part in, outside a round.
        paid: how many payments the peer's ledger held when it last paid; one with fewer is not the same.
        local_arrays: of the record that never leaves the peer (`Asked.local_record`); empty where there is none.
        bare: how many updates of its own are in it without protection.
        idle: over a server, whether it took no step in its last round, and so has no part in that round's mean.
    """

    run: str
    peer: int
    layout: Layout
    x: np.ndarray
    w: float
    kept: dict[str, np.ndarray]
    epoch: int = field(default_factory=lambda: secrets.randbits(62) + 1)
    round_index: int = 0
    links: dict[int, OutLink] = field(default_factory=dict)
    received: dict[int, dict[int, int]] = field(default_factory=dict)
    stranded: int = 0
    handed: int = 0
    paid: int = 0
    bare: int = 0
    idle: bool = False
    local_arrays: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def begun(cls, run: str, peer: int, arrays: Mapping[str, np.ndarray], founding: bool) -> PeerState:
        """Return a state at the start: the arrays given with weight 1, or nothing at all for who comes later.

        Raises:
            RunError: the arrays are no model, or not finite.
        """
        layout = Layout.of(arrays)
        start = layout.vector(arrays)
        if not np.isfinite(start).all():
            raise RunError("initial_arrays are not finite: check how the model is made")
        x = start if founding else np.zeros_like(start)
        return cls(run, peer, layout, x.astype(layout.dtype), float(founding), layout.kept(arrays))

    def model(self) -> np.ndarray:
        """Return z = x / w, float64 [d].

        Raises:
            RunError: there is no mass yet.
        """
        if not self.w > 0:
            raise RunError(f"peer {self.peer} has no model yet: its first share has not come")
        return self.x.astype(np.float64) / self.w

    def adopt(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replace the mass by a server's model with weight 1.

        Raises:
            RunError: the peer exchanges shares in this run, or the arrays are not this model's, or not finite.
        """
        if self.links or self.received:
            raise RunError(
                f"run {self.run!r} is over a graph, where no server's model may replace peer {self.peer}'s mass: give "
                "the run another name",
                code="flower.model-in-a-graph",
            )
        if difference := self.layout.misfit(arrays):
            raise RunError(f"the server's {difference}, as in peer {self.peer}'s model: build the same model")
        x = self.layout.vector(arrays)
        if not np.isfinite(x).all():
            raise RunError("the server's model is not finite: lower the learning rate")
        self.x, self.w = x.astype(self.layout.dtype), 1.0

    # What comes in.

    def take(self, content: bytes, unseal: Unseal, only_sealed: bool) -> bool:
        """Add a share to the mass.

        Args:
            content: as it came.
            unseal: opens what is sealed.
            only_sealed: whether an open share is refused.

        Returns:
            Whether it was added; False for one that was taken before.

        Raises:
            RefusedError: it is no share for this peer, not the next, changed, not of these arrays, or not finite.
        """
        header, head, body = unframe(content)
        self._check_address(header, only_sealed)
        taken = self.received.get(header.sender, {}).get(header.epoch, 0)
        if 1 <= header.number <= taken:
            return False
        if header.number != taken + 1:
            raise RefusedError(f"it is number {header.number}, and {taken + 1} has to come first")
        layout, x, w = unpack_body(unseal(header.sender, head, body) if header.sealed else body)
        if difference := self.layout.differs(layout):
            raise RefusedError(f"its {difference}, as in this peer's model: build the same model at every peer")
        with np.errstate(over="ignore"):
            total = self.x + x
        if not np.isfinite(total).all():
            raise RefusedError("it would make the model infinite")
        self.x, self.w = total, self.w + w
        self.received.setdefault(header.sender, {})[header.epoch] = header.number
        return True

    def _check_address(self, header: ShareHeader, only_sealed: bool) -> None:
        if (header.run, header.receiver, header.addressed) != (self.run, self.peer, self.epoch):
            raise RefusedError(
                f"it is for peer {header.receiver} in run {header.run!r}, epoch {header.addressed}, and this is peer "
                f"{self.peer} in run {self.run!r}, epoch {self.epoch}"
            )
        if header.sender == self.peer:
            raise RefusedError("it says that this peer sent it itself")
        if only_sealed and not header.sealed:
            raise RefusedError("it is not sealed, and this peer takes sealed shares alone")

    def acknowledge(self, receiver: int, epoch: int, number: int) -> None:
        """Forget the shares that a receiver has in its mass.

        Raises:
            RunError: it has more than was sent: this state is an old copy.
        """
        link = self.links.get(receiver)
        if epoch != self.epoch or link is None:
            return  # about an earlier state of this peer
        if number > link.sent:
            raise RunError(
                f"peer {receiver} has had share {number} of peer {self.peer}, whose state says that it sent "
                f"{link.sent}: the state is an old copy; delete it, and the peer begins anew"
            )
        for old in [each for each in link.frozen if each <= number]:
            del link.frozen[old]

    def meet(self, epochs: Mapping[int, int]) -> None:
        """Give up what is on its way to states that were lost."""
        for receiver, link in self.links.items():
            if epochs.get(receiver, link.epoch) != link.epoch:
                self.stranded += len(link.frozen)
                self.links[receiver] = OutLink(epochs[receiver])

    # What leaves.

    def split(self, weights: Mapping[int, float], epochs: Mapping[int, int], seal: Seal | None) -> None:
        """Freeze a share for each receiver and take it off the mass.

        Args:
            weights: W[j, peer] of each receiver j, as `check_shares` has them; what is left of 1 is the peer's own.
            epochs: the receivers', whom `meet` knows.
            seal: None leaves the shares open.
        """
        if not self.w > 0:
            return
        parts = {weight: (self.x * self.x.dtype.type(weight), self.w * weight) for weight in set(weights.values())}
        for receiver, weight in sorted(weights.items()):
            self._freeze(receiver, epochs[receiver], *parts[weight], seal)

    def _freeze(self, receiver: int, epoch: int, x: np.ndarray, w: float, seal: Seal | None) -> None:
        link = self.links.setdefault(receiver, OutLink(epoch))
        link.sent += 1
        header = ShareHeader(
            self.run, self.peer, receiver, self.epoch, epoch, link.sent, self.round_index, seal is not None
        )
        body = pack_body(self.layout, x, w)
        sealed = body if seal is None else seal(receiver, header.encode(), body)
        link.frozen[link.sent] = frame(header, sealed)
        self.x, self.w = self.x - x, self.w - w


def check_shares(weights: Mapping[int, float], others: set[int]) -> None:
    """Refuse weights that would leave a peer nothing, or more than it has, or go to nobody.

    Raises:
        RefusedError: naming them.
    """
    if not all(weight > 0 for weight in weights.values()) or not sum(weights.values()) < 1:
        raise RefusedError(f"the weights {dict(weights)} must be > 0 with a sum < 1")
    if weights.keys() - others:
        raise RefusedError(f"shares for peers {sorted(weights.keys() - others)} must be for others that are there")
