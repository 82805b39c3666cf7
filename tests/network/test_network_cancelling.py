"""Noise that cancels between peers of a network: secrets that one process has, and what each is used for, once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asynchronous_network import QUICK as GOES_ON
from raising import raises
from tiny_scenario import Tiny

from flower_privdec.common.errors import ArgumentError

pytest.importorskip("grpc")

from networked import LONG, Killed, devices, go_on, mortal, run_network, running, trainer_of

from flower_privdec import testing
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.formatting import number
from flower_privdec.experiment import Experiment
from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.network.peer.status import spent_text
from flower_privdec.privacy.accountant.accounting import epsilon_of_runs
from flower_privdec.privacy.exact_noise import SystemNormals, key_stream
from flower_privdec.privacy.ledger.segments import read_entries
from flower_privdec.privacy.ledger.spending import costs_in
from flower_privdec.privacy.mechanism.events import EVERYBODY, Adversary
from flower_privdec.privacy.noise import deployed
from flower_privdec.privacy.noise.agreed import AgreedSecrets
from flower_privdec.privacy.noise.deployed import SharedNoise

WAITS = f"network={{mode: synchronous, links: local, deadline: {LONG}, final_mixing: 0}}"
COMPLETE = [
    "topology.name=complete",
    "privacy.noise={kind: cancelling, colluding: 1, strength: 2.0}",
    "rounds=4",
]
DIRECTED = [
    "privacy.noise={kind: cancelling, colluding: 1, secrets: directed-exponential, strength: 2.0}",
    "topology={name: directed-exponential, mixing_steps: 2}",
    "rounds=3",
]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, int, int]]:
    """Record each draw that is shared: its key, the step and the peer that adds it."""
    drawn, add = list[tuple[bytes, int, int]](), SharedNoise.add_

    def recording(source: SharedNoise, out: Any, std: Any, step: int, peers: Any, *rest: Any) -> None:
        drawn.append((source._key, step, int(peers[0])))
        add(source, out, std, step, peers, *rest)

    monkeypatch.setattr(SharedNoise, "add_", recording)
    return drawn


@pytest.mark.parametrize("settings", [COMPLETE, DIRECTED], ids=["complete", "two exchanges a round"])
def test_it_is_gone_from_the_mean_of_a_network(settings, tiny: Tiny, tmp_path: Path, shared) -> None:
    """Where a round reaches the mean, a network and an engine, whose pairs draw other numbers, have one trajectory."""
    scenario = tiny(*settings, WAITS)
    rows = run_network(scenario, tmp_path)["x"]
    wanted = testing.run_rounds(Experiment.build(scenario), scenario.rounds).state.rows["x"]
    torch.testing.assert_close(rows, wanted)
    assert shared
    assert set(Counter(key for key, *_ in shared).values()) == {2}  # each draw by its two ends


def test_peers_far_apart_share_noise(tiny: Tiny, tmp_path: Path, shared) -> None:
    """All pairs of a ring do: however strong it is, a round's noise is gone from the sum."""
    noise = "privacy.noise={kind: cancelling, colluding: 1, strength: 50}"
    scenario = tiny(noise, "n_peers=6", "rounds=1", "topology.name=ring", WAITS)
    rows = run_network(scenario, tmp_path)["x"]
    wanted = testing.run_rounds(Experiment.build(scenario), 1).state.rows["x"]
    torch.testing.assert_close(rows.sum(0), wanted.sum(0))
    assert float((rows - wanted).std()) > float(wanted.std())  # each model has other noise than the engine's
    assert Counter(Counter(key for key, *_ in shared).values()) == {2: 15}


@pytest.mark.parametrize(
    "point", [("_save", "before"), ("_save", "after"), ("await_neighbours", "after")], ids=" ".join
)
@pytest.mark.parametrize("moment", [1, 2])
def test_a_peer_that_dies_uses_no_draw_again(point, moment: int, tiny: Tiny, tmp_path: Path, shared) -> None:
    """Whatever it had drawn: its next process has other keys, under which it shares noise with the others again."""
    scenario = tiny(*COMPLETE, WAITS, "rounds=6")
    theirs = devices(scenario, tmp_path, insecure_seeds=False, memory=True)
    peers = [running_peer(scenario, device) for device in theirs]
    mortal(peers[1], point, moment)
    with running(peers) as futures:
        with pytest.raises(Killed):
            futures[1].result(LONG)
        began, again = len(shared), running_peer(scenario, theirs[1])
        go_on(again, [futures[peer] for peer in (0, 2, 3)])
    before, later = ({key for key, _, peer in part if peer == 1} for part in (shared[:began], shared[began:]))
    assert later
    assert not before & later
    assert max(Counter(key for key, *_ in shared[began:]).values()) == 2
    assert max(Counter((key, peer) for key, _, peer in shared).values()) == 1
    one, other = (trainer_of(peer).status(peer._trained) for peer in (again, peers[0]))
    for status in (one, other):
        assert status["epsilon_if_all_collude"] > status["epsilon"]
        assert f"({number(status['epsilon_if_all_collude'])} if all others collude)" in spent_text(status)
    # It paid for a step twice, and its budget then has no room for its last one: both paid for as many.
    assert one["epsilon_if_all_collude"] == other["epsilon_if_all_collude"]
    for device, status in ((theirs[1], one), (theirs[0], other)):
        entries = read_entries(device.folder / "ledger", "digits")
        for adversary, key in ((Adversary(1), "epsilon"), (EVERYBODY, "epsilon_if_all_collude")):
            assert status[key] == pytest.approx(epsilon_of_runs(costs_in(entries, adversary), 1e-3))
    assert max(Counter(key for key, *_ in shared).values()) <= 2


