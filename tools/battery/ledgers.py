"""A ledger's file, read again by other code: what each run charged each peer, and what that costs."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

from tools.battery.independent import Step, bracket, counted

Charges = dict[str, dict[int, list[dict[str, Any]]]]  # by partition of the data and peer, releases


def charges(path: Path) -> Charges:
    """Return all that a ledger of one segment charges, by partition, in which each peer holds the same examples."""
    by_partition: Charges = defaultdict(lambda: defaultdict(list))
    last: dict[str, Any] = {}
    header, *lines = map(json.loads, path.read_text().splitlines())
    for line in [*header.get("charged", ()), *lines]:
        if "run" in line:
            last = line
        name = last.get("partition") or last["run"]
        for charge in last["charges"]:
            for start, stop in charge["peers"]:
                for peer in range(start, stop):
                    by_partition[name][peer] += [part["release"] for part in charge["releases"]]
    return by_partition


def composed_ledger(path: Path, delta: float, colluding: int | None = None) -> tuple[float, float]:
    """Return bounds of the ε of all that a ledger charges, for an example at the dearest peer of each partition.

    Args:
        colluding: with how many peers the adversary colludes; None for all.
    """
    partitions = []
    for peers in charges(path).values():
        kinds = {str(sorted(map(str, releases))): releases for releases in peers.values()}
        partitions.append(list(kinds.values()))
    lows, highs = [0.0], [0.0]
    for choice in product(*partitions):
        releases = [release for some in choice for release in some]
        lows.append(bracket(counted(_steps(releases, colluding, below=True)), delta)[0])
        highs.append(bracket(counted(_steps(releases, colluding, below=False)), delta)[1])
    return max(lows), max(highs)


def _steps(releases: list[dict[str, Any]], colluding: int | None, *, below: bool) -> list[Step]:
    steps: list[Step] = []
    for release in releases:
        noise = release["noise_multiplier"]
        if colluding is not None:
            noise = next((larger for q, larger in release.get("against", ()) if q >= colluding), noise)
        drawn = float("inf") if noise == 0 else 1 / noise
        rate, idle = release["sampling_rate"], release["idle"] * drawn if release["idle"] else 0.0
        if release["sampling"] in ("full", "shuffle"):
            rate = 1.0
        elif release["sampling"] in ("uniform", "blocks") and not below:
            rate, idle = 1.0, 0.0
        steps += [(rate, drawn, idle)] * release["steps"]
    return steps
