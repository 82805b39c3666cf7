"""Noise of pairs for an app's updates: what a peer adds together with others of its round, and is gone from the mean.

A peer whose update is clipped to C and needs noise σ C by itself adds to its mass, in the round k,

    m (clip(u) + D ξ)  +  Σ_j ± c_ij ζ_ij^k            + for i < j, - for i > j

with m its number of examples, ξ normals of its own, and ζ_ij^k normals that it and j draw from a secret that only they
have. Push-sum conserves Σ x, in which the pairs' noise is 0; D is well below σ C.

How a round goes:

1. Every peer has a *session*: an X25519 key in the memory of its node (`PairSession`). It announces the public half to
   each other peer, with what it is bound to (`PairTerms`), under an HMAC by both identities (`announce`, `heard`).
2. The strategy names the peers of a round by carrying their announcements. Each peer decides for itself whom of them it
   shares noise with (`partners_of`), and adds as much noise of its own as is then missing (`own_noise`).
3. A draw belongs to two sessions and a round, and a session takes a round once (`PairSession.begin`).

So a peer that fails, leaves or is cut off is not among the next round's. What the others drew with it in the round in
which it failed stays in the models, once.

Privacy. In units of what it adds to the sum, let peer i need N_i = m σ C, and add own noise D_i and c_ij with its
partners S_i of the round. Give an observer all messages, all secrets of q colluding peers, and all numbers that i has
no part in. An honest partner j has added ζ_ij once at most, in a release with own noise of at least the D_j that its
announcement binds it to, or has not added it. So the observer knows c_ij ζ_ij at best up to that noise: what is left of
it has the variance

    t_ij = c_ij² D_j² / (c_ij² + D_j²)        (c_ij² if j has not added it, which is more)

independently for each partner, and i's update is hidden by noise of the variance

    D_i² + Σ t_ij over all but the q largest   >=   N_i²

for D_i is as large as it takes (`own_noise`), whoever the partners of the round are. A step of i alone, a lost answer,
a relay that lies about who is there, or announcements of old sessions change who S_i is, or leave a draw unmatched.
This costs accuracy and no ε. If all other peers collude, D_i is left, which never falls below the announced one. ∎

Own noise is drawn last and exactly (`exactly_noised`), so what leaves is a function of a sum with real normals of its
own. The pairs' normals are float64's, off real ones by less than 2^-40 of their size; SLACK in the own noise pays for
that.

Source: Allouah et al. 2024 (Decor, arXiv:2405.01031) for the mechanism.
"""

from __future__ import annotations

import hmac
import math
import os
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from flower_privdec.common.errors import RunError
from flower_privdec.common.files import write_atomically
from flower_privdec.peer.identity import KEY, Identity, KnownPeers
from flower_privdec.privacy.exact_noise import PIECE, SystemNormals, exactly_noised, key_stream
from flower_privdec.privacy.mechanism.cancelling import HORIZON, LEFT_BY_RESTART, STRENGTHS
from flower_privdec.pushsum.exactly_once import RefusedError
from flower_privdec.scenario.app_sections import AppNoiseSection

SLACK = 1 + 2.0**-20  # of the own noise
FACTOR_DIGITS = 6  # of the own noise over what is needed, rounded up, so that equal peers stay equal
MOST_UNLIKE = 16.0  # times as much noise as this peer needs, or as little, a partner may need
MOST_STRENGTH = 64.0
UNTOLD = -1.0  # of the disagreement, if no strategy has told it

_TERMS = struct.Struct("<dddI")
MAC = 32  # bytes


@dataclass(frozen=True)
class PairTerms:
    """What a peer is bound to in a session, which its partners rely on.

    Attributes:
        needed: N, the noise that it needs by itself, in units of what it adds to the sum.
        own: the least noise of its own that it adds, over `needed`, in (0, 1].
        strength: the standard deviation of all that it adds with others, over `needed`.
        partners: how many partners it plans with.
    """

    needed: float
    own: float
    strength: float
    partners: int

    def packed(self) -> bytes:
        """Return the terms as bytes."""
        return _TERMS.pack(self.needed, self.own, self.strength, self.partners)

    @classmethod
    def unpacked(cls, content: bytes) -> PairTerms:
        """Read the terms.

        Raises:
            ValueError: they are none that a peer could have.
        """
        if len(content) != _TERMS.size:
            raise ValueError(f"terms have {len(content)} bytes")
        terms = cls(*_TERMS.unpack(content))
        in_range = 0 < terms.needed < math.inf and 0 < terms.own <= 1 and 0 < terms.strength <= MOST_STRENGTH
        if not in_range or terms.partners < 1:
            raise ValueError("terms are out of range")
        return terms


