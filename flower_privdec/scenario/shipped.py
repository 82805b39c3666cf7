"""The scenarios and studies that come along: those of the folder one is in, and the package's own."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from flower_privdec.common.formatting import shown
from flower_privdec.errors import ScenarioError

FOLDER = "scenarios"


def shipped(kind: str = ".") -> dict[str, Path]:
    """Return what can be named without its path: `scenarios/KIND/NAME.yaml` by NAME.

    A file under the folder one is in comes before the package's own of that name, which lie inside an installed
    package and beside it in a checkout.

    Args:
        kind: `.` for scenarios, `studies` for studies.
    """
    package = Path(__file__).resolve().parents[1]
    paths: dict[str, Path] = {}
    for root in (Path(), package, package.parent):
        for path in sorted((root / FOLDER / kind).glob("*.yaml")):
            paths.setdefault(path.stem, path)
    return paths


def find_scenario(path: Path | str) -> Path:
    """Return the path of a scenario's file, which may be named alone where it comes along, as `digits`.

    Raises:
        ScenarioError: a name that is neither a file's nor known.
    """
    path = Path(path)
    with suppress(OSError):  # too long a name: the reader reports it
        if path.exists():
            return path
    if path.suffix or path.parent != Path():
        return path
    paths = shipped()
    if path.name not in paths:
        raise ScenarioError(
            f"{shown(str(path))[1:-1]}: is no file, nor a scenario that comes along ({', '.join(paths)}); give a path"
        )
    return paths[path.name]
