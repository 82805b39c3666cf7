"""What an algorithm is: a program of steps over rows, with exchanges between them.

A row holds a tensor of one peer, so a step that works on rows [m, d] computes m peers at once. An algorithm's `program`
is one round: a tuple of steps, which are functions of a cohort and a state, and exchanges, which are descriptions.
`advance` runs the steps up to the next exchange and returns it. Its caller performs the exchange: the engine on rows in
one process, Flower's relay or a network by messages. So an algorithm never knows what carries its messages.

Steps never cross rows; only exchanges do (the row law). Therefore any split of the peers over processes gives the same
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.core.cohort import Cohort, LearningRate
from flower_privdec.core.exchange import Exchange, Mix, Reply, State
from flower_privdec.core.optimizers import LocalOptimizer
from flower_privdec.core.robust_mix import RobustMix
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.participation import Participation
from flower_privdec.graph.topology import Topology
from flower_privdec.privacy.mechanism.declared import Declaration, Drawing, PaperNoise, changed_since_declared
from flower_privdec.scenario.algorithm_sections import (
    AlgorithmSection,
    AverageSection,
    DescentSection,
    OptimizerSection,
)

if TYPE_CHECKING:
    from torch import Tensor

    from flower_privdec.data import PublicSet
    from flower_privdec.gradients import GradientKernel
    from flower_privdec.tasks.losses import Loss


AVERAGE = "average."  # begins the names of averaged rows
HARMLESS = (
    "name",
    "line",
    "needs",
    "variants",
    "paper_noise",
    "steadied_by",
    "noise_follows_rate",
)  # no release depends on these
Step = Callable[["Cohort", State], None]


class Algorithm:
    """A decentralized algorithm, written once over rows.

    The row law holds for every step: step(state)[i] == step(state[i:i+1]).

    `released` declares what private steps publish, beside the steps. A subclass that defines or overrides a method or
    an attribute, itself or by a class mixed in, has to declare again: it inherits no declaration of steps that it may
    have changed.

    Attributes:
        name: its name in a scenario, for one of the package.
        line: its line in `privdec list`.
        needs: settings, `key.path=value`, that a scenario must have for it to run, such as its graph.
        variants: settings worth testing beside its defaults; the laws hold for each.
        Section: declares the keys that belong to it, beside those of all algorithms that descend along gradients.
        weights: the mixing weights that its theory needs; None if it exchanges nothing.
        program: the steps and exchanges of one round, in order.
        slots: the number of [m, d] buffers in its state, for memory estimates.
        edge_slots: the number of vectors [d] that it holds at the peak for each pair of a peer and an in-neighbour,
            the peer itself included.
        open_rows: the rows of the state that other peers may see: functions of what was released, here and elsewhere.
            Every other row stays with its peer.
        steps_per_round: the private steps of an active peer in a round.
        remembers_clipped: whether a step publishes gradients that were clipped to the norms of earlier steps.
        table: the kind of memory of past gradients that it keeps, a key of `table_sizes`; None if it keeps none.
        noise_follows_rate: whether a peer's noise reaches the others only by steps that are in proportion to its
            learning rate, so that a lower one lets it count less (`privacy.noise_cap`).
        tried_on_own_labels: whether its models are also tried on each peer's own labels, if that costs no privacy.
        steadied_by: the keys of its section to lower if a run diverges.
        mixing_steps: how often the peers exchange in a round.
        decay: the decay of the averages of iterates that are its models; None if its models are the last iterates.
        averaged: the rows of which it keeps averages, under their names after AVERAGE.
        paper_noise: the paper whose formula `calibration: paper` uses; None if no paper claims an ε.
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
    noise_follows_rate: ClassVar[bool] = True
    tried_on_own_labels: ClassVar[bool] = False
    steadied_by: ClassVar[tuple[str, ...]] = ("learning_rate",)
    decay: float | None = None
    averaged: tuple[str, ...] = ()
    remembers_clipped: bool = False
    table: str | None = None
    mixing_steps: int = 1
    _robust: RobustMix | None = None

    def __init__(self, section: AlgorithmSection) -> None:
        self.section = section
        self.name = section.name
        self.steps_per_round = section.steps_per_round

        average: AverageSection | None = getattr(section, "average", None)
        if average is not None:
            self.decay = average.decay
            self.averaged = tuple(name for name in ("x", "w") if name in self.open_rows)
            self.open_rows = (*self.open_rows, *(AVERAGE + name for name in self.averaged))

    @property
    def final_exchange(self) -> Mix:
        """The exchange that makes the peers' models agree after the last round.

        It is the last mixing of the program, or one of x, and mixes averages if these are the models.
        """
        mixes = [item for item in self.program if isinstance(item, Mix)]
        last = Mix(("x",))
        if mixes:
            last = replace(mixes[-1], mixing_step=0)

        if not self.averaged:
            return last
        names = tuple(AVERAGE + name for name in self.averaged)
        return replace(last, names=names)

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

    def make_robust(self, robust: RobustMix) -> None:
        """Let receivers judge what they mix, or some peers lie, in every mixing of the program.

        Args:
            robust: with the rule, the attack and what they need; its names do not count.

        Raises:
            ScenarioError: the program has other exchanges than `Mix`.
        """
        exchanges = [item for item in self.program if isinstance(item, Exchange)]
        if not exchanges or not all(isinstance(item, Mix) for item in exchanges):
            key = "attack"
            if robust.rule is not None:
                key = "network.robust"
            raise ScenarioError(
                f"{key} is about models that are mixed, and algorithm.name={self.name} sends gradients, or nothing: "
                f"take an algorithm that only mixes, such as privsgp or d-psgd, or leave {key} out",
                code="network.robust-algorithm",
            )
        self._robust = robust
        self.program = tuple(self.robustly(item) if isinstance(item, Mix) else item for item in self.program)

    def robustly(self, mix: Mix) -> Mix:
        """Return a mixing as this run performs it: with receivers that judge, if they do."""
        if self._robust is None:
            return mix
        return replace(self._robust, names=mix.names, mixing_step=mix.mixing_step)

    def __init_subclass__(cls) -> None:
        """Drop an inherited declaration if a subclass, or a class mixed in, changes what it may be about."""
        super().__init_subclass__()
        if changed_since_declared(cls, harmless=HARMLESS):
            cls.released = Algorithm.released  # type: ignore[method-assign]

    def released(self, step: int, drawing: Drawing) -> Declaration:
        """Declare what a private step publishes; None, the default, declares nothing and costs ε = ∞.

        Args:
            step: its number in the run, from 0, with `steps_per_round` steps a round.
            drawing: how the peer draws its examples.
        """
        return None

    def buffers(self, participation: Participation) -> int:
        """Return the number of [m, d] buffers that a run takes at once: the state's, and one to mix or work in."""
        return max(3, self.slots + 1)

    def step_sizes(self, n_peers: int, rounds: int) -> LearningRate:
        """Return the factor of each peer's steps: the learning rate, unless an algorithm has none."""
        section: Any = self.section
        rate = np.asarray(section.learning_rate, dtype=np.float64)
        return LearningRate(
            base=np.broadcast_to(rate, (n_peers,)),
            decay=section.learning_rate_decay,
            rounds=rounds,
            cosine=section.learning_rate_schedule == "cosine",
            warmup=section.learning_rate_warmup or 0.0,
        )

    @property
    def optimizer(self) -> LocalOptimizer | None:
        """The optimizer that turns each peer's noised gradients into steps; None if its steps are plain."""
        section: OptimizerSection | None = getattr(self.section, "optimizer", None)
        return None if section is None else LocalOptimizer(section)

    def exchange(
        self, topology: Topology, weights: str, participation: Participation, seed: int
    ) -> tuple[Mixing, Participation]:
        """Return the mixing over a graph, and who is active: as the scenario sets them unless an algorithm differs."""
        return Mixing(topology, weights, participation, self.mixing_steps), participation

    def conserved_weights(self, sizes: np.ndarray) -> np.ndarray:
        """Return the weight of each peer's row in the sum that mixing conserves, [n_peers]; 1 by default.

        Args:
            sizes: the number of examples of each peer, int64 [n_peers].
        """
        return np.ones(len(sizes))

    def weight_factor(self, mixing: Mixing, rounds: int) -> float:
        """Return the factor of the mixing weights of a run in its paper's formula for the noise; 1 by default."""
        return 1.0

    def check_public(self, public: PublicSet, loss: Loss) -> None:
        """Refuse a public set that lacks what the algorithm needs; by default it needs nothing.

        Raises:
            ScenarioError: the message names what is needed.
        """

    def check_model(self, kernel: GradientKernel) -> None:
        """Refuse a model that the algorithm cannot train; by default it can train any.

        Raises:
            ScenarioError: the message names what can.
        """

    def cautions(self, active: int, n_peers: int, rounds: int, *, server: bool) -> list[str]:
        """Return warnings about its settings before a run: sentences with a remedy.

        Args:
            active: how many of n_peers are active in a round.
            rounds: the number of rounds of the run.
            server: whether only the active peers are averaged.
        """
        return []

    def table_sizes(self, kernel: GradientKernel, sizes: np.ndarray, d: int, batch: int) -> dict[str, int | None]:
        """Return the size of each kind of table that it can keep, in numbers; None if the model cannot have that kind.

        Args:
            sizes: the number of examples of each peer hosted here.
            d: the number of parameters.
            batch: the number of examples in a step.
        """
        return {}

    def full_passes(self, rounds: int) -> int:
        """Return how many of the first rounds use all local examples, whatever the batch."""
        return 0

    def trials(self, members: float) -> float:
        """Return how many models a peer tries on the validation set in a round; 0 by default.

        Args:
            members: the size of its neighbourhood, itself included.
        """
        return 0.0

    def initial(self, cohort: Cohort) -> dict[str, Tensor]:
        """Return the rows before round 0: every peer starts at the same parameters."""
        return {"x": cohort.initial.expand(len(cohort.peers), -1).clone()}

    def debiased(self, rows: dict[str, Tensor]) -> Tensor:
        """Return each peer's model, [m, d]."""
        return rows["x"]

    def models(self, rows: dict[str, Tensor]) -> Tensor:
        """Return the models that the peers hand out, [m, d]: of their last rows, or of their averaged rows."""
        return self.debiased(self._averages(rows))

    def mean_model(self, rows: dict[str, Tensor]) -> Tensor:
        """Return the mean of the network's models, or of their averages, [d]."""
        return self.network_mean(self._averages(rows))

    def _averages(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        return rows | {name: rows[AVERAGE + name] for name in self.averaged}

    def initial_averages(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows of averages before round 0.

        Raises:
            ScenarioError: the algorithm's models do not come from the rows that are averaged.
        """
        if self.averaged:
            # Models that come from x cannot be computed without it, so this raises KeyError for all sound algorithms.
            with suppress(KeyError):
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
            beta = min(self.decay or 0.0, k / (k + 1))
            state.rows[AVERAGE + name].lerp_(state.rows[name], 1 - beta)

    def extra_metrics(self, rows: dict[str, Tensor], rounds: range, mixing: Mixing | None) -> dict[str, Any]:
        """Return further entries for a line of metrics, by name; none by default.

        Args:
            rows: rows of the state, at least those that others may see.
            rounds: the rounds since the previous line.
        """
        return {}

    def personal(self, rows: dict[str, Tensor]) -> Tensor | None:
        """Return each peer's personalized model, [m, d]; None if there are none, or their rows are not given."""
        return None

    def network_mean(self, rows: dict[str, Tensor]) -> Tensor:
        """Return the mean of the network's models, [d]: Σ_i x_i / Σ_i w_i, which mixing conserves."""
        total = rows["x"].sum(0)
        if "w" in rows:
            return total / rows["w"].sum()
        return total / len(rows["x"])


def is_step_next(algorithm: Algorithm, state: State) -> bool:
    """Return whether `advance` takes a step; else it only goes on to an exchange, or ends the round."""
    program = algorithm.program
    return state.at < len(program) and not isinstance(program[state.at], Exchange)


def advance(algorithm: Algorithm, cohort: Cohort, state: State) -> Exchange | None:
    """Run steps up to the next exchange, or to the end of the round.

    Returns:
        The exchange that the caller has to perform. None if the round is over; `state.round_index` is then the next
        round.

    Raises:
        RunError: a step gave a row another shape or type, or removed one that other peers may see.
    """
    program = algorithm.program
    while state.at < len(program):
        item = program[state.at]
        if isinstance(item, Exchange):
            state.waiting = True
            return item

        cohort.state = state
        before = {name: (row.shape, row.dtype) for name, row in state.rows.items()}
        item(cohort, state)
        _check_kept(algorithm, item, state, before)
        state.at += 1

    if algorithm.averaged:
        algorithm.average_(state)
    state.at = 0
    state.round_index += 1
    return None


def _check_kept(
    algorithm: Algorithm, step: Step, state: State, before: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> None:
    """Refuse a step that reshaped or lost a row: the error would else come later, from mixing or a checkpoint."""
    rows = state.rows
    for name, kept in before.items():
        row = rows.get(name)
        if isinstance(row, torch.Tensor) and (row.shape, row.dtype) == kept:
            continue
        # A step may remove what an earlier one of the round left for it.
        if row is None and name not in algorithm.open_rows:
            continue

        now = type(row).__name__
        if row is None:
            now = "nothing"
        elif isinstance(row, torch.Tensor):
            now = f"{row.dtype} {list(row.shape)}"
        shape, dtype = kept
        raise RunError(
            f"algorithm {algorithm.name}: in round {state.round_index} the step {_name_of(step)} turned row {name!r} "
            f"from {dtype} {list(shape)} into {now}: a step must keep the shape and type of every row",
            code="algorithm.row-changed",
        )


def _name_of(step: Step) -> str:
    return getattr(step, "__name__", type(step).__name__)


def check_algorithm(algorithm: Algorithm, where: str) -> None:
    """Refuse an algorithm that lacks a part.

    Args:
        where: its name in errors.

    Raises:
        ScenarioError: it has no program, or no weights, or weights that do not fit the program.
    """
    program: Any = getattr(algorithm, "program", None)
    is_program = isinstance(program, tuple) and len(program) > 0 and all(map(callable, _steps(program)))
    if not is_program:
        raise ScenarioError(f"{where}: program must be a tuple of steps and exchanges", code="algorithm.program")

    # None is a value of its own here: an algorithm that exchanges nothing.
    weights = getattr(algorithm, "weights", "missing")
    if weights not in ("column-stochastic", "doubly-stochastic", None):
        raise ScenarioError(f"{where}: weights must be 'column-stochastic', 'doubly-stochastic' or None")

    has_exchanges = any(isinstance(item, Exchange) for item in program)
    if weights is None and has_exchanges:
        raise ScenarioError(
            f"{where}: weights must not be None, because the program has exchanges", code="algorithm.weights"
        )

    hidden = [name for name in _sent_rows(program) if name not in algorithm.open_rows]
    if hidden:
        raise ScenarioError(
            f"{where}: the program sends {', '.join(map(repr, hidden))}, and open_rows={algorithm.open_rows} must name "
            "every row that other peers may see: add it there if it is a function of what was released",
            code="algorithm.open-rows",
        )


def check_initial(algorithm: Algorithm, rows: Mapping[str, Tensor], n_rows: int) -> None:
    """Refuse initial rows that lack one that the program sends or others may see, or that are not one a peer.

    Args:
        rows: what `initial` returned.
        n_rows: how many peers this process hosts.

    Raises:
        ScenarioError: naming the row.
    """
    averages = {AVERAGE + name for name in algorithm.averaged}
    expected = (*_sent_rows(algorithm.program), *algorithm.open_rows)
    missing = [name for name in dict.fromkeys(expected) if name not in rows and name not in averages]
    if missing:
        raise ScenarioError(
            f"algorithm {algorithm.name}: initial() returns the rows {sorted(rows)} and must also return "
            f"{', '.join(map(repr, missing))}, which the program sends or open_rows names",
            code="algorithm.initial",
        )

    for name, row in rows.items():
        if not isinstance(row, torch.Tensor) or row.ndim == 0 or len(row) != n_rows:
            what = type(row).__name__
            if isinstance(row, torch.Tensor):
                what = str(list(row.shape))
            raise ScenarioError(
                f"algorithm {algorithm.name}: initial() returns {name!r} of {what}: it must be a tensor with one row "
                f"for each of the {n_rows} peers here",
                code="algorithm.initial",
            )


def _sent_rows(program: tuple[Step | Exchange, ...]) -> list[str]:
    """Return the names of the rows that exchanges send. A reply sends edges, which are not rows."""
    sent: list[str] = []
    for item in program:
        if isinstance(item, Exchange) and not isinstance(item, Reply):
            sent.extend(item.names)
    return list(dict.fromkeys(sent))


def _steps(program: tuple[Step | Exchange, ...]) -> list[Step]:
    return [item for item in program if not isinstance(item, Exchange)]


def push_weights(cohort: Cohort) -> Tensor:
    """Return the push-sum weights before round 0: one for every peer, [m]."""
    return torch.ones(len(cohort.peers), dtype=cohort.dtype, device=cohort.device)
