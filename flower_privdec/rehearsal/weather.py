"""What a rehearsal assumes of the world: links, the speed of devices, and what goes wrong.

All of it is one `FaultSchedule`: the user's file, completed by what the scenario and the command's options say. The
completed one is written to the rehearsal's folder, and gives the same rehearsal again.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from random import Random
from typing import Any

from flower_privdec.common.errors import ScenarioError, option
from flower_privdec.common.formatting import shown
from flower_privdec.peer.faults import FaultSchedule, Links, Slow
from flower_privdec.scenario import Scenario

STEP_SECONDS = 0.1  # of a private step, if nothing is said: a small model on a phone
SAVE_SECONDS = 0.005  # of a write that has to be on disk
EVALUATE_SECONDS = 0.05

# What `network.links` stands for, if the file of faults has no links.
LINKS = {
    "local": Links(latency=0.0002, jitter=0.0001, bandwidth=1e10),
    "lan": Links(latency=0.001, jitter=0.001, bandwidth=1e9),
    "wan": Links(latency=0.04, jitter=0.02, loss=0.001, bandwidth=2e7),
}
SLOW = re.compile(r"(?P<share>[0-9.]+)(?P<percent>%?):(?P<factor>[0-9.eE+-]+)")


def weather(
    scenario: Scenario,
    faults: Path | FaultSchedule | None,
    *,
    random_faults: float | None = None,
    slow: str | None = None,
    step_seconds: float | None = None,
    seed: int | None = None,
) -> FaultSchedule:
    """Return the schedule of a rehearsal.

    Args:
        faults: the user's, or its file.
        random_faults: faults to be drawn, for each peer on average.
        slow: SHARE:FACTOR, such as 20%:5: a share of the peers works so many times slower.
        step_seconds: how long a private step takes on a device that is not slow.
        seed: of all that is drawn here and while it runs; by default that of the file, or the scenario's.

    Raises:
        ScenarioError: an option breaks a rule, or the file does.
    """
    if faults is not None and random_faults is not None:
        raise ScenarioError(
            f"{option('faults')} and {option('random-faults')} both say what goes wrong: give one",
            code="rehearse.faults",
        )
    if step_seconds is not None and not 0 <= step_seconds < math.inf:
        raise ScenarioError(
            f"{option('step-seconds', f'{step_seconds:g}')} must be seconds, 0 or more", code="rehearse.step-seconds"
        )

    given = FaultSchedule()
    where = "faults"
    if isinstance(faults, Path):
        where = str(faults)
        given = FaultSchedule.read(faults)
    elif faults is not None:
        given = faults
    if seed is None:
        seed = given.seed if "seed" in given.model_fields_set else scenario.seed

    changes: dict[str, Any] = {"seed": seed}
    if "links" not in given.model_fields_set:
        changes["links"] = LINKS[scenario.network.links]

    work: dict[Any, float] = {
        "train": train_seconds(scenario, STEP_SECONDS),
        "save": SAVE_SECONDS,
        "evaluate": EVALUATE_SECONDS,
    }
    work |= given.work
    if step_seconds is not None:
        work["train"] = train_seconds(scenario, step_seconds)
    changes["work"] = work

    schedule = given.model_copy(update=changes)
    if random_faults is not None:
        schedule = schedule.model_copy(update={"faults": _drawn(scenario, schedule, random_faults)})
    if slow is not None:
        schedule = schedule.model_copy(update={"faults": [*schedule.faults, *_slow(slow, scenario.n_peers, seed)]})
    schedule.check(scenario.n_peers, where)
    return schedule


def train_seconds(scenario: Scenario, step_seconds: float) -> float:
    """Return how long the steps of a round take."""
    return step_seconds * scenario.algorithm.steps_per_round


def shortest(scenario: Scenario, schedule: FaultSchedule) -> float:
    """Return about how long the run takes if nothing goes wrong, in seconds."""
    links = schedule.links
    a_round = schedule.work.get("train", 0.0) + schedule.work.get("save", 0.0) + 2 * (links.latency + links.jitter / 2)
    return max(1.0, scenario.rounds * a_round)


def slowest_work(schedule: FaultSchedule) -> float:
    """Return how long a work takes at most, on the slowest device."""
    factors: dict[int, float] = {}
    for fault in schedule.faults:
        if isinstance(fault, Slow):
            factors[fault.peer] = factors.get(fault.peer, 1.0) * max(1.0, fault.factor)
    return max(factors.values(), default=1.0) * max(schedule.work.values(), default=0.0)


def _drawn(scenario: Scenario, schedule: FaultSchedule, rate: float) -> list[Any]:
    """Draw so many faults for each peer on average, within the time that the run takes."""
    if not 0 < rate < math.inf:
        raise ScenarioError(
            f"{option('random-faults', f'{rate:g}')} must be above 0: the faults of a peer on average, such as 0.2",
            code="rehearse.random-faults",
        )
    count = max(1, round(rate * scenario.n_peers))
    drawn = FaultSchedule.drawn(schedule.seed, scenario.n_peers, shortest(scenario, schedule), count=count)
    return drawn.faults


def _slow(text: str, n_peers: int, seed: int) -> list[Slow]:
    """Return which peers are slow, by a text SHARE:FACTOR."""
    form = SLOW.fullmatch(text)
    try:
        if form is None:
            raise ValueError
        share = float(form["share"]) / (100 if form["percent"] else 1)
        factor = float(form["factor"])
    except ValueError:
        raise ScenarioError(
            f"{option('slow', shown(text))} must be SHARE:FACTOR, as 20%:5 for a fifth of the peers five times slower",
            code="rehearse.slow",
        ) from None

    if not (0 < share <= 1 and 0 < factor < math.inf):
        raise ScenarioError(
            f"{option('slow', text)}: the share must be above 0 % and at most 100 %, and the factor above 0",
            code="rehearse.slow",
        )

    chosen = Random(f"slow {seed}").sample(range(n_peers), max(1, round(share * n_peers)))
    return [Slow(kind="slow", peer=peer, factor=factor) for peer in sorted(chosen)]
