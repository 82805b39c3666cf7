"""Noise of pairs at one node of an app: its session in the node's memory, and the partners of a round."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import ConfigRecord, RecordDict

from flower_privdec.common.errors import RunError
from flower_privdec.flower.node_settings import PeerSettings
from flower_privdec.peer.app_pairs import (
    Introductions,
    PairSession,
    PairTerms,
    StepPairs,
    announced_to,
    check_pairs,
    partners_of,
    planned_terms,
)
from flower_privdec.peer.identity import Identity, KnownPeers
from flower_privdec.pushsum.exactly_once import RefusedError
from flower_privdec.scenario.app_sections import AppNoiseSection

log = logging.getLogger("flwr.privdec")

SESSION = "privdec.pairs"  # the record of a session in a node's context
PRIVATE = "private"
TERMS = "terms"
LAST_ROUND = "last-round"


def check_noise(noise: AppNoiseSection, node: PeerSettings) -> None:
    """Refuse noise of pairs that a node cannot add, or whose owner does not allow it; see `check_pairs`."""
    if node.simulated:
        # One person has all nodes, and no identity vouches for a session.
        check_pairs(noise, node.n_peers, owners_colluding=0, pinned=True)
    else:
        check_pairs(noise, node.n_peers, node.colluding, pinned=node.known_peers is not None)


@dataclass
class NodePairs:
    """One message's work with noise of pairs at a node.

    Attributes:
        noise: what the app asks for.
        node: the node's settings.
        terms: what the peer is bound to in this run.
        examples: by how many examples it counts.
        introductions: how it vouches for its session.
        path: of the file that names its session.
        stored: the state of the node's context.
        session: its session; None before it is needed.
        is_new: whether the session began with this message.
        refused: why other peers are not partners.
    """

    noise: AppNoiseSection
    node: PeerSettings
    terms: PairTerms
    examples: float
    introductions: Introductions
    path: Path
    stored: RecordDict
    session: PairSession | None = None
    is_new: bool = False
    refused: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        noise: AppNoiseSection,
        node: PeerSettings,
        run: str,
        path: Path,
        *,
        needed: float,
        examples: float,
        round_size: int,
        disagreement: float,
        identity: Identity,
        known: KnownPeers,
        stored: RecordDict,
    ) -> NodePairs:
        """Return the work of one message.

        Args:
            run: the run's name.
            path: of the peer's state of the run.
            needed: the noise that the peer needs by itself for one example.
            examples: by how many it counts.
            round_size: how many peers take part in a round; 0 if the strategy has not told it.
            disagreement: see `best_strength`.
        """
        size = round_size or node.n_peers
        terms = planned_terms(noise, needed * examples, node.n_peers, size, disagreement)
        introductions = Introductions(node.peer, identity, known, json.dumps(["updates", run]).encode())
        session_path = path.with_name(f"{path.name}-pairs")
        return cls(noise, node, terms, examples, introductions, session_path, stored)

    def announced_to(self, others: list[int]) -> dict[int, bytes]:
        """Return this peer's announcement for each of some others whose identity is known."""
        announcements, self.refused = announced_to(self.introductions, self._session(), others)
        return announcements

    def step(self, round_index: int, announced: Mapping[int, bytes]) -> StepPairs:
        """Return the pairs of a round.

        Args:
            announced: what the other peers of the round announced to this one.
        """
        session = self._session()

        def refuse(other: int, error: RefusedError) -> None:
            self.refused[other] = str(error)
            log.warning("peer %s shares no noise with peer %s: %s", self.node.peer, other, error)

        partners = {}
        if not self.is_new:  # of a new session no other peer has heard yet
            partners = partners_of(self.introductions, session, announced, refuse)
        return StepPairs(self.node.peer, round_index, session, partners, self.noise.colluding, self.examples)

    def keep(self) -> None:
        """Put the session into the node's memory, as far as it has been used."""
        if self.session is not None:
            self.stored[SESSION] = ConfigRecord(
                {
                    PRIVATE: self.session.private,
                    TERMS: self.session.terms.packed(),
                    LAST_ROUND: self.session.last_round,
                }
            )

    def _session(self) -> PairSession:
        """Return the node's session of the run, or a new one if it has none that goes on."""
        if self.session is not None:
            return self.session

        durable = not self.node.simulated
        remembered = self._remembered(durable)
        if remembered is not None and remembered.is_current(self.terms):
            self.session = remembered
        else:
            self.session = PairSession.opened(self.terms, 0, self.path, durable)
            self.is_new = True
        return self.session

    def _remembered(self, durable: bool) -> PairSession | None:
        record = self.stored.config_records.get(SESSION, ConfigRecord())
        private = record.get(PRIVATE)
        terms = record.get(TERMS)
        last_round = record.get(LAST_ROUND)
        if not isinstance(private, bytes) or not isinstance(terms, bytes) or not isinstance(last_round, int):
            return None
        try:
            return PairSession(private, PairTerms.unpacked(terms), last_round, self.path, durable)
        except ValueError:
            return None  # an app wrote into its context


def refuse_mesh() -> None:
    """Refuse noise of pairs in a mesh, whose peers do not take their steps in the same round.

    Raises:
        RunError: with the remedy.
    """
    raise RunError(
        "PeerMod's noise cancels between peers of one round, and a mesh has none that all take at once: start PushSum "
        "or Gossip, or leave noise out",
        code="flower.mesh-noise",
    )
