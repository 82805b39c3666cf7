"""A data loader that draws Poisson batches, each paid before it is drawn."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from flower_privdec.data.sampling import draw_poisson
from flower_privdec.errors import RAISED_BY_USERS, RunError, ScenarioError
from flower_privdec.rows.keys import KEY_BYTES, keyed_generator
from flower_privdec.training_loop.noised_steps import NoisedSteps
from flower_privdec.training_loop.privacy_budget import PrivacyBudget

LINES = 16  # that a pass writes into the ledger, or so
KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "pin_memory_device"),
)


class PrivateLoader:
    """The user's loader with Poisson batches: each example is in each with chance batch_size / examples.

    It has as many batches as the user's. One into which nobody is drawn is not shown: its step, on noise
    alone, is taken here. The ledger is locked while the loader is being iterated over.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        steps: NoisedSteps,
        budget: PrivacyBudget,
        *,
        reserve: int | None,
        seed: bytes | None,
        report: Callable[[str], None],
    ) -> None:
        """Draw from a loader's dataset.

        Args:
            reserve: how many steps a line in the ledger pays for; None is a sixteenth of a pass, or a whole one where
                workers read ahead.
            seed: a key to draw from, INSECURE; None is the operating system's entropy, anew each time.
            report: what is called with a line on what was spent, after each pass.
        """
        self._loader, self._steps, self._budget, self._seed, self._report = loader, steps, budget, seed, report
        self._reserve = reserve or (len(loader) if loader.num_workers else max(1, len(loader) // LINES))

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        with self._budget.opened() as open_budget:
            done = 0
            try:
                while done < len(self):
                    count = open_budget.charge(min(self._reserve, len(self) - done))
                    yield from self._batches(count, open_budget.first + done)
                    done += count
            finally:
                if done:
                    self._report(str(open_budget))

    def _batches(self, count: int, first: int) -> Iterator[Any]:
        """Yield the batches of some steps that are paid."""
        sizes, places = self._draw(count, first)
        drawn = np.split(places, np.cumsum(sizes)[:-1])
        batches = iter(self._read([each.tolist() for each in drawn if len(each)]))
        for number, size in enumerate(sizes.tolist(), start=first):
            if size == 0:
                self._steps.step_on_noise(number)
                continue
            batch = _next(batches)
            self._steps.draw(size, number)
            yield batch
            self._steps.check_taken()

    def _draw(self, count: int, first: int) -> tuple[np.ndarray, np.ndarray]:
        key = os.urandom(2 * KEY_BYTES) if self._seed is None else self._seed
        release = self._budget.release
        return draw_poisson(keyed_generator(key, "sampling", first), count, release.dataset_size, release.sampling_rate)

    def _read(self, batches: list[list[int]]) -> DataLoader[Any]:
        kept: Mapping[str, Any] = {name: getattr(self._loader, name) for name in KEPT}
        return DataLoader(self._loader.dataset, batch_sampler=batches, **kept)


def _next(batches: Iterator[Any]) -> Any:
    """Return the next batch.

    Raises:
        RunError: the dataset or the collate_fn fails, without what it said, which may tell of examples.
    """
    try:
        return next(batches)
    except RAISED_BY_USERS as error:
        failure = type(error).__name__
    raise RunError(
        f"the dataset or the collate_fn raised {failure} on private examples (what it said is withheld, for it may "
        "tell of them); try them on made-up ones, each by its number"
    )


def check_loader(loader: object) -> None:
    """Refuse what cannot be sampled example by example.

    Raises:
        ScenarioError: with the remedy.
    """
    if isinstance(loader, PrivateLoader):
        raise ScenarioError("this data loader is private already: give private() the loader that it was made of")
    if not isinstance(loader, DataLoader):
        raise ScenarioError(f"data_loader is a {type(loader).__name__}: it must be a torch.utils.data.DataLoader")
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ScenarioError(
            f"{type(dataset).__name__} is read from its beginning to its end, so no example can be drawn by chance: "
            "give a map-style dataset, with __getitem__ and __len__"
        )
    if loader.batch_size is None:
        raise ScenarioError("the data loader has a batch_sampler, or batches of its own: give it a batch_size instead")
    sampler = loader.sampler
    if not isinstance(sampler, RandomSampler | SequentialSampler) or getattr(sampler, "replacement", False):
        raise ScenarioError(
            f"the data loader's {type(sampler).__name__} decides which examples are drawn, and Poisson sampling has "
            "to: leave it out; a part of a dataset is a torch.utils.data.Subset of it"
        )
    if len(sampler) != len(dataset) or len(dataset) < 1 or len(loader) < 1:
        raise ScenarioError(
            f"{len(dataset)} examples in batches of {loader.batch_size} make {len(loader)} batches: give at least one, "
            "a sampler over all examples, and no drop_last where there are fewer than a batch"
        )
