"""Audits: no algorithm's ε is refuted, papers' claims are, and code that is broken on purpose is found by name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from scipy import stats
from tiny_scenario import TINY
from torch import Tensor
from variants import VARIANTS, settings_for

from flower_privdec.audits.audit import Audit, AuditedPeers, audit
from flower_privdec.audits.bounds import epsilon_from_guesses, epsilon_from_scores
from flower_privdec.audits.canaries import Signs, with_canaries
from flower_privdec.audits.observer import run_once
from flower_privdec.audits.one_run import audit_in_one_run
from flower_privdec.audits.replica import replica_scores
from flower_privdec.audits.report import draw_audit
from flower_privdec.cli.main import main
from flower_privdec.common.errors import ScenarioError
from flower_privdec.core import State
from flower_privdec.experiment import Experiment
from flower_privdec.gradients.stacked import StackedKernel
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.ledger.spending import Account
from flower_privdec.privacy.mechanism import paper
from flower_privdec.privacy.mechanism.events import Release, towards
from flower_privdec.privacy.noise import NoisedSum, NoiseMechanism
from flower_privdec.privacy.noise.kinds.pair_noise import CancellingNoise
from flower_privdec.privacy.noise.philox import PhiloxNoise
from flower_privdec.reporting.look import drawing
from flower_privdec.scenario import parse_scenario

SHORT = ["rounds=3", "data.samples=48", "privacy.clip_norm=0.05", "data.batch={sampling: poisson, size: 4}"]
FULL = [*SHORT, "data.batch={sampling: full}"]  # whose privacy a test of one score can show whole
CANCELLING = [
    *FULL,
    "privacy.noise={kind: cancelling, colluding: 1, secrets: complete}",
    "topology.name=complete",
]
CROSS = [*FULL, *settings_for("algorithm.name=dp-cga")]


def experiment_of(*overrides: str) -> Experiment:
    return Experiment.build(parse_scenario(TINY, overrides=list(overrides)))


# --- bounds ---


@given(st.floats(0.1, 4), st.sampled_from([1e-5, 1e-3]), st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_a_bound_from_scores_is_below_what_gaussians_cost(sigma: float, delta: float, seed: int) -> None:
    """Each fails with a chance of 1e-9: so many cases need no luck."""
    draws = np.random.default_rng(seed)
    absent, present = draws.normal(0, sigma, 4000), draws.normal(1, sigma, 4000)
    cost = epsilon([Release("full", 1.0, 1, 1, sigma)], delta)
    assert 0 <= epsilon_from_scores(absent, present, delta, 1 - 1e-9) <= cost


def test_a_bound_from_scores_is_nearly_tight() -> None:
    count = 20_000
    apart = epsilon_from_scores(np.zeros(count), np.ones(count), 1e-5, 0.95)
    assert apart == pytest.approx(math.log(count / 2 / -math.log(0.025)), abs=0.01)  # no false alarm in the second half
    assert epsilon_from_scores(np.zeros(count), np.zeros(count), 1e-5, 0.95) == 0
    assert epsilon_from_scores(np.zeros(1), np.ones(1), 1e-5, 0.95) == 0


def test_a_bound_from_guesses_is_a_binomials_without_delta() -> None:
    shown = epsilon_from_guesses(1000, 1000, 800, 0.0, 0.95)
    assert stats.binom.sf(799, 1000, 1 / (1 + math.exp(-shown))) == pytest.approx(0.05, rel=1e-4)
    assert epsilon_from_guesses(1000, 1000, 800, 1e-4, 0.95) < shown
    assert epsilon_from_guesses(1000, 1000, 510, 0.0, 0.95) == 0
    assert epsilon_from_guesses(1000, 0, 0, 0.0, 0.95) == 0


# --- what holds is not refuted ---


@pytest.mark.parametrize("variant", VARIANTS, ids=" ".join)
def test_no_algorithms_epsilon_is_refuted(variant: list[str]) -> None:
    batch = [] if any(setting.startswith("data.batch") for setting in variant) else SHORT[-1:]
    experiment = experiment_of(*SHORT[:-1], *settings_for(*variant), *batch)
    result = audit(experiment, trials=30, replica=5_000, confidence=1 - 1e-6)
    assert result.holds, result.verdict
    assert {peer for group in result.groups for peer in group.peers} == set(range(experiment.scenario.n_peers))
    assert all(group.shown <= group.epsilon for group in result.groups)


@pytest.mark.parametrize("kind", ["correlated", "cancelling, colluding: 1"])
def test_correlated_steps_have_their_replicas_likelihoods(kind: str) -> None:
    """Blocks of two steps in which a canary is drawn once, whitened, are the releases that they are charged as."""
    noise = f"privacy={{epsilon: 6.0, delta: 1.0e-3, noise: {{kind: {kind}, bands: 2}}}}"
    experiment = experiment_of(*SHORT, noise, "rounds=4", "algorithm.learning_rate_decay=0.5")
    assert audit(experiment, trials=30, replica=2_000, confidence=1 - 1e-6).holds
    check_likelihoods(experiment, 150)


def check_likelihoods(experiment: Experiment, count: int) -> None:
    """Check that the log ratios of both worlds, over some runs of three steps, are a replica's."""
    runs = [run_once(with_canaries(experiment), 3, number) for number in range(count)]
    there, scores = np.array([run[0] for run in runs]), np.array([run[1].scores for run in runs])
    plan = experiment.own.protection
    assert plan is not None
    account = plan.accounts[0]
    seen = towards(account.releases(0, 3), account.adversary)
    for real, drawn in zip((scores[~there], scores[there]), replica_scores(seen, 20_000, 1), strict=True):
        assert abs(real.mean() - drawn.mean()) < 5 * real.std() / math.sqrt(real.size)
        assert real.std() == pytest.approx(drawn.std(), rel=0.25)


