"""Whatever `privdec list` offers is accepted and built, and whatever the schema accepts is listed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from raising import raises
from tiny_scenario import Build
from variants import DUAL, choosing, settings_for

from flower_privdec.algorithms.proximal import REGULARIZER_KEYS
from flower_privdec.common import catalogue
from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.graph.topology import build_topology
from flower_privdec.models import build_model
from flower_privdec.reporting.console import parts
from flower_privdec.scenario import Scenario, algorithm_sections, parse_scenario

KEYS = {  # where a scenario names what is listed
    "algorithms": "algorithm.name",
    "tables": "algorithm.table",
    "regularizers": "algorithm.regularizer.kind",
    "schedules": "algorithm.schedule",
    "topologies": "topology.name",
    "weights": "topology.weights",
    "participations": "participation.kind",
    "losses": "task.loss",
    "metrics": "task.metrics",
    "models": "model.name",
    "activations": "model.activation",
    "inits": "model.init",
    "datasets": "data.dataset",
    "partitions": "data.partition.kind",
    "samplings": "data.batch.sampling",
    "features": "features.kind",
    "noises": "privacy.noise.kind",
    "robust": "network.robust.kind",
    "attacks": "attack.kind",
    "codecs": "network.codec.name",
    "transports": "network.transport",
}
NUMBERS = ["data.dataset=diabetes", "data.test_samples=50", "task.loss=mse"]
LABELS = ["data.dataset=synthetic-labels", "task.loss=binary-cross-entropy"]
VALUES = {
    "file": "edges.txt",
    "rows": 2,
    "cols": 2,
    "staleness": 3,
    "initial_clip": 1.0,
    "clip_norm": 1.0,
    "directed": "true",
}
VALUES |= {"bias": "true", "pool": "true", "any_mixing_rate": "true"}
VALUES |= {"permutations": 3, "truncation": 0.01, "validation_subsample": 20}
NEEDED = {  # what else a scenario needs that names a part
    "random-regular": ["topology.degree=2"],
    "small-world": ["topology.degree=2"],
    "edge-list": ["topology.file=edges.txt", "topology.directed=false"],
    "metropolis": ["topology.name=ring"],
    "max-degree": ["topology.name=bipartite"],
    "tables": ["algorithm.name=privsgp-vr"],
    "table blocks": ["data.batch.sampling=blocks"],
    "sampling blocks": ["algorithm={name: privsgp-vr, table: blocks, learning_rate: 0.1}"],
    "option permutations": ["algorithm.shapley=monte-carlo"],
    "option truncation": ["algorithm.shapley=monte-carlo", "algorithm.permutations=3"],
    "full": ["data.batch={sampling: full}"],
    "participation uniform": ["participation.fraction=0.5"],
    "participations edges": [*settings_for("algorithm.name=d-psgd"), "participation.count=1"],
    "schedules": settings_for("algorithm={name: dp-dda}"),
    "dirichlet": ["data.partition.alpha=100"],
    "shards": ["data.partition.shards_per_peer=2"],
    "pathological": ["data.partition.classes_per_peer=5"],
    "sizes": ["data.partition.sizes=[20, 30, 40, 50]"],
    "activations": ["model.name=mlp"],
    **{f"losses {name}": ["data.dataset=breast-cancer"] for name in ("logistic", "hinge", "squared-hinge")},
    **{f"losses {name}": NUMBERS[:2] for name in ("mse", "mae", "huber")},
    "losses binary-cross-entropy": LABELS[:1],
    **{f"metrics {name}": NUMBERS for name in ("rmse", "mse", "mae", "r2")},
    **{f"metrics {name}": LABELS for name in ("micro-f1", "subset-accuracy", "mean-average-precision")},
    "diabetes": NUMBERS[1:],
    "svmlight": ["data.n_features=3", "data.test=nowhere"],
    "csv": ["data.table={target: y, numbers: {a: [0.0, 1.0]}}", "data.test=nowhere"],
    "parquet": ["data.table={target: y, numbers: {a: [0.0, 1.0]}}", "data.test=nowhere"],
    "image-folder": ["data.labels=[a, b]", "data.test=nowhere"],
    "synthetic-labels": ["task.loss=binary-cross-entropy"],
    "synthetic-words": ["model.name=text"],
    "text": ["data.dataset=synthetic-words"],
    "noises cancelling": ["privacy.noise.colluding=1"],
    "robust": ["network.robust.byzantine=1"],
    "attacks": ["attack.peers=[1]"],
    "features": ["data.samples=8", "data.test_samples=4", "data.batch.size=1", "features.pool=2"],
}
OF_A_FILE = ("mnist", "fashion-mnist", "cifar10", "npz", "svmlight", "csv", "parquet", "image-folder")
IMAGES = (3, 32, 32)


def named() -> list[tuple[str, str]]:
    return [(group, name) for group, lines in parts().items() for name in lines]


def settings_of(group: str, name: str) -> list[str]:
    """Return the settings of a scenario that names a part."""
    own = f"{group.removesuffix('s')} {name}" if name in ("blocks", "uniform") else name
    needed = [*NEEDED.get(group, []), *NEEDED.get(own, []), *NEEDED.get(f"{group} {name}", [])]
    if group == "metrics":
        return [*needed, f"{KEYS[group]}=[{name}]"]
    if group == "algorithms":
        return settings_for(choosing(name))
    if group == "regularizers":
        keys = ", ".join(f"{key}: 1" for key in REGULARIZER_KEYS[name] if key != "lower")
        low = ", lower: -1" if name == "box" else ""
        section = f"{{kind: {name}{', ' if keys else ''}{keys}{low}}}"
        return settings_for(f"algorithm={{name: dp-dda, schedule: convex, regularizer: {section}}}")
    return [*needed, f"{KEYS[group]}={name}"]


def enumerations(schema: dict[str, Any], place: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (key, name) for every name that a JSON schema accepts at a key."""
    if "$ref" in place:
        place = schema["$defs"][place["$ref"].rsplit("/", 1)[1]]
    for option in place.get("anyOf", []) + place.get("oneOf", []):
        yield from enumerations(schema, option, path)
    for key, inner in place.get("properties", {}).items():
        yield from enumerations(schema, inner, (*path, key))
    if "items" in place:
        yield from enumerations(schema, place["items"], path)
    accepted = place.get("enum", [place["const"]] if "const" in place else [])
    yield from ((".".join(path), name) for name in accepted)


