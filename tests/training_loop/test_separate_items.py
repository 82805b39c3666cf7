"""Whatever a dataset is, one example moves a step by no more than the clip norm, or is refused, or that is assumed."""

from __future__ import annotations

import os
import random
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
import torchvision
from PIL import Image
from raising import raises
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, StackDataset, Subset, TensorDataset
from torchvision.transforms import v2

from flower_privdec.common.errors import ScenarioError
from flower_privdec.training_loop import private
from flower_privdec.training_loop.example_checks import LoaderExamples
from flower_privdec.training_loop.loop_budget import PrivacyBudget
from flower_privdec.training_loop.separate_items import ItemPlaces, look

N, WIDTH = 60, 4
Read = Callable[[Any, int], Any]
ASSUMED = "if item i reads example i only"
PROVED = "items: proved separate"


class Silent:
    def add_(self, *_: Any) -> None:
        pass


class Net(nn.Module):
    """Takes what any dataset here gives: tensors, images as tensors, padded texts."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.float().flatten(1)[:, :WIDTH])


def features(changed: bool) -> tuple[Tensor, Tensor]:
    """Return examples; of the changed ones one is so large that its gradient counts as zero."""
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(N, WIDTH, generator=generator), torch.arange(N) % 2
    if changed:
        x[1] = 1e38
    return x, y


def moved(
    make: Callable[[bool], Any], folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[float, str]:
    """Return by how many clip norms one example moves the sum of a batch of all items, and the line on ε."""
    monkeypatch.setattr(PrivacyBudget, "draw", lambda self, count, first, seed: [np.arange(self.release.dataset_size)])
    monkeypatch.setattr("flower_privdec.training_loop.private_loop.build_deployed_noise", lambda **_: Silent())
    sums, lines = [], []
    for changed in (False, True):
        torch.manual_seed(1)
        random.seed(1)
        dataset = make(changed)
        net = Net()
        size = len(dataset)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        parts = private(
            net,
            optimizer,
            DataLoader(dataset, batch_size=size, **options),
            nn.CrossEntropyLoss(),
            ledger=folder / f"{changed}.jsonl",
            delta=1e-3,
            noise_multiplier=1.0,
            report=lines.append,
        )
        before = torch.cat([each.detach().flatten() for each in net.parameters()])
        for batch in parts.data_loader:
            x, y = batch.values() if isinstance(batch, dict) else batch
            parts.criterion(parts.model(x), y).backward()
            optimizer.step()
        after = torch.cat([each.detach().flatten() for each in net.parameters()])
        sums.append((before - after) * size)
    return float((sums[0] - sums[1]).norm()), lines[-1]


# --- kinds that are proved ---


def images(changed: bool) -> np.ndarray:
    x, _ = features(False)
    if changed:
        x[1] = -99.0  # black: a gradient of the bias, which is more than zero
    return (x.sigmoid() * 255).to(torch.uint8).numpy().reshape(N, 2, 2)


def mnist(changed: bool) -> Any:
    dataset = torchvision.datasets.MNIST.__new__(torchvision.datasets.MNIST)
    dataset.data, dataset.targets = torch.from_numpy(images(changed)), torch.arange(N) % 2
    dataset.transform = v2.Compose([v2.RandomApply([v2.RandomHorizontalFlip()], p=0.0), v2.ToTensor()])
    dataset.target_transform = None
    return dataset


def table(changed: bool, **columns: Any) -> datasets.Dataset:
    x, y = features(changed)
    return datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist(), **columns}).with_format("torch")


PROVED_KINDS: dict[str, Callable[[bool], Any]] = {
    "tensors": lambda changed: TensorDataset(*features(changed)),
    "a part": lambda changed: Subset(TensorDataset(*features(changed)), range(1, N, 2)),
    "parts": lambda changed: ConcatDataset(
        [Subset(TensorDataset(*features(changed)), part) for part in (range(9), range(9, N))]
    ),
    "a list": lambda changed: [(x.clone(), int(y)) for x, y in zip(*features(changed), strict=True)],
    "rows of a tensor": lambda changed: list(zip(*features(changed), strict=True)),
    "dicts of arrays": lambda changed: [
        {"x": x.clone().numpy(), "y": int(y)} for x, y in zip(*features(changed), strict=True)
    ],
    "a stack": lambda changed: StackDataset(*(list(part) for part in features(changed))),
    "a column-major tensor": lambda changed: TensorDataset(features(changed)[0].T.contiguous().T, features(changed)[1]),
    "one label for all": lambda changed: TensorDataset(
        features(changed)[0], torch.zeros(1, dtype=torch.int64).expand(N)
    ),
    "a table": table,
    "a part of a table": lambda changed: table(changed).shuffle(seed=1).select(range(55)),
    "torchvision's images": mnist,
}


@pytest.mark.parametrize("kind", PROVED_KINDS)
def test_separate_kinds_are_proved_and_keep_the_law(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, line = moved(PROVED_KINDS[kind], tmp_path, monkeypatch)
    assert PROVED in line
    assert ASSUMED not in line
    assert 0 < change <= 1 + 1e-5


def test_image_folders_are_proved_without_own_transforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, pixels in enumerate(images(False)):
        folder = tmp_path / "images" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number}.png")

    def folder_of(transform: Any) -> Any:
        return lambda changed: torchvision.datasets.ImageFolder(tmp_path / "images", transform)

    to_tensor = torchvision.transforms.ToTensor()
    assert PROVED in moved(folder_of(to_tensor), tmp_path / "a", monkeypatch)[1]
    own = torchvision.transforms.Compose([to_tensor, torchvision.transforms.Lambda(lambda image: image / 2)])
    for number, transform in enumerate([own, lambda image: to_tensor(image)]):
        line = moved(folder_of(transform), tmp_path / f"own{number}", monkeypatch)[1]
        assert f"{ASSUMED}, which is not proved of the transform of ImageFolder" in line


# --- items of which only reading tells: honest ones are assumed, and keep the law ---


class Rows(Dataset[Any]):
    """A dataset of a user's own; `read` says what an item is."""

    def __init__(
        self, x: Tensor, y: Tensor, read: Read = lambda self, index: self.x[index], is_flipped: bool = False
    ) -> None:
        self.x, self.y, self.read = x, y, read
        self.is_flipped = is_flipped
        self.store = types.SimpleNamespace(inner=types.SimpleNamespace(x=x.numpy()))
        self.frame = pandas.DataFrame(x.numpy(), columns=list("abcd"))
        self.table = datasets.Dataset.from_dict({"x": x.tolist()})
        self.pairs = TensorDataset(x, y)
        self.order = torch.arange(N).flip(0)
        self.scale, self.file = torch.tensor(2.0), open(os.devnull, "rb")  # noqa: SIM115 (which no copy has)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return torch.as_tensor(self.read(self, index)), self.y[self.order[index] if self.is_flipped else index]


