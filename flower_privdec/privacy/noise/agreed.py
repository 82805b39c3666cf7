"""Secrets of pairs of peers in different processes, by X25519; none outlives the process, or session, of either.

Each process draws a private key, sends its public key to the others (`public`), and learns theirs (`learn`). From then
on both ends of a pair compute the same secret (`of`), and no one else can.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.privacy.noise.source import PairSecrets

KEY = 32  # bytes of a public key, and of a secret


class _Promised(NamedTuple):
    """What noise of its own a process of a peer adds at least in steps [first, end), over what the peer needs."""

    public: bytes
    first: int
    end: int
    level: float


class SessionSecrets(PairSecrets):
    """Secrets of one process with others, whose public keys are passed on (`pushsum.roster`).

    Attributes:
        public: its own public key, 32 bytes.
        partners: the peers elsewhere with which noise is shared.
        absent: peers elsewhere with which no noise is shared for now, whatever is known of their keys.
        left_out: the round since which that is so, of partners that do not get on.
    """

    public: bytes
    partners: frozenset[int] = frozenset()
    absent: frozenset[int] = frozenset()
    left_out: Mapping[int, int] = MappingProxyType({})

    def promise(self, first: int, end: int, level: float) -> tuple[int, int]:
        """Bind this process to add noise of its own in steps [first, end), see `mechanism.partners`.

        Args:
            level: how much at least, over what the peer would need by itself, in (0, 1].

        Returns:
            The steps [first, end) for which it may say so: it has not taken them, or has kept to it in them. By
            default none.
        """
        return first, first

    def hear(self, other: int, public: bytes, first: int, end: int, level: float) -> None:
        """Take what a process of another peer has promised, in place of what was heard of that peer before.

        The caller must know that it is the peer that promised it. It counts as long as the process is the one of which
        the public key was learned last.

        Args:
            public: the public key of the process.
            first, end, level: see `promise`.
        """

    def learn(self, other: int, public: bytes) -> None:
        """Take the public key of another peer's process, in place of that of the one before.

        Raises:
            ValueError: no secret can be made of it.
        """


class AgreedSecrets(SessionSecrets):
    """The secrets of the peers of one process and others, each known only to the processes of the two.

        secret = HKDF(X25519(own key, the other's public key), run, both peers, identities and public keys)

    The key is drawn when the process begins, stays in its memory, and ends with it. So what two processes draw from
    their secret for a step, no other process of either peer draws again, whatever was restored, copied or restarted.

    The caller of `learn` must know whose a public key is, so that no third party can put one in between: the identity
    of the peer has signed the key (`pushsum.roster`), or identities vouch for it (`flower.pair_keys`).

    Args:
        peers: those of this process; what two of them share follows from its private key alone.
        run: what all peers of the run agree on.
        identities: the identities of all peers.
        private: the private key, 32 bytes, of a session that goes on in several processes; by default a new one.
        partners: the peers elsewhere with which noise is shared.

    Attributes:
        public, partners, absent, left_out: see SessionSecrets.

    Raises:
        ScenarioError: the package cryptography is not installed.
    """

    def __init__(
        self,
        peers: Collection[int],
        run: bytes,
        identities: Sequence[str],
        private: bytes | None = None,
        partners: Collection[int] = (),
    ) -> None:
        try:
            from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
        except ImportError as error:
            raise ScenarioError(
                "secrets of pairs of peers need cryptography, which is not installed: pip install cryptography",
                code="noise.cryptography",
            ) from error

        super().__init__({}, simulated=False)
        self._peers = frozenset(peers)
        self._run = run
        self._identities = identities
        self.partners = frozenset(partners)

        if private is None:
            self._key = X25519PrivateKey.generate()
        else:
            self._key = X25519PrivateKey.from_private_bytes(private)
        self.public = self._key.public_key().public_bytes_raw()
        self._public_of: dict[int, bytes] = {}  # the public key of each peer elsewhere
        self._common_with: dict[int, bytes] = {}  # what only it and this process know
        self._secret_of: dict[tuple[int, int], bytes] = {}  # of pairs, by the keys that are known now

        self._own_promises: list[_Promised] = []
        self._heard: dict[int, _Promised] = {}  # by peer, what its process has promised
        self._next_step = 0  # the first of which this process has not asked what it has promised

    def learn(self, other: int, public: bytes, vouched: bytes = b"") -> None:
        """Take the public key of another peer's process, in place of that of the one before.

        Args:
            other: the peer.
            public: the key.
            vouched: what only the identities of the two processes know, so that a secret is theirs.

        Raises:
            ValueError: no secret can be made of it, or it is this process's own.
        """
        if self._public_of.get(other) == public:
            return

        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        if public == self.public:
            raise ArgumentError("it is the key of this process", code="noise.own-key")
        common = self._key.exchange(X25519PublicKey.from_public_bytes(public))
        self._public_of[other] = public
        self._common_with[other] = common + vouched
        self._secret_of = {pair: secret for pair, secret in self._secret_of.items() if other not in pair}

    def promise(self, first: int, end: int, level: float) -> tuple[int, int]:
        """See SessionSecrets."""
        level = min(level, 1.0)
        past = self._next_step
        has_kept = [one for one in self._own_promises if one.first <= first and past <= one.end and level <= one.level]
        if not has_kept:
            first = max(first, past)
        self._own_promises = [one for one in self._own_promises if past <= one.end]
        if first < end:
            self._own_promises.append(_Promised(self.public, first, end, level))
        return first, end

    def hear(self, other: int, public: bytes, first: int, end: int, level: float) -> None:
        """See SessionSecrets."""
        self._heard[other] = _Promised(public, first, end, level)

    def promised(self, peer: int, step: int) -> float:
        """See PairSecrets."""
        if peer in self._peers:
            # Whoever asks takes the step now.
            self._next_step = max(self._next_step, step + 1)
            return max((one.level for one in self._own_promises if one.first <= step < one.end), default=0.0)

        heard = self._heard.get(peer)
        if heard is None or heard.public != self._public_of.get(peer) or not heard.first <= step < heard.end:
            return 0.0
        return heard.level if 0 < heard.level <= 1 else 0.0

    def knows(self, peer: int, other: int) -> bool:
        """See PairSecrets."""
        return self._has_met(peer, other) and not self.absent & {peer, other}

    def _has_met(self, peer: int, other: int) -> bool:
        """Return whether this process can make the secret of two peers."""
        pair = {peer, other}
        here = pair & self._peers
        elsewhere = pair - self._peers
        return len(pair) == 2 and bool(here) and elsewhere <= self._public_of.keys()

    def of(self, peer: int, other: int) -> bytes:
        """See PairSecrets.

        Raises:
            ScenarioError: this process hosts neither of the two, or has not heard the other yet.
        """
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        if not self._has_met(peer, other):
            raise ScenarioError(
                f"the process of peers {sorted(self._peers)} has no secret of peers {peer} and {other}: it has one "
                "with each peer that it has heard",
                code="noise.pair-secret",
            )

        first, second = sorted((int(peer), int(other)))
        pair = (first, second)
        known = self._secret_of.get(pair)
        if known is not None:
            return known

        elsewhere = {*pair} - self._peers
        if elsewhere:
            common = self._common_with[min(elsewhere)]
        else:
            # Two peers of this process: a secret that follows from its private key.
            common = self._key.exchange(self._key.public_key())

        named = []
        for one in pair:
            public = self._public_of[one] if one in elsewhere else self.public
            named.append((one, self._identities[one], public))
        names = repr(named).encode()
        derived = HKDF(SHA256(), KEY, salt=self._run, info=b"flower_privdec pair noise" + names).derive(common)
        self._secret_of[pair] = derived
        return derived
