"""A model most of which is frozen: what is trained, noised, sent, saved, and part of the key of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flower_runs import final_rows, run_under_flower
from networked import devices, run_network
from raising import raises
from safetensors.torch import load_file
from salts import pin_salts
from torch import Tensor, nn

from flower_privdec import testing
from flower_privdec.common.errors import RunError
from flower_privdec.engine.run import run
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.agreement import Agreement
from flower_privdec.experiment.recorder import state_dict_of, traffic
from flower_privdec.experiment.run_key import held_by
from flower_privdec.flower.apps.client_app import client_app
from flower_privdec.flower.apps.server_app import Relay
from flower_privdec.flower.launch.local_grid import LocalGrid
from flower_privdec.models import parameter_count
from flower_privdec.network.peer.foreground import peer_of
from flower_privdec.peer.trainer import ScenarioTrainer
from flower_privdec.scenario import Scenario
from flower_privdec.training_loop import private

Tiny = Callable[..., Scenario]
ADAPTED = ("model={module: 'user_models:adapted'}", "rounds=2")
TRAINED = 2 * 108 + 12 * 2 + 12 * 10 + 10


def frozen_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items() if name.startswith("features.")}


def test_only_trained_parts_are_rows_and_noised(tiny: Tiny) -> None:
    experiment = Experiment.build(tiny(*ADAPTED))
    before = frozen_of(experiment.module)
    end = testing.run_rounds(experiment, 2).state.rows["x"]
    assert end.shape == (4, TRAINED) == (4, parameter_count(experiment.module))
    assert traffic(experiment.algorithm, {"x": end, "w": torch.ones(4)})["bytes"] == 8 * TRAINED
    assert ((end - experiment.initial).abs() > 0).all()  # every number of a row has noise
    saved = state_dict_of(experiment, end[0])
    assert all(torch.equal(saved[name], value) for name, value in before.items())
    assert not torch.equal(saved["head.weight"], experiment.module.state_dict()["head.weight"])


def test_one_example_moves_only_releases_as_declared(tiny: Tiny) -> None:
    experiment = Experiment.build(tiny(*ADAPTED, "data.samples=60", "data.batch.size=4"))
    testing.assert_sensitivity(experiment, rounds=1)
    testing.assert_noise(experiment, rounds=1)
    testing.assert_nothing_else_leaves(experiment)


def test_frozen_numbers_are_part_of_a_run_s_name(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    pin_salts(monkeypatch)
    one, same, other = (
        Experiment.build(tiny(*ADAPTED, f"model.arguments={{shift: {shift}}}")) for shift in (0.0, 0.0, 1e-6)
    )
    assert torch.equal(one.initial, other.initial)
    assert one.own.keys == same.own.keys
    assert not set(one.own.keys.values()) & set(other.own.keys.values())
    assert list(held_by(one.module)) == list(held_by(same.module)) != list(held_by(other.module))
    assert one.constants == same.constants != other.constants
    assert Agreement.of(tiny("rounds=1")).constants == ""


def test_a_model_is_saved_whole(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(*ADAPTED)
    run(Experiment.build(scenario), tmp_path / "run")
    module = Agreement.of(scenario).module
    saved = load_file(tmp_path / "run" / "model.safetensors")
    names = {name.removeprefix("mean/") for name in saved if name.startswith("mean/")}
    assert names == set(module.state_dict())


def test_relay_and_network_match_the_engine(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin_salts(monkeypatch)
    scenario = tiny(*ADAPTED)
    expected = testing.run_rounds(Experiment.build(scenario), 2).state.rows["x"]
    relayed = final_rows(run_under_flower(scenario, tmp_path / "relay", "relay"))["x"]
    torch.testing.assert_close(relayed, expected, rtol=1e-9, atol=1e-12)

    # Peers of a network draw the noise of code of one's own from their operating systems.
    open_settings = [*ADAPTED, "privacy=none", "network={mode: synchronous, links: local, final_mixing: 0}"]
    expected = testing.run_rounds(Experiment.build(tiny(*ADAPTED, "privacy=none")), 2).state.rows["x"]
    sent = run_network(tiny(*open_settings), tmp_path / "network")["x"]
    torch.testing.assert_close(sent, expected, rtol=1e-9, atol=1e-12)


def test_a_node_with_other_frozen_weights_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    class Other(Relay):
        def _prepare(self) -> int:
            count = super()._prepare()
            self.agreement = replace(self.agreement, constants="of other weights")
            return count

    strategy = Other(tiny(*ADAPTED), tmp_path / "relay")
    with raises(RunError, "flower.other-constants", names="frozen"):
        strategy.start(LocalGrid(client_app(), 4, folder=tmp_path / "nodes"))


def test_a_frame_with_other_frozen_weights_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    runs = []
    for shift, device in zip((0.0, 1e-6), devices(tiny(*ADAPTED), tmp_path, memory=True), strict=False):
        trainer = ScenarioTrainer(tiny(*ADAPTED), device.peer, device.folder)
        trainer.constants = Agreement.of(tiny(*ADAPTED, f"model.arguments={{shift: {shift}}}")).constants
        peer = peer_of(trainer, device)
        runs.append(peer._run_id)
        peer.close()
    assert runs[0] != runs[1]


def test_private_trains_a_frozen_backbones_head(tmp_path: Path) -> None:
    from user_models import adapted

    torch.manual_seed(0)
    model = adapted()
    before = frozen_of(model)
    x, y = torch.randn(40, 1, 8, 8), torch.randint(0, 10, (40,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.01)
    head = model.head.weight.detach().clone()  # type: ignore[union-attr, operator]
    parts = private(
        model, optimizer, loader, nn.CrossEntropyLoss(), ledger=tmp_path / "l.jsonl", delta=1e-3, noise_multiplier=1.0
    )
    wrapped, optimizer, loader, criterion = parts
    wrapped.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        criterion(wrapped(inputs), targets).backward()
        optimizer.step()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert not torch.equal(model.head.weight, head)  # type: ignore[arg-type, union-attr]
    with torch.no_grad():
        torch.testing.assert_close(wrapped(x), model.eval()(x))
