"""Datasets, their partition among peers, and the sampling of batches."""

from flower_privdec.catalogue import DATASETS, PARTITIONS, SAMPLINGS
from flower_privdec.data.datasets import Dataset, load_dataset
from flower_privdec.data.partition import partition
from flower_privdec.data.peer_data import Batch, PeerData
from flower_privdec.data.sampling import LocalBatch, Sampler

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
