"""The laws of privacy over every algorithm, sampling, model and runtime; and that each of them can fail."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from raising import raises
from salts import pin_salts
from tasks import TASKS
from tiny_scenario import TINY, Build, Tiny
from torch import Tensor
from variants import PLAIN, VARIANTS, settings_for

from flower_privdec import testing
from flower_privdec.algorithms import ALGORITHMS
from flower_privdec.algorithms.feddeper import FedDeper
from flower_privdec.algorithms.privsgp_vr import PrivSGPVR
from flower_privdec.algorithms.sgp import SGP
from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.core import Mix, State
from flower_privdec.core.algorithm import Algorithm
from flower_privdec.core.cohort import Cohort, PrivateStep
from flower_privdec.data.features import apply_features
from flower_privdec.experiment import Agreement, Experiment, OwnParts
from flower_privdec.gradients import StackedKernel
from flower_privdec.privacy.mechanism.declared import ONE_SUM, Drawing, ReleasedSum
from flower_privdec.privacy.noise import SystemNoise
from flower_privdec.scenario import Scenario, parse_scenario
from flower_privdec.testing import BrokenLaw

SHORT = ["rounds=4", "data.samples=48", "n_peers=4", "privacy.clip_norm=0.05", "algorithm.learning_rate=2.0"]
OTHERS = ["uniform", "shuffle", "full"]  # samplings beside Poisson
MODELS = {
    "mlp": ["model={name: mlp, hidden: [7], activation: tanh}"],
    "cnn": ["model={module: user_models:convolutional}"],
    "residual": ["model={module: user_models:residual}"],
    "unproved": ["model={module: user_models:unproved}"],
    "pixels as tokens": ["model={module: user_models:tokens}"],
    "own loss": ["task={loss: {module: 'user_tasks:cross_entropy'}}"],
    **TASKS,
}
BRIEF = {  # three algorithms that use a kernel each in its own way
    "privsgp": [],
    "privsgp-vr": ["algorithm.table=dense"],
    "feddeper": ["algorithm.local_steps=2"],
}
SPOILT = {  # what four examples of a task may hold
    **dict.fromkeys(("numbers", "numbers, huber", "labels"), (1e25, -1e300, math.nan, math.inf)),
    "tokens": (-1, 200, 2**63 - 1, -(2**63)),
}


def batch_of(sampling: str) -> str:
    return "data.batch={sampling: full}" if sampling == "full" else f"data.batch={{sampling: {sampling}, size: 4}}"


def cases() -> list[list[str]]:
    """Return every variant under Poisson sampling, and under another sampling in turn."""
    chosen = []
    for number, variant in enumerate(VARIANTS):
        if "data.batch.sampling=blocks" in variant:
            chosen.append([*variant, "data.batch.size=4"])
        elif any(setting.startswith("data.batch={") for setting in variant):
            chosen += [variant, [*variant, "data.partition={kind: sizes, sizes: [6, 12, 20, 10]}"]]
        else:
            # A table of gradients has no proved bound under shuffling: it is refused.
            others = [each for each in OTHERS if each != "shuffle" or not variant[0].endswith("privsgp-vr")]
            chosen.append([*variant, batch_of("poisson")])
            chosen.append([*variant, batch_of(others[number % len(others)])])
    return chosen


@pytest.fixture(scope="module", params=cases(), ids=" ".join)
def case(request: pytest.FixtureRequest) -> Experiment:
    """Return every algorithm under two samplings, built once for all laws."""
    return Experiment.build(parse_scenario(TINY, overrides=[*SHORT, *settings_for(*request.param)]))


def test_one_example_moves_a_release_as_declared(case: Experiment) -> None:
    testing.assert_sensitivity(case, 4, 0, 5)


def test_every_release_has_noise_and_no_draw_repeats(case: Experiment) -> None:
    testing.assert_noise(case, 4)


def test_the_noise_spends_the_budget_and_no_more(case: Experiment) -> None:
    plan, budget = case.own.protection, case.scenario.private.epsilon
    assert plan is not None
    for account, spent in zip(plan.accounts, plan.epsilons(case.scenario.rounds), strict=True):
        assert 0.995 * budget <= spent <= budget or not account.spends  # one that is never active


def test_nothing_else_leaves(case: Experiment) -> None:
    testing.assert_nothing_else_leaves(case)


@pytest.mark.parametrize(
    ("name", "model"),
    [(name, model) for i, name in enumerate(BRIEF) for j, model in enumerate(MODELS) if (i + j) % 2 == 0],
)
def test_the_laws_hold_for_every_kind_of_model(build: Build, name: str, model: str) -> None:
    experiment = build(
        *SHORT, *settings_for(f"algorithm.name={name}", *BRIEF[name]), batch_of("poisson"), *MODELS[model]
    )
    testing.assert_sensitivity(experiment, 3, 2)
    testing.assert_nothing_else_leaves(experiment)


def spoil(experiment: Experiment, place: int, value: float) -> Experiment:
    """Put a value into the target, or into the tokens, of an example of peer 0."""
    examples = experiment.own.examples
    x, y, row = examples.x.clone(), examples.y.clone(), int(examples.parts[0][place])
    if y.is_floating_point():
        y = y.double()
        y[row, 0] = value
    else:
        x[row, 3] = int(value)
    return replace(experiment, own=replace(experiment.own, examples=replace(examples, x=x, y=y)))


@pytest.mark.parametrize("task", SPOILT)
@pytest.mark.parametrize("name", BRIEF)
def test_no_target_or_token_moves_a_release_more(build: Build, name: str, task: str) -> None:
    experiment = build(
        *SHORT, *settings_for(f"algorithm.name={name}", *BRIEF[name]), *TASKS[task], "data.batch={sampling: full}"
    )
    for place, value in enumerate(SPOILT[task]):
        experiment = spoil(experiment, place, value)
    for place, value in enumerate(SPOILT[task]):
        moved = testing.assert_sensitivity(experiment, 2, place)
        beyond = abs(value) > 1e150 and task != "numbers, huber"  # whose gradient no target makes longer
        assert moved == 0 if task == "tokens" or math.isnan(value) or beyond else moved > 0
    assert testing.assert_sensitivity(experiment, 2, 5) > 0
    assert torch.isfinite(testing.run_rounds(experiment, 3).state.rows["x"]).all()


# --- each law fails when the code is broken ---


def broken(build: Build, *settings: str) -> Experiment:
    return build(*SHORT, *settings_for(*settings), batch_of("poisson"))


def unclipped(kernel, out, params, batch, clip_norm, scale, divisor=None):  # type: ignore[no-untyped-def]
    """Sum gradients as they are."""
    return clipped(kernel, out, params, batch, None, scale, divisor)


def clipped_together(kernel, out, params, batch, clip_norm, scale, divisor=None):  # type: ignore[no-untyped-def]
    """Clip a batch's mean gradient, not each example's: one example turns all of it."""
    total = torch.zeros_like(out)
    norms = clipped(kernel, total, params, batch, None, torch.ones_like(scale), divisor)
    total *= (4 * clip_norm / total.norm(dim=1)).clamp(max=1).unsqueeze(1)
    out += scale.unsqueeze(1) * total
    return norms


clipped = StackedKernel.add_clipped_


def look_at_all_examples(experiment: Experiment) -> None:
    testing.assert_sensitivity(experiment, 4, *range(12))


@pytest.mark.parametrize("mutant", [unclipped, clipped_together])
def test_a_missing_clip_is_found(build: Build, mutant: Callable[..., Tensor]) -> None:
    experiment = broken(build, "algorithm.name=privsgp")
    look_at_all_examples(experiment)
    with (
        patch.object(StackedKernel, "add_clipped_", mutant),
        raises(BrokenLaw, "law.sensitivity", "'gradient'"),
    ):
        look_at_all_examples(experiment)


def test_a_declaration_that_says_too_little_is_found(build: Build) -> None:
    experiment = broken(build, "algorithm.name=privsgp-vr")
    with (
        patch.object(PrivSGPVR, "released", lambda *_: ONE_SUM),
        raises(BrokenLaw, "law.sensitivity", "'gradient'"),
    ):
        testing.assert_sensitivity(experiment, 4)


def test_a_release_left_out_stops_the_step(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedDeper, "released", lambda *_: (ReleasedSum("gradient"),))
    experiment = broken(build, "algorithm.name=feddeper")
    with raises(ArgumentError, "release.sums", r"\['gradient', 'personal'\]"):
        testing.run_rounds(experiment, 1)


class Noises:
    """Ways to spoil the noise of a step."""

    @staticmethod
    def of_one_step(cohort: Cohort, step: PrivateStep) -> None:
        add_noise_(cohort, replace(step, step=0))

    @staticmethod
    def half(cohort: Cohort, step: PrivateStep) -> None:
        halves = {name: std / 2 for name, std in step.noise_std.items()}
        add_noise_(cohort, replace(step, noise_std=halves))

    @staticmethod
    def shared_by_two_sums(cohort: Cohort, step: PrivateStep) -> None:
        for name, std in step.noise_std.items():
            cohort.noise.add_(step.sums[name], std, step.step, step.peers, "gradient")

    @staticmethod
    def none(cohort: Cohort, step: PrivateStep) -> None:
        pass


add_noise_ = Cohort.add_noise_


@pytest.mark.parametrize(
    ("mutant", "refusal"),
    [
        (Noises.of_one_step, ("law.noise-twice",)),
        (Noises.shared_by_two_sums, ("law.noise-twice",)),
        (Noises.half, ("law.noise",)),
        (Noises.none, ("law.noise",)),
    ],
)
def test_spoilt_noise_is_found(build: Build, mutant: Callable[..., None], refusal: tuple[str, ...]) -> None:
    experiment = broken(build, "algorithm.name=feddeper")
    with patch.object(Cohort, "add_noise_", mutant), raises(BrokenLaw, *refusal):
        testing.assert_noise(experiment, 3)


def test_noise_rounded_to_float32_is_as_planned(build: Build) -> None:
    testing.assert_noise(build("compute.dtype=float32", "privacy.clip_norm=100"), 3)


def around_the_door(cohort: Cohort, state: State) -> None:
    """Add a gradient to the model that nobody noised."""
    batch = cohort.data.batch(state.round_index, cohort.peers)
    scale = torch.full_like(state.rows["w"], -1e-3)
    cohort.kernel.add_clipped_(state.rows["x"], state.rows["x"], batch, None, scale)


@pytest.mark.parametrize(
    ("settings", "program"),
    [
        (["algorithm.name=privsgp"], lambda own: (around_the_door, *own)),
        (["algorithm.name=privsgp-vr"], lambda own: (own[0], Mix(("x", "w", "table.mean")))),
        (["algorithm.name=feddeper", "algorithm.rho=0"], lambda own: (own[0], Mix(("x", "w", "personal")))),
    ],
)
def test_a_leak_around_the_release_is_found(
    build: Build, settings: list[str], program: Callable[[tuple], tuple]
) -> None:
    experiment = broken(build, *settings)
    experiment.algorithm.program = program(experiment.algorithm.program)
    with raises(BrokenLaw, "law.leak", "peer 0"):
        testing.assert_nothing_else_leaves(experiment)


def test_figures_on_private_labels_are_found(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["algorithm.name=feddeper", "algorithm.rho=0"]
    testing.assert_nothing_else_leaves(broken(build, *settings))
    with raises(BrokenLaw, "law.leak"):
        testing.assert_nothing_else_leaves(broken(build, *settings, "evaluation.private=ignored"))


# --- what declares nothing has no finite ε ---


class Quiet(SGP):
    """Push-sum that changes a step and says nothing of what it releases."""

    name = "sgp"

    def initial(self, cohort: Cohort) -> dict[str, Tensor]:
        """Return SGP's rows."""
        return super().initial(cohort)


