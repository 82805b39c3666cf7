"""Exact tails for torch's normals, which end at 5.8 in float32 and at 8.6 in float64.

torch takes the radius of a pair from 24 or 53 bits, each point of that grid standing for the cell below it. So a
float32 draw is beyond t too rarely by 2**-25: by 0.14 % of that tail at t = 4.25, by 5 % at 5, and by all of it
at 5.8. Every draw beyond THRESHOLD is therefore replaced by one from the normal's own tail beyond it, by inversion of
a uniform of 63 bits: such draws end at 10.2. They are 2 in 100,000, found by two comparisons.
"""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr, ndtri
from torch import Tensor

from flower_privdec.privacy.noise.mersenne import splitmix

THRESHOLD = 4.25
_MASS = float(ndtr(-THRESHOLD))


def tail_normals(words: np.ndarray) -> np.ndarray:
    """Return normals conditioned on being beyond THRESHOLD, float64, for uniform words, uint64 of the same shape.

    The last bit is the sign; the others are the share, from 0 to 1, of the mass beyond THRESHOLD that is beyond
    the normal.
    """
    share = ((words >> np.uint64(1)).astype(np.float64) + 0.5) * 2.0**-63
    values: np.ndarray = ndtri(share * _MASS)
    return np.where(words & np.uint64(1), values, -values)


class Tails:
    """Places in rows [m, d] whose normals were beyond THRESHOLD, to be given normals from the exact tail."""

    def __init__(self) -> None:
        self._places: list[int] = []
        self._mask = bytearray()
        self._seen: tuple[Tensor, tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None

    def take_(self, normals: Tensor, first: int) -> None:
        """Set the normals beyond THRESHOLD to 0 and remember where they stand.

        Args:
            normals: without gaps, of any shape.
            first: where in the rows, laid end to end, the first of them stands.
        """
        if normals.device.type != "cpu":
            flat = normals.view(-1)
            beyond = (flat.abs() > THRESHOLD).nonzero().view(-1)
            flat[beyond] = 0
            self._places += (beyond + first).tolist()
            return
        array, above, below = self._views(normals)
        np.greater(array, THRESHOLD, out=above)
        np.less(array, -THRESHOLD, out=below)
        found = self._mask.find(1, 0, 2 * len(array))  # a tenth of the time of NumPy's nonzero
        while found >= 0:
            place = found % len(array)
            array[place] = 0
            self._places.append(first + place)
            found = self._mask.find(1, found + 1, 2 * len(array))

    def _views(self, normals: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the normals and two masks of their length as arrays, made anew only when the tensor is another."""
        if self._seen is None or self._seen[0] is not normals:
            array = normals.numpy().reshape(-1)
            if len(self._mask) < 2 * len(array):
                self._mask = bytearray(2 * len(array))
            above, below = np.frombuffer(self._mask, np.bool_, 2 * len(array)).reshape(2, -1)
            self._seen = normals, (array, above, below)
        return self._seen[1]

    def draw(self, d: int, keys: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return rows, columns and new normals of all places, [n] each.

        Args:
            d: the length of a row.
            keys: of each row, uint64 [m].
            block: 0 <= block < 2**32; the same normals come out for the same key, block and column.
        """
        rows, columns = np.divmod(np.array(self._places, np.int64), d)
        numbers = columns.astype(np.uint64) + np.uint64(block << 32)
        return rows, columns, tail_normals(splitmix(keys[rows], numbers))