def test_the_replica_has_the_likelihoods_of_the_real_steps() -> None:
    """The mean log ratio of both worlds, within five standard errors."""
    experiment = experiment_of(*SHORT, "privacy.epsilon=6")
    check_likelihoods(experiment, 150)


@pytest.mark.parametrize(
    "settings",
    [
        "algorithm.name=privsgp-vr",
        "algorithm={name: privsgp-vr, table: snapshot, snapshot_every: 2, learning_rate: 0.1}",
    ],
)
def test_canaries_change_their_sign_where_gradients_are_remembered(settings: str) -> None:
    """Their scores are likelihood ratios, whose mean is 1, and show more than gradients that stay as they are."""
    experiment = experiment_of(*SHORT, *settings_for(settings), "rounds=6", "privacy.epsilon=4")
    canaries = with_canaries(experiment)
    runs = [run_once(canaries, 3, number) for number in range(80)]
    there, scores = np.array([run[0] for run in runs]), np.array([run[1].scores for run in runs])
    for ratios in (np.exp(scores[~there]), np.exp(-scores[there])):
        assert abs(ratios.mean() - 1) < 4 * ratios.std() / math.sqrt(len(ratios))
    assert scores[there].mean() - scores[~there].mean() > 0.25


def test_a_snapshots_release_is_subtracted_from_later_steps() -> None:
    """Under the same draws, a canary is seen farther apart than by an observer who forgets what was released."""
    settings = "algorithm={name: privsgp-vr, table: snapshot, snapshot_every: 3, learning_rate: 0.1}"
    canaries = with_canaries(experiment_of(*SHORT, *settings_for(settings), "rounds=6", "privacy.epsilon=4"))

    def apart() -> float:
        runs = [run_once(canaries, 3, number) for number in range(40)]
        there, scores = np.array([run[0] for run in runs]), np.array([run[1].scores for run in runs])
        return float(scores[there].mean() - scores[~there].mean())

    def forget(signs: Signs, state: State, likely: np.ndarray) -> None:
        set_round(signs, state, likely)
        signs.anchor = np.zeros_like(signs.anchor)

    remembering, set_round = apart(), Signs.set_round
    with patch.object(Signs, "set_round", forget):
        assert remembering > apart() + 0.1


def test_an_audit_repeats_by_its_seed() -> None:
    one, again, other = (
        audit(experiment_of(*SHORT), trials=40, replica=100, seed=seed).to_json() for seed in (1, 1, 2)
    )
    assert one == again
    assert one["groups"] != other["groups"] or one == other  # the figures of few trials may agree


