"""Every algorithm in every variant, as settings over the tiny scenario of conftest."""

from __future__ import annotations

from flower_privdec.algorithms import ALGORITHMS

UNDIRECTED = ("d-psgd", "dp2-sgd", "dp-dpsgd", "adp2-sgd", "muffliato", "dp-net-fleet")
UNEQUAL = ("pdsl", "dp-cga")  # on a star, where the hub answers three and the others one
PUBLIC = ["data.test_samples=60", "data.validation=40"]  # what pdsl looks at
DUAL = ("dp-dda", "dda")  # which have no learning rate: their section takes the place of the scenario's


def choosing(name: str, more: str = "") -> str:
    """Return the setting that chooses an algorithm, with more keys of its section."""
    return f"algorithm={{name: {name}{more}}}" if name in DUAL else f"algorithm.name={name}"


SPARSE = ", schedule: convex, gamma: 0.5, regularizer: {kind: l1, weight: 0.01}"
ONE_EXAMPLE = "data={dataset: breast-cancer, samples: 200, test_samples: 60, batch: {sampling: uniform, size: 1}}"
VARIANTS = [
    *([choosing(name)] for name in ALGORITHMS),
    ["algorithm.name=privsgp", ONE_EXAMPLE, "model.name=linear", "task.loss=hinge"],
    [choosing("dp-dda", SPARSE)],
    [choosing("dp-dda"), "participation={kind: edges, count: 1}"],
    ["algorithm.name=privsgp-vr", "algorithm.table=dense"],
    ["algorithm.name=privsgp-vr", "algorithm.table=snapshot", "algorithm.snapshot_every=2"],
    ["algorithm.name=privsgp-vr", "algorithm.table=blocks", "data.batch.sampling=blocks"],
    ["algorithm.name=feddeper", "algorithm.rho=0"],
    ["algorithm.name=privsgp", "algorithm.optimizer={name: momentum}"],
    ["algorithm.name=fedavg", "algorithm.optimizer={name: adam}", "algorithm.learning_rate=0.05"],
    *([f"algorithm.name={name}", "algorithm.average={decay: 0.5}"] for name in ("privsgp", "d-psgd", "feddeper")),
    ["algorithm.name=muffliato", "algorithm.acceleration=chebyshev"],
    ["algorithm.name=pdsl", "algorithm.shapley=monte-carlo", "algorithm.permutations=3", "algorithm.truncation=0.01"],
    *(
        [f"algorithm.name={name}", "data.batch={sampling: poisson, rate: 0.15}"]
        for name in ("privsgp", "feddeper", "privsgp-vr")
    ),
]


def settings_for(*settings: str) -> list[str]:
    """Return settings with the graph and the number of peers that their algorithm needs."""
    name = settings[0].removeprefix("algorithm.name=").removeprefix("algorithm={name: ").split(",")[0].rstrip("}")
    graph = "ring" if name in (*UNDIRECTED, *DUAL) else "server" if name == "scaffold" else "directed-exponential"
    graph = "star" if name in UNEQUAL else graph
    more = PUBLIC if name == "pdsl" else ["n_peers=1"] if name == "dp-sgd" else []
    return [*settings, f"topology.name={graph}", *more]


def network_modes(variant: list[str]) -> tuple[str, ...]:
    """Return the modes of a network that a variant can have: asynchronous peers keep no averages."""
    averages = any("average" in setting for setting in variant)
    return ("synchronous",) if averages else ("asynchronous", "synchronous")
