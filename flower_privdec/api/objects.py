"""Python objects in a scenario: arrays, models, functions and graphs in place of names.

A class or function of an importable module gets the name `package.module:name`. Any other object, such as a function of
a notebook, an array or a graph, is registered (`common.user_code.Given`) under a name that is valid in this process for
as long as a scenario uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset

from flower_privdec.common.formatting import one_line
from flower_privdec.common.user_code import Given, give, is_given
from flower_privdec.core import Algorithm
from flower_privdec.errors import RAISED_BY_USERS, ScenarioError
from flower_privdec.experiment.run_key import object_hash
from flower_privdec.graph.topology import Topology, networkx
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.sections import PEER, own_modules

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class Arrays:
    """Copies of a caller's arrays.

    Attributes:
        train: x and y of all peers together, or of each peer.
        test: x and y of the public test set.
        per_peer: whether there is one pair for each peer.
    """

    train: list[Pair]
    test: Pair
    per_peer: bool

    @classmethod
    def of(cls, train: Any, test: Any) -> Arrays:
        """Take data in one of the forms that `make_scenario` describes.

        Raises:
            ScenarioError: they are something else.
        """
        per_peer = isinstance(train, list)
        if per_peer and not train:
            raise _data_error("data.train is an empty list: give a pair (x, y) or a torch dataset for each peer")
        parts = [(f"data.train[{i}]", part) for i, part in enumerate(train)] if per_peer else [("data.train", train)]
        if test is None:
            raise _data_error("data.test is missing: give a public test set beside data.train")
        return cls([_pair(part, where) for where, part in parts], _pair(test, "data.test"), per_peer)

    def __call__(self, part: str, root: str = "0") -> Pair:
        """Return a part, `train` or `test`; root is the peer's number where each has its own data."""
        return self.test if part == "test" else self.train[int(root)]


def _pair(value: Any, key: str) -> Pair:
    if isinstance(value, Dataset):
        return _dataset_pair(value, key)
    if not isinstance(value, tuple) or len(value) != 2:
        kind = type(value).__name__
        raise _data_error(f"{key} is a {kind}: it must be a tuple (x, y) of arrays, or a torch dataset of such pairs")
    return _array(value[0], f"{key}: x"), _array(value[1], f"{key}: y")


def _dataset_pair(dataset: Any, key: str) -> Pair:
    """Read a torch dataset: every example once, in order."""
    try:
        count = len(dataset)
    except (TypeError, ValueError) as error:
        raise _data_error(f"{key} is a dataset without a length: give one that has one, or arrays") from error
    try:
        pairs = [dataset[i] for i in range(count)]
    except RAISED_BY_USERS as error:  # a user's own dataset may raise anything
        raise _data_error(f"{key}: the dataset fails: {one_line(error)}") from error
    if not pairs or not all(isinstance(example, tuple | list) and len(example) == 2 for example in pairs):
        raise _data_error(f"{key}: the dataset must have examples, each of them a pair (x, y)")
    x, y = zip(*pairs, strict=True)
    return _stack(x, f"{key}: x"), _stack(y, f"{key}: y")


def _stack(values: Sequence[Any], key: str) -> np.ndarray:
    parts = [_array(value, key) for value in values]
    shapes = {part.shape for part in parts}
    if len(shapes) > 1:
        raise _data_error(f"{key} has shapes {sorted(shapes)}: all examples' must be alike")
    return np.stack(parts)


def _array(value: Any, key: str) -> np.ndarray:
    """Return a copy of an array, a tensor or lists of numbers."""
    try:
        array = np.array(value.detach().cpu().numpy() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError, MemoryError) as error:
        raise _data_error(f"{key} is not an array: {one_line(error)}") from error
    if array.dtype.kind not in "buif":
        kind = type(value).__name__
        raise _data_error(f"{key} is a {kind} of {array.dtype}: it must be an array of numbers")
    return array


def _data_error(message: str) -> ScenarioError:
    return ScenarioError(message, code="api.data")


Data = dict[str, Any]


INSTANCES: dict[str, tuple[type, str]] = {  # by key: a type whose instances are refused, and the remedy
    "algorithm": (
        Algorithm,
        'give the class, with the keys of its section beside it, as {"module": TheClass, "learning_rate": 0.1}',
    ),
    "model": (nn.Module, "its first parameters must be drawn by the seed: give a function that makes it"),
}


def name_objects(data: Data) -> list[Given]:
    """Replace the objects in a scenario's data by names, in place.

    Returns:
        The named objects; a name is valid for as long as its object is referenced.

    Raises:
        ScenarioError: an object of a wrong kind, or one whose content cannot be hashed.
    """
    namer = _Namer()
    namer.name_section(data, "algorithm", namer.code)
    namer.name_section(data, "model", namer.code)
    namer.name_section(data, "topology", namer.topology)
    task, section = data.get("task"), data.get("data")
    if isinstance(task, dict):
        namer.name_section(task, "loss", namer.code, "task.")
        if isinstance(task.get("metrics"), Sequence) and not isinstance(task["metrics"], str):
            task["metrics"] = [namer.metric(part) for part in task["metrics"]]
    if isinstance(section, dict):
        namer.name_section(section, "dataset", namer.code, "data.")
        namer.arrays(section)
    return namer.named


