"""A run is given more rounds, or a peer other data: what the ledger charges, and what is not followed."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import forked, privdec, status_of
from networked import LONG, devices, driver_of, finish, run_network, running, trainer_of
from ports import own_addresses
from raising import raises
from tiny_scenario import Tiny

from flower_privdec.common.errors import ScenarioError
from flower_privdec.network.peer.driver import PeerDevice
from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.network.peer.peer_files import first_members
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.peer.trainer import ScenarioTrainer
from flower_privdec.privacy.accountant.accounting import epsilon_of_runs
from flower_privdec.privacy.ledger.segments import Entry, read_chain
from flower_privdec.privacy.ledger.spending import runs_in
from flower_privdec.pushsum.membership import MemberList
from flower_privdec.scenario import Scenario

MORE: dict[str, Any] = {"kind": "extend", "rounds": 9}


def signed(scenario: Scenario, *changes: Mapping[str, Any]) -> MemberList:
    made = MemberList(first_members(scenario), lambda content, signature: True)
    for change in changes:
        made.append(dict(change), lambda content: b"")
    return made


# --- what the ledger charges ---


@pytest.mark.parametrize(("most", "allowed"), [(None, 6), (3.4, 8), (100.0, 9)])
def test_noise_stays_and_an_owner_bounds_epsilon(tiny: Tiny, tmp_path: Path, most: float | None, allowed: int) -> None:
    """By the scenario's ε no further step is taken; by a larger bound as many as fit, each at the noise of before."""
    scenario = tiny()
    first = ScenarioTrainer(scenario, 0, tmp_path / "first")
    more = ScenarioTrainer(scenario, 0, tmp_path / "more", rounds=9, most=most)
    assert (more.run.scenario, more.run.environment) == (first.run.scenario, first.run.environment)
    for name in ("first", "more", "planned"):
        (tmp_path / name).mkdir()

    first.open(None, 0, None)
    more.open(None, 0, None)
    before = first.cohort.ledger
    after = more.cohort.ledger
    assert before is not None
    assert after is not None
    noise = first.experiment.own.protection
    assert noise is not None
    assert (more.experiment.own.protection.noise_multipliers == noise.noise_multipliers[0]).all()  # type: ignore[union-attr]

    assert after.spending.limits.tolist() == [allowed]
    assert after.spending.epsilons(6) == pytest.approx(before.spending.epsilons(6), rel=1e-9)
    spent = float(after.spending.epsilons(9)[0])
    assert spent <= (most or 3.0)
    if allowed > 6:
        assert spent > 3.0
    for trainer in (first, more):
        trainer.close()


def test_another_process_counts_all_steps_of_before(tiny: Tiny, tmp_path: Path) -> None:
    """ε of a run of 6 rounds that was given 9 is that of 9 at its noise, planned at once."""
    scenario = tiny("n_peers=2", "topology.name=complete")
    devices_ = devices(scenario, tmp_path, memory=True, insecure_seeds=False)
    run_on(scenario, devices_, signed(scenario))
    spent = run_on(scenario, devices_, signed(scenario, MORE), most=100.0)
    noise = ScenarioTrainer(scenario, 0, tmp_path / "peer-0").experiment.own.protection
    assert noise is not None
    (tmp_path / "planned").mkdir()
    multiplier = float(noise.noise_multipliers[0, 0])
    whole = tiny("n_peers=2", "topology.name=complete", "rounds=9", f"privacy.noise_multiplier={multiplier}")
    planned = ScenarioTrainer(
        whole.model_copy(update={"privacy": whole.private.model_copy(update={"epsilon": 100.0})}),  # type: ignore[union-attr]
        0,
        tmp_path / "planned",
    )
    planned.open(None, 0, None)
    assert planned.cohort.ledger is not None
    assert spent[0] == pytest.approx(float(planned.cohort.ledger.spending.epsilons(9)[0]), rel=1e-9)
    planned.close()


