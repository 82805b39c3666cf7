"""What a run would cost, and who would learn what of an example, from Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flower_privdec.api.notebook_display import ShowsItself
from flower_privdec.api.running import threads_kept
from flower_privdec.api.scenarios import as_scenario
from flower_privdec.common.errors import called_from_python
from flower_privdec.experiment import Experiment
from flower_privdec.planner.observers import privacy_statement, statement_text
from flower_privdec.planner.plan import make_plan
from flower_privdec.reporting.console import plan_text
from flower_privdec.reporting.look import drawing
from flower_privdec.reporting.plots import draw_budget, html_of, picture
from flower_privdec.scenario import Scenario

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class Plan(ShowsItself):
    """The cost of a run; printed, the output of `privdec plan`.

    Attributes:
        name: the name of the scenario.
        algorithm: its name.
        rounds: K.
        peers: for each its noise (sigma at rounds 0, K/2 and K-1; noise_multiplier), epsilon, epsilon_after_quarters
            and delta; weight (how much its gradient counts in the mean) and noise_share (of the noise in the model that
            all share; both None if nothing is exchanged); epsilon_of_replies_to_one (only of the replies to one
            neighbour, not of all it receives; None if all neighbours receive the same); and the values of a paper's
            formulas (claimed_epsilon, mu_total, mu_0, mu_bar; else None).
        ledger: the folder that the scenario names, with the largest ε of any peer before and after this run; None if
            the run has its own ledger.
        optimal_rounds: K* of PrivSGP-VR's eq. 12, a guide; None if it is not known.
        memory_bytes: estimated.
        seconds: estimated on this machine from a few timed rounds; None if the run does not fit into memory.
        topology: joint connectivity, spectral gap, and the rounds of final mixing on a network; None if nothing is
            exchanged.
        warnings: each with a remedy.
        facts: all of it, as `privdec plan --json` prints it.
    """

    name: str
    algorithm: str
    rounds: int
    peers: list[dict[str, Any]]
    ledger: dict[str, Any] | None
    optimal_rounds: int | None
    memory_bytes: int
    seconds: float | None
    topology: dict[str, Any] | None
    warnings: list[str]
    facts: dict[str, Any]

    @property
    def epsilon(self) -> float:
        """The largest ε of any peer at the end; infinity without privacy."""
        return max(float(row["epsilon"]) for row in self.peers)

    def __str__(self) -> str:
        """Return the plan as `privdec plan` prints it."""
        return plan_text(self.facts)

    def details(self) -> str:
        """Return all of it as text, as `privdec plan --verbose` prints it."""
        return plan_text(self.facts, verbose=True)

    def _repr_html_(self) -> str:
        has_privacy = self.epsilon < float("inf")
        return html_of(str(self), picture("ε", self.plot) if has_privacy else [])

    def plot(self) -> Figure:
        """Return a figure of each peer's ε over the rounds, after each quarter.

        Raises:
            ScenarioError: matplotlib is not installed.
        """
        with drawing():
            return draw_budget(self.rounds, [row["epsilon_after_quarters"] for row in self.peers])


@called_from_python()
def plan(scenario: Scenario | str | Path) -> Plan:
    """Plan a run: its noise, ε over the rounds, memory and time. Nothing is charged or written.

    Raises:
        ScenarioError: when a part is missing or two parts do not fit.
    """
    with threads_kept():
        facts = make_plan(Experiment.build(as_scenario(scenario)))
    return Plan(facts=facts, **{name: facts[name] for name in Plan.__dataclass_fields__ if name != "facts"})


@dataclass(frozen=True, eq=False, repr=False)
class WhoLearnsWhat(ShowsItself):
    """What a scenario promises towards each observer; printed, the output of `privdec plan --privacy`.

    Attributes:
        observers: of each who it is (`observer`), what it sees (`sees`), and the least and the largest ε of the peers
            towards it (`epsilon`), infinity if there is no bound.
        by_colluders: if noise cancels between peers, the largest ε of a peer for each number of peers that collude.
        facts: all of it, as `privdec plan --privacy --json` prints it.
    """

    observers: list[dict[str, Any]]
    by_colluders: dict[int, float]
    facts: dict[str, Any]

    def __str__(self) -> str:
        """Return the statement as `privdec plan --privacy` prints it."""
        return statement_text(self.facts)


@called_from_python()
def who_learns_what(scenario: Scenario | str | Path) -> WhoLearnsWhat:
    """Return what a run would release, and the ε towards each observer. Nothing is trained, charged or written.

    Raises:
        ScenarioError: when a part is missing or two parts do not fit.
    """
    with threads_kept():
        facts = privacy_statement(Experiment.build(as_scenario(scenario)))
    observers = [{**one, "epsilon": [float(value) for value in one["epsilon"]]} for one in facts["observers"]]
    by_colluders = {count: float(value) for count, value in facts["by_colluders"]}
    return WhoLearnsWhat(observers, by_colluders, facts)