class _Namer:
    """Names objects, and holds those that it named."""

    def __init__(self) -> None:
        self.named: list[Given] = []

    def name_section(self, data: Data, key: str, name: Callable[[Any, str], str], path: str = "") -> None:
        """Name the object of a section: the section itself, or its key `module`."""
        section = data.get(key)
        if section is None or isinstance(section, str):
            return
        is_graph = key == "topology" and isinstance(section, dict) and all(isinstance(peer, int) for peer in section)
        if not isinstance(section, dict) or (section and is_graph):
            data[key] = {"module": name(section, f"{path}{key}")}
        elif "module" in section:
            data[key] = {**section, "module": name(section["module"], f"{path}{key}.module")}

    def code(self, value: Any, key: str) -> str:
        """Name a class or a function."""
        if isinstance(value, str):
            return value
        label = getattr(value, "__name__", type(value).__name__)
        kind, remedy = INSTANCES.get(key.partition(".")[0], (type(None), ""))
        if isinstance(value, kind):
            raise ScenarioError(f"{key} is an instance of {label}: {remedy}", code="api.instance")
        if not callable(value):
            message = f"{key} is a {label}: it must be something to call, or its name"
            raise ScenarioError(message, code="api.not-callable")
        name = _importable_name(value)
        if name is not None:
            return name
        try:
            content = object_hash(value)
        except ScenarioError as error:
            raise ScenarioError(
                f"{key}={label}: {error}; give it numbers, text, arrays, functions and classes alone, or put it into a "
                "module and name that",
                code=error.code,
            ) from error
        return self._register(give(value, label, content, partial(object_hash, value)))

    def topology(self, value: Any, key: str) -> str:
        """Name a graph, or a function that makes it."""
        if isinstance(value, str) or (callable(value) and not isinstance(value, Topology)):
            return self.code(value, key)
        if isinstance(value, networkx().Graph):
            graph = networkx().freeze(value.copy())
            content = object_hash((type(value).__name__, list(graph.nodes), list(graph.edges)))
            return self._register(give(lambda n_peers: graph, "graph", content, lambda: content))
        return self._register(give(lambda n_peers: value, "graph", object_hash(value), partial(object_hash, value)))

    def metric(self, value: Any) -> Any:
        """Name a metric; its label is the function's name by default."""
        if isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("module"), str)):
            return value
        section = dict(value) if isinstance(value, Mapping) else {"module": value}
        function = section.get("module")
        label = getattr(function, "__name__", type(function).__name__)
        return {"name": label, **section, "module": self.code(function, "task.metrics")}

    def arrays(self, section: Data) -> None:
        """Name the data of the keys `train` and `test`."""
        if "train" not in section:
            return
        dataset = section.get("dataset")
        if isinstance(dataset, dict) and is_given(dataset.get("module")):  # the base's, which these replace
            test = section.get("test")
            section |= {"dataset": None, "root": None, "test": None if isinstance(test, str) else test}
        for key in ("dataset", "root"):
            if section.get(key) is not None:
                raise ScenarioError(
                    f"data.{key} names data, and data.train gives them: remove one of them", code="api.data-twice"
                )
        arrays = Arrays.of(section.pop("train"), section.pop("test", None))
        section["dataset"] = {"module": self._register(give(arrays, "data", object_hash((arrays.train, arrays.test))))}
        if arrays.per_peer:
            section |= {"root": PEER, "test": "test"}

    def _register(self, part: Given) -> str:
        self.named.append(part)
        return part.target


def _importable_name(value: Any) -> str | None:
    """Return a class's or function's `package.module:name`; None where it cannot be imported."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    home = sys.modules.get(module or "")
    if module == "__main__" or getattr(home, "__spec__", None) is None or getattr(home, name, None) is not value:
        return None
    return f"{module}:{name}"


def check_given(scenario: Scenario) -> None:
    """Raise unless a list of data has one entry for each peer.

    Raises:
        ScenarioError: naming both numbers.
    """
    for part in scenario.given:
        arrays = part.value
        if isinstance(arrays, Arrays) and arrays.per_peer and len(arrays.train) != scenario.n_peers:
            raise ScenarioError(
                f"data.train lists data of {len(arrays.train)} peers for n_peers={scenario.n_peers}: give one of each, "
                "or one pair (x, y) to partition",
                code="api.data-per-peer",
            )


def check_everywhere(scenario: Scenario, why: str) -> None:
    """Raise if a scenario has objects that other processes cannot import.

    Args:
        why: the reason that there are other processes, for the error.

    Raises:
        ScenarioError: naming the part that is an object.
    """
    for key, module in own_modules(scenario):
        if is_given(module):
            raise ScenarioError(
                f"{key} was given as a Python object, and {why}, which cannot import it: put it into a module (data "
                "into a file) and name that",
                code="api.object-in-processes",
            )
