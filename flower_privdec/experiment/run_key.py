"""The keys of a run's peers, from which a simulation draws noise and batches, and the names that follow from them.

Theory. A simulation draws its noise from keys, so that it can be repeated. Noise protects only as long as no other run
has the same: the difference of two runs with one noise is a difference of private sums, without noise. So a key is a
hash of everything that decides the numbers of a run:

    what                                      hashed in
    the scenario, but for names and paths     scenario.numbers_hash
    device, processor, versions               environment
    how sums are rounded                      run_name.rounding
    test set, initial model, graphs, code     shared_secret
    every peer's examples                     all_data, fingerprints
    the peer, and its own examples            own_keys

Two runs that differ in any of it (a budget, one pixel at some peer, an edge of a graph's file) have different keys and
share no draw. The same run has the same keys and gives the same bits. What is built is hashed as it was built: tensors,
examples and edges, whichever code or file made them.

If in doubt, keys differ: the cost is a run that draws and pays again, while equal keys could reveal data.

What a user's own code computes cannot be known, as it may read a file whenever it is called. A run with such code has a
random *salt* in its keys (`salted`), and shares its noise with no other run. The salt is kept nowhere: the code of a
resumed run, or of a copy of its folder, may read other files, so these draw, and pay for, numbers of their own from the
checkpoint on. The source of the code is in the key too, only to refuse to continue a run with other code.

The keys of a deployed peer have its secret in them and only name its run. Its noise and batches come from the operating
system.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from flower_privdec import __version__
from flower_privdec.common.deferred import is_small, nn, torch
from flower_privdec.common.user_code import Given
from flower_privdec.data import Examples, PublicSet
from flower_privdec.experiment.checkpoint import numbers_of
from flower_privdec.experiment.source_code import code_of, installed_version
from flower_privdec.graph.topology import CompleteTopology, RandomEdges, StaticTopology, Topology
from flower_privdec.models import padding_rows
from flower_privdec.privacy.noise import has_triton
from flower_privdec.rows.sparse_rows import Features, SparseRows

if TYPE_CHECKING:
    from torch import Tensor

DIGEST_BYTES = 32


def fingerprint(x: Features, y: Tensor) -> bytes:
    """Return the BLAKE2b hash of examples in their order. It is private: it could confirm a guess of them."""
    is_sparse = isinstance(x, SparseRows)
    if isinstance(x, SparseRows):
        arrays = [torch.from_numpy(part) for part in x.content()]
    else:
        arrays = [x]

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


KEY_BYTES = 32
# Sources of noise. Their names are in the keys, so another name would draw other numbers.
SEEDED = "fast"  # the noise stream of simulations
SYSTEM = "system"  # the operating system's generator, which is also the name of its `compute.generator`
EXACT = "exact"  # the same, rounded exactly


def noise_source(from_system: bool, hardened: bool) -> str:
    """Name the source of a peer's noise, as `environment` and `noise_statement.NOISE` know it."""
    if not from_system:
        return SEEDED
    return EXACT if hardened else SYSTEM


PLAIN = (bool, int, float, complex, str, bytes, type(None))


# --- what is in a key ---


def environment(source: str, device: torch.device) -> str:
    """Return everything besides scenario and data that decides the numbers: noise source, device and versions.

    Numbers that come from the operating system never come again, whatever the versions are. So a run of such noise may
    go on with others, and a deployed peer after an update.

    Args:
        source: of the noise, see `noise_source`.
    """
    if source != SEEDED:
        return f"{source}, flower-privdec {__version__}"

    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    elif is_small():
        processor = f"cpu {platform.machine()}"
    else:
        processor = f"cpu {torch.backends.cpu.get_cpu_capability()}"

    parts = [source, processor]
    parts += [f"flower-privdec {__version__}", f"torch {torch.__version__}", f"numpy {np.__version__}"]
    if not is_small():
        compiler = "triton" if device.type == "cuda" and has_triton() else "numba"
        parts.append(f"{compiler} {installed_version(compiler)}")
    return ", ".join(parts)


def shared_secret(
    scenario: str,
    environment: str,
    tested: bytes,
    initial: Tensor,
    module: nn.Module,
    graphs: Iterable[bytes],
    parts: Sequence[object],
) -> bytes:
    """Return a hash of what all peers of a run have in common.

    Args:
        scenario: the hash of what in the scenario decides the numbers.
        environment: see the function of that name.
        tested: the fingerprint of the test set, see `fingerprint_of`.
        module, initial: the model, and its parameters before round 0, [d].
        graphs: the edges on which models are mixed, and those of pairs that share secrets, see `edges_of`.
        parts: what else of the run a user may have written: classes, functions, objects of any class, and what was
            given in Python. Given data are left out, as each peer hashes its own.
    """
    model = hashlib.blake2b(numbers_of(initial), digest_size=KEY_BYTES).digest()

    # The rows of embeddings for padding stay as they are. A run that noised them too has other numbers, and needs
    # other keys: with the same noise the difference of both would be one of private sums.
    padding = padding_rows(module)
    if padding:
        model += repr(sorted(padding.items())).encode()

    named = [part for part in parts if not isinstance(part, Given)]
    given = [part.content for part in parts if isinstance(part, Given) and part.tell is not None]
    code = [*code_of([*module.modules(), *named]), *given]

    return _hash(scenario.encode(), environment.encode(), tested, model, _hash(*graphs), *code, *held_by(module))