class Batched(Rows):
    """What a loader would ask for a whole batch, which takes the batch's mean away."""

    def __getitems__(self, indices: list[int]) -> Any:
        rows = self.x[indices]
        return list(zip(rows - rows.mean(0), self.y[indices], strict=True))


class Buffered(Rows):
    """Every item is the same memory, written anew."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x, y)
        self.buffer = torch.empty(WIDTH)

    def __getitem__(self, index: int) -> Any:
        return self.buffer.copy_(self.x[index]), self.y[index]


@dataclass
class Transformed:
    """A wrapper of a user's own, which is no Dataset of torch."""

    data: Any
    transform: Callable[[Any], Any] = lambda x: x

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return self.transform(x), y


def standing(changed: bool) -> Any:
    return TensorDataset(*features(changed))


HONEST: dict[str, Callable[[bool], Any]] = {
    "own rows": lambda changed: Rows(*features(changed)),
    "a batch's mean in getitems": lambda changed: Batched(*features(changed)),
    "one memory for all items": lambda changed: Buffered(*features(changed)),
    "another order": lambda changed: Rows(*features(changed), lambda self, index: self.x[self.order[index]], True),
    "an object's array": lambda changed: Rows(*features(changed), lambda self, index: self.store.inner.x[index]),
    "a row of a frame": lambda changed: Rows(
        *features(changed), lambda self, index: torch.tensor(self.frame.iloc[index].to_numpy())
    ),
    "an item of a table": lambda changed: Rows(
        *features(changed), lambda self, index: torch.tensor(self.table[index]["x"])
    ),
    "a column of a table": lambda changed: Rows(
        *features(changed), lambda self, index: torch.tensor(self.table["x"][index])
    ),
    "a wrapper": lambda changed: Transformed(standing(changed), lambda x: x + 0.1 * torch.randn(WIDTH)),
    "a wrapper of a part": lambda changed: Transformed(Subset(standing(changed), range(1, 40))),
    "a part of a wrapper": lambda changed: Subset(Transformed(standing(changed)), range(1, N, 3)),
}


