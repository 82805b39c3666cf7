"""What a scenario can choose: factors with their levels, and which of them mean nothing beside which others.

A level is a mapping of dotted keys of a scenario to values. A value may be a function of the row's `Facts`: what the
levels before it chose. Keys that begin with `@` are not the scenario's: they say how the row is written and run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tools.battery import parts

Level = Mapping[str, Any]
RATE = 0.3


@dataclass(frozen=True)
class DataKind:
    """What a row has to know of its data.

    Attributes:
        targets: classes, numbers or labels.
        inputs: how many numbers an example has; None of tokens.
        outputs: how many the model has.
        is_image: whether examples are pictures.
        files: the files that the row writes, by the key that names each.
    """

    targets: str
    inputs: int | None
    outputs: int
    is_image: bool = False
    files: Mapping[str, str] | None = None


KINDS = {
    "digits": DataKind("classes", 64, 10, is_image=True),
    "breast-cancer": DataKind("classes", 30, 2),
    "diabetes": DataKind("numbers", 10, 1),
    "synthetic-labels": DataKind("labels", 20, 6),
    "synthetic-words": DataKind("classes", None, 4),
    "synthetic-sparse": DataKind("classes", 47236, 2),
    "npz": DataKind("classes", parts.FEATURES, parts.CLASSES, files={"data.root": "rows.npz"}),
    "csv": DataKind("classes", 4, 2, files={"data.root": "rows.csv", "data.test": "test.csv"}),
    "parquet": DataKind("numbers", 4, 1, files={"data.root": "rows.parquet", "data.test": "test.parquet"}),
    "svmlight": DataKind(
        "classes", parts.FEATURES, parts.CLASSES, files={"data.root": "rows.svm", "data.test": "test.svm"}
    ),
    "image-folder": DataKind(
        "classes", 108, 2, is_image=True, files={"data.root": "images", "data.test": "images-test"}
    ),
    "function": DataKind("classes", parts.FEATURES, parts.CLASSES),
    "arrays": DataKind("classes", parts.FEATURES, parts.CLASSES),
    "arrays-per-peer": DataKind("classes", parts.FEATURES, parts.CLASSES),
    "token columns": DataKind("classes", None, parts.CLASSES),
    "files-per-peer": DataKind(
        "classes", parts.FEATURES, parts.CLASSES, files={"data.root": "peer-{peer}.npz", "data.test": "rows.npz"}
    ),
}


@dataclass(frozen=True)
class Facts:
    """What the levels of a row chose.

    Attributes:
        row: the name of each factor's level.
        n_peers: how many peers there are.
    """

    row: Mapping[str, str]
    n_peers: int

    @property
    def data(self) -> DataKind:
        """Return what is known of the data."""
        return KINDS[self.row["data"]]

    def each(self, *values: float) -> list[float]:
        """Return a value for each peer, from a few that are repeated."""
        return [values[peer % len(values)] for peer in range(self.n_peers)]


def _algorithms() -> dict[str, Level]:
    plain = (
        *("privsgp", "sgp", "d-psgd", "dp2-sgd", "dp-dpsgd", "adp2-sgd", "muffliato", "dp-net-fleet", "local"),
        *("dp-sgd", "dyn-d2p", "dyn-c-d2p", "dyn-mu-d2p", "const-d2p", "fedavg", "fedprox", "scaffold"),
        *("feddeper", "feddeper*", "pdsl", "dp-cga", "privsgp-vr"),
    )
    levels: dict[str, Level] = {name: {"algorithm": {"name": name, "learning_rate": RATE}} for name in plain}
    for name in ("fedavg", "fedprox", "scaffold", "feddeper", "feddeper*", "dp-net-fleet"):
        levels[name] = {**levels[name], "algorithm.local_steps": 2}
    levels["dp-sgd"] = {**levels["dp-sgd"], "n_peers": 1}
    levels["pdsl"] = {**levels["pdsl"], "data.validation": 12}
    for table in ("dense", "snapshot", "blocks"):
        levels[f"privsgp-vr {table}"] = {**levels["privsgp-vr"], "algorithm.table": table}
    levels["privsgp-vr snapshot"] = {**levels["privsgp-vr snapshot"], "algorithm.snapshot_every": 2}
    levels["privsgp-vr blocks"] = {**levels["privsgp-vr blocks"], "data.batch.sampling": "blocks"}
    levels["muffliato chebyshev"] = {**levels["muffliato"], "algorithm.acceleration": "chebyshev"}
    monte_carlo = {"algorithm.shapley": "monte-carlo", "algorithm.permutations": 2}
    levels["pdsl monte-carlo"] = {**levels["pdsl"], **monte_carlo}
    circular = {"algorithm.shapley": "circular", "algorithm.permutations": 1}
    levels["pdsl circular"] = {**levels["pdsl"], **circular}
    for name in ("dp-dda", "dda"):
        levels[name] = {"algorithm": {"name": name}}
    sparse = {"schedule": "convex", "gamma": 0.5, "regularizer": {"kind": "l1", "weight": 0.01}}
    levels["dp-dda sparse"] = {"algorithm": {"name": "dp-dda", **sparse}}
    levels["own"] = {"algorithm": {"module": "tools.battery.parts:HeavyBall", "learning_rate": RATE, "beta": 0.4}}
    return levels


GRAPHS: dict[str, Level] = {
    "complete": {"topology.name": "complete"},
    "directed-exponential": {"topology.name": "directed-exponential"},
    "ring": {"topology.name": "ring"},
    "directed-exponential-full": {"topology.name": "directed-exponential-full"},
    "directed-ring": {"topology.name": "directed-ring"},
    "bipartite": {"topology.name": "bipartite"},
    "star": {"topology.name": "star"},
    "torus": {"topology.name": "torus"},
    "random-regular": {"topology": {"name": "random-regular", "degree": 2}},
    "erdos-renyi": {"topology": {"name": "erdos-renyi", "probability": 0.7}},
    "small-world": {"topology": {"name": "small-world", "degree": 2, "rewire": 0.3}},
    "file": {"topology": {"name": "edge-list", "file": "edges.txt", "directed": False}},
    "directed file": {"topology": {"name": "edge-list", "file": "arcs.txt", "directed": True}},
    "random-edges": {"topology": {"name": "random-edges", "edges": 3, "supergraph": "complete"}},
    "server": {"topology.name": "server"},
    "own": {"topology": {"module": "tools.battery.parts:graph"}},
    "written": {"topology": {"module": "@module:graph"}},
    "object": {"topology": lambda facts: parts.graph(facts.n_peers), "@python": True},
}

CANCELLING = "cancelling"
ROBUST = {"kind": "clipped", "byzantine": 1}


def _cancelling(colluding: Any, **more: Any) -> Level:
    return {"privacy.noise": lambda facts: {"kind": CANCELLING, "colluding": colluding, **more}}


NOISES: dict[str, Level] = {
    "independent": {},
    "none": {"privacy": "none"},
    "cancelling 1": _cancelling(1),
    "cancelling 0": _cancelling(0),
    "cancelling 2": _cancelling(2),
    "cancelling 3": _cancelling(3),
    "cancelling absent": _cancelling(1, absent=1),
    "cancelling ring": _cancelling(1, secrets="ring"),
    "cancelling file": _cancelling(1, secrets={"name": "edge-list", "file": "secrets.txt", "directed": False}),
    "cancelling random": _cancelling(1, secrets={"name": "erdos-renyi", "probability": 0.8}, strength=2.0),
    "correlated": {"privacy.noise": {"kind": "correlated", "bands": 3}},
    "cancelling correlated": _cancelling(1, bands=3),
    "cancelling correlated absent": _cancelling(1, bands=2, absent=1),
    "correlated auto": {"privacy.noise": {"kind": "correlated"}},
    "own undeclared": {"privacy.noise": {"module": "tools.battery.parts:Taking"}},
    "own declared": {"privacy.noise": {"module": "tools.battery.parts:Plain"}},
}


def _batch(sampling: str, **more: Any) -> Level:
    return {"data.batch": {"sampling": sampling, **more}}


SAMPLINGS: dict[str, Level] = {
    "poisson": {},
    "rate": _batch("poisson", rate=0.2),
    "uniform": _batch("uniform", size=5),
    "shuffle": _batch("shuffle", size=5),
    "full": _batch("full"),
    "one example": _batch("uniform", size=1),
    "small peers": _batch("poisson", size=18, small_peers="full"),
    "blocks": _batch("blocks", size=5),
}


def _table(target: str) -> dict[str, Any]:
    return {
        "target": target,
        "numbers": {"age": [50, 20], "dose": [1, 0.5]},
        "categories": {"ward": ["A", "B"]},
    }


DATA: dict[str, Level] = {
    "digits": {"data.samples": 80, "data.test_samples": 40},
    "breast-cancer": {"data.dataset": "breast-cancer", "data.samples": 80, "data.test_samples": 40},
    "diabetes": {"data.dataset": "diabetes", "data.samples": 80, "data.test_samples": 40},
    "synthetic-labels": {"data.dataset": "synthetic-labels", "data.samples": 80, "data.test_samples": 40},
    "synthetic-words": {"data.dataset": "synthetic-words", "data.samples": 80, "data.test_samples": 40},
    "synthetic-sparse": {"data.dataset": "synthetic-sparse", "data.samples": 80, "data.test_samples": 40},
    "npz": {"data.dataset": "npz", "data.root": "rows.npz"},
    "csv": {
        **{"data.dataset": "csv", "data.root": "rows.csv", "data.test": "test.csv"},
        **{"data.table": _table("ill"), "data.labels": ["no", "yes"]},
    },
    "parquet": {
        **{"data.dataset": "parquet", "data.root": "rows.parquet", "data.test": "test.parquet"},
        "data.table": {**_table("weight"), "target_scale": [70, 15]},
    },
    "svmlight": {
        **{"data.dataset": "svmlight", "data.root": "rows.svm", "data.test": "test.svm"},
        "data.n_features": parts.FEATURES,
    },
    "image-folder": {
        **{"data.dataset": "image-folder", "data.root": "images", "data.test": "images-test"},
        "data.labels": ["cat", "dog"],
    },
    "function": {"data.dataset": {"module": "tools.battery.parts:blobs", "arguments": {"per_class": 28}}},
    "arrays": {"@data": "arrays", "@python": True},
    "arrays-per-peer": {"@data": "arrays-per-peer", "@python": True},
    "files-per-peer": {"data.dataset": "npz", "data.root": "peer-{peer}.npz", "data.test": "rows.npz"},
    "token columns": {"data.dataset": {"module": "tools.battery.parts:texts"}, "data.columns": parts.TOKENS},
}

PARTITIONS: dict[str, Level] = {
    "iid": {},
    "sizes": {"data.partition": lambda facts: {"kind": "sizes", "sizes": facts.each(0.1, 0.2, 0.3, 0.4)}},
    "dirichlet": {"data.partition": {"kind": "dirichlet", "alpha": 1.0, "min_size": 6}},
    "shards": {"data.partition": {"kind": "shards", "shards_per_peer": 2}},
    "pathological": {"data.partition": {"kind": "pathological", "classes_per_peer": 2}},
}


def _usual_loss(facts: Facts) -> str:
    return {"classes": "cross-entropy", "numbers": "mse", "labels": "binary-cross-entropy"}[facts.data.targets]


def _other_loss(facts: Facts) -> str:
    if facts.data.targets == "classes":
        return "hinge" if facts.data.outputs == 2 else "cross-entropy"
    return {"numbers": "huber", "labels": "binary-cross-entropy"}[facts.data.targets]


LOSSES: dict[str, Level] = {
    "usual": {"task.loss": _usual_loss},
    "other": {"task.loss": _other_loss},
    "own": {
        "task.loss": lambda facts: {
            "module": f"tools.battery.parts:{facts.data.targets}_loss",
            "targets": facts.data.targets,
        }
    },
    "written": {
        "task.loss": lambda facts: {"module": f"@module:{facts.data.targets}_loss", "targets": facts.data.targets}
    },
}


def _own_model(module: str, **more: Any) -> Level:
    def section(facts: Facts) -> dict[str, Any]:
        is_margin = facts.row.get("loss") == "other" and facts.data.outputs == 2  # hinge
        sizes = {"inputs": facts.data.inputs or 1, "outputs": 1 if is_margin else facts.data.outputs}
        return {"module": module, "arguments": {**sizes, **more}}

    return {"model": section}


def _usual_model(facts: Facts) -> dict[str, Any]:
    if facts.row["data"] == "token columns":
        return {"module": "tools.battery.parts:reader"}  # a model that takes them by name
    return {"name": "linear" if facts.data.inputs else "text"}


MODELS: dict[str, Level] = {
    "usual": {"model": _usual_model},
    "zeros": {"model": lambda facts: {"name": "linear" if facts.data.inputs else "text", "init": "zeros"}},
    "mlp": {"model": {"name": "mlp", "hidden": [6], "activation": "tanh"}},
    "cnn": {"model": {"name": "cnn", "channels": [3], "hidden": [8]}},
    "resnet": {"model": {"name": "resnet18-gn", "width": 2, "groups": 2}},
    "own dict": _own_model("tools.battery.parts:scaled", factor=0.5),
    "own frozen": _own_model("tools.battery.parts:buffered", hidden=5),
    "written": _own_model("@module:model"),
}

EDITS = (
    *("nothing", "setting", "example", "test set", "graph file", "secrets file", "model's dict"),
    *("loss's source", "file that the loss reads", "model's source", "file that the graph reads"),
)

FACTORS: dict[str, dict[str, Level]] = {
    "algorithm": _algorithms(),
    "data": DATA,
    "graph": GRAPHS,
    "mixing": {
        "auto": {},
        "two steps": {"topology.mixing_steps": 2},
        **{name: {"topology.weights": name} for name in ("column-stochastic", "metropolis", "max-degree")},
        "doubly-stochastic": {"topology.weights": "doubly-stochastic"},
    },
    "participation": {
        "all": {},
        "three quarters": {"participation": {"kind": "uniform", "fraction": 0.75}},
        "half": {"participation": {"kind": "uniform", "fraction": 0.5}},
        "edges": {"participation": {"kind": "edges", "count": 1}},
        "away": {"participation": {"leaving": [{"peer": 1, "round": 1, "until": 3}], "noticed_after": 1}},
        "gone": {"participation": {"kind": "uniform", "fraction": 0.75, "leaving": [{"peer": 2, "round": 2}]}},
    },
    "noise": NOISES,
    "calibration": {
        "budget": {},
        "multiplier": {"privacy.epsilon": None, "privacy.noise_multiplier": 1.3},
        "both": {"privacy.noise_multiplier": 2.0},
        "ends early": {"privacy.noise_multiplier": 1.2, "privacy.epsilon": 2.0},
        "paper": {"privacy.calibration": "paper"},
        "paper phi": {"privacy.calibration": "paper", "privacy.paper.phi_min": 0.2},
    },
    "budgets": {
        "equal": {},
        "unequal": {"privacy.epsilon": lambda facts: facts.each(2.0, 3.0, 4.0, 6.0)},
        "unequal delta": {"privacy.delta": lambda facts: facts.each(1e-3, 2e-3, 1e-4, 1e-5)},
    },
    "clip": {
        "one": {},
        "unequal": {"privacy.clip_norm": lambda facts: facts.each(0.5, 1.0, 2.0, 1.5)},
        "large": {"privacy.clip_norm": 100.0},
    },
    "schedule": {
        "none": {},
        "rho": {"privacy.schedule": {"rho_c": 1.5, "rho_mu": 1.3}},
        "lists": {"privacy.schedule": {"clip_norms": [1.0, 0.6], "noise": [1.0, 1.4]}},
        "noise list": {"privacy.schedule": {"noise": [1.0, 1.4]}},
    },
    "cap": {"none": {}, "some": {"privacy.noise_cap": 1.1}},
    "ledger": {"own": {}, "shared": {"privacy.ledger": "ledgers"}},
    "hardened": {"no": {}, "yes": {"privacy.hardened": True}},
    "rate": {
        "plain": {},
        "unequal": {"algorithm.learning_rate": lambda facts: facts.each(0.1, 0.2, 0.3, 0.4)},
        "cosine": {"algorithm.learning_rate_decay": 0.5, "algorithm.learning_rate_schedule": "cosine"},
        "warmup": {"algorithm.learning_rate_warmup": 0.5},
    },
    "optimizer": {
        "none": {},
        "momentum": {"algorithm.optimizer": {"name": "momentum"}},
        "adam": {"algorithm.optimizer": {"name": "adam"}},
    },
    "average": {"none": {}, "ema": {"algorithm.average": {"decay": 0.5}}},
    "sampling": SAMPLINGS,
    "partition": PARTITIONS,
    "at least": {"no": {}, "yes": {"data.at_least": 6}},
    "loss": LOSSES,
    "class weights": {
        "none": {},
        "some": {"task.class_weights": lambda facts: [1.0 + number % 3 for number in range(facts.data.outputs)]},
    },
    "metrics": {
        "usual": {},
        "own": {"task.metrics": [{"module": "tools.battery.parts:reach", "better": "lower"}]},
        "balanced": {"task.metrics": ["balanced-accuracy", "macro-f1"]},
        "written": {"task.metrics": [{"module": "@module:metric"}]},
    },
    "model": MODELS,
    "features": {"none": {}, "scattering": {"features": {"kind": "scattering", "scales": 1, "pool": 2, "groups": 0}}},
    "validation": {"none": {}, "some": {"data.validation": 12}},
    "evaluation": {
        "every two": {},
        "each": {
            "evaluation.every": 1,
            "evaluation.peer_samples": 7,
            "evaluation.peers": 2,
            "evaluation.by_class": lambda facts: facts.data.targets != "numbers",
        },
        "shown": {"evaluation.private": "ignored", "evaluation.training_loss": True},
    },
    "compute": {
        "float64": {},
        "float32": {"compute.dtype": "float32", "compute.memory_mib": 64},
    },
    "generator": {"portable": {}, "fast": {"compute.generator": None}, "system": {"compute.generator": "system"}},
    "seeds": {"one": {}, "three": {"seeds": {"data": 4, "model": 5, "run": 6}}},
    "place": {
        "beside": {},
        "absolute": {"@place": "absolute"},
        "odd name": {"@place": "odd"},
        "linked": {"@place": "linked"},
        "from elsewhere": {"@place": "elsewhere"},
    },
    "written as": {"file": {}, "settings": {"@written": "settings"}, "python": {"@written": "python"}},
    "runtime": {
        "engine": {},
        **{name: {"@runtime": name} for name in ("workers", "cohort", "relay", "sharded")},
        "network": {  # without final mixing, which an engine does not have
            "@runtime": "network",
            "network": {"mode": "synchronous", "final_mixing": 0, "deadline": 20.0},
        },
    },
    # Below the runtime, whose section `network` these keys lie in.
    "codec": {
        "exact": {},
        "int8": {"network.codec": "int8"},
        "int4": {"network.codec": {"name": "int4", "block": 16}},
        "top-k": {"network.codec": "top-k"},
        "random-k": {"network.codec": {"name": "random-k", "part": 0.5}},
    },
    "trust": {
        "all": {},
        "robust": {"network.robust": ROBUST},
        "attack": {"attack": {"kind": "sign-flip", "peers": [3]}},
        "robust under attack": {"network.robust": ROBUST, "attack": {"kind": "noise", "peers": [3]}},
    },
    "ending": {"straight": {}, **{name: {"@ending": name} for name in ("stopped", "killed", "more rounds")}},
    "second": {
        "none": {},
        "same": {"@second": {}},
        "other seed": {"@second": {"seeds.run": 77}},
        "independent noise": {"@second": {"privacy.noise": None, "seeds.run": 78}},
        "other colluding": {"@second": {"privacy.noise.colluding": 2, "seeds.run": 79}},
        "cancelling after": {"@second": {"privacy.noise": {"kind": CANCELLING, "colluding": 1}, "seeds.run": 80}},
        "from model": {"@second": {"model.from": "@out", "seeds.run": 81}},
        "other algorithm": {"@second": {"algorithm": {"name": "local", "learning_rate": RATE}}},
    },
    "edit": {name: {"@edit": name} for name in EDITS},
}
NAMES = list(FACTORS)
LEVELS = {name: list(levels) for name, levels in FACTORS.items()}

# What a level needs of another factor to mean anything; None stands for all levels.
Needs = Callable[[str], bool]
_PRIVATE: Needs = lambda level: level != "none"  # noqa: E731
_CANCELLING: Needs = lambda level: level.startswith(CANCELLING)  # noqa: E731
_FILES: Needs = lambda level: bool(KINDS[level].files)  # noqa: E731
NEEDS: list[tuple[str, set[str] | None, str, Needs]] = [
    *((name, None, "noise", _PRIVATE) for name in ("calibration", "budgets", "clip", "schedule", "cap")),
    *((name, None, "noise", _PRIVATE) for name in ("ledger", "hardened")),
    ("second", None, "noise", _PRIVATE),
    ("second", {"other colluding"}, "noise", _CANCELLING),
    ("second", {"independent noise"}, "noise", lambda level: level not in ("none", "independent")),
    ("second", {"cancelling after"}, "noise", lambda level: level in ("independent", "own declared")),
    ("edit", None, "noise", _PRIVATE),
    ("edit", {"secrets file"}, "noise", lambda level: level == "cancelling file"),
    ("edit", {"graph file"}, "graph", lambda level: level in ("file", "directed file")),
    ("edit", {"file that the graph reads"}, "graph", lambda level: level == "written"),
    ("edit", {"loss's source", "file that the loss reads"}, "loss", lambda level: level == "written"),
    ("edit", {"model's source"}, "model", lambda level: level == "written"),
    ("edit", {"example", "test set"}, "data", _FILES),
    ("class weights", {"some"}, "data", lambda level: KINDS[level].targets == "classes"),
    ("edit", {"model's dict"}, "model", lambda level: level == "own dict"),
    ("ledger", {"shared"}, "runtime", lambda level: level != "network"),  # each peer has a machine of its own
    ("generator", {"system"}, "runtime", lambda level: level != "network"),  # whose peers draw from keys here
    ("ending", {"stopped", "killed", "more rounds"}, "runtime", lambda level: level != "network"),
    ("second", None, "runtime", lambda level: level != "network"),
    ("mixing", None, "graph", lambda level: level != "server"),
    ("mixing", None, "algorithm", lambda level: level not in ("local", "dp-sgd")),
    ("graph", None, "algorithm", lambda level: level not in ("local", "dp-sgd")),
    ("model", {"own dict", "own frozen", "written"}, "data", lambda level: level != "synthetic-words"),
    ("model", {"own dict", "own frozen", "written"}, "features", lambda level: level == "none"),
    ("model", {*MODELS} - {"usual"}, "data", lambda level: level != "token columns"),
    ("partition", None, "data", lambda level: level not in ("files-per-peer", "arrays-per-peer")),
]


def _needs() -> dict[tuple[int, int], list[tuple[int, frozenset[int]]]]:
    """Return, for each level, by factor and number, the levels that other factors must have."""
    table: dict[tuple[int, int], list[tuple[int, frozenset[int]]]] = {}
    for name, levels, other, fits in NEEDS:
        allowed = frozenset(number for number, level in enumerate(LEVELS[other]) if fits(level))
        for number, level in enumerate(LEVELS[name]):
            if levels is None or level in levels:
                table.setdefault((NAMES.index(name), number), []).append((NAMES.index(other), allowed))
    return table


_NEEDS_OF = _needs()
DECISIVE = [NAMES.index(name) for name in dict.fromkeys(other for _, _, other, _ in NEEDS)]  # which others need


def applies(chosen: Mapping[int, int]) -> list[int]:
    """Return which of some factors mean something beside the others, each with the number of its level."""
    meaning = dict(chosen)
    while True:
        idle = [
            factor
            for factor, level in meaning.items()
            for other, allowed in _NEEDS_OF.get((factor, level), ())
            if other in chosen and (other not in meaning or meaning[other] not in allowed)
        ]
        if not idle:
            return list(meaning)
        meaning = {factor: level for factor, level in meaning.items() if factor not in idle}
