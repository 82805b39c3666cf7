"""The network's mean for who may not read a peer's model: masks that cancel in the sum of all.

Each two peers share a key (`peer_state.Identity`) and from it a stream of numbers, which one adds and the other
subtracts. The sum over all of them is the sum of their numbers, exactly, in whole numbers modulo 2^64; any sum over
fewer is noise.

What the ServerApp learns is the sum, once a round. What it could do: ask for sums over different peers in different
rounds, and subtract; or introduce peers of its own making, so that all the others but one are its own. What it finds
then is a peer's model with all its noise, of which the peer's ε holds. A peer that does not answer spoils its round's
mean, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from flower_privdec.errors import RunError

COARSE, FINE = 2.0**20, 2.0**50  # one number is a/2^20 + b/2^70, with |a| < 2^43 and |b| <= 2^49
LARGEST = 2.0**43 / COARSE  # of a number, so that 2^20 peers' sums stay inside 2^63


def masked(values: np.ndarray, peer: int, others: Iterable[int], key: Callable[[int], bytes]) -> np.ndarray:
    """Return values with one mask for each other peer.

    Args:
        values: finite, float64 [d].
        peer, others: ids; the mask is added towards higher ids and subtracted towards lower ones.
        key: a secret of this peer and another one, 32 bytes, of this round alone.

    Returns:
        uint64 [2, d].

    Raises:
        RunError: a value is too large to be masked.
    """
    if not (np.abs(values) < LARGEST).all():
        raise RunError(f"the mean of sealed models needs all numbers below {LARGEST:g}; this peer's are not")
    coarse = np.round(values * COARSE)
    fine = np.round((values - coarse / COARSE) * COARSE * FINE)
    total = np.stack([coarse, fine]).astype(np.int64).view(np.uint64)
    for other in others:
        mask = _stream(key(other), total.size).reshape(total.shape)
        total = total + mask if peer < other else total - mask
    return np.asarray(total)


def unmasked_sum(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Return the sum of what all peers masked, float64 [d]; without one of them it is noise."""
    total = np.asarray(np.sum(np.stack(list(parts)), axis=0, dtype=np.uint64)).view(np.int64)
    return np.asarray(total[0] / COARSE + total[1] / COARSE / FINE)


def _stream(key: bytes, count: int) -> np.ndarray:
    """Return numbers that are pseudorandom without the key, uint64 [count]."""
    encryptor = Cipher(AES(key), CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * count)), dtype="<u8")
