"""What an algorithm is: a program of steps over rows, with an exchange between two of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from flower_privdec.common.errors import ScenarioError
from flower_privdec.core.cohort import Cohort, LearningRate
from flower_privdec.core.exchange import Exchange, Mix, State
from flower_privdec.core.optimizers import LocalOptimizer
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.topology import Participation, Topology
from flower_privdec.privacy.mechanism.declared import Declaration, Drawing, PaperNoise, changed_since_declared
from flower_privdec.scenario.algorithm_sections import (
    AlgorithmSection,
    AverageSection,
    DescentSection,
    OptimizerSection,
)

if TYPE_CHECKING:
    from flower_privdec.data import PublicSet
    from flower_privdec.gradients import GradientKernel
    from flower_privdec.tasks.losses import Loss


AVERAGE = "average."  # before the names of averaged rows
HARMLESS = ("name", "line", "needs", "variants", "paper_noise", "steadied_by")  # attributes on which no release depends
Step = Callable[["Cohort", State], None]


class Algorithm:
    """A decentralized algorithm, written once over rows.

    Only an exchange crosses rows. The row law holds for every step: step(state)[i] == step(state[i:i+1]).

    What private steps publish is declared by `released`, beside the steps. A subclass that defines or overrides a
    method or an attribute, itself or by a class mixed in, has to declare again: it inherits no declaration of steps
    that it may have changed.

    Attributes:
        name: what a scenario calls it, for one of the package.
        line: what `privdec list` says of it.
        needs: settings, `key.path=value`, that a scenario must have for it to run, as the graph that it needs.
        variants: settings worth testing beside its defaults; the laws hold for each.
        Section: declares the keys that belong to it, beside those of all that descend along gradients.
        weights: the mixing weights its theory needs, or None when it exchanges nothing.
        program: steps and exchanges of one round, in order.
        slots: how many [m, d] buffers its state holds (for memory estimates).
        edge_slots: how many vectors [d] it holds at the peak for each pair of a peer and an in-neighbour, itself
            among them.
        open_rows: the rows of the state that other peers may see: functions of what was released, here and elsewhere.
            Every other row stays with its peer.
        steps_per_round: private steps of an active peer in a round.
        remembers_clipped: whether a step publishes gradients that were clipped to the norms of earlier steps.
        table: the kind of memory of past gradients that it keeps, a key of `table_sizes`; None where it keeps none.
        tried_on_own_labels: whether its models are tried on each peer's own labels too, where that costs no privacy.
        steadied_by: the keys of its section that steady a run that diverged, when they are lowered.
        mixing_steps: how often the peers exchange in a round.
        decay: of the averages of iterates that are its models; None where the last iterates are.
        averaged: the rows of which it keeps averages, under their names after AVERAGE.
        paper_noise: whose formula `calibration: paper` computes the noise by; None where no paper claims an ε.
    """

    Section: ClassVar[type[AlgorithmSection]] = DescentSection
    name: str = ""
    line: str = ""
    needs: ClassVar[tuple[str, ...]] = ()
    variants: ClassVar[tuple[tuple[str, ...], ...]] = ()
    weights: ClassVar[Literal["column-stochastic", "doubly-stochastic"] | None]
    program: tuple[Step | Exchange, ...]
    slots: int = 1
    edge_slots: ClassVar[int] = 0
    open_rows: tuple[str, ...] = ("x",)
    paper_noise: ClassVar[PaperNoise | None] = None
    tried_on_own_labels: ClassVar[bool] = False
    steadied_by: ClassVar[tuple[str, ...]] = ("learning_rate",)
    decay: float | None = None
    averaged: tuple[str, ...] = ()
    remembers_clipped: bool = False
    table: str | None = None
    mixing_steps: int = 1

    def __init__(self, section: AlgorithmSection) -> None:
        self.section = section
        self.name = section.name
        self.steps_per_round = section.steps_per_round
        average: AverageSection | None = getattr(section, "average", None)
        self.decay = None if average is None else average.decay
        self.averaged = () if average is None else tuple(name for name in ("x", "w") if name in self.open_rows)
        self.open_rows = (*self.open_rows, *(AVERAGE + name for name in self.averaged))

    @property
    def final_exchange(self) -> Mix:
        """Return the exchange that makes the peers' models agree: the last mixing of the program, or one of x."""
        mixes = [item for item in self.program if isinstance(item, Mix)]
        last = replace(mixes[-1], mixing_step=0) if mixes else Mix(("x",))
        return replace(last, names=tuple(AVERAGE + name for name in self.averaged)) if self.averaged else last

    def repeat_mixing(self, steps: int, topology: str) -> None:
        """Exchange several times in a round, each time by the next matrix of the sequence.

        Privacy: what is mixed again is a function of what was released, so more steps cost no ε.

        Args:
            steps: how often.
            topology: its name.

        Raises:
            ScenarioError: the program has other exchanges than one `Mix`, or a server averages.
        """
        if steps == 1:
            return
        exchanges = [item for item in self.program if isinstance(item, Exchange)]
        where = f"topology.mixing_steps={steps} with algorithm.name={self.name}"
        if len(exchanges) != 1 or not isinstance(exchanges[0], Mix):
            raise ScenarioError(
                f"{where}, which does not mix exactly once a round, must be 1", code="topology.mixing-steps"
            )
        if topology == "server":
            raise ScenarioError(
                f"{where} on topology server must be 1: one step averages", code="topology.mixing-steps"
            )
        at = self.program.index(exchanges[0])
        mixes = tuple(replace(exchanges[0], mixing_step=step) for step in range(steps))
        self.program = (*self.program[:at], *mixes, *self.program[at + 1 :])
        self.mixing_steps = steps

    def __init_subclass__(cls) -> None:
        """Drop an inherited declaration where a subclass, or a class mixed in, changes what it may be about."""
        super().__init_subclass__()
        if changed_since_declared(cls, harmless=HARMLESS):
            cls.released = Algorithm.released  # type: ignore[method-assign]

    def released(self, step: int, drawing: Drawing) -> Declaration:
        """Return what a private step publishes; None, which costs ε = ∞, unless an algorithm declares it.

        Args:
            step: its number in the run, from 0: `steps_per_round` of them a round.
            drawing: how the peer draws its examples.
        """
        return None

    def buffers(self, participation: Participation) -> int:
        """Return how many [m, d] buffers a run takes at once: the state's, one to mix into, one to work in."""
        return max(3, self.slots + 1)

    def step_sizes(self, n_peers: int, rounds: int) -> LearningRate:
        """Return what each peer's steps are multiplied by: the learning rate, unless an algorithm has none."""
        section: Any = self.section
        rate = np.broadcast_to(np.asarray(section.learning_rate, dtype=np.float64), (n_peers,))
        cosine = section.learning_rate_schedule == "cosine"
        warmup = section.learning_rate_warmup or 0.0
        return LearningRate(rate, section.learning_rate_decay, rounds, cosine=cosine, warmup=warmup)

    @property
    def optimizer(self) -> LocalOptimizer | None:
        """Return what each peer makes of its noised gradients; None where its steps are plain."""
        section: OptimizerSection | None = getattr(self.section, "optimizer", None)
        return None if section is None else LocalOptimizer(section)

    def exchange(
        self, topology: Topology, weights: str, participation: Participation, seed: int
    ) -> tuple[Mixing, Participation]:
        """Return the mixing over a graph and who is active, as the scenario sets them unless an algorithm differs."""
        return Mixing(topology, weights, participation, self.mixing_steps), participation

    def conserved_weights(self, sizes: np.ndarray) -> np.ndarray:
        """Return how often a row of each peer counts in the sum that mixing conserves: once, by default, [n_peers].

        Args:
            sizes: how many examples each peer has, int64 [n_peers].
        """
        return np.ones(len(sizes))

    def weight_factor(self, mixing: Mixing, rounds: int) -> float:
        """Return what the mixing weights of a run add to its paper's formula for the noise: nothing, by default."""
        return 1.0

    def check_public(self, public: PublicSet, loss: Loss) -> None:
        """Refuse a public set that lacks what the algorithm needs (nothing by default).

        Raises:
            ScenarioError: naming what is needed.
        """

    def check_model(self, kernel: GradientKernel) -> None:
        """Refuse a model that the algorithm cannot train (none by default).

        Raises:
            ScenarioError: naming what can.
        """

    def cautions(self, active: int, n_peers: int, rounds: int, *, server: bool) -> list[str]:
        """Return what to know about its settings before a run: sentences with their remedy.

        Args:
            active: how many of n_peers are active in a round.
            rounds: of the run.
            server: whether the active peers alone are averaged.
        """
        return []

    def table_sizes(self, kernel: GradientKernel, sizes: np.ndarray, d: int, batch: int) -> dict[str, int | None]:
        """Return how many numbers each kind of table takes that it can keep; None for one that the model cannot have.

        Args:
            sizes: examples of each peer hosted here.
            d: parameters.
            batch: examples of a step.
        """
        return {}

    def full_passes(self, rounds: int) -> int:
        """Return in how many of the first rounds it takes all local examples, whatever the batch."""
        return 0

    def trials(self, members: float) -> float:
        """Return how many models a peer tries on the validation set in a round: none, unless an algorithm does.

        Args:
            members: of its neighbourhood, itself among them.
        """
        return 0.0

    def initial(self, cohort: Cohort) -> dict[str, Tensor]:
        """Return the rows before round 0: every peer starts at the same parameters."""
        return {"x": cohort.initial.expand(len(cohort.peers), -1).clone()}

    def debiased(self, rows: dict[str, Tensor]) -> Tensor:
        """Return each peer's model, [m, d]."""
        return rows["x"]

    def models(self, rows: dict[str, Tensor]) -> Tensor:
        """Return what each peer hands out, [m, d]: its model, or that of its averaged rows."""
        return self.debiased(self._averages(rows))

    def mean_model(self, rows: dict[str, Tensor]) -> Tensor:
        """Return the mean of the network's models, or of their averages, [d]."""
        return self.network_mean(self._averages(rows))

    def _averages(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        return rows | {name: rows[AVERAGE + name] for name in self.averaged}

    def initial_averages(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows of averages before round 0.

        Raises:
            ScenarioError: the algorithm's models are of other rows than those that are averaged.
        """
        if self.averaged:
            with suppress(KeyError):  # models that follow from x cannot be had without it
                self.debiased({name: row for name, row in rows.items() if name != "x"})
                raise ScenarioError(
                    f"algorithm.average must be left out: the models of {self.name} do not follow from its rows x, of "
                    "which averages are taken",
                    code="algorithm.average",
                )
        return {AVERAGE + name: rows[name].clone() for name in self.averaged}

    def average_(self, state: State) -> None:
        """Take the rows after a round k into their averages: a ← β a + (1 - β) x, with β = min(decay, k / (k + 1)).

        All rows of a peer are averaged alike, so the averages keep every sum that mixing conserves: the mean model is
        the average of the mean models.

        Privacy: post-processing of releases, so it costs no ε.

        Source: Polyak and Juditsky 1992, with exponential weights.
        """
        k = state.round_index
        for name in self.averaged:
            state.rows[AVERAGE + name].lerp_(state.rows[name], 1 - min(self.decay or 0.0, k / (k + 1)))

    def extra_metrics(self, rows: dict[str, Tensor], rounds: range, mixing: Mixing | None) -> dict[str, Any]:
        """Return what a line of the metrics has beside the models' quality: nothing by default.

        Args:
            rows: the state's, at least those that others may see.
            rounds: those since the line before.
        """
        return {}

    def personal(self, rows: dict[str, Tensor]) -> Tensor | None:
        """Return each peer's personalized model, [m, d], or None where there is none at hand."""
        return None

    def network_mean(self, rows: dict[str, Tensor]) -> Tensor:
        """Return the mean of the network's models, [d]: Σ_i x_i / Σ_i w_i, which mixing conserves."""
        total = rows["x"].sum(0)
        return total / (rows["w"].sum() if "w" in rows else len(rows["x"]))


def advance(algorithm: Algorithm, cohort: Cohort, state: State) -> Exchange | None:
    """Run steps up to the next exchange, or to the end of the round.

    Returns:
        The exchange the caller has to perform, or None when the round ended; `state.round_index` then names the
        next round.
    """
    program = algorithm.program
    while state.at < len(program):
        item = program[state.at]
        if isinstance(item, Exchange):
            state.waiting = True
            return item
        cohort.state = state
        item(cohort, state)
        state.at += 1
    algorithm.average_(state)
    state.at = 0
    state.round_index += 1
    return None


def check_algorithm(algorithm: Algorithm, where: str) -> None:
    """Refuse an algorithm that is not whole.

    Args:
        where: what to call it in an error.

    Raises:
        ScenarioError: it has no program, or no weights, or weights that do not fit the program.
    """
    program = getattr(algorithm, "program", None)
    none = object()
    if not isinstance(program, tuple) or not program or not all(map(callable, _steps(program))):
        raise ScenarioError(f"{where}: program must be a tuple of steps and exchanges", code="algorithm.program")
    weights = getattr(algorithm, "weights", none)
    if weights not in ("column-stochastic", "doubly-stochastic", None):
        raise ScenarioError(f"{where}: weights must be 'column-stochastic', 'doubly-stochastic' or None")
    if weights is None and len(_steps(program)) < len(program):
        raise ScenarioError(
            f"{where}: weights must not be None, for the program has exchanges", code="algorithm.weights"
        )


def _steps(program: tuple[Step | Exchange, ...]) -> list[Step]:
    return [item for item in program if not isinstance(item, Exchange)]


def push_weights(cohort: Cohort) -> Tensor:
    """Return the push-sum weights before round 0: one for every peer, [m]."""
    return torch.ones(len(cohort.peers), dtype=cohort.dtype, device=cohort.device)
