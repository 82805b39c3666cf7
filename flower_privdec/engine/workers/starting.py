"""The engine of a run: in one piece, or in blocks by as many processes as the scenario says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from flower_privdec.core import Gather, Mix, State
from flower_privdec.core.cohort import Cohort
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.workers.partitioning import deal
from flower_privdec.engine.workers.worker_pool import Crew
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.evaluation import try_models


def start_engine(
    experiment: Experiment,
    cohort: Cohort,
    state: State,
    leave: Iterable[Callable[[], None]] = (),
    workers: int | None = None,
) -> Engine | Crew:
    """Return the engine that goes on from a state.

    Args:
        cohort: of all peers.
        leave: lets go, in a forked process, of what this one alone holds: locks.
        workers: how many processes, in place of the scenario's `compute.workers`.

    Raises:
        ScenarioError: so many cannot be had here.
    """
    dealing = deal(experiment, workers)
    crossing = {name for item in experiment.algorithm.program if isinstance(item, Mix | Gather) for name in item.names}
    if len(dealing.blocks) == 1 or not crossing <= state.rows.keys():
        return Engine(experiment.algorithm, cohort, state)
    return Crew(experiment.algorithm, cohort, state, dealing, partial(try_models, experiment), leave)