class Renamed(SGP):
    """Push-sum under another name: what it inherits it has not changed."""

    name = "renamed"


class Unclipped:
    """What a class can be mixed with."""

    def initial(self, cohort: Cohort) -> dict[str, Tensor]:
        """Return nothing."""
        return {}


class Mixed(Unclipped, SGP):
    """Push-sum that changes a step by a class mixed in."""


class Opened(FedDeper):
    """FedDeper that sends its personal models, which no noise covers."""

    open_rows = ("x", "w", "personal")


class Longer(FedDeper):
    """FedDeper that takes other numbers of steps than it declares."""

    steps_per_round = property(lambda self: 9, lambda self, steps: None)


class Built(SGP):
    """Push-sum whose method belongs to the class."""

    @classmethod
    def initial(cls, cohort: Cohort) -> dict[str, Tensor]:  # type: ignore[override]
        """Return nothing."""
        return {}


def test_a_subclass_that_changes_anything_inherits_no_promise() -> None:
    drawing = Drawing("poisson", 0.1, 60, 6)
    assert Renamed.released is SGP.released
    for changed in (Quiet, Mixed, Opened, Longer, Built):
        assert changed.released is Algorithm.released
    assert Algorithm.released(None, 0, drawing) is None  # type: ignore[arg-type]
    for name, algorithm in ALGORITHMS.items():
        assert algorithm.released is not Algorithm.released, name


