"""All shards of a run in threads of this process, over gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from salts import ONE_SALT
from torch.distributed import FileStore

from flower_privdec.engine.shards.communication_plan import Shards
from flower_privdec.engine.shards.process_group import ProcessGroup
from flower_privdec.engine.shards.rendezvous import THIS_MACHINE
from flower_privdec.engine.shards.shard_engine import ShardEngine
from flower_privdec.experiment import Experiment
from flower_privdec.scenario import Scenario

Found = TypeVar("Found")
MINUTE = 60.0


def in_shards(
    folder: Path, shards: Shards, work: Callable[[ProcessGroup], Found], patience: float = MINUTE
) -> list[Found]:
    """Do some work with each shard's process_group at once, and return what each found; the first error is raised."""
    return [future.result() for future in in_futures(folder, shards, work, patience)]


def in_futures(
    folder: Path, shards: Shards, work: Callable[[ProcessGroup], Found], patience: float = MINUTE
) -> list[Future[Found]]:
    """Do the same, and return each shard's end, whatever it is."""

    def one(shard: int) -> Found:
        process_group = ProcessGroup.join(
            FileStore(str(folder / "rendezvous"), len(shards)), shard, shards, THIS_MACHINE, patience
        )
        try:
            return work(process_group)
        finally:
            process_group.close()

    (folder / "rendezvous").unlink(missing_ok=True)
    with ThreadPoolExecutor(len(shards)) as threads:
        return [threads.submit(one, shard) for shard in range(len(shards))]


def engines_of(scenario: Scenario, shards: Shards) -> Callable[[ProcessGroup], ShardEngine]:
    """Return what makes each shard's engine; what it is made of is made here, for threads draw from one generator."""
    views: Sequence[Experiment] = [
        Experiment.build(scenario, shards.peers(shard), ONE_SALT) for shard in range(len(shards))
    ]

    def engine(process_group: ProcessGroup) -> ShardEngine:
        view = views[process_group.shard]
        cohort = view.cohort()
        return ShardEngine(view.algorithm, cohort, view.initial_state(cohort), process_group)

    return engine
