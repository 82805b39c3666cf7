"""The scenario file: one experiment, typed and strict, every default visible."""

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
from flower_privdec.scenario.sections import OwnAlgorithmSection, Scenario

__all__ = [
    "OwnAlgorithmSection",
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
