"""Datasets, their partition among peers, and the sampling of batches."""

from flower_privdec.data.datasets import DATASETS, Examples, PublicSet, read_examples, read_public
from flower_privdec.data.partition import PARTITIONS, partition
from flower_privdec.data.peer_data import Batch, PeerData
from flower_privdec.data.sampling import SAMPLINGS, LocalBatch, Sampler

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "SAMPLINGS",
    "Batch",
    "Examples",
    "LocalBatch",
    "PeerData",
    "PublicSet",
    "Sampler",
    "partition",
    "read_examples",
    "read_public",
]
