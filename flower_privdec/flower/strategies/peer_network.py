"""The peers of a run as a strategy knows them: who is there, what each said last, and what is on its way."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from flower_privdec.errors import RunError
from flower_privdec.flower.apps.nodes import reason
from flower_privdec.flower.mods.orders import INBOX, INITIAL, INTRODUCE, JOIN, MASS, OUTBOX, SAYS, Asked, Told
from flower_privdec.flower.mods.peer_ledger import UNPROTECTED
from flower_privdec.flower.strategies.masking import unmasked_sum
from flower_privdec.flower.strategies.node_registry import NO_MOD, Census, said_by
from flower_privdec.flower.strategies.relay_store import Mailroom
from flower_privdec.graph.mixing import MixingMatrix
from flower_privdec.graph.mixing.weights import average_matrix, mixing_matrix
from flower_privdec.graph.topology.graphs import CompleteTopology, Topology

log = logging.getLogger("flwr.privdec")

LEAST_TTL = 60.0  # seconds; later Flower drops a message, and its answer


@dataclass
class PeerNetwork:
    """The peers of one run.

    Attributes:
        grid: the nodes.
        common: what is said in every message: the run, a simulation's folder, the arrays' key, the rounds.
        timeout: seconds to wait for answers.
        census: which node is which peer.
        mailroom: the shares on their way.
        told: what each peer said last.
        deaf: peers whose last answer was a failure, and its reason.
        blind: peers whose app could not evaluate, and why; that keeps nobody from training.
    """

    grid: Grid
    common: dict[str, Any]
    timeout: float
    census: Census = field(default_factory=Census)
    mailroom: Mailroom = field(default_factory=Mailroom)
    told: dict[int, Told] = field(default_factory=dict)
    deaf: dict[int, str] = field(default_factory=dict)
    blind: dict[int, str] = field(default_factory=dict)

    def find(self, patience: float) -> None:
        """Meet all peers, or at least two of them within some seconds.

        Raises:
            RunError: too few are there, or one is no peer.
        """
        deadline, census = time.monotonic() + patience, self.census
        while not census.n_peers or len(census.node_of) < census.n_peers:
            left = deadline - time.monotonic()
            self.meet(max(0.0, left))
            if left < 0:
                break
            time.sleep(0.0 if census.node_of else 0.05)
        there, wanted = len(census.there), census.n_peers
        if there < min(2, wanted or 2):
            raise RunError(f"{there} of {wanted or 'the'} SuperNodes answered within {patience:g} s; start them all")
        if there < wanted:
            log.warning("%s of %s peers are there; the run begins without the others", there, wanted)

    def meet(self, patience: float) -> None:
        """Notice who is gone, and meet who is new.

        Raises:
            RunError: who is new is no peer, or says that it is one that is there.
        """
        self.census.look(self.grid, Asked(INTRODUCE, **self.common), patience, self._note)

    def _note(self, told: Told) -> None:
        self.told[told.peer] = told
        if told.epoch:
            self.mailroom.hear(told, None)

    def join(self, initial: ArrayRecord, founding: bool) -> None:
        """Let the peers begin that have no state of this run: with the initial arrays, or late and with nothing.

        Raises:
            RunError: none of them can.
        """
        new = [peer for peer in self.census.there if not self.told[peer].epoch]
        if new:
            contents = {peer: RecordDict({INITIAL: initial}) for peer in new}
            self.ask([self.message(peer, "train", JOIN, contents[peer], founding=founding) for peer in new])
            self.raise_if_all_fail(new)

    @property
    def sealed(self) -> bool:
        """Return whether the peers seal what they send.

        Raises:
            RunError: some do and some do not.
        """
        sealed = sorted(peer for peer, told in self.told.items() if told.sealed)
        if sealed and len(sealed) < len(self.told):
            raise RunError(f"peers {sealed} seal what they send and the others do not: set PeerMod's seal alike")
        return bool(sealed)

    def members(self) -> list[int]:
        """Return the peers that are there and have a state of this run."""
        return [peer for peer in self.census.there if self.told[peer].epoch]

    def well(self) -> list[int]:
        """Return those of them that answered the last time, without a failure: who gets shares and is counted on."""
        return [peer for peer in self.members() if peer not in self.census.silent and peer not in self.deaf]

    def message(self, peer: int, category: str, kind: str, content: RecordDict, **more: Any) -> Message:
        """Return a message to a peer, with its mail and what it has to know of the others."""
        known = sorted(self.mailroom.epochs)
        asked = Asked(
            kind,
            peer=peer,
            neighbors=known,
            epochs=[self.mailroom.epochs[each] for each in known],
            keys=[self.told[each].key for each in known],
            **self.common,
            **self.mailroom.words_for(peer),
            **more,
        )
        if kind != JOIN:
            content[INBOX] = self.mailroom.inbox(peer)
        content[SAYS] = asked.record()
        return Message(content, self.census.node_of[peer], category, ttl=max(self.timeout, LEAST_TTL))

    def ask(self, messages: Iterable[Message]) -> dict[int, Message]:
        """Send messages, and return the good answers that came in time, by peer; late ones are heard all the same."""
        replies = self.census.ask(self.grid, messages, self.timeout, self._hear)
        return {self.census.peer_at(r.metadata.src_node_id): r for r in replies if not r.has_error()}

    def _hear(self, peer: int, reply: Message) -> None:
        """Take in an answer, whenever it comes."""
        if reply.has_error():
            failed = self.blind if reply.metadata.message_type == "evaluate" else self.deaf
            failed[peer] = reason(reply.error.reason)
            return
        try:
            told = Told.of(reply.content, NO_MOD)
        except RunError as error:
            self.deaf[peer] = str(error)
            return
        if (told.peer, told.n_peers) != (peer, self.census.n_peers):
            self.deaf[peer] = f"it says now that it is peer {told.peer} of {told.n_peers}: give it its own partition-id"
            return
        self.deaf.pop(peer, None)
        self.told[peer] = told
        self.mailroom.hear(told, reply.content.array_records.get(OUTBOX))

    def troubles(self) -> str:
        """Return what is worth a word: who is silent, fails, refuses a share, or trains no more."""
        said = {peer: told.stopped for peer, told in self.told.items() if told.stopped}
        said |= {peer: f"cannot evaluate: {why}" for peer, why in self.blind.items()}
        for peer, told in self.told.items():
            for why in told.refused:
                said[peer] = f"refused: {why}"
        said |= self.deaf | dict.fromkeys(self.census.silent, "no answer") | dict.fromkeys(self.census.gone, "gone")
        return said_by(said)

    def raise_if_all_fail(self, peers: Iterable[int]) -> None:
        """Raise what the peers say, when none of those asked did what it was asked."""
        asked = list(peers)
        failed = {peer: "no answer" for peer in asked if peer in self.census.silent}
        failed |= {peer: self.deaf[peer] for peer in asked if peer in self.deaf}
        if failed and len(failed) == len(asked):
            raise RunError(f"no peer could go on: {said_by(failed)}")


def masses_in(replies: Mapping[int, Message], size: int, sealed: bool) -> dict[int, np.ndarray]:
    """Return what each peer handed in for the mean, (x, w) as one vector: open, or masked.

    Args:
        replies: of each peer.
        size: of x.
        sealed: whether they are masked. What is not of that shape and type, or not finite, is left out, and named.
    """
    wanted = ("uint64", (2, size + 1)) if sealed else ("float64", (size + 1,))
    found: dict[int, np.ndarray] = {}
    for peer, reply in replies.items():
        record = reply.content.array_records.get(MASS)
        if record is None or "mass" not in record:
            continue
        value = _read(record["mass"], *wanted)
        if value is None:
            log.warning("what peer %s handed in for the mean is none of %s %s, and left out", peer, *wanted)
        else:
            found[peer] = value
    return found


def _read(array: Array, dtype: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return the numbers of an array that anybody may have sent; None where they are not of a shape, or not finite."""
    try:
        value = array.numpy()
    except (TypeError, ValueError, EOFError):
        return None
    return value if (str(value.dtype), value.shape) == (dtype, shape) and np.isfinite(value).all() else None


