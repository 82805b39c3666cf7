"""Keys of a scenario that another choice leaves without effect: each is named in one line, with the remedy.

A scenario is often another one with a few settings laid over it, such as the same without an exchange. Keys of the
first are then left over, so they are no error, but whoever set them should know: `plan`, `show`, `run` and `up` warn.
A key that belongs to one choice only is declared by the class of that choice, and refused beside any other
(`common.registry`); here are keys that all choices have.

What steers only output, speed or files is not meant (`compute`, `evaluation`), nor what only deployed peers use: a
scenario serves both (`network`, `privacy.hardened`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel

from flower_privdec.scenario.algorithm_sections import algorithm_class
from flower_privdec.scenario.sections import OwnTopologySection, Scenario, exchanges_nothing

PUSH_SUM = "column-stochastic"
OF_C_2 = ("moments", "moments-table")  # the papers' formulas for the noise that have this constant


@dataclass(frozen=True)
class UnusedKeys:
    """Keys of a scenario that change nothing.

    Attributes:
        keys: their paths.
        why: the other choice, and why it leaves them without effect.
        remedy: what to choose for them to have one.
    """

    keys: tuple[str, ...]
    why: str
    remedy: str

    def __str__(self) -> str:
        """Return one line."""
        verb = "has"
        rest = "remove it"
        if len(self.keys) > 1:
            verb = "have"
            rest = "remove them"
        return f"{', '.join(self.keys)} {verb} no effect with {self.why}; {rest}, or {self.remedy}"


def unused_keys(scenario: Scenario) -> list[UnusedKeys]:
    """Return the keys that are not at their defaults and have no effect, by the choice that leaves them without."""
    return [found for rule in RULES for found in rule(scenario) if found.keys]


def changed(section: BaseModel, path: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the paths of those keys of a section that are not at their defaults."""
    paths = []
    for name in names:
        field = type(section).model_fields[name]
        default = field.get_default(call_default_factory=True)
        if field.is_required() or getattr(section, name) != default:
            paths.append(f"{path}.{field.alias or name}" if path else name)
    return tuple(paths)


def _of_the_graph(scenario: Scenario) -> Iterator[UnusedKeys]:
    """Yield what no algorithm that exchanges nothing uses, and what a server's average does not."""
    topology = scenario.topology
    if exchanges_nothing(scenario.algorithm):
        # The graph itself, by the key that names it.
        usual = Scenario.model_fields["topology"].get_default(call_default_factory=True)
        keys: tuple[str, ...] = ()
        if isinstance(topology, OwnTopologySection):
            keys = ("topology.module",)
        elif topology.name != usual.name:
            keys = ("topology.name",)

        # What else is said of it, and of when messages are sent.
        named = [name for name in type(topology).model_fields if name not in ("name", "module", "arguments")]
        keys += changed(topology, "topology", tuple(named))
        keys += changed(scenario.network, "network", ("final_mixing", "quorum", "alone", "lead"))
        why = f"algorithm.name={scenario.algorithm.name}, which exchanges nothing"
        yield UnusedKeys(keys, why, "choose an algorithm whose peers exchange, such as privsgp")

    elif topology.name == "server":
        keys = changed(topology, "topology", ("weights",))
        keys += changed(scenario.network, "network", ("final_mixing",))
        yield UnusedKeys(keys, "topology.name=server, which averages all peers", "choose a graph")


def _of_the_algorithm(scenario: Scenario) -> Iterator[UnusedKeys]:
    """Yield keys of the algorithm's section that others of its keys decide, and what it does not begin with."""
    for key, why, remedy in scenario.algorithm.unused_keys():
        yield UnusedKeys((f"algorithm.{key}",), why, remedy)

    start = None
    remedy = "choose an algorithm that begins with the model"
    if scenario.algorithm.own_start:
        start = f"algorithm.name={scenario.algorithm.name}, which has a start of its own"
    elif scenario.model.origin is not None:
        start = "model.from, whose parameters the run starts from"
        remedy = "leave model.from out"
    if start is not None:
        keys = changed(scenario.model, "model", ("init",))
        if scenario.seeds is not None:
            keys += changed(scenario.seeds, "seeds", ("model",))
        yield UnusedKeys(keys, start, remedy)


def _of_seeds(scenario: Scenario) -> Iterator[UnusedKeys]:
    """Yield the seed if each kind of draws has one of its own."""
    seeds = scenario.seeds
    if seeds is not None and None not in (seeds.data, seeds.model, seeds.run):
        yield UnusedKeys(
            changed(scenario, "", ("seed",)), "seeds, which has one for each kind of draws", "leave one of those out"
        )


def _of_features(scenario: Scenario) -> Iterator[UnusedKeys]:
    """Yield the constant of whitening if nothing is whitened."""
    features = scenario.features
    if features is not None and features.whitening == "none":
        yield UnusedKeys(changed(features, "features", ("ridge",)), "features.whitening=none", "set it to strokes")


def _of_privacy(scenario: Scenario) -> Iterator[UnusedKeys]:
    """Yield constants of formulas that nobody computes, and a clip norm that the algorithm replaces."""
    algorithm = algorithm_class(scenario.algorithm)
    if algorithm is None:
        return  # an object of another process, of which nothing is known

    private = scenario.private
    name = scenario.algorithm.name
    plans_rounds = algorithm.weights == PUSH_SUM and private is not None and private.epsilon is not None
    if not plans_rounds and scenario.plan is not None:
        keys = changed(scenario.plan, "plan", tuple(type(scenario.plan).model_fields))
        why = f"algorithm.name={name}"
        if algorithm.weights == PUSH_SUM:
            why = "no privacy.epsilon"
        yield UnusedKeys(keys, f"{why}: they are of a budget that push-sum spends", "choose privsgp with a budget")

    if private is None:
        return
    in_formula = private.calibration == "paper" and getattr(algorithm, "paper_noise", None) in OF_C_2
    if not plans_rounds and not in_formula:
        keys = changed(private.paper, "privacy.paper", ("c_2",))
        why = f"algorithm.name={name} and privacy.calibration={private.calibration}, which compute no formula with it"
        yield UnusedKeys(keys, why, "choose privsgp-vr with calibration paper")

    schedule = scenario.algorithm.own_schedule
    if schedule is not None and schedule.clip_norm is not None:
        keys = changed(private, "privacy", ("clip_norm",))
        why = f"the clip norm that algorithm.name={name} has in its own section"
        yield UnusedKeys(keys, why, "leave that one out")


def _of_the_network(scenario: Scenario) -> Iterator[UnusedKeys]:
    """Yield how long a peer goes on without others, if all peers wait for each other in every exchange."""
    if scenario.network.mode == "synchronous" and not exchanges_nothing(scenario.algorithm):
        keys = changed(scenario.network, "network", ("commit_every", "quorum", "alone", "lead"))
        why = "network.mode=synchronous, in which all peers wait for each other"
        yield UnusedKeys(keys, why, "choose asynchronous")


RULES = (_of_the_graph, _of_the_algorithm, _of_seeds, _of_features, _of_privacy, _of_the_network)
