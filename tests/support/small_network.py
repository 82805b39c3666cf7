"""Peers of a scenario as threads of one process, with torch or, run as a program, without it.

    python small_network.py JOBS.json

runs each job as small peers, in a process in which nothing heavy can be imported, and leaves what `run` returns beside
its folder. It imports no torch: the same functions run in a test, with torch.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

HEAVY = ("torch", "numba", "llvmlite", "scipy", "sklearn", "networkx", "jinja2", "matplotlib", "pandas")
# Each model, noise, way of drawing, optimizer, regularizer and codec once, and each kind of exchange.
VARIANTS: dict[str, list[str]] = {
    "softmax": [],
    "mlp": ["model={name: mlp, hidden: [9, 7], activation: tanh}", "compute.dtype=float64"],
    "relu": ["model={name: mlp, hidden: [9]}", "data.batch={sampling: uniform, size: 12}"],
    "linear": ["model={name: linear, bias: false}", "data.batch={sampling: shuffle, size: 12}"],
    "text": [
        "data={dataset: npz, root: 'HERE/words-{peer}.npz', test: HERE/words-test.npz, "
        "vocabulary: 20, batch: {size: 12}}",
        # Other initial parameters of a table differ in their last bits, and would key other noise.
        "model={name: text, width: 5, hidden: [4], init: zeros}",
    ],
    "open": ["privacy=none", "data.batch={sampling: full}"],
    "cancelling": ["privacy.noise={kind: cancelling, colluding: 1}", "data.at_least=60"],
    "adam": ["algorithm={name: privsgp, learning_rate: 0.01, optimizer: {name: adam}}"],
    "momentum": ["algorithm={name: privsgp, learning_rate: 0.1, optimizer: {name: momentum}}"],
    "gossip": ["algorithm={name: dp-dpsgd, learning_rate: 0.5}", "topology.name=ring"],
    "replies": ["algorithm={name: pdsl, learning_rate: 0.1}", "topology.name=complete", "data.validation=20"],
    "table": ["algorithm={name: privsgp-vr, learning_rate: 0.1}"],
    # A dual average that is moved towards 0, and one in a ball: each has a step of its own.
    "l1": [
        "algorithm={name: dp-dda, regularizer: {kind: elastic-net, weight: 0.01, l1_weight: 0.001}}",
        "topology.name=complete",
    ],
    "ball": [
        "algorithm={name: dp-dda, schedule: convex, regularizer: {kind: ball, radius: 0.1}}",
        "topology.name=torus",
    ],
    "bfloat16": ["network.codec=bfloat16"],
    "int4": ["network.codec=int4"],
    "top-k": ["network.codec=top-k"],
    "random-k": ["network.codec=random-k"],
    "robust": [
        "algorithm={name: dp-dpsgd, learning_rate: 0.5}",
        "topology.name=complete",
        "network.robust={kind: clipped, byzantine: 1}",
    ],
}
ROUNDED = {"bfloat16": 1e-3, "int4": 2e-2}  # of numbers that round to one of two neighbours on the wire


@contextmanager
def known_keys() -> Iterator[None]:
    """Let processes of peers, one after the other, draw private keys that follow from their order."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    numbers = itertools.count(1)

    def draw() -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(next(numbers).to_bytes(32, "little"))

    with patch.object(X25519PrivateKey, "generate", draw):
        yield


def run(
    path: Path, settings: Sequence[str], folder: Path, *, insecure: bool = True, until: int | None = None
) -> dict[str, np.ndarray]:
    """Run all peers of a scenario and return their rows, stacked, and what ε each has spent.

    Args:
        path: the scenario's file.
        settings: laid over it; HERE is the file's folder.
        folder: of the peers' folders.
        insecure: draw noise and batches from the scenario's seed.
        until: the round at which all peers stop; left out, the end.
    """
    from flower_privdec.common.errors import StoppedError
    from flower_privdec.network.peer.driver import Driver, PeerDevice
    from flower_privdec.network.peer.foreground import running_peer
    from flower_privdec.network.transport.tls import Authority, identities
    from flower_privdec.network.transport.transport import MemoryNetwork
    from flower_privdec.scenario import load_scenario

    scenario = load_scenario(path, [setting.replace("HERE", str(path.parent)) for setting in settings])
    authority = Authority.create(scenario.name)
    network = MemoryNetwork()
    peers = []
    with known_keys():
        for peer, name in enumerate(identities(scenario)):
            transport = network.transport(peer)
            place = folder / f"peer-{peer}"
            device = PeerDevice(peer, place, authority.issue(name), (), insecure_seeds=insecure, transport=transport)
            peers.append(running_peer(scenario, device))

    def stop_at(running: Any) -> None:
        if until is not None and running.state.round_index >= until:
            for peer in peers:  # none waits for one that has stopped
                peer.stop()

    def finish(peer: Any) -> Any:
        driver = Driver(peer)
        try:
            driver.open()
            driver.run(stop_at)
        except StoppedError:
            pass
        except BaseException:
            for other in peers:
                other.stop()
            raise
        finally:
            driver.close()
        return peer

    with ThreadPoolExecutor(len(peers)) as pool:
        done = list(pool.map(finish, peers))
    rows = {name: np.concatenate([peer.state.rows[name].numpy() for peer in done]) for name in done[0].state.rows}
    rows["epsilon"] = np.array([float(peer.status()["epsilon"]) for peer in done])
    rows["round"] = np.array([peer.state.round_index for peer in done])
    return rows


class Without:
    """Finds what a finder of modules finds, but none of the packages that a small peer does without."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in HEAVY:
            return None
        return self._finder.find_spec(name, path, target)


def main(jobs: Path) -> None:
    """Run jobs without what a small peer does without."""
    sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
    for job in json.loads(jobs.read_text()):
        folder = Path(job.pop("folder"))
        rows = run(Path(job.pop("path")), job.pop("settings"), folder, **job)
        np.savez(folder.with_suffix(".npz"), **rows)
    assert not set(HEAVY) & sys.modules.keys()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
