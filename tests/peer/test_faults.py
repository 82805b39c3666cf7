"""Schedules of faults: read, drawn, printed, and refused in one line."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from raising import raises

from flower_privdec.common.errors import ScenarioError
from flower_privdec.peer.faults import KINDS, FaultSchedule
from flower_privdec.peer.virtual_links import VirtualLinks
from flower_privdec.peer.virtual_network import VirtualNetwork
from tools.schedules.light_peers import LightHome

WRONG = [
    ("", "scenario.no-mapping", "empty"),
    ("seed: x", "scenario.int_type", "seed='x'"),
    ("fault: []", "scenario.extra_forbidden", "faults"),
    ("links: {loss: 2}", "scenario.less_than", "links.loss=2"),
    ("links: {latency: .inf}", "scenario.finite_number", "inf"),
    ("work: {trian: 1}", "scenario.literal_error", "train"),
    ("faults: [{kind: crsh}]", "scenario.union_tag_invalid", "crash"),
    ("faults: [{peer: 1}]", "scenario.union_tag_not_found", "faults.0.kind"),
    ("faults:\n- {kind: crash, peer: 1}", "faults.crash", "faults:2"),
    ("faults:\n- {kind: crash, peer: 1, at: 1, work: save}", "faults.crash", "faults:2"),
    ("faults: [{kind: freeze, peer: 1, at: 2, until: 1}]", "faults.until", "until=1"),
    ("faults: [{kind: restore, peer: 1, copied_at: 2, at: 1}]", "faults.copied-later", "copied_at=2"),
    ("faults: [{kind: link, sender: 0, peers: [1], loss: 1.0}]", "faults.link", "sender"),
]


@pytest.mark.parametrize(("text", "code", "names"), WRONG)
def test_a_wrong_schedule_is_refused_in_one_line(text: str, code: str, names: str) -> None:
    with raises(ScenarioError, code, names) as caught:
        FaultSchedule.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("faults", "code"),
    [
        ("[{kind: crash, peer: 4, at: 1}]", "faults.peer"),
        ("[{kind: partition, groups: [[0, 9]]}]", "faults.peer"),
        ("[{kind: join, peer: 1, at: 1}, {kind: join, peer: 1, at: 2}]", "faults.joins-twice"),
    ],
)
def test_a_network_refuses_faults_of_others(faults: str, code: str) -> None:
    with raises(ScenarioError, code):
        VirtualNetwork(LightHome(), range(4), FaultSchedule.parse(f"faults: {faults}"))


def test_what_is_drawn_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "faults.yaml"
    kinds = set()
    for seed in range(100):
        drawn = FaultSchedule.drawn(seed, 5, 20.0, kinds=tuple(KINDS), lasting=True)
        drawn.check(5)
        path.write_text(drawn.to_yaml())
        assert FaultSchedule.read(path) == drawn
        assert FaultSchedule.drawn(seed, 5, 20.0, kinds=tuple(KINDS), lasting=True) == drawn
        kinds |= {fault.kind for fault in drawn.faults}
    assert kinds == set(KINDS)


def test_the_last_moment_is_that_of_the_last_fault() -> None:
    schedule = FaultSchedule.parse(
        "faults: [{kind: crash, peer: 0, at: 3, down: 4}, {kind: freeze, peer: 0, at: 1, until: 5}]"
    )
    assert schedule.last_moment == 7
    assert schedule.without(0).last_moment == 5


def test_a_device_sends_over_one_line_to_all() -> None:
    schedule = FaultSchedule.parse(
        "links: {latency: 1.0, device_bandwidth: 800}\nfaults: [{kind: link, peers: [2], device_bandwidth: 80}]"
    )
    links = VirtualLinks(schedule, Random(0))
    assert links.passage(0.0, 0, 1, 100).seconds == pytest.approx(1 + 1)
    assert links.passage(0.0, 0, 3, 100).seconds == pytest.approx(1 + 2)  # after the first
    assert links.passage(0.0, 4, 3, 100).seconds == pytest.approx(1 + 2)  # which the receiver takes in first
    assert links.passage(50.0, 0, 2, 100).seconds == pytest.approx(1 + 10)  # the narrowest counts
    assert links.passage(50.0, 0, 1, 100).seconds == pytest.approx(1 + 2)  # a slow receiver holds up nobody else
    with raises(ScenarioError, "faults.device"):
        FaultSchedule.parse("faults: [{kind: link, sender: 1, device_bandwidth: 80}]")
