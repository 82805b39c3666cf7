"""A small transformer over words, pretrained on public texts, and its two ways of fine-tuning: LoRA, and all of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

WORDS = 400
LENGTH = 24
TOPICS = 8
OWN_WORDS = 40
WEIGHTS = Path(__file__).with_name("pretrained.safetensors")


def texts(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return texts of 8 to 24 words, int64 [count, 24], and the topic of each; a third of its words are its topic's."""
    generator = np.random.default_rng(seed)
    topics = generator.integers(TOPICS, size=count)
    common = generator.integers(1, WORDS, (count, LENGTH))
    own = 1 + topics[:, None] * OWN_WORDS + generator.integers(OWN_WORDS, size=(count, LENGTH))
    words = np.where(generator.random((count, LENGTH)) < 0.33, own, common)
    return np.where(np.arange(LENGTH) < generator.integers(8, LENGTH + 1, count)[:, None], words, 0), topics


def private_texts(part: str, root: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the private task: in which of four groups of two topics a text is."""
    words, topics = texts(2400, 1) if part == "train" else texts(1000, 2)
    return words, np.array([0, 2, 1, 3, 3, 0, 2, 1])[topics]


class Block(nn.Module):
    """Attention of four heads, and a layer of hidden units."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        n, length, width = y.shape
        query, key, value = (
            part(y).view(n, length, 4, width // 4).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        scores = torch.softmax(query @ key.transpose(2, 3) / (width // 4) ** 0.5, dim=-1)
        x = x + self.out((scores @ value).transpose(1, 2).reshape(n, length, width))
        return x + self.outer(torch.relu(self.inner(self.second(x))))


class Classifier(nn.Module):
    """Two blocks over embedded words; the mean of their outputs is classified."""

    def __init__(self, classes: int, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(tokens)).mean(1))


class LoRA(nn.Module):
    """A frozen linear layer and a trained update of a low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def pretrain(epochs: int = 5) -> None:
    """Learn the topics of public texts, and write all weights but the head's."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    words, topics = map(torch.from_numpy, texts(4000, 0))
    model = Classifier(TOPICS)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(epochs):
        for chosen in torch.randperm(len(words)).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(words[chosen]), topics[chosen]).backward()
            optimizer.step()
    save_file({name: t for name, t in model.state_dict().items() if not name.startswith("head.")}, WEIGHTS)


def full() -> nn.Module:
    """Return the pretrained model with a new head; all of it is trained."""
    model = Classifier(4)
    model.load_state_dict(load_file(WEIGHTS), strict=False)
    return model


def lora(rank: int = 4) -> nn.Module:
    """Return the pretrained model with updates of a low rank for queries and values; they and the head are trained."""
    model = full().requires_grad_(False)
    for block in model.blocks:
        for name in ("query", "value"):
            setattr(block, name, LoRA(getattr(block, name), rank))
    model.head.requires_grad_(True)
    return model