def least_own(partners: int, hidden: int, strength: float) -> float:
    """Return the least own noise of peers that are alike, over what each needs by itself, in (0, 1].

    With c² = strength² / partners it is the root of  d² + hidden c² d² / (c² + d²) = 1.

    Args:
        partners: how many each plans with.
        hidden: how many of them count: all but those that collude, and those that may be absent.
        strength: see `PairTerms`.
    """
    if hidden < 1:
        return 1.0
    square = strength**2 / partners
    middle = square * (hidden + 1) - 1
    # The stable one of the two ways to write the root.
    root = math.sqrt(middle**2 + 4 * square)
    if middle > 0:
        own_square = 2 * square / (middle + root)
    else:
        own_square = (root - middle) / 2
    unit = 10.0**-FACTOR_DIGITS
    return min(1.0, math.ceil(math.sqrt(own_square) / unit) * unit)


def best_strength(partners: int, hidden: int, disagreement: float) -> float:
    """Return the strength that leaves the least error, weighed as a deployed scenario's is; see `mechanism.cancelling`.

    Nodes fail, in simulations too, and what the others drew with one that failed in the round stays in the mean: so
    strength has a price even if every round reaches the mean.

    Args:
        partners, hidden: see `least_own`.
        disagreement: how much of the variance of the pairs' noise is in the models when a round begins.
    """
    left = 1.0
    if 0 <= disagreement < math.inf:
        left = disagreement
    peers = partners + 1

    def error(strength: float) -> float:
        mean = least_own(partners, hidden, strength) ** 2 / peers
        unmatched = LEFT_BY_RESTART * strength**2 / peers**2
        return HORIZON * mean + strength**2 * left + unmatched

    return min(STRENGTHS, key=error)


def planned_terms(
    noise: AppNoiseSection, needed: float, n_peers: int, told_size: int, disagreement: float
) -> PairTerms:
    """Return the terms of a peer.

    Args:
        noise: what the app asks for.
        needed: see `PairTerms`.
        n_peers: how many peers there are, by the node's own settings.
        told_size: how many take part in a round, as the strategy says. A smaller number only makes own noise larger.
        disagreement: see `best_strength`.
    """
    partners = max(1, min(told_size, n_peers) - 1)
    hidden = partners - noise.colluding - noise.absent
    strength = noise.strength
    if strength == "auto":
        strength = best_strength(partners, hidden, disagreement)
    return PairTerms(needed, least_own(partners, hidden, strength), min(strength, MOST_STRENGTH), partners)


def own_at_least(noise: AppNoiseSection, n_peers: int) -> float:
    """Return what no own noise of a peer in a run is below, over what it needs, whatever a strategy tells it.

    For t_ij <= D_j², own noise d of equal peers has d (1 + hidden) >= 1; see `least_own`.
    """
    return 1 / math.sqrt(max(1, n_peers - noise.colluding - noise.absent))


def pair_square(one: PairTerms, other: PairTerms) -> float:
    """Return c² of two peers, which is the same for both of them."""
    strength = min(one.strength, other.strength)
    return strength**2 * one.needed * other.needed / max(one.partners, other.partners)


def own_noise(terms: PairTerms, partners: Collection[PairTerms], colluding: int) -> float:
    """Return D of a step, over what the peer needs by itself, in (0, 1]; see the head of the module.

    Args:
        terms: the peer's.
        partners: those of its partners in the step.
        colluding: q.
    """
    hidden = []
    for other in partners:
        square = pair_square(terms, other) / terms.needed**2
        own_square = (other.own * other.needed / terms.needed) ** 2
        hidden.append(square * own_square / (square + own_square))
    counted = sorted(hidden)[: max(0, len(hidden) - colluding)]
    return max(terms.own, math.sqrt(max(0.0, 1.0 - math.fsum(counted))))


# --- sessions ---


@dataclass(frozen=True)
class Partner:
    """A partner of a round.

    Attributes:
        terms: what it announced.
        secret: of the two sessions, 32 bytes.
    """

    terms: PairTerms
    secret: bytes