def test_an_undeclared_algorithm_has_no_budget_and_infinite_cost(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "sgp", Quiet)
    with raises(ScenarioError, "privacy.undeclared", "'sgp'") as refused:
        build("algorithm.name=sgp")
    assert "\n" not in str(refused.value)
    with raises(ScenarioError, "privacy.undeclared", "'sgp'"):
        build("algorithm.name=sgp", "privacy.noise_multiplier=5")
    experiment = build("algorithm.name=sgp", "privacy={noise_multiplier: 5, delta: 1.0e-3}")
    assert experiment.own.protection is not None
    assert experiment.own.protection.epsilons(6) == [np.inf] * 4
    testing.run_rounds(experiment, 2)


@pytest.mark.parametrize(
    "wrong", [{"drawn": 0.0}, {"drawn": np.inf}, {"idle": 2.0}, {"idle": np.nan}, {"noise": 0.0}, {"receivers": 0}]
)
def test_a_declaration_that_means_nothing_is_refused(wrong: dict[str, float]) -> None:
    with raises(ScenarioError, "release.declared", f"sum 'gradient' .*{next(iter(wrong))}="):
        ReleasedSum(**wrong)  # type: ignore[arg-type]


# --- two runs share no draw ---


def first_noise(experiment: Experiment) -> Tensor:
    out = torch.zeros(4, experiment.initial.numel(), dtype=torch.float64)
    experiment.cohort().noise.add_(out, torch.ones(4, dtype=torch.float64), 0, np.arange(4), "gradient")
    return out


