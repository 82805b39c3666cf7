"""What all contestants share: the task, the images, their partition, the model, and its evaluation."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

# Published with MNIST
MEAN = 0.1307
STD = 0.3081
SHARES_SEED = 1


def given() -> dict:
    """Return the task: its data, peers, rounds and privacy, and the path of the outcome."""
    return json.loads(Path(os.environ["SIDE_BY_SIDE_TASK"]).read_text())


def images(folder: str, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return MNIST's images [N, 784], scaled as usual, and their labels [N], from the original files."""
    name = "train" if train else "t10k"
    raw = Path(folder) / "MNIST" / "raw"
    pixels = np.fromfile(raw / f"{name}-images-idx3-ubyte", np.uint8)[16:].reshape(-1, 784)
    labels = np.fromfile(raw / f"{name}-labels-idx1-ubyte", np.uint8)[8:]
    scaled = (pixels.astype(np.float32) / 255 - MEAN) / STD
    return torch.from_numpy(scaled), torch.from_numpy(labels.astype(np.int64))


def shares(n_images: int, n_peers: int) -> list[np.ndarray]:
    """Partition the images at random into equal parts."""
    return np.array_split(np.random.default_rng(SHARES_SEED).permutation(n_images), n_peers)


def model(hidden: int) -> nn.Module:
    """Return the MLP 784-hidden-10 with torch's own initial values, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def accuracy(network: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the fraction of images that a model labels correctly."""
    with torch.no_grad():
        return float((network.eval()(x).argmax(1) == y).float().mean())


def classic(task: dict) -> float:
    """Return the noise over the clip norm by the classic formula for the Gaussian mechanism, which some tools use."""
    return math.sqrt(2 * math.log(1.25 / task["delta"])) / task["epsilon"]


class Outcome:
    """A contestant's outcome: when training began and ended, and its results."""

    def __init__(self, task: dict) -> None:
        self.task = task
        self.began = time.time()

    def start(self) -> None:
        """Note that the first round begins now."""
        self.began = time.time()

    def write(self, ended: float, reached: float, **facts: object) -> None:
        """Write the outcome, given the time at which the last round ended and the accuracy reached."""
        outcome = {"training_seconds": ended - self.began, "accuracy": reached, **facts}
        Path(self.task["outcome"]).write_text(json.dumps(outcome))
