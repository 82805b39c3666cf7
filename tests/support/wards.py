"""A scenario of three devices with a file each, as an operator has it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flower_privdec.scenario import Scenario, load_scenario

WARD = """\
name: Ward 7
n_peers: {n}
rounds: 4
data: {{dataset: npz, root: "own-{{peer}}.npz", test: public.npz, batch: {{size: 10}}}}
model: {{name: softmax}}
algorithm: {{name: privsgp, learning_rate: 0.5}}
topology: {{name: complete}}
privacy: {{epsilon: 3.0, delta: 1.0e-3}}
network: {{peers: [{peers}]}}
"""


def write_ward(folder: Path, addresses: Sequence[str]) -> Path:
    """Write the scenario's file, the public test set and each device's examples; return the file."""
    draw = np.random.default_rng(0)
    np.savez(folder / "public.npz", x_test=draw.normal(size=(20, 5)).astype("float32"), y_test=np.arange(20) % 3)
    for peer in range(len(addresses)):
        examples = draw.normal(size=(40, 5)).astype("float32")
        np.savez(folder / f"own-{peer}.npz", x_train=examples, y_train=np.arange(40) % 3)
    peers = ", ".join(f'{{address: "{address}"}}' for address in addresses)
    path = folder / "ward.yaml"
    path.write_text(WARD.format(n=len(addresses), peers=peers))
    return path


def ward(folder: Path, addresses: Sequence[str] = ("10.0.0.1:71", "10.0.0.2:71", "10.0.0.3:71")) -> Scenario:
    """Write the files, and read the scenario."""
    return load_scenario(write_ward(folder, addresses))
