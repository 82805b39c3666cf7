"""The scenario file: one experiment, typed and strict, every default visible."""

from flower_privdec.scenario.loading import load_scenario, numbers_hash, parse_scenario, scenario_hash, to_yaml
from flower_privdec.scenario.schema import Scenario

__all__ = ["Scenario", "load_scenario", "numbers_hash", "parse_scenario", "scenario_hash", "to_yaml"]
