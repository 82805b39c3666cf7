"""Noise in two parts: sources of independent normals, and mechanisms that make a step's noise from them.

| part | decides | kinds |
|---|---|---|
| `NoiseSource` | where random numbers come from | keyed (`philox`, `gpu_philox`), the operating system's (`deployed`) |
| `PairSecrets` | what two peers know that no other does | from keys (here), agreed between processes (`agreed`) |
| `NoiseMechanism` | what is added to a sum | independent normals (here), noise that cancels (`pair_noise`), a user's |

A cohort calls the mechanism with a `NoisedSum`, which has everything that the noise may depend on. Private
data is not in it: noise that followed the data would be no noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.graph.participation import Participation
from flower_privdec.privacy.mechanism.declared import Declaration, changed_since_declared
from flower_privdec.rows.keys import digest

if TYPE_CHECKING:
    from torch import Tensor


STEPS = 2**32  # steps of a run, and ids of receivers, are counted in 32 bits
NO_RECEIVER = STEPS - 1  # the counter word of noise that goes to no receiver in particular
STATE_PREFIX = "noise."  # of the names of a mechanism's rows in a state


class NoiseSource(Protocol):
    """Independent normal numbers for the rows of a cohort."""

    def add_(
        self,
        out: Tensor,
        std: Tensor,
        step: int,
        peers: np.ndarray,
        purpose: str = "noise",
        receivers: np.ndarray | None = None,
    ) -> None:
        """Add noise in place: out[i] += std[i] * N(0, I), keyed by (key of peers[i], purpose, step, receivers[i]).

        In a simulation, equal keys give equal numbers. So no key may occur twice in a run.

        Args:
            out: rows [m, d], float32 or float64.
            std: standard deviations [m]; a row with 0 is left as it is.
            step: the number of the private step in the run, 0 <= step < 2**32.
            peers: global ids of the peers whose noise it is, int64 [m].
            purpose: any text; two purposes never share numbers.
            receivers: global ids int64 [m], 0 <= id < 2**32 - 1, if a peer draws other numbers for each receiver; None
                is a stream of its own.

        Raises:
            ValueError: rows, step, peers or receivers break these rules, or a peer has no key here.
        """
        ...


class PairSecrets:
    """A secret for each pair of peers, the same for both: in one process, made of the keys of the two.

    Args:
        keys: the keys of the peers hosted here.
        simulated: whether the keys are those of a simulation, in which noise has to be the same each time.

    Attributes:
        simulated: see above.
    """

    def __init__(self, keys: Mapping[int, bytes], *, simulated: bool = True) -> None:
        self._keys = keys
        self.simulated = simulated

    def knows(self, peer: int, other: int) -> bool:
        """Return whether two peers share a draw now, as here always.

        If not, neither counts on the other: each adds what it needs without it, see `mechanism.partners`.
        """
        return True

    def promised(self, peer: int, step: int) -> float:
        """Return what own noise a peer's process has promised to add in a step at least, as here never.

        Returns:
            It over the noise that the peer would need by itself, in [0, 1]; 0 if it has promised nothing.
        """
        return 0.0

    def of(self, peer: int, other: int) -> bytes:
        """Return the secret of two peers, 32 bytes, in whichever order they are named.

        Raises:
            ScenarioError: one of the two is not hosted by this process.
        """
        first, second = sorted((int(peer), int(other)))
        if first not in self._keys or second not in self._keys:
            raise ScenarioError(
                f"the secret of peers {first} and {second} needs the keys of both, and this process has those of "
                f"{sorted(self._keys)}: run the scenario by the engine, by Flower, or on a network",
                code="noise.pair-secret",
            )
        return digest(32, "pair", first, self._keys[first], second, self._keys[second])

    def of_one(self, peer: int) -> bytes:
        """Return the key of what a simulated peer draws for the noise that all share, 32 bytes.

        Raises:
            ScenarioError: this process has no key of the peer.
        """
        if peer not in self._keys:
            raise ScenarioError(
                f"noise that all share needs all keys, and this process has those of peers {sorted(self._keys)}: "
                "run the scenario by the engine, by Flower, or on a network",
                code="noise.pair-secret",
            )
        return digest(32, "common", peer, self._keys[peer])


@dataclass(frozen=True)
class NoisedSum:
    """A sum that a noise mechanism adds noise to, and what the noise may depend on.

    Attributes:
        normals: independent normals, keyed as in `NoiseSource.add_`; at a deployed peer the operating system's.
        secrets: the secrets of pairs of peers.
        name: the name of the sum; it keys the noise.
        step: its number in the run.
        round_index: the round.
        peers: int64 [r], global ids of the rows.
        rows: int64 [r], their indices in the rows of `state`.
        receivers: int64 [r], the only receiver of each row; None for all.
        scale: [r], what each row's sum of clipped gradients is multiplied by.
        clip_norm: [r], C; None for no clipping.
        participation: who is active in which round; public.
        state: the mechanism's own rows [m, d] by name, to be changed in place; zero before round 0. They are part of
            every checkpoint and never leave their peer.
    """

    normals: NoiseSource
    secrets: PairSecrets
    name: str
    step: int
    round_index: int
    peers: np.ndarray
    rows: np.ndarray
    receivers: np.ndarray | None
    scale: Tensor
    clip_norm: Tensor | None
    participation: Participation
    state: Mapping[str, Tensor]

    @property
    def active(self) -> np.ndarray:
        """Return which peers of the network take part in the round, bool [n_peers]."""
        return self.participation.active(self.round_index)

    @property
    def sensitivity(self) -> Tensor:
        """Return by how much one example of the batch moves each row at most, in units of the rows, [r]: |scale| C."""
        scale = self.scale.abs()
        if self.clip_norm is None:
            return scale * torch.inf
        return scale * self.clip_norm


class NoiseMechanism:
    """The noise of a private step, made from normals: independent for each sum unless a subclass differs.

    A subclass that defines or overrides anything, itself or by a class mixed in, has to declare the cost of its
    releases: it inherits no declaration about noise that it may have changed.

    Attributes:
        state: names of rows [m, d] that it keeps from step to step.
    """

    state: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        """Drop an inherited declaration if a subclass, or a class mixed in, changes the noise that it was about."""
        super().__init_subclass__()
        if changed_since_declared(cls, harmless=("name", "line")):
            cls.released = lambda self, sums: None  # type: ignore[method-assign]

    def released(self, sums: Declaration) -> Declaration:
        """Return the sums whose cost a step has under this noise; None costs ε = ∞.

        The result is accounted for as if each sum got independent normals, whatever `add_` does. Further noise,
        independent of the data, is post-processing; anything else needs a proof.

        Args:
            sums: what the algorithm declares, for independent normals.
        """
        return sums

    def drawn_std(self, step: int, peer: int) -> float | None:
        """Return the standard deviation of a peer's normals, if what is made of them is multiplied; None if not."""
        return None

    def add_(self, out: Tensor, std: Tensor, noised: NoisedSum) -> None:
        """Add noise to a sum in place.

        Args:
            out: [r, d].
            std: [r], the standard deviations that were solved for.
            noised: the sum.
        """
        noised.normals.add_(out, std, noised.step, noised.peers, noised.name, noised.receivers)