DIFFERENT = [
    [],
    ["algorithm.name=sgp"],
    ["privacy.epsilon=2.9"],
    ["privacy.clip_norm=1.1"],
    ["seed=4"],
    ["rounds=7"],
    ["data.samples=239"],
    ["algorithm.learning_rate=0.51"],
    ["compute.dtype=float32"],
]


def test_runs_that_differ_in_anything_share_no_draw(build: Build) -> None:
    experiments = [build(*settings) for settings in DIFFERENT]
    noises = [first_noise(experiment) for experiment in experiments]
    values = torch.cat([noise.flatten() for noise in noises])
    assert len(torch.unique(values)) == len(values)
    batches = [tuple(experiment.own.sampler.batch(0, [0]).index[0].tolist()) for experiment in experiments]
    assert len(set(batches)) == len(batches)
    assert len({experiment.own.run.id for experiment in experiments}) == len(experiments)


def test_runs_that_round_differently_share_no_draw(tiny: Tiny) -> None:
    runtimes, float64 = ["engine", "network", "2 shards", "relay over 2 nodes"], "compute={dtype: float64"
    owns = [OwnParts.of(Agreement.of(tiny("compute.generator=null")), runtime=runtime) for runtime in runtimes]
    owns += [OwnParts.of(Agreement.of(tiny(f"{float64}, {key}}}"))) for key in ("threads: 2", "memory_mib: 64")]
    assert len({own.keys[0] for own in owns}) == len({own.run.id for own in owns}) == 6
    assert OwnParts.of(Agreement.of(tiny(f"{float64}, workers: 2}}"))).keys == owns[0].keys
    portable = [OwnParts.of(Agreement.of(tiny()), runtime=runtime) for runtime in runtimes]
    portable += [OwnParts.of(Agreement.of(tiny("compute.threads=2")))]
    assert len({own.keys[0] for own in portable}) == 1


def test_only_portable_runs_draw_alike_on_every_machine(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(generator: str) -> tuple[bytes, str, str]:
        own = OwnParts.of(Agreement.of(tiny(f"compute.generator={generator}")))
        return own.keys[0], own.run.environment, own.run.id

    here = {generator: drawn(generator) for generator in ("portable", "null")}
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "NEON")
    monkeypatch.setattr("flower_privdec.experiment.run_key.installed_version", lambda package: "0.0.1")
    there = {generator: drawn(generator) for generator in here}
    assert there["portable"][0] == here["portable"][0]
    assert there["null"][0] != here["null"][0]
    assert all("cpu NEON" in environment for _, environment, _ in there.values())
    assert there["portable"][2] != here["portable"][2]  # so that a ledger charges it again


