"""Noise that cancels, counted by each peer's own partners: against the covariance of all releases, whoever is there."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from raising import raises
from tiny_scenario import Build

from flower_privdec.common.errors import ScenarioError
from flower_privdec.engine.run import run
from flower_privdec.graph.participation import build_participation
from flower_privdec.planner.pairwise import least_own_noise
from flower_privdec.privacy.mechanism.cancelling import PairPlan
from flower_privdec.privacy.noise import NoisedSum, PairSecrets, build_deployed_noise
from flower_privdec.privacy.noise.kinds.pair_noise import CancellingNoise

PARTNERS = "privacy.noise={kind: cancelling, colluding: 1, absent: 1, strength: 2.0}"


def complete(n: int) -> np.ndarray:
    return np.stack(np.triu_indices(n, 1), axis=1)


def plan_of(needed: np.ndarray, edges: np.ndarray, colluding: int, absent: int, strength: float) -> PairPlan:
    return PairPlan(
        edges, colluding, strength, needed[None], np.ones(len(needed)), True, by_partners="a test", absent=absent
    )


@st.composite
def plans(draw: st.DrawFn) -> PairPlan:
    n = draw(st.integers(2, 6))
    needed = np.array(draw(st.lists(st.sampled_from([0.0, 0.3, 1.0, 1.0, 2.5, 9.0]), min_size=n, max_size=n)))
    edges = [pair for pair in complete(n).tolist() if draw(st.booleans())]
    colluding = draw(st.integers(0, n - 1))
    absent = draw(st.integers(0, n - 1))
    strength = draw(st.floats(0.01, 100))
    return plan_of(needed, np.array(edges, dtype=np.int64).reshape(-1, 2), colluding, absent, strength)


@dataclass
class Node:
    """One release of a step by one process.

    Attributes:
        draws: which draws it adds, by the other peer, and that node if it adds it too.
        promised: the own noise that its process has promised for the step, over what the peer needs.
        heard: of each partner what it has promised this node; of one that is gone any number may be true.
        keeps: the share of its own noise that it adds; less than 1 for a liar.
    """

    peer: int
    draws: dict[int, Node | None]
    promised: float = 0.0
    heard: dict[int, float] = field(default_factory=dict)
    keeps: float = 1.0


LEVELS = st.one_of(st.just(0.0), st.floats(0, 1), st.just(1.0))


@st.composite
def nodes_of(draw: st.DrawFn, plan: PairPlan) -> list[Node]:
    """Draw who released a step how often, and which pairs they drew with: every draw by one node of each end at most.

    A peer may be gone, have restarted, know a partner that never adds their draw, or not know one that is there. Each
    process may have promised something, which some partners have heard. Or, in a calm step, somebody is gone, and all
    others know it and promise what is enough.
    """
    needed = plan.needed[0]
    active = np.flatnonzero(needed > 0).tolist()
    if draw(st.booleans()):
        gone = np.isin(np.arange(len(needed)), draw(st.lists(st.sampled_from(active or [0]), max_size=2)))
        levels = plan.levels(0, gone)
        calm = {peer: Node(peer, {}, float(levels[peer])) for peer in active if not gone[peer]}
        for i, j in plan.edges.tolist():
            if i in calm and j in calm:
                calm[i].draws[j] = calm[j]
                calm[i].heard[j] = calm[j].promised
                calm[j].draws[i] = calm[i]
                calm[j].heard[i] = calm[i].promised
        return list(calm.values())

    liars = [peer for peer in active if draw(st.integers(0, 4)) == 0]
    nodes = [Node(peer, {}, draw(LEVELS)) for peer in active for _ in range(draw(st.integers(0, 2)))]
    for node in nodes:
        if node.peer in liars:
            node.keeps = draw(st.sampled_from([0.0, 0.5, 0.9]))
    for i, j in plan.edges.tolist():
        if needed[i] == 0 or needed[j] == 0:
            continue
        unused = [node for node in nodes if node.peer == j]
        for node in [node for node in nodes if node.peer == i]:
            kind = draw(st.sampled_from(["together", "together", "alone", "apart"]))
            if kind == "together" and unused:
                other = unused.pop()
                node.draws[j] = other
                other.draws[i] = node
            elif kind != "apart":
                node.draws[j] = None
        for other in unused:
            if draw(st.booleans()):
                other.draws[i] = None

    for node in nodes:
        for peer, partner in node.draws.items():
            if draw(st.booleans()):
                node.heard[peer] = draw(LEVELS) if partner is None else partner.promised
    return nodes


def own_noise(plan: PairPlan, node: Node) -> float:
    """Return the own noise that a node adds, if it does not lie."""
    others = np.array(list(node.draws), dtype=np.int64)
    promised = np.array([node.heard.get(other, 0.0) for other in node.draws])
    return plan.own_with(0, node.peer, others, promised, node.promised) * float(plan.needed[0, node.peer])


def covariance(plan: PairPlan, nodes: list[Node], honest: list[int]) -> np.ndarray:
    """Return the covariance of what honest nodes release, of which colluders know their draws, summed draw by draw."""
    pair = {tuple(ends): std for ends, std in zip(plan.edges.tolist(), plan.planned_pairs(0).tolist(), strict=True)}
    chosen = [node for node in nodes if node.peer in honest]
    columns = []
    for place, node in enumerate(chosen):
        own = own_noise(plan, node) * node.keeps
        columns.append(own * np.eye(len(chosen))[place])
        for other, partner in node.draws.items():
            if other not in honest:
                continue
            std = pair[min(node.peer, other), max(node.peer, other)]
            column = std * np.eye(len(chosen))[place]
            if partner is not None:
                if node.peer > other:
                    continue  # counted at the other end
                there = next(at for at, one in enumerate(chosen) if one is partner)
                column -= std * np.eye(len(chosen))[there]
            columns.append(column)
    drawn = np.stack(columns, axis=1)
    return drawn @ drawn.T


@hypothesis_settings(max_examples=60)
@given(st.data())
def test_every_release_is_hidden_whoever_is_there(data: st.DataObject) -> None:
    """Against any set of colluders, of any size: independent noise of what is charged remains at all nodes of a peer.

    The rest of the covariance is that of some noise, so it can be told the observer. Who adds less than it promised, or
    than was planned, is one of the colluders.
    """
    plan = data.draw(plans())
    check_hidden(plan, data.draw(nodes_of(plan)))


def check_hidden(plan: PairPlan, nodes: list[Node]) -> None:
    liars = {node.peer for node in nodes if node.keeps < 1}
    needed = plan.needed[0]
    active = np.flatnonzero(needed > 0).tolist()
    for colluding in range(len(needed)):
        charged = plan.left(colluding)
        assert charged is not None
        if colluding <= plan.colluding:
            assert (charged >= 1 - 1e-9).all()
        for honest in combinations(active, max(1, len(active) - colluding)):
            chosen = [node.peer for node in nodes if node.peer in honest]
            if not chosen or liars & {*honest}:
                continue
            whole = covariance(plan, nodes, list(honest))
            for peer in set(chosen):
                hidden = np.array([(charged[0, peer] * needed[peer]) ** 2 * (other == peer) for other in chosen])
                # Scaled, so that a peer that needs little is not lost in the rounding of one that needs much.
                scale = np.sqrt(np.diag(whole))
                rest = (whole - np.diag(hidden)) / scale / scale[:, None]
                assert np.linalg.eigvalsh(rest).min() >= -1e-9


@pytest.mark.parametrize("seed", range(24))
def test_promises_hide_every_release_if_some_are_gone(seed: int) -> None:
    """Everybody lacks somebody, so what is promised counts; who has heard of which promise is open."""
    draws = np.random.default_rng(seed)
    n = int(draws.integers(4, 8))
    needed = draws.choice([0.5, 1.0, 2.0], n) if seed % 2 else np.ones(n)
    edges = complete(n)
    plan = plan_of(needed, edges, int(draws.integers(0, 2)), 0, float(draws.choice([1.0, 3.0, 10.0])))
    left = n - int(draws.integers(1, 3))
    levels = plan.levels(0, np.arange(n) >= left)

    nodes = [Node(peer, {}, float(draws.choice([0.0, levels[peer], 1.0], p=[0.2, 0.4, 0.4]))) for peer in range(left)]
    for node in nodes:
        for other in nodes:
            if other is not node:
                node.draws[other.peer] = other
                node.heard[other.peer] = other.promised * float(draws.random() < 0.8)
    check_hidden(plan, nodes)


@pytest.mark.parametrize("gone", [2, 3])
def test_promises_hide_no_less_from_more_colluders(gone: int) -> None:
    """All partners collude against whom noise is recorded, and it is what each honest peer has left."""
    plan = plan_of(np.full(8, 1.0), complete(8), 1, 0, 10.0)
    levels = plan.levels(0, np.arange(8) >= 8 - gone)
    nodes = [Node(peer, {}, float(levels[peer])) for peer in range(8 - gone)]
    for node in nodes:
        node.draws = {other.peer: other for other in nodes if other is not node}
        node.heard = {other.peer: other.promised for other in nodes if other is not node}

    least = 1.0
    for colluding in range(1, 5):
        charged = plan.left(colluding)
        assert charged is not None
        honest = list(range(len(nodes) - colluding))
        left = np.linalg.inv(covariance(plan, nodes, honest))[0, 0] ** -0.5
        assert left >= charged[0, 0]
        least = min(least, left / charged[0, 0] - 1)
    assert least < 1e-3


@given(plans(), st.data())
def test_promises_leave_nobody_anything_to_top_up(plan: PairPlan, data: st.DataObject) -> None:
    """If all who are left promise `levels`, everybody adds just that; never more than if nobody promised anything."""
    n = plan.needed.shape[1]
    active = np.flatnonzero(plan.needed[0] > 0)
    gone = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    levels = plan.levels(0, gone)
    for peer in active[~gone[active]]:
        mine = plan.edges[(plan.edges == peer).any(axis=1)]
        others = np.setdiff1d(np.intersect1d(mine, active[~gone[active]]), [peer])
        own = plan.own_with(0, int(peer), others, levels[others], levels[peer])
        assert own == pytest.approx(levels[peer], rel=1e-9)
        assert plan.planned[0, peer] <= own <= plan.own_with(0, int(peer), others) * (1 + 1e-9)


def test_a_gone_peer_costs_equal_peers_little_by_promises() -> None:
    """In percent of what each needs by itself: planned for all, topped up by each for itself, and promised."""
    for n, colluding, gone, expected in ((8, 1, 1, (40, 55, 43)), (16, 2, 2, (28, 47, 31)), (64, 3, 2, (14, 23, 14))):
        plan = plan_of(np.full(n, 0.7), complete(n), colluding, 0, 2.83)
        alone = plan.own_with(0, 0, np.arange(1, n - gone))
        together = plan.levels(0, np.arange(n) >= n - gone)[0]
        assert [int(100 * own) for own in (plan.planned[0, 0], alone, together)] == pytest.approx(expected, abs=1)


@given(plans())
def test_absent_partners_cost_no_more_noise(plan: PairPlan) -> None:
    """Up to as many as planned for; then what is added never passes what a peer needs by itself."""
    active = np.flatnonzero(plan.needed[0] > 0).tolist()
    for peer in active:
        mine = plan.edges[(plan.edges == peer).any(axis=1)]
        others = sorted(set(mine.ravel().tolist()) & set(active) - {peer})
        before = plan.planned[0, peer]
        for gone in range(len(others) + 1):
            for absent in combinations(others, gone):
                own = plan.own_with(0, peer, np.array([other for other in others if other not in absent], dtype=int))
                assert plan.planned[0, peer] * (1 - 1e-9) <= own <= 1 + 1e-9
                if gone <= plan.absent:
                    assert own == pytest.approx(before, rel=1e-9)


def test_a_step_that_needs_no_noise_stays_a_number() -> None:
    """A peer that is idle, and a run with a noise multiplier of 0."""
    for needed in (np.array([0.0, 1.0, 1.0]), np.zeros(3)):
        plan = plan_of(needed, complete(3), 0, 1, 2.0)
        assert plan.own_with(0, 0, np.array([1, 2])) == 1
        assert np.isfinite(plan.own).all()


@pytest.mark.parametrize("needed", [[1.0] * 8, [1.0] * 7 + [1.01]])
def test_a_simulation_without_keys_adds_what_was_planned(needed: list[float]) -> None:
    """As from keys: all know who is gone, and count on the larger noise of those who are left."""
    plan = plan_of(np.array(needed), complete(8), 1, 0, 4.0)
    left = replace(plan, dropped=np.arange(8)[None] == 3)
    others = set(range(8)) - {3}
    saved = 0.0
    for peer in others:
        alone = plan.own_with(0, peer, np.array(sorted(others - {peer})))
        own = left.own_with(0, peer, np.array(sorted(others - {peer})))
        assert own == pytest.approx(left.own[0, peer], rel=1e-9)
        saved += alone - own
    assert saved > 0.1


def test_the_recorded_noise_cannot_be_improved() -> None:
    """A step in which only the best partners are there, have promised much, and collude, has no more."""
    plan = plan_of(np.array([1.0, 0.5, 2.0, 1.5, 0.8, 1.0]), complete(6), 1, 1, 3.0)
    needed = plan.needed[0]
    promised = plan_of(needed, complete(6), 1, 2, 3.0).own[0]  # as if one more were gone
    pair = {tuple(ends): std for ends, std in zip(plan.edges.tolist(), plan.planned_pairs(0).tolist(), strict=True)}
    for colluding in (2, 3, 4):
        for peer in range(6):
            hidden = {}
            for other in set(range(6)) - {peer}:
                square = pair[min(peer, other), max(peer, other)] ** 2
                variance = (promised[other] * needed[other]) ** 2
                hidden[other] = square * variance / (square + variance)
            best = sorted(hidden, key=lambda other: -hidden[other])[:colluding]
            own = plan.own_with(0, peer, np.array(best), promised[best])  # all of whose draws the colluders know
            assert own == pytest.approx(plan.left(colluding)[0, peer], rel=1e-9)


@hypothesis_settings(max_examples=40)
@given(plans())
def test_partners_leave_little_more_noise_than_must(plan: PairPlan) -> None:
    """Than the bound by linear programs, and 3 % for what is left if all others collude."""
    if not plan.needed[0].any():
        return
    least = least_own_noise(plan, 0)
    assert least is not None
    active = plan.needed[0] > 0
    in_sum = float(np.linalg.norm((plan.own[0] * plan.needed[0])[active]))
    assert least * (1 - 1e-6) <= in_sum <= 1.12 * least


def test_equal_peers_have_the_noise_that_all_together_need() -> None:
    """On a complete graph the partners are all others: as by the covariance, with as many absent as colluding more."""
    for n, colluding, absent in ((16, 0, 0), (16, 2, 1), (9, 3, 4), (1000, 3, 10)):
        by_partners = plan_of(np.full(n, 0.7), complete(n), colluding, absent, 4.0)
        own = by_partners.own[0]
        assert np.ptp(own) == 0
        square = by_partners.planned_pairs(0)[0] ** 2
        variance = (0.7 * own[0]) ** 2
        counted = n - 1 - colluding - absent
        assert variance + counted * square * variance / (square + variance) == pytest.approx(0.49, rel=1e-7)
    whole = PairPlan(complete(16), 2, 4.0, np.full((1, 16), 0.7), np.ones(16), True)
    assert plan_of(np.full(16, 0.7), complete(16), 2, 0, 4.0).own == pytest.approx(whole.own, rel=1e-3)


@given(plans(), st.floats(1e-12, 1e12))
def test_roundings_and_units_change_no_partners_noise(plan: PairPlan, unit: float) -> None:
    elsewhere = plan_of(plan.needed[0] * unit * (1 + 1e-14), plan.edges, plan.colluding, plan.absent, plan.strength)
    assert elsewhere.own == pytest.approx(plan.own, rel=1e-7)


# --- in a run ---


class Known(PairSecrets):
    """Secrets of a deployed process that has heard only some others, and what they have promised."""

    def __init__(self, heard: set[int], promises: dict[int, float]) -> None:
        super().__init__({peer: bytes([peer]) * 32 for peer in range(5)}, simulated=False)
        self.heard = heard
        self.promises = promises

    def promised(self, peer: int, step: int) -> float:
        return self.promises.get(peer, 0.0)

    def knows(self, peer: int, other: int) -> bool:
        return {peer, other} & self.heard != set()


class NoNormals:
    """A source of nothing, so that what is added is what pairs draw."""

    def add_(
        self,
        out: torch.Tensor,
        std: torch.Tensor,
        step: int,
        peers: np.ndarray,
        purpose: str = "noise",
        receivers: np.ndarray | None = None,
    ) -> None:
        pass


@pytest.mark.parametrize("promises", [{}, {1: 0.9, 2: 0.8, 3: 0.9}, {0: 0.95}])
@pytest.mark.parametrize("heard", [{1, 2, 3, 4}, {1, 2}, {4}, set()])
def test_a_deployed_peer_adds_what_partners_leave_to_it(heard: set[int], promises: dict[int, float]) -> None:
    """And what it has promised; and all of it by itself if it takes the step again: the draws are used up."""
    plan = plan_of(np.array([1.0, 2.0, 1.0, 1.0, 0.5]), complete(5), 1, 1, 2.0)
    mechanism = CancellingNoise(plan)
    deviations = []
    for _ in range(2):
        noised = NoisedSum(
            normals=build_deployed_noise(hardened=False),
            secrets=Known(heard, promises),
            name="gradient",
            step=0,
            round_index=0,
            peers=np.array([0]),
            rows=np.array([0]),
            receivers=None,
            scale=torch.ones(1),
            clip_norm=None,
            participation=build_participation("all", 5),
            state={},
        )
        out = torch.zeros(1, 40_000, dtype=torch.float64)
        mechanism.add_(out, torch.from_numpy(plan.own[0, :1]), noised)
        deviations.append(float(out.std()))

    pairs = [std for ends, std in zip(plan.edges.tolist(), plan.planned_pairs(0), strict=True) if 0 in ends]
    shared = sum(std**2 for other, std in enumerate(pairs, 1) if other in heard)
    others = np.array(sorted(heard), dtype=int)
    counted = np.array([promises.get(other, 0.0) for other in others])
    own = plan.own_with(0, 0, others, counted, promises.get(0, 0.0))
    assert own >= promises.get(0, 0.0)
    assert own <= max(plan.own_with(0, 0, others), promises.get(0, 0.0))
    assert own > plan.own[0, 0] or len(heard) >= 3 or 1 in promises
    assert deviations == pytest.approx([(own**2 + shared) ** 0.5, 1.0], rel=0.03)


def test_going_back_uses_no_draw_twice() -> None:
    """However far it goes back: all steps up to the last one have used up what it drew with others."""
    plan = plan_of(np.ones(4), complete(4), 1, 0, 2.0)
    plan = replace(plan, needed=np.ones((6, 4)))
    mechanism = CancellingNoise(plan)
    taken = set[int]()
    for step in (0, 1, 2, 3, 1, 2, 3, 4, 0, 5, 4):
        noised = NoisedSum(
            normals=NoNormals(),
            secrets=Known({1, 2, 3}, {}),
            name="gradient",
            step=step,
            round_index=step,
            peers=np.array([0]),
            rows=np.array([0]),
            receivers=None,
            scale=torch.ones(1),
            clip_norm=None,
            participation=build_participation("all", 4),
            state={},
        )
        out = torch.zeros(1, 3, dtype=torch.float64)
        mechanism.add_(out, torch.from_numpy(plan.own[step, :1]), noised)
        assert bool(out.any()) == (step not in taken), step
        taken.add(step)


def test_a_summary_says_how_noise_was_counted(build: Build, tmp_path: Path) -> None:
    for absent, words in ((1, "by each peer's own partners, for privacy.noise.absent=1"), (0, "by the covariance")):
        summary = run(build(PARTNERS, f"privacy.noise.absent={absent}", "rounds=1"), tmp_path / str(absent))
        assert summary["noise_counted"].startswith(words)


def test_a_plan_says_why_it_counts_by_partners(build: Build) -> None:
    """By all peers' covariance only if all are known to take every step; what it asks of them then is less."""
    by_all = build(PARTNERS, "privacy.noise.absent=0", "n_peers=6").own.protection.pairs
    by_partners = build(PARTNERS, "n_peers=6").own.protection.pairs
    some = build(PARTNERS, "privacy.noise.absent=0", "participation={kind: uniform, fraction: 0.75}")
    assert by_all.by_partners == ""
    assert by_partners.by_partners == "privacy.noise.absent=1"
    assert "participation.kind=uniform" in some.own.protection.pairs.by_partners
    assert by_all.own.max() < by_partners.own.min() < 1


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (["privacy.noise.absent=-1"], "scenario.greater_than_equal"),
        (["privacy.noise.absent=0.5"], "scenario.int_type"),
        (["privacy.noise.absent=2"], "noise.absent"),
        (["privacy.noise.absent=1", "privacy.noise.colluding=2"], "noise.absent"),
    ],
)
def test_absent_peers_without_any_other_are_refused(build: Build, settings: list[str], code: str) -> None:
    with raises(ScenarioError, code):
        build(PARTNERS, *settings)
    build(PARTNERS)
