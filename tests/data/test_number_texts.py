"""Numbers as tables write them: a whole column is read as each of its texts is."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flower_privdec.data.number_texts import KNOWN_MARKS, Marks, TextColumn, reader

WORDS = ["1", "-2.5", "1.234", "0.125", "1,5", "1,234.5", "1 234", "1'234", "12", "1e5", "1E-3", ".5", "5.", "+7"]
WORDS += ["inf", "nan", "1e999", "1_000", "0x1", "٣", "2024-01-15", "-", "e", "1-2", "\u22124", "1\u00a0234", "1,2,3"]
COLUMNS = st.lists(st.sampled_from(WORDS) | st.text("0123456789.,-+eE '", min_size=1, max_size=7), min_size=1)


@pytest.mark.parametrize("marks", KNOWN_MARKS)
@given(texts=COLUMNS)
@example(texts=["1.234"])
@example(texts=["1,234", "5"])
@example(texts=["5.", "1e999"])
@settings(max_examples=50)
def test_a_column_is_read_as_each_of_its_texts(marks: Marks, texts: list[str]) -> None:
    texts = [text.strip() or "0" for text in texts]
    one_by_one = [reader(*marks)(text) for text in texts]
    expected: list[float] | None = [number for number in one_by_one if number is not None and math.isfinite(number)]
    if expected is None or len(expected) < len(texts):
        expected = None
    assert TextColumn(texts).numbers(*marks) == expected
