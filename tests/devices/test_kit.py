"""A kit has all that its device gets, and nothing more; making kits again changes only what has to change."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from command_line import privdec
from ports import own_addresses
from raising import raises
from wards import ward, write_ward

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.exit_codes import EXIT_CODES, FAILED, FINISHED, WRONG_INPUT, Restart
from flower_privdec.devices import kit
from flower_privdec.devices.doctor import read_environment
from flower_privdec.devices.kit import Deployment, KitPlaces, deploy
from flower_privdec.network.members import Operator, read_members
from flower_privdec.network.transport import tls
from flower_privdec.network.transport.directory import fingerprint_of_certificate
from flower_privdec.network.transport.tls import Authority, Credentials, files_of, identities
from flower_privdec.scenario import Scenario, load_scenario, scenario_hash

FILES = {
    "Containerfile",
    "README.md",
    "certs/authority.pem",
    "certs/peer-{}.key",
    "certs/peer-{}.pem",
    "peer.env",
    "privdec-ward-7-{}.service",
    "public.npz",
    "scenario.yaml",
}


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def made(scenario: Scenario, out: Path, **options: object) -> Deployment:
    return deploy(scenario, out, root="own-{peer}.npz", **options)  # type: ignore[arg-type]


def certificate(out: Path, peer: int) -> bytes:
    return (out / f"devices/ward-7-{peer}/certs/peer-{peer}.pem").read_bytes()


def test_a_device_gets_all_it_needs_and_nothing_more(tmp_path: Path) -> None:
    scenario = ward(tmp_path)
    made(scenario, tmp_path / "kits")
    for peer in range(3):
        folder = tmp_path / f"kits/devices/ward-7-{peer}"
        assert set(contents(folder)) == {name.format(peer) for name in FILES}
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / f"certs/peer-{peer}.key").stat().st_mode) == 0o600
        Credentials.read(*files_of(folder / "certs", peer), identities(scenario)[peer])

        # Peers of the copy and of the operator's file name their run alike, and find the public test set beside it.
        copy = load_scenario(folder / "scenario.yaml")
        assert scenario_hash(copy) == scenario_hash(scenario)
        assert copy.data.test == str(folder / "public.npz")
        settings = read_environment(folder / "peer.env")
        assert settings["PRIVDEC_DATA"] == f"/var/lib/privdec/ward-7-{peer}/own-{peer}.npz"


@pytest.mark.parametrize("place", ["authority", "devices", "devices/ward-7-1", "devices/ward-7-1/certs"])
def test_a_file_where_a_folder_goes_is_named(place: str, tmp_path: Path) -> None:
    wrong = tmp_path / "kits" / place
    wrong.parent.mkdir(parents=True)
    wrong.write_text("a file\n")
    with raises(ScenarioError, "deploy.no-folder", names=str(wrong)):
        made(ward(tmp_path), tmp_path / "kits")
    assert contents(tmp_path / "kits") == {place: b"a file\n"}


@pytest.mark.parametrize(
    "place",
    [
        ".lock",
        "deployed.json",
        "authority/authority.pem",
        "devices/ward-7-1/README.md",
        "devices/ward-7-1/certs/authority.pem",
    ],
)
def test_a_folder_where_a_file_goes_is_named(place: str, tmp_path: Path) -> None:
    wrong = tmp_path / "kits" / place
    wrong.mkdir(parents=True)
    with raises(ScenarioError, "deploy.is-folder", names=str(wrong)):
        made(ward(tmp_path), tmp_path / "kits")
    assert contents(tmp_path / "kits") == {}


def test_deploy_and_doctor_end_as_the_table_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit, or a script that makes kits, knows only the number."""
    scenario = write_ward(tmp_path, own_addresses(3))
    out = tmp_path / "kits"
    kit_folder = out / "devices/ward-7-0"
    command = ("deploy", scenario, "--out", out, "--folder", tmp_path, "--state", tmp_path)
    assert privdec(*command) == FINISHED
    assert privdec(*command) == FINISHED
    (kit_folder / "README.md").write_text("by hand\n")
    assert privdec(*command, "--folder", tmp_path / "etc") == WRONG_INPUT
    with monkeypatch.context() as patched:
        patched.setattr("flower_privdec.devices.kit.write_atomically", full_disk)
        assert privdec(*command, "--folder", tmp_path / "etc", "--replace") == FAILED

    ready = (
        "doctor",
        kit_folder / "scenario.yaml",
        "--id",
        0,
        "--certs",
        kit_folder / "certs",
        "--env",
        tmp_path / "no",
    )
    shutil.copy(tmp_path / "own-0.npz", tmp_path / "own.npz")
    assert privdec(*ready, "--out", tmp_path / "peer", "--data", tmp_path / "own.npz") == FINISHED
    assert privdec(*ready, "--out", tmp_path / "peer", "--data", tmp_path / "nothing.npz") == FAILED
    assert privdec(*ready, "--out", tmp_path / "peer", "--env", kit_folder) == WRONG_INPUT

    for status in (FINISHED, FAILED, WRONG_INPUT):
        (row,) = [one for one in EXIT_CODES if one.status == status]
        assert "of `deploy`" in row.meaning or "Of `privdec deploy`" in row.meaning
        assert "doctor" in row.meaning or status == WRONG_INPUT