def run_on(scenario: Scenario, places: list[PeerDevice], members: MemberList, most: float | None = None) -> list[float]:
    """Run peers to their end, or on, and return the ε of each."""
    peers = [running_peer(scenario, replace(place, members=members, max_epsilon=most)) for place in places]
    with ThreadPoolExecutor(len(peers)) as pool:
        list(pool.map(finish, peers))
    return [float(trainer_of(peer).status(peer._trained)["epsilon"]) for peer in peers]


GOSSIP = ("algorithm.name=d-psgd",)
EXCHANGES: dict[str, tuple[str, ...]] = {
    "exact": (),
    "bfloat16": ("network.codec=bfloat16",),
    "int4": ("network.codec=int4",),
    "top-k": ("network.codec=top-k",),
    "random-k": ("network.codec=random-k",),
    "judged shares": ("network.robust={kind: clipped, byzantine: 1}",),
    "judged rows": (*GOSSIP, "network.robust={kind: clipped, byzantine: 1}"),
}


def entries_of(folder: Path) -> list[Entry]:
    (path,) = (folder / "ledger").glob("*.jsonl")
    return read_chain(path)[1]


def steps_paid(folder: Path) -> int:
    return sum(entry.to_step - entry.from_step for entry in entries_of(folder))


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_lost_lines_and_more_rounds_meet_every_exchange(exchange: str, tiny: Tiny, tmp_path: Path) -> None:
    """A peer whose folder was lost pays for what it had taken, joins those that were given more rounds, and ends."""
    network = f"network={{links: local, deadline: {LONG}, final_mixing: 2}}"
    scenario = tiny("topology.name=complete", "n_peers=3", network, *EXCHANGES[exchange])
    places = devices(scenario, tmp_path, memory=True, insecure_seeds=False)
    run_on(scenario, places, signed(scenario))
    lost = places[1]
    taken = steps_paid(lost.folder)
    assert taken >= 6
    shutil.rmtree(lost.folder)

    def on_with_more(place: PeerDevice) -> RunningPeer:
        return running_peer(scenario, replace(place, members=signed(scenario, MORE), max_epsilon=100.0))

    others = [on_with_more(place) for place in (places[0], places[2])]
    with running(others) as futures:
        charging = driver_of(on_with_more(lost))
        try:
            charging.open(begin=False)
            assert charging.charge_witnessed() == taken
        finally:
            charging.close()
        again = on_with_more(lost)
        with running([again]) as (future,):
            for one in (*futures, future):
                one.result(LONG)

    for peer in (*others, again):
        assert (peer.rounds, peer.state.round_index) == (9, peer.end)
        assert all(bool(row.isfinite().all()) for row in peer.state.rows.values())
    for place in (places[0], places[2]):
        assert 9 <= steps_paid(place.folder) <= 10  # a second start may count one too many
    assert steps_paid(lost.folder) >= taken

    # What is printed is what the whole chain of lines costs, the charged ones and those of each start included.
    for peer in (*others, again):
        whole = epsilon_of_runs(list(runs_in(entries_of(peer.device.folder)).values()), 1e-3)
        assert trainer_of(peer).status(peer._trained)["epsilon"] == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("most", [2.9, float("nan")])
def test_a_bound_below_the_budget_is_refused(tiny: Tiny, tmp_path: Path, most: float) -> None:
    device = devices(tiny(), tmp_path, memory=True)[0]
    with raises(ScenarioError, "peer.max-epsilon", names="epsilon=3"):
        running_peer(tiny(), replace(device, max_epsilon=most))
    with raises(ScenarioError, "peer.max-epsilon", names="privacy: none"):
        running_peer(tiny("privacy=none"), replace(device, max_epsilon=4.0))


# --- what is not followed ---


