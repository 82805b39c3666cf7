"""Relative paths begin in the folder of the file that names them; those of `--set` and of Python, where it runs."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from api_sections import SECTIONS
from paths import ROOT

import flower_privdec as fp
from flower_privdec.cli import main
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.fields import Section
from flower_privdec.engine.run import run
from flower_privdec.experiment.view import Experiment
from flower_privdec.scenario import load_scenario, numbers_hash, parse_scenario, scenario_hash, to_yaml
from flower_privdec.scenario.loading import PATHS
from flower_privdec.scenario.sections import Scenario
from flower_privdec.studies.cells import expand
from flower_privdec.studies.spec import load_study
from tests.support.raising import raises

TEXT = """
name: own
n_peers: 3
rounds: 4
data: {dataset: npz, root: data/own.npz, batch: {size: 5}}
model: {name: linear}
algorithm: {name: d-psgd, learning_rate: 0.1}
topology: {name: edge-list, file: ring.txt}
privacy: {noise_multiplier: 1.0, delta: 1.0e-3, ledger: books}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a scenario and what it names, where the command does not run."""
    folder, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (folder / "data").mkdir(parents=True)
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    rng = np.random.default_rng(1)
    arrays = {"x_train": rng.normal(size=(45, 2)), "x_test": rng.normal(size=(9, 2))}
    np.savez(folder / "data" / "own.npz", **arrays, y_train=np.arange(45) % 2, y_test=np.arange(9) % 2)
    (folder / "ring.txt").write_text("0 1\n1 2\n2 0\n")
    (folder / "own.yaml").write_text(TEXT)
    return folder


def paths_of(scenario: Scenario) -> dict[str, str]:
    dumped = scenario.model_dump(by_alias=True)
    pairs = [path for path in PATHS if len(path) == 2]
    return {f"{section}.{key}": path for section, key in pairs if (path := dumped[section].get(key)) is not None}


def test_all_paths_of_a_file_begin_in_its_folder(project: Path) -> None:
    run(Experiment.build(load_scenario(project / "own.yaml")), Path("run"))
    assert (project / "books").is_dir()
    assert [path.name for path in Path().iterdir()] == ["run"]
    text = TEXT.replace("root: data/own.npz", "root: data/own.npz, test: ~/test").replace(
        "linear}", "linear, from: ../runs/1}"
    )
    (project / "all.yaml").write_text(text)
    assert paths_of(load_scenario("../project/all.yaml")) == {
        "data.root": f"{project}/data/own.npz",
        "data.test": os.path.expanduser("~/test"),
        "model.from": f"{project.parent}/runs/1",
        "topology.file": f"{project}/ring.txt",
        "privacy.ledger": f"{project}/books",
    }


def test_the_graph_of_secrets_is_relative_to_its_file(project: Path) -> None:
    secrets = "{name: edge-list, file: ring.txt, directed: false}"
    noise = f"noise: {{kind: cancelling, colluding: 1, secrets: {secrets}}}, ledger: books"
    (project / "own.yaml").write_text(TEXT.replace("ledger: books", noise))
    loaded = load_scenario(project / "own.yaml")
    assert loaded.private is not None
    assert loaded.private.model_dump()["noise"]["secrets"]["file"] == f"{project}/ring.txt"


def test_the_list_of_paths_is_whole() -> None:
    """Each key of a section that takes a path is in the list."""
    sections, keys = [Section], set()
    for section in sections:  # grows
        sections += section.__subclasses__()
        for name, field in section.model_fields.items():
            if "_path_text" in str(field.annotation):
                keys.add(field.alias or name)
    assert keys == {path[-1] for path in PATHS}


def test_paths_without_a_file_are_relative_to_here(project: Path) -> None:
    here = os.getcwd()
    given = load_scenario(
        project / "own.yaml", ["data.root=a.npz", "privacy={noise_multiplier: 1, delta: 0.1, ledger: b}"]
    )
    assert paths_of(given) | {"topology.file": ""} == {
        "data.root": f"{here}/a.npz",
        "topology.file": "",
        "privacy.ledger": f"{here}/b",
    }
    assert fp.load_scenario(project / "own.yaml", {"data.root": "~/a.npz"}).data.root == os.path.expanduser("~/a.npz")
    assert parse_scenario(TEXT).data.root == f"{here}/data/own.npz"


def test_python_reads_a_file_as_a_command_does(project: Path) -> None:
    """One rule: every path that a file names begins in its folder, whoever reads it; every other, where it runs."""
    secrets = "noise: {kind: cancelling, colluding: 1, secrets: {name: edge-list, file: ring.txt, directed: false}}"
    text = TEXT.replace("root: data/own.npz", "root: data/own.npz, test: data/test.npz")
    text = text.replace("linear}", "linear, from: ../runs/1}").replace("ledger: books", f"ledger: books, {secrets}")
    (project / "all.yaml").write_text(text)
    read = fp.load_scenario("../project/all.yaml")
    assert read == load_scenario("../project/all.yaml")
    assert set(paths_of(read)) == {".".join(path) for path in PATHS if len(path) == 2}
    assert to_yaml(read).count(str(project)) == len(PATHS) - 1  # the model's is in the folder above
    here = os.getcwd()
    own = fp.load_scenario(
        project / "all.yaml", {"data.test": "t.npz"}, topology={"name": "edge-list", "file": "g.txt"}
    )
    assert (own.data.test, own.topology.file, own.data.root) == (
        f"{here}/t.npz",
        f"{here}/g.txt",
        f"{project}/data/own.npz",
    )
    made = fp.make_scenario({**SECTIONS, "topology": {"name": "edge-list", "file": Path("g.txt")}})
    assert made.topology.file == f"{here}/g.txt"


def test_a_message_shows_the_whole_path(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "data" / "own.npz").unlink()
    with pytest.raises(SystemExit):
        main.main(["run", "../project/own.yaml"])
    assert f"data.root={project}/data/own.npz is not a file" in capsys.readouterr().err
    with raises(ScenarioError, "topology.file", f"{os.getcwd()}/no.txt"):
        Experiment.build(load_scenario(project / "own.yaml", ["topology.file=no.txt"]))


def test_a_run_names_its_files_wherever_it_is_read(project: Path) -> None:
    run(Experiment.build(load_scenario(project / "own.yaml")), Path("run"))
    assert paths_of(load_scenario("run/scenario.yaml")) == paths_of(load_scenario(project / "own.yaml"))
    assert parse_scenario(to_yaml(load_scenario("run/scenario.yaml"))) == load_scenario(project / "own.yaml")


def test_a_run_whose_files_moved_goes_on(project: Path) -> None:
    """So do peers with the same files in other folders meet: what they compare has no folders."""
    scenario = load_scenario(project / "own.yaml", ["privacy.ledger=null", "evaluation.every=2"])
    run(Experiment.build(scenario), Path("run"), on_metrics=lambda metrics: metrics["round"] == 2)
    shutil.move(project, project.parent / "moved")
    moved = load_scenario(project.parent / "moved" / "own.yaml", ["privacy.ledger=null", "evaluation.every=2"])
    assert scenario_hash(moved) == scenario_hash(scenario)
    assert numbers_hash(moved) == numbers_hash(scenario)
    assert run(Experiment.build(moved), Path("run"), resume=True)["rounds"] == 4
    assert scenario_hash(moved, movable=False) != scenario_hash(scenario, movable=False)


def test_paths_of_a_study_begin_in_its_folder(project: Path) -> None:
    (project / "studies").mkdir()
    (project / "studies" / "own.yaml").write_text(
        "name: own\ntitle: Own\nbase: ../own.yaml\nsettings: [privacy.ledger=null]\nparts:\n"
        "  - name: data\n    title: Data\n    metrics: [accuracy]\n    axes:\n"
        "      data: {key: data.root, values: [a.npz, b/a.npz]}\n"
    )
    study, base = load_study("../project/studies/own.yaml")
    roots = [cell.scenario.data.root for cell in expand(study, base, None, study.parts)]
    assert roots == [f"{project}/studies/a.npz", f"{project}/studies/b/a.npz"]
    one = expand(study, base, None, study.parts, ["topology.file=x.txt"])[0].scenario
    assert (one.topology.file, one.private.ledger) == (f"{os.getcwd()}/x.txt", None)


@pytest.mark.parametrize(
    ("name", "made_of"),
    [
        ("digits", "98e54fd383201bec82b08465a9a44deb317ecdd6675085a7ded8a42707964cbd"),
        ("pdsl-digits", "dfb083613a91ce7dc5e89364907ba9081c80eff3a0c4ba6119b25bbc94c457d7"),
        ("dp-dda-breast-cancer", "2f651fced966f71d66ebae33519f6b02b8bce7760aa926e96992f9246b05929f"),
    ],
)
def test_keys_of_published_tables_stay(name: str, made_of: str) -> None:
    """A key of the file that moves, or a further option with a default, must move no draw."""
    scenario = load_scenario(ROOT / "scenarios" / f"{name}.yaml")
    assert numbers_hash(scenario) == made_of


def test_a_scenario_can_be_sent_to_another_process() -> None:
    """Its sections are classes that stand in no module."""
    scenario = load_scenario(ROOT / "scenarios" / "dp-dda-breast-cancer.yaml", ["topology={name: erdos-renyi}"])
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).topology.name)"
    other = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(scenario), capture_output=True, check=True)
    assert other.stdout.split() == [b"erdos-renyi"]
    assert pickle.loads(pickle.dumps(scenario)) == scenario
