"""The network's mean for who may not read a peer's model: masks that cancel in the sum of all.

Each two peers share a key (`identity.Identity`) and from it a stream of numbers, which one adds and the other
subtracts. The sum over all of them is the sum of their numbers, exactly, in whole numbers modulo 2^64; any sum over
fewer is noise.

A ServerApp that chooses the sets could solve for one model, so a peer is in no sum of fewer than `mean-peers` peers of
its node-config (by default all), nor in two sums whose sets differ by fewer (`check_set`), and hands in each of its
states once (`Handed`). A peer that does not answer spoils its round's mean.

What remains: a ServerApp may depart from the protocol between two sums over one set. By weights and withheld shares it
moves mass out of one peer's model alone, and by a learning rate of zero it stops an app's training. What it then finds
is a peer's model with the noise of all its updates, of which the peer's ε holds; an unprotected peer has no noise. The
same is left if it keeps all others from a step, as by withheld reports of ledgers: they enter its mean as zero. It
could also introduce peers of its own making, unless the owners pin keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from flower_privdec.common.errors import RunError
from flower_privdec.pushsum.exactly_once import RefusedError

# One number is a/2^20 + b/2^70, with |a| < 2^43 and |b| <= 2^49
COARSE = 2.0**20
FINE = 2.0**50
LARGEST = 2.0**43 / COARSE  # of a number, so that 2^20 peers' sums stay inside 2^63


def check_set(peers: Collection[int], peer: int, least: int, served: Iterable[Collection[int]]) -> None:
    """Refuse a set whose sum, alone or less an earlier one, is over fewer than `least` peers.

    Args:
        peers: ids, whose sum is requested.
        peer: this peer, which must be one of several.
        served: the sets of earlier sums.

    Raises:
        RefusedError: naming the sets.
    """
    remedy = "ask for the mean over the same peers each time, or set mean-peers in the node-configs"
    if peer not in peers or len(set(peers)) < max(2, least):
        raise RefusedError(
            f"a sum over peers {sorted(peers)} must be over at least {max(2, least)}, peer {peer} among them: {remedy}",
            code="masking.few-peers",
        )
    for earlier in served:
        if 0 < len(set(peers) ^ set(earlier)) < least:
            raise RefusedError(
                f"sums over peers {sorted(peers)} and {sorted(earlier)} would differ by fewer than {least}: {remedy}",
                code="masking.near-sets",
            )


@dataclass(frozen=True)
class Handed:
    """What a peer handed in for masked sums of a run. Each of its states enters one sum.

    Attributes:
        label: of the last sum, which rises: the round for which it was.
        round_index: the last round that the peer took part in then.
        digest: of the numbers; the same request may come again for the same numbers, and gets the same bytes.
        served: the sets of peers, without repetition, the last one last.
    """

    label: int = -1
    round_index: int = -1
    digest: str = ""
    served: list[list[int]] = field(default_factory=list)

    def after(self, label: int, round_index: int, values: np.ndarray, peers: Collection[int]) -> Handed:
        """Return the record with one more sum.

        Raises:
            RefusedError: the peer took part in no round since the last one.
        """
        digest = hashlib.sha256(values.tobytes()).hexdigest()
        wanted = sorted(set(peers))
        again = (label, digest, wanted) == (self.label, self.digest, (self.served or [[]])[-1])
        if not again and not (round_index > self.round_index and label > self.label):
            raise RefusedError(
                f"the state after round {round_index} entered a sum already, that of round {self.label}: train a round "
                "before the next mean",
                code="masking.same-state",
            )
        return Handed(label, round_index, digest, [peers for peers in self.served if peers != wanted] + [wanted])


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
        raise RunError(
            f"the mean of sealed models needs all numbers below {LARGEST:g}; this peer's are not",
            code="masking.too-large",
        )
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
