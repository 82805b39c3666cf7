"""What hardened noise has to pay for beside its own rounding: that inside the sums it is added to.

B vectors of norm C at most, added in any order, come out wrong by at most γ B C, with γ = B u / (1 - B u) and u half
the distance from 1 to the next number (Higham, *Accuracy and Stability of Numerical Algorithms*, 2002, eq. 4.6, for
each coordinate). The exact sums of two neighbours are at most C apart, so those computed are at most (1 + 2 γ B) C
apart. A sum that goes on from step to step, as a table's mean does, is as wrong as its additions are many. The noise is
made larger by that factor, and then covers what it covered of the exact sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from flower_privdec.errors import ScenarioError
from flower_privdec.privacy.mechanism.declared import Declares, Drawing

MOST = 0.1  # by how much noise may be larger; beyond, the numbers are too short for such sums
OTHER = 2.0**-20  # for the rounding of the noise's scale itself
RARE = 2.0**-64  # the chance that a step draws more examples than are counted on


def noise_inflation(algorithm: Declares, drawings: Iterable[Drawing], steps: int, dtype: torch.dtype) -> float:
    """Return by how much hardened noise has to be larger, the most of some peers.

    Args:
        drawings: how each of these peers draws its examples.
        steps: of the run.
        dtype: in which sums are made.

    Raises:
        ScenarioError: the rounding of a sum may be as large as a tenth of what one example adds to it.

    Privacy: a Poisson batch has more examples than are counted on with a chance of 2^-64 a step, which adds to δ.
    """
    largest = 0.0
    for drawing in dict.fromkeys(drawings):
        size, remembers = _most_drawn(drawing), any(part.idle for part in algorithm.released(0, drawing) or ())
        unit = torch.finfo(dtype).eps / 2
        more = size * unit / (1 - min(size * unit, 0.5)) * 2 * size
        more += 4 * size * (steps * size + drawing.size) * unit if remembers else 0.0
        if more > MOST:
            raise ScenarioError(
                f"privacy.hardened: a sum of {size} examples in {str(dtype).removeprefix('torch.')} may be wrong by "
                f"{more:.2g} times what one of them adds, which must be <= {MOST:g}; set compute.dtype=float64"
            )
        largest = max(largest, more)
    return largest + OTHER


def _most_drawn(drawing: Drawing) -> int:
    """Return how many examples a step has at most."""
    if drawing.sampling != "poisson":
        return drawing.size if drawing.sampling == "full" else min(drawing.size, -int(-drawing.batch // 1))
    mean, rare = drawing.size * drawing.rate, -math.log(RARE)
    return min(drawing.size, math.ceil(mean + rare / 3 + math.sqrt(rare**2 / 9 + 2 * mean * rare)))  # Bernstein
