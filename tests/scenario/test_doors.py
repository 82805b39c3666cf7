"""One file adds a part: as a built-in where it lies in its room, as a user's where it is imported from elsewhere."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from doors import both_doors
from networked import LONG, devices, driver_of, running
from raising import raises
from tiny_scenario import Build, Tiny

from flower_privdec import testing
from flower_privdec.common.catalogue import CODECS, DATASETS, MODELS, NOISES, TOPOLOGIES, TRANSPORTS
from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.experiment import Experiment
from flower_privdec.graph.topology import build_topology
from flower_privdec.network.local.peer_processes import on_this_machine
from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.privacy.noise import noise_mechanism
from flower_privdec.pushsum.frames import TensorArithmetic, wire_codec
from flower_privdec.reporting.console import parts, print_parts
from flower_privdec.scenario import Scenario, parse_scenario, to_yaml
from flower_privdec.scenario.algorithm_sections import ALGORITHMS
from tools.docs.algorithm_table import algorithm_table
from tools.docs.scenario_reference import scenario_reference

ALGORITHM = '''
from flower_privdec.algorithms.sgp import SGP
from flower_privdec.common.fields import Fraction
from flower_privdec.core import Mix
from flower_privdec.privacy.mechanism.declared import one_sum
from flower_privdec.scenario import DescentSection


class HalfPush(SGP):
    """Push a share of each step. Source: none needed."""

    name = "half-push"
    line = "push-sum that takes a share of each step"

    class Section(DescentSection):
        """HalfPush: which share.

        Attributes:
            share: of a step that is taken.
        """

        share: Fraction = 0.5

    released = one_sum

    def __init__(self, section):
        super().__init__(section)
        self.share = section.share
        self.program = (self.descend, Mix(("x", "w")))

    def descend(self, cohort, state):
        rows = state.rows
        rate = cohort.learning_rate.at(state.round_index)[cohort.peers]
        step = cohort.tensor(-self.share * rate)[:, None]
        gradient = rows["x"].new_zeros(rows["x"].shape)
        cohort.add_step_(gradient, rows["x"], state.round_index, divisor=rows["w"], factor=1.0)
        rows["x"] += step * gradient
'''
GRAPH = '''
from flower_privdec.common.catalogue import GraphSection
from flower_privdec.common.fields import Count
from flower_privdec.graph.topology import Graph


class StepsGraph(Graph):
    """A ring whose peers also send some steps ahead."""

    name = "steps"
    line = "the next peer, and the one `ahead`"

    class Section(GraphSection):
        """A ring with a second step.

        Attributes:
            ahead: how far the second step goes.
        """

        ahead: Count = 2

    def build(self, n_peers, seed):
        return [{(peer + step) % n_peers for step in (1, self.section.ahead)} for peer in range(n_peers)]
'''
MODEL = '''
from torch import nn

from flower_privdec.common.catalogue import ModelKeys
from flower_privdec.common.fields import Count
from flower_privdec.models import Model


class TwoLayersModel(Model):
    """Two linear layers."""

    name = "two-layers"
    line = "two linear layers, without anything between"

    class Section(ModelKeys):
        """Two linear layers.

        Attributes:
            between: numbers between the layers.
        """

        between: Count = 3

    def build(self, shape, n_outputs, n_tokens):
        between = self.section.between
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(between), nn.Linear(between, n_outputs))
'''
CODEC = '''
import torch


class ByteCodec:
    """Sends a byte a number: multiples of 1/127 of the largest."""

    name = "byte"
    line = "a byte a number"

    def encode(self, row):
        scale = row.abs().max().double().reshape(1)
        steps = (row.double() / scale.clamp_min(1e-300) * 127).round().to(torch.int8)
        return torch.cat([scale.view(torch.uint8), steps.view(torch.uint8).reshape(-1)])

    def decode(self, sent, like):
        scale, steps = sent[:8].clone().view(torch.float64), sent[8:].view(torch.int8)
        return (steps.double() / 127 * scale).reshape(like.shape).to(like)
'''
TRANSPORT = '''
from flower_privdec.network.transport.transport import MemoryNetwork

CALLED = MemoryNetwork()


class HallTransport:
    """Calls through a hall of this process."""

    name = "hall"
    line = "peers of one process"

    def __init__(self, peer, addresses, identities, credentials):
        assert addresses[peer] and identities[peer] and credentials.key
        self.carrying = CALLED.transport(peer)

    def serve(self, answer, cap, callers):
        return self.carrying.serve(answer, cap, callers)

    def connect(self, peer, cap):
        return self.carrying.connect(peer, cap)

    def close(self):
        self.carrying.close()
'''
NOISE = '''
from flower_privdec.common.catalogue import NoiseKeys
from flower_privdec.common.fields import NonNegative
from flower_privdec.privacy.noise import NoiseMechanism


class LouderNoise(NoiseMechanism):
    """Independent noise, and a share more of it on top."""

    name = "louder"
    line = "independent noise, and a share more of it"

    class Section(NoiseKeys):
        """Louder noise.

        Attributes:
            share: of the standard deviation, on top.
        """

        share: NonNegative = 0.5

    def __init__(self, share=0.5):
        self.share = share

    def released(self, sums):
        return sums

    def add_(self, out, std, noised):
        super().add_(out, std * (1 + self.share), noised)
'''
DATA = '''
import numpy as np

from flower_privdec.data.dataset import Dataset, embedded


class StripesData(Dataset):
    """Drawn stripes."""

    name = "stripes"
    line = "drawn rows, of which the sign of the first number is the class"
    reads_files = False

    def read(self, request):
        x = np.random.default_rng(1).normal(size=(300, 5))
        return embedded(x, (x[:, 0] > 0).astype(int), 240, "stripes")
'''
PLAIN = ["privacy=none", "data.batch={sampling: full}"]  # no draw, whose keys differ with the scenario


@pytest.fixture
def half_push(tmp_path: Path) -> Iterator[None]:
    with both_doors(ALGORITHMS, tmp_path, "half_push", ALGORITHM):
        yield


BUILT_IN = "algorithm={name: half-push, learning_rate: 0.4, share: 0.25}"
OWN = 'algorithm={module: "half_push:HalfPush", learning_rate: 0.4, share: 0.25}'


@pytest.mark.usefixtures("half_push")
def test_one_file_is_an_algorithm_by_both_doors(build: Build) -> None:
    models = [testing.run_rounds(build(setting, *PLAIN), 2).state.rows["x"] for setting in (BUILT_IN, OWN)]
    assert torch.equal(*models)

    # A quarter of steps of 0.4 is a step of 0.1, which push-sum itself can take.
    plain = testing.run_rounds(build("algorithm={name: sgp, learning_rate: 0.1}", *PLAIN), 2).state.rows["x"]
    torch.testing.assert_close(models[0], plain, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("half_push")
@pytest.mark.parametrize("setting", [BUILT_IN, OWN])
def test_the_laws_hold_for_an_algorithm_by_either_door(build: Build, setting: str) -> None:
    experiment = build(setting)
    testing.assert_sensitivity(experiment, 2)
    testing.assert_noise(experiment, 2)


@pytest.mark.usefixtures("half_push")
def test_a_new_algorithm_is_known_everywhere(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert parts()["algorithms"]["half-push"] == "push-sum that takes a share of each step (share: 0.5)"
    print_parts(True, "algorithms")
    assert "half-push" in json.loads(capsys.readouterr().out)["algorithms"]
    assert "| `half-push` | push-sum that takes" in algorithm_table()
    assert "| `algorithm.share` | number | `0.5` | > 0, ≤ 1 | of a step that is taken." in scenario_reference()
    assert "half-push" in json.dumps(Scenario.model_json_schema())

    scenario = tiny(BUILT_IN)
    assert parse_scenario(to_yaml(scenario)) == scenario


@pytest.mark.usefixtures("half_push")
def test_errors_know_the_keys_of_a_new_algorithm(tiny: Tiny) -> None:
    for setting in (BUILT_IN, OWN):
        with raises(ScenarioError, "scenario.less_than_equal", r"algorithm\.share=2.0 must be <= 1"):
            tiny(setting, "algorithm.share=2.0")
        with raises(ScenarioError, "scenario.extra_forbidden", "did you mean 'share'"):
            tiny(setting, "algorithm.shar=0.5")
    with raises(ScenarioError, "scenario.union_tag_invalid", "did you mean 'half-push'"):
        tiny("algorithm.name=half-pus")
    with raises(ScenarioError, "scenario.extra_forbidden", "it belongs to half-push"):
        tiny("algorithm.share=0.5")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (ALGORITHM.replace('name = "half-push"', ""), "registry.nameless"),
        (ALGORITHM.replace('"push-sum that takes a share of each step"', '""'), "registry.nameless"),
        (ALGORITHM.replace('"half-push"', '"privsgp"'), "registry.taken"),
    ],
    ids=["no name", "no line", "a name that is taken"],
)
def test_a_built_in_without_its_own_name_is_refused(tmp_path: Path, text: str, code: str) -> None:
    with both_doors(ALGORITHMS, tmp_path, "half_push", text), raises(ArgumentError, code, "HalfPush"):
        list(ALGORITHMS)


def test_lists_in_any_key_have_one_number_per_peer(tiny: Tiny, tmp_path: Path) -> None:
    text = ALGORITHM.replace("share: Fraction", "share: PerPeer").replace("import Fraction", "import PerPeer")
    with both_doors(ALGORITHMS, tmp_path, "half_push", text):
        for setting in (BUILT_IN, OWN):
            tiny(setting, "algorithm.share=[0.1, 0.2, 0.3, 0.4]")
            with raises(ScenarioError, "scenario.per-peer", r"algorithm\.share lists 2 numbers for n_peers=4"):
                tiny(setting, "algorithm.share=[0.1, 0.2]")


# --- a graph ---


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[None]:
    with both_doors(TOPOLOGIES, tmp_path, "steps_graph", GRAPH):
        yield


BUILT_IN_GRAPH = "topology={name: steps, ahead: 3}"
OWN_GRAPH = 'topology={module: "steps_graph:StepsGraph", arguments: {ahead: 3}}'


@pytest.mark.usefixtures("steps")
def test_one_file_is_a_graph_by_both_doors(build: Build) -> None:
    expected = sorted([peer, (peer + step) % 4] for peer in range(4) for step in (1, 3))
    for setting in (BUILT_IN_GRAPH, OWN_GRAPH):
        experiment = build(setting)
        assert experiment.mixing is not None
        assert experiment.mixing.topology.edges(0).tolist() == expected
    assert build_topology("steps", 5, ahead=4).edges(0).tolist() == build_topology("ring", 5).edges(0).tolist()


@pytest.mark.usefixtures("steps")
def test_a_new_graph_is_known_everywhere(tiny: Tiny) -> None:
    assert parts()["topologies"]["steps"] == "the next peer, and the one `ahead` (ahead: 2)"
    assert "| `topology.ahead` | whole number | `2` | ≥ 1 | how far the second step goes. |" in scenario_reference()
    scenario = tiny(BUILT_IN_GRAPH)
    assert parse_scenario(to_yaml(scenario)) == scenario
    assert tiny("privacy.noise={kind: cancelling, colluding: 1, secrets: steps}").private is not None

    with raises(ScenarioError, "scenario.greater_than_equal", r"topology\.ahead=0 must be >= 1"):
        tiny("topology={name: steps, ahead: 0}")
    with raises(ScenarioError, "scenario.extra_forbidden", "did you mean 'ahead'"):
        tiny("topology={name: steps, ahed: 2}")
    with raises(ScenarioError, "scenario.literal_error", "did you mean 'steps'"):
        tiny("topology.name=step")


@pytest.mark.usefixtures("steps")
def test_wrong_arguments_of_a_users_graph_are_refused(build: Build) -> None:
    with raises(ScenarioError, "code.arguments", r"topology\.module='steps_graph:StepsGraph'.*ahead=0") as refused:
        build('topology={module: "steps_graph:StepsGraph", arguments: {ahead: 0}}')
    assert "\n" not in str(refused.value)


# --- a model ---


@pytest.fixture
def two_layers(tmp_path: Path) -> Iterator[None]:
    with both_doors(MODELS, tmp_path, "two_layers", MODEL):
        yield


BUILT_IN_MODEL = "model={name: two-layers, between: 4}"
OWN_MODEL = 'model={module: "two_layers:TwoLayersModel", arguments: {between: 4}}'


@pytest.mark.usefixtures("two_layers")
def test_one_file_is_a_model_by_both_doors(build: Build, tiny: Tiny) -> None:
    models = [build(setting, *PLAIN).initial for setting in (BUILT_IN_MODEL, OWN_MODEL)]
    assert torch.equal(*models)
    assert models[0].numel() == (64 * 4 + 4) + (4 * 10 + 10)

    assert parts()["models"]["two-layers"] == "two linear layers, without anything between (between: 3)"
    assert "| `model.between` | whole number | `3` | ≥ 1 | numbers between the layers. |" in scenario_reference()
    with raises(ScenarioError, "scenario.other-choice", "it belongs to two-layers"):
        tiny("model.between=4")
    with raises(ScenarioError, "scenario.literal_error", "did you mean 'two-layers'"):
        tiny("model.name=two-layer")


# --- a codec ---


def test_one_file_is_a_codec_by_both_doors(tiny: Tiny, tmp_path: Path) -> None:
    with both_doors(CODECS, tmp_path, "byte_codec", CODEC):
        sent = []
        for name in ("byte", "byte_codec:ByteCodec"):
            assert tiny(f"network={{codec: '{name}'}}").network.codec.name == name
            arithmetic = TensorArithmetic(wire_codec(name))
            row = torch.linspace(-3, 5, 100, dtype=torch.float64)
            shared = arithmetic.freeze({"x": row}, 1 / 3, {})
            share = shared.values["x"]
            parts_received, _ = arithmetic.open(shared.values, {"x": row}, {})
            assert torch.equal(parts_received["x"], shared.parts["x"])
            assert torch.allclose(shared.parts["x"], row / 3, rtol=0, atol=0.02)
            sent.append(share)
        assert torch.equal(*sent)
        assert sent[0].nbytes == 108
        assert parts()["codecs"]["byte"] == "a byte a number"
        with raises(ScenarioError, "scenario.literal_error", "did you mean 'byte'"):
            tiny("network={codec: bytee}")


# --- a transport ---


def test_one_file_is_a_transport_by_both_doors(tiny: Tiny, tmp_path: Path) -> None:
    with both_doors(TRANSPORTS, tmp_path, "hall_transport", TRANSPORT):
        rooms = {"hall": f"{TRANSPORTS.room}.hall_transport", "hall_transport:HallTransport": "hall_transport"}
        for name, room in rooms.items():
            scenario = tiny("rounds=2", f"network={{mode: synchronous, final_mixing: 0, transport: '{name}'}}")
            peers = [running_peer(scenario, device) for device in devices(scenario, tmp_path / room, dials_out=())]
            with running(peers) as futures:
                rows = torch.cat([future.result(LONG)["x"] for future in futures])
            called = importlib.import_module(room).CALLED
            assert called.running.keys() == {0, 1, 2, 3}  # it was this one that carried the calls
            torch.testing.assert_close(rows, testing.run_rounds(Experiment.build(scenario), 2).state.rows["x"])
        assert parts()["transports"]["hall"] == "peers of one process"
        with raises(ScenarioError, "network.transport", "did you mean 'hall'"):
            tiny("network={transport: hal}")


WRONG_TRANSPORTS = """
class NoClose:
    def __init__(self, *place): ...
    def serve(self, answer, cap, callers): ...
    def connect(self, peer, cap): ...

