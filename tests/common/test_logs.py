"""Logs of a process that runs for weeks: one record a line, of a bounded size, from the first second."""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from command_line import privdec
from raising import raises

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.exit_codes import FINISHED, SHUT_OUT
from flower_privdec.common.logs import BoundedFile, LogOptions, event, logging_to, message_of

LOG = logging.getLogger("flower_privdec.tests")
HOSTILE = "a\x1b[2Jb\r\nwarning: forged\u202e"


def said(capture: pytest.CaptureFixture[str]) -> list[str]:
    return capture.readouterr().err.splitlines()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_record_is_one_line_whatever_it_says(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to(LogOptions(form)):  # type: ignore[arg-type]
        LOG.warning("%s", HOSTILE, extra=event("round", loss=math.nan, down={"1": HOSTILE}, level="mine"))
    (line,) = said(capsys)
    assert line.isprintable()
    if form == "json":
        found = json.loads(line, parse_constant=pytest.fail)
        assert (found["level"], found["event"], found["loss"]) == ("warning", "round", "nan")
        assert found["down"] == {"1": HOSTILE}
        assert found["message"] == r"a\x1b[2Jb\r\nwarning: forged\u202e"
    else:
        assert message_of(line) == r"a\x1b[2Jb\r\nwarning: forged\u202e"
        assert line != message_of(line)


def test_a_level_and_other_packages_progress_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to(LogOptions(level="warning")):
        LOG.info("no")
        logging.getLogger("another").warning("yes")
    with logging_to(LogOptions()):
        logging.getLogger("another").info("no")
        LOG.info("yes")
    LOG.info("no")
    assert [message_of(line) for line in said(capsys)] == ["yes", "yes"]


def test_a_log_of_weeks_keeps_its_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "logs" / "peer.log"
    with logging_to(LogOptions("json", file=path, size=0.01, count=2)):
        for number in range(1000):
            LOG.info("line %d", number)
        LOG.error("an end")
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == ["peer.log", "peer.log.1", "peer.log.2"]
    assert all(file.stat().st_size <= 0.01 * 2**20 and file.stat().st_mode & 0o077 == 0 for file in files)
    assert json.loads(path.read_text().splitlines()[-1])["message"] == "an end"
    assert len(said(capsys)) == 1, "errors are on stderr, too"


def test_a_full_disk_ends_no_peer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk(StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with logging_to(LogOptions(file=tmp_path / "peer.log")):
        (file,) = [handler for handler in logging.getLogger().handlers if isinstance(handler, BoundedFile)]
        monkeypatch.setattr(file, "stream", FullDisk())
        for _ in range(10):
            LOG.info("a line")
    (line,) = said(capsys)
    assert "No space left on device; the log has gaps" in line


class FullFile(io.RawIOBase):
    """A file on a disk without room."""

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return 0

    def write(self, content: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("status", [FINISHED, SHUT_OUT])
def test_a_full_disk_changes_no_exit_status(
    status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit starts a peer again, or leaves it, by its status: one that was shut out would begin again for ever."""

    def run() -> None:
        with logging_to(LogOptions(file=tmp_path / "peer.log")):
            (file,) = [handler for handler in logging.getLogger().handlers if isinstance(handler, BoundedFile)]
            monkeypatch.setattr(file, "stream", io.TextIOWrapper(io.BufferedWriter(FullFile())))
            LOG.info("a line")
            raise SystemExit(status)

    with pytest.raises(SystemExit) as left:
        run()
    assert left.value.code == status
    assert not [one for one in logging.getLogger().handlers if isinstance(one, BoundedFile)]
    (line,) = said(capsys)
    assert "the log has gaps" in line


def test_options_of_a_log_are_checked_first(tmp_path: Path) -> None:
    for size in (0.0, -1.0, math.nan, math.inf):
        with raises(ScenarioError, "logs.size", names="log-size"):
            LogOptions(size=size)
    with raises(ScenarioError, "logs.count", names="log-count"):
        LogOptions(count=0)
    (tmp_path / "file").touch()
    with raises(ScenarioError, "logs.file", names="log-file"), logging_to(LogOptions(file=tmp_path / "file" / "log")):
        pass


def test_the_end_of_a_peer_is_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "peer.log"
    options = ["--id", 0, "--certs", tmp_path / "none", "--log-format", "json", "--log-file", log]
    assert privdec("peer", "digits", *options) == 2
    begin, end = map(json.loads, log.read_text().splitlines())
    assert (begin["event"], begin["peer"], end["event"], end["status"]) == ("start", 0, "end", 2)
    assert end["reason"]
    assert str(tmp_path / "none") in end["message"]
    (line,) = said(capsys)
    assert json.loads(line) == end


WITHOUT_TORCH = """
import runpy, sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise RuntimeError("torch was imported")
sys.meta_path.insert(0, NoTorch())
sys.argv[1:] = ["peer", "digits", "--id", "3", "--log-format", "json"]
runpy.run_module("flower_privdec", run_name="__main__")
"""


def test_the_log_begins_before_torch_is_imported() -> None:
    started = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    begin, end = map(json.loads, started.stderr.splitlines())
    assert started.returncode == 1
    assert (begin["event"], begin["peer"]) == ("start", 3)
    assert "torch was imported" in end["trace"]
