"""The thermometer of dense code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.breath import Density, density_of, files_of

LINES = "\n".join(f"    x = {number}" for number in range(14))


def test_each_kind_of_line_is_counted() -> None:
    docstring = '"""Docstring\nof two lines."""\n\n'
    source = docstring + "# A comment\na, b = 1, 2  # not a line of its own\nc = a if b else 3\nd, e = f()\n"
    assert density_of(source) == Density(
        code_lines=3,
        comment_lines=1,
        nodes=6 + 5 + 5,
        conditional_expressions=1,
        parallel_assignments=1,
    )


@pytest.mark.parametrize(
    ("body", "long", "without_pause"),
    [
        (f"{LINES}\n    return x", 1, 1),
        (f"{LINES}\n    # why\n    return x", 1, 0),
        (f"{LINES}\n\n    return x", 1, 0),
        (LINES, 0, 0),
        (f'    """Docstring."""\n\n{LINES}\n    return x', 1, 1),
        (f"    text = '''\n\n'''\n{LINES}\n    return x", 1, 1),
    ],
)
def test_a_blank_or_comment_line_is_a_pause(body: str, long: int, without_pause: int) -> None:
    density = density_of(f"def f():\n{body}\n")
    assert (density.long_functions, density.long_without_pause) == (long, without_pause)


def test_a_place_is_a_file_folder_or_package(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    inside = tmp_path / "inside.py"
    for file in (inside, tmp_path / "tests" / "test_it.py"):
        file.write_text("x = 1\n", encoding="utf-8")

    assert files_of(str(inside)) == files_of(str(tmp_path)) == [inside]
    assert any(file.name == "table.py" for file in files_of("rich"))
    with pytest.raises(SystemExit):
        files_of("no_such_package")
