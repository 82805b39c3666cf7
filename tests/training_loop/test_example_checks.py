"""One example is one item, one row and one count; and a loop learns nothing of private losses unless that is said."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate

from flower_privdec.common.errors import BudgetError, RunError, ScenarioError
from flower_privdec.training_loop import ExamplePrivacy, private
from flower_privdec.training_loop.example_checks import LoaderExamples

N = 24


def data() -> TensorDataset:
    torch.manual_seed(3)
    return TensorDataset(torch.randn(N, 5), torch.arange(N) % 3)


def wrap(folder: Path, loader: DataLoader[Any], **options: Any) -> ExamplePrivacy:
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = {"ledger": folder / "peer.jsonl", "delta": 1e-3, "noise_multiplier": 1.0, "report": lambda _: None}
    return private(model, optimizer, loader, nn.CrossEntropyLoss(), **{**chosen, **options})


# --- the loss ---

READERS: dict[str, Callable[[Any], Any]] = {
    "item": lambda loss: loss.item(),
    "float": float,
    "print": lambda loss: f"{loss}",
    "repr": repr,
    "sum": lambda loss: loss + 0.0,
    "added": lambda loss: 0.0 + loss,
    "less": lambda loss: loss < 3,
    "list": lambda loss: loss.tolist(),
    "detach": lambda loss: loss.detach(),
    "data": lambda loss: loss.data + 0,
    "cpu": lambda loss: loss.cpu(),
    "stack": lambda loss: torch.stack([loss, loss]),
    "numpy": lambda loss: loss.detach().numpy(),
    "asarray": np.asarray,
    "isnan": torch.isnan,
    "truth": bool,
    "copy": copy.deepcopy,
    "clone": lambda loss: loss.clone(),
    "scaled": lambda loss: loss * 2,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_private_loss_can_be_backpropagated_and_not_read(reader: str, tmp_path: Path) -> None:
    model, optimizer, loader, criterion = wrap(tmp_path, DataLoader(data(), N))
    ((x, y),) = loader_batches(loader)
    before = [parameter.clone() for parameter in model.parameters()]
    loss = criterion(model(x), y)
    with raises(RunError, "training-loop.loss-is-private", "show_loss=True"):
        READERS[reader](loss)
    loss.backward()
    optimizer.step()
    assert any(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def loader_batches(loader: Any) -> list[Any]:
    """Return one batch of a private loader, left unfinished so that the caller takes its step."""
    batches = iter(loader)
    batch = next(batches)
    loader.unfinished = batches
    return [batch]


def test_a_scheduler_cannot_follow_private_losses(tmp_path: Path) -> None:
    model, optimizer, loader, criterion = wrap(tmp_path, DataLoader(data(), N))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        with raises(RunError, "training-loop.loss-is-private"):
            scheduler.step(loss)


def test_a_shown_loss_is_the_criterions_and_declared(tmp_path: Path) -> None:
    reports: list[str] = []
    parts = wrap(tmp_path, DataLoader(data(), N), show_loss=True, report=reports.append)
    model, optimizer, loader, criterion = parts
    for x, y in loader:
        expected = nn.CrossEntropyLoss()(model.module(x), y).item()
        loss = criterion(model(x), y)
        assert loss.item() == pytest.approx(expected)
        loss.backward()
        optimizer.step()
    assert all("not covered: the loop was shown private losses" in text for text in (*reports, str(parts)))
    assert "not covered" not in str(wrap(tmp_path, DataLoader(data(), N)))


def test_the_value_of_a_private_loss_is_never_computed(tmp_path: Path) -> None:
    model, optimizer, loader, criterion = wrap(tmp_path, DataLoader(data(), N))
    ((x, y),) = loader_batches(loader)
    loss = criterion(model(x), y)
    with torch._C.DisableTorchFunctionSubclass():
        assert math.isnan(loss.item())
    loss.backward()
    optimizer.step()


# --- the batch ---

SEQUENCES = [(torch.randn(1 + number % 4, 5), number % 3) for number in range(N)]


def padded(samples: list[Any]) -> Any:
    return pad_sequence([x for x, _ in samples], batch_first=True), torch.tensor([y for _, y in samples])


def padded_to_four(samples: list[Any]) -> Any:
    rows = [torch.cat([x, x.new_zeros(4 - len(x), 5)]) for x, _ in samples]
    return torch.stack(rows), torch.tensor([y for _, y in samples])


def standardised(samples: list[Any]) -> Any:
    x = torch.stack([x for x, _ in samples])
    return x - x.mean(0), torch.tensor([int(y) for _, y in samples])


def mixed_up(samples: list[Any]) -> Any:
    x = torch.stack([x for x, _ in samples])
    return 0.5 * x + 0.5 * x.roll(1, 0), torch.tensor([int(y) for _, y in samples])


def of_dicts(samples: list[Any]) -> Any:
    return {
        "x": np.stack([x.numpy() for x, _ in samples]),
        "names": [f"example of class {int(y)}" for _, y in samples],
        "pair": (torch.tensor([int(y) for _, y in samples]), "a constant"),
    }


@pytest.mark.parametrize(
    ("rows", "collate"),
    [(SEQUENCES, padded), (data(), standardised), (data(), mixed_up)],
    ids=["padded", "standardised", "mixed up"],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_with_dependent_rows_is_refused(rows: Any, collate: Any, workers: int, tmp_path: Path) -> None:
    with raises(ScenarioError, "training-loop.collate-mixes", "fixed length"):
        wrap(tmp_path, DataLoader(rows, 6, collate_fn=collate, num_workers=workers))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_depending_on_unprobed_lengths_is_refused(workers: int, tmp_path: Path) -> None:
    rows = [(torch.randn(3, 5), 0) for _ in range(64)]  # probes are items 0, 8, 16, ...
    rows[5] = (torch.randn(9, 5), 1)
    loader = wrap(tmp_path, DataLoader(rows, 64, collate_fn=padded, num_workers=workers)).data_loader  # type: ignore[arg-type]
    with raises(ScenarioError, "training-loop.collate-mixes"):
        next(iter(loader))


def states() -> list[Any]:
    """Return the states of all generators of random numbers that the process shares."""
    legacy: Any = np.random.get_state()  # noqa: NPY002
    return [torch.random.get_rng_state().tolist(), random.getstate(), legacy[1].tolist()]


@pytest.mark.parametrize(("rows", "collate"), [(SEQUENCES, padded_to_four), (data(), of_dicts), (data(), None)])
def test_a_batch_of_rows_is_taken_as_it_is(rows: Any, collate: Any, tmp_path: Path) -> None:
    before = states()
    batch = LoaderExamples.of(DataLoader(rows, 6, collate_fn=collate)).checked().__getitems__(range(6))
    assert states() == before
    assert repr(batch) == repr((collate or default_collate)(list(rows)[:6]))


# --- the dataset ---


class Items(Dataset[Any]):
    """A dataset over arrays of as many rows as it has items, in one of several containers."""

    def __init__(self, kind: str) -> None:
        x = torch.randn(N, 5, generator=torch.Generator().manual_seed(1))
        self.kind = kind
        self.x: Any = {"array": x.numpy(), "list": list(x), "tuple": tuple(x), "dict": dict(enumerate(x))}.get(kind, x)
        self.y = [number % 3 for number in range(N)]
        self.inner = data()

    def __len__(self) -> int:
        return N

    def row(self, index: int) -> Tensor:
        return torch.as_tensor(self.x[index])

    def __getitem__(self, index: int) -> Any:
        return self.row(index), self.y[index]


class Pairs(Items):
    def __getitem__(self, index: int) -> Any:
        return self.row(index) - self.row((index + 1) % N), self.y[index]


class RandomPairs(Items):
    def __getitem__(self, index: int) -> Any:
        return self.row(index) + self.row(int(torch.randint(N, ()))), self.y[index]


class OfOneClass(Items):
    def __getitem__(self, index: int) -> Any:
        other = random.choice([one for one in range(N) if self.y[one] == self.y[index] and one != index])
        return self.row(index) * self.row(other), self.y[index]


class Standardised(Items):
    def __getitem__(self, index: int) -> Any:
        rows = torch.stack([self.row(one) for one in range(N)])
        return (self.row(index) - rows.mean(0)) / rows.std(0), self.y[index]


class InnerPairs(Items):
    def __getitem__(self, index: int) -> Any:
        return self.inner[index][0] - self.inner[index - 1][0], self.y[index]


class Augmented(Items):
    def __getitem__(self, index: int) -> Any:
        return self.row(index) + torch.randn(5) + random.random(), self.y[index]


class OwnGenerator(Items):
    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.generator = torch.Generator().manual_seed(0)

    def __getitem__(self, index: int) -> Any:
        return self.row(index) + torch.randn(5, generator=self.generator), self.y[index]


class OwnMixup(Items):
    """Mixup by a generator of the dataset's own, as a copy of it does not repeat."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.generator = np.random.default_rng()

    def __getitem__(self, index: int) -> Any:
        return 0.7 * self.row(index) + 0.3 * self.row(int(self.generator.integers(N))), self.y[index]


