"""YAML as plain data: bounded, one line of error with its place, and read back as it was written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from flower_privdec.common.errors import ScenarioError, did_you_mean
from flower_privdec.common.formatting import shown
from flower_privdec.scenario.loading import DEEPEST, LONGEST, read_plain, write_yaml

TENFOLD = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{key}: &{key} [{', '.join([f'*{below}'] * 10)}]\n" for below, key in zip("abcdefgh", "bcdefghi", strict=True)
)
STAIRS = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [[[[[[[*a{i - 1}]]]]]]]\n" for i in range(1, 9))

REFUSED = {
    "an alias bomb": (TENFOLD, ("scenario.yaml", "y:6")),
    "depth by aliases": (STAIRS, ("scenario.yaml", f"{DEEPEST}")),
    "itself": ("a: &a [*a]", ("scenario.yaml", "y:1")),
    "itself, further in": ("a: &a {b: {c: *a}}", ("scenario.yaml",)),
    "open brackets": ("a: " + "[" * 100_000, ("scenario.yaml", f"{DEEPEST}")),
    "deep mappings": ("".join(" " * i + "a:\n" for i in range(1000)), ("scenario.yaml", f"y:{DEEPEST}")),
    "a number as key": ("x: 1\n1: 2", ("yaml.key", "y:2")),
    "a list as key": ("[1]: 2", ("yaml.key", "y:1")),
    "merged keys": ("a: &a {x: 1}\nb: {<<: *a}", ("yaml.key", "y:2")),
    "a key twice": ("a: 1\nb: 2\na: 3", ("yaml.repeated-key", "y:3")),
    "a control character": ("a: 1\nb: \x07", ("scenario.yaml", "y:2")),
    "one that is written out": ('a: 1\nb: "\\x1b[2J"', ("yaml.control", r"y:2: '\\x1b\[2J'")),
    "half a character": ('a: "\\ud800"', ("yaml.control",)),
    "digits without end": ("a: " + "9" * 5000, ("yaml.scalar", "y:1")),
    "hexadecimal digits without end": ("a: 0x" + "9" * 5000, ("yaml.number", r"2\^63")),
    "a number of base eight, or ten": ("a: [1, 010]", ("yaml.octal", "y:1: '010'")),
    "below numbers": ("a: -1e-400", ("yaml.number", "y:1: '-1e-400'")),
    "beyond numbers": ("a: 1e400", ("yaml.number", "y:1: '1e400'")),
    "bytes": ("a: !!binary aGk=", ("yaml.tag", "y:1")),
    "an object": ("a: !!python/object/apply:os.system [ls]", ("yaml.tag", "y:1")),
    "a set": ("a: !!set {b}", ("yaml.tag",)),
    "a number that is none": ("a: !!int x", ("yaml.scalar",)),
    "an alias of nothing": ("a: *b", ("scenario.yaml", "y:1")),
    "two documents": ("a: 1\n---\nb: 1", ("scenario.yaml", "y:2")),
    "too much of it": ("#" * (LONGEST + 1), ("yaml.long", "1,048,576")),
}


@pytest.mark.parametrize(("text", "refusal"), REFUSED.values(), ids=REFUSED)
def test_unplain_or_endless_yaml_is_refused_in_one_line(text: str, refusal: tuple[str, ...]) -> None:
    with raises(ScenarioError, *refusal) as error:
        read_plain(text, "y")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_aliases_stand_for_copies_and_dates_are_text() -> None:
    data, lines = read_plain("a: &a {x: 1}\nb: *a\nc: 2020-01-01\nd: 1e-5", "y")
    assert data == {"a": {"x": 1}, "b": {"x": 1}, "c": "2020-01-01", "d": 1e-5}
    assert data["a"] is not data["b"]
    assert (lines["a", "x"], lines["b",], lines["c",]) == (1, 2, 3)
    assert read_plain("", "y") == (None, {})


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Zl", "Zp")), max_size=9)
NUMBERS = st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
SIGNS = st.sampled_from(["1e5", "yes", "null", "2020-01-01", "0x1", "1:30", "~", "<<", "-", "*a", "!!set", "a: b", ""])
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS | SIGNS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | SIGNS, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize("time", ["1:30", "-1:59:59", "1:30.5", "1" + ":59" * 3000])
def test_sixties_are_text(time: str) -> None:
    assert read_plain(f"a: {time}", "y")[0] == {"a": time}


@pytest.mark.parametrize(
    ("text", "number"), [("0", 0), ("-0", 0), ("0.0", 0), ("0e9", 0), ("1_000", 1000), ("0x10", 16)]
)
def test_numbers_that_say_what_they_are_are_taken(text: str, number: float) -> None:
    assert read_plain(f"a: {text}", "y")[0] == {"a": number}


@pytest.mark.slow
@given(PLAIN)
def test_written_yaml_reads_back(data: object) -> None:
    assert read_plain(write_yaml(data), "y")[0] == data


def test_a_value_is_shown_on_one_bounded_line() -> None:
    loop: list[object] = []
    loop.append(loop)
    for value in ("a\nb", "x" * 10**6, list(range(10**5)), loop, 10**5000):
        assert "\n" not in shown(value)
        assert len(shown(value)) < 100


@pytest.mark.parametrize(
    ("word", "known", "near"),
    [
        ("p", ["name", "rows", "probability"], "probability"),
        ("lr", ["learning_rate", "name"], "learning_rate"),
        ("eps", ["delta", "epsilon"], "epsilon"),
        ("num_rounds", ["name", "rounds"], "rounds"),
        ("learnig_rate", ["name", "learning_rate"], "learning_rate"),
        ("N-Peers", ["name", "n_peers"], "n_peers"),
        ("a", ["batch", "size"], None),
        ("", ["batch"], None),
        ("zzz", ["name", "seed"], None),
        ("digit", ["digits-local", "digits"], "digits"),
    ],
)
def test_a_suggestion_is_near(word: str, known: list[str], near: str | None) -> None:
    assert did_you_mean(word, known) == (f"; did you mean {near!r}?" if near else "")
