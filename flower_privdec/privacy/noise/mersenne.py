"""Whole states for torch's CPU generator, a Mersenne Twister whose own seeding keeps only 32 bits of a seed.

A state is filled from SplitMix64 streams, the usual way of filling a state from a key, because NumPy runs these for
many rows at once. Number n of the stream of key k is mix(k + n GAMMA mod 2**64), one to one in n.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

WORDS = 624  # of 32 bits, in a state
_HALF = WORDS // 4  # numbers of 64 bits that each of two streams gives to a state
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_HEAD = 24  # bytes before the words in torch's state: seed, words left, flag, next word
_AT_ONCE = 32  # states made at a time
_PROBE = 12345  # a seed


def splitmix(keys: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return number n of the SplitMix64 stream of key k; uint64, shapes broadcast."""
    z = keys + numbers * _GAMMA
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def twister_words(keys: np.ndarray, block: int) -> np.ndarray:
    """Return the words of a state for each row, uint32 [m, 624].

    Half of them come from each of two streams, so a state depends on 128 bits of key; blocks share no number of
    these streams.

    Args:
        keys: uint64 [m, 2].
        block: 0 <= block < 2**32.
    """
    numbers = np.arange(_HALF, dtype=np.uint64) + np.uint64(block * _HALF)
    return splitmix(keys[:, :, None], numbers).view(np.uint32).reshape(len(keys), WORDS)


class Twister:
    """torch's CPU generator, to be started from any states.

    Attributes:
        generator: the generator, at the start of what `starts` chose last.
    """

    def __init__(self) -> None:
        """Find the words in torch's state.

        Raises:
            RuntimeError: torch keeps them otherwise than every version so far.
        """
        self.generator = torch.Generator().manual_seed(_PROBE)
        states = self.generator.get_state().repeat(_AT_ONCE, 1).numpy()
        words = states[:, _HEAD : _HEAD + 8 * WORDS]
        if words.shape[1] != 8 * WORDS or not np.array_equal(words[0].view(np.uint64), _seeded_words(_PROBE)):
            raise RuntimeError(f"torch {torch.__version__} keeps its CPU generator's state in an unknown form")
        self._words = words.view(np.uint64)
        self._states = [torch.from_numpy(state) for state in states]  # set_state crashes on torch's views of a tensor

    def starts(self, keys: np.ndarray, block: int) -> Iterator[None]:
        """Start the generator from the state of each row, one after the other; see `twister_words`."""
        for first in range(0, len(keys), _AT_ONCE):
            part = keys[first : first + _AT_ONCE]
            self._words[: len(part)] = twister_words(part, block)
            for state in self._states[: len(part)]:
                self.generator.set_state(state)
                yield


def _seeded_words(seed: int) -> np.ndarray:
    """Return the words with which a Mersenne Twister starts from a seed of 32 bits (Matsumoto and Nishimura, 2002)."""
    words = [seed]
    for index in range(1, WORDS):
        words.append((1812433253 * (words[-1] ^ (words[-1] >> 30)) + index) % 2**32)
    return np.array(words, dtype=np.uint64)