class Shifted(Items):
    def __getitem__(self, index: int) -> Any:
        return self.inner[(index + 3) % N]


class Repeating(Dataset[Any]):
    def __init__(self) -> None:
        self.inner = data()

    def __len__(self) -> int:
        return 5 * N

    def __getitem__(self, index: int) -> Any:
        return self.inner[index % N]


@pytest.mark.parametrize("kind", ["tensor", "array", "list", "tuple", "dict"])
@pytest.mark.parametrize("dataset", [Pairs, RandomPairs, OfOneClass, Standardised, InnerPairs, OwnMixup])
@pytest.mark.parametrize("subset", [False, True])
def test_a_dataset_whose_items_read_others_is_refused(
    dataset: type[Items], kind: str, subset: bool, tmp_path: Path
) -> None:
    rows: Any = Subset(ConcatDataset([data(), dataset(kind)]), range(2, 2 * N, 2)) if subset else dataset(kind)
    with raises(ScenarioError, "training-loop.item-reads-others", dataset.__name__):
        wrap(tmp_path, DataLoader(rows, 6))


@pytest.mark.parametrize(
    ("dataset", "kind"),
    [
        *((Items, kind) for kind in ("tensor", "array", "list", "tuple", "dict")),
        *((Augmented, "tensor"), (OwnGenerator, "array"), (Shifted, "list"), (Augmented, "dict")),
    ],
)
def test_a_dataset_of_separate_items_is_accepted(dataset: type[Items], kind: str, tmp_path: Path) -> None:
    wrap(tmp_path, DataLoader(dataset(kind), 6))
    wrap(tmp_path, DataLoader(Subset(dataset(kind), range(0, N, 3)), 6))


