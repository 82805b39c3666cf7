"""Hashes of what was built or read: examples, tensors and arrays, each with its type and shape."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from flower_privdec.data import Examples
from flower_privdec.experiment.checkpoint import numbers_of
from flower_privdec.rows.sparse_rows import Features, SparseRows

DIGEST_BYTES = 32


def fingerprint(x: Features, y: Tensor) -> bytes:
    """Return the BLAKE2b hash of examples in their order. It is private: it could confirm a guess of them."""
    is_sparse = isinstance(x, SparseRows)
    arrays = [torch.from_numpy(part) for part in x.content()] if isinstance(x, SparseRows) else [x]

    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update(repr((tuple(x.shape), is_sparse)).encode())
    # Each array goes after its type and shape, so that no two sets of arrays are the same bytes.
    for array in (*arrays, y):
        digest.update(f"{array.dtype} {tuple(array.shape)} ".encode())
        digest.update(numbers_of(array))
    return digest.digest()


def fingerprints(examples: Examples, peers: np.ndarray) -> dict[int, bytes]:
    """Return the fingerprint of each peer's examples, by global id."""
    prints = {}
    for peer, rows in zip(peers.tolist(), examples.parts, strict=True):
        prints[peer] = fingerprint(*examples_of(examples, rows))
    return prints


def examples_of(examples: Examples, rows: np.ndarray) -> tuple[Features, Tensor]:
    """Return one peer's examples, in their order."""
    chosen = torch.from_numpy(rows)
    return examples.x[chosen], examples.y[chosen]


def content_of(arrays: Iterable[np.ndarray]) -> bytes:
    """Return a hash of arrays, their types and their shapes."""
    return tensors_hash({str(place): torch.from_numpy(array) for place, array in enumerate(arrays)}).encode()


def constants_hash(module: nn.Module) -> str:
    """Return a hash of a model's frozen parameters and buffers, which all peers must have alike; "" if it has none.

    The trained parameters follow from the scenario, but constants may come from a file of each peer's.
    """
    constants: dict[str, Tensor] = dict(module.named_buffers())
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            constants[name] = parameter
    return tensors_hash(constants) if constants else ""


def tensors_hash(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of tensors with their names, types and shapes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(numbers_of(tensor))
    return digest.hexdigest()