class NoPlace(NoClose):
    def __init__(self): ...
    def close(self): ...
"""


def test_a_wrong_transport_is_refused_before_a_peer_begins(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong_transports.py").write_text(WRONG_TRANSPORTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, code in (
        ("wrong_transports:NoClose", "code.kind"),
        ("wrong_transports:NoPlace", "code.fails"),
        ("wrong_transports:Missing", "code.no-name"),
    ):
        scenario = tiny(f"network={{transport: '{name}'}}")
        peer = running_peer(scenario, devices(scenario, tmp_path)[0])
        with raises(ScenarioError, code, "network.transport='wrong_transports"):
            driver_of(peer)
        peer.close()
    with raises(ScenarioError, "code.no-name", "network.transport='wrong_transports"):
        on_this_machine(scenario)


# --- noise ---


def test_one_file_is_a_noise_by_both_doors(build: Build, tmp_path: Path) -> None:
    with both_doors(NOISES, tmp_path, "louder_noise", NOISE):
        for noise in ("{kind: louder, share: 2.0}", '{module: "louder_noise:LouderNoise", arguments: {share: 2.0}}'):
            experiment = build(f"privacy.noise={noise}")
            private = experiment.scenario.private
            assert private is not None
            mechanism = noise_mechanism(private.noise)
            assert (type(mechanism).__name__, vars(mechanism)) == ("LouderNoise", {"share": 2.0})
            assert experiment.own.protection is not None
            assert max(experiment.own.protection.epsilons(6)) <= 3.0
            assert torch.isfinite(testing.run_rounds(experiment, 1).state.rows["x"]).all()

        assert parts()["noises"]["louder"] == "independent noise, and a share more of it (share: 0.5)"
        assert "| `privacy.noise.share` | number | `0.5` | ≥ 0 |" in scenario_reference()
        with raises(ScenarioError, "scenario.literal_error", "did you mean 'louder'"):
            build("privacy.noise={kind: loude}")


# --- a dataset ---


def test_one_file_is_a_dataset_by_both_doors(build: Build, tiny: Tiny, tmp_path: Path) -> None:
    with both_doors(DATASETS, tmp_path, "stripes_data", DATA):
        names = []
        for dataset in ("stripes", '{module: "stripes_data:StripesData"}'):
            experiment = build(f"data={{dataset: {dataset}, batch: {{size: 12}}}}", "privacy=none")
            assert tuple(experiment.public.x.shape) == (60, 5)
            names.append(experiment.public.name)
        assert names == ["stripes", "own"]  # what a ledger counts them under
        assert parts()["datasets"]["stripes"].startswith("drawn rows")
        with raises(ScenarioError, "scenario.literal_error", "did you mean 'stripes'"):
            tiny("data.dataset=stripe")
        with raises(ScenarioError, "data.source", "dataset=stripes has a name"):
            tiny("data={dataset: stripes, source: mine, batch: {size: 12}}")
