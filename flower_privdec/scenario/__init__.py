"""The scenario file: one experiment, typed and strict, every default visible.

What is named here is imported when it is first used: an app's peer needs only `app_sections`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flower_privdec.scenario.algorithm_sections import DescentSection
    from flower_privdec.scenario.loading import (
        anchored,
        load_scenario,
        numbers_hash,
        own_parts,
        parse_scenario,
        scenario_hash,
        seedless_hash,
        to_yaml,
    )
    from flower_privdec.scenario.sections import Scenario

_MODULES = {"DescentSection": "algorithm_sections", "Scenario": "sections"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULES.get(name, 'loading')}")
    return getattr(module, name)


__all__ = [
    "DescentSection",
    "Scenario",
    "anchored",
    "load_scenario",
    "numbers_hash",
    "own_parts",
    "parse_scenario",
    "scenario_hash",
    "seedless_hash",
    "to_yaml",
]
