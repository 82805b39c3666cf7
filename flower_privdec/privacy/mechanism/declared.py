"""What a private step releases, as its algorithm declares it: noise, calibration, ε, ledger and plan follow from it.

Unit and adjacency: one example of one peer, *zero-out* (see `events`). A step may publish several sums over the same
examples, each clipped example by example and noised by itself. What an algorithm does not declare must not leave the
peer, and an algorithm that declares nothing has ε = ∞.

`Declares` is all that privacy knows of an algorithm. It asks the algorithm for a `Declaration` of each step, and
`joint_release` turns that into the one release that a step costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal, Protocol

from flower_privdec.common.errors import ScenarioError
from flower_privdec.privacy.mechanism.events import Release, epoch_steps

MOST_INFLATION = 0.1  # by how much hardened noise may be larger; beyond, the numbers are too short for such sums
OTHER = 2.0**-20  # for the rounding of the noise's scale itself
RARE = 2.0**-64  # the chance that a step draws more examples than are counted on


@dataclass(frozen=True)
class Drawing:
    """How a peer draws the examples of its steps; all of it is public.

    Attributes:
        sampling: a key of `data.SAMPLINGS`.
        rate: q in (0, 1], an example's chance to be in the batch of a step that draws from its group.
        size: J, the peer's number of examples.
        batch: b, expected (poisson) or exact: what a step divides its sum by.
        answered: how many neighbours the peer answers in each round; if it is shorter than the run, it repeats. Empty
            if the algorithm sends no replies.
        groups: into how many groups the examples are divided, of which each step draws from the next one in turn. An
            example is in at most one of so many steps in a row, which are paid together, before the first of them.
    """

    sampling: str
    rate: float
    size: int
    batch: float
    answered: tuple[int, ...] = ()
    groups: int = 1

    def neighbours(self, round_index: int) -> int:
        """Return how many neighbours the peer answers in a round."""
        if not self.answered:
            return 0
        return self.answered[round_index % len(self.answered)]

    @property
    def paid_together(self) -> int:
        """Return how many steps in a row one release pays for: an epoch of `shuffle`, or a turn of all groups."""
        if self.sampling == "shuffle":
            return epoch_steps(self.size, max(1, round(self.batch)))
        return self.groups

    @property
    def most(self) -> int:
        """Return the most examples of a step; of a Poisson batch except with a chance of 2^-64 (by Bernstein)."""
        if self.sampling == "full":
            return self.size
        if self.sampling == "poisson":
            mean = self.size * self.rate
            rare = -math.log(RARE)
            most = math.ceil(mean + rare / 3 + math.sqrt(rare**2 / 9 + 2 * mean * rare))
        else:
            most = -int(-self.batch // 1)  # rounded up
        return min(self.size, most)


def rounding_error(terms: int, unit: float) -> float:
    """Return by how much two sums of so many clipped gradients may be wrong, in clip norms, added in any order.

    Args:
        unit: u, half of what the number type rounds 1 by.
    """
    # A sum of n terms of at most 1 is wrong by at most n u / (1 - n u) times n; two of them by twice that.
    return terms * unit / (1 - min(terms * unit, 0.5)) * 2 * terms


@dataclass(frozen=True)
class ReleasedSum:
    """A sum over a peer's examples that one step adds noise to and publishes.

    Sensitivities are in clip norms of the step, of the sum that would be divided by `Drawing.batch`.

    Attributes:
        name: tells it from the step's other sums; its noise is keyed by it.
        drawn: how far an example of the batch can move it.
        idle: how far an example that was not drawn can move it.
        noise: its noise over the step's, in standard deviations.
        over: `batch`, or `all` the peer's examples, whatever the batch.
        to: the recipients: `all` who see the peer's messages; each `neighbour` a sum of its own, noised separately;
            or `self`, for a sum that stays on the peer, is not noised and costs nothing.
        receivers: for a sum to each neighbour, how many neighbours are sent one; 0 if a round sends none.
    """

    name: str = "gradient"
    drawn: float = 1.0
    idle: float = 0.0
    noise: float = 1.0
    over: Literal["batch", "all"] = "batch"
    to: Literal["all", "neighbour", "self"] = "all"
    receivers: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.drawn) and 0 <= self.idle <= self.drawn and self.drawn > 0):
            raise ScenarioError(
                f"sum {self.name!r} declares idle={self.idle} and drawn={self.drawn}: they must be finite with "
                "0 <= idle <= drawn and drawn > 0",
                code="release.declared",
            )

        if not (math.isfinite(self.noise) and self.noise > 0):
            raise ScenarioError(
                f"sum {self.name!r} declares noise={self.noise}: it must be > 0", code="release.declared"
            )

        if self.receivers < 0 or (self.receivers != 1 and self.to != "neighbour"):
            raise ScenarioError(
                f"sum {self.name!r} to {self.to} declares receivers={self.receivers}: it must be 1, or >= 0 "
                "of a sum to each neighbour",
                code="release.declared",
            )

    @property
    def seen(self) -> bool:
        """Return whether anyone sees it."""
        return self.to != "self" and self.receivers > 0


Declaration = tuple[ReleasedSum, ...] | None
PaperNoise = Literal["moments", "moments-table", "gdp", "cross-gradients", "subsampling"]
ONE_SUM = (ReleasedSum(),)


class Declares(Protocol):
    """An algorithm, as far as privacy looks at it."""

    @property
    def name(self) -> str:
        """What a scenario calls it."""

    @property
    def remembers_clipped(self) -> bool:
        """Whether a step publishes gradients that were clipped to the norms of earlier steps."""

    @property
    def paper_noise(self) -> PaperNoise | None:
        """Whose formula `calibration: paper` takes the noise from."""

    @property
    def steps_per_round(self) -> int:
        """How many private steps an active peer takes in a round."""

    def released(self, step: int, drawing: Drawing) -> Declaration:
        """Return what a step publishes; None says nothing, and costs ε = ∞.

        Args:
            step: its number in the run, from 0.
            drawing: how the peer draws its examples.
        """


def changed_since_declared(cls: type, *, harmless: Sequence[str] = ()) -> bool:
    """Return whether a class, or one mixed in, has anything that the `released` which it inherits may not know.

    Args:
        cls: whose `released` may be defined in any class of its method resolution order.
        harmless: attributes on which no release depends.
    """
    # The classes that come before the one that defines `released`.
    for nearer in takewhile(lambda one: "released" not in vars(one), cls.__mro__):
        for name, value in vars(nearer).items():
            if name in harmless:
                continue
            # A class always has some names with underscores, such as __doc__; only a method under one changes anything.
            if callable(value) or not name.startswith("__"):
                return True
    return False


def one_sum(algorithm: object, step: int, drawing: Drawing) -> Declaration:
    """Declare one sum of clipped gradients over the batch in every step: `released` of the plainest algorithms."""
    return ONE_SUM


def joint_release(sums: Declaration, drawing: Drawing) -> Release | None:
    """Return the cost of a step at noise multiplier 1 if an adversary sees all that it publishes; None for nothing.

    The sums of a step with clip norm C and noise s_i σ C on sum i, divided by s_i, are one Gaussian vector with noise
    σ C on each coordinate. A drawn example moves it by at most sqrt(Σ r_i (drawn_i / s_i)²) C, r_i being the number of
    receivers that get one each, an idle one likewise. So the step is one release of those two sensitivities.

    Raises:
        ScenarioError: for sums of which no such bound is proved.

    Examples:
        >>> drawing = Drawing("poisson", rate=0.1, size=600, batch=60)
        >>> round(joint_release((ReleasedSum("x"), ReleasedSum("y")), drawing).noise_multiplier, 4)  # 1 / sqrt(2)
        0.7071
    """
    if sums is None:
        return Release("full", 1.0, drawing.size, drawing.size, 0.0)

    if len({part.name for part in sums}) < len(sums):
        raise ScenarioError(
            f"sums {[part.name for part in sums]} of one step must have a name each", code="release.names"
        )
    visible = [part for part in sums if part.seen]
    if not visible:
        return None
    if len({part.over for part in visible}) > 1:
        raise ScenarioError(
            f"sums {[part.name for part in visible]} of one step must all be over the batch, or over all",
            code="release.mixed",
        )
    if drawing.sampling == "shuffle" and any(part.idle for part in visible):
        raise ScenarioError(
            "data.batch.sampling='shuffle' has no proved privacy if a step shows examples that it does not draw, as "
            "variance reduction's table does; use poisson (or uniform)",
            code="release.shuffle-table",
        )

    drawn = _together(visible, [part.drawn for part in visible])
    idle = _together(visible, [part.idle for part in visible])

    # One neighbour is sent only one of the sums that go to each, so an example moves what it receives by less. The
    # release keeps one ratio of idle to drawn, so the smaller of the two reductions counts.
    to_one = [replace(part, receivers=1) for part in visible]
    one_neighbour = drawn / _together(to_one, [part.drawn for part in to_one])
    if idle > 0:
        one_neighbour = min(one_neighbour, idle / _together(to_one, [part.idle for part in to_one]))
    one_neighbour = max(1.0, one_neighbour)

    if visible[0].over == "all" or drawing.sampling == "full":
        return Release("full", 1.0, drawing.size, drawing.size, 1 / drawn, one_neighbour=one_neighbour)
    batch = max(1, round(drawing.batch))
    return Release(
        drawing.sampling,
        drawing.rate,
        drawing.size,
        batch,
        1 / drawn,
        idle=idle / drawn,
        one_neighbour=one_neighbour,
    )


def _together(sums: Sequence[ReleasedSum], moves: Sequence[float]) -> float:
    """Return by how much an example moves all receivers' sums together, each over its noise."""
    squares = [part.receivers * (move / part.noise) ** 2 for part, move in zip(sums, moves, strict=True)]
    return math.sqrt(sum(squares))