@pytest.mark.parametrize(("group", "name"), named())
def test_every_listed_part_is_accepted_and_built(
    build: Build, tiny: Callable[..., Scenario], group: str, name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "edges.txt").write_text("0 1\n1 2\n2 3\n3 0\n")
    settings = ["compute.memory_mib=64", *settings_of(group, name)]
    if group == "partitions" and name in ("dirichlet", "shards", "pathological"):
        pytest.importorskip("flwr_datasets")
    if group == "features":
        pytest.importorskip("kymatio")
    if group == "models" and name.startswith(("cnn-feddeper", "resnet")):
        assert tiny(*settings).model.name == name
        build_model(name, IMAGES, 10, seed=1)
    elif name in OF_A_FILE:
        assert tiny(*settings).data.dataset == name
        code = "data.no-file" if name in ("npz", "svmlight", "csv", "parquet") else "data.no-root"
        with raises(ScenarioError, code, r"data\.(root|test)"):  # the reader is there, and asks for the files
            build(*settings)
    else:
        build(*settings)


def test_every_accepted_part_is_listed() -> None:
    schema = Scenario.model_json_schema()
    accepted: dict[str, set[str]] = {}
    for key, name in enumerations(schema, schema, ()):
        accepted.setdefault(key, set()).add(name)
    listed = parts()
    for group, key in KEYS.items():
        assert accepted.pop(key) == set(listed.pop(group)), key
    for key in ("topology.supergraph", "privacy.noise.secrets.name", "privacy.noise.secrets.supergraph"):
        assert accepted.pop(key) == set(catalogue.TOPOLOGIES)
    assert not listed
    choices = {"privacy", "privacy.calibration", "evaluation.private", "algorithm.weighting", "features.whitening"}
    choices |= {"task.loss.targets", "task.metrics.better", "data.batch.small_peers"}
    choices |= {"privacy.noise.strength", "privacy.noise.bands", "algorithm.acceleration", "algorithm.shapley"}
    choices |= {"compute.device", "compute.dtype", "compute.generator", "compute.workers", "network.mode"}
    choices |= {
        *(f"data.table.{key}" for key in ("missing", "decimal", "thousands", "delimiter", "encoding")),
        "algorithm.optimizer.name",
        "algorithm.average.kind",
        "algorithm.learning_rate_schedule",
    }
    choices |= {"network.alone", "network.links", "network.final_mixing", "network.peers.dial"}
    assert set(accepted) == choices