def total_mass(masses: Mapping[int, np.ndarray], wanted: set[int], sealed: bool) -> np.ndarray | None:
    """Return Σ (x, w) over those that handed in their mass; None where nobody did, or where a mask is left over.

    Args:
        masses: what each handed in.
        wanted: who was to have a part in it.
        sealed: whether they are masked, so that all who are wanted must be there and nobody else.
    """
    if not masses or (sealed and masses.keys() != wanted):
        log.warning("no mean of the models: peers %s had no part in it", sorted(wanted - masses.keys()))
        return None
    total = unmasked_sum(masses.values()) if sealed else np.sum(list(masses.values()), axis=0)
    return np.asarray(total) if total[-1] > 0 else None


def say_privacy(told: Mapping[int, Told]) -> None:
    """Log what each peer has spent, with its unit; those that spent the same together."""
    spent: dict[str, list[int]] = {}
    for peer, each in sorted(told.items()):
        spent.setdefault(each.spent or UNPROTECTED, []).append(peer)
    for words, peers in spent.items():
        log.info("Privacy of peer%s %s: %s", "s" * (len(peers) > 1), ", ".join(map(str, peers)), words)


def matrix_of(graph: Topology, weights: str, round_index: int, present: np.ndarray) -> MixingMatrix:
    """Return how the peers that are present mix in a round; on a complete graph every one gets their mean.

    Args:
        present: bool [n_peers].
    """
    if isinstance(graph, CompleteTopology):
        return average_matrix(present)
    return mixing_matrix(graph.edges(round_index), len(present), weights, present)
