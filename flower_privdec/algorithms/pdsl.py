"""PDSL: cross-gradients weighted by their Shapley values on a public validation set, with momentum."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from flower_privdec.algorithms.cross_gradients import CrossGradients, answers, cross_gradients, one_for_each
from flower_privdec.algorithms.shapley import LARGEST_EXACT, Game, aggregation_weights, circular, exact, monte_carlo
from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.common.fields import Count, check_keys
from flower_privdec.core.cohort import Cohort
from flower_privdec.core.exchange import Gather, Mix, Reply, State
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.participation import Participation
from flower_privdec.graph.topology import Topology
from flower_privdec.privacy.mechanism.declared import PaperNoise
from flower_privdec.rows.keys import keyed_generator
from flower_privdec.scenario import DescentSection
from flower_privdec.scenario.sections import Scenario

if TYPE_CHECKING:
    from torch import Tensor

    from flower_privdec.data import PublicSet
    from flower_privdec.tasks.losses import Loss

DIGITS = 6  # of a Shapley value in the metrics, behind the point


class PDSL(CrossGradients):
    """Weigh what the neighbours' gradients at one's model add to its accuracy on public data, then gossip.

    With W symmetric and doubly stochastic, M_i = {j: ω_ij > 0} and ĝ_ji from `cross_gradients`, round t at peer i is

        x_ij = x_i - γ ĝ_ji                                                         eq. 15, for every j in M_i
        φ_ij = Shapley value of j in v(S) = accuracy on Q of mean {x_ij: j in S}    eq. 16 to 18, or Algorithm 2
        π_ij = φ̂_ij / (ω_ij Σ_k φ̂_ik),  φ̂ = (φ - min φ) / (max φ - min φ)          eq. 19 and 20
        û_i = α u_i + Σ_j π_ij ĝ_ji,  x̂_i = x_i - γ û_i                            eq. 21 to 23
        u_i ← Σ_j ω_ij û_j,  x_i ← Σ_j ω_ij x̂_j                                    eq. 24 and 25

    Where the paper is silent: v(∅) = 0, as its Definition 3 has it. Where all φ are equal, eq. 19 is 0/0, and φ̂ is 1
    for all. A model that is not finite is worth 0. The π_ij of a round sum to about 1/ω: on a complete graph of M peers
    the step is M times that of a mean of gradients, which no cap changes, so the learning rate has to be smaller by as
    much. By eq. 19 the neighbour that adds least has weight 0. A neighbour whose budget is spent answers 0. An absent
    peer keeps its model and its momentum.

    Shortcuts that are not the paper's, off unless asked for: `shapley: circular`, `truncation` and
    `validation_subsample`.

    Privacy: see `cross_gradients`. φ, π, momentum and model are computed from releases and from Q, which is public, so
    they cost nothing, and the φ may be told: they say how a noised gradient did on Q. A Q of private examples would be
    a release of its own, in every round; it must come from the public test set.

    Deviations from the paper: clipping is example by example and the noised sum divided by the expected batch, where
    the paper clips the gradient of the whole batch; noise is solved by the exact accountant for all rounds.

    Source: Wang et al. (PDSL), Algorithms 1 and 2.
    """

    name = "pdsl"
    line = "cross-gradients weighted by Shapley values on a public validation set (PDSL, Alg. 1)"

    class Section(DescentSection):
        """PDSL: cross-gradients weighted by what each neighbour's adds to the accuracy on data.validation.

        Attributes:
            momentum: α, the share of the last round's mixed momentum in this one's.
            shapley: `exact` tries every coalition of a neighbourhood, of 12 peers at most; `monte-carlo` those that
                come up in random permutations; `circular` the arcs of random circles, which is closer at equal cost.
            permutations: R, of each peer in each round; for monte-carlo and circular, which need it.
            truncation: a permutation ends once its accuracy is within this of that of the whole neighbourhood; for
                monte-carlo only; left out, none ends.
            validation_subsample: how many examples of data.validation to try coalitions on, drawn again in each round;
                left out, all.
        """

        no_optimizer = "has a momentum of its own, which is sent"
        paper_constants = ("phi_min",)

        momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5
        shapley: Literal["exact", "circular", "monte-carlo"] = "exact"
        permutations: Count | None = None
        truncation: Annotated[float, Field(ge=0, le=1)] | None = None
        validation_subsample: Count | None = None

        def _check(self) -> None:
            super()._check()
            keys_of = {"monte-carlo": ["permutations", "truncation"], "circular": ["permutations"]}
            check_keys(self, keys_of, ["truncation"], "shapley")

        def check_scenario(self, scenario: Scenario) -> None:
            """Refuse the paper's calibration without the constant that it divides by."""
            private = scenario.private
            if private is not None and private.calibration == "paper" and private.paper.phi_min is None:
                raise ArgumentError(
                    "privacy.paper.phi_min is missing: calibration paper of pdsl is eq. 27, which divides by φ̂_min, "
                    "and eq. 19 makes that 0; give the value to pretend, or use calibration rigorous",
                    code="privacy.phi-min",
                )

    needs = ("topology.name=star", "data.test_samples=60", "data.validation=40")
    variants = (
        ("algorithm.shapley=monte-carlo", "algorithm.permutations=3", "algorithm.truncation=0.01"),
        ("algorithm.shapley=circular", "algorithm.permutations=1"),
    )
    open_rows = ("x", "u", "shapley", "evaluations")
    paper_noise: ClassVar[PaperNoise | None] = "cross-gradients"
    released = one_for_each

    def __init__(self, section: Section) -> None:
        super().__init__(section)
        self.options = section
        self.program = (Gather(("x",)), cross_gradients, Reply(("gradient",)), self.weigh, Mix(("x", "u")))

    def initial(self, cohort: Cohort) -> dict[str, Tensor]:
        """Return x, no momentum, and room for the Shapley values of the rounds between two lines of the metrics."""
        rows = super().initial(cohort)
        widest = 1
        if cohort.mixing is not None:
            widest = largest_neighbourhood(cohort.mixing.topology)
        shape = len(cohort.peers), cohort.every, widest
        return rows | {
            "u": torch.zeros_like(rows["x"]),
            "shapley": torch.zeros(shape, dtype=torch.float64, device=cohort.device),
            "evaluations": torch.zeros(shape[0], dtype=torch.int64, device=cohort.device),
        }

    def exchange(
        self, topology: Topology, weights: str, participation: Participation, seed: int
    ) -> tuple[Mixing, Participation]:
        """Refuse a graph whose weights are not symmetric, and neighbourhoods too large for exact values."""
        mixing, participation = super().exchange(topology, weights, participation, seed)
        largest = largest_neighbourhood(topology)
        if self.options.shapley == "exact" and largest > LARGEST_EXACT:
            raise ScenarioError(
                f"algorithm.shapley=exact tries all coalitions of {LARGEST_EXACT} peers at most, and a peer has "
                f"{largest} in its neighbourhood, itself among them: use circular, or a graph with fewer neighbours",
                code="pdsl.neighbourhood",
            )
        return mixing, participation

    def weight_factor(self, mixing: Mixing, rounds: int) -> float:
        """Return the largest (1/ω_min + Σ_j 1/ω_ij) / sqrt(Σ_j 1/ω_ij²) of any peer in any round (eq. 27)."""
        most = 0.0
        for k in range(min(rounds, mixing.topology.period or rounds)):
            _, receivers, weights = mixing.matrix(k).links()
            inverse = 1 / weights
            sums, squares = (np.bincount(receivers, weights=values) for values in (inverse, inverse**2))
            most = max(most, float(((inverse.max() + sums) / np.sqrt(squares)).max()))
        return most

    def check_public(self, public: PublicSet, loss: Loss) -> None:
        """Refuse a run without a validation set, or with one that has no classes."""
        count = self.options.validation_subsample
        if public.validation is None:
            raise ScenarioError(
                "data.validation must say how many public test examples pdsl weighs gradients by: add it",
                code="pdsl.validation",
            )

        if loss.targets != "classes":
            raise ScenarioError(
                f"algorithm.name=pdsl weighs by accuracy, and the task's loss takes {loss.targets}: use dp-cga, which "
                "weighs by none",
                code="pdsl.no-classes",
            )

        if count is not None and count > len(public.validation.y):
            raise ScenarioError(
                f"algorithm.validation_subsample={count} must be at most data.validation={len(public.validation.y)}",
                code="pdsl.subsample",
            )

    def trials(self, members: float) -> float:
        """Return how many coalitions a peer tries, at most."""
        every: float = 2.0**members - 1
        permutations = self.options.permutations
        if permutations is None:
            return every

        of_one = members
        if self.options.shapley == "circular":
            of_one = members * (members - 1) + 1
        return min(every, permutations * of_one)

    def weigh(self, cohort: Cohort, state: State) -> None:
        """Take the weighted step of every active peer, eq. 15 to 23."""
        k = state.round_index
        mixing = cohort.mixing
        if mixing is None:
            raise TypeError("pdsl exchanges gradients and has no mixing weights")

        x = state.rows["x"]
        u = state.rows["u"]
        active = cohort.participation.active(k)
        rates = cohort.learning_rate.at(k)
        state.rows["shapley"][:, k % cohort.every] = 0

        for row, peer in enumerate(state.peers.tolist()):
            if not active[peer]:
                continue
            members, gradients = answers(state, row)
            models_after = x[row] - rates[peer] * gradients  # one for each member's gradient
            values = self._values(cohort, state, row, models_after)

            omega = {sender: weight for sender, _, weight in mixing.hosted(k, state.peers).terms[row]}
            shares = aggregation_weights(values, [omega[member] for member in members.tolist()])
            u[row].mul_(self.options.momentum).add_(cohort.tensor(shares) @ gradients)
            x[row].sub_(u[row], alpha=float(rates[peer]))

        del state.rows["gradient"]
        state.edges.clear()

    def _values(self, cohort: Cohort, state: State, row: int, models: Tensor) -> np.ndarray:
        """Return φ of the members whose models are given, [n], and count what it took."""
        started = time.perf_counter()
        validation = cohort.validation
        if validation is None:
            raise TypeError("pdsl weighs gradients by public examples and has none")

        options = self.options
        k = state.round_index
        if options.validation_subsample is not None:
            drawn = keyed_generator(cohort.seed, "validation-subsample", k)
            validation = validation.some(drawn.choice(len(validation), options.validation_subsample, replace=False))

        game = Game(len(models), lambda coalitions: validation.hits(cohort.kernel, models, coalitions), len(validation))
        if options.permutations is None:
            values = exact(game)
        else:
            generator = keyed_generator(cohort.seed, "permutations", k, int(state.peers[row]))
            if options.shapley == "circular":
                values = circular(game, options.permutations, generator)
            else:
                values = monte_carlo(game, options.permutations, generator, options.truncation)

        state.rows["shapley"][row, k % cohort.every, : len(values)] = torch.from_numpy(values)
        state.rows["evaluations"][row] += game.evaluations
        cohort.game_seconds += time.perf_counter() - started
        return values

    def extra_metrics(self, rows: dict[str, Tensor], rounds: range, mixing: Mixing | None) -> dict[str, Any]:
        """Return φ_ij of each of some rounds as {t: {i: {j: φ}}}, and how many coalitions have been tried so far."""
        table: dict[str, dict[str, dict[str, float]]] = {}
        for slot, k in enumerate(rounds):
            active = np.zeros(0, dtype=bool)
            links = np.zeros((0, 2), dtype=np.int64)
            if mixing is not None:
                active = mixing.participation.active(k)
                links = mixing.links(k)

            table[str(k + 1)] = {
                str(peer): _named(np.union1d(links[links[:, 1] == peer, 0], peer), rows["shapley"][peer, slot])
                for peer in np.flatnonzero(active).tolist()
            }
        return {"shapley": table, "coalition_evaluations": int(rows["evaluations"].sum())}


def _named(members: np.ndarray, values: Tensor) -> dict[str, float]:
    return {str(member): round(value, DIGITS) for member, value in zip(members.tolist(), values.tolist(), strict=False)}


def largest_neighbourhood(topology: Topology) -> int:
    """Return how many peers the largest neighbourhood may ever have, the peer itself among them."""
    support = topology.support()
    return 1 + (int(np.bincount(support[:, 1]).max()) if len(support) else 0)
