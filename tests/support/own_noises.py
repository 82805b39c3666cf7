"""Noise mechanisms of a user's own, as scenarios name them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flower_privdec.privacy.noise import NoisedSum, NoiseMechanism, build_noise


class Same(NoiseMechanism):
    """What every run has."""


class Alternating(NoiseMechanism):
    """Noise that takes back a half of that of the step before; undeclared."""

    state = ("last",)

    def add_(self, out: Tensor, std: Tensor, noised: NoisedSum) -> None:
        fresh, rows = torch.zeros_like(out), torch.from_numpy(noised.rows)
        super().add_(fresh, std, noised)
        out += fresh - noised.state["last"][rows] / 2
        noised.state["last"][rows] = fresh


class Cancelling(NoiseMechanism):
    """Nothing but noise that each pair of active peers adds with opposite signs; undeclared."""

    def add_(self, out: Tensor, std: Tensor, noised: NoisedSum) -> None:
        everybody, one = np.flatnonzero(noised.active), torch.ones(1, dtype=out.dtype)
        for row, peer in enumerate(noised.peers.tolist()):
            for other in everybody[everybody != peer].tolist():
                pair = build_noise({0: noised.secrets.of(peer, other)})
                pair.add_(out[row : row + 1], one if peer < other else -one, noised.step, np.zeros(1, np.int64))


class Declared(Alternating):
    """The same with a declaration, whatever it is worth."""

    def released(self, sums):
        return sums


class Changed(Declared):
    """A change of noise that was declared."""

    def add_(self, out: Tensor, std: Tensor, noised: NoisedSum) -> None:
        super().add_(out, std / 2, noised)


class Halved:
    """What a class can be mixed with."""

    def add_(self, out: Tensor, std: Tensor, noised: NoisedSum) -> None:
        NoiseMechanism.add_(self, out, std / 2, noised)  # type: ignore[arg-type]


class Mixed(Halved, Declared):
    """A change of noise that was declared, by a class mixed in."""


class Broken(NoiseMechanism):
    """One that cannot be built."""

    def __init__(self) -> None:
        raise RuntimeError("no")
