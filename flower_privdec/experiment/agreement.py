"""What all peers of a run know: scenario, graph, weights, who is active, model, algorithm, and the public test set."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flower_privdec.algorithms import build_algorithm
from flower_privdec.common.deferred import nn, torch
from flower_privdec.common.errors import ScenarioError
from flower_privdec.core import Algorithm
from flower_privdec.core.attack import build_attack
from flower_privdec.core.cohort import LearningRate
from flower_privdec.core.robust_mix import RobustMix
from flower_privdec.core.robust_rule import robust_rule
from flower_privdec.data import PublicSet, read_public
from flower_privdec.experiment.checkpoint import numbers_of
from flower_privdec.experiment.origin import Origin, model_section, read_origin
from flower_privdec.experiment.run_key import constants_hash, fingerprint_of
from flower_privdec.gradients import GradientKernel, build_kernel
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.participation import (
    Absence,
    EdgeParticipation,
    Participation,
    build_participation,
    leave,
)
from flower_privdec.graph.topology import build_topology, sample_edges
from flower_privdec.models import build_model, flatten
from flower_privdec.pushsum.frames import TensorArithmetic, wire_codec
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.sections import (
    AppScenario,
    CancellingSection,
    FeaturesSection,
    ParticipationSection,
    TaskSection,
    placed,
)
from flower_privdec.tasks.losses import Loss, resolve_loss
from flower_privdec.tasks.metrics import METRICS, RANKING, Metric, own_metric, try_metric

if TYPE_CHECKING:
    from torch import Tensor

NOTICED_AFTER = 4  # rounds, for a peer that leaves a simulation
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Agreement:
    """What all peers of a run know; no training example is read for it, and building it writes nothing.

    Attributes:
        public: the test set, with its features if the scenario has some.
        tested: the fingerprint of the test set as it was read, before features were extracted.
        mixing: the graph's weights; None for an algorithm that exchanges nothing.
        loss, metrics: what models are trained by, and tried by.
        module, initial: the model and the trained parameters [d] that every peer starts from.
        constants: a hash of the model's other parameters and buffers, and of those that it starts from in another
            run; "" if it has none.
        origin: the run that it starts from.
        inherited: the folder of the ledger that is charged for both.
        arithmetic: how shares are encoded, by `network.codec`.
    """

    scenario: Scenario
    algorithm: Algorithm
    mixing: Mixing | None
    participation: Participation
    public: PublicSet
    tested: bytes
    loss: Loss
    metrics: tuple[Metric, ...]
    kernel: GradientKernel
    module: nn.Module
    initial: Tensor
    device: torch.device
    learning_rate: LearningRate
    constants: str
    origin: Origin | None
    inherited: Path | None
    arithmetic: TensorArithmetic

    @staticmethod
    @placed
    def of(scenario: Scenario) -> Agreement:
        """Build what a scenario says to everybody.

        Raises:
            ScenarioError: a part cannot be had, or two parts do not fit.
        """
        device = resolve_device(scenario.compute.device)
        algorithm = build_algorithm(scenario.algorithm)
        mixing, participation = build_exchange(scenario, algorithm)
        arithmetic = build_arithmetic(scenario, algorithm, mixing)
        public = read_public(scenario.data, scenario.seed_of("data"), scenario.task.targets)
        loss, metrics = _build_task(scenario.task, public)
        tested = fingerprint_of(public)
        public = _with_features(public, scenario.features)
        algorithm.check_public(public, loss)

        module = build_module(scenario, **module_facts(public, loss))
        dtype = DTYPES[scenario.compute.dtype]
        origin = None
        if scenario.model.origin is not None:
            origin = read_origin(scenario.model.origin)
            origin.load_into_(module.to(dtype))
        initial = flatten(module).to(device, dtype)
        if scenario.network.robust is not None or scenario.attack is not None:
            _make_robust(scenario, algorithm, mixing, initial)
        batch = scenario.data.batch
        kernel = build_kernel(
            module.to(device, dtype),
            loss,
            public.input_shape,
            memory_bytes=scenario.compute.memory_mib << 20,
            n_tokens=public.n_tokens,
            sparse=public.sparse,
            single_example=batch.size == 1 and batch.sampling in ("uniform", "shuffle"),
        )
        algorithm.check_model(kernel)

        constants = constants_hash(module)
        if origin is not None:  # the initial parameters do not follow from the scenario then: all must have them alike
            constants = hashlib.sha256(constants.encode() + numbers_of(flatten(module))).hexdigest()
        return Agreement(
            scenario=scenario,
            algorithm=algorithm,
            mixing=mixing,
            participation=participation,
            public=public,
            tested=tested,
            loss=loss,
            metrics=metrics,
            kernel=kernel,
            module=module,
            initial=initial,
            device=device,
            learning_rate=algorithm.step_sizes(scenario.n_peers, scenario.rounds),
            constants=constants,
            origin=origin,
            inherited=None if origin is None else origin.ledger(scenario, public),
            arithmetic=arithmetic,
        )


def _make_robust(scenario: Scenario, algorithm: Algorithm, mixing: Mixing | None, initial: Tensor) -> None:
    """Let receivers judge what they mix, or liars lie, as the scenario says.

    Raises:
        ScenarioError: the algorithm or the graph does not mix models that can be judged.
    """
    rule = robust_rule(scenario.network.robust)
    attack = build_attack(scenario.attack)
    private = scenario.private
    if rule is not None and private is not None and isinstance(private.noise, CancellingSection):
        # Who is left out takes its half of each pair's noise with it, and a lie hides behind noise that is so large.
        raise ScenarioError(
            "network.robust with privacy.noise.kind=cancelling: noise of pairs cancels only if all that peers send is "
            "added as it is; leave network.robust out, or take noise of another kind",
            code="network.robust-cancelling",
        )

    key = "attack" if rule is None else "network.robust"
    algorithm.make_robust(RobustMix((), rule=rule, attack=attack, start=initial, seed=scenario.seed_of("run")))
    if mixing is not None and mixing.weights == "server":
        raise ScenarioError(
            f"{key} is for peers that hear each other, and topology.name=server averages all: take a graph, such as "
            f"complete, or leave {key} out",
            code="network.robust-server",
        )


def _with_features(public: PublicSet, section: FeaturesSection | None) -> PublicSet:
    """Return a public set, and what of it is for validation, as the model sees them."""
    if section is None:
        return public
    if public.n_tokens is not None:
        raise ScenarioError(
            "features are made of images, and the data are tokens: remove the section features",
            code="features.no-images",
        )
    if public.validation is None:
        held = None
    else:
        held = _with_features(public.validation, section)

    from flower_privdec.data.features import apply_features  # needs torch

    return replace(public, x=apply_features(public.x, section), validation=held)


def build_arithmetic(scenario: Scenario | AppScenario, algorithm: Algorithm, mixing: Mixing | None) -> TensorArithmetic:
    """Return how shares are encoded.

    Raises:
        ScenarioError: the codec cannot be had, or rounds rows that no sender takes back.
    """
    arithmetic = TensorArithmetic(wire_codec(scenario.network.codec))
    sends_shares = mixing is not None and mixing.sends_shares
    if not (sends_shares or arithmetic.is_exact):
        sender = f"algorithm.name={algorithm.name}"
        other = "use an algorithm of push-sum"
        if mixing is not None and algorithm.weights == "column-stochastic":
            # An algorithm of push-sum, which this graph or these weights keep from sending shares.
            section = scenario.topology
            sender = f"topology.weights={section.weights}"
            other = "set topology.weights=column-stochastic"
            if section.name == "server":
                sender = "topology.name=server"
                other = "take a graph on which peers send shares"
        raise ScenarioError(
            f"network.codec={scenario.network.codec.name} rounds rows, and by {sender} peers send rows whose rounding "
            f"no sender's mass takes back: set network.codec=exact, or {other}",
            code="network.codec-without-shares",
        )
    return arithmetic


def resolve_device(name: str) -> torch.device:
    """Return the device that a scenario asks for; refuse a GPU that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ScenarioError(
            "compute.device='cuda' needs a GPU that torch can use and none is here; use cpu or auto",
            code="compute.no-gpu",
        )
    return torch.device(name)


