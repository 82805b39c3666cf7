"""Scenarios from Python: read from a file, or built from the same sections and checked by the same rules."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from flower_privdec.common.catalogue import Targets
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.fields import own_modules
from flower_privdec.common.formatting import one_line, shown
from flower_privdec.common.user_code import Given, give, is_given, users_code
from flower_privdec.core import Algorithm
from flower_privdec.data.intake import NOTHING, Intake
from flower_privdec.data.pixels import PLAIN_PIXELS, channels_first, scale_pixels
from flower_privdec.data.table_columns import from_frame
from flower_privdec.data.token_columns import TokenColumns
from flower_privdec.experiment.object_hash import object_hash
from flower_privdec.experiment.run_key import content_of
from flower_privdec.graph.topology import Topology, networkx
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.file_sections import TableSection
from flower_privdec.scenario.findings import Location
from flower_privdec.scenario.loading import (
    DEEPEST,
    anchor,
    file_form,
    find_scenario,
    put,
    read_text,
    read_yaml,
    validated,
)
from flower_privdec.scenario.sections import PEER, TaskSection

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class Arrays:
    """Copies of a caller's arrays.

    Attributes:
        train: x and y of all peers together, or of each peer.
        test: x and y of the public test set.
        per_peer: whether there is one pair for each peer.
        intakes: what was read of those that were frames, and what was left, by their keys.
    """

    train: list[Pair]
    test: Pair
    per_peer: bool
    intakes: Mapping[str, Intake] = field(default_factory=dict)

    @classmethod
    def of(cls, train: Any, test: Any, read: Callable[[Any, str], Pair | None] = lambda value, key: None) -> Arrays:
        """Take data in one of the forms that `make_scenario` describes.

        Args:
            read: returns the arrays of a table, or None of what is none.

        Raises:
            ScenarioError: they are something else.
        """
        per_peer = isinstance(train, list)
        if per_peer and not train:
            raise _data_error("data.train is an empty list: give a pair (x, y) or a torch dataset for each peer")
        if per_peer:
            parts = [(f"data.train[{i}]", part) for i, part in enumerate(train)]
        else:
            parts = [("data.train", train)]
        if test is None:
            raise _data_error("data.test is missing: give a public test set beside data.train")
        pairs = [read(part, where) or _pair(part, where) for where, part in parts]
        tested = read(test, "data.test") or _pair(test, "data.test")

        for (where, _), (x, _) in zip([*parts, ("data.test", test)], [*pairs, tested], strict=True):
            if x.ndim > 0 and len(x) == 0:
                remedy = "give it at least one"
                if per_peer and where != "data.test":
                    remedy = "give that peer at least one, or leave it out and lower n_peers"
                raise _data_error(f"{where} has no examples: {remedy}")
        return cls(pairs, tested, per_peer)

    def __call__(self, part: str, root: str = "0") -> Pair:
        """Return a part, `train` or `test`; root is the peer's number where each has its own data."""
        return self.test if part == "test" else self.train[int(root)]

    def intake(self, part: str, root: str = "0") -> Intake:
        """Return what was read of a part, if it was a frame."""
        key = f"data.{part}"
        if part == "train" and self.per_peer:
            key = f"data.train[{root}]"
        return self.intakes.get(key, NOTHING)


