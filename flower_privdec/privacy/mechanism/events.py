"""Releases as data: what one peer publishes in a step, which steps pay for it, and what kind of event it is.

Unit and adjacency everywhere in this package: one example of one peer, *zero-out*. Two data sets are neighbours if one
example's clipped gradient is replaced by 0; the peer's number of examples is public. An adversary who sees every
message of the peer sees no more than these releases, and functions of them.

From an algorithm's declaration to an ε:

    Declaration  --joint_release-->  Release  --plan_spends-->  Spend  --Account, Ledger-->  entries  --epsilon-->  ε
    (declared)                       one step, any number       in which   (ledger)                  (accountant)
                                     of times                   steps

A `Release` says what a step is and how often; it says nothing about when. A `Spend` is a release with its steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from flower_privdec.common.catalogue import SAMPLINGS
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.user_code import require

if TYPE_CHECKING:
    import dp_accounting

ACCOUNTANT = "zero-out PLD 4"  # in every entry of a ledger: which accountant recorded it
ACCOUNTING = ("an event of dp-accounting", "pip install 'flower-privdec[accounting]'")
MOST_STEPS = 10**12

Against = tuple[tuple[int, float], ...]  # (colluders, noise multiplier)
Mechanism = tuple[str, float, int, int, float, Against, float, float]  # see `Release.mechanism`


@dataclass(frozen=True)
class Adversary:
    """Who looks at what a peer publishes, and with whose help. Every printed ε is against one adversary.

    An ε over several releases holds against an adversary only if each of them is counted at the noise that this
    adversary cannot take off. So a release keeps its noise against each, and a composition chooses.

    Attributes:
        colluding: how many of the other peers share all that they know with the observer of all messages; None for
            all of them. 0 is an observer that no peer helps: a neighbour is a peer, so it knows more.
        replies: whether it is one neighbour, of which only the replies that it receives are counted: less than what
            it hears. It is a peer, so it counts as one colluder.
    """

    colluding: int | None = None
    replies: bool = False

    def __str__(self) -> str:
        if self.replies:
            return "one neighbour, by the replies to it"
        if self.colluding is None:
            return "all other peers colluding"
        if self.colluding == 0:
            return "no peer colluding (a neighbour is a peer)"
        peers = "peer" if self.colluding == 1 else "peers"
        return f"up to {self.colluding} {peers} colluding"


EVERYBODY = Adversary()
ONE_NEIGHBOUR = Adversary(colluding=1, replies=True)


@dataclass(frozen=True, order=True)
class Release:
    """One step's mechanism at one peer, a number of times: a Gaussian sum over the examples of a batch.

    Its noise multiplier is the one against the strongest adversary, all other peers together. Code that knows nothing
    of adversaries therefore counts too much, never too little.

    Attributes:
        sampling: `poisson` (every example with probability q, independently), `uniform` (exactly b of J
            without replacement, afresh each step), `full` (all J), `shuffle` (an epoch's disjoint batches) or
            `blocks` (one of 1/q fixed batches, at random).
        sampling_rate: q in (0, 1], an example's chance to be in a step.
        dataset_size: J, the peer's number of examples (public).
        batch_size: b, expected (poisson) or exact.
        noise_multiplier: noise std over how far a drawn example can move the sum (of a plain step: the clip norm),
            as all other peers together see it; 0 is no noise and costs ε = ∞.
        steps: how many such steps; of `shuffle`, how many epochs, a started one counting whole.
        idle: how far an example that is not drawn can move the sum, over how far a drawn one can, in [0, 1]. `event`
            says what it may depend on, and why that is enough.
        against: pairs (q, noise multiplier), q ascending: the noise against an adversary and at most q colluding
            peers. Empty if collusion takes no noise off.
        one_neighbour: how many times `noise_multiplier` the noise is against one neighbour, by the replies to it; 1 if
            a step sends none.
        accountant: which accountant recorded it; says nothing about the mechanism, so equality ignores it.
    """

    sampling: str
    sampling_rate: float
    dataset_size: int
    batch_size: int
    noise_multiplier: float
    steps: int = 1
    idle: float = 0.0
    against: Against = ()
    one_neighbour: float = 1.0
    accountant: str = field(default=ACCOUNTANT, compare=False)

    def __post_init__(self) -> None:
        # NumPy's numbers are not JSON's; the class is frozen, hence object.__setattr__.
        for name, kind in _KINDS.items():
            object.__setattr__(self, name, kind(getattr(self, name)))
        against = tuple((int(colluders), float(noise)) for colluders, noise in self.against)
        object.__setattr__(self, "against", against)

        if self.sampling not in SAMPLINGS.lines:
            SAMPLINGS.check(self.sampling, "sampling")
        self._check_ranges()
        self._check_against_ranges()

        if self.idle > 0 and self.sampling in ("full", "shuffle"):
            reason = "has no proved bound for it"
            if self.sampling == "full":
                reason = "draws everybody"
            raise ScenarioError(
                f"idle={self.idle} must be 0 with sampling={self.sampling}, which {reason}; use poisson",
                code="release.idle",
            )
        if self.sampling == "uniform":
            rate = min(1.0, self.batch_size / self.dataset_size)
            if not math.isclose(self.sampling_rate, rate, rel_tol=1e-9):
                raise ScenarioError(
                    f"sampling_rate={self.sampling_rate} of uniform sampling must be batch_size / dataset_size "
                    f"= {self.batch_size}/{self.dataset_size}; drop one of the three",
                    code="release.rate",
                )

    def _check_ranges(self) -> None:
        noise = self.noise_multiplier
        ratio = self.one_neighbour
        _check("dataset_size", self.dataset_size, self.dataset_size >= 1, ">= 1")
        _check("batch_size", self.batch_size, self.batch_size >= 1, ">= 1")
        _check("sampling_rate", self.sampling_rate, 0 < self.sampling_rate <= 1, "in (0, 1]")
        _check("steps", self.steps, 0 <= self.steps <= MOST_STEPS, f">= 0 and at most {MOST_STEPS:g}")
        _check("noise_multiplier", noise, noise >= 0 and math.isfinite(noise), "finite and >= 0")
        _check("idle", self.idle, 0 <= self.idle <= 1, "in [0, 1]")
        _check("one_neighbour", ratio, 1 <= ratio < math.inf, "finite and >= 1")

    def _check_against_ranges(self) -> None:
        colluders = [q for q, _ in self.against]
        ascending = colluders == sorted(set(colluders)) and min(colluders, default=0) >= 0
        # Fewer colluders than all other peers never take off more noise than these do.
        enough = all(self.noise_multiplier <= larger < math.inf for _, larger in self.against)
        rule = "of ascending colluders, and no less than noise_multiplier"
        _check("against", self.against, ascending and enough, rule)

    def times(self, steps: int) -> Release:
        """Return the same mechanism, `steps` times."""
        return self._with(steps=int(steps))

    def _with(self, **changed: object) -> Release:
        """Return a copy with other values, unchecked: a schedule has thousands of releases."""
        other = object.__new__(Release)
        other.__dict__.update(self.__dict__, **changed)
        return other

    def towards(self, adversary: Adversary) -> Release:
        """Return the release as an adversary sees it: at the noise that it cannot take off.

        Against a number of colluders that is not recorded, the next larger one counts, and past the last one all.
        """
        if not self.against and self.one_neighbour == 1:
            return self

        noise = self.noise_multiplier
        if adversary.colluding is not None:
            # Fewer colluders know less, so the noise that is left against more of them is left against fewer, too.
            noise = next((larger for q, larger in self.against if q >= adversary.colluding), noise)
        if adversary.replies:
            noise = max(noise, self.noise_multiplier * self.one_neighbour)
        return self._with(noise_multiplier=noise, against=(), one_neighbour=1.0)

    @property
    def mechanism(self) -> Mechanism:
        """Return what one step is, whatever the number of steps; steps that differ only in noise sort together.

        Steps of equal mechanisms are counted together, in a ledger and in a composition.
        """
        drawing = (self.sampling, self.sampling_rate, self.dataset_size, self.batch_size, self.idle)
        return (*drawing, self.against, self.one_neighbour, self.noise_multiplier)

    def to_json(self) -> dict[str, Any]:
        """Return the release as a JSON object."""
        return dict(self.__dict__)

    @classmethod
    def from_json(cls, data: Any) -> Release:
        """Read the release from a JSON object, which must have exactly the keys of `to_json`.

        Raises:
            ScenarioError: a key is missing or unknown, or a value breaks a rule.
        """
        keys = {*_KINDS, "against"}
        if not isinstance(data, dict) or data.keys() != keys:
            raise ScenarioError(
                f"a release must be an object with the keys {', '.join(sorted(keys))}", code="release.keys"
            )
        _check_against(data["against"])
        for name, kind in _KINDS.items():
            value = data[name]
            accepted = (int, float) if kind is float else kind
            if not isinstance(value, accepted) or isinstance(value, bool):  # Python's True is an int
                raise ScenarioError(f"{name}={value!r} of a release must be a {kind.__name__}", code="release.kind")
        return cls(**data)

    def event(self) -> dp_accounting.DpEvent:
        """Return the release as dp-accounting's event: what any other accountant can be asked about.

        With memory of past gradients an example may move a step in which it is not drawn. An algorithm declares
        the most by which example z can move the noised sum: i when z is not drawn, d >= i when it is. A step then
        is, with σ the noise's standard deviation and `idle` = i / d, `noise_multiplier` = σ / d,
            P = (1 - q) N(i, σ²) + q N(d, σ²)    against    Q = N(0, σ²).

        Proof, for batches into which z is drawn with probability q independently of everything published so far
        and of how the other examples are drawn (`poisson`). By how much z moves the sum may depend on when z was
        drawn before, which is hidden, on the other examples and on all that was published. Fix those: what was
        published by conditioning, the rest as a mixture's hidden component. A component is
            (1 - q) N(v_0, σ²) + q N(v_1, σ²)    against    N(0, σ²),    |v_0| <= i, |v_1| <= d,
        around what the other examples add, for whether z is drawn now is independent of the component. The
        hockey-stick divergence is jointly convex, so no mixture exceeds its worst component, which is the
        one-dimensional one with both at their bounds (mixture-of-Gaussians mechanisms, Choquette-Choo et al.
        2023, arXiv:2310.15526). That bound is the same whatever was published, so it composes.  ∎

        With `uniform` and `blocks`, examples are drawn together. Who is drawn then counts as public, which is one more
        thing to condition on; see `loss_distributions.shown_profile`. dp-accounting has no such event under zero-out,
        nor one that has `idle`: these are given as Gaussians at what a drawn example moves.
        """
        dp_accounting = require("dp_accounting", *ACCOUNTING)
        step = dp_accounting.GaussianDpEvent(self.noise_multiplier)
        if self.sampling == "poisson" and self.sampling_rate < 1:
            if self.idle > 0:
                mixture = dp_accounting.dp_event.MixtureOfGaussiansDpEvent
                chances = [1 - self.sampling_rate, self.sampling_rate]
                step = mixture(self.noise_multiplier, [self.idle, 1.0], chances)
            else:
                step = dp_accounting.PoissonSampledDpEvent(self.sampling_rate, step)
        elif self.sampling == "uniform" and self.batch_size < self.dataset_size and self.idle == 0:
            step = dp_accounting.SampledWithoutReplacementDpEvent(self.dataset_size, self.batch_size, step)
        return dp_accounting.SelfComposedDpEvent(step, self.steps)


_NUMBERS = {"str": str, "int": int, "float": float}
# The type of each field of a release but `against`, by name.
_KINDS: dict[str, type] = {f.name: _NUMBERS[str(f.type)] for f in fields(Release) if str(f.type) in _NUMBERS}


def _check(name: str, value: object, holds: bool, rule: str) -> None:
    if not holds:
        raise ScenarioError(f"{name}={value} must be {rule}", code="release.range")


def _check_against(against: Any) -> None:
    """Refuse what JSON has for `against` if it is not a list of pairs [q, noise multiplier]."""
    is_list = isinstance(against, list | tuple)
    if not is_list or not all(_is_pair(item) for item in against):
        raise ScenarioError(
            f"against={against!r} of a release must be a list of pairs [colluders, noise multiplier]",
            code="release.kind",
        )


def _is_pair(item: Any) -> bool:
    if not isinstance(item, list | tuple) or len(item) != 2:
        return False
    colluders, noise = item
    return type(colluders) is int and type(noise) in (int, float)  # and not bool


def towards(releases: Iterable[Release], adversary: Adversary) -> tuple[Release, ...]:
    """Return releases as an adversary sees them, equal mechanisms together."""
    return canonical(release.towards(adversary) for release in releases)


def event(releases: Iterable[Release]) -> dp_accounting.DpEvent:
    """Return the composition of releases as one dp-accounting event."""
    return require("dp_accounting", *ACCOUNTING).ComposedDpEvent([r.event() for r in canonical(releases)])


def canonical(releases: Iterable[Release]) -> tuple[Release, ...]:
    """Return releases sorted, equal mechanisms merged into one and empty ones dropped.

    What a composition costs depends on nothing else.
    """
    steps_of: dict[Mechanism, int] = {}
    one_of: dict[Mechanism, Release] = {}
    for release in releases:
        mechanism = release.mechanism
        steps_of[mechanism] = steps_of.get(mechanism, 0) + release.steps
        one_of[mechanism] = release

    together = []
    for mechanism, steps in sorted(steps_of.items()):
        if steps:
            together.append(one_of[mechanism].times(steps))
    return tuple(together)


@dataclass(frozen=True)
class Spend:
    """Steps of a run that one peer pays for with one release.

    The steps are either paid one after the other (`release.steps == to_step - from_step`; a ledger may pay any part of
    them), or they are steps that one release pays for (`release.steps == 1`), such as an epoch of `shuffle`: it is paid
    whole before the first of them.

    Attributes:
        from_step, to_step: the steps [from_step, to_step).
    """

    from_step: int
    to_step: int
    release: Release

    def __post_init__(self) -> None:
        count = self.to_step - self.from_step
        is_paid = self.whole or self.release.steps == count
        if self.from_step < 0 or count < 1 or not is_paid:
            raise ScenarioError(
                f"steps {self.from_step} to {self.to_step} cannot be paid by a release of {self.release.steps}; "
                "give it as many, or one for all of them",
                code="release.paid-steps",
            )

    @property
    def whole(self) -> bool:
        """Return whether one release pays for several steps, so that they cannot be paid in parts."""
        return self.release.steps == 1 and self.to_step - self.from_step > 1

    def between(self, start: int, stop: int) -> Spend | None:
        """Return the part of this spend that must be paid for the steps [start, stop); None if nothing.

        Of steps that one release pays for, that is all of it, in its own steps.
        """
        start = max(start, self.from_step)
        stop = min(stop, self.to_step)
        if start >= stop:
            return None
        if self.whole or (start == self.from_step and stop == self.to_step):
            return self
        return Spend(start, stop, self.release.times(stop - start))

    def cut(self, start: int, stop: int) -> Spend | None:
        """Return the part of this spend in the steps [start, stop), or None; of one release, any part costs all of it.

        A run that is given more rounds within an epoch goes on in an order of its own, so both parts are paid for.
        """
        part = self.between(start, stop)
        if part is None:
            return None
        return replace(part, from_step=max(start, part.from_step), to_step=min(stop, part.to_step))


def epoch_steps(dataset_size: int, batch_size: int) -> int:
    """Return how many steps an epoch of `shuffle` lasts: floor(J / b), there is no incomplete batch."""
    return max(1, dataset_size // batch_size)


def plan_spends(
    release: Release,
    active: np.ndarray,
    noise_multipliers: Sequence[float] | np.ndarray | None = None,
    against: Mapping[int, np.ndarray] | None = None,
    together: int = 1,
) -> tuple[Spend, ...]:
    """Lay a peer's releases over the steps in which it is active.

    Args:
        release: the mechanism; its `steps` do not matter.
        active: bool [steps]. Only active steps cost; activity itself is public and amplifies nothing.
        noise_multipliers: [steps], one for each step, or None for `release.noise_multiplier` always.
        against: the noise multiplier against so many colluders, float64 [steps], by their number; None if collusion
            takes no noise off.
        together: how many steps in a row one release pays for; of `shuffle` those of an epoch, whatever is given.

    Returns:
        Spends in order: runs of active steps of equal noise; of several steps T together, one for each block
        [i T, (i + 1) T) with an active one, at the least noise of its active steps.
    """
    active = np.asarray(active, dtype=bool)
    if noise_multipliers is None:
        noise_multipliers = np.full(len(active), release.noise_multiplier)
    against = against or {}
    colluders = sorted(against)

    # One row for each adversary, all other peers first: [1 + colluders, steps].
    noises = np.stack([np.asarray(noise_multipliers, dtype=np.float64), *(against[q] for q in colluders)])

    def spend(start: int, stop: int, noise: np.ndarray, steps: int) -> Spend:
        """Return the spend of [start, stop) at the noise against each adversary, [1 + colluders]."""
        least = float(noise[0])
        # Rounding must not leave less noise against some than against all.
        pairs = tuple((q, max(least, float(larger))) for q, larger in zip(colluders, noise[1:], strict=True))
        return Spend(start, stop, replace(release, noise_multiplier=least, against=pairs, steps=steps))

    spends = []
    if release.sampling == "shuffle":
        together = epoch_steps(release.dataset_size, release.batch_size)
    if together > 1:
        for start in range(0, len(active), together):
            stop = min(start + together, len(active))
            is_active = active[start:stop]
            if is_active.any():
                least = noises[:, start:stop][:, is_active].min(axis=1)
                spends.append(spend(start, stop, least, 1))
        return tuple(spends)

    # A new spend begins wherever the activity or a noise changes.
    changed = (active[1:] != active[:-1]) | (noises[:, 1:] != noises[:, :-1]).any(axis=0)
    edges = [0, *(np.flatnonzero(changed) + 1).tolist(), len(active)]
    for start, stop in pairwise(edges):
        if stop > start and active[start]:
            spends.append(spend(start, stop, noises[:, start], stop - start))
    return tuple(spends)
