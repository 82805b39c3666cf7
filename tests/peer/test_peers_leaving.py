"""Peers that leave, restart, or are cut off: the noise that their releases really had, counted from outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tiny_scenario import Tiny

from flower_privdec.peer.faults import FaultSchedule
from flower_privdec.peer.memory_trainer import MemoryHome, rehearsed
from flower_privdec.peer.virtual_network import VirtualNetwork
from flower_privdec.privacy.noise.kinds.pair_noise import CancellingNoise
from flower_privdec.pushsum.attendance import SILENT
from flower_privdec.scenario import Scenario
from tools.schedules.noise_audit import Audit, ShortNoiseError, audited

pytest.importorskip("cryptography")

NOTICED = SILENT + 4  # rounds: news takes two, and a round is under way at either end
PLACE = [
    "rounds=20",
    "topology={name: directed-exponential, mixing_steps: 2}",
    "privacy.noise={kind: cancelling, colluding: 1, secrets: complete, strength: 2.0}",
    "network={links: local}",
]
FAULTS = {
    "nothing": "",
    "gone early": "{kind: crash, peer: 3, at: 0.9}",
    "gone late": "{kind: crash, peer: 3, at: 3.0}",
    "two gone": "{kind: crash, peer: 3, at: 1.0}, {kind: crash, peer: 1, at: 1.6}",
    "restarted": "{kind: crash, peer: 3, at: 1.5, down: 0.2}, {kind: crash, peer: 2, at: 2.5, down: 1.0}",
    "killed in a step": "{kind: crash, peer: 3, work: train, nth: 6, point: within, down: 0.1}",
    "cut off": "{kind: partition, groups: [[3]], at: 1.0, until: 4.0}",
    "frozen": "{kind: freeze, peer: 3, at: 1.0, until: 2.5}",
    "restored": "{kind: restore, peer: 3, copied_at: 0.8, at: 2.0, down: 0.2}",
    "slow": "{kind: slow, peer: 3, factor: 5, at: 1.0}",
}


@pytest.fixture
def audit() -> Iterator[Audit]:
    """Record what the noise mechanism really adds, whatever it believes."""
    with audited() as audit:
        yield audit


def run(scenario: Scenario, faults: str, links: str = "") -> VirtualNetwork:
    schedule = FaultSchedule.parse(f"{{links: {{latency: 0.005{links}}}, work: {{train: 0.3}}, faults: [{faults}]}}")
    network = VirtualNetwork(MemoryHome(rehearsed(scenario)), range(scenario.n_peers), schedule)
    try:
        network.run(until=120.0)
    finally:
        network.close()
    return network


@pytest.mark.parametrize("name", FAULTS)
def test_every_release_has_the_noise_it_needs(name: str, tiny: Tiny, audit: Audit) -> None:
    """Whoever leaves, and few rounds' draws are left to one side: until the others notice, and when it comes back."""
    scenario = tiny(*PLACE)
    network = run(scenario, FAULTS[name])
    last = scenario.rounds - 1
    audit.check(colluding=1)
    one_sided = {step for _, step in audit.one_sided()}
    of_gone = [one for one in audit.releases if one.peer == 3]
    assert {one.step for one in audit.releases if one.peer == 0} == {*range(scenario.rounds)}

    if name == "nothing":
        assert not one_sided
    elif "gone" in name:
        died = max(one.step for one in of_gone)
        assert 0 < died < last
        if name != "two gone":
            assert one_sided <= {*range(died + 1, died + 1 + NOTICED)}
            peers: dict[int, Any] = dict(network.peers)
            left_out = [peers[number].status()["left_out"] for number in (0, 1, 2)]
            assert {*map(tuple, left_out)} == {("3",) if died + NOTICED < last else ()}
    elif name in ("restarted", "cut off", "frozen"):
        assert network.ends == dict.fromkeys(range(scenario.n_peers))
        assert len(of_gone[-1].draws) == scenario.n_peers - 1, "it shares noise with all again"
        interruptions = FAULTS[name].count("kind")
        assert len(one_sided) <= interruptions * (NOTICED + SILENT)


def test_adding_no_more_for_absent_partners_breaks_it(
    tiny: Tiny, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant: it leaves partners out, and adds as much noise of its own as with all of them."""
    monkeypatch.setattr(CancellingNoise, "_own_noise", lambda *whatever: 1.0)
    run(tiny(*PLACE), FAULTS["gone early"])
    with pytest.raises(ShortNoiseError):
        audit.check(colluding=1)


SIX = ["n_peers=6", "rounds=20", "topology={name: directed-exponential, mixing_steps: 3}"]
WEATHER = {
    "fair": "{kind: crash, peer: 3, at: 1.5}",
    "rough": "{kind: crash, peer: 3, at: 1.5}, {kind: freeze, peer: 1, at: 5.0, until: 7.0}",
    "back": "{kind: restore, peer: 3, copied_at: 0.8, at: 1.5, down: 3.0}, {kind: crash, peer: 5, at: 6.0, down: 0.2}",
}


@pytest.mark.parametrize("name", WEATHER)
def test_promised_noise_hides_every_release(name: str, tiny: Tiny, audit: Audit) -> None:
    """However many collude: on a network that loses and delays, with peers that stop, come back, and are restored."""
    scenario = tiny(*PLACE, *SIX)
    links = "" if name == "fair" else ", loss: 0.05, jitter: 0.05, duplicates: 0.1"
    network = run(scenario, WEATHER[name], links)
    peers: dict[int, Any] = dict(network.peers)
    plan = peers[0].trainer.pair_plan
    for colluding in range(1, 5):
        audit.check(colluding, float(plan.left(colluding)[0, 0]))

    # In fair weather all come to add what is enough together, over what each needs.
    if name == "fair":
        alone = plan.own_with(0, 0, np.array([1, 2, 4, 5]))
        together = plan.levels(0, np.arange(6) == 3)[0]
        last = [one.own / one.needed for one in audit.releases if one.step == scenario.rounds - 1]
        assert plan.planned[0, 0] < together < alone - 0.01
        assert last == pytest.approx([together] * 5, rel=1e-5)
