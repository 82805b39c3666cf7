"""Datasets, their partition among peers, and the sampling of batches."""

from flower_privdec.data.datasets import DATASETS, Dataset, load_dataset
from flower_privdec.data.partition import PARTITIONS, partition
from flower_privdec.data.peer_data import Batch, PeerData
from flower_privdec.data.sampling import SAMPLINGS, LocalBatch, Sampler

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "SAMPLINGS",
    "Batch",
    "Dataset",
    "LocalBatch",
    "PeerData",
    "Sampler",
    "load_dataset",
    "partition",
]
