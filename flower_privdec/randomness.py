"""Random numbers keyed by (seed, purpose, round, peer): the same for any cohort, any order and any resume."""

from __future__ import annotations

import hashlib

import numpy as np


def keyed_generator(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """Return the NumPy generator of one (seed, purpose, key): always the same stream, unrelated to any other.

    Args:
        seed: the scenario's seed.
        purpose: what the numbers are for, such as "sampling".
        key: any integers, such as the round and the global peer id.

    Returns:
        A Philox generator whose 128-bit key is the BLAKE2b hash of all arguments.
    """
    text = repr((int(seed), str(purpose), tuple(int(part) for part in key)))
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
