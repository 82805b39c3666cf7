"""Keys and what follows from them: public draws from a seed that all know, private ones from a peer's secret key.

Whoever lacks the key can neither repeat nor predict what it decides, and two keys share nothing. Keys are never
printed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np

Secret = int | bytes
KEY_BYTES = 16  # the fewest


def digest(size: int, *parts: object) -> bytes:
    """Return the BLAKE2b hash, of `size` bytes, of integers, strings, bytes and tuples of these."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=size).digest()


def keyed_generator(secret: Secret, purpose: str, *numbers: int) -> np.random.Generator:
    """Return the NumPy generator of one (secret, purpose, numbers): always the same stream, unrelated to any other.

    Args:
        secret: the scenario's seed for what all peers know; a peer's key, of 16 bytes or more, for what it alone does.
        purpose: what the numbers are for, such as "sampling".
        numbers: any integers, such as the round and the global peer id.

    Returns:
        A Philox generator whose 128-bit key is the BLAKE2b hash of all arguments.

    Raises:
        ValueError: the key is too short.

    Examples:
        >>> one, again = (keyed_generator(7, "sampling", 3).random() for _ in range(2))
        >>> one == again
        True
        >>> one == keyed_generator(7, "sampling", 4).random()
        False
    """
    known = checked_key(secret) if isinstance(secret, bytes) else int(secret)
    key = digest(16, known, str(purpose), tuple(int(number) for number in numbers))
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def seed_keys(seed: int, peers: Iterable[int]) -> dict[int, bytes]:
    """Return a key for each peer that follows from a seed, for tests and timings: whoever knows the seed has them all.

    Args:
        seed: any integer.
        peers: global ids.
    """
    return {int(peer): digest(32, int(seed), "peer key", int(peer)) for peer in peers}


def checked_key(key: bytes) -> bytes:
    """Return the key itself if it is long enough to be one.

    Raises:
        ValueError: it is not bytes, or shorter than 16.
    """
    if not isinstance(key, bytes):
        raise ValueError(f"a key must be bytes, not {type(key).__name__}")
    if len(key) < KEY_BYTES:
        raise ValueError(f"a key of {len(key)} bytes must have at least {KEY_BYTES}: take os.urandom(32) or a hash")
    return key


class PeerKeys:
    """The keys of the peers that one process hosts.

    A peer's place among them, by ascending id, is its slot.
    """

    def __init__(self, keys: Mapping[int, bytes]) -> None:
        """Keep a copy of the keys.

        Args:
            keys: from global peer id to key.

        Raises:
            ValueError: a key is no key.
        """
        self._peers = np.array(sorted(keys), dtype=np.int64)
        self._keys = [checked_key(keys[peer]) for peer in self._peers.tolist()]
        self._tables: dict[tuple[str, int], np.ndarray] = {}

    def slots(self, peers: np.ndarray) -> np.ndarray:
        """Return the slots of some peers, int64 [m].

        Raises:
            ValueError: one of them has no key here.
        """
        slots = self._peers.searchsorted(peers)
        held = self._peers.take(slots, mode="clip") if len(self._peers) else np.full(len(slots), -1)
        if (held != peers).any():
            raise ValueError(f"peers {peers[held != peers].tolist()} have no key here: ask only for peers hosted here")
        return slots

    def table(self, purpose: str, words: int) -> np.ndarray:
        """Return some words that follow from each slot's key, its id and a purpose, uint64 [peers, words]."""
        if (purpose, words) not in self._tables:
            pairs = zip(self._keys, self._peers.tolist(), strict=True)
            found = b"".join(digest(8 * words, key, "noise", purpose, peer) for key, peer in pairs)
            self._tables[purpose, words] = np.frombuffer(found, np.uint64).reshape(-1, words)
        return self._tables[purpose, words]
