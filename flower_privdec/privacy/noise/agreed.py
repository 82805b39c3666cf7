"""Secrets that a networked peer agrees on with its neighbours, by X25519; none outlives its process."""

from __future__ import annotations

from collections.abc import Sequence

from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.privacy.noise.source import PairSecrets

KEY = 32  # bytes of a public key, and of a secret


class AgreedSecrets(PairSecrets):
    """The secrets of one peer and others, each known to the two alone.

        secret = HKDF(X25519(own key, the other's public key), run, both identities, both public keys)

    The key is drawn when the process begins, stays in its memory, and ends with it. So what two processes draw from
    their secret for a step, no other process of either peer draws again, whatever was restored, copied or begun again.

    Public keys come from neighbours whose certificate the transport has verified, so that no third party can put a key
    in between.

    Args:
        peer: its number.
        run: what all peers of the run agree on.
        identities: of all peers.

    Attributes:
        public: the public key, 32 bytes.

    Raises:
        ScenarioError: the package cryptography is not installed.
    """

    def __init__(self, peer: int, run: bytes, identities: Sequence[str]) -> None:
        try:
            from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
        except ImportError as error:
            raise ScenarioError(
                "secrets of pairs of peers need cryptography, which is not installed: pip install cryptography",
                code="noise.cryptography",
            ) from error
        super().__init__({}, simulated=False)
        self._peer, self._run, self._identities = peer, run, identities
        self._key = X25519PrivateKey.generate()
        self.public: bytes = self._key.public_key().public_bytes_raw()
        self._theirs: dict[int, tuple[bytes, bytes]] = {}  # public key and secret of each neighbour, as it is now

    def learn(self, other: int, public: bytes) -> None:
        """Take the public key of a neighbour's process, in place of that of the one before.

        Raises:
            ValueError: no secret can be made of it, or it is this process's own.
        """
        if self._theirs.get(other, (b"",))[0] == public:
            return
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        if public == self.public:
            raise ArgumentError("it is the key of this process", code="noise.own-key")
        common = self._key.exchange(X25519PublicKey.from_public_bytes(public))
        ends = sorted([(self._peer, self.public), (other, public)])
        names = repr([(self._identities[one], key) for one, key in ends]).encode()
        secret = HKDF(SHA256(), KEY, salt=self._run, info=b"flower_privdec pair noise" + names).derive(common)
        self._theirs[other] = public, secret

    def knows(self, peer: int, other: int) -> bool:
        """See PairSecrets."""
        return self._peer in (peer, other) and ({peer, other} - {self._peer}) <= self._theirs.keys()

    def of(self, peer: int, other: int) -> bytes:
        """See PairSecrets.

        Raises:
            ScenarioError: this peer is neither of the two, or has not heard the other yet.
        """
        if not self.knows(peer, other) or peer == other:
            raise ScenarioError(
                f"peer {self._peer} has no secret of peers {peer} and {other}: it has one with each neighbour that it "
                "has heard",
                code="noise.pair-secret",
            )
        (partner,) = {peer, other} - {self._peer}
        return self._theirs[partner][1]