@pytest.mark.slow
@pytest.mark.parametrize(("colluding", "topology"), [(0, "complete"), (1, "directed-exponential"), (2, "complete")])
def test_colluders_subtract_shared_noise_and_leave_the_planned_rest(colluding: int, topology: str) -> None:
    """The mean log ratio of both worlds is a replica's, within five standard errors; all is as planned."""
    noise = f"privacy.noise={{kind: cancelling, colluding: {colluding}, secrets: complete}}"
    experiment = experiment_of(*FULL, noise, f"topology.name={topology}", "privacy.epsilon=6")
    result = audit(experiment, trials=200, replica=1000)
    assert result.defects == {}
    assert result.holds
    check_likelihoods(experiment, 100)


@pytest.mark.parametrize("noise", ["colluding: 1, absent: 1", "colluding: 0"])
def test_peers_that_leave_are_audited_with_their_shared_noise(noise: str) -> None:
    """Who is gone may collude: what others still draw with it hides nothing then, and own noise is enough."""
    leaving = "participation={leaving: [{peer: 2, round: 1}, {peer: 0, round: 1, until: 2}], noticed_after: 1}"
    cancelling = f"privacy.noise={{kind: cancelling, {noise}, strength: 3.0}}"
    experiment = experiment_of(*FULL, cancelling, leaving, "topology.name=complete")
    result = audit(experiment, trials=30, replica=5_000, confidence=1 - 1e-6)
    assert result.defects == {}
    assert result.holds, result.verdict


# --- what is broken is found, by name ---


@contextmanager
def half_the_noise() -> Iterator[None]:
    add = NoiseMechanism.add_

    def add_half(self: NoiseMechanism, out: Tensor, std: Tensor, noised: NoisedSum) -> None:
        add(self, out, std / 2, noised)

    with patch.object(NoiseMechanism, "add_", add_half):
        yield


@contextmanager
def without_pairs() -> Iterator[None]:
    with patch.object(CancellingNoise, "add_pairs_"):
        yield


@contextmanager
def clipped_by_batch() -> Iterator[None]:
    """Clip the sum of a batch to the norm that so many clipped examples may have."""
    add = StackedKernel.add_clipped_

    def add_by_batch(
        self: StackedKernel, out: Tensor, params: Tensor, batch: Any, clip: Tensor, scale: Tensor, *rest: Any
    ) -> Tensor:
        total = out.new_zeros(out.shape)
        norms = add(self, total, params, batch, None, scale, *rest)
        most = clip * scale.abs() * batch.weight.sum(1)
        out += total * (most / total.norm(dim=1).clamp_min(1e-30)).clamp_max(1).unsqueeze(1)
        return norms

    with patch.object(StackedKernel, "add_clipped_", add_by_batch):
        yield


@contextmanager
def charged_for_one_round() -> Iterator[None]:
    """Let a peer forget at each round what it paid before."""
    releases = Account.releases

    def last(self: Account, start: int, stop: int) -> tuple[Release, ...]:
        return releases(self, max(start, stop - 1), stop)

    with patch.object(Account, "releases", last):
        yield


@contextmanager
def same_noise_for_all_receivers() -> Iterator[None]:
    add = PhiloxNoise.add_

    def add_same(self: PhiloxNoise, out: Tensor, std: Tensor, step: int, peers: np.ndarray, *rest: Any) -> None:
        purpose = rest[0] if rest else "noise"
        add(self, out, std, step, peers, purpose, None)

    with patch.object(PhiloxNoise, "add_", add_same):
        yield


