"""What the documents say holds: the tests they name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.name)
def test_every_test_that_a_page_names_is_there(page: Path) -> None:
    for file, name in NAMED.findall(page.read_text(encoding="utf-8")):
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file}::{name}"
