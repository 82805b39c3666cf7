"""The engine on a GPU: what holds of a round is checked without one, and where there is one, all its numbers.

A fake GPU's tensors have shape, type and device and no values. Whatever asks for a value (a host that waits for its
GPU) raises there, and so does an operation on tensors of two devices.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from variants import PLAIN, VARIANTS, settings_for

from flower_privdec.core import State
from flower_privdec.core.cohort import Cohort
from flower_privdec.data import PeerData
from flower_privdec.engine.engine import Engine
from flower_privdec.experiment import Experiment
from flower_privdec.gradients import GradientKernel, build_kernel
from flower_privdec.privacy.noise.gpu_philox import GPUNoise
from flower_privdec.rows.keys import seed_keys
from tools.bench.comparison import measure_workload
from tools.bench.equality import check_equal
from tools.bench.workloads import WORKLOADS, Setup, peer_data

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="THE ENGINE ON CUDA NOT TESTED: no GPU here")
FAKE = torch.device("cuda", 7)  # no real one, so that no cache of constants is shared with one
ASKING = {
    "pdsl": "the host plays the Shapley games",
    "dp-cga": "the host solves for the weights",
    "adp2-sgd": "which models are too old is in the state",
    "algorithm.table=dense": "the oracle takes one example after the other",
}
STEP_COPIES, ROUND_COPIES = 4, 3  # small arrays that a private step, and the rest of a round, may bring to the GPU


class Silent:
    """Noise that is written as a GPU would write it, of no value."""

    def add_(self, out: Tensor, std: Tensor, *_: object) -> None:
        out.addcmul_(torch.empty_like(out), std[:, None])


class Copies(TorchDispatchMode):
    """Counts what crosses from the host to the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[1] if function is torch.ops.aten.copy_.default else args[0]
            self.count += source.device.type == "cpu" and found.device.type == "cuda"
        return found


def moved(module: nn.Module) -> nn.Module:
    """Return a module on the fake GPU."""
    there = copy.deepcopy(module)
    for part in there.modules():
        for name, value in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(torch.empty(value.shape, dtype=value.dtype, device=FAKE)))
        for name, value in part.named_buffers(recurse=False):
            setattr(part, name, torch.empty(value.shape, dtype=value.dtype, device=FAKE))
    return there


def on_fake_gpu(cohort: Cohort, kernel: GradientKernel, data: PeerData) -> Cohort:
    initial, held = cohort.initial, cohort.validation
    public = held and replace(held, x=held.x.to(FAKE), y=held.y.to(FAKE))
    there = torch.empty(initial.shape, dtype=initial.dtype, device=FAKE)
    return replace(cohort, initial=there, kernel=kernel, data=data, noise=Silent(), validation=public)


def third_round(engine: Engine) -> int:
    """Return how many arrays a round brings to the GPU, after two in which what stays there got there."""
    for _ in range(2):
        engine.round()
    with Copies() as copies:
        engine.round()
    return copies.count


def copies_of(experiment: Experiment) -> int:
    """Return how many arrays the third round of an experiment brings to a fake GPU."""
    here = experiment.cohort()
    Engine(experiment.algorithm, here, experiment.initial_state(here)).round()  # what is found once is found here
    with FakeTensorMode(allow_non_fake_inputs=True):
        kernel = build_kernel(moved(experiment.module), experiment.loss, experiment.public.input_shape)
        data = PeerData(experiment.own.examples, experiment.own.sampler, FAKE, here.dtype)
        there = on_fake_gpu(here, kernel, data)
        state = experiment.initial_state(there)
        return third_round(Engine(experiment.algorithm, there, state))


@pytest.mark.parametrize(
    "variant",
    [each for each in PLAIN if not any(name in " ".join(each) for name in ASKING)],
    ids=" ".join,
)
def test_a_round_asks_the_gpu_nothing(build: Callable[..., Experiment], variant: list[str]) -> None:
    experiment = build(*settings_for(*variant))
    assert 2 <= copies_of(experiment) <= STEP_COPIES * experiment.algorithm.steps_per_round + ROUND_COPIES