@pytest.mark.parametrize(
    ("setting", "kinds"),
    [
        ("network.mode=synchronous", {"add", "leave", "extend"}),
        ("privacy.noise={kind: cancelling, colluding: 1}", {"add", "extend"}),
        ("participation={kind: uniform, fraction: 0.5}", {"add", "extend"}),
        ("data.batch.sampling=shuffle", {"extend"}),
    ],
)
def test_a_change_that_stays_is_named_once(
    setting: str, kinds: set[str], tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a list that was signed for another scenario of this name; it changes neither graph nor rounds."""
    scenario = tiny(setting)
    changes: list[dict[str, Any]] = [
        {"kind": "add", "peer": 4, "identity": "peer-4.tiny", "address": "10.0.0.4:7100"},
        {"kind": "leave", "peer": 2},
        MORE,
    ]
    members = signed(scenario)
    device = replace(devices(scenario, tmp_path, memory=True)[0], members=members)
    peer = running_peer(scenario, device)
    try:
        with caplog.at_level(logging.WARNING):
            members.append(changes[0], lambda content: b"")
            for change in changes[1:]:
                members.append(change, lambda content: b"")
            peer.members_changed()
            peer.members_changed()
        named = peer.status()["members"]["not_followed"]
        assert len(named) == len(kinds)
        assert all("is not followed" in why for why in named)
        assert len([one for one in caplog.messages if "is not followed" in one]) == len(kinds)
        if "extend" in kinds:
            assert peer.rounds == 6
        assert peer.is_outdated == ("add" not in kinds)
    finally:
        peer.close()


# --- other data ---


def written(folder: Path, name: str, examples: int = 30) -> None:
    """Write a new data file."""
    draw = np.random.default_rng()
    x = draw.random((examples, 8), np.float32)
    y = np.arange(examples) % 3
    np.savez(folder / f"{name}.npz", x_train=x, y_train=y, x_test=x, y_test=y)


@pytest.fixture
def own(tiny: Tiny, tmp_path: Path) -> Scenario:
    """Return a scenario of two peers with a file each, whose budget is twice what its noise costs."""
    for name in ("test", "0", "1"):
        written(tmp_path, name)
    data = f"data={{dataset: npz, root: '{tmp_path}/{{peer}}.npz', test: {tmp_path}/test.npz, batch: {{size: 4}}}}"
    return tiny("n_peers=2", "rounds=4", data, "privacy.noise_multiplier=3.0", "privacy.epsilon=20.0")


def test_a_run_does_not_go_on_with_other_data(own: Scenario, tmp_path: Path) -> None:
    run_network(own, tmp_path, memory=True)
    device = devices(own, tmp_path, memory=True)[0]
    running_peer(own, device).close()
    written(tmp_path, "0")
    with raises(ScenarioError, "checkpoint.other-data", names="--new-data"):
        running_peer(own, device)


def test_new_data_pays_into_the_same_ledger(own: Scenario, tmp_path: Path) -> None:
    """After half of the rounds one peer's data change: its ε is that of both parts, composed, whatever its size."""
    places = devices(own, tmp_path, memory=True, insecure_seeds=False)
    before = run_on(own, places, signed(own))
    written(tmp_path, "0")
    renewed = [replace(places[0], new_data=True), places[1]]
    after = run_on(own, renewed, signed(own, {"kind": "extend", "rounds": 8}))
    whole = run_whole(own, tmp_path, 8)
    assert before[0] < after[0]
    assert after[0] == pytest.approx(whole, rel=1e-6)  # as many examples: eight steps of one mechanism
    assert after[1] == pytest.approx(whole, rel=1e-6)

    # From its next checkpoint on the data are the peer's own, and nothing has to be said again.
    running_peer(own, replace(places[0], members=signed(own, {"kind": "extend", "rounds": 8}))).close()


def run_whole(scenario: Scenario, folder: Path, rounds: int) -> float:
    """Return ε of so many rounds of a scenario, planned at once."""
    (folder / "whole").mkdir(exist_ok=True)
    trainer = ScenarioTrainer(scenario.model_copy(update={"rounds": rounds}), 1, folder / "whole")
    trainer.open(None, 0, None)
    assert trainer.cohort.ledger is not None
    spent = float(trainer.cohort.ledger.spending.epsilons(rounds)[0])
    trainer.close()
    return spent


def test_new_data_take_what_the_budget_leaves(own: Scenario, tmp_path: Path) -> None:
    """The steps of before stay charged, and of the further ones those are taken that fit beside them."""
    assert own.private is not None
    six = run_whole(own, tmp_path, 6) * 1.001
    tight = own.model_copy(update={"privacy": own.private.model_copy(update={"epsilon": six})})
    places = devices(tight, tmp_path, memory=True, insecure_seeds=False)
    run_on(tight, places, signed(tight))
    written(tmp_path, "0")
    peer = running_peer(tight, replace(places[0], new_data=True, members=signed(tight, MORE)))
    try:
        ledger = trainer_of(peer).cohort.ledger
        assert ledger is not None
        assert ledger.spending.limits.tolist() == [6]
        assert float(ledger.spending.epsilons(9)[0]) <= six
    finally:
        peer.close()


def test_a_memory_of_old_data_is_not_taken_along(own: Scenario, tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(
        "algorithm={name: privsgp-vr, learning_rate: 0.1}",
        "n_peers=2",
        "rounds=1",
        "data=" + own.data.model_dump_json(exclude_none=True),
    )
    run_network(scenario, tmp_path, memory=True)
    written(tmp_path, "0")
    device = replace(devices(scenario, tmp_path, memory=True)[0], new_data=True)
    with raises(ScenarioError, "checkpoint.remembers-data", names="table"):
        running_peer(scenario, device)


# --- real processes ---


@pytest.mark.slow
def test_processes_that_ended_go_on_by_one_list(tiny_text: str, tmp_path: Path) -> None:
    """The list is given to one; the others hear of it from that one. Only the owner who allows it pays for more."""
    addresses = own_addresses(3)
    scenario = tmp_path / "tiny.yaml"
    lines = "\n".join(f'    - {{address: "{address}"}}' for address in addresses)
    text = re.sub("n_peers: 4", "n_peers: 3", tiny_text)
    scenario.write_text(f"{text}\nnetwork:\n  links: local\n  deadline: 60\n  peers:\n{lines}\n")
    operators = tmp_path / "certs"
    assert privdec("certs", scenario, "--out", operators) == 0
    for peer in range(3):
        shutil.copytree(operators, tmp_path / f"certs-{peer}")

    def run(allows: Mapping[int, float]) -> list[dict[str, Any]]:
        started = []
        for peer in range(3):
            options = ["--out", tmp_path / f"peer-{peer}", "--certs", tmp_path / f"certs-{peer}"]
            if peer in allows:
                options += ["--max-epsilon", allows[peer]]
            started.append(forked(privdec, "peer", scenario, "--id", peer, *options))
        assert [status_of(one) for one in started] == [0, 0, 0]
        return [json.loads((tmp_path / f"peer-{peer}" / "summary.json").read_text()) for peer in range(3)]

    first = run({})
    assert privdec("members", scenario, "extend", "--rounds", 9, "--certs", operators) == 0
    shutil.copy(operators / "members", tmp_path / "certs-1" / "members")
    last = run({0: 30.0})
    assert [one["rounds"] for one in first] == [6, 6, 6]
    assert [(one["round"], one["rounds"]) for one in last] == [(9, 9)] * 3
    assert 3.0 < last[0]["epsilon"] <= 30.0
    assert last[0]["budget"] == 30.0
    for peer in (1, 2):
        assert last[peer]["epsilon"] == pytest.approx(first[peer]["epsilon"])
    for peer in range(3):
        assert privdec("ledger", tmp_path / f"peer-{peer}" / "ledger", "--delta", 1e-3) == 0
