"""A ledger's file, read again by other code: what each run charged each peer, and what that costs."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

from tools.battery.independent import Step, bracket, counted

Charges = dict[str, dict[int, list[dict[str, Any]]]]  # by run and peer, releases


def charges(path: Path) -> Charges:
    """Return all that a ledger of one segment charges."""
    by_run: Charges = defaultdict(lambda: defaultdict(list))
    last: dict[str, Any] = {}
    header, *lines = map(json.loads, path.read_text().splitlines())
    for line in [*header.get("charged", ()), *lines]:
        if "run" in line:
            last = line
        for charge in last["charges"]:
            for start, stop in charge["peers"]:
                for peer in range(start, stop):
                    by_run[last["run"]][peer] += [part["release"] for part in charge["releases"]]
    return by_run


def composed_ledger(path: Path, delta: float) -> tuple[float, float]:
    """Return bounds of the ε of all runs of a ledger, for an example at the dearest peer of each."""
    runs = []
    for peers in charges(path).values():
        kinds = {str(sorted(map(str, releases))): releases for releases in peers.values()}
        runs.append(list(kinds.values()))
    lows, highs = [0.0], [0.0]
    for choice in product(*runs):
        releases = [release for some in choice for release in some]
        lows.append(bracket(counted(_steps(releases, below=True)), delta)[0])
        highs.append(bracket(counted(_steps(releases, below=False)), delta)[1])
    return max(lows), max(highs)


def _steps(releases: list[dict[str, Any]], *, below: bool) -> list[Step]:
    steps: list[Step] = []
    for release in releases:
        noise = release["noise_multiplier"]
        drawn = float("inf") if noise == 0 else 1 / noise
        rate, idle = release["sampling_rate"], release["idle"] * drawn if release["idle"] else 0.0
        if release["sampling"] in ("full", "shuffle"):
            rate = 1.0
        elif release["sampling"] in ("uniform", "blocks") and not below:
            rate, idle = 1.0, 0.0
        steps += [(rate, drawn, idle)] * release["steps"]
    return steps
