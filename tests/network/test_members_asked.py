"""Before a change is signed, peers say which list of members they have: nobody believes in one that all refuse."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from command_line import privdec
from ports import own_addresses
from raising import raises
from wards import write_ward

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.exit_codes import FINISHED, WRONG_INPUT
from flower_privdec.network.members import Operator, read_members
from flower_privdec.network.peer.driver import Driver
from flower_privdec.network.peer.foreground import device_of, running_peer
from flower_privdec.network.peer.peer_files import PeerFiles
from flower_privdec.pushsum.membership import MemberList
from flower_privdec.scenario import Scenario, load_scenario


class Ward:
    """An operator's folder, and three devices of which some run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = write_ward(folder, own_addresses(3))
        self.certificates = folder / "certs"
        assert privdec("certs", self.file, "--out", self.certificates) == FINISHED
        self.drivers = ExitStack()

    @property
    def scenario(self) -> Scenario:
        return load_scenario(self.file)

    def change(self, *arguments: object) -> int:
        change, *options = arguments
        return privdec("members", self.file, change, "--certs", self.certificates, *options)

    def run(self, peer: int) -> PeerFiles:
        """Start a device with the operator's list of now, so that it answers; return its files."""
        certificates = Path(shutil.copytree(self.certificates, self.folder / f"certs-{peer}"))
        data = str(self.folder / f"own-{peer}.npz")
        device = device_of(self.scenario, peer, self.folder / f"peer-{peer}", certificates, data=data)
        driver = Driver(running_peer(self.scenario, device))
        driver.open()
        self.drivers.callback(driver.close)
        assert device.files is not None
        return device.files

    def hand_over(self, files: PeerFiles) -> MemberList:
        """Give a device the operator's list, and return what it has then."""
        files.members.take((self.certificates / "members").read_bytes(), "the operator", is_trusted=True)
        return files.members


@pytest.fixture
def ward(tmp_path: Path) -> Iterator[Ward]:
    made = Ward(tmp_path)
    with made.drivers:
        yield made


def test_an_older_list_is_brought_up_to_date(ward: Ward, capsys: pytest.CaptureFixture[str]) -> None:
    """The operator's folder is restored from a backup: who is shut out then is shut out for all."""
    assert ward.change("extend", "--rounds", 9) == FINISHED
    files = ward.run(0)
    (ward.certificates / "members").unlink()

    capsys.readouterr()
    assert ward.change("revoke", "--id", 2) == FINISHED
    said = capsys.readouterr()
    assert "took 1 entries" in said.out
    assert "warning" not in said.err
    assert ward.hand_over(files).members.present == (0, 1)
    assert not files.members.problem


def test_nothing_is_signed_on_a_list_that_peers_refuse(ward: Ward, capsys: pytest.CaptureFixture[str]) -> None:
    """The command to mend that is named, and what it drops; after it the change counts for the peers."""
    assert ward.change("extend", "--rounds", 9) == FINISHED
    files = ward.run(0)
    (ward.certificates / "members").unlink()
    assert ward.change("revoke", "--id", 2, "--offline") == FINISHED
    forked = (ward.certificates / "members").read_bytes()

    capsys.readouterr()
    assert ward.change("revoke", "--id", 1) == WRONG_INPUT
    said = capsys.readouterr().err
    assert "entry 1 says here: peer 2 is shut out; there: the run has 9 rounds" in said
    assert "`privdec members SCENARIO merge`" in said
    assert (ward.certificates / "members").read_bytes() == forked
    assert ward.hand_over(files).members.present == (0, 1, 2)

    assert ward.change("merge") == FINISHED
    assert "entry 1: peer 2 is shut out" in capsys.readouterr().out
    assert forked in [path.read_bytes() for path in ward.certificates.glob("members.*")]
    assert ward.change("revoke", "--id", 2) == FINISHED
    assert ward.hand_over(files).members.present == (0, 1)
    assert ward.change("merge") == FINISHED
    assert len(read_members(ward.scenario, ward.certificates).entries) == 2


def test_an_operator_who_reaches_nobody_is_warned(ward: Ward, capsys: pytest.CaptureFixture[str]) -> None:
    assert ward.change("revoke", "--id", 2) == FINISHED
    said = capsys.readouterr().err
    assert "no peer said which list it has" in said
    assert "`privdec members SCENARIO merge`" in said
    assert ward.change("merge") == WRONG_INPUT
    assert "--from" in capsys.readouterr().err


def test_a_peers_file_is_merged_without_a_network(ward: Ward, tmp_path: Path) -> None:
    assert ward.change("extend", "--rounds", 9, "--offline") == FINISHED
    theirs = tmp_path / "from-a-peer"
    shutil.move(ward.certificates / "members", theirs)
    assert ward.change("revoke", "--id", 2, "--offline") == FINISHED
    content = theirs.read_bytes()
    theirs.write_bytes(content.replace(b'"rounds":9', b'"rounds":8'))
    assert ward.change("merge", "--from", theirs) == WRONG_INPUT
    theirs.write_bytes(content)
    assert ward.change("merge", "--from", theirs) == FINISHED
    assert (ward.certificates / "members").read_bytes() == content


def test_a_few_peers_with_another_list_are_named(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others take what is signed; if they are half or more, nothing is signed."""

    def signed(*changes: tuple[object, ...]) -> MemberList:
        (ward.certificates / "members").unlink(missing_ok=True)
        for change in changes:
            assert ward.change(*change, "--offline") == FINISHED
        return read_members(ward.scenario, ward.certificates)

    other = signed(("extend", "--rounds", 8))
    longer = signed(("extend", "--rounds", 9), ("revoke", "--id", 1))
    own = signed(("extend", "--rounds", 9))
    longer_from_there = longer.entries[0].hash == own.entries[0].hash
    operator = Operator(ward.scenario, ward.certificates)
    answers: dict[int, MemberList] = {}
    monkeypatch.setattr(Operator, "_ask", lambda self, without: (answers, {}))

    answers |= {0: own, 1: other, 2: own}
    asked = operator.catch_up()
    assert (asked.taken, len(asked.other), asked.answered) == (0, 1, (0, 1, 2))
    assert "peer 1" in asked.other[0]
    del answers[2]
    with raises(ScenarioError, "members.fork", names="peers 1 have"):
        operator.catch_up()
    with raises(ScenarioError, "members.divided"):
        operator.merge()

    assert longer_from_there
    answers |= {0: longer, 1: longer, 2: other}
    assert operator.catch_up().taken == 1
    answers |= {0: other, 1: other, 2: longer}
    merged = operator.merge()
    assert (merged.taken, len(merged.dropped)) == (1, 2)
    assert read_members(ward.scenario, ward.certificates).content == other.content
