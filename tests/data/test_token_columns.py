"""Tokenized texts by column: read alike in every form, or refused in one line before any work."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import user_texts
from raising import raises
from user_texts import LENGTH, SIZES, VOCABULARY

import flower_privdec as fp
from flower_privdec.common.errors import ScenarioError
from flower_privdec.data.token_columns import TokenColumns
from flower_privdec.experiment import Experiment
from flower_privdec.models.layers.one_tensor import unpacked

SECTIONS: dict[str, Any] = {
    "name": "texts",
    "n_peers": 3,
    "rounds": 2,
    "model": user_texts.reader,
    "algorithm": {"name": "privsgp", "learning_rate": 0.5},
    "privacy": {"epsilon": 8.0, "delta": 1.0e-3},
}


def scenario(train: Any, test: Any, **data: Any) -> fp.Scenario:
    section = {"train": train, "test": test, "batch": {"size": 5}, "vocabulary": VOCABULARY, **data}
    return fp.make_scenario(SECTIONS, data=section)


def of_module(monkeypatch: pytest.MonkeyPatch, returned: Any, **data: Any) -> fp.Scenario:
    """Return a scenario whose data are what a function of a module returns."""
    module = types.ModuleType("my_texts")
    vars(module)["halves"] = lambda part: returned
    monkeypatch.setitem(sys.modules, "my_texts", module)
    section = {"dataset": {"module": "my_texts:halves"}, "batch": {"size": 5}, "columns": SIZES, **data}
    return fp.make_scenario(SECTIONS, data=section)


def hugging_face(columns: dict[str, Any]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({name: np.asarray(values).tolist() for name, values in columns.items()})


class Items(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Texts one by one, each a mapping of tensors, as tutorials have them."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {name: torch.as_tensor(values[place]) for name, values in self.columns.items()}


def beside_labels(columns: dict[str, Any]) -> Any:
    inputs = {name: torch.as_tensor(values) for name, values in columns.items() if name != "labels"}
    return inputs, columns["labels"]


FORMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "mapping": dict,
    "lists": lambda columns: {name: values.tolist() for name, values in columns.items()},
    "beside labels": beside_labels,
    "torch": Items,
    "hugging face": hugging_face,
    "hugging face in torch's format": lambda columns: hugging_face(columns).with_format("torch"),
    "hugging face, chosen rows": lambda columns: hugging_face(columns).select(range(len(columns["labels"]))),
}


def test_columns_are_the_digits_of_packed_tokens() -> None:
    random = np.random.default_rng(3)
    for sizes in (SIZES, {"input_ids": 7}, {"a": 2, "b": 1, "c": 2**40, "d": 3}):
        given = {name: random.integers(0, size, (9, 4)) for name, size in sizes.items()}
        packed, _, _ = TokenColumns.of({**given, "labels": np.zeros(9, int)}).packed(sizes, "classes", "data")  # type: ignore[union-attr]
        assert packed.dtype == np.int64
        for name, column in unpacked(torch.from_numpy(packed), sizes).items():
            assert np.array_equal(column.numpy(), given[name])


@pytest.mark.parametrize("form", FORMS)
def test_texts_are_read_alike_in_every_form(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train = user_texts.columns(40)
    test = user_texts.columns(30, seed=2)
    expected = Experiment.build(scenario(train, test))
    assert expected.scenario.data.columns == SIZES

    found = [Experiment.build(scenario(FORMS[form](train), FORMS[form](test)))]
    if form != "torch":
        found.append(Experiment.build(of_module(monkeypatch, FORMS[form](train))))
    for experiment in found:
        assert torch.equal(experiment.own.examples.x, expected.own.examples.x)
        assert torch.equal(experiment.own.examples.y, expected.own.examples.y)


def test_what_was_read_and_left_is_told() -> None:
    train = {**user_texts.columns(40), "idx": np.arange(40), "text": ["word"] * 40}
    plan = str(fp.plan(scenario(train, user_texts.columns(30, seed=2))))
    assert "data.train: 40 rows, 4 columns, 2 classes" in plan
    assert "left 2 columns (idx, text)" in plan


def test_each_peer_may_have_texts_of_its_own() -> None:
    parts = [user_texts.columns(20 + peer, seed=peer) for peer in range(3)]
    experiment = Experiment.build(scenario(parts, user_texts.columns(30, seed=9)))
    assert experiment.own.examples.sizes.tolist() == [20, 21, 22]


def changed(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in {**user_texts.columns(40), **values}.items() if value is not None}


def edited(name: str, place: Any, value: int) -> dict[str, Any]:
    columns = user_texts.columns(40)
    columns[name][place] = value
    return columns


TOKENS = user_texts.columns(40)["input_ids"]
MASK = user_texts.columns(40)["attention_mask"]
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no tokens": (changed(input_ids=None, text=["a word"] * 40), "data.columns", "tokenize the texts"),
    "no mask": (changed(attention_mask=None), "data.columns", "no column 'attention_mask'"),
    "no labels": (changed(labels=None), "data.columns", "no column 'labels'"),
    "labels twice": (changed(label=np.zeros(40)), "data.columns", "'labels', 'label'"),
    "a token too many": (edited("input_ids", (3, 1), VOCABULARY), "data.tokens", "0 to 29 in row 3"),
    "a negative token": (edited("input_ids", (5, 2), -1), "data.tokens", "in row 5"),
    "a mask that weighs": (edited("attention_mask", (2, 0), 2), "data.tokens", "'attention_mask'"),
    "a mask of zeros": (edited("attention_mask", 4, 0), "data.empty-text", "row 4"),
    "real numbers": (changed(input_ids=TOKENS / 2), "data.tokens", "must be whole numbers"),
    "one row for all": (changed(input_ids=TOKENS[:, 0]), "data.tokens", r"\[examples, tokens\]"),
    "several lengths": (changed(input_ids=[[3] * (2 + i % 3) for i in range(40)]), "data.ragged", "max_length"),
    "a shorter mask": (changed(attention_mask=MASK[:, :-1]), "data.lengths", "must be alike"),
    "fewer labels": (changed(labels=[0, 1]), "data.lengths", "40 rows for 2 labels"),
    "a label of -100": (edited("labels", 7, -100), "data.labels", "in row 7"),
    "a label of each token": (changed(labels=TOKENS), "data.labels", "`private`"),
    "labels that lack": (changed(labels=[None, 1] * 20), "data.no-arrays", "lacks values"),
    "labels of text": (changed(labels=["ill", "well"] * 20), "data.labels", "class_encode_column"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_columns_are_refused_in_one_line(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    columns, code, words = WRONG[kind]
    with raises(ScenarioError, code, words) as refused:
        Experiment.build(scenario(columns, user_texts.columns(30)))
    assert "\n" not in str(refused.value)
    with raises(ScenarioError, code):
        Experiment.build(of_module(monkeypatch, columns))


@pytest.mark.parametrize("labels", [[None, 1], [0, -100]])
def test_labels_that_lack_are_refused_of_hugging_face(labels: list[Any]) -> None:
    from datasets import Dataset

    columns = {name: values.tolist() for name, values in user_texts.columns(40).items()}
    train = Dataset.from_dict({**columns, "labels": labels * 20})
    code = "data.labels" if None not in labels else "data.no-arrays"
    with raises(ScenarioError, code):
        scenario(train, user_texts.columns(30))


def test_texts_longer_than_the_test_set_are_refused() -> None:
    shorter = {name: values[:, :-2] if values.ndim > 1 else values for name, values in user_texts.columns(30).items()}
    with raises(ScenarioError, "data.shapes", "one max_length"):
        Experiment.build(scenario(user_texts.columns(40), shorter))


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        ({"vocabulary": None}, "api.data", r"len\(tokenizer\)"),
        ({"columns": ["input_ids"]}, "api.data", "must map"),
        ({"columns": SIZES}, "data.columns", "leave vocabulary out"),
        ({"vocabulary": None, "columns": {"input_ids": 30, "no mask": 2}}, "data.columns", "no column 'no mask'"),
        ({"vocabulary": None, "columns": {"input_ids": 2**62, "attention_mask": 2}}, "data.columns", "combinations"),
        ({"vocabulary": None, "columns": {"position_ids": LENGTH}}, "data.columns", "no column 'position_ids'"),
    ],
)
def test_wrong_keys_of_columns_are_refused(data: dict[str, Any], code: str, words: str) -> None:
    with raises(ScenarioError, code, words):
        scenario(user_texts.columns(40), user_texts.columns(30), **data)


def test_columns_are_of_own_data_and_own_models() -> None:
    digits = {"dataset": "digits", "batch": {"size": 5}, "columns": SIZES}
    with raises(ScenarioError, "data.columns", "dataset=digits has none"):
        fp.make_scenario(SECTIONS, data=digits)
    texts = scenario(user_texts.columns(40), user_texts.columns(30))
    with raises(ScenarioError, "model.columns", "leave one"):
        Experiment.build(fp.make_scenario(texts, model={"name": "text"}))
    pair = (user_texts.columns(40)["input_ids"], user_texts.columns(40)["labels"])
    with raises(ScenarioError, "api.data", "set data.columns to None"):
        fp.make_scenario(texts, {"data.train": pair, "data.test": pair})


def test_tokens_only_are_for_named_models_too() -> None:
    tokens = {"input_ids": VOCABULARY}
    texts = scenario(user_texts.columns(40), user_texts.columns(30), vocabulary=None, columns=tokens)
    experiment = Experiment.build(fp.make_scenario(texts, model={"name": "text"}))
    assert experiment.public.n_tokens == VOCABULARY


@pytest.mark.parametrize("name", ["labels", "no name"])
def test_columns_must_be_arguments_and_no_labels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(ScenarioError, "data.columns", f"columns.{name}"):
        of_module(monkeypatch, user_texts.columns(40), columns={**SIZES, name: 2})
