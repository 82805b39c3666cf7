"""The files beside the code that other programs read: the citation, and what the wheel says of the package."""

from __future__ import annotations

import tomllib

import yaml
from paths import ROOT

from flower_privdec import __version__


def test_citation_names_version_and_license_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert str(citation["version"]) == project["version"] == __version__
    assert citation["license"] == project["license"]
    assert citation["cff-version"] == "1.2.0"
    assert all(citation[key] for key in ("message", "title", "authors"))
