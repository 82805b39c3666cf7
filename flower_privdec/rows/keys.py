"""Keyed random streams: public ones from the scenario's seed, private ones from a peer's secret key.

Without the key the draws can be neither repeated nor predicted, and two keys give independent streams. Keys are never
printed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

Secret = int | bytes
KEY_BYTES = 16  # the least length of a key


class WeakKeyError(ValueError):
    """A key is too short to be secret, or is not bytes."""


def digest(size: int, *parts: object) -> bytes:
    """Return the BLAKE2b hash, of `size` bytes, of integers, strings, bytes and tuples of these."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=size).digest()


def keyed_generator(secret: Secret, purpose: str, *numbers: int) -> np.random.Generator:
    """Return the NumPy generator of one (secret, purpose, numbers): always the same stream, unrelated to any other.

    Args:
        secret: the scenario's seed for draws that all peers know; a peer's key, of 16 bytes or more, for its own draws.
        purpose: the use of the numbers, such as "sampling".
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
    source: Secret = int(secret) if not isinstance(secret, bytes) else checked_key(secret)
    # Types matter: the hash tells 3 from "3", and NumPy's integers must not count as others than Python's.
    key = digest(16, source, str(purpose), tuple(int(number) for number in numbers))
    words: Any = _Words(key)  # NumPy takes any ISeedSequence; its types name only its own
    return np.random.Generator(np.random.Philox(words))


class _Words(ISeedSequence):
    """A key of Philox as NumPy asks a seed for it.

    `Philox(key=...)` gives the same generator, but first gathers entropy of the operating system, which it does not
    use and which takes most of the time.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        """Return the words of the key, all of them once."""
        words = np.frombuffer(self.key, np.dtype(dtype).newbyteorder("<")).astype(dtype)
        if len(words) != n_words:
            raise ValueError(f"{n_words} words are asked of a key that has {len(words)}")
        return words


def seed_keys(seed: int, peers: Iterable[int]) -> dict[int, bytes]:
    """Return a key for each peer that follows from a seed, for tests and timings; who has the seed has all keys.

    Args:
        seed: any integer.
        peers: global ids.
    """
    return {int(peer): digest(32, int(seed), "peer key", int(peer)) for peer in peers}


def checked_key(key: bytes) -> bytes:
    """Return the key itself if it is long enough.

    Raises:
        WeakKeyError: it is not bytes, or shorter than 16.
    """
    if not isinstance(key, bytes):
        raise WeakKeyError(f"a key must be bytes, not {type(key).__name__}")
    if len(key) < KEY_BYTES:
        raise WeakKeyError(f"a key of {len(key)} bytes must have at least {KEY_BYTES}: take os.urandom(32) or a hash")
    return key
