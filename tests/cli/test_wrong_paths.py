"""A folder in the place of a file, a file in that of a folder, or in the middle of a path: each command says which."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from command_line import privdec
from run_folders import make_run
from typer.main import get_command
from wards import write_ward

from flower_privdec.cli.main import app
from flower_privdec.common.exit_codes import WRONG_INPUT

# By command and path: what is to be there, and a command line in which @ is something else. FINE is a scenario, CERTS
# its certificates, OTHER a scenario without addresses, RUN a folder of a run; NEW is not there.
LINES = {
    ("audit", "scenario"): ("file", "audit @"),
    ("audit", "plot"): ("file", "audit FINE --plot @.svg"),
    ("certs", "scenario"): ("file", "certs @ --out NEW"),
    ("certs", "out"): ("folder", "certs FINE --out @"),
    ("certs", "authority"): ("file", "certs FINE --out NEW --authority @ --authority-key CERTS/authority.key"),
    ("certs", "authority_key"): ("file", "certs FINE --out NEW --authority CERTS/authority.pem --authority-key @"),
    ("deploy", "scenario"): ("file", "deploy @ --out NEW"),
    ("deploy", "out"): ("folder", "deploy FINE --out @"),
    ("deploy", "authority"): ("file", "deploy FINE --out NEW --authority @ --authority-key CERTS/authority.key"),
    ("deploy", "authority_key"): ("file", "deploy FINE --out NEW --authority CERTS/authority.pem --authority-key @"),
    ("doctor", "scenario"): ("file", "doctor @ --id 0 --env NEW"),
    ("doctor", "environment"): ("file", "doctor FINE --id 0 --env @"),
    ("export", "run"): ("folder", "export @ --out NEW.pt"),
    ("export", "out"): ("file", "export RUN --out @"),
    ("flower-run", "app"): ("folder", "flower-run @"),
    ("guard", "policy"): ("file", "guard @ true"),
    ("init", "path"): ("file", "init @.yaml --yes --data digits"),
    ("ledger", "path"): ("file", "ledger @ --delta 1e-5"),
    ("members", "scenario"): ("file", "members @"),
    ("members", "certificates"): ("folder", "members FINE --certs @"),
    ("members", "authority_key"): ("file", "members FINE leave --id 0 --certs CERTS --authority-key @"),
    ("members", "source"): ("file", "members FINE merge --certs CERTS --from @"),
    ("peer", "scenario"): ("file", "peer @ --id 0"),
    ("peer", "out"): ("folder", "peer FINE --id 0 --certs CERTS --out @"),
    ("peer", "certificates"): ("folder", "peer FINE --id 0 --out NEW --certs @"),
    ("peer", "log_file"): ("file", "peer FINE --id 0 --certs CERTS --out NEW --log-file @"),
    ("plan", "scenario"): ("file", "plan @"),
    ("rehearse", "scenario"): ("file", "rehearse @"),
    ("rehearse", "faults"): ("file", "rehearse OTHER --faults @"),
    ("rehearse", "out"): ("folder", "rehearse OTHER --out @"),
    ("report", "runs"): ("folder", "report @ --out NEW.html"),
    ("report", "out"): ("file", "report RUN --out @.html"),
    ("run", "scenario"): ("file", "run @"),
    ("run", "out"): ("folder", "run OTHER --out @"),
    ("show", "scenario"): ("file", "show @"),
    ("soak", "scenario"): ("file", "soak @ --minutes 0.01"),
    ("soak", "out"): ("folder", "soak OTHER --minutes 0.01 --out @"),
    ("status", "certificates"): ("folder", "status 127.0.0.1:1 --certs @"),
    ("study", "out"): ("folder", "study digits --out @"),
    ("topology", "scenario"): ("file", "topology @"),
    ("topology", "out"): ("file", "topology OTHER --out @.svg"),
    ("up", "scenario"): ("file", "up @"),
    ("up", "out"): ("folder", "up OTHER --out @"),
    ("watch", "target"): ("folder", "watch @"),
    ("watch", "certificates"): ("folder", "watch FINE --certs @"),
}

# Looked at only once much else is there, or by something that is not of this package.
NOT_TRIED = {
    ("audit", "out"): "real peers are killed in it",
    ("doctor", "out"): "what is wrong is a finding, not an end",
    ("doctor", "certificates"): "what is wrong is a finding, not an end",
    ("flower-run", "out"): "an app runs in it",
    ("init", "test"): "a table of one's own comes before",
    ("network-bench", "out"): "a benchmark runs in it",
    ("peer", "app"): "an app of one's own",
    ("peer", "initial"): "an app of one's own",
}

OTHER = """
name: paths
n_peers: 3
rounds: 2
data: {dataset: digits, samples: 120, test_samples: 60, batch: {size: 20}}
model: {name: softmax}
algorithm: {name: privsgp, learning_rate: 1.0}
privacy: {epsilon: 3.0, delta: 1.0e-3}
"""

WRONG = {"file": ("a-folder", "a-file/below"), "folder": ("a-file", "a-file/below")}
CASES = [
    (command, path, wrong)
    for (command, path), (kind, _) in LINES.items()
    for wrong in WRONG[kind]
    if path != "scenario" or wrong == "a-folder" or command == "run"  # all read it by one function
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make what the command lines name, and return where it is."""
    folder = tmp_path_factory.mktemp("paths")
    scenario = write_ward(folder, ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"))
    assert privdec("certs", scenario, "--out", folder / "certs") == 0
    (folder / "other.yaml").write_text(OTHER)
    (folder / "a-file").write_text("not what is wanted\n")
    for name in ("a-folder", "a-folder.svg", "a-folder.yaml", "a-folder.html"):
        (folder / name).mkdir()
        (folder / name / "something").write_text("in it\n")
    return {
        "FINE": scenario,
        "CERTS": folder / "certs",
        "OTHER": folder / "other.yaml",
        "RUN": make_run(folder / "run"),
        "NEW": folder / "new",
    }


@pytest.mark.parametrize(("command", "path", "wrong"), CASES)
def test_a_path_of_the_wrong_kind_is_named(
    command: str, path: str, wrong: str, places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = places["FINE"].parent
    before = sorted(folder.rglob("*"))
    _, line = LINES[command, path]
    for name, place in (places | {"@": folder / wrong}).items():
        line = line.replace(name, str(place))
    capsys.readouterr()

    status = privdec(*shlex.split(line))
    said = capsys.readouterr().err
    assert status == WRONG_INPUT, said
    assert str(folder / "a-f") in said
    assert not {"Errno", "Traceback", "Error("} & {word for word in ("Errno", "Traceback", "Error(") if word in said}
    assert sorted(folder.rglob("*")) == before


def test_every_path_of_every_command_is_tried() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    there = {
        (name, one.name) for name, command in commands.items() for one in command.params if one.type.name == "path"
    }
    assert there == LINES.keys() | NOT_TRIED.keys()
