"""The model, the data and the loops: a small convolutional network on scikit-learn's handwritten digits."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

TEST = range(0, 1797, 5)  # every fifth digit is the common test set, the others are the clients'


class Net(nn.Module):
    """Two convolutions and a linear layer, for images of 8 by 8."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.head = nn.Linear(16 * 2 * 2, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch."""
        x = functional.max_pool2d(functional.relu(self.norm(self.conv1(x))), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        return self.head(x.flatten(1))


def _digits() -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return TensorDataset(x, torch.tensor(labels))


def load_data(partition: int, partitions: int, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Return one client's digits: four fifths to train on, one to test on."""
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0)).tolist()
    own = [digit for digit in order if digit not in TEST][partition::partitions]
    cut = len(own) * 4 // 5
    train, test = (torch.utils.data.Subset(_digits(), part) for part in (own[:cut], own[cut:]))
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(test, batch_size=64)


def load_test() -> DataLoader:
    """Return the common test set."""
    return DataLoader(torch.utils.data.Subset(_digits(), TEST), batch_size=128)


def fit(net: nn.Module, loader: DataLoader, epochs: int, learning_rate: float) -> float:
    """Train by SGD; return the mean loss of the last epoch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=learning_rate, momentum=0.9)
    for _ in range(epochs):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(y)
    return total / len(loader.dataset)


@torch.no_grad()
def score(net: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Return mean loss and accuracy."""
    net.eval()
    loss = 0.0
    right = 0
    for x, y in loader:
        logits = net(x)
        loss += functional.cross_entropy(logits, y, reduction="sum").item()
        right += int((logits.argmax(1) == y).sum())
    return loss / len(loader.dataset), right / len(loader.dataset)