def _leaving(participation: Participation, section: ParticipationSection) -> Participation:
    """Return the participation with those who leave it."""
    absences = [Absence(one.peer, one.round, one.until) for one in section.leaving or ()]
    noticed_after = NOTICED_AFTER if section.noticed_after is None else section.noticed_after
    return leave(participation, absences, noticed_after)


@placed
def build_exchange(scenario: Scenario | AppScenario, algorithm: Algorithm) -> tuple[Mixing | None, Participation]:
    """Return the graph's mixing weights (None for an algorithm that exchanges nothing) and who is active."""
    seed = scenario.seed_of("run")
    who = scenario.participation
    section = scenario.topology
    if algorithm.weights is None:
        if who.kind == "edges":
            raise ScenarioError(
                f"participation.kind=edges needs a graph, and {algorithm.name} has none; take another",
                code="participation.no-graph",
            )
        return None, _leaving(build_participation(who.kind, scenario.n_peers, seed, who.fraction), who)

    algorithm.repeat_mixing(section.mixing_steps, section.name)
    topology = build_topology(section.name, scenario.n_peers, seed=seed, **section.options())
    if who.count is None:
        participation = build_participation(who.kind, scenario.n_peers, seed, who.fraction)
    else:
        topology = sample_edges(topology, who.count, seed)
        participation = EdgeParticipation(topology)

    participation = _leaving(participation, who)

    weights: str = section.weights
    if section.name == "server":
        weights = "server"
    elif weights == "auto" and algorithm.weights == "doubly-stochastic":
        weights = "doubly-stochastic" if topology.directed else "metropolis"
    elif weights == "auto":
        weights = algorithm.weights
    elif weights == "column-stochastic" and algorithm.weights == "doubly-stochastic":
        raise ScenarioError(
            f"topology.weights='column-stochastic' does not keep the mean of {algorithm.name}: "
            "use auto, metropolis, max-degree or doubly-stochastic, or a push-sum algorithm such as privsgp",
            code="mixing.mean-not-kept",
        )

    mixing, participation = algorithm.exchange(topology, weights, participation, seed)
    if mixing.steps != section.mixing_steps:
        raise ScenarioError(
            f"topology.mixing_steps={section.mixing_steps} must be 1 with algorithm.name={algorithm.name}, "
            "because that algorithm makes its own graph in each round",
            code="topology.mixing-steps",
        )

    dialling = [peer for peer, place in enumerate(scenario.network.peers or ()) if place.dial == "out"]
    check_reach(dialling, mixing)
    return mixing, participation


