"""The wheel: what is in it, and that it works beside its dependencies alone, without the extras'."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from ports import own_addresses

from tools.peer_wheel import build_peer_wheel, peer_dependencies
from tools.try_install import ROOT, build_sdist, build_wheel, make_environment, try_it, try_peers

pytestmark = pytest.mark.slow
NAME = "flower-privdec"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel, built once."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_code_templates_scenarios_and_studies(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
        names = {name for name in archive.namelist() if name.startswith("flower_privdec/")}
        metadata = email.message_from_bytes(archive.read("flower_privdec-0.1.0.dist-info/METADATA"))
        licenses = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "flower_privdec").rglob("*") if path.is_file()}
    scenarios = {f"flower_privdec/{path.relative_to(ROOT)}" for path in (ROOT / "scenarios").rglob("*.yaml")}
    assert tops == {"flower_privdec", "flower_privdec-0.1.0.dist-info"}
    assert names == {name for name in package if "__pycache__" not in name} | scenarios
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("Project-URL")
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert licenses

    # Links to files of the repository would lead nowhere on a package index.
    text = metadata.get_payload()
    assert "# flower_privdec" in text
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links
    assert all(link.startswith("https://") for link in links)


def test_the_source_distribution_has_what_its_tests_read(tmp_path: Path) -> None:
    """Every file of the repository is in it, and the tests of results, pictures and links pass in it."""
    with tarfile.open(build_sdist(tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = (path for path in tmp_path.glob("flower_privdec-*") if path.is_dir())
    if (ROOT / ".git").exists():
        tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert [name for name in tracked.splitlines() if name[0] != "." and not (tree / name).exists()] == []

    files = [f"tests/docs/test_{name}.py" for name in ("claims", "findings", "gallery", "policies", "site_links")]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "pytest", "--quick", *files]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def _of_core(dependencies: list[str]) -> set[str]:
    """Return the distributions that the package's dependencies are, and those that they depend on."""
    found: set[str] = set()
    waiting = [(NAME, "")]
    seen = set(waiting)
    while waiting:
        name, extra = waiting.pop()
        found.add(_normal(name))
        for text in (distribution(name).requires or ()) if name != NAME else dependencies:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                new = {(needed.name, each) for each in ("", *needed.extras)} - seen
                seen |= new
                waiting += new
    return found - {NAME}


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _dependencies() -> list[str]:
    """Return what the package depends on without extras."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    dependencies: list[str] = settings["project"]["dependencies"]
    return dependencies


def _lend(packages: Path, dependencies: list[str]) -> None:
    """Link into an environment the installed packages that the core needs, and no others."""
    core = _of_core(dependencies)
    for module, owners in packages_distributions().items():
        if core & {_normal(owner) for owner in owners}:
            for place in {Path(str(distribution(owner).locate_file(""))) for owner in owners}:
                for file in {place / module, place / f"{module}.py", *place.glob(f"{module}.*.so")}:
                    if file.exists() and not (packages / file.name).exists():
                        os.symlink(file, packages / file.name)
    for name in core:
        info = Path(str(distribution(name)._path))  # type: ignore[attr-defined]
        os.symlink(info, packages / info.name)


def test_it_works_without_extras_and_names_missing_ones(wheel: Path, tmp_path: Path) -> None:
    binaries = make_environment(tmp_path / "environment", wheel, "--no-deps")
    (packages,) = (tmp_path / "environment" / "lib").glob("python*/site-packages")
    _lend(packages, _dependencies())
    for name in ("ray", "kymatio", "flwr", "matplotlib", "torchvision", "dp_accounting"):
        assert not (packages / name).exists()
    try_it(binaries, tmp_path)


def test_a_small_peer_runs_with_little_installed(tmp_path: Path) -> None:
    wheel = build_peer_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read("flower_privdec_peer-0.1.0.dist-info/METADATA"))
        names = archive.namelist()
    assert sorted(metadata.get_all("Requires-Dist", [])) == sorted(peer_dependencies())
    assert "flower_privdec/small/__init__.py" in names

    binaries = make_environment(tmp_path / "environment", wheel, "--no-deps")
    (packages,) = (tmp_path / "environment" / "lib").glob("python*/site-packages")
    _lend(packages, peer_dependencies())
    for name in ("torch", "scipy", "numba", "sklearn", "networkx", "jinja2"):
        assert not (packages / name).exists()
    for status in try_peers(binaries, tmp_path, own_addresses(2)):
        assert status["small"]
        assert status["round"] == 4
        assert status["epsilon"] == pytest.approx(3.0, rel=0.01)


def test_a_small_peer_needs_what_others_need() -> None:
    whole = {Requirement(text).name for text in _dependencies()}
    assert {Requirement(text).name for text in peer_dependencies()} <= whole
