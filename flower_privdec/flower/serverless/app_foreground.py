"""An app's peer in the foreground of a terminal or a service."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flower_privdec.errors import ScenarioError
from flower_privdec.flower.launch.local_grid import OpenedApp, opened_app
from flower_privdec.flower.serverless.app_peer import app_peer, initial_path
from flower_privdec.flower.serverless.driven_app import DrivenApp
from flower_privdec.flower.serverless.first_message import first_train_message
from flower_privdec.flower.serverless.initial_arrays import InitialArrays, load_initial
from flower_privdec.network.peer.foreground import device_of, run_in_foreground
from flower_privdec.scenario.app_scenario import AppScenario
from flower_privdec.scenario.plain_yaml import read_plain


def run_app_peer(
    app: Path,
    scenario: AppScenario,
    peer: int,
    folder: Path,
    certificates: Path,
    *,
    initial: Path | None = None,
    node_config: Sequence[str] = (),
    resume: bool = False,
    with_parent: bool = False,
) -> None:
    """Run one peer of an app until its rounds are done, SIGTERM or Ctrl-C.

    Args:
        app: the folder of a Flower app, with its pyproject.toml; nothing in it is changed.
        folder: the peer's own.
        certificates: see `run_peer`.
        initial: the initial.safetensors of another peer's folder; by default the app's ServerApp makes the arrays.
        node_config: of this device, as KEY=VALUE.
        with_parent: see `run_peer`.

    Raises:
        ScenarioError: what is given does not fit, before any work.
        RunError: the run could not go on, or the app failed; all is on disk.
        StoppedError: it was asked to stop.
    """
    device, config = device_of(scenario, peer, folder, certificates), node_config_of(node_config)
    with opened_app(app, scenario.run_config) as opened:
        begun = _initial(opened, scenario, folder, initial, resume)
        driven = DrivenApp(
            opened.client,
            begun,
            peer,
            scenario.n_peers,
            folder,
            node_config=config,
            run_config=opened.run_config,
            train_config=scenario.train_config,
            evaluate_config=scenario.evaluate_config,
        )
        running = app_peer(scenario, device, begun, driven, resume)
        run_in_foreground(running, scenario.evaluation.every, with_parent)
        print(f"privacy of peer {peer}: {running.status()['privacy']}", file=sys.stderr)


def node_config_of(given: Sequence[str]) -> Mapping[str, Any]:
    """Return a device's own configuration from KEY=VALUE, each value YAML.

    Raises:
        ScenarioError: one is no such pair.
    """
    found = {}
    for each in given:
        key, equals, text = each.partition("=")
        value = read_plain(text, "--node-config", one_value=True)[0] if equals else None
        if not key.strip() or not isinstance(value, str | int | float):
            raise ScenarioError(f"--node-config {each!r} must be KEY=VALUE, the value text, a number, true or false")
        found[key.strip()] = value
    return found


def _initial(opened: OpenedApp, scenario: AppScenario, folder: Path, given: Path | None, resume: bool) -> InitialArrays:
    """Return what the peer begins with, or began with, and say where that is from."""
    kept = initial_path(folder)
    if given is None and resume and kept.exists():
        given = kept
    if given is not None:
        begun, source = load_initial(given), f"read from {given}"
    else:
        begun = first_train_message(opened, scenario.n_peers, scenario.seed)
        source = f"what the app's ServerApp would send first, drawn with seed {scenario.seed}; kept in {kept}"
    print(f"initial arrays {begun.digest[:16]}: {source}", file=sys.stderr)
    return begun