def check_reach(dialling: Collection[int], mixing: Mixing) -> None:
    """Refuse a graph with an edge between two devices that only dial out.

    Args:
        dialling: the peers that only dial out.

    Raises:
        ScenarioError: it has one.
    """
    if len(dialling) < 2:
        return

    ends = np.sort(mixing.topology.support(), axis=1)
    is_closed = np.isin(ends, [*dialling]).all(axis=1) & (ends[:, 0] != ends[:, 1])
    closed = np.unique(ends[is_closed], axis=0).tolist()
    if not closed:
        return

    first, second = closed[0]
    more = ""
    if closed[1:]:
        more = f" (and {len(closed) - 1} more such edges)"
    raise ScenarioError(
        f"network.peers: peers {first} and {second} both have dial: out, and the graph joins them{more}, so "
        "neither could dial the other: give one of them an address at which the other reaches it, as that of a tunnel; "
        "or take a graph in which every neighbour of such a device has an address, as topology.name=star around peer "
        "0, or an edge-list of your own",
        code="network.dials-out",
    )


def _build_task(task: TaskSection, public: PublicSet) -> tuple[Loss, tuple[Metric, ...]]:
    """Return the loss and the metrics, tried on the public test set's targets."""
    own = task.own_loss
    if own is None:
        loss = resolve_loss(task.loss_name)
    else:
        from flower_privdec.tasks.own_losses import own_loss  # needs torch's autograd

        loss = own_loss(own.module, own.targets, own.outputs)
    loss = replace(loss, width=public.n_classes)
    outputs = loss.n_outputs(public.n_classes)
    metrics = []
    if own is not None:
        from flower_privdec.tasks.own_losses import try_loss

        try_loss(loss, outputs)
    if task.class_weights is not None:
        loss = loss.weighted(task.class_weights)
    for metric in task.metrics:
        if isinstance(metric, str):
            measured = METRICS[metric]
        else:
            measured = own_metric(metric.module, metric.title, metric.kind())
        metrics.append(measured)

        # Other built-in metrics have a value on every test set; trying them would cost its size times the classes.
        if not isinstance(metric, str) or metric in RANKING:
            try_metric(measured, loss, outputs, public.y)

    return loss, tuple(metrics)


def module_facts(public: PublicSet, loss: Loss) -> dict[str, Any]:
    """Return what a module for the model is built with, beside the scenario."""
    outputs = loss.n_outputs(public.n_classes)
    return {"input_shape": list(public.input_shape), "outputs": outputs, "n_tokens": public.n_tokens}


def build_module(scenario: Scenario, input_shape: Sequence[int], outputs: int, n_tokens: int | None) -> nn.Module:
    """Build a scenario's model, as it is before round 0.

    Args:
        input_shape: the input shape of one example, as the model sees it.
        outputs: how many it has.
        n_tokens: inputs are whole numbers 0..n_tokens-1; None if they are real numbers.

    Raises:
        ScenarioError: the model cannot be had, or does not fit.
    """
    section = model_section(scenario)
    return build_model(
        str(section.target),
        input_shape,
        outputs,
        seed=scenario.seed_of("model"),
        init=section.init,
        n_tokens=n_tokens,
        columns=scenario.data.columns,
        **section.options(),
    )