INDEPENDENT = NoiseMechanism()


def check_call(out: Tensor, std: Tensor, step: int, peers: np.ndarray, receivers: np.ndarray | None) -> None:
    """Refuse arguments of `NoiseSource.add_` that no source can serve.

    Raises:
        ValueError: the message names the value and the rule.
    """
    if out.ndim != 2 or out.dtype not in (torch.float32, torch.float64):
        raise ArgumentError(
            f"noise is added to rows [m, d] of float32 or float64, not {out.dtype} {list(out.shape)}", code="noise.rows"
        )
    if std.shape != out.shape[:1] or peers.shape != (out.shape[0],):
        raise ValueError(f"std {list(std.shape)} and peers {list(peers.shape)} must be [{out.shape[0]}]")
    if not 0 <= step < STEPS:
        raise ArgumentError(f"step={step} must be >= 0 and < 2**32", code="noise.step")

    if receivers is None:
        return
    if receivers.shape != peers.shape:
        raise ArgumentError(f"receivers {list(receivers.shape)} must be [{out.shape[0]}]", code="noise.receivers")
    if len(receivers) and not (receivers.min() >= 0 and receivers.max() < NO_RECEIVER):
        raise ArgumentError(
            f"receivers {receivers.min()}..{receivers.max()} must be >= 0 and < 2**32 - 1", code="noise.receivers"
        )


def pieces(count: int, d: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Cut rows [count, d] into pieces of at most `size` elements: some whole rows, or a part of one row.

    Args:
        count: how many rows.
        d: elements of a row, at least 1.
        size: elements of a piece, at least 1.

    Yields:
        The rows and the columns of each piece; a long row's parts, of nearly the same length, one after the other.
    """
    rows = max(1, size // d)
    parts_of_row = -(-d // size)  # rounded up
    width = -(-d // parts_of_row)
    for first in range(0, count, rows):
        for column in range(0, d, width):
            yield slice(first, min(first + rows, count)), slice(column, min(column + width, d))
