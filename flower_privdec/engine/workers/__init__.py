"""One cohort in blocks of peers, divided among processes that share its rows; the same bits for any number of them."""

from flower_privdec.engine.workers.forked import GoneError
from flower_privdec.engine.workers.partitioning import Partitioning, partition_cohort
from flower_privdec.engine.workers.worker_pool import WorkerPool, start_engine

__all__ = ["GoneError", "Partitioning", "WorkerPool", "partition_cohort", "start_engine"]
