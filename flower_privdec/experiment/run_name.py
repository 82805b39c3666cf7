"""What a run is called, and the keys of its peers before a salt goes into them; `run_key` has the theory."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from flower_privdec import __version__
from flower_privdec.common.fields import own_modules
from flower_privdec.common.machine import cpu_model
from flower_privdec.common.user_code import without_tokens
from flower_privdec.data import Examples, read_examples
from flower_privdec.experiment.agreement import Agreement
from flower_privdec.experiment.pair_plan import secret_pairs
from flower_privdec.experiment.run_key import (
    KEY_BYTES,
    SEEDED,
    all_data,
    data_id,
    edges_of,
    environment,
    fingerprints,
    is_known_by_its_edges,
    noise_source,
    own_keys,
    partition_name,
    run_id,
    shared_secret,
)
from flower_privdec.privacy.ledger.segments import RunName
from flower_privdec.scenario import Scenario, numbers_hash, own_parts

PORTABLE = "portable"  # the generator whose keys are the same in every runtime and on every machine
PORTABLE_ENVIRONMENT = f"{SEEDED}, flower-privdec {__version__}"  # all that is in those keys of an environment


@dataclass(frozen=True)
class NamedRun:
    """A run's name and its keys, without a salt. Without privacy there are no keys.

    Attributes:
        keys: the keys of the peers hosted here, by global id.
        elsewhere: of the peers hosted elsewhere, if a simulation draws the noise of pairs from them.
        name: what ledgers and checkpoints call the run.
    """

    keys: Mapping[int, bytes]
    elsewhere: Mapping[int, bytes]
    name: RunName


def new_salt() -> str:
    """Return a random salt for one run, or the part of it after a resume: 32 bytes in hexadecimal digits."""
    return secrets.token_hex(KEY_BYTES)


def read_own(agreement: Agreement, peers: np.ndarray, root: str | None, *, whole: bool = False) -> Examples:
    """Read the examples of some peers, before features are extracted.

    Args:
        root, whole: see `OwnParts.of`.
    """
    scenario = agreement.scenario
    targets = agreement.loss.targets
    seed = scenario.seed_of("data")
    return read_examples(scenario.data, seed, scenario.n_peers, peers, root, targets, whole=whole)


def with_features(agreement: Agreement, as_read: Examples) -> Examples:
    """Return examples as the model takes them: `as_read` itself if the scenario extracts no features."""
    section = agreement.scenario.features
    if section is None:
        return as_read

    from flower_privdec.data.features import apply_features  # needs torch

    return replace(as_read, x=apply_features(as_read.x, section))


def without_content(agreement: Agreement) -> list[str]:
    """Return the keys of a private scenario that name a user's own code, whose content cannot be in a run's key.

    Data are in the key as they were read, and a graph by its edges, whichever code made them. Metrics decide no number.
    """
    if agreement.scenario.private is None:
        return []

    known = ["data.", "task.metrics.", "privacy.noise.secrets."]
    if agreement.mixing is None or is_known_by_its_edges(agreement.mixing.topology):
        known.append("topology.")

    names = []
    for key, module in own_modules(agreement.scenario):
        if not key.startswith(tuple(known)) and not module.startswith("flower_privdec."):
            names.append(f"{key}={without_tokens(module)!r}")
    return names


def public_name(agreement: Agreement, source: str = SEEDED) -> RunName:
    """Return the name of a run as a process without its keys computes it."""
    decided = numbers_hash(agreement.scenario)
    return RunName(decided[:32], decided, environment(source, agreement.device))


def rounding(scenario: Scenario, runtime: str) -> str:
    """Return everything besides scenario, device and versions that decides how a simulation rounds its sums.

    Privacy: two runs that round differently under one noise show their data in the last digits of the difference. How
    many blocks an engine's peers fall into follows from the scenario, and the number of workers rounds nothing. Which
    images a process extracts features of together follows from the runtime.
    """
    compute = scenario.compute
    parts = [cpu_model(), runtime, f"threads {compute.threads}", f"memory {compute.memory_mib} MiB"]
    if scenario.features is not None:
        from flower_privdec.data.features import features_version

        parts.append(features_version())
    return ", ".join(parts)


def name_run(
    agreement: Agreement,
    as_read: Examples,
    peers: np.ndarray,
    secret: bytes | None,
    from_system: bool,
    runtime: str,
    *,
    root: str | None,
    whole: bool,
) -> NamedRun:
    """Name a run and make the keys of its peers.

    Args:
        as_read: the examples of the peers hosted here, before features are extracted. The keys are made of these and
            not of the features, because features are rounded differently in batches of different sizes, and all
            processes need the same keys.
        from_system: whether noise and batches come from the operating system; the keys then only name the run.
        secret, runtime, root, whole: see `OwnParts.of`.
    """
    scenario = agreement.scenario
    private = scenario.private
    hardened = private is not None and bool(private.hardened)
    name = public_name(agreement, noise_source(from_system, hardened))

    if private is None:
        # Nothing is drawn from the name. It keeps a run from going on with other data than it began with.
        return NamedRun({}, {}, replace(name, id=data_id(agreement.tested, agreement.initial, as_read)))

    portable = not from_system and scenario.compute.generator == PORTABLE
    if not (from_system or portable):
        name = replace(name, environment=f"{name.environment}, {rounding(scenario, runtime)}")

    pairs = secret_pairs(scenario)
    topology = None if agreement.mixing is None else agreement.mixing.topology
    shared = shared_secret(
        name.scenario,
        PORTABLE_ENVIRONMENT if portable else name.environment,
        agreement.tested,
        agreement.initial,
        agreement.module,
        [edges_of(topology), np.ascontiguousarray(pairs).tobytes()],
        own_parts(scenario),
    )

    prints = fingerprints(as_read, peers)
    prints_elsewhere = dict[int, bytes]()

    # The keys of a simulation follow from all peers' data. A deployed peer knows its own data only, and its keys are
    # secret. A device with data of its own and --insecure-seeds cannot have the others' data: its keys follow from
    # what it has.
    if not (from_system or whole):
        elsewhere = np.setdiff1d(np.arange(scenario.n_peers), peers)
        if len(elsewhere):
            prints_elsewhere = fingerprints(read_own(agreement, elsewhere, root), elsewhere)
        shared += all_data(prints | prints_elsewhere)

    keys = own_keys(shared + (secret or b""), prints)
    keys_elsewhere = own_keys(shared, prints_elsewhere) if len(pairs) else {}

    # Portable keys are the same in every environment, but a run repeated in another one is charged again.
    here = name.environment.encode()
    id_here = run_id({peer: key + here for peer, key in keys.items()})
    return NamedRun(keys, keys_elsewhere, replace(name, id=id_here, partition=partition_name(prints, secret)))
