"""Datasets, their partition among peers, and the sampling of batches."""

from flower_privdec.data.datasets import Examples, PublicSet, read_examples, read_public
from flower_privdec.data.partitions import partition
from flower_privdec.data.sampling import Batch, LocalBatch, PeerData, Sampler

__all__ = [
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