def full_disk(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a kit's file")


def test_the_authoritys_key_is_apart_and_closed_to_others(tmp_path: Path) -> None:
    done = made(ward(tmp_path), tmp_path / "kits")
    assert done.authority == tmp_path / "kits/authority"
    assert stat.S_IMODE(done.authority.stat().st_mode) == 0o700
    assert [path.parent for path in tmp_path.rglob("authority.key")] == [done.authority]
    (tmp_path / "kits/devices/ward-7-0/certs/authority.key").write_bytes(b"")
    with raises(ScenarioError, "deploy.private-key", "ward-7-0"):
        made(ward(tmp_path), tmp_path / "kits")


@pytest.mark.parametrize("key", ["authority/authority.key", "devices/ward-7-1/certs/peer-1.key"])
def test_a_kit_with_a_key_of_another_is_refused(key: str, tmp_path: Path) -> None:
    scenario = ward(tmp_path)
    made(scenario, tmp_path / "kits")
    shutil.copy(tmp_path / "kits" / key, tmp_path / "kits/devices/ward-7-0/certs/backup.pem")
    with raises(ScenarioError, "deploy.private-key", "backup.pem"):
        made(scenario, tmp_path / "kits")


def with_test(scenario: Scenario, test: Path, root: Path | None = None) -> Scenario:
    """Return a scenario with another public test set, and other private examples."""
    own = scenario.data.root if root is None else str(root)
    return scenario.model_copy(update={"data": scenario.data.model_copy(update={"test": str(test), "root": own})})


def test_no_key_goes_along_with_public_files(tmp_path: Path) -> None:
    scenario = ward(tmp_path)
    made(scenario, tmp_path / "kits")
    public = tmp_path / "public"
    public.mkdir()
    for name, content in {
        "authority.key": b"",
        "ca.txt": b"a note\n" + (tmp_path / "kits/authority/authority.key").read_bytes(),
    }.items():
        (public / name).write_bytes(content)
        with raises(ScenarioError, "deploy.private-key", name):
            made(with_test(scenario, public), tmp_path / "others")
        (public / name).unlink()
    assert not (tmp_path / "others").exists()


@pytest.mark.parametrize("name", ["README.md", "scenario.yaml", "certs", "privdec-ward-7-0.service"])
def test_a_public_file_replaces_none_of_the_kits(name: str, tmp_path: Path) -> None:
    scenario = ward(tmp_path)
    (tmp_path / "public").mkdir()
    shutil.copy(tmp_path / "public.npz", tmp_path / "public" / name)
    with raises(ScenarioError, "deploy.same-name", name):
        made(with_test(scenario, tmp_path / "public" / name), tmp_path / "kits")


def test_two_public_files_of_one_name_are_refused(tmp_path: Path) -> None:
    ward(tmp_path)
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph/public.npz").write_text("0 1\n1 2\n2 0\n")
    settings = [f"topology={{name: edge-list, file: '{tmp_path}/graph/public.npz'}}"]
    scenario = load_scenario(tmp_path / "ward.yaml", settings)
    with raises(ScenarioError, "deploy.same-name", "public.npz"):
        made(scenario, tmp_path / "kits")


def test_a_second_time_changes_nothing(tmp_path: Path) -> None:
    made(ward(tmp_path), tmp_path / "kits")
    before = contents(tmp_path / "kits")
    done = made(ward(tmp_path), tmp_path / "kits")
    assert contents(tmp_path / "kits") == before
    assert {action for one in done.kits for action in one.done.values()} == {"kept"}


def test_a_device_is_added_and_an_address_changes(tmp_path: Path) -> None:
    out = tmp_path / "kits"
    made(ward(tmp_path), out)
    keys = [certificate(out, peer) for peer in range(3)]
    moved = ward(tmp_path, ("10.0.0.1:71", "10.0.0.9:71", "10.0.0.3:71", "10.0.0.4:71"))
    done = made(moved, out)
    assert [certificate(out, peer) for peer in range(3)] == keys
    assert done.kits[0].done["scenario.yaml"] == "updated"
    assert done.kits[3].done["certs/peer-3"] == "made"
    assert b"10.0.0.9" in contents(out)["devices/ward-7-0/scenario.yaml"]

    fewer = made(ward(tmp_path), out)
    assert any("ward-7-3" in note for note in fewer.notes)
    assert (out / "devices/ward-7-3").is_dir()


def test_what_was_changed_by_hand_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "kits"
    made(ward(tmp_path), out)
    edited = out / "devices/ward-7-0/peer.env"
    edited.write_text(edited.read_text() + "PRIVDEC_CHARGE_WITNESSED=yes\n")
    text = edited.read_text()
    assert made(ward(tmp_path), out).kits[0].done["peer.env"] == "kept as changed"
    assert edited.read_text() == text

    before = contents(out)
    with raises(ScenarioError, "deploy.changed", "ward-7-0/peer.env"):
        made(ward(tmp_path), out, places=KitPlaces(state="/srv/privdec"))
    assert contents(out) == before
    made(ward(tmp_path), out, places=KitPlaces(state="/srv/privdec"), replace_changed=True)
    assert "PRIVDEC_OUT=/srv/privdec/ward-7-0/peer" in edited.read_text()


class Killed(BaseException):
    """What nothing catches."""


def test_killed_at_any_write_it_is_finished_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is killed replaces older files, and the next one brings yet another address."""
    first = ward(tmp_path)
    second = ward(tmp_path, ("10.0.0.1:71", "10.0.0.9:71"))
    third = ward(tmp_path, ("10.0.0.1:71", "10.0.0.10:71"))
    write = kit.write_atomically
    made(third, tmp_path / "whole")
    wanted = {
        name: content for name, content in contents(tmp_path / "whole").items() if not name.endswith((".pem", ".key"))
    }

    for moment in range(1, 100):
        out = tmp_path / f"{moment}"
        made(first, out)
        keys = [certificate(out, peer) for peer in range(2)]
        left = [moment]

        def dying(path: Path, content: bytes, left: list[int] = left, **options: bool) -> None:
            left[0] -= 1
            if left[0] == 0:
                path.with_name(f"{path.name}.1.part").write_bytes(content[:3])
                raise Killed
            write(path, content, **options)

        monkeypatch.setattr(kit, "write_atomically", dying)
        monkeypatch.setattr(tls, "write_atomically", dying)
        try:
            made(second, out)
        except Killed:
            monkeypatch.setattr(kit, "write_atomically", write)
            monkeypatch.setattr(tls, "write_atomically", write)
            made(third, out)
        else:
            monkeypatch.undo()
            break
        found = contents(out)
        devices = {name: content for name, content in wanted.items() if name.startswith("devices/")}
        assert {name: found[name] for name in devices} == devices
        assert [certificate(out, peer) for peer in range(2)] == keys
        assert not [name for name in found if name.startswith("devices/ward-7-0") and name.endswith(".part")]
    assert moment > 4


def test_certificates_that_end_soon_are_replaced_and_no_others(tmp_path: Path) -> None:
    out = tmp_path / "kits"
    scenario = ward(tmp_path)
    made(scenario, out)
    keys = [certificate(out, peer) for peer in range(3)]
    authority = Authority.read(out / "authority/authority.pem", out / "authority/authority.key")
    old = authority.issue(identities(scenario)[1], datetime.now(UTC) - timedelta(days=350))
    (out / "devices/ward-7-1/certs/peer-1.pem").write_bytes(old.certificate)  # its key is that of another one, too
    done = made(scenario, out)
    assert [one.done[f"certs/peer-{peer}"] for peer, one in enumerate(done.kits)] == ["kept", "renewed", "kept"]
    assert certificate(out, 0) == keys[0]
    assert certificate(out, 1) not in (keys[1], old.certificate)


def test_changes_of_the_list_of_members_go_into_kits(tmp_path: Path) -> None:
    out = tmp_path / "kits"
    scenario = ward(tmp_path)
    made(scenario, out)
    operator = Operator(scenario, out / "authority", None)
    operator.change("revoke", 2)
    operator.renew(1, False)
    operator.add("10.0.0.4:71", None, lambda members: None)
    renewed = (out / "authority/peer-1.pem").read_bytes()
    done = made(scenario, out)
    assert done.kits[1].done["certs/peer-1"] == "renewed"
    assert certificate(out, 1) == renewed
    assert not (out / "authority/peer-1.key").exists()  # a device's key is in its own kit only
    assert [one.name for one in done.kits] == ["ward-7-0", "ward-7-1", "ward-7-3"]
    members = [(one.path / "certs/members").read_bytes() for one in done.kits]
    assert set(members) == {(out / "authority/members").read_bytes()}
    Credentials.read(*files_of(done.kits[2].path / "certs", 3), "peer-3.ward-7")
    assert any("ward-7-2" in note for note in done.notes)  # of no device any more


def test_the_only_certificate_that_counts_is_renewed_by_list(tmp_path: Path) -> None:
    out = tmp_path / "kits"
    scenario = ward(tmp_path)
    made(scenario, out)
    operator = Operator(scenario, out / "authority", None)
    operator.renew(1, True)
    assert made(scenario, out).kits[1].done["certs/peer-1"] == "renewed"
    assert made(scenario, out).notes == ()
    assert operator.renew(1, False) is not None  # without an entry it would not count
    made(scenario, out)

    authority = Authority.read(out / "authority/authority.pem", out / "authority/authority.key")
    old = authority.issue(identities(scenario)[1], datetime.now(UTC) - timedelta(days=350))
    for ending, content in (("pem", old.certificate), ("key", old.key)):
        (out / f"devices/ward-7-1/certs/peer-1.{ending}").write_bytes(content)
    done = made(scenario, out)
    counts = read_members(scenario, out / "authority").members.all[1].certificate
    assert counts == fingerprint_of_certificate(certificate(out, 1))
    assert any("entry 3" in note for note in done.notes)
    lists = {(one.path / "certs/members").read_bytes() for one in done.kits}
    assert lists == {(out / "authority/members").read_bytes()}

    other = authority.issue(identities(scenario)[1])
    for ending, content in (("pem", other.certificate), ("key", other.key)):
        (out / f"devices/ward-7-1/certs/peer-1.{ending}").write_bytes(content)
    assert any("does not count" in note for note in made(scenario, out).notes)


@pytest.mark.parametrize(
    ("place", "listens", "options"),
    [
        ('address: "10.0.0.1:7100"', "port 7100", '-p 7100:7100 -e "PRIVDEC_LISTEN=0.0.0.0:7100"'),
        ('address: "[fd00::1]:7100"', "port 7100", '-p 7100:7100 -e "PRIVDEC_LISTEN=[::]:7100"'),
        ('address: "a.lan:443", listen: "10.0.0.1:71"', "port 71", '-p 71:71 -e "PRIVDEC_LISTEN=0.0.0.0:71"'),
        ("dial: out", "listens to nobody", ""),
        ('dial: out, listen: "127.0.0.1:71"', "port 71", ""),
    ],
)
def test_a_containers_port_is_where_it_listens(place: str, listens: str, options: str, tmp_path: Path) -> None:
    path = write_ward(tmp_path, ("10.0.0.9:71", "10.0.0.2:71", "10.0.0.3:71"))
    path.write_text(path.read_text().replace('address: "10.0.0.9:71"', place))
    scenario = load_scenario(path)
    made(scenario, tmp_path / "kits")
    kit_folder = tmp_path / "kits/devices/ward-7-0"
    text = (kit_folder / "Containerfile").read_text()
    assert listens in text
    assert ("-p " in text) == bool(options)
    assert options in text
    assert load_scenario(kit_folder / "scenario.yaml").network.peers == scenario.network.peers


def test_places_that_cannot_work_make_no_kits(tmp_path: Path) -> None:
    path = write_ward(tmp_path, ("0.0.0.0:71", "10.0.0.2:71", "10.0.0.3:71"))
    with raises(ScenarioError, "peer.anywhere", "listen"):
        made(load_scenario(path), tmp_path / "kits")
    path.write_text(path.read_text().replace('address: "0.0.0.0:71"', "dial: out").replace("10.0.0.2", "10.0.0.4"))
    made(load_scenario(path), tmp_path / "kits")
    path.write_text(path.read_text().replace('address: "10.0.0.4:71"', "dial: out"))
    with raises(ScenarioError, "network.dials-out", "peers 0 and 1"):
        made(load_scenario(path), tmp_path / "more")
    assert not (tmp_path / "more").exists()


def test_files_that_do_not_belong_are_named(tmp_path: Path) -> None:
    made(ward(tmp_path), tmp_path / "kits")
    (tmp_path / "kits/devices/ward-7-1/notes.txt").write_text("the safe's number")
    assert made(ward(tmp_path), tmp_path / "kits").kits[1].strays == ("notes.txt",)


def test_own_code_goes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "wards_models.py").write_text(
        "import torch\n\ndef small(input_shape, classes):\n    return torch.nn.Linear(5, classes)\n"
    )
    path = tmp_path / "own.yaml"
    ward(tmp_path)
    path.write_text((tmp_path / "ward.yaml").read_text().replace("name: softmax", 'module: "wards_models:small"'))
    made(load_scenario(path), tmp_path / "kits")
    kit_files = contents(tmp_path / "kits/devices/ward-7-0")
    assert kit_files["wards_models.py"] == (tmp_path / "wards_models.py").read_bytes()
    assert b"PYTHONPATH=/etc/privdec/ward-7-0\n" in kit_files["peer.env"]


def test_private_examples_are_never_copied(tmp_path: Path) -> None:
    ward(tmp_path)
    text = (tmp_path / "ward.yaml").read_text().replace('root: "own-{peer}.npz", test: public.npz', "root: own-0.npz")
    (tmp_path / "ward.yaml").write_text(text)
    with raises(ScenarioError, "data.no-test", "own-0.npz"):
        made(load_scenario(tmp_path / "ward.yaml"), tmp_path / "kits")
    assert not (tmp_path / "kits").exists()


@pytest.mark.parametrize("place", ["own-{peer}.npz", "{peer}/own.npz"])
def test_private_examples_below_the_test_set_stay(place: str, tmp_path: Path) -> None:
    scenario = ward(tmp_path)
    path = tmp_path / "images" / place.replace("{peer}", "12")  # also of a device that joined
    path.parent.mkdir(parents=True)
    shutil.copy(tmp_path / "own-0.npz", path)
    shutil.copy(tmp_path / "public.npz", tmp_path / "images")
    scenario = with_test(scenario, tmp_path / "images", tmp_path / "images" / place)
    with raises(ScenarioError, "data.test-is-private", str(path)):
        made(scenario, tmp_path / "kits")
    assert not (tmp_path / "kits").exists()


@pytest.mark.parametrize("state", ["var/lib", "/var/lib/my peers", "/srv/$HOME", "/srv/100%", "/srv/../etc"])
def test_paths_that_a_unit_would_misread_are_refused(state: str, tmp_path: Path) -> None:
    with raises(ScenarioError, "deploy.place"):
        made(ward(tmp_path), tmp_path / "kits", places=KitPlaces(state=state))


def unit_of(tmp_path: Path) -> dict[str, str]:
    """Return the settings of a kit's unit."""
    text = (tmp_path / "kits/devices/ward-7-0/privdec-ward-7-0.service").read_text()
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))


def test_the_unit_restarts_by_the_table_of_exit_codes(tmp_path: Path) -> None:
    made(ward(tmp_path), tmp_path / "kits")
    unit = unit_of(tmp_path)
    stays_down = set(unit["RestartPreventExitStatus"].split())
    done = set(unit["SuccessExitStatus"].split()) | {"0"}
    assert unit["Restart"] == "on-failure"
    for one in EXIT_CODES:
        assert (str(one.status) in stays_down) == (one.restart is Restart.OWNER)
        assert (str(one.status) in done) == (one.restart is Restart.DONE)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="NOT TESTED: there is no systemd-analyze here")
def test_systemd_takes_the_unit_and_finds_it_hardened(tmp_path: Path) -> None:
    made(ward(tmp_path), tmp_path / "kits", places=KitPlaces(program=os.path.realpath(shutil.which("true") or "")))
    path = tmp_path / "kits/devices/ward-7-0/privdec-ward-7-0.service"
    verified = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=25", path]
    hardened = subprocess.run(command, capture_output=True, text=True, check=False)
    assert hardened.returncode == 0, hardened.stdout[-300:]  # 2.5 of 10, which systemd calls OK