@dataclass
class PairSession:
    """A peer's key for one life of its node, which counts the rounds that it has drawn for.

    The node's memory holds it (a Flower context), and a file names it and its last round. The two must agree: an old
    copy of either, a folder that was restored, or another node with the folder has a session of its own.

    Attributes:
        private: the private key, 32 bytes.
        terms: as it announced them.
        last_round: the last round that it has drawn for.
        path: of the file.
        durable: whether the file must outlast a stop of the machine.
    """

    private: bytes
    terms: PairTerms
    last_round: int
    path: Path
    durable: bool

    @classmethod
    def opened(cls, terms: PairTerms, last_round: int, path: Path, durable: bool) -> PairSession:
        """Return a new session, which the file names from now on."""
        session = cls(os.urandom(KEY), terms, last_round, path, durable)
        session._write()
        return session

    def is_current(self, terms: PairTerms) -> bool:
        """Return whether the session is the one that the file names, and still has the peer's terms."""
        if terms != self.terms or len(self.private) != KEY or not self.path.exists():
            return False
        return self.path.read_bytes() == self._named()

    def begin(self, round_index: int) -> bool:
        """Note that draws of a round are used up from now on; False if they are already."""
        if round_index <= self.last_round:
            return False
        self.last_round = round_index
        self._write()
        return True

    @property
    def public(self) -> bytes:
        """Return the public key, 32 bytes."""
        return X25519PrivateKey.from_private_bytes(self.private).public_key().public_bytes_raw()

    def secret(self, peer: int, other: int, public: bytes, vouched: bytes, run: bytes) -> bytes:
        """Return the secret of this session of a peer with that of another.

        Args:
            public: the other's key.
            vouched: what only the identities of the two know.
            run: what all peers of the run have alike.

        Raises:
            ValueError: no secret can be made of the key.
        """
        own = self.public
        if public == own:
            raise ValueError("it is this peer's own key")
        common = X25519PrivateKey.from_private_bytes(self.private).exchange(X25519PublicKey.from_public_bytes(public))
        named = repr(sorted([(peer, own), (other, public)])).encode()
        return HKDF(SHA256(), KEY, run, b"flower_privdec pair noise of updates" + named).derive(common + vouched)

    def _named(self) -> bytes:
        return f"{self.public.hex()} {self.last_round}".encode()

    def _write(self) -> None:
        write_atomically(self.path, self._named(), durable=self.durable)


@dataclass(frozen=True)
class Introductions:
    """How a peer vouches for its session to others, and they to it.

    Attributes:
        peer: which it is.
        identity: its own.
        known: the others'.
        run: what all peers of the run have alike.
    """

    peer: int
    identity: Identity
    known: KnownPeers
    run: bytes

    def announce(self, session: PairSession, other: int) -> bytes:
        """Return a session's key and terms with an HMAC that only another peer can check.

        Raises:
            RefusedError: the other peer's identity is not known.
        """
        body = session.public + session.terms.packed()
        return body + self._mac(other, body, sender=self.peer)

    def heard(self, session: PairSession, other: int, announcement: bytes) -> Partner:
        """Return the partner that another peer's announcement makes it.

        Raises:
            RefusedError: its identity is not known, or it did not announce that, or cannot be a partner.
        """
        body = announcement[:-MAC]
        # In constant time, or the time would tell how much of an invented HMAC is right.
        if not hmac.compare_digest(announcement[-MAC:], self._mac(other, body, sender=other)):
            raise RefusedError(
                f"peer {other} did not announce that session by the identity that this peer knows: another run or "
                "version, or someone in between; compare its identity.pub",
                code="noise.app-partner",
            )

        try:
            terms = PairTerms.unpacked(body[KEY:])
            ratio = terms.needed / session.terms.needed
            if not 1 / MOST_UNLIKE <= ratio <= MOST_UNLIKE:
                raise ValueError(f"it needs {ratio:.3g} times the noise of this peer: give both like clip norms")
            vouched = self._vouched(other, b"noise")
            secret = session.secret(self.peer, other, body[:KEY], vouched, self.run)
        except ValueError as error:
            raise RefusedError(f"peer {other} can be no partner in noise: {error}", code="noise.app-partner") from error
        return Partner(terms, secret)

    def _vouched(self, other: int, purpose: bytes) -> bytes:
        return self.identity.key_for(self.known.key(other), self.run, b"pair of updates: " + purpose)

    def _mac(self, other: int, body: bytes, sender: int) -> bytes:
        return hmac.digest(self._vouched(other, b"announcement"), f"{sender} ".encode() + body, "sha256")


# --- a step ---


