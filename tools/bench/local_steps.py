"""FedDeper beside a plain loop over its active peers and the floor of its matrix products.

5 of 100 peers take 10 local steps with two models each; without privacy, so batches have one gradient.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flower_privdec.algorithms import build_algorithm
from flower_privdec.core import Algorithm
from flower_privdec.engine.engine import Engine
from flower_privdec.graph.participation import Participation, build_participation
from flower_privdec.graph.topology import build_topology
from flower_privdec.models import flatten
from flower_privdec.scenario.algorithm_sections import ALGORITHMS
from tools.bench import limit
from tools.bench.baselines import gradients_of, plain_loss
from tools.bench.comparison import LOOP
from tools.bench.equality import ROUNDS, compare, start
from tools.bench.timing import paired, quiet, ratio
from tools.bench.workloads import IMAGES, SEED, Setup, Workload

NAME = "FedDeper"
ENGINE = "engine"
ACTIVE = 5
LOCAL_STEPS = 10
RATE = 0.01
RHO = 0.003
MIXING_RATE = 0.5
WORKLOAD = Workload(NAME, 100, 32, model="mlp", options={"hidden": [512, 256]}, **IMAGES)  # type: ignore[arg-type]


def participation(setup: Setup) -> Participation:
    """Return who is active: ACTIVE peers, drawn afresh each round."""
    n = setup.workload.n_peers
    return build_participation("uniform", n, SEED, ACTIVE / n)


def engine(setup: Setup) -> Engine:
    """Return the engine that runs FedDeper on the workload, with a server's averaging."""
    n = setup.workload.n_peers
    section = ALGORITHMS.section(
        "feddeper", learning_rate=RATE, local_steps=LOCAL_STEPS, rho=RHO, mixing_rate=MIXING_RATE
    )
    algorithm: Algorithm = build_algorithm(section)
    mixing, active = algorithm.exchange(build_topology("server", n), "server", participation(setup), SEED)
    return setup.engine_of(algorithm, mixing, active, RATE)


class Loop:
    """Column A: a module for each peer's personal model and one for the common one, and plain backward passes."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.participation = participation(setup)
        self.round_index = 0
        self.loss = plain_loss(setup.workload.loss)
        self.common = copy.deepcopy(setup.module)
        self.personal = [copy.deepcopy(setup.module) for _ in range(setup.workload.n_peers)]

    def round(self) -> None:
        """Let every active peer walk, one after the other; then average what they send."""
        active = np.flatnonzero(self.participation.active(self.round_index))
        sent = [self.walk(int(peer)) for peer in active]
        with torch.no_grad():
            for x, *walked in zip(self.common.parameters(), *(model.parameters() for model in sent), strict=True):
                x.copy_(torch.stack(walked).mean(0))
        self.round_index += 1

    def walk(self, peer: int) -> nn.Module:
        """Take the local steps of one peer; return y, the model it sends."""
        sent = copy.deepcopy(self.common)
        personal = self.personal[peer]
        for step in range(LOCAL_STEPS):
            batch = self.setup.data.batch(self.round_index * LOCAL_STEPS + step, [peer])
            moves = [self.gradients(model, batch.x[0], batch.y[0]) for model in (sent, personal)]
            with torch.no_grad():
                for y, v, x, g_y, g_v in zip(
                    sent.parameters(), personal.parameters(), self.common.parameters(), *moves, strict=True
                ):
                    y.sub_(RATE * g_y + RHO * (v + y - 2 * x))
                    v.sub_(RATE * g_v)

        with torch.no_grad():
            for y, v in zip(sent.parameters(), personal.parameters(), strict=True):
                v.lerp_(y, MIXING_RATE)
        return sent

    def gradients(self, model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
        """Return the mean gradient of a batch."""
        model.zero_grad()
        torch.autograd.backward(self.loss(model(x), y) / len(y))
        return gradients_of(list(model.parameters()))


def measure_feddeper(workload: Workload, device: torch.device, rounds: int) -> dict[str, Any]:
    """Check in float64 that both make the same rounds, then time them.

    Returns:
        ratio_to_loop; times_the_floor and fraction_of_floor, of the products of a round's steps; and the variants.

    Raises:
        RunError: the engine computes something else.
    """
    with quiet():
        check_equal(workload, device)
        setup = Setup.build(workload, device)
        models = Setup.build(replace(workload, n_peers=2 * ACTIVE), device)
        product = limit.works(models)["gemm"]

        def products() -> None:
            for _ in range(LOCAL_STEPS):
                product()

        times = paired({LOOP: Loop(setup).round, ENGINE: engine(setup).round, "floor": products}, rounds, device)
    clocks = {name: variant.clock for name, variant in times.items()}
    return {
        "description": f"{ACTIVE} of {workload.describe()}, {LOCAL_STEPS} local steps, two models, d = {setup.d:,}",
        "ratio_to_loop": ratio(clocks[LOOP], clocks[ENGINE]),
        "times_the_floor": ratio(clocks[ENGINE], clocks["floor"]),
        "fraction_of_floor": ratio(clocks["floor"], clocks[ENGINE]),
        "floor": times["floor"].facts(),
        "variants": {
            name: times[name].facts()
            | {
                "peer_steps_per_second": ACTIVE * LOCAL_STEPS / float(np.median(clocks[name])),
                "ratio_to_loop": ratio(clocks[LOOP], clocks[name]),
            }
            for name in (LOOP, ENGINE)
        },
    }


def check_equal(workload: Workload, device: torch.device) -> None:
    """Check that engine and loop agree, from personal models that differ.

    Raises:
        RunError: they do not; nothing should be timed then.
    """
    setup = Setup.build(workload, device, torch.float64)
    loop = Loop(setup)
    rows = start(setup)[0]
    for model, row in zip(loop.personal, rows, strict=True):
        nn.utils.vector_to_parameters(row, model.parameters())
    ours = engine(setup)
    ours.state.rows["personal"].copy_(rows)
    for _ in range(ROUNDS):
        loop.round()
        ours.round()
    x = ours.state.rows["x"]
    compare(workload.name, ENGINE, "x", x, flatten(loop.common).expand_as(x))
    personal = torch.stack([flatten(model) for model in loop.personal])
    compare(workload.name, ENGINE, "personal", ours.state.rows["personal"], personal)