@pytest.mark.parametrize("kind", HONEST)
def test_unproved_items_are_assumed_beside_epsilon(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, line = moved(HONEST[kind], tmp_path, monkeypatch)
    assert ASSUMED in line
    assert 0 < change <= 1 + 1e-5


SERIES = torch.randn(N + 1, 3)
LISTS = [[0.5 * number] for number in range(N + 1)]
SHARING: dict[str, Any] = {
    "a series and its next values": TensorDataset(SERIES[:-1], SERIES[1:]),
    "a series and one value of the next row": TensorDataset(SERIES[:-1], SERIES[1:, 0]),
    "rows from the last to the first": TensorDataset(SERIES[:N], torch.as_strided(SERIES, (N, 3), (1, N))),
    "one row beside all": TensorDataset(SERIES[:N], SERIES[:1].expand(N, 3)),
    "a stack": StackDataset(SERIES[:-1], SERIES[1:]),
    "a stack of arrays": StackDataset(SERIES.numpy()[:-1], SERIES.numpy()[1:, 0]),
    "a stack of a dataset and a part of it": (
        lambda whole: StackDataset(Subset(whole, range(N)), Subset(whole, range(1, N + 1)))
    )(TensorDataset(SERIES)),
    "tensors in several items": [(SERIES[i], SERIES[i + 1]) for i in range(N)],
    "lists in several items": [(LISTS[i], LISTS[i + 1]) for i in range(N)],
    "dicts in several items": [{"own": LISTS[i], "of another": {"x": LISTS[i + 1]}} for i in range(N)],
}
APART: dict[str, Any] = {
    "columns of one table": TensorDataset(SERIES[:, :2], SERIES[:, 2]),
    "columns of a column-major table": TensorDataset(SERIES.T.contiguous().T[:, :2], SERIES.T.contiguous().T[:, 2]),
    "a tensor twice": TensorDataset(SERIES, SERIES, SERIES[:, :2]),
    "arrays": StackDataset(SERIES.numpy()[:, :2], SERIES.numpy()[:, 2].copy()),
    "an array and words": StackDataset(SERIES.numpy(), ["a"] * (N + 1)),
    "equal numbers": [(LISTS[i], 1) for i in range(N)],
}


def test_shared_items_are_seen_in_tensors_and_lists() -> None:
    looks = {kind: look(dataset, ItemPlaces()) for kind, dataset in (SHARING | APART).items()}
    assert {kind for kind, items in looks.items() if items.unproved} == set(SHARING)
    assert all("share memory" in name for items in looks.values() for name in items.unproved)
    assert all(len(np.unique(items.ids)) == len(items.ids) for items in looks.values())


def test_rows_that_share_memory_are_not_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = torch.arange(N + WIDTH - 1.0).unfold(0, WIDTH, 1)
    for number, dataset in enumerate([TensorDataset(windows, torch.arange(N) % 2), [(row, 1) for row in windows]]):
        line = moved(lambda changed, dataset=dataset: dataset, tmp_path / f"{number}", monkeypatch)[1]  # type: ignore[misc]
        assert f"{ASSUMED}, which is not proved of a " in line
        assert "share memory" in line


def test_a_transform_padding_to_the_longest_uses_one_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def padding(batch: dict[str, Any]) -> dict[str, Any]:
        longest = max(map(len, batch["words"]))
        rows = [[1.0] * len(words) + [0.0] * (longest - len(words)) for words in batch["words"]]
        return {"x": [torch.tensor(row) for row in rows], "y": [torch.tensor(label) for label in batch["y"]]}

    def texts(changed: bool, longer: int) -> Any:
        words = [["w"] * 8 for _ in range(N)]
        words[1] = ["w"] * (longer if changed else 8)
        raw = datasets.Dataset.from_dict({"words": words, "y": [number % 2 for number in range(N)]})
        raw.set_transform(padding)
        return raw

    change, line = moved(lambda changed: texts(changed, 8), tmp_path / "a", monkeypatch)
    assert (change, ASSUMED in line) == (0, True)
    with raises(ScenarioError, "training-loop.collate-mixes", "fixed length"):
        moved(lambda changed: texts(changed, 40), tmp_path / "b", monkeypatch)


# --- items that read others ---

X = torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(2))