@dataclass(frozen=True)
class StepPairs:
    """The pairs of one peer in one round.

    Attributes:
        peer: which it is.
        round_index: the round.
        session: the peer's, which is asked for the draws of the round once.
        partners: by peer; may be empty.
        colluding: q.
        examples: by how many examples the peer counts; with another number it takes its step alone.
    """

    peer: int
    round_index: int
    session: PairSession
    partners: Mapping[int, Partner]
    colluding: int
    examples: float

    def noised(self, values: np.ndarray, std: float, weight: float) -> np.ndarray:
        """Return an update with its noise, float64 [d].

        Args:
            values: the clipped update, float64 [d].
            std: the standard deviation of the noise that the peer needs by itself.
            weight: how often the update will count in what the peer adds to the sum.
        """
        terms = self.session.terms
        partners = self.partners
        # Partners rely on the scale that was announced.
        is_as_announced = weight == self.examples and math.isclose(terms.needed, weight * std, rel_tol=1e-12)
        if not is_as_announced or not partners or not self.session.begin(self.round_index):
            partners = {}

        total = values.copy()
        for other, partner in partners.items():
            scale = std / terms.needed * math.sqrt(pair_square(terms, partner.terms))
            sign = 1.0 if self.peer < other else -1.0
            add_drawn_(total, self._key(partner), sign * scale)

        own = own_noise(terms, [partner.terms for partner in partners.values()], self.colluding)
        return exactly_noised(total, std * own * SLACK)

    def _key(self, partner: Partner) -> bytes:
        purpose = f"round {self.round_index}".encode()
        return HKDF(SHA256(), KEY, b"flower_privdec draw", purpose).derive(partner.secret)


def add_drawn_(total: np.ndarray, key: bytes, scale: float) -> None:
    """Add the normals of a key, times a scale, to a vector in place; the same numbers whoever draws them."""
    normals = SystemNormals(key_stream(key), total.size)
    for start in range(0, total.size, PIECE):
        part = total[start : start + PIECE]
        part += scale * normals.draw(part.size)


Refuse = Callable[[int, RefusedError], None]


def partners_of(
    introductions: Introductions, session: PairSession, announced: Mapping[int, bytes], refuse: Refuse
) -> dict[int, Partner]:
    """Return the partners of a round: all that announced themselves and can be one.

    Args:
        announced: what the peers of the round announced to this one.
        refuse: called with each peer that is refused, and why.
    """
    partners = {}
    for other, announcement in announced.items():
        try:
            partners[other] = introductions.heard(session, other, announcement)
        except RefusedError as error:
            refuse(other, error)
    return partners


def check_pairs(noise: AppNoiseSection, n_peers: int, owners_colluding: int | None, pinned: bool) -> None:
    """Refuse noise that cannot cancel here, before anything is trained.

    Args:
        noise: what the app asks for.
        n_peers: how many peers there are.
        owners_colluding: the fewest colluding peers that the node's owner asks for; None if the owner says nothing.
        pinned: whether the owner names the others' identities; a simulation needs neither.

    Raises:
        RunError: with the remedy.
    """
    spare = n_peers - 1 - noise.colluding - noise.absent
    if spare < 1:
        raise RunError(
            f"noise.colluding={noise.colluding} and noise.absent={noise.absent} of {n_peers} peers leave no partner "
            f"whose noise hides an update: their sum must be < {n_peers - 1}, or leave noise out",
            code="noise.app-partners",
        )

    if owners_colluding is None or not pinned:
        raise RunError(
            "noise={'kind': 'cancelling'} is for this SuperNode's owner to allow, who names the others' keys in a file "
            '{"PEER": "KEY"} (its own is in identity.pub in its folder), and how many peers may collude: start it with '
            """--node-config '... known-peers="FILE" colluding=Q'""",
            code="noise.app-owner",
        )
    if noise.colluding < owners_colluding:
        raise RunError(
            f"noise.colluding={noise.colluding} must be >= colluding={owners_colluding} of this SuperNode's "
            "node-config, because its epsilon must hold against as many: raise it in PeerMod",
            code="noise.app-colluding",
        )


def announced_to(
    introductions: Introductions, session: PairSession, others: Sequence[int]
) -> tuple[dict[int, bytes], dict[int, str]]:
    """Return a session's announcement for each of some peers, and why there is none for others."""
    announcements = {}
    refused = {}
    for other in others:
        try:
            announcements[other] = introductions.announce(session, other)
        except RefusedError as error:
            refused[other] = str(error)
    return announcements, refused