@dataclass(frozen=True)
class _ColumnReader:
    """Reads what has columns: tables and tokenized texts.

    Attributes:
        table: the columns of tables, by the scenario.
        labels: the classes of tables.
        sizes: how many values each column of tokenized texts has; None if the data are something else.
        targets: the kind of target that the task takes.
        intakes: what was read of each, by its key: calls add to them.
    """

    table: TableSection | None
    labels: Any
    sizes: Mapping[str, int] | None
    targets: Targets
    intakes: dict[str, Intake]

    def __call__(self, value: Any, key: str) -> Pair | None:
        """Return x and y of a table or of texts; None of anything else."""
        texts = TokenColumns.of(value)
        if texts is not None and self.sizes is not None:
            x, y, self.intakes[key] = texts.packed(self.sizes, self.targets, key)
            return x, y
        if self.sizes is not None:
            raise _data_error(
                f"{key} is a {type(value).__name__}, and data.columns is of tokenized texts: give a mapping of columns "
                "or a Hugging Face Dataset, or set data.columns to None"
            )
        return self._of_frame(value, key)

    def _of_frame(self, value: Any, key: str) -> Pair | None:
        """Return x and y of a pandas frame or a Hugging Face dataset, by the columns of the table; None of others."""
        kind = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
        if kind not in ("pandas.DataFrame", "datasets.Dataset"):
            return None
        if self.table is None:
            if kind.startswith("datasets") and (pair := _images(value, key)) is not None:
                return pair
            raise _data_error(
                f"{key} is a {type(value).__name__}: name its columns in data.table, as "
                "{'target': 'outcome', 'numbers': {'age': [60, 12]}, 'categories': {'ward': ['A', 'B']}}, "
                "with constants that are public; of texts, tokenize them, which gives a column input_ids"
            )
        header = [str(name) for name in (value.columns if kind.startswith("pandas") else value.column_names)]

        def column(name: str) -> list[Any]:
            if kind.startswith("datasets"):
                return list(value[name])
            cells = value.iloc[:, header.index(name)]
            return list(cells.astype(object).where(cells.notna(), None))

        x, y, self.intakes[key] = from_frame(header, column, key, self.table, self.labels, self.targets)
        return x, y


def _gathered(value: Any, key: str) -> Any:
    """Return the items of a torch dataset as columns if they are mappings; anything else as it is."""
    if not isinstance(value, Dataset) or not hasattr(value, "__len__"):
        return value
    dataset: Any = value
    with users_code(f"{key}: the dataset fails", "api.data"):
        if len(dataset) == 0 or not isinstance(dataset[0], Mapping):
            return value
        items = [dataset[i] for i in range(len(dataset))]
        return {name: [item[name] for item in items] for name in items[0]}


def _images(rows: Any, key: str) -> Pair | None:
    """Return x and y of a Hugging Face dataset of a column of images and one of class labels; None of any other."""
    kinds = {name: type(feature).__name__ for name, feature in rows.features.items()}
    images, labels = ([name for name, kind in kinds.items() if kind == wanted] for wanted in ("Image", "ClassLabel"))
    if len(images) != 1 or len(labels) != 1:
        return None
    pictures = list(rows[images[0]])
    if odd := {picture.mode for picture in pictures} - {"L", "RGB"}:
        raise _data_error(f"{key}: column {images[0]!r} has images of mode {sorted(odd)}: convert all to RGB or L")
    x = torch.from_numpy(_stack([np.asarray(picture) for picture in pictures], f"{key}: column {images[0]!r}"))
    return scale_pixels(channels_first(x), PLAIN_PIXELS).numpy(), np.asarray(rows[labels[0]], np.int64)


def _column_reader(section: Data, task: Any, intakes: dict[str, Intake]) -> _ColumnReader:
    """Return the reader of tables and texts in a scenario's data, whose own keys it takes out of the section."""
    train = section["train"]
    given = [*(train if isinstance(train, list) else [train]), section.get("test")]
    table = None
    labels = None
    if {"pandas", "datasets"} & {type(part).__module__.partition(".")[0] for part in given}:
        table = section.pop("table", None)
        labels = section.pop("labels", None)
        if table is not None:
            table = validated(TableSection, plain(table), "data.table")

    targets: Targets = "classes"
    with suppress(ValueError, ScenarioError):  # which the whole scenario's check reports
        targets = TaskSection.model_validate(plain(task or {})).targets
    sizes = None
    if table is None:
        sizes = _sizes_of_columns(section, given)
    return _ColumnReader(table, labels, sizes, targets, intakes)


def _sizes_of_columns(section: Data, given: Sequence[Any]) -> Mapping[str, int] | None:
    """Return how many values each column of tokenized texts has, and put it into the section; None without texts."""
    sizes = section.get("columns")
    if sizes is not None:
        is_right = isinstance(sizes, Mapping) and all(type(size) is int and size > 0 for size in sizes.values())
        if not is_right:
            raise _data_error(
                f"data.columns={shown(sizes)} must map the model's arguments to how many values each has, as "
                "{'input_ids': len(tokenizer), 'attention_mask': 2}"
            )
        return dict(sizes)

    tokenized = [texts for texts in map(TokenColumns.of, given) if texts is not None and texts.has_tokens]
    if not tokenized:
        return None
    vocabulary = section.pop("vocabulary", None)
    if type(vocabulary) is not int or vocabulary < 1:
        raise _data_error(
            f"data.vocabulary={shown(vocabulary)} must be how many tokens the model knows, if there is a column "
            "input_ids: give len(tokenizer), or model.config.vocab_size"
        )
    section["columns"] = tokenized[-1].sizes(vocabulary)
    return dict(section["columns"])