def fingerprint_of(public: PublicSet) -> bytes:
    """Return the fingerprints of a test set, and of its part for validation, if there is one, together."""
    sets = [public] if public.validation is None else [public, public.validation]
    return b"".join(fingerprint(dataset.x, dataset.y) for dataset in sets)


def edges_of(topology: Topology | None) -> bytes:
    """Return what a graph is: its kind, and the edges of all its rounds together.

    Which of them a round uses follows from the scenario. Those of a complete graph follow from the number of peers, and
    may be too many to list.
    """
    if topology is None:
        return b""
    kind = f"{type(topology).__name__} {topology.name} {topology.directed} ".encode()
    graph = topology.supergraph if isinstance(topology, RandomEdges) else topology
    if isinstance(graph, CompleteTopology):
        return kind
    return kind + np.ascontiguousarray(graph.support(), dtype=np.int64).tobytes()


def is_known_by_its_edges(topology: Topology | None) -> bool:
    """Return whether `edges_of` tells a graph from all others that a user's own function could return."""
    return topology is None or type(topology) in (StaticTopology, CompleteTopology)


def held_by(module: nn.Module) -> Iterator[bytes]:
    """Yield what modules hold beside trained parameters: numbers, strings, tensors and constants, by their names."""
    for path, part in module.named_modules():
        yield f"{path} {type(part).__module__}.{type(part).__qualname__}".encode()

        held = dict(vars(part))
        held |= dict(part.named_buffers(recurse=False))
        for name, parameter in part.named_parameters(recurse=False):
            if not parameter.requires_grad:
                held[name] = parameter.detach()

        for name, value in sorted(held.items()):
            if isinstance(value, nn.Parameter):
                continue
            if isinstance(value, torch.Tensor):
                # A tensor of another layout has no bytes to hash; its module's code has a salt.
                if value.layout is torch.strided:
                    described = f"{value.dtype} {tuple(value.shape)}".encode()
                    yield name.encode() + described + hashlib.sha256(numbers_of(value)).digest()
            elif _is_plain(value):
                yield name.encode() + repr(value).encode()


def _is_plain(value: object) -> bool:
    """Return whether the text of a value tells all of it."""
    if isinstance(value, tuple | list):
        return all(isinstance(item, PLAIN) for item in value)
    return isinstance(value, PLAIN)


def all_data(prints: Mapping[int, bytes]) -> bytes:
    """Return a hash of the data of all peers of a simulation, from their fingerprints.

    Privacy: a peer's later steps begin at what others sent it, so that other data of another peer change its numbers.
    """
    return _hash(*(prints[peer] for peer in sorted(prints)))


# --- keys ---


def own_keys(shared: bytes, prints: Mapping[int, bytes]) -> dict[int, bytes]:
    """Return the key of each peer in this run, from which its noise and its batches are drawn.

    Args:
        shared: see `shared_secret`; in a simulation with `all_data`.
        prints: the fingerprint of each peer's examples, by global id.
    """
    return {peer: _hash(shared, str(peer).encode(), own) for peer, own in prints.items()}


def salted(keys: Mapping[int, bytes], salt: str) -> dict[int, bytes]:
    """Return keys that no run with another salt has."""
    return {peer: _hash(key, salt.encode()) for peer, key in keys.items()}


# --- names that reveal no key ---


def run_id(keys: Mapping[int, bytes]) -> str:
    """Return the name of a run of some peers, 32 hexadecimal digits: a hash that does not reveal their keys."""
    return _hash(b"run", *(keys[peer] for peer in sorted(keys))).hex()[:32]


def partition_name(prints: Mapping[int, bytes], secret: bytes | None) -> str:
    """Return the name of who holds which examples, 32 hexadecimal digits: the same in all runs of this partition.

    Args:
        prints: see `own_keys`.
        secret: the secret of a deployed peer, without which no one can confirm a guess of its examples by the name.
    """
    parts = [str(peer).encode() + b" " + prints[peer] for peer in sorted(prints)]
    return _hash(b"partition", secret or b"", *parts).hex()[:32]


def data_id(tested: bytes, initial: Tensor, examples: Examples) -> str:
    """Return the name of a run without privacy: a hash of its data and of the model before round 0.

    Args:
        tested: the fingerprint of the test set, see `fingerprint_of`.
        examples: the training examples, before features are extracted.

    It confirms a guess of all examples at once, and stays with the checkpoints of those who have them.
    """
    model = bytes(numbers_of(initial))
    parts = [fingerprint(*examples_of(examples, rows)) for rows in examples.parts]
    return _hash(b"data", model, tested, *parts).hex()[:32]


def _hash(*parts: bytes) -> bytes:
    # Each part goes after its length, so that no two lists of parts are the same bytes.
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
