"""Mixing in which receivers judge: weights are exact, moves are bounded, and what stands out is left out."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from tiny_scenario import Build
from torch import Tensor

from flower_privdec.common.catalogue import ATTACKS
from flower_privdec.common.errors import ScenarioError
from flower_privdec.core import Mix, State
from flower_privdec.core.attack import build_attack
from flower_privdec.core.robust_mix import RobustMix, doubted, sketch
from flower_privdec.core.robust_rule import Seen, of_the_others
from flower_privdec.core.rules.clipped import NEAR, Clipped
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.run import run
from flower_privdec.engine.workers import start_engine
from flower_privdec.experiment.agreement import build_arithmetic
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.topology import build_topology
from flower_privdec.planner.plan import make_plan
from flower_privdec.reporting.wording import headline

N, D, LIAR = 8, 5, 7
ROBUST = "network.robust={kind: clipped, byzantine: 1}"
GRAPHS = ("complete", "directed-exponential", "directed-exponential-full", "ring")


def mixing_on(graph: str, weights: str = "column-stochastic") -> Mixing:
    return Mixing(build_topology(graph, N, seed=1), weights)


def begun(mix: Mix, mixing: Mixing, x: Tensor, w: Tensor | None = None) -> State:
    rows = {"x": x.double()}
    if "w" in mix.names:
        rows["w"] = torch.ones(len(x), dtype=torch.float64) if w is None else w.double()
    edges = mix.first_edges(np.arange(len(x)), mixing) if isinstance(mix, RobustMix) else {}
    return State(peers=np.arange(len(x)), rows=rows, edges=edges)


def judging(byzantine: int = 1, names: tuple[str, ...] = ("x", "w")) -> RobustMix:
    return RobustMix(names, rule=Clipped(byzantine), start=torch.zeros(D, dtype=torch.float64))


numbers = st.floats(-1e30, 1e30, allow_nan=False)
any_number = st.floats(allow_nan=True, allow_infinity=True)
some_models = st.lists(st.lists(numbers, min_size=D, max_size=D), min_size=N, max_size=N)
lies = st.lists(any_number, min_size=D, max_size=D)


@settings(max_examples=25)
@given(some_models, lies, st.sampled_from(GRAPHS))
def test_weights_mix_exactly_whatever_a_liar_says(models: list[list[float]], lie: list[float], graph: str) -> None:
    mixing = mixing_on(graph)
    x = torch.tensor(models, dtype=torch.float64)
    w = torch.linspace(0.5, 2, N, dtype=torch.float64)
    mix = judging()
    state = begun(mix, mixing, x, w)
    messages = mix.outgoing(state, mixing)
    for link in messages:
        if link[0] == LIAR:
            messages[link] = {**messages[link], "x": torch.tensor(lie, dtype=torch.float64)}

    changed = mix.incoming(state, mixing, messages)
    plain = Mix(("w",)).incoming(state, mixing, Mix(("w",)).outgoing(state, mixing))
    assert torch.equal(changed.rows["w"], plain.rows["w"])
    assert changed.rows["x"][:LIAR].isfinite().all()


@settings(max_examples=40)
@given(some_models, lies)
def test_no_neighbour_moves_a_peer_beyond_the_next(models: list[list[float]], lie: list[float]) -> None:
    mix = judging(names=("x",))
    own = torch.tensor(models[0], dtype=torch.float64)
    received = {j: {"x": torch.tensor(models[j], dtype=torch.float64)} for j in range(1, LIAR)}
    honest = max(float((one["x"] - own).norm()) for one in received.values())
    received[LIAR] = {"x": torch.tensor(lie, dtype=torch.float64)}

    tables = mix.first_edges(np.arange(N), mixing_on("complete"))
    counted = mix.judge(tables, 0, {"x": own}, received)
    moved = float((counted[LIAR]["x"] - own).norm())
    length = float(own.norm())  # how far the peer has moved since the start
    assert moved <= max(honest, NEAR * length) * (1 + 1e-9) + 1e-9 * length


seen_numbers = st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=9)


@given(seen_numbers, st.integers(1, 4), st.floats(1e-3, 1e3), st.randoms())
def test_rule_has_no_unit_and_no_order(distances: list[float], byzantine: int, unit: float, order: object) -> None:
    far = np.array(distances)
    progress = np.stack([np.linspace(-1, 1, len(far)), np.linspace(1, 0.5, len(far))])
    ahead, steady = progress - 1, far[::-1].copy()
    kept = Clipped(byzantine).kept(Seen(far, progress, 1.0, ahead, steady))
    scaled = Clipped(byzantine).kept(Seen(far * unit, progress, unit, ahead * unit, steady * unit))
    np.testing.assert_allclose(scaled, kept, rtol=1e-9)

    shuffled = np.array(sorted(range(len(far)), key=lambda _: order.random()))  # type: ignore[attr-defined]
    if len(set(distances)) == len(distances):
        mixed_up = Seen(far[shuffled], progress[:, shuffled], 1.0, ahead[:, shuffled], steady[shuffled])
        again = Clipped(byzantine).kept(mixed_up)
        np.testing.assert_allclose(again, kept[shuffled])
    assert (kept >= 0).all()
    assert (kept <= 1).all()
    assert (kept == 0).sum() <= byzantine


def test_nth_largest_of_the_others() -> None:
    values = np.array([5.0, 1.0, 3.0, 4.0])
    np.testing.assert_array_equal(of_the_others(values, 1), [4, 5, 5, 5])
    np.testing.assert_array_equal(of_the_others(values, 2), [3, 4, 4, 3])
    assert np.isnan(of_the_others(values, 4)).all()


def seen(distances: list[float], progress: list[float] | None = None, moved: float = 9.0, **averages: Any) -> Seen:
    """Return what a peer sees of neighbours that are alike but for what is given."""
    n = len(distances)
    one_way = np.array([progress or [1.0] * n] * 2)
    ahead = np.array([averages.get("ahead", [0.0] * n)] * 2)
    return Seen(np.array(distances), one_way, moved, ahead, np.array(averages.get("steady", [1.0] * n)))


def test_clipped_leaves_out_what_stands_out() -> None:
    rule = Clipped(1)
    np.testing.assert_allclose(rule.kept(seen([1, 1.5, 1, 2])), [1, 1, 1, 0.75])
    np.testing.assert_allclose(rule.kept(seen([1, 1, 1, 9])), [1, 1, 1, 0])
    np.testing.assert_allclose(rule.kept(seen([1, 1, 1, math.inf])), [1, 1, 1, 0])
    # Models that agree are the same, although one is many times as far as the next.
    agreed = seen([1e-6, 1e-6, 1e-6, 1e-4], steady=[1e-6, 1e-6, 1e-6, 1e-4])
    np.testing.assert_allclose(rule.kept(agreed), np.ones(4))
    np.testing.assert_allclose(rule.kept(seen([1, 1, 1, 1], [1, -0.1, 1, 1])), [1, 0, 1, 1])
    # A peer that has heard only one neighbour lets it move the peer no farther than the peer moved itself.
    np.testing.assert_allclose(rule.kept(seen([4], moved=2.0)), [0.5])


def test_clipped_leaves_out_what_points_one_way() -> None:
    rule = Clipped(1)
    np.testing.assert_allclose(rule.kept(seen([1] * 4, steady=[1, 1, 1.25, 1])), [1, 1, 0.8, 1])
    np.testing.assert_allclose(rule.kept(seen([1] * 4, steady=[1, 1, 2.5, 1])), [1, 1, 0, 1])
    np.testing.assert_allclose(rule.kept(seen([1] * 4, ahead=[0, -0.3, 0.01, 0])), [1, 0, 1, 1])
    # Unlike peers are spread along the way, too; and two neighbours do not show which of them lies.
    np.testing.assert_allclose(rule.kept(seen([1] * 4, ahead=[0.2, -0.3, 0.01, 0])), np.ones(4))
    np.testing.assert_allclose(rule.kept(seen([1] * 2, ahead=[0, -1], steady=[1, 9])), np.ones(2))


def test_sketches_are_as_long_as_models() -> None:
    generator = torch.Generator().manual_seed(5)
    for length in (1, 3, 64, 1000, 4097):
        values = torch.randn(length, generator=generator, dtype=torch.float64)
        lengths = [float(sketch(values, secret).norm() / values.norm()) for secret in range(20)]
        assert sum(lengths) / 20 == pytest.approx(1, abs=0.1)
    lie = torch.ones(128, dtype=torch.float64)
    lie[64:] = -1  # invisible to who adds up numbers without signs
    assert float(sketch(lie, 3).norm()) > 5
    assert not torch.equal(sketch(lie, 3), sketch(lie, 4))


def test_one_broken_number_is_forgotten() -> None:
    """An average that took 1e25 in would hold it against a neighbour for a thousand rounds."""
    mix = judging(names=("x",))
    tables = mix.first_edges(np.arange(N), mixing_on("complete"))
    generator = torch.Generator().manual_seed(6)
    own = torch.ones(D, dtype=torch.float64)
    for k in range(60):
        noise = torch.randn(N, D, generator=generator, dtype=torch.float64)
        received = {j: {"x": own + 0.1 * noise[j]} for j in range(1, N)}
        if k == 5:
            received[3]["x"] = own * 1e25
        counted = mix.judge(tables, 0, {"x": own}, received)
        if k == 5:
            assert torch.equal(counted[3]["x"], own)
    assert not torch.equal(counted[3]["x"], own)


@pytest.mark.parametrize("weights", ["column-stochastic", "doubly-stochastic"])
@pytest.mark.parametrize("graph", GRAPHS[:3])
def test_peers_that_agree_mix_as_without_a_rule(graph: str, weights: str) -> None:
    if weights == "doubly-stochastic" and graph != "complete":
        return
    mixing = mixing_on(graph, weights)
    names = ("x", "w") if mixing.sends_shares else ("x",)
    x = torch.ones(N, D) + torch.eye(N, D) * 1e-3
    plain = Mix(names)
    mix = replace(judging(names=names), rule=None)
    state = begun(mix, mixing, x)
    whole = plain.incoming(state, mixing, plain.outgoing(state, mixing)).rows
    for rows in (mix.together(state, mixing, {}).rows, mix.incoming(state, mixing, mix.outgoing(state, mixing)).rows):
        for name in names:
            assert torch.equal(rows[name], whole[name])


def test_all_at_once_is_what_messages_give() -> None:
    mixing = mixing_on("directed-exponential-full")
    mix = judging()
    state = begun(mix, mixing, torch.randn(N, D, generator=torch.Generator().manual_seed(1)))
    state.rows["x"][LIAR] = 1e25
    together = mix.together(state, mixing, {})
    apart = mix.incoming(state, mixing, mix.outgoing(state, mixing))
    assert torch.equal(together.rows["x"], apart.rows["x"])
    assert torch.equal(together.edges["robust.x"].values, apart.edges["robust.x"].values)
    assert math.isnan(float(state.edges["robust.x"].values[0, 0]))  # an exchange changes no state


# --- attacks ---

LIES = {
    "sign-flip": "",
    "scale": "",
    "scale far": ", factor: 1.0e+25",
    "scale up": ", factor: 10",
    "scale to nothing": ", factor: 0",
    "noise": "",
    "mimic": "",
    "alie": "",
    "minus-mean": "",
    "nan": "",
    "hidden": "",
    "one-way": "",
}
DIGITS = (
    "n_peers=8",
    "rounds=60",
    "evaluation.every=60",
    "data={dataset: digits, batch: {size: 45}}",
    "algorithm={name: privsgp, learning_rate: 0.5}",
    "privacy={epsilon: 3.0, delta: 1.0e-3}",
)


def test_lies_cover_all_attacks() -> None:
    assert {name.split()[0] for name in LIES} == set(ATTACKS)


def ended(
    build: Build, graph: str, lies: dict[str, str], rules: dict[str, bool], rounds: int = 60
) -> dict[str, tuple[float, Engine]]:
    """Return the mean accuracy of the honest peers, in points, and the engine, after each of some runs of equal noise.

    Args:
        lies: the keys of each run's attack after its kind, by the kind; what comes after a space only tells runs apart.
        rules: of each run, whether receivers judge.
    """
    experiment = build(*DIGITS, f"topology={{name: {graph}}}", f"rounds={rounds}")
    found = {}
    for name, judges in rules.items():
        attack = None
        if name in lies:
            text = f"attack={{kind: {name.split()[0]}, peers: [{LIAR}]{lies[name]}}}"
            attack = build_attack(build(*DIGITS[:1], text).scenario.attack)
        rule = Clipped(1) if judges else None
        experiment.algorithm.make_robust(RobustMix((), rule=rule, attack=attack, start=experiment.initial))

        cohort = experiment.cohort()
        engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
        engine.rounds(experiment.scenario.rounds)
        models = experiment.algorithm.models(engine.state.rows)[:LIAR]
        public = experiment.public
        right = [experiment.kernel.logits(model[None], public.x)[0].argmax(-1) == public.y for model in models]
        found[name] = 100 * float(torch.stack(right).double().mean()), engine
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "rounds"), [("complete", 30), ("directed-exponential", 60)])
def test_one_liar_of_eight_costs_at_most_three_points(graph: str, rounds: int, build: Build) -> None:
    """On the graph with fewer edges it takes more rounds until all is found that is named."""
    known = {**LIES, "mimic without a rule": ""}
    rules = {"calm": False, "judged": True} | {name: name in LIES for name in known}
    runs = ended(build, graph, known, rules, rounds)
    calm = runs["calm"][0]
    assert runs["judged"][0] > calm - 0.5
    assert not doubted(runs["judged"][1].state.edges)

    for name in LIES:
        attacked, engine = runs[name]
        # A copy of an honest model cannot be told from it: no rule gets back the liar's own data.
        least = calm - 3 if name != "mimic" else min(calm - 3, runs["mimic without a rule"][0] - 1.5)
        assert attacked > least, name
        assert float(engine.state.rows["w"].sum()) == pytest.approx(N, rel=1e-5)
        named = doubted(engine.state.edges)
        if name in ("mimic", "alie", "hidden", "one-way"):
            assert set(named) <= {LIAR}, name  # those that hide are found later, or by some, and nobody else is
        else:
            assert named == {LIAR: engine_neighbours(engine)}, name


def engine_neighbours(engine: Engine) -> list[int]:
    assert engine.cohort.mixing is not None
    pairs = engine.cohort.mixing.topology.support()
    return sorted(set(pairs[pairs[:, 0] == LIAR, 1].tolist()) - {LIAR})


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_one_liar_costs_little_beside_a_codec(codec: str, build: Build, tmp_path: Path) -> None:
    common = [*DIGITS, "topology={name: complete}", ROBUST, f"network.codec={codec}"]
    calm = run(build(*common), tmp_path / "calm")["accuracy"]["mean_model"]
    attacked = run(build(*common, "attack={kind: scale, peers: [7]}"), tmp_path / "attacked")["accuracy"]["mean_model"]
    assert attacked > calm - 0.03


@pytest.mark.parametrize("codec", ["int8", "int4", "{name: top-k, part: 0.25}", "{name: random-k, part: 0.25}"])
def test_a_codec_leaves_a_liars_own_model_alone(codec: str, build: Build) -> None:
    """What is cut off a lie is nothing that the liar has; of its weight it keeps what everybody does."""
    settings = [*DIGITS, "rounds=1", "topology={name: complete}", ROBUST, f"network.codec={codec}"]
    calm = build(*settings)
    attacked = build(*settings, "attack={kind: scale, peers: [7], factor: 1.0e6}")
    rows = []
    for experiment in (calm, attacked):
        cohort = experiment.cohort()
        arithmetic = build_arithmetic(experiment.scenario, experiment.algorithm, experiment.mixing)
        engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort), arithmetic)
        engine.round()
        rows.append(engine.state.rows)
    assert rows[1]["x"][LIAR].norm() < 2 * rows[0]["x"][LIAR].norm()
    torch.testing.assert_close(rows[1]["w"], rows[0]["w"])
    assert float(rows[1]["w"].sum()) == pytest.approx(N, rel=1e-5)


def test_without_a_rule_one_liar_takes_all_models(build: Build) -> None:
    runs = ended(build, "complete", LIES, {"calm": False, "minus-mean": False})
    attacked, engine = runs["minus-mean"]
    assert attacked < runs["calm"][0] - 10
    assert float(engine.state.rows["w"].sum()) == pytest.approx(N, rel=1e-5)


def test_summary_and_plan_name_the_attack_and_the_liar(build: Build, tmp_path: Path) -> None:
    experiment = build(*DIGITS, "rounds=12", "topology={name: complete}", ROBUST, "attack={kind: scale, peers: [7]}")
    summary = run(experiment, tmp_path)
    assert "peer 7 lies (scale)" in summary["attack"]
    assert "peer 7 stood out" in summary["doubted"]
    assert "7 of its neighbours" in summary["doubted"]
    assert "under attack" in headline(summary)
    assert any("peer 7 lies" in warning for warning in make_plan(experiment)["warnings"])


def test_workers_judge_as_one_process(build: Build) -> None:
    experiment = build(*DIGITS, "rounds=3", ROBUST, "attack={kind: alie, peers: [7]}", "compute.workers=2")
    found = []
    for workers in (1, 2):
        cohort = experiment.cohort()
        engine = start_engine(experiment, cohort, experiment.initial_state(cohort), workers=workers)
        try:
            engine.rounds(3)
            found.append(engine.collected())
        finally:
            engine.close()
    assert torch.equal(found[0].rows["x"], found[1].rows["x"])
    torch.testing.assert_close(
        found[0].edges["robust.x"].values, found[1].edges["robust.x"].values, equal_nan=True, rtol=0, atol=0
    )


def test_liars_draw_the_same_noise_again() -> None:
    models = torch.randn(N, D, generator=torch.Generator().manual_seed(2))
    attack = build_attack(ATTACKS.section("noise", peers=[3, LIAR]))
    assert attack is not None
    first = attack.told(models, (1, 2))
    assert torch.equal(first[3], attack.told(models, (1, 2))[3])
    assert not torch.equal(first[3] - models[3], first[LIAR] - models[LIAR])
    assert not torch.equal(first[3], attack.told(models, (1, 3))[3])


@pytest.mark.parametrize("peers", ["[8]", "[1, 1]", "[0, 1, 2, 3, 4, 5, 6]"])
def test_attack_names_peers_that_there_are(peers: str, build: Build) -> None:
    with raises(ScenarioError, "attack.peers"):
        build("n_peers=8", f"attack={{kind: nan, peers: {peers}}}")


@pytest.mark.parametrize("part", [ROBUST, "attack={kind: nan, peers: [1]}"])
def test_gradients_and_servers_have_no_models_to_judge(part: str, build: Build) -> None:
    with raises(ScenarioError, "network.robust-algorithm"):
        build("algorithm={name: local, learning_rate: 0.1}", part)
    with raises(ScenarioError, "network.robust-server"):
        build("topology={name: server}", "algorithm={name: fedavg, learning_rate: 0.1}", part)


def test_noise_that_cancels_cannot_be_judged(build: Build) -> None:
    with raises(ScenarioError, "network.robust-cancelling"):
        build(*DIGITS, ROBUST, "privacy.noise={kind: cancelling, colluding: 1}")


class Deaf(Clipped):
    """A rule of a user's own: nobody counts."""

    def kept(self, seen: Seen) -> np.ndarray:
        return np.zeros(len(seen.distances))


def test_own_rule_is_asked(build: Build) -> None:
    own = "network.robust={module: 'test_robust_mix:Deaf', arguments: {byzantine: 1}}"
    experiment = build(*DIGITS[:1], own)
    cohort = experiment.cohort()
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    engine.rounds(1)
    state = engine.state
    models = state.rows["x"] / state.rows["w"][:, None]
    assert len({tuple(model.tolist()) for model in models}) == 8  # each stays where its own step took it
    with raises(ScenarioError, "code.arguments"):
        build(own.replace("byzantine: 1", ""))
