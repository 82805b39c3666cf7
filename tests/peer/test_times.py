"""The times of a peer follow from the links of its network and one deadline."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import get_args

import pytest

from flower_privdec.peer.times import LINKS, Times
from flower_privdec.scenario.sections import NetworkSection

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "network.md"
ROW = re.compile(r"^\| `(\w+)`[^|]*\|[^|]*\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)


def test_the_scenario_knows_the_links_that_have_times() -> None:
    assert get_args(NetworkSection.model_fields["links"].annotation) == tuple(LINKS)
    wanted = Times(start=60.0, deadline=10.0, retry=1.0, give_up=math.inf, standstill=3600.0)
    assert Times.of(NetworkSection()) == wanted


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("deadline", [1e-3, 30.0, 1e9])
def test_a_deadline_changes_only_times_that_would_be_shorter(links: str, deadline: float) -> None:
    times = Times.of(NetworkSection.model_validate({"links": links, "deadline": deadline}))
    usual = LINKS[links]
    standstill = max(usual.standstill, 30 * deadline)
    assert times == Times(max(usual.start, deadline), deadline, usual.retry, usual.give_up, standstill)


def test_the_page_has_the_times_of_all_links() -> None:
    rows = dict[str, Times]()
    for name, start, deadline, retry, minutes in ROW.findall(PAGE.read_text(encoding="utf-8")):
        rows[name] = Times(float(start), float(deadline), float(retry), standstill=60 * float(minutes))
    assert rows == LINKS
