"""Every algorithm in every variant, as settings over the tiny scenario of conftest; each class says what it needs."""

from __future__ import annotations

from flower_privdec.algorithms import ALGORITHMS
from flower_privdec.scenario import DescentSection

# Those without a learning rate: their section takes the place of the scenario's.
DUAL = tuple(name for name, part in ALGORITHMS.items() if not issubclass(part.Section, DescentSection))


def choosing(name: str, more: str = "") -> str:
    """Return the setting that chooses an algorithm, with more keys of its section."""
    return f"algorithm={{name: {name}{more}}}" if name in DUAL else f"algorithm.name={name}"


ONE_EXAMPLE = "data={dataset: breast-cancer, samples: 200, test_samples: 60, batch: {sampling: uniform, size: 1}}"
VARIANTS = [
    *([choosing(name)] for name in ALGORITHMS),
    *(
        [choosing(name), *settings]
        for name, algorithm in ALGORITHMS.items()
        for settings in vars(algorithm).get("variants", ())
    ),
    ["algorithm.name=privsgp", ONE_EXAMPLE, "model.name=linear", "task.loss=hinge"],
    ["algorithm.name=privsgp", "algorithm.optimizer={name: momentum}"],
    ["algorithm.name=fedavg", "algorithm.optimizer={name: adam}", "algorithm.learning_rate=0.05"],
    *([f"algorithm.name={name}", "algorithm.average={decay: 0.5}"] for name in ("privsgp", "d-psgd", "feddeper")),
    *(
        [f"algorithm.name={name}", "data.batch={sampling: poisson, rate: 0.15}"]
        for name in ("privsgp", "feddeper", "privsgp-vr")
    ),
]

PLAIN = VARIANTS[: len(ALGORITHMS)]  # every algorithm as it is by default


def settings_for(*settings: str) -> list[str]:
    """Return settings with the graph and the number of peers that their algorithm needs."""
    name = settings[0].removeprefix("algorithm.name=").removeprefix("algorithm={name: ").split(",")[0].rstrip("}")
    return [*settings, "topology.name=directed-exponential", *ALGORITHMS[name].needs]


def network_modes(variant: list[str]) -> tuple[str, ...]:
    """Return the modes of a network that a variant can have: asynchronous peers keep no averages."""
    averages = any("average" in setting for setting in variant)
    return ("synchronous",) if averages else ("asynchronous", "synchronous")


def modes_in_turn(variants: list[list[str]], first: int) -> list[tuple[list[str], str]]:
    """Return each variant with one mode of a network, taken in turn.

    Args:
        first: 0 or 1. A law that takes 0 and another that takes 1 run every variant in both modes together.
    """
    chosen = []
    for number, variant in enumerate(variants):
        modes = network_modes(variant)
        chosen.append((variant, modes[(number + first) % len(modes)]))
    return chosen