@contextmanager
def half_of_the_steps_charged() -> Iterator[None]:
    from flower_privdec.privacy.ledger.cohort_ledger import CohortLedger

    charges = CohortLedger._charges

    def half(self: CohortLedger, start: int, stop: int, idle_from: int) -> Any:
        return charges(self, start, max(start + 1, stop // 2), idle_from)

    with patch.object(CohortLedger, "_charges", half):
        yield


BROKEN = {
    "noise at half": (half_the_noise, FULL, "noise too small"),
    "own noise at half beside what pairs share": (half_the_noise, CANCELLING, "noise too small"),
    "no noise of pairs": (without_pairs, CANCELLING, "noise too small"),
    "clipped by batch": (clipped_by_batch, FULL, "clipping"),
    "noise reused for two neighbours": (same_noise_for_all_receivers, CROSS, "noise reused"),
    "half of the steps charged": (half_of_the_steps_charged, FULL, "ledger"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_protections_are_found_by_name(kind: str) -> None:
    broken, overrides, name = BROKEN[kind]
    experiment = experiment_of(*overrides)
    assert audit(experiment, trials=40, replica=100).defects == {}
    with broken():
        result = audit(experiment, trials=40, replica=100)
    assert name in result.defects
    assert not result.holds
    assert result.defects[name] in result.verdict


MANY = ["n_peers=32", "data.samples=320", "data.batch={sampling: full}", "privacy.clip_norm=0.05"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "trials"), [("noise at half", 16_000), ("clipped by batch", 2000)])
def test_canaries_refute_a_broken_protection(kind: str, trials: int) -> None:
    experiment = experiment_of(*MANY, "rounds=1", "privacy.epsilon=2")
    with BROKEN[kind][0]():
        group = audit(experiment, trials=trials, replica=100).groups[0]
    assert group.canary_lower_bound > group.epsilon
    assert group.violated


@pytest.mark.slow
def test_an_accountant_that_forgets_is_refuted() -> None:
    noise = "privacy={epsilon: null, noise_multiplier: 3.0, delta: 1.0e-3}"
    experiment = experiment_of(*MANY, "rounds=40", noise)
    with charged_for_one_round():
        result = audit(experiment, trials=1000, replica=100)
    assert result.groups[0].canary_lower_bound > result.groups[0].epsilon
    assert not result.holds


# --- claims of papers ---


CLAIMS = {  # the release of the paper's noise, its claim, and what an audit shows at least
    "PrivSGP-VR, K = 3120, J = 3125": (3.0, 1e-5, 5.0),
    "Const-D2P, one example drawn uniformly": (1.0, 1e-4, 3.5),
    "DP-DDA, a tenth of the peers active": (1.0, 1e-2, 5.0),
}


def released_by_paper(name: str) -> Release:
    claimed, delta, _ = CLAIMS[name]
    if name.startswith("PrivSGP"):
        noise = paper.moments_sigma(claimed, delta, rounds=3120, dataset_size=3125, clip_norm=1.0, c_2=0.3724)
        return Release("poisson", 1 / 3125, 3125, 1, noise / 3, 3120)
    if name.startswith("Const"):
        mu = paper.gdp_mu_0(paper.gdp_mu(claimed, delta), 1 / 2500, np.ones(2000))
        return Release("uniform", 1 / 2500, 2500, 1, 1 / mu, 2000)
    rounds = 3 * 1628
    noise = paper.subsampled_sigma(claimed, delta, rounds=10 * rounds, dataset_size=1628, share=0.1)
    return Release("poisson", 1 / 1628, 1628, 1, noise, rounds)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS)
def test_a_replica_exposes_what_papers_claim(name: str) -> None:
    claimed, delta, least = CLAIMS[name]
    release = released_by_paper(name)
    shown = epsilon_from_scores(*replica_scores([release], 4000, 1), delta, 0.95)
    assert claimed < least < shown <= epsilon([release], delta)


def test_a_refuted_claim_is_named_and_printed_epsilon_holds() -> None:
    paper_noise = "privacy={epsilon: 3.0, delta: 1.0e-3, calibration: paper, paper: {c_2: 0.3724}}"
    experiment = experiment_of(
        *SHORT[:-1], "data.batch={sampling: poisson, size: 1}", *settings_for("algorithm.name=privsgp-vr"), paper_noise
    )
    group = audit(experiment, trials=8, replica=20_000).groups[0]
    assert group.claimed_epsilon == 3.0
    assert group.claim_refuted
    assert not group.violated


# --- one run of real training ---


def test_an_audit_in_one_run_is_sound_and_informative() -> None:
    digits = ["rounds=20", "data.samples=240", "data.batch={sampling: poisson, size: 20}", "privacy.clip_norm=1.0"]
    tight = audit_in_one_run(experiment_of(*digits, "privacy.epsilon=1"), canaries=40)
    loose = audit_in_one_run(experiment_of(*digits, "privacy={epsilon: 1000, delta: 1.0e-5}"), canaries=40)
    assert 0 <= tight.epsilon_lower_bound <= 1
    assert tight.right < loose.right <= loose.guesses
    assert 1 < loose.epsilon_lower_bound < loose.epsilon
    assert loose.canaries == 160


@pytest.mark.parametrize(
    ("overrides", "canaries", "code"),
    [(["privacy=none"], 4, "audit.no-privacy"), ([], 2, "audit.trials"), ([], 13, "audit.trials")],
)
def test_an_audit_in_one_run_refuses_unsupported_settings(overrides: list[str], canaries: int, code: str) -> None:
    with raises(ScenarioError, code):
        audit_in_one_run(experiment_of(*SHORT, *overrides), canaries=canaries)


# --- what cannot be audited, and how it is printed ---


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["privacy=none"], "audit.no-privacy"),
    ],
)
def test_unauditable_scenarios_are_refused(overrides: list[str], code: str) -> None:
    experiment = experiment_of(*SHORT, *overrides)
    with raises(ScenarioError, code):
        audit(experiment)