def _pair(value: Any, key: str) -> Pair:
    if isinstance(value, Dataset):  # every example once, in order
        dataset: Any = value
        try:
            count = len(dataset)
        except (TypeError, ValueError) as error:
            raise _data_error(f"{key} is a dataset without a length: give one that has one, or arrays") from error
        with users_code(f"{key}: the dataset fails", "api.data"):
            pairs = [dataset[i] for i in range(count)]
        if not pairs or not all(isinstance(example, tuple | list) and len(example) == 2 for example in pairs):
            raise _data_error(f"{key}: the dataset must have examples, each of them a pair (x, y)")
        x, y = zip(*pairs, strict=True)
        return _stack(x, f"{key}: x"), _stack(y, f"{key}: y")

    if not isinstance(value, tuple) or len(value) != 2:
        kind = type(value).__name__
        raise _data_error(f"{key} is a {kind}: it must be a tuple (x, y) of arrays, or a torch dataset of such pairs")

    return _array(value[0], f"{key}: x"), _array(value[1], f"{key}: y")


def _stack(values: Sequence[Any], key: str) -> np.ndarray:
    parts = [_array(value, key) for value in values]
    shapes = {part.shape for part in parts}
    if len(shapes) > 1:
        raise _data_error(f"{key} has shapes {sorted(shapes)}: all examples' must be alike")
    return np.stack(parts)


def _array(value: Any, key: str) -> np.ndarray:
    """Return a copy of an array, a tensor or lists of numbers."""
    if np.ma.is_masked(value):
        raise _data_error(
            f"{key} is an array with masked numbers, whose mask would be lost: give what stands for them, as "
            "array.filled(0), and the mask as features beside, or leave these examples out"
        )
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
        ScenarioError: an object of a wrong kind.
    """
    namer = _Namer()
    namer.name_section(data, "algorithm", namer.code)
    namer.name_section(data, "model", namer.code)
    namer.name_section(data, "topology", namer.topology)
    task = data.get("task")
    section = data.get("data")
    if isinstance(task, dict):
        namer.name_section(task, "loss", namer.code, "task.")
        if isinstance(task.get("metrics"), Sequence) and not isinstance(task["metrics"], str):
            task["metrics"] = [namer.metric(part) for part in task["metrics"]]
    if isinstance(section, dict):
        namer.name_section(section, "dataset", namer.code, "data.")
        namer.arrays(section, task)
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
        if key.startswith("task.loss") and isinstance(value, type) and issubclass(value, nn.Module):
            raise ScenarioError(
                f"{key} is the class {label}, and calling it would only make an object of it: give one, {label}()",
                code="api.class",
            )
        if not callable(value):
            message = f"{key} is a {label}: it must be something to call, or its name"
            raise ScenarioError(message, code="api.not-callable")

        module = getattr(value, "__module__", None) or ""
        name = getattr(value, "__qualname__", "")
        home = sys.modules.get(module)
        importable = module != "__main__" and getattr(home, "__spec__", None) is not None
        if importable and getattr(home, name, None) is value:
            return f"{module}:{name}"

        try:
            content = object_hash(value)
        except ScenarioError:  # it holds a lock, a generator, ...: no other object is taken for it
            return self._register(give(value, label, secrets.token_bytes(32)))

        return self._register(give(value, label, content, partial(object_hash, value)))

    def topology(self, value: Any, key: str) -> str:
        """Name a graph, or a function that makes it."""
        if isinstance(value, str) or (callable(value) and not isinstance(value, Topology)):
            return self.code(value, key)
        if isinstance(value, networkx().Graph):
            frozen = networkx().freeze(value.copy())
            content = object_hash((type(value).__name__, list(frozen.nodes), list(frozen.edges)))
            return self._register(give(lambda n_peers: frozen, "graph", content, lambda: content))

        def graph(n_peers: int) -> Any:
            return value

        return self.code(graph, key)

    def metric(self, value: Any) -> Any:
        """Name a metric; its label is the function's name by default."""
        if isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("module"), str)):
            return value
        section = dict(value) if isinstance(value, Mapping) else {"module": value}
        function = section.get("module")
        label = getattr(function, "__name__", type(function).__name__)
        if label == "<lambda>" and "name" not in section:
            raise ScenarioError(
                "task.metrics has a lambda, which has no name to be reported under: give a function made by def, or "
                '{"name": "my-metric", "module": the lambda}',
                code="api.metric-name",
            )
        return {"name": label, **section, "module": self.code(function, "task.metrics")}

    def arrays(self, section: Data, task: Any) -> None:
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

        train = section["train"]
        if isinstance(train, list):
            section["train"] = [_gathered(part, f"data.train[{i}]") for i, part in enumerate(train)]
        else:
            section["train"] = _gathered(train, "data.train")
        section["test"] = _gathered(section.get("test"), "data.test")

        intakes: dict[str, Intake] = {}
        read = _column_reader(section, task, intakes)
        arrays = replace(Arrays.of(section.pop("train"), section.pop("test", None), read), intakes=intakes)
        content = content_of([array for pair in (*arrays.train, arrays.test) for array in pair])
        section["dataset"] = {"module": self._register(give(arrays, "data", content))}
        if arrays.per_peer:
            section |= {"root": PEER, "test": "test"}

    def _register(self, part: Given) -> str:
        self.named.append(part)
        return part.target


