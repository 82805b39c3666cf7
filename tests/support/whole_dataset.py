"""Both halves of a dataset, as one peer that holds all of it reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flower_privdec.data.datasets import check_fit, read_examples, read_public
from flower_privdec.scenario.sections import DataSection, PartitionSection


@dataclass
class Whole:
    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    n_classes: int
    input_shape: tuple[int, ...]


def load_dataset(name: str, root: str | None = None, *, seed: int = 0, **options: Any) -> Whole:
    """Read the test set and all training examples; options are those of a scenario's section `data`."""
    section = DataSection.model_construct(dataset=name, root=root, partition=PartitionSection(), **options)
    public = read_public(section, seed)
    examples = read_examples(section, seed, 1, [0])
    check_fit(examples, public, root)
    return Whole(name, examples.x, examples.y, public.x, public.y, public.n_classes, public.input_shape)
