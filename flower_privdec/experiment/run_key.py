"""What tells one run from every other: a hash of all that decides its numbers, from which its secrets are drawn.

Two runs that differ in anything (algorithm, budget, seed, one pixel of a peer's data, a line of the model's code,
device, versions) have different keys and share no draw, so that no noise cancels between them; the same
run, in whatever runtime, has the same keys and gives the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from flower_privdec import __version__
from flower_privdec.common.user_code import Given
from flower_privdec.data import Examples, PublicSet
from flower_privdec.data.sparse_rows import Features, SparseRows
from flower_privdec.experiment.model_code import code_of, held_by, installed_version
from flower_privdec.privacy.noise import has_triton

KEY_BYTES = 32
SIMULATED = "fast"  # names the noise stream of simulations in their keys: another name would draw other numbers


def environment(source: str, device: torch.device) -> str:
    """Return what beside the scenario and the data decides the numbers: noise source, device and versions.

    Args:
        source: SIMULATED, or of a deployed peer `system` or `exact`.
    """
    parts = [f"flower-privdec {__version__}", f"torch {torch.__version__}", f"numpy {np.__version__}"]
    if source == SIMULATED:
        compiler = "triton" if device.type == "cuda" and has_triton() else "numba"
        parts.append(f"{compiler} {installed_version(compiler)}")
    cpu = f"cpu {torch.backends.cpu.get_cpu_capability()}"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    return ", ".join([source, where, *parts])


def shared_secret(
    scenario: str, environment: str, public: PublicSet, initial: Tensor, module: nn.Module, parts: Sequence[object]
) -> bytes:
    """Return a hash of what all peers of a run have in common.

    Args:
        scenario: the hash of what of the scenario decides the numbers.
        environment: see the function of that name.
        public: the test set, and what of it is for validation, which some algorithms look at.
        module, initial: the model, and its parameters before round 0, [d].
        parts: what else of the run a user may have written: classes, functions, objects of any class, and what was
            given in Python; of data that was given each peer hashes its own.
    """
    sets = [public] if public.validation is None else [public, public.validation]
    tested = b"".join(fingerprint(dataset.x, dataset.y) for dataset in sets)
    model = hashlib.blake2b(initial.detach().cpu().numpy().data, digest_size=KEY_BYTES).digest()
    named = [part for part in parts if not isinstance(part, Given)]
    contents = [part.content for part in parts if isinstance(part, Given) and part.tell is not None]
    code = [*code_of([*module.modules(), *named]), *contents]
    return _hash(scenario.encode(), environment.encode(), tested, model, *code, *held_by(module))


def fingerprint(x: Features, y: Tensor) -> bytes:
    """Return the BLAKE2b hash of examples in their order; private, for it confirms a guess of all of them."""
    kind = "compressed rows" if isinstance(x, SparseRows) else str(x.dtype)
    digest = hashlib.blake2b(repr((tuple(x.shape), kind)).encode(), digest_size=KEY_BYTES)
    for part in x.content() if isinstance(x, SparseRows) else [x.contiguous().numpy()]:
        digest.update(part.data)
    digest.update(y.contiguous().numpy().data)
    return digest.digest()


def own_keys(shared: bytes, examples: Examples, peers: np.ndarray) -> dict[int, bytes]:
    """Return the key of each peer in this run, from which its noise and its batches are drawn.

    Args:
        shared: see `shared_secret`.
        examples: of these peers.
        peers: their global ids.
    """
    keys = {}
    for peer, rows in zip(peers.tolist(), examples.parts, strict=True):
        chosen = torch.from_numpy(rows)
        own = fingerprint(examples.x[chosen], examples.y[chosen])
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
