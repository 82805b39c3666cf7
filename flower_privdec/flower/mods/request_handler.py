"""What a peer does with one message: take its mail, train, charge, noise, split, and keep it all before it answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

from flower_privdec.errors import RunError
from flower_privdec.flower.mods.layout import numpy_arrays
from flower_privdec.flower.mods.orders import INBOX, INITIAL, MASS, OUTBOX, SAYS, Asked, Told, pack_bytes, unpack_bytes
from flower_privdec.flower.mods.peer_file import load_state, save_state, state_path
from flower_privdec.flower.mods.peer_ledger import PeerLedger, PeerSpent, bare_words, spent_so_far
from flower_privdec.flower.mods.peer_place import PeerPlace
from flower_privdec.flower.mods.peer_state import PeerState, check_shares
from flower_privdec.flower.mods.protecting import PeerPrivacy
from flower_privdec.flower.mods.sealing import Identity, KnownPeers
from flower_privdec.flower.mods.stepping import APP_SPENT, LEAST_WEIGHT, Train, take_step
from flower_privdec.flower.mods.update import clipped, noised
from flower_privdec.flower.strategies.masking import masked
from flower_privdec.pushsum.exactly_once import RefusedError

log = logging.getLogger("flwr.privdec")


class Desk:
    """One message's work at one peer, whose folder is held meanwhile.

    Args:
        asked: what the strategy asks.
        place: which peer this is, and where.
        privacy: how it protects what it sends.
        seal: whether it seals what it sends, and takes sealed shares alone.
    """

    def __init__(self, asked: Asked, place: PeerPlace, privacy: PeerPrivacy, seal: bool) -> None:
        self.asked, self.place, self.privacy, self.seals = asked, place, privacy, seal
        self.path = state_path(place.folder, asked.run)
        self.identity = Identity(place.folder)
        self.known = KnownPeers(place.folder, place.known_peers)
        self.state = load_state(self.path)
        self._budget = privacy.budget(place)
        self.told: dict[str, Any] = {}
        self.records: dict[str, ArrayRecord] = {}
        self._refused: dict[str, str] = {}
        self._spent: PeerSpent | None = None

    def join(self, content: RecordDict) -> None:
        """Begin a state from the initial arrays, unless there is one.

        Raises:
            RunError: the message has no arrays, or they are no model.
        """
        if self.state is None:
            if INITIAL not in content.array_records:
                raise RunError("the message has no initial arrays; start a strategy of flower_privdec with some")
            arrays = numpy_arrays(content.array_records[INITIAL])
            self.state = PeerState.begun(self.asked.run, self.place.peer, arrays, self.asked.founding)
            self._save(self.state)

    def _save(self, state: PeerState) -> None:
        """Keep a state, so that nothing short of a simulated peer's machine stopping can lose it."""
        save_state(self.path, state, durable=not self.place.simulated)

    def take_mail(self, content: RecordDict) -> PeerState:
        """Add what came to the mass, forget what has arrived, and return the state.

        Raises:
            RunError: there is no state of this run, or it is an old copy.
        """
        state, asked = self.state, self.asked
        if state is None:
            raise RunError(f"peer {self.place.peer} has no state of run {asked.run!r}: its folder is not what it was")
        introduced = dict(zip(asked.neighbors, asked.keys, strict=True))
        self.known.meet({peer: key for peer, key in introduced.items() if 0 <= peer < self.place.n_peers})
        for word in zip(asked.taken_by, asked.taken_epochs, asked.taken, strict=True):
            state.acknowledge(*word)
        state.meet(dict(zip(asked.neighbors, asked.epochs, strict=True)))
        for name, share in unpack_bytes(content.array_records.get(INBOX)):
            try:
                state.take(share, self._unseal, self.seals)
            except RefusedError as error:
                self._refused[name] = str(error)
                log.warning("peer %s refused share %s: %s", self.place.peer, name, error)
        return state

    def take_part(self, train: Train) -> None:
        """Train, and freeze a share for each receiver; a round in which the peer took part already is not repeated."""
        state, asked = self.state, self.asked
        if state is None or asked.round_index <= state.round_index:
            return
        weights = self._receivers()
        self.told["trained"] = self._may_train(state) and self._train(state, train)
        state.round_index = asked.round_index
        self._hand_in(state)
        seal = self._seal if self.seals else None
        epochs = dict(zip(asked.neighbors, asked.epochs, strict=True))
        state.split(weights, epochs, seal)

    def deliver(self) -> None:
        """Hand in the mass, when it is asked for; once for each serial, so that no mask is used twice."""
        if self.state is not None and self.asked.serial > self.state.handed:
            self.state.handed = self.asked.serial
            self._hand_in(self.state)

    def _receivers(self) -> dict[int, float]:
        """Return who gets which part of the mass: of those that are to have one, all whose key can be trusted.

        Raises:
            RefusedError: nobody can send by these weights; said before anything is trained or paid for.
        """
        weights = dict(zip(self.asked.receivers, self.asked.weights, strict=True))
        check_shares(weights, set(self.asked.neighbors) - {self.place.peer})
        for receiver in list(weights) if self.seals else ():
            try:
                self.known.key(receiver)
            except RefusedError as error:
                self._refused[f"to {receiver}"] = str(error)
                log.warning("peer %s sends nothing to peer %s: %s", self.place.peer, receiver, error)
                del weights[receiver]
        return weights

    def _may_train(self, state: PeerState) -> bool:
        if state.w < LEAST_WEIGHT:
            self.told["stopped"] = f"it holds {state.w:.2g} of the mass, and waits for a share before it trains"
        return state.w >= LEAST_WEIGHT

    def _train(self, state: PeerState, train: Train) -> bool:
        """Let the app train from z, and add what it moved by, w · (clipped and noised), to x."""
        asked, privacy, noise = self.asked, self.privacy, 0.0
        if privacy.on:
            noise = privacy.noise(self.place, asked.rounds)
            budget, delta = self._budget
            with PeerLedger(self.place.folder, asked.run, state.epoch, state.peer, delta, budget) as ledger:
                ledger.check_entries(state.paid)
                charged = ledger.charge(asked.round_index, noise)
                self._spent, state.paid = ledger.spent, ledger.n_entries
            if not charged:
                self.told["stopped"] = (
                    f"its next update would exceed epsilon = {budget:g}; it trains no more, and goes on relaying"
                )
                self.told["exhausted"] = True
                return False
        protect = None if privacy.clip_norm is None else partial(protected, privacy.clip_norm, noise)
        if not take_step(state, train, protect, asked.round_index):
            self.told["stopped"] = APP_SPENT
            self.told["exhausted"] = True
            return False
        return True

    def _hand_in(self, state: PeerState) -> None:
        """Put (x, w) into the answer: open, or masked so that only the sum over all says something."""
        if not self.asked.wants_mass:
            return
        mass = np.append(state.x.astype(np.float64), state.w)
        if not self.seals:
            self.records[MASS] = ArrayRecord({"mass": Array(mass)})
            return
        others = [peer for peer in self.asked.mean_of if peer != state.peer]
        try:
            if state.peer not in self.asked.mean_of or len(others) < 1:
                raise RunError("a mean of sealed models must be of this peer and others")
            self.records[MASS] = ArrayRecord({"mass": Array(masked(mass, state.peer, others, self._mask_key))})
        except RunError as error:
            log.warning("peer %s has no part in the mean: %s", state.peer, error)

    def _mask_key(self, other: int) -> bytes:
        """Return a key for one mask: of this round, and of the two states, for one begun anew asks for others."""
        asked, state = self.asked, self.state
        assert state is not None
        epochs = dict(zip(asked.neighbors, asked.epochs, strict=True)) | {state.peer: state.epoch}
        pair = [[peer, epochs.get(peer)] for peer in sorted((state.peer, other))]
        purpose = json.dumps(
            ["mask", asked.run, asked.kind, asked.round_index, asked.serial, sorted(asked.mean_of), pair]
        ).encode()
        return self.identity.key_for(self.known.key(other), b"", purpose)

    def _seal(self, receiver: int, header: bytes, body: bytes) -> bytes:
        return self.identity.seal(self.known.key(receiver), header, body)

    def _unseal(self, sender: int, header: bytes, sealed: bytes) -> bytes:
        return self.identity.unseal(self.known.key(sender), header, sealed)

    def answer(self) -> dict[str, Any]:
        """Keep the state and return what to answer, once it is on disk."""
        state = self.state
        if state is not None and self.asked.kind not in ("introduce", "join"):
            self._save(state)
            held = set(zip(self.asked.held_by, self.asked.held, strict=True))
            self.records[OUTBOX] = pack_bytes(
                {
                    f"{receiver}.{number}": share
                    for receiver, link in state.links.items()
                    for number, share in link.frozen.items()
                    if (receiver, number) not in held
                }
            )
        return {SAYS: self._tell(state).record(), **self.records}

    def _tell(self, state: PeerState | None) -> Told:
        spent = self._spent or (spent_so_far(self.place.folder, self._budget[1]) if self.privacy.on else None)
        bare = 0 if state is None else state.bare
        taken = [] if state is None else [(s, e, n) for s, epochs in state.received.items() for e, n in epochs.items()]
        return Told(
            self.place.peer,
            self.place.n_peers,
            epoch=0 if state is None else state.epoch,
            round_index=0 if state is None else state.round_index,
            key=self.identity.public,
            sealed=self.seals,
            spent="" if spent is None else bare_words(bare) if bare else str(spent),
            epsilon=float("inf") if spent is None or bare else spent.epsilon,
            senders=[s for s, _, _ in taken],
            sender_epochs=[e for _, e, _ in taken],
            taken=[n for _, _, n in taken],
            refused_keys=list(self._refused),
            refused=list(self._refused.values()),
            stranded=0 if state is None else state.stranded,
            address=self.place.address,
            **self.told,
        )


def protected(clip_norm: float, noise: float, update: np.ndarray) -> np.ndarray:
    """Return u · min(1, C / ‖u‖) + N(0, σ² C² I), float64 [d].

    Args:
        clip_norm: C.
        noise: σ, over C.
        update: u, finite, float64 [d].

    Privacy: one Gaussian release of the whole update, which has to be paid for before.
    """
    return noised(clipped(update, clip_norm), noise * clip_norm)


def keep_metrics(folder: Path, round_index: int, kind: str, records: Mapping[str, Mapping[str, Any]]) -> None:
    """Add an app's metrics to the peer's own file, from which they do not leave."""
    with (folder / "metrics.jsonl").open("a") as file:
        for metrics in records.values():
            file.write(json.dumps({"round": round_index, "of": kind, **metrics}) + "\n")
