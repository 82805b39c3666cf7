"""The scripts that show faults of other libraries: their headers say all that the page has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.docs.findings_table import FOLDER, HeaderError, findings_table, header_of


def test_every_script_is_a_row_of_its_page() -> None:
    scripts = sorted(FOLDER.glob("*.sh"))
    rows = findings_table().splitlines()[2:]
    assert len(rows) == len(scripts) > 0
    for path, row in zip(scripts, rows, strict=True):
        shown = header_of(path)
        cells = (shown.expected, shown.seen, shown.version, shown.here)
        assert all(cell and f"| {cell} " in row for cell in cells)

        # The version that the header names is the one that the script installs.
        name, version = shown.version.split()
        assert f"{name}=={version}" in path.read_text(encoding="utf-8")


def test_a_header_that_lacks_a_paragraph_is_named(tmp_path: Path) -> None:
    path = tmp_path / "some.sh"
    path.write_text("# flwr 1.42.0: it stops.\n#\n# Expected: it goes on.\n# Seen: it stops.\nset -e\n")
    with pytest.raises(HeaderError) as raised:
        header_of(path)
    assert "`# Here: ...`" in str(raised.value)