def test_far_partners_learn_of_a_new_process(tiny: Tiny, tmp_path: Path, shared) -> None:
    """A peer of a ring dies and comes back: those that are no neighbours share noise with its new process, too."""
    noise = "privacy.noise={kind: cancelling, colluding: 1, strength: 2}"
    scenario = tiny(noise, "n_peers=5", "rounds=12", "topology.name=ring", WAITS)
    theirs = devices(scenario, tmp_path, insecure_seeds=False, memory=True)
    peers = [running_peer(scenario, device) for device in theirs]
    mortal(peers[1], ("_save", "before"), 3)
    with running(peers) as futures:
        with pytest.raises(Killed):
            futures[1].result(LONG)
        began, again = len(shared), running_peer(scenario, theirs[1])
        go_on(again, [futures[peer] for peer in (0, 2, 3, 4)])
    later = {key for key, _, peer in shared[began:] if peer == 1}
    with_far = {key for key, _, peer in shared[began:] if key in later and peer in (3, 4)}
    assert with_far
    assert max(Counter((key, peer) for key, _, peer in shared).values()) == 1
    assert max(Counter(key for key, *_ in shared).values()) <= 2
    assert again.status()["shares_noise_with"] == again.status()["partners"] == 4


def test_a_device_without_a_certificate_shares_no_noise(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(*COMPLETE, WAITS)
    device = replace(devices(scenario, tmp_path, memory=True)[0], credentials=None)
    with raises(ScenarioError, "noise.no-identity"):
        running_peer(scenario, device)


def test_a_repeated_step_shares_its_draw_once(tiny: Tiny, shared) -> None:
    cohort = Experiment.build(tiny(*COMPLETE, "compute.generator=system")).cohort()
    x = torch.zeros(4, len(cohort.initial), dtype=torch.float64)
    for steps in (1, 1, 2):
        before = x.clone()
        cohort.add_step_(x, x, steps)
        assert float((x - before).std()) > 0
    assert len(shared) == len({(key, peer) for key, _, peer in shared}) == 2 * 12


def test_asynchronous_peers_share_noise_too(tiny: Tiny, tmp_path: Path, shared) -> None:
    scenario = tiny(*COMPLETE, GOES_ON)
    peers = [running_peer(scenario, device) for device in devices(scenario, tmp_path, insecure_seeds=False)]
    with running(peers) as futures:
        for future in futures:
            future.result(LONG)
    counts = Counter(key for key, *_ in shared)
    assert len(counts) == 6 * scenario.rounds
    assert set(counts.values()) == {2}


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ([*COMPLETE, "algorithm.name=d-psgd", GOES_ON], "noise.cancelling-late"),
    ],
)
def test_a_network_that_cannot_cancel_it_is_refused(settings, code: str, tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(*settings)
    with raises(ScenarioError, code):
        running_peer(scenario, devices(scenario, tmp_path, memory=True)[0])
    assert not (tmp_path / "peer-0").exists()


def files(folder: Path, sizes: list[int]) -> str:
    """Write a file for each peer, and return the scenario's line about data."""
    rng = np.random.default_rng(0)
    for name, size in {"test": 40, **{str(peer): size for peer, size in enumerate(sizes)}}.items():
        x, y = rng.random((size, 8), dtype=np.float32), np.arange(size) % 4
        np.savez(folder / f"{name}.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    return f"data={{dataset: npz, root: '{folder}/{{peer}}.npz', test: {folder}/test.npz, batch: {{size: 4}}}}"


def test_data_of_unknown_size_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(*COMPLETE, files(tmp_path, [40, 40, 40, 40]))
    with raises(ScenarioError, "noise.cancelling-sizes"):
        running_peer(scenario, devices(scenario, tmp_path, insecure_seeds=False, memory=True)[0])
    assert not (tmp_path / "peer-0").exists()


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (["data.at_least=21"], "data.at-least"),
        (["data.at_least=20", "data.batch={sampling: uniform, size: 4}"], "noise.cancelling-batches"),
        (["data.at_least=20", "data.batch={rate: 0.1}"], "noise.cancelling-batches"),
        (["data.at_least=20", "algorithm={name: fedavg, learning_rate: 0.5}"], "noise.cancelling-weights"),
    ],
)
def test_an_unproved_least_number_of_examples_is_refused(settings, code, tiny: Tiny, tmp_path) -> None:
    """A peer with fewer is refused before it has a folder, let alone a release."""
    scenario = tiny(*COMPLETE, files(tmp_path, [20, 30, 40, 60]), *settings)
    with raises(ScenarioError, code):
        running_peer(scenario, devices(scenario, tmp_path / "out", insecure_seeds=False, memory=True)[0])
    assert not (tmp_path / "out" / "peer-0").exists()