def test_arguments_out_of_range_are_refused() -> None:
    experiment = experiment_of(*SHORT)
    with raises(ScenarioError, "audit.trials", "trials=2"):
        audit(experiment, trials=2)
    with raises(ScenarioError, "audit.trials", "replica=0"):
        audit(experiment, replica=0)
    with raises(ScenarioError, "audit.confidence", "1.0"):
        audit(experiment, confidence=1.0)


def test_the_command_prints_results_and_exits_1_if_broken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["audit", "digits", "--set", "rounds=2", "--trials", "16", "--replica", "100"]
    with pytest.raises(SystemExit) as done:
        main(command)
    text = capsys.readouterr().out
    assert done.value.code == 0
    assert "printed ε" in text
    assert "no attack refutes" in text
    with half_the_noise(), pytest.raises(SystemExit) as done:
        main([*command, "--json"])
    printed = capsys.readouterr()
    facts = json.loads(printed.out)
    assert done.value.code == 1
    assert "times as large as planned" in printed.err
    assert {"claimed_epsilon", "epsilon", "epsilon_lower_bound", "method", "trials"} <= facts.keys()
    assert facts["holds"] is False


def test_a_picture_has_every_figure_and_follows_the_theme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "audit.svg"
    words = ["audit", "digits", "--set", "rounds=2", "--trials", "16", "--replica", "100"]
    with pytest.raises(SystemExit) as done:
        main([*words, "--plot", str(out)])
    assert done.value.code == 0
    text = out.read_text()
    for label in ("printed", "replica: at least", "canaries: at least", "without the example", "with it", "peers 0-7"):
        assert f">{label}<" in text
    assert "claimed" not in text
    assert "prefers-color-scheme: dark" in text
    with pytest.raises(SystemExit) as done:
        main([*words, "--plot", "audit.txt"])
    assert done.value.code == 2
    assert "must be .svg, .png or .pdf" in capsys.readouterr().err


def test_a_picture_shows_each_figure_at_its_place() -> None:
    groups = [
        AuditedPeers((peer,), claimed, 3.0 + peer, 1e-3, 1.0 + peer, 8, 2.0 + peer, 100, (np.arange(5.0), np.ones(7)))
        for peer, claimed in ((0, 0.5), (1, None))
    ]
    with drawing():
        bounds, ratios = draw_audit(Audit(tuple(groups), 0.95, {}, 3)).axes
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in bounds.get_lines()}
    assert drawn.pop("claimed") == ([0.5, pytest.approx(math.nan, nan_ok=True)], [0, 1])
    expected = {"printed": [3.0, 4.0], "replica: at least": [2.0, 3.0], "canaries: at least": [1.0, 2.0]}
    assert drawn == {label: (values, [0, 1]) for label, values in expected.items()}
    assert [label.get_text() for label in bounds.get_yticklabels()] == ["peers 0", "peers 1"]
    assert sorted(part.get_label() for part in ratios.patches) == ["with it", "without the example"]
    counts = {part.get_label(): np.diff(part.get_xy()[:, 1]) for part in ratios.patches}
    assert {label: int(change.clip(0).sum()) for label, change in counts.items()} == {
        "without the example": 5,
        "with it": 7,
    }


def test_the_nearest_to_being_refuted_comes_first() -> None:
    experiment = experiment_of(*SHORT, "privacy.epsilon=[1, 2, 3, 4]")
    result: Audit = audit(experiment, trials=40, replica=2000)
    margins = [group.epsilon - group.shown for group in result.groups]
    assert len(margins) == 4
    assert margins == sorted(margins)
    worse = replace(result.groups[-1], canary_lower_bound=9.0)
    assert replace(result, groups=(worse,)).verdict.startswith(f"ε = {worse.epsilon:.4g} is refuted")