def mixup(chance: float) -> Callable[[Any, int], Tensor]:
    def read(self: Any, index: int) -> Tensor:
        if random.random() < chance:
            return 0.5 * self.x[index] + 0.5 * self.x[random.randrange(N)]
        return self.x[index]

    return read


class Remembering(Rows):
    """Every item is mixed with the one that was read before."""

    def __getitem__(self, index: int) -> Any:
        mixed = self.x[index] + getattr(self, "last", torch.zeros(WIDTH))
        self.last = self.x[index]
        return mixed, self.y[index]


class OfItsModule(Rows):
    def __getitem__(self, index: int) -> Any:
        return self.x[index] - X.mean(0), self.y[index]


def with_transform(transform: Callable[[Any], Any]) -> Any:
    raw = table(False).with_format(None)
    raw.set_transform(lambda batch: {"x": [transform(torch.tensor(row)) for row in batch["x"]], "y": batch["y"]})
    return raw


def standardised(x: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda row: (row - x.mean(0)) / x.std(0)


READERS: dict[str, Callable[[], Any]] = {
    "mixup of one in a hundred": lambda: Rows(*features(False), mixup(0.01)),
    "mixup of one in ten": lambda: Rows(*features(False), mixup(0.1)),
    "an object's array": lambda: Rows(*features(False), lambda self, index: self.x[index] - self.store.inner.x.mean(0)),
    "a column of a table": lambda: Rows(
        *features(False), lambda self, index: self.x[index] - torch.tensor(self.table["x"][:]).mean(0)
    ),
    "another item of a table": lambda: Rows(
        *features(False), lambda self, index: self.x[index] - torch.tensor(self.table[index - 1]["x"])
    ),
    "a column of a frame": lambda: Rows(*features(False), lambda self, index: self.x[index] - self.frame["a"].mean()),
    "the tensors of a dataset": lambda: Rows(
        *features(False), lambda self, index: self.x[index] - self.pairs.tensors[0].mean(0)
    ),
    "the one before": lambda: Remembering(*features(False)),
    "a global": lambda: OfItsModule(*features(False)),
    "a wrapped dataset": lambda: Transformed(
        Rows(*features(False), lambda self, index: self.x[index] - self.x[index - 1])
    ),
    "a transform's closure": lambda: Transformed(standing(False), standardised(features(False)[0])),
    "a table's transform": lambda: with_transform(standardised(features(False)[0])),
    "a stack of pairs": lambda: StackDataset(
        Rows(*features(False), lambda self, index: self.x[index] * self.x[index - 1]), range(N)
    ),
}


@pytest.mark.parametrize("kind", READERS)
def test_an_item_that_reads_others_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(ScenarioError, "training-loop.item-reads-others"):
        moved(lambda changed: READERS[kind](), tmp_path, monkeypatch)
    assert not list(tmp_path.iterdir())


# --- examples that occur several times ---


class Oversampled:
    """A wrapper that keeps which item of its dataset it reads, as balanced sampling does."""

    def __init__(self, data: Any, rows: Any) -> None:
        self.data, self.rows = data, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.data[int(self.rows[index])]


TEN_TIMES = [number % 6 for number in range(N)]
REPEATED: dict[str, Callable[[], Any]] = {
    "a transform around an oversampled part": lambda: Transformed(Subset(standing(False), TEN_TIMES)),
    "a random transform around it": lambda: Transformed(
        Subset(standing(False), TEN_TIMES), lambda x: x + torch.randn(WIDTH)
    ),
    "a transform around copies": lambda: Transformed(ConcatDataset([standing(False)] * 10)),
    "a part of a transform around copies": lambda: Subset(
        Transformed(ConcatDataset([standing(False)] * 2)), [3, 9, N + 3]
    ),
    "two transforms": lambda: Transformed(Transformed(ConcatDataset([standing(False)] * 2))),
    "parts that overlap": lambda: (
        lambda x, y: ConcatDataset([TensorDataset(x[:9], y[:9]), TensorDataset(x[8:], y[8:])])
    )(*features(False)),
    "an expanded row": lambda: TensorDataset(torch.randn(1, WIDTH).expand(N, WIDTH), torch.arange(N) % 2),
    "one object many times": lambda: [(features(False)[0][0], 1)] * 10,
    "words many times": lambda: [(f"visit {number}", number % 2) for number in range(9)] * 3,
    "a transform around rows that balance": lambda: Transformed(Oversampled(standing(False), [0, 1, 2, 3, 3, 4, 5, 6])),
    "a list that balances": lambda: Transformed([item for item in standing(False) for _ in range(2)]),
    "rows that balance": lambda: Oversampled(standing(False), [0, 1, 2, 3, 3, 4, 5, 6]),
    "a part of rows that balance": lambda: Subset(Oversampled(standing(False), np.arange(N) // 2), [2, 3, 8]),
    "a table's selection": lambda: table(False).select([1, 2, 3, 1]),
    "a table with itself": lambda: datasets.concatenate_datasets([table(False), table(False).select(range(3))] * 2),
    "a transformed table's selection": lambda: with_transform(lambda x: x).select(TEN_TIMES),
    "stacked": lambda: StackDataset(Subset(standing(False), [0, 1, 1]), [7, 8, 9]),
}


@pytest.mark.parametrize("kind", REPEATED)
def test_an_example_that_occurs_several_times_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raises(ScenarioError, "training-loop.repeated-example", "once"):
        moved(lambda changed: REPEATED[kind](), tmp_path, monkeypatch)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("item", [np.ones, torch.ones, lambda width: np.ones(0), lambda width: [1.0, width], str])
def test_lists_of_any_plain_values_are_proved(item: Callable[[int], Any]) -> None:
    examples = LoaderExamples.of(DataLoader([item(3) for _ in range(4)], 2))  # type: ignore[arg-type]
    assert examples.unproved == ()


def test_a_part_of_copies_without_repeats_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def once(changed: bool) -> Any:
        return Subset(Transformed(ConcatDataset([standing(changed)] * 2)), range(N // 2, N // 2 + N))

    assert 0 < moved(once, tmp_path, monkeypatch)[0] <= 1 + 1e-5


def test_trying_a_dataset_leaves_no_foreign_row(tmp_path: Path) -> None:
    class Caching(Rows):
        def __init__(self, x: Tensor, y: Tensor) -> None:
            super().__init__(x, y)
            self.cache: dict[int, Tensor] = {}

        def __getitem__(self, index: int) -> Any:
            return self.cache.setdefault(index, self.x[index] * 2), self.y[index]

    dataset = Caching(*features(False))
    before = dataset.x.clone()
    net = Net()
    given = net, torch.optim.SGD(net.parameters(), lr=1.0), DataLoader(dataset, 6), nn.CrossEntropyLoss()
    seeds = random.getstate(), torch.random.get_rng_state().tolist()
    private(*given, ledger=tmp_path / "a", delta=1e-3, noise_multiplier=1.0)
    assert all(torch.equal(row, before[index] * 2) for index, row in dataset.cache.items())
    assert torch.equal(dataset.x, before)
    assert (random.getstate(), torch.random.get_rng_state().tolist()) == seeds


def test_a_collate_function_is_assumed_to_read_its_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def collate(items: list[Any]) -> Any:
        return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])

    change, line = moved(PROVED_KINDS["tensors"], tmp_path, monkeypatch, collate_fn=collate)
    assert change <= 1 + 1e-5
    assert f"{ASSUMED}, which is not proved of the collate_fn" in line


@pytest.mark.parametrize("pool", ["tensor", "dataset", "public"])
def test_a_collate_function_that_reads_other_examples_is_refused(pool: str, tmp_path: Path) -> None:
    data = standing(False)
    other = {"tensor": data.tensors[0], "dataset": data, "public": TensorDataset(torch.randn(9, WIDTH))}[pool]

    def collate(items: list[Any]) -> Any:
        mixed = [x + torch.as_tensor(other[3][0]) for x, _ in items]
        return torch.stack(mixed), torch.stack([y for _, y in items])

    examples = LoaderExamples.of(DataLoader(data, 6, collate_fn=collate))
    if pool == "public":
        examples.checked()
    else:
        with raises(ScenarioError, "training-loop.collate-mixes"):
            examples.checked()


def test_a_collate_function_that_remembers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = [torch.zeros(WIDTH)]

    def collate(items: list[Any]) -> Any:
        seen.append(items[0][0])
        return torch.stack([x + seen[-2] for x, _ in items]), torch.stack([y for _, y in items])

    with raises(ScenarioError, "training-loop.collate-mixes"):
        moved(PROVED_KINDS["tensors"], tmp_path, monkeypatch, collate_fn=collate)