def test_keys_follow_images_not_the_rounding_of_features(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    features = ("data.dataset=digits", "features={kind: scattering, scales: 1, pool: 2, groups: 0}")

    def drawn(generator: str) -> OwnParts:
        return OwnParts.of(Agreement.of(tiny(*features, f"compute.generator={generator}")))

    here = {generator: drawn(generator) for generator in ("portable", "null")}
    monkeypatch.setattr(
        "flower_privdec.data.features.apply_features", lambda x, section: apply_features(x, section) * 1.0000002
    )
    rounded = {generator: drawn(generator) for generator in here}
    assert not torch.equal(here["null"].examples.x, rounded["null"].examples.x)
    assert all(rounded[generator].keys == here[generator].keys for generator in here)
    # Another version of the library makes other features. Under the same noise they would show images.
    monkeypatch.setattr("flower_privdec.data.features.features_version", lambda: "kymatio 0")
    assert drawn("null").keys[0] != here["null"].keys[0]
    assert drawn("portable").keys == here["portable"].keys


def test_a_runs_name_and_output_change_no_draw(build: Build) -> None:
    same = [
        [],
        ["name=other"],
        ["evaluation.every=3"],
        ["compute.workers=2"],
        ["privacy.ledger=/tmp/elsewhere"],
        ["data.root=nowhere"],
    ]
    ids = {build(*settings).own.run.id for settings in same}
    assert len(ids) == 1


def test_one_pixel_changes_everyones_draws(tiny: Callable, build: Build, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(60, 4)).astype(np.float32), np.arange(60) % 2
    keys = []
    for change in (0.0, 1e-6):  # other peers' later steps begin at what this one sends them
        x[0, 0] += change
        np.savez(tmp_path / f"{change}.npz", x_train=x, y_train=y, x_test=x[5:9], y_test=y[5:9])
        data = f"data={{dataset: npz, root: {tmp_path}/{change}.npz, batch: {{size: 5}}}}"
        keys.append(build(data).own.keys)
    assert not set(keys[0].values()) & set(keys[1].values())


HOOK = "def make():\n    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
HOOK += "    net.register_forward_hook(lambda net, x, y: y * 1.0)\n    return net\n"
NET = "class Net(nn.Sequential):\n    def forward(self, x):\n        IMPORT\n        return super().forward(scale(x))\n"
NET += "def make():\n    return Net(nn.Flatten(), nn.Linear(64, 10))\n"
HELD = "def make():\n    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
HELD += "    net.register_buffer('seen', torch.ones(3) * __import__('my_numbers').FACTOR)\n    return net\n"
WRITTEN = {
    "a helper's": {
        "my_net": "from torch import nn\n" + NET.replace("IMPORT", "from my_tools import scale"),
        "my_tools": "def scale(x):\n    return x * 1.0\n",
    },
    "a helper's in a package": {
        "my_net": "from torch import nn\n" + NET.replace("IMPORT", "from my_kit import scale"),
        "my_kit/__init__": "from .inner import scale\n",
        "my_kit/inner": "def scale(x):\n    return x * 1.0\n",
    },
    "a hook of torch's own layers": {"my_net": "from torch import nn\n" + HOOK},
    "a buffer's numbers": {"my_net": "import torch\nfrom torch import nn\n" + HELD, "my_numbers": "FACTOR = 1.0\n"},
}


@pytest.mark.parametrize("which", WRITTEN)
def test_a_models_code_names_its_run(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    pin_salts(monkeypatch)
    monkeypatch.syspath_prepend(str(tmp_path))
    ids = []
    for factor in ("1.0", "1.0", "2.0"):
        for name in [name for name in sys.modules if name.startswith("my_")]:
            del sys.modules[name]
        for name, text in WRITTEN[which].items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / f"{name}.py").write_text(text.replace("1.0", factor) + f"# {factor}".replace("1.0", ""))
        importlib.invalidate_caches()
        ids.append(build("model={module: my_net:make}").own.run.id)
    assert ids[0] == ids[1] != ids[2]


def test_two_budgets_at_one_seed_share_no_noise(build: Build) -> None:
    """One clipped gradient under two budgets: what the difference of the messages tells of it."""
    one, other = (build(f"privacy.epsilon={budget}", "rounds=1", "data.batch={sampling: full}") for budget in (1, 2))
    x = [testing.run_rounds(experiment, 0).state.rows["x"] for experiment in (one, other)]
    released = []
    for experiment in (one, other):
        with testing.recording() as tape:
            testing.run_rounds(experiment, 1)
        released.append(tape.steps[0])
    assert torch.equal(*x)
    torch.testing.assert_close(released[0].raw["gradient"], released[1].raw["gradient"])
    noise = [each.after["gradient"] - x[0] - each.raw["gradient"] for each in released]
    scaled = [part / part.std() for part in noise]
    assert float((scaled[0] - scaled[1]).std()) > 1  # independent normals: sqrt(2)


def test_the_laws_look_at_something(build: Build) -> None:
    """A law over data that change nothing would hold for anything."""
    experiment = build(*SHORT, *settings_for("algorithm.name=privsgp"), batch_of("full"))
    with (
        patch.object(testing, "other_data", lambda dataset, rows: dataset),
        raises(BrokenLaw, "law.same-data"),
    ):
        testing.assert_nothing_else_leaves(experiment)
    assert testing.assert_sensitivity(experiment, 4) > 0.9


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ("algorithm.learning_rate=1e39", "algorithm.learning_rate, over the batch size, times privacy.clip_norm"),
        ("algorithm.learning_rate=1e-44", "algorithm.learning_rate, over the batch size, times privacy.clip_norm"),
        ("algorithm.learning_rate=[1, 1, 1e300, 1]", "algorithm.learning_rate, over the batch size, times"),
        ("privacy.clip_norm=1e-40", "privacy.clip_norm is 1e-40 in some step"),
        ("privacy.clip_norm=1e300", r"privacy.clip_norm is 1e\+300 in some step"),
    ],
)
def test_steps_whose_numbers_overflow_or_vanish_are_refused(build: Build, dtype: str, setting: str, what: str) -> None:
    with raises(ScenarioError, "experiment.range", what):
        build(f"compute.dtype={dtype}", setting)


