"""The scenario file: one experiment, typed and strict, every default visible."""

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
