"""What tells one run from every other: a hash of all that decides its numbers, from which its secrets are drawn.

Two runs that differ in anything (algorithm, budget, seed, one pixel of a peer's data, a line of the model's code,
generator, device, versions) have different keys and share no draw, so that no noise cancels between them; the same
run, in whatever runtime, has the same keys and gives the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from flower_privdec import __version__
from flower_privdec.data import Dataset
from flower_privdec.experiment.model_code import code_of, held_by, installed_version

KEY_BYTES = 32


def environment(generator: str, device: torch.device) -> str:
    """Name what beside the scenario and the data decides the numbers: generator, device and versions."""
    parts = [f"flower-privdec {__version__}", f"torch {torch.__version__}", f"numpy {np.__version__}"]
    if generator == "fast":
        parts.append(f"numba {installed_version('numba')}")
    cpu = f"cpu {torch.backends.cpu.get_cpu_capability()}"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    return ", ".join([generator, where, *parts])


def shared_secret(
    scenario: str, environment: str, dataset: Dataset, module: nn.Module, initial: Tensor, factory: str | None
) -> bytes:
    """Return a hash of what all peers of a run have in common.

    Args:
        scenario: the hash of what of the scenario decides the numbers.
        environment: see the function of that name.
        dataset: whose public test set some algorithms look at.
        module, initial: the model and its initial parameters [d].
        factory: what made a user's own model, `package.module:function`.
    """
    tested = fingerprint(dataset.x_test, dataset.y_test)
    model = hashlib.blake2b(initial.detach().cpu().numpy().data, digest_size=KEY_BYTES).digest()
    return _hash(scenario.encode(), environment.encode(), tested, model, *code_of(module, factory), *held_by(module))


def fingerprint(x: Tensor, y: Tensor) -> bytes:
    """Return the BLAKE2b hash of examples in their order; private, for it confirms a guess of all of them."""
    digest = hashlib.blake2b(repr((tuple(x.shape), str(x.dtype))).encode(), digest_size=KEY_BYTES)
    digest.update(x.contiguous().numpy().data)
    digest.update(y.contiguous().numpy().data)
    return digest.digest()


def own_keys(shared: bytes, dataset: Dataset, parts: Mapping[int, np.ndarray]) -> dict[int, bytes]:
    """Return the key of each peer in this run, from which its noise and its batches are drawn.

    Args:
        shared: see `shared_secret`.
        dataset: the training examples.
        parts: which of them each peer holds.
    """
    keys = {}
    for peer, rows in parts.items():
        chosen = torch.from_numpy(rows)
        own = fingerprint(dataset.x_train[chosen], dataset.y_train[chosen])
        keys[peer] = _hash(shared, str(peer).encode(), own)
    return keys


def run_id(keys: Mapping[int, bytes]) -> str:
    """Return the name of a run of some peers, 32 hexadecimal digits: a hash of their keys, which it does not tell."""
    return _hash(b"run", *(keys[peer] for peer in sorted(keys))).hex()[:32]


def _hash(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