def check_everywhere(scenario: Scenario, why: str) -> None:
    """Raise if a scenario has objects that other processes cannot import; `why` says what the others are for.

    Raises:
        ScenarioError: the message names the part that is an object.
    """
    for key, module in own_modules(scenario):
        if is_given(module):
            # Data are given as arrays: nobody wrote the section that holds them.
            named = key
            remedy = "put it into a module and name that"
            if key == "data.dataset.module":
                named = "data"
                remedy = "save them to a file (data.dataset=npz, for one) and name that"
                if scenario.data.columns is not None:
                    remedy = "save them to a file, and name a function of a module that returns its columns"
            raise ScenarioError(
                f"{named}: given as a Python object, and {why}, which cannot import it: {remedy}",
                code="api.object-in-processes",
            )


Settings = Mapping[str, Any]


def load_scenario(path: str | Path, settings: Settings | None = None, /, **sections: Any) -> Scenario:
    """Read a scenario file. Its relative paths start at its folder; those that are given here at the current one.

    Args:
        path: the path of a file, or the name of a bundled scenario such as `digits`.
        settings: values that override the file's, by dotted key, as `{"privacy.epsilon": 1}`: what `--set` does.
        sections: whole sections, or keys at the top, in place of the file's: `privacy="none"`, `rounds=10`.

    Raises:
        ScenarioError: the message names the line, the value, the rule and the remedy.
    """
    path = find_scenario(as_path(path, "path"))
    data, lines = read_yaml(read_text(path), str(path))
    anchor(data, path.parent)
    return _checked(data, str(path), settings, sections, lines)


def make_scenario(
    base: Scenario | Mapping[str, Any] | None = None, settings: Settings | None = None, /, **sections: Any
) -> Scenario:
    """Build a scenario from its sections, in the form that they have in a file, with objects where a file has names.

    - `algorithm`, as its `module`: a subclass of `Algorithm`.
    - `model`, or its `module`: a function that returns a `torch.nn.Module`.
    - `topology`, or its `module`: a networkx graph, one list of out-neighbours for each peer, or a function of n_peers.
    - `task`, as its `loss`: a function of one example's outputs and target; among its `metrics`: functions of a model's
      outputs and the targets of the test set.
    - `data`, as its `train` and `test` in place of a dataset: a pair (x, y) of arrays or tensors, or a torch dataset of
      such pairs; a Hugging Face `Dataset` of images with class labels; with `table` (and `labels`) as of a CSV
      file, a pandas frame or a Hugging Face `Dataset`; or, with `vocabulary`, tokenized texts: a Hugging Face
      `Dataset`, a mapping of columns, or a torch dataset of mappings. A list of these as `train` has one for each
      peer, and then nothing is partitioned. Data are copied.

    A class or function of an importable module is stored as its import path. A scenario with any other object runs in
    only in this process; the scenario.yaml of its run cannot be run again.

    Args:
        base: another scenario, or all sections as one mapping, to start from.
        settings: values that override it, by dotted key, as `{"privacy.epsilon": 1}`.
        sections: whole sections, or keys at the top, in place of the base's.

    Raises:
        ScenarioError: the message names the value, the rule and the remedy.

    Privacy: a run's noise is keyed by the data and the graph that are given; with any other object, and with code of a
        module of your own, it is drawn for the one run only. A run is refused after an object was seen to change. With
        `privacy.ledger`, data arrays need `data.source`, the name under which the ledger counts them.

    Examples:
        >>> sections = {"name": "small", "n_peers": 4, "rounds": 10, "model": {"name": "softmax"}, "privacy": "none"}
        >>> data = {"dataset": "digits", "batch": {"size": 12}}
        >>> base = make_scenario(sections, data=data, algorithm={"name": "sgp", "learning_rate": 0.5})
        >>> make_scenario(base, {"data.batch.size": 24}, seed=2).data.batch.size
        24
        >>> make_scenario(base, rounds=0)
        Traceback (most recent call last):
        flower_privdec.common.errors.ScenarioError: scenario: rounds=0 must be >= 1
    """
    if isinstance(base, Scenario):
        base = file_form(base)
    return _checked(dict(_mapping(base or {}, "base")), "scenario", settings, sections)