@pytest.mark.parametrize(
    "rows",
    [
        Subset(data(), [0, 1, 2, 3, 4, 5, 1]),
        Subset(Subset(data(), [4, 4, 5, 6, 7, 8]), [0, 1, 3]),
        Subset(data(), [0, 1, 2, -N]),
        (lambda part: ConcatDataset([part, part]))(data()),
        (lambda part: ConcatDataset([Subset(part, range(9)), Subset(part, range(8, 12))]))(data()),
        Repeating(),
    ],
)
def test_an_example_that_occurs_twice_is_refused(rows: Any, tmp_path: Path) -> None:
    with raises(ScenarioError, "training-loop.repeated-example", "once"):
        wrap(tmp_path, DataLoader(rows, 3))


def test_different_datasets_in_one_are_taken(tmp_path: Path) -> None:
    wrap(tmp_path, DataLoader(ConcatDataset([data(), Subset(data(), range(9))]), 6))


def test_a_budget_that_is_spent_reads_nothing(tmp_path: Path) -> None:
    for x, y in (parts := wrap(tmp_path, DataLoader(data(), N), steps=1)).data_loader:
        parts.criterion(parts.model(x), y).backward()
        parts.optimizer.step()
    parts.close()
    with pytest.raises(BudgetError):
        next(iter(wrap(tmp_path, DataLoader(Pairs("tensor"), N), steps=1).data_loader))
