"""The parts of pages that are made from the code, inserted at `<!-- made: NAME -->`."""

from __future__ import annotations

import re
from collections.abc import Callable

from flower_privdec.common.exit_codes import exit_code_table
from tools.docs.algorithm_table import algorithm_table
from tools.docs.command_reference import command_reference
from tools.docs.findings_table import findings_table
from tools.docs.house import picture, room_table
from tools.docs.scenario_reference import scenario_reference
from tools.docs.study_reference import study_reference
from tools.side_by_side.results import load, tables

MARK = re.compile(r"<!-- made: (\S+) -->")
PARTS: dict[str, Callable[[], str]] = {
    "algorithms": algorithm_table,
    "commands": command_reference,
    "exit-codes": exit_code_table,
    "findings": findings_table,
    "house": picture,
    "rooms": room_table,
    "scenario": scenario_reference,
    "side-by-side": lambda: tables(load()),
    "study": study_reference,
}
