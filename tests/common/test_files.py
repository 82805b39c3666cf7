"""A file is replaced whole or not at all."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from private_files import umask_of_none

from flower_privdec.common.files import cache_folder, open_file, owners_file, replacing, write_atomically

WRITER = """
import os, signal, sys
from pathlib import Path
from typing import Any
from flower_privdec.common.files import replacing
with replacing(Path(sys.argv[1])) as part:
    part.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_file_is_replaced_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"one", b"", b"three" * 10**6):
        write_atomically(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail() -> None:
        with replacing(path) as part:
            part.write_bytes(b"half")
            raise error

    with pytest.raises(error):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_writer_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    killed = subprocess.run([sys.executable, "-c", WRITER, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_file_is_owner_only_unless_public(tmp_path: Path) -> None:
    with umask_of_none():
        write_atomically(tmp_path / "open", b"", public=True)
        with replacing(tmp_path / "closed") as part:
            assert part.stat().st_mode & 0o777 == 0o600
            part.unlink()
            part.write_bytes(b"anew")
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o666
    assert (tmp_path / "closed").stat().st_mode & 0o777 == 0o600


def test_a_file_open_to_others_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("before\n")
    path.chmod(0o644)
    with open(path, "a", opener=owners_file) as file:
        file.write("after\n")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == "before\nafter\n"


def test_the_environment_sets_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "flower_privdec"
    for relative in ("", "cache"):  # the standard ignores a relative path
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert cache_folder() == tmp_path / ".cache" / "flower_privdec"


def test_a_file_is_opened_once_a_descriptor_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where strangers have taken all of them, a commit waits until the server has closed some, and does not fail."""
    refusals, opened = [errno.EMFILE, errno.ENFILE, errno.EMFILE], os.open

    def without_descriptors(*arguments: Any, **options: Any) -> int:
        if refusals:
            raise OSError(refusals.pop(), "Too many open files")
        return opened(*arguments, **options)

    monkeypatch.setattr(os, "open", without_descriptors)
    write_atomically(tmp_path / "a", b"content")
    assert not refusals
    assert (tmp_path / "a").read_bytes() == b"content"


def test_other_errors_of_opening_are_raised_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "missing" / "a", os.O_RDONLY)
