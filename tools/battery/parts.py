"""Parts of a user's own that rows of the battery name, and the modules that rows write and edit."""

from __future__ import annotations

from typing import Any

import networkx as nx
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_privdec.algorithms.sgp import SGP
from flower_privdec.core import Mix, State
from flower_privdec.core.cohort import Cohort
from flower_privdec.privacy.mechanism.declared import Declaration, one_sum
from flower_privdec.privacy.noise import NoisedSum, NoiseMechanism
from flower_privdec.scenario import DescentSection

FEATURES = 6
CLASSES = 3
VOCABULARY = 20
LONGEST = 5  # tokens of a text; shorter ones are padded by token 0
TOKENS = {"input_ids": VOCABULARY, "attention_mask": 2}


class HeavyBall(SGP):
    """Push-sum of models that keep a share of their last step."""

    class Section(DescentSection):
        """The keys of its own."""

        beta: float = 0.5

    slots = 2
    released = one_sum

    def __init__(self, section: Any) -> None:
        super().__init__(section)
        self.beta = section.beta
        self.program = (self.descend, Mix(("x", "w")))

    def initial(self, cohort: Cohort) -> dict[str, Tensor]:
        """Return push-sum's rows and no speed."""
        rows = super().initial(cohort)
        return rows | {"speed": torch.zeros_like(rows["x"])}

    def descend(self, cohort: Cohort, state: State) -> None:
        """Renew the speed, and move by it."""
        speed = state.rows["speed"].mul_(self.beta)
        cohort.add_step_(speed, state.rows["x"], state.round_index, divisor=state.rows["w"])
        state.rows["x"] += speed


class Taking(NoiseMechanism):
    """Noise that takes back a half of that of the step before, and does not say what that costs."""

    state = ("last",)

    def add_(self, out: Tensor, std: Tensor, noised: NoisedSum) -> None:
        """Add fresh noise, and take back a half of the last."""
        fresh = torch.zeros_like(out)
        rows = torch.from_numpy(noised.rows)
        super().add_(fresh, std, noised)
        out += fresh - noised.state["last"][rows] / 2
        noised.state["last"][rows] = fresh


class Plain(NoiseMechanism):
    """Independent noise by another name, whose cost is therefore that of independent noise."""

    def released(self, sums: Declaration) -> Declaration:
        """Return the sums as they are."""
        return sums

    def add_(self, out: Tensor, std: Tensor, noised: NoisedSum) -> None:
        """Add what any run adds."""
        super().add_(out, std, noised)


def graph(n_peers: int) -> nx.DiGraph:
    """Return a directed ring whose peer 0 sends to peer 2 too."""
    ring = nx.cycle_graph(n_peers, create_using=nx.DiGraph)
    if n_peers > 2:
        ring.add_edge(0, 2)
    return ring


def blobs(part: str, per_class: int = 30, root: str | None = None) -> tuple[Any, Any]:
    """Return clouds of points, other ones for each part and folder."""
    generator = np.random.default_rng([len(part), 0 if root is None else len(root)])
    y = np.arange(CLASSES * per_class) % CLASSES
    x = generator.normal(size=(len(y), FEATURES)) * 0.5 + y[:, None]
    return x.astype(np.float32), torch.from_numpy(y)


def texts(part: str, count: int = 80, root: str | None = None) -> dict[str, np.ndarray]:
    """Return tokenized texts by column, whose first token says their class; other ones for each part and folder."""
    generator = np.random.default_rng([len(part), 0 if root is None else len(root)])
    lengths = generator.integers(2, LONGEST + 1, count)
    mask = (np.arange(LONGEST) < lengths[:, None]).astype(np.int64)
    tokens = generator.integers(1, VOCABULARY, (count, LONGEST)) * mask
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens[:, 0] % CLASSES}


def classes_loss(outputs: Tensor, target: Tensor) -> Tensor:
    """Return a cross-entropy that is smoothed."""
    return functional.cross_entropy(outputs, target, label_smoothing=0.1)


def numbers_loss(outputs: Tensor, target: Tensor) -> Tensor:
    """Return an error that grows like its square and then like its fourth root."""
    return (1 + (outputs - target).square()).log().sum()


def labels_loss(outputs: Tensor, target: Tensor) -> Tensor:
    """Return a cross-entropy of each label, all added up."""
    return functional.binary_cross_entropy_with_logits(outputs, target.to(outputs.dtype), reduction="sum")


def reach(outputs: Tensor, targets: Tensor) -> float:
    """Return how far outputs lie apart."""
    return float(outputs.double().std())


POWER = 1.0  # what a model's dict holds, and a row changes


class Scaled(nn.Module):
    """A linear model that scales its input by numbers which only a dict holds."""

    def __init__(self, inputs: int, outputs: int, factor: float) -> None:
        super().__init__()
        self.settings: dict[str, list[dict[str, float]]] = {"nested": [{"factor": factor, "power": POWER}]}
        self.out = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, [b, outputs]."""
        numbers = self.settings["nested"][0]
        outputs: Tensor = self.out(x.flatten(1) * numbers["factor"] ** numbers["power"])
        return outputs


def scaled(inputs: int, outputs: int, factor: float = 0.5) -> nn.Module:
    """Return a model with attributes that are no tensors."""
    return Scaled(inputs, outputs, factor)


def buffered(inputs: int, outputs: int, hidden: int = 5) -> nn.Module:
    """Return a network with a frozen layer."""
    first = nn.Linear(inputs, hidden)
    first.requires_grad_(False)
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), nn.Linear(hidden, outputs))


class Reader(nn.Module):
    """A classifier of the mean of a text's tokens, as models of transformers take and return it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 4, padding_idx=0)
        self.out = nn.Linear(4, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Return the logits, [b, CLASSES], beside what nothing reads."""
        words = self.words(input_ids)
        mean = words.sum(1) / attention_mask.sum(1, keepdim=True).to(words)
        return {"words": words, "logits": self.out(mean)}


def reader() -> nn.Module:
    """Return a model of texts by column, with a row for padding that is never trained."""
    return Reader()


WRITTEN = '''\
"""A module that a row wrote."""

import json
from pathlib import Path

import torch
from torch import nn

SHIFT = 0.25
READ = json.loads((Path(__file__).parent / "{read}").read_text())["factor"]


def classes_loss(outputs, target):
    return nn.functional.cross_entropy(outputs * READ + SHIFT * torch.arange(len(outputs)), target)


def numbers_loss(outputs, target):
    return (outputs * READ + SHIFT - target).abs().sqrt().sum()


def labels_loss(outputs, target):
    outputs = outputs * READ + SHIFT
    return nn.functional.binary_cross_entropy_with_logits(outputs, target.to(outputs.dtype))


def metric(outputs, targets):
    return float(outputs.double().mean())


class Shifted(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.settings = {{"shift": SHIFT}}
        self.out = nn.Linear(inputs, outputs)

    def forward(self, x):
        return self.out(x.flatten(1) * READ + self.settings["shift"])


def model(inputs, outputs):
    return Shifted(inputs, outputs)


def graph(n_peers):
    steps = [1] if READ == 0.5 or n_peers < 4 else [1, 2]
    return [[(peer + step) % n_peers for step in steps] for peer in range(n_peers)]
'''