@pytest.mark.slow
def test_a_refused_learning_rate_would_leak_signs(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """An infinite step plus infinite noise: a pixel that is black in the whole batch is told from one that is not."""
    monkeypatch.setattr("flower_privdec.experiment.own_parts.check_number_range", lambda *_: None)
    alone = "algorithm={name: local, learning_rate: 1e300}"
    experiment = build("compute.dtype=float32", alone, "privacy.epsilon=0.1")
    engine = testing.run_rounds(experiment, 1)
    assert engine.state.rows["x"].isnan().any()
    assert not engine.state.rows["x"].isnan().all()


@pytest.mark.parametrize("variant", PLAIN, ids=" ".join)
def test_a_deployed_peer_noises_sums_before_rounding_models(
    tiny: Callable[..., Scenario], variant: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of 1e6, as a neighbour may make it, is in nothing that noise is added to."""
    noised, add = [], SystemNoise.add_

    def noted(self: SystemNoise, out: Tensor, *others: object) -> None:
        noised.append(float(out.abs().max()))
        add(self, out, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(SystemNoise, "add_", noted)
    scenario = tiny(*SHORT, "compute.dtype=float32", *settings_for(*variant))
    agreement = Agreement.of(scenario)
    experiment = Experiment.joined(agreement, OwnParts.of(agreement, secret=bytes(32)))
    for start in (0.0, 1e6):
        testing.run_rounds(replace(experiment, initial=experiment.initial + start), 3)
    assert noised
    assert 0 < max(noised) < 1e3


def test_rounding_with_a_large_model_would_break_sensitivity(build: Build) -> None:
    """What making sums apart is for: 1,000 numbers near 1e3, and a step of a thousandth."""
    cohort = build("compute.dtype=float32", "data.batch={sampling: full}").cohort()
    rows = torch.full((4, cohort.kernel.d), 1024.0)
    moved = []
    for share in (1.0, 0.0):
        batch = cohort.data.batch(0, cohort.rows)
        weight = batch.weight.clone()
        weight[:, 0] *= share
        out, scale = rows.clone(), torch.full((4,), -1e-3)
        cohort.kernel.add_clipped_(out, torch.zeros_like(rows), replace(batch, weight=weight), torch.ones(4), scale)
        moved.append(out)
    assert float((moved[0] - moved[1]).norm(dim=1).max()) > 1.2e-3