def as_scenario(scenario: Scenario | str | Path) -> Scenario:
    """Return a scenario, read from its file if its path is given.

    Raises:
        ScenarioError: see `load_scenario`.
    """
    if not isinstance(scenario, Scenario | str | os.PathLike):
        raise ScenarioError(
            f"a {type(scenario).__name__} is not a scenario: give one (make_scenario makes one of a mapping), or the "
            "path of its file",
            code="api.argument",
        )
    if isinstance(scenario, Scenario):
        return scenario
    return load_scenario(scenario)


def as_path(path: str | Path, name: str) -> Path:
    """Return the path that an argument of this name is.

    Raises:
        ScenarioError: it is not a path.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or isinstance(os.fspath(path), bytes):
        raise ScenarioError(
            f"{name}={shown(path)} must be a path: text that is not empty, or a pathlib.Path", code="api.path"
        )
    return Path(path).expanduser()


def _checked(
    data: dict[str, Any],
    where: str,
    settings: Settings | None,
    sections: Mapping[str, Any],
    lines: Mapping[Location, int] | None = None,
) -> Scenario:
    """Lay settings and sections over plain data, and return them as a scenario."""
    data = _copied({**data, **sections})
    overrides: dict[Location, str] = {(name,): where for name in sections}
    for key, value in _mapping(settings or {}, "settings").items():
        path = tuple(key.split("."))
        put(data, path, _copied(value))
        overrides[path] = "settings"

    named = name_objects(data)
    scenario = validated(Scenario, plain(data), where, lines, overrides)
    for part in scenario.given:
        arrays = part.value
        if isinstance(arrays, Arrays) and arrays.per_peer and len(arrays.train) != scenario.n_peers:
            raise ScenarioError(
                f"data.train lists data of {len(arrays.train)} peers for n_peers={scenario.n_peers}: give one of each, "
                "or one pair (x, y) to partition",
                code="api.data-per-peer",
            )

    del named  # it kept the registered objects alive until the scenario refers to them
    return scenario


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ScenarioError(f"{name}={shown(value)} must be a mapping whose keys are text", code="api.mapping")
    return value


def _copied(value: Any, depth: int = 0) -> Any:
    """Return a copy of nested sections, DEEPEST levels deep; `plain` refuses deeper ones."""
    if not isinstance(value, Mapping) or depth > DEEPEST:
        return value
    return {key: _copied(item, depth + 1) for key, item in value.items()}


def plain(value: Any, key: str = "", depth: int = 0) -> Any:
    """Return a Python value as a file would have it: lists, plain numbers, text."""
    if depth > DEEPEST:
        raise ScenarioError(
            f"scenario: {shown(key)[1:-1]} is more than {DEEPEST} levels deep, or holds itself", code="api.mapping"
        )
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise ScenarioError(f"{key or 'scenario'}: key {name!r} must be text", code="api.mapping")
        return {name: plain(item, f"{key}.{name}".lstrip("."), depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, key, depth + 1) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return os.fspath(value) if isinstance(value, os.PathLike) else value
