"""Training alone: what a peer reaches without collaboration."""

from __future__ import annotations

from flower_privdec.common.errors import ArgumentError
from flower_privdec.core.algorithm import Algorithm
from flower_privdec.core.cohort import Cohort
from flower_privdec.core.exchange import State
from flower_privdec.privacy.mechanism.declared import one_sum
from flower_privdec.scenario import DescentSection
from flower_privdec.scenario.sections import Scenario


def descend(cohort: Cohort, state: State) -> None:
    """Take x_i ← x_i - γ g̃_i(x_i), in place."""
    cohort.add_step_(state.rows["x"], state.rows["x"], state.round_index)


class Local(Algorithm):
    """Descend on one's own data and exchange nothing: x_i^{k+1} = x_i^k - γ g̃_i(x_i^k; ξ_i^k).

    The baseline every exchange has to beat at the same privacy. Source: none needed.
    """

    name = "local"
    line = "every peer alone (no exchange): the baseline"

    weights = None
    program = (descend,)
    released = one_sum


class DPSGD(Local):
    """Descend on pooled data at one peer: DP-SGD, the centralized reference. Source: Abadi et al. 2016, Alg. 1."""

    name = "dp-sgd"
    line = "one peer with all data (DP-SGD): the centralized reference"

    class Section(DescentSection):
        """Stochastic gradient steps at one peer."""

        def check_scenario(self, scenario: Scenario) -> None:
            """Refuse several peers."""
            if scenario.n_peers > 1:
                raise ArgumentError(
                    f"n_peers={scenario.n_peers} must be 1 for dp-sgd, the centralized reference; use local for more",
                    code="scenario.n-peers",
                )

    needs = ("n_peers=1",)
    paper_noise = "moments"
    released = one_sum
