"""Runs in the smallest blocks, for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from flower_privdec.algorithms.sgp import SGP
from flower_privdec.core import Algorithm
from flower_privdec.core.cohort import Cohort
from flower_privdec.core.exchange import State
from flower_privdec.engine.run import Run
from flower_privdec.engine.workers import partitioning
from flower_privdec.experiment import Experiment
from flower_privdec.privacy.mechanism.declared import one_sum

PEER = 3  # whose process has something happen to it


@contextmanager
def smallest_blocks() -> Iterator[None]:
    """Divide runs inside among workers however small they are."""
    with patch.multiple(partitioning, SPLIT_FROM=0.0, BLOCK_SECONDS=1e-12):
        yield


def whole(
    experiment: Experiment, out: Path, workers: int, resume: bool = False
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Run to the end by so many processes; return the final rows and every evaluation's figures."""
    before = set(children(os.getpid()))  # of other tests
    with smallest_blocks():
        run = Run(experiment, out, workers=workers, resume=resume)
    found = []
    try:
        while run.round_index < experiment.scenario.rounds:
            found.append({name: value for name, value in run.advance().items() if name != "seconds"})
        rows = {name: part.clone() for name, part in run.engine.collected().rows.items()}
        shared = experiment.scenario.n_peers > 1
        assert len(set(children(os.getpid())) - before) == (workers - 1 if shared else 0)
        run.finish()
    finally:
        run.close()
    return rows, found


def children(process: int) -> list[int]:
    """Return the processes that one has forked and that are not gone."""
    found = []
    for task in Path(f"/proc/{process}/task").glob("*"):
        found += [int(child) for child in (task / "children").read_text().split()]
    return [child for child in found if is_alive(child)]


def is_alive(process: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Clumsy(SGP):
    """It raises in the second round of one peer's process, with what it has seen."""

    released = one_sum

    def __init__(self, section: Any) -> None:
        super().__init__(section)
        self.program = (self.stumble, *self.program)

    def stumble(self, cohort: Cohort, state: State) -> None:
        """Raise, or not."""
        if state.round_index == 1 and PEER in state.peers:
            raise LookupError(str(state.rows["x"]))


class Leaving(Clumsy):
    """It ends one peer's process in the second round."""

    released = one_sum

    def stumble(self, cohort: Cohort, state: State) -> None:
        """Leave, or not."""
        if state.round_index == 1 and PEER in state.peers:
            os._exit(7)


class Growing(SGP):
    """It keeps a row that there was not before the first round, and puts others in the place of those it had."""

    released = one_sum

    def __init__(self, section: Any) -> None:
        super().__init__(section)
        self.program = (*self.program, self.keep)

    def keep(self, cohort: Cohort, state: State) -> None:
        """Remember, in tensors of its own."""
        state.rows["before"] = state.rows["x"].clone()
        state.rows["x"], state.rows["w"] = state.rows["x"] * 2, state.rows["w"] * 2


assert issubclass(Growing, Algorithm)
