"""What a strategy for peers is given, looked at before any message is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from flower_privdec.common.arguments import check_calls, check_kinds, check_numbers, check_paths, check_whole
from flower_privdec.errors import ScenarioError


def check_strategy(given: Mapping[str, Any]) -> None:
    """Refuse options of the wrong kind or out of their range.

    Args:
        given: those of `Routed`, by name.

    Raises:
        ScenarioError: naming the value and the rule.
    """
    shares = {name: given[name] for name in ("participation", "fraction_evaluate", "patience")}
    for name, value in (shares | {"seed": given["seed"]}).items():
        if value is None:
            raise ScenarioError(f"{name}=None must be a number; leave it out for the usual one")
    check_numbers(shares)
    check_whole({"seed": given["seed"]})
    check_paths({"folder": given["folder"]})
    texts = {name: value for name, value in given.items() if name == "name" or name.endswith("_key")}
    check_kinds(texts, (str,), "a text")
    check_calls({name: value for name, value in given.items() if name.endswith("_fn")})
    check_kinds({"topology_options": given["topology_options"]}, (Mapping,), "a dict, such as {'degree': 4}")
    topology = given["topology"]
    if not isinstance(topology, str) and not all(hasattr(topology, each) for each in ("n_peers", "directed", "edges")):
        raise ScenarioError(f"topology={topology!r} must be a name that `privdec list` shows, or a Topology")
    if not 0 < given["participation"] <= 1:
        raise ScenarioError(f"participation={given['participation']} must be in (0, 1], the share of peers in a round")
    if not 0 <= given["fraction_evaluate"] <= 1:
        raise ScenarioError(f"fraction_evaluate={given['fraction_evaluate']} must be in [0, 1]")
    if not given["patience"] >= 0:
        raise ScenarioError(f"patience={given['patience']} must be >= 0 seconds")


def check_start(
    grid: object, arrays: object, rounds: object, timeout: object, configs: Mapping[str, object], evaluate_fn: object
) -> None:
    """Refuse what `start` cannot begin with.

    Raises:
        ScenarioError: naming the value and the rule.
    """
    if not isinstance(grid, Grid):
        raise ScenarioError(
            f"grid is a {type(grid).__name__}: give the one that the ServerApp's main function is given"
        )
    if not isinstance(arrays, ArrayRecord):
        raise ScenarioError(f"initial_arrays is a {type(arrays).__name__}: give ArrayRecord(model.state_dict()) or so")
    if rounds is None or timeout is None:
        raise ScenarioError("num_rounds and timeout must be numbers; leave them out for the usual ones")
    check_whole({"num_rounds": rounds})
    check_numbers({"timeout": timeout})
    if not (rounds >= 0 and timeout > 0):  # type: ignore[operator]
        raise ScenarioError(f"num_rounds={rounds} must be >= 0 and timeout={timeout} > 0 seconds")
    check_kinds(configs, (ConfigRecord,), "a ConfigRecord")
    check_calls({"evaluate_fn": evaluate_fn})