def test_a_cnn_of_ones_own_measures_is_built(build: Build) -> None:
    experiment = build("model={name: cnn, channels: [2], kernel: 3, hidden: [5], pool: true}")
    assert experiment.initial.numel() == (2 * 9 + 2) + (2 * 4 * 4 * 5 + 5) + (5 * 10 + 10)
    with raises(ScenarioError, "scenario.other-choice"):
        build("model={name: mlp, channels: [2]}")


def test_an_unknown_name_is_refused_alike_everywhere(tiny_text: str) -> None:
    with raises(ScenarioError, "scenario.literal_error", r"topology\.name='rign'.*'ring'"):
        parse_scenario(tiny_text, overrides=["topology.name=rign"])
    with raises(ScenarioError, "catalogue.unknown", r"topology\.name='rign'.*'ring'"):
        build_topology("rign", 4)


def test_the_catalogue_and_the_builders_have_equal_names() -> None:
    with raises(ArgumentError, "catalogue.differs", ".*'tanh'"):
        catalogue.ACTIVATIONS.bind({"relu": 1})
    with raises(ArgumentError, "catalogue.differs", ".*'gelu'"):
        catalogue.ACTIVATIONS.bind({"relu": 1, "tanh": 2, "gelu": 3})


OPTIONS = {
    "algorithms": algorithm_sections.ALGORITHMS.keys_of,
    "topologies": catalogue.TOPOLOGIES.keys_of,
    "models": catalogue.MODELS.keys_of,
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_every_listed_option_can_be_set_and_no_other(kind: str, tiny: Callable[..., Scenario]) -> None:
    section, key = KEYS[kind].split(".")
    known = {name: OPTIONS[kind](name) for name in parts()[kind]}
    every = {option for options in known.values() for option in options}
    for name, options in known.items():
        line = parts()[kind][name]
        for option in every:
            assert (option in options) == bool(re.search(rf"[(,] ?{option}(: |[,)])", line))
        for option, value in options.items():
            given = VALUES.get(option, value)
            rate = ", learning_rate: 0.1" if kind == "algorithms" and name not in DUAL else ""
            extra = ["n_peers=1"] if name == "dp-sgd" else NEEDED.get(f"table {given}", [])
            extra = NEEDED.get(f"option {option}", extra)
            scenario = tiny(f"{section}={{{key}: '{name}', {option}: {given}{rate}}}", *extra)
            assert getattr(getattr(scenario, section), option) is not None


@pytest.mark.parametrize("kind", OPTIONS)
def test_options_of_others_are_refused(kind: str, build: Build) -> None:
    section, key = KEYS[kind].split(".")
    known = {name: OPTIONS[kind](name) for name in parts()[kind]}
    values = {option: value for options in known.values() for option, value in options.items()}
    plain = {"algorithms": "privsgp", "topologies": "ring", "models": "softmax"}[kind]
    for option, value in values.items():
        if option in known[plain]:
            continue
        rate = ", learning_rate: 0.1" if kind == "algorithms" else ""
        with pytest.raises(ScenarioError) as refusal:
            build(f"{section}={{{key}: {plain}, {option}: {VALUES.get(option, value)}{rate}}}", "privacy=none")
        assert refusal.value.code in ("topology.unknown-option", "scenario.other-choice", "scenario.extra_forbidden")
        assert option in str(refusal.value)