@pytest.mark.parametrize("name", list(ASKING)[:3])
def test_a_host_that_asks_is_found_out(build: Callable[..., Experiment], name: str) -> None:
    experiment = build(*settings_for(f"algorithm.name={name}"))
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        copies_of(experiment)


@pytest.mark.parametrize("name", ["W1", "W2", "W4"])  # W3's convolutions ask autograd, which a fake GPU has not
def test_a_round_of_the_benchmark_brings_batch_and_scales(name: str) -> None:
    workload = WORKLOADS[name].resized(4)
    setup = Setup.build(workload)
    engine = setup.engine(Silent())
    with FakeTensorMode(allow_non_fake_inputs=True):
        kernel = build_kernel(moved(setup.module), workload.loss, workload.shape)
        data = peer_data(workload, setup.examples, np.arange(4), FAKE, setup.dtype)
        there = on_fake_gpu(engine.cohort, kernel, data)
        state = State(there.peers, rows=engine.algorithm.initial(there))
        assert third_round(Engine(engine.algorithm, there, state)) == 2


def test_noise_brings_its_keys_once() -> None:
    launched: list[tuple] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
            return lambda *given, **options: launched.append((grid, options))

    noise = GPUNoise.__new__(GPUNoise)
    noise._prepare(Kernel(), seed_keys(1, range(5)), FAKE)
    with FakeTensorMode(allow_non_fake_inputs=True), Copies() as copies:
        for step in range(3):
            noise.add_(torch.empty(5, 5000, device=FAKE), torch.empty(5, device=FAKE), step, np.arange(5))
    assert copies.count == 1
    assert launched == [((5, 2), {"DOUBLE": False, "enable_fp_fusion": True})] * 3


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="GPU NOISE NOT COMPILED: Triton is not installed")
def test_noise_compiles_for_a_gpu_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compiled

    from flower_privdec.privacy.noise.gpu_philox import add_normals

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"out": "*fp32", "std": "*fp32", "keys": "*i64", "receivers": "*i64", "stride": "i32", "d": "i32"}
    source = ASTSource(add_normals, types | {"step": "i64", "DOUBLE": "constexpr"}, {"DOUBLE": False})
    made = compiled(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True})
    assert "add_normals" in made.asm["ptx"]


# --- where there is a GPU ---


@NEEDS_GPU
@pytest.mark.parametrize("variant", VARIANTS, ids=" ".join)
def test_a_gpu_follows_the_cpus_trajectory(
    build: Callable[..., Experiment], alike: Callable[..., Experiment], variant: list[str]
) -> None:
    """In float64 with the same noise."""
    settings = settings_for(*variant)
    cpu = build(*settings)
    gpu = alike(build(*settings, "compute.device=cuda"), cpu)
    found = []
    for experiment in (cpu, gpu):
        cohort = experiment.cohort()
        engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
        for _ in range(experiment.scenario.rounds):
            engine.round()
        found.append(engine.state)
    one, other = found
    assert one.rows.keys() == other.rows.keys()
    for key, rows in one.rows.items():
        assert other.rows[key].is_cuda
        torch.testing.assert_close(
            other.rows[key].cpu(), rows, rtol=1e-7, atol=1e-9, msg=lambda text, k=key: f"{k}: {text}"
        )


@NEEDS_GPU
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_engine_takes_the_benchmark_loops_step_on_gpu(name: str) -> None:
    check_equal(WORKLOADS[name].resized(4), "cuda")


@NEEDS_GPU
def test_the_benchmark_runs_on_a_gpu() -> None:
    found = measure_workload(WORKLOADS["W2"].resized(4), torch.device("cuda"), rounds=3, extras=False)
    assert found["peer_steps_per_second"] > 0
    assert not found["left_out"]
