"""Secrets of pairs of peers in different processes, by X25519; none outlives the process, or session, of either."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.privacy.noise.source import PairSecrets

KEY = 32  # bytes of a public key, and of a secret


class AgreedSecrets(PairSecrets):
    """The secrets of the peers of one process and others, each known to the processes of the two alone.

        secret = HKDF(X25519(own key, the other's public key), run, both peers, identities and public keys)

    The key is drawn when the process begins, stays in its memory, and ends with it. So what two processes draw from
    their secret for a step, no other process of either peer draws again, whatever was restored, copied or begun again.

    Who calls `learn` knows whose a public key is, so that no third party can put one in between: the transport has
    verified a neighbour's certificate, or identities vouch for the key.

    Args:
        peers: those of this process; what two of them share follows from its private key alone.
        run: what all peers of the run agree on.
        identities: of all peers.
        private: the private key, 32 bytes, of a session that takes several processes; by default a new one.

    Attributes:
        public: the public key, 32 bytes.

    Raises:
        ScenarioError: the package cryptography is not installed.
    """

    def __init__(
        self, peers: Collection[int], run: bytes, identities: Sequence[str], private: bytes | None = None
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
        self._key = X25519PrivateKey.generate() if private is None else X25519PrivateKey.from_private_bytes(private)
        self.public: bytes = self._key.public_key().public_bytes_raw()
        self._theirs: dict[int, tuple[bytes, bytes]] = {}  # of each peer elsewhere: public key, what only both know

    def learn(self, other: int, public: bytes, vouched: bytes = b"") -> None:
        """Take the public key of another peer's process, in place of that of the one before.

        Args:
            other: the peer.
            public: the key.
            vouched: what the identities of the two processes alone know; without it a secret is not theirs.

        Raises:
            ValueError: no secret can be made of it, or it is this process's own.
        """
        if self._theirs.get(other, (b"",))[0] == public:
            return
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        if public == self.public:
            raise ArgumentError("it is the key of this process", code="noise.own-key")
        self._theirs[other] = public, self._key.exchange(X25519PublicKey.from_public_bytes(public)) + vouched

    def knows(self, peer: int, other: int) -> bool:
        """See PairSecrets."""
        pair = {peer, other}
        return len(pair) == 2 and bool(pair & self._peers) and pair - self._peers <= self._theirs.keys()

    def of(self, peer: int, other: int) -> bytes:
        """See PairSecrets.

        Raises:
            ScenarioError: this process hosts neither of the two, or has not heard the other yet.
        """
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        if not self.knows(peer, other):
            raise ScenarioError(
                f"the process of peers {sorted(self._peers)} has no secret of peers {peer} and {other}: it has one "
                "with each peer that it has heard",
                code="noise.pair-secret",
            )
        elsewhere = {peer, other} - self._peers
        own = self._key.public_key()
        common = self._theirs[min(elsewhere)][1] if elsewhere else self._key.exchange(own)
        publics = {one: self._theirs[one][0] if one in elsewhere else self.public for one in sorted((peer, other))}
        names = repr([(one, self._identities[one], public) for one, public in publics.items()]).encode()
        return HKDF(SHA256(), KEY, salt=self._run, info=b"flower_privdec pair noise" + names).derive(common)