def test_own_data_cancel_noise_by_a_least_number(tiny, tmp_path, shared) -> None:
    """All plan by it, so that noise cancels; each is charged by it, and draws by its own number, which is smaller."""
    scenario = tiny(*COMPLETE, files(tmp_path, [20, 30, 40, 60]), "data.at_least=20", WAITS)
    peers = [running_peer(scenario, device) for device in devices(scenario, tmp_path, insecure_seeds=False)]
    with running(peers) as futures:
        for future in futures:
            future.result(LONG)
    assert set(Counter(key for key, *_ in shared).values()) == {2}
    plans = [trainer_of(peer).experiment.own.protection for peer in peers]
    assert all(np.array_equal(plan.pairs.needed, plans[0].pairs.needed) for plan in plans)
    assert len({plan.epsilons(4)[0] for plan in plans}) == 1
    for peer, size in zip(peers, [20, 30, 40, 60], strict=True):
        own = trainer_of(peer).experiment.own
        assert own.protection.accounts[0].spends[0].release.sampling_rate == 4 / 20
        assert own.sampler.sampling_rate[0] == 4 / size
        assert own.sampler.normalizer[0] == 4


# --- secrets ---


def agreed(peer: int, run: bytes = b"run", names: tuple[str, ...] = ("a", "b", "c")) -> AgreedSecrets:
    return AgreedSecrets([peer], run, names)


def meet(one: AgreedSecrets, other: AgreedSecrets) -> bool:
    """Let two learn each other's keys; return whether they then have one secret."""
    peer, partner = min(one._peers), min(other._peers)
    one.learn(partner, other.public)
    other.learn(peer, one.public)
    return one.of(peer, partner) == other.of(peer, partner)


def test_two_processes_share_a_secret_unknown_to_others() -> None:
    one, other, third = agreed(0), agreed(1), agreed(2)
    assert meet(one, other)
    assert meet(one, third)
    assert meet(other, third)
    assert len({one.of(0, 1), one.of(2, 0), other.of(1, 2)}) == 3
    with raises(ScenarioError, "noise.pair-secret"):
        third.of(0, 1)


def test_another_run_identity_or_process_has_another_secret() -> None:
    one = agreed(0)
    assert not meet(one, agreed(1, b"another run"))
    assert not meet(one, agreed(1, names=("a", "another", "c")))
    first = agreed(1)
    assert meet(one, first)
    before = one.of(0, 1)
    assert meet(one, agreed(1))
    assert one.of(0, 1) != before


@pytest.mark.parametrize("key", [bytes(32), (1).to_bytes(32, "little"), b"short"])
def test_a_key_with_a_known_secret_is_refused(key: bytes) -> None:
    one = agreed(0)
    with pytest.raises(ValueError):  # noqa: PT011
        one.learn(1, key)
    with raises(ArgumentError, "noise.own-key"):
        one.learn(1, one.public)
    assert not one.knows(0, 1)


def test_both_ends_draw_the_same_bits() -> None:
    drawn = []
    for key in (b"k" * 32, b"k" * 32, b"l" * 32):
        out = torch.zeros(1, 2 * deployed.PIECE + 5, dtype=torch.float64)
        SharedNoise(key).add_(out, torch.ones(1, dtype=torch.float64), 0, torch.zeros(1).numpy())
        drawn.append(out)
    assert torch.equal(drawn[0], drawn[1])
    assert float(torch.corrcoef(torch.cat([drawn[0], drawn[2]]))[0, 1].abs()) < 0.02
    assert float(drawn[0].std()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("std", [1.0, 3.7e-9, 1e25, 1e-200])
def test_what_one_end_adds_the_other_takes_away(std: float) -> None:
    """To the bit on one machine, whatever memory it is drawn in."""
    size = deployed.PIECE + 7
    memory = SystemNormals(key_stream(), size)
    ends = []
    for sign, normals in ((1.0, None), (-1.0, memory), (-1.0, memory)):
        out = torch.zeros(1, size, dtype=torch.float64)
        scale = torch.tensor([sign * std], dtype=torch.float64)
        SharedNoise(b"k" * 32, normals).add_(out, scale, 0, np.zeros(1), "pair")
        ends.append(out)
    assert torch.equal(ends[0], -ends[1])
    assert torch.equal(ends[1], ends[2])
    assert float(ends[0].std()) == pytest.approx(std, rel=0.02)
