"""What a ledger's charges cost towards other observers than those that it counts."""

from __future__ import annotations

import pytest
from tiny_scenario import Build
from variants import settings_for

from flower_privdec.experiment.spent import noise_ratios, with_noise_times
from flower_privdec.privacy.accountant.accounting import epsilon_of_runs

CANCELLING = ["privacy.noise={kind: cancelling, colluding: 1, secrets: complete}", "topology.name=complete"]


@pytest.mark.parametrize(
    ("settings", "towards"),
    [
        (CANCELLING, "if_all_collude"),
        ([*CANCELLING, "privacy.epsilon=[1, 2, 3, 4]"], "if_all_collude"),
        (settings_for("algorithm.name=dp-cga"), "replies"),
    ],
)
def test_charges_with_another_observers_noise_cost_what_the_plan_says(
    settings: list[str], towards: str, build: Build
) -> None:
    plan = build("rounds=6", *settings).own.protection
    assert plan is not None
    ratios, expected = noise_ratios(plan), {"if_all_collude": plan.collusion_epsilons(6)}
    expected["replies"] = plan.reply_epsilons(6)
    assert list(ratios) == [towards]
    for account, ratio, cost in zip(plan.accounts, ratios[towards], expected[towards], strict=True):
        charged = [(account.releases(0, 6),)]
        assert epsilon_of_runs(with_noise_times(charged, ratio), account.delta) == pytest.approx(cost)


def test_without_another_observer_there_is_no_ratio(build: Build) -> None:
    assert noise_ratios(build("rounds=6").own.protection) == noise_ratios(None) == {}
