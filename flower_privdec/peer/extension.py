"""More rounds for a run that is under way: what its members' list says, and what a peer may spend for them.

The noise of a peer was solved so that the rounds of its scenario cost its budget. If the list gives the run more
rounds, *the noise of each step stays*, and ε grows with every further step. How far is for the device's owner to say:

    the bound    `privacy.epsilon`, to which the owner agreed with the scenario; or more, by --max-epsilon
    the plan     all rounds at the same noise; the ledger allows those that fit the bound, beside all that it has
    beyond it    the peer takes part as one whose budget is spent: it mixes, reads no example, and its ε stays

So a peer looks at the longer plan before it takes a further step, each step is paid for on disk before an example is
read, as any step is, and nobody but the owner can make it spend more. No peer has to leave: one whose bound is reached
goes on handing mass and models on, for otherwise the others would lose what it holds.

That there are more rounds may be decided by someone who looked at the models. What then holds without any doubt is the
bound: to stop before it is reached only hides releases. The ε that is shown is that of the steps that were taken.

Peers hear of an entry at different moments, some in the middle of the run and some when they are done. All of them go
on from the same place: after the last round of before. What a peer did of final mixing until then moved no number that
is private, and its mass stays where it is. In the counts by which peers tell each other how far they are, each end of
before has a gap (`GAP`), so that a count never goes back, and whoever has not heard of the entry takes nothing of the
rounds after it.
"""

from __future__ import annotations

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.formatting import epsilon_text
from flower_privdec.experiment import OwnParts
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.sections import CorrelatedSection

GAP = 2**40  # exchanges that stand for the final mixing of rounds that were followed by more


def no_extension(scenario: Scenario, cancels: bool) -> str:
    """Return why a network has no more rounds than planned, in graphs that peers may join; "" if it may have some.

    Args:
        cancels: whether noise is shared between peers.
    """
    if scenario.network.mode == "synchronous":
        return "network.mode=synchronous: all peers would have to hear of it before the same round"
    if cancels:
        return "privacy.noise.kind=cancelling: its noise was planned to cancel at the end of the first rounds"
    if scenario.participation.kind != "all":
        return f"participation.kind={scenario.participation.kind}: who is active was drawn for the first rounds"

    private = scenario.private
    if private is None:
        return ""
    if private.calibration == "paper":
        return "privacy.calibration=paper: its formula is for one number of rounds"
    if isinstance(private.noise, CorrelatedSection):
        return "privacy.noise.kind=correlated: its noise was planned for the first rounds"
    if private.noise is not None:
        return "privacy.noise.module: what more rounds cost does not follow from what it declares for the first ones"
    if private.noise_cap is not None:
        return "privacy.noise_cap: learning rates follow from the noise of all rounds"
    if private.schedule is not None or scenario.algorithm.own_schedule is not None:
        return "a schedule of clip norms and noise over the rounds (privacy.schedule, or the algorithm's own)"
    if scenario.data.batch.sampling == "shuffle":
        return "data.batch.sampling=shuffle: the last epoch was paid as it was planned"
    return ""


def check_bound(scenario: Scenario, peer: int, most: float | None) -> None:
    """Refuse a bound that is none.

    Args:
        most: what the owner of the device gave; None if nothing.

    Raises:
        ScenarioError: there is no privacy, or the scenario's budget is larger.
    """
    if most is None:
        return
    if scenario.private is None:
        raise ScenarioError(
            "--max-epsilon bounds what more rounds may cost, and the scenario has privacy: none: leave it out",
            code="peer.max-epsilon",
        )
    budget = _budget(scenario, peer)
    if budget is not None and not most >= budget:
        raise ScenarioError(
            f"--max-epsilon {most:g} must be at least privacy.epsilon={budget:g}, for which the noise is solved: give "
            f"{budget:g} or more, or lower privacy.epsilon in the scenario of all peers",
            code="peer.max-epsilon",
        )


def _budget(scenario: Scenario, peer: int) -> float | None:
    """Return a peer's budget by its scenario."""
    assert scenario.private is not None
    epsilon = scenario.private.epsilon
    return epsilon[peer] if isinstance(epsilon, tuple) else epsilon


def extended(scenario: Scenario, own: OwnParts, peer: int, rounds: int, most: float | None) -> Scenario:
    """Return a scenario with more rounds, the same noise, and the bound of a peer's owner as its budget.

    Args:
        own: of the peer, with the noise that was solved for the scenario's own rounds.
        most: the bound; None for the scenario's budget.
    """
    private = scenario.private
    if private is None:
        return scenario.model_copy(update={"rounds": rounds})

    assert own.protection is not None
    noise = float(own.protection.noise_multipliers[0, 0])  # that of all steps, see `no_extension`
    bound = _budget(scenario, peer) if most is None else most
    section = private.model_copy(update={"noise_multiplier": noise, "epsilon": bound})
    return scenario.model_copy(update={"rounds": rounds, "privacy": section})


def what_fits(scenario: Scenario, peer: int, covered: int) -> str:
    """Return in words how far a peer's bound goes, and what the owner of its device may do.

    Args:
        scenario: with more rounds, see `extended`.
        covered: of so many rounds the steps fit.
    """
    bound = _budget(scenario, peer)
    assert bound is not None  # without one, all fit
    return (
        f"the run was given {scenario.rounds} rounds, and ε = {epsilon_text(bound)}, which is all that this device may "
        f"spend, covers the steps of {covered}: in the others it mixes and reads no example. Its owner can allow more "
        "by --max-epsilon, and start it again"
    )
