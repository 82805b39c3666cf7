"""Who a relayed peer is: its key, whose key is whose, and the seal that only the receiver of a share can open."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from flower_privdec.common.arguments import check_paths
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.common.files import write_atomically
from flower_privdec.pushsum.exactly_once import RefusedError

IDENTITY = "identity.key"
PUBLIC = "identity.pub"
KNOWN = "known-peers.json"
SALT = 16  # bytes, as the two below
KEY = 32
TAG = 16
_NONCE = bytes(12)  # each key seals one message


class Identity:
    """A peer's X25519 key, made by the operating system's entropy at first use and kept in its folder.

    The public half is beside it in hexadecimal, to be pinned by others.
    """

    def __init__(self, folder: Path) -> None:
        """Read the key, or make it.

        Raises:
            RunError: the file is not a key.
        """
        path = folder / IDENTITY
        if not path.exists():
            write_atomically(path, os.urandom(KEY))
        content = path.read_bytes()
        if len(content) != KEY:
            raise RunError(
                f"{path} must hold {KEY} bytes and has {len(content)}; restore it, or delete it for a new one"
            )
        self._private = X25519PrivateKey.from_private_bytes(content)
        self._shared: dict[bytes, bytes] = {}  # by public key: the secret of both, which is always the same
        self.public = self._private.public_key().public_bytes_raw()
        if not (folder / PUBLIC).exists():
            write_atomically(folder / PUBLIC, self.public.hex().encode() + b"\n", public=True)

    def key_for(self, public: bytes, salt: bytes, purpose: bytes) -> bytes:
        """Return a key that this peer and the owner of a public key share, and no one else.

        Raises:
            RefusedError: it is not a public key.
        """
        secret = self._shared.get(public)
        if secret is None:
            try:
                secret = self._private.exchange(X25519PublicKey.from_public_bytes(public))
            except ValueError as error:
                raise RefusedError(f"{public.hex()!r} is not a public key") from error
            self._shared[public] = secret
        both = b"".join(sorted((self.public, public)))
        return HKDF(SHA256(), KEY, salt, b"flower-privdec 1 " + purpose + both).derive(secret)


def public_key(folder: Path | str) -> str:
    """Return the public key of the peer whose folder this is, in hexadecimal; made if it has none.

    It is what other peers pin: a JSON file of peer ids and keys, named by `known-peers` in their node-config.

    Raises:
        ScenarioError: the folder cannot be made.
    """
    check_paths({"folder": folder})
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ScenarioError(f"folder={str(folder)!r} cannot be made ({error.strerror}); give another") from error
    return Identity(Path(folder)).public.hex()


class KnownPeers:
    """Whose key is whose, as one peer has it: pinned by its owner, or as first seen.

    Args:
        folder: the peer's, which keeps what is first seen.
        pinned: a JSON file {"PEER": "PUBLIC KEY IN HEXADECIMAL", ...} of the owner's; then no one else is known.

    Raises:
        RunError: a file cannot be read.
    """

    def __init__(self, folder: Path, pinned: Path | None = None) -> None:
        self._path = folder / KNOWN if pinned is None else pinned
        self._pinned = pinned is not None
        self._keys: dict[int, bytes] = {}
        self._claimed: dict[int, bytes] = {}
        if self._pinned or self._path.exists():
            self._keys = _read_keys(self._path)

    def meet(self, introduced: dict[int, bytes]) -> None:
        """Take note of the keys that the relay introduces; one that is known is not replaced."""
        new = {peer: key for peer, key in introduced.items() if peer not in self._keys}
        if new and not self._pinned:
            self._keys |= new
            text = json.dumps({str(peer): key.hex() for peer, key in sorted(self._keys.items())}, indent=1)
            write_atomically(self._path, text.encode())
        self._claimed = introduced

    def key(self, peer: int) -> bytes:
        """Return a peer's key.

        Raises:
            RefusedError: it is unknown, or the relay says another one.
        """
        known = self._keys.get(peer)
        if known is None:
            raise RefusedError(f"peer {peer} has no key in {self._path}: add it there")
        if self._claimed.get(peer, known) != known:
            raise RefusedError(
                f"the key of peer {peer} is not the one in {self._path}: a man in the middle, or it has a new "
                "identity; compare its identity.pub, and change that line only then"
            )
        return known


@dataclass(eq=False)
class PeerSeal:
    """Seals shares end to end: X25519 between two peers' keys, HKDF, ChaCha20-Poly1305; see `pushsum.frames.Seal`.

    What it is against: the relay (the ServerApp, the SuperLink, who reads their disks or the line) neither reads a
    share or a ledger report nor changes it, nor passes one off as another's, another edge's, another run's or another
    number's: all of
    these are in the header, which is authenticated. Every sealed frame has a salt, and so a key, of its own, so no
    nonce is used twice.

    What it is not against: the relay also introduces the peers to each other. A relay that swaps keys in that first
    introduction is the man in the middle of all that follows. Pin the keys to rule that out: give each SuperNode a file
    of its peers' public keys, carried there by hand (`known-peers` in its node-config). Without one a key is trusted
    when it is first seen, and refused when it changes later. A thief of a peer's identity file reads what was sealed
    for it, before and after: there is no forward secrecy. Senders, receivers, times and sizes are open.
    """

    identity: Identity
    known: KnownPeers
    overhead: int = SALT + TAG

    def encrypt(self, receiver: int, header: bytes, body: bytes) -> list[bytes]:
        """See Seal."""
        salt = os.urandom(SALT)
        key = self.identity.key_for(self.known.key(receiver), salt, b"share")
        return [salt, ChaCha20Poly1305(key).encrypt(_NONCE, body, header)]

    def decrypt(self, sender: int, header: bytes, body: memoryview) -> bytes:
        """See Seal.

        Raises:
            RefusedError: it was not sealed by that peer for this one with that header, or was changed since.
        """
        key = self.identity.key_for(self.known.key(sender), bytes(body[:SALT]), b"share")
        try:
            return ChaCha20Poly1305(key).decrypt(_NONCE, body[SALT:], header)
        except InvalidTag as error:
            raise RefusedError(
                "its seal is broken: it was changed, or sealed with another key", code="share.seal"
            ) from error


def _read_keys(path: Path) -> dict[int, bytes]:
    try:
        return {int(peer): bytes.fromhex(key) for peer, key in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise RunError(f'{path} must be a JSON file {{"PEER": "KEY IN HEXADECIMAL"}}: {error}') from error
