"""One ledger file: what was paid for one source of data, its lock, and what it amounts to."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from flower_privdec.common.files import sync_folder
from flower_privdec.errors import BudgetError
from flower_privdec.privacy.accountant.alternatives import Alternatives
from flower_privdec.privacy.ledger.ledger_format import (
    NOTHING,
    RESTORE,
    Body,
    Head,
    Payment,
    chained,
    header,
    parse,
    payments,
)
from flower_privdec.privacy.mechanism.events import Release, canonical

_log = logging.getLogger(__name__)


class LedgerFile:
    """A ledger, open, verified and locked; a context manager.

    Attributes:
        path: the file.
        payments: every payment that is safe on disk, oldest first.
        head: the number of lines and the last line's hash.
    """

    def __init__(self, directory: Path | str, source: str) -> None:
        """Open DIRECTORY/SOURCE.jsonl, made if missing.

        Raises:
            BudgetError: when the file is in use, was edited, or is another source's.
        """
        self.path = ledger_path(directory, source)
        _make_folder(self.path.parent)
        self._header = header(source)
        self._appended: tuple[list[Payment], list[str]] = ([], [])
        self._fd: int | None = _open_locked(self.path)
        try:
            bodies = self._load()
            self.payments = payments(bodies, self.path)
            sync_folder(self.path.parent)
        except BaseException:
            self.close()
            raise
        self._hashes = [str(body["hash"]) for body in bodies]

    def _load(self) -> list[Body]:
        content = _read_all(self._descriptor)
        bodies, kept = parse(content, self.path)
        for name, value in self._header.items():
            if bodies and bodies[0].get(name) != value:
                raise BudgetError(
                    f"{self.path} line 1: {name} is {bodies[0].get(name)!r} and must be {value!r}; give another "
                    "ledger folder"
                )
        if kept < len(content):
            _log.warning("%s: dropped an incomplete last line; no step had begun on it", self.path)
            os.ftruncate(self._descriptor, kept)
        elif content and not content.endswith(b"\n"):
            os.write(self._descriptor, b"\n")
        return bodies

    @property
    def _descriptor(self) -> int:
        if self._fd is None:
            raise BudgetError(f"{self.path} is closed, or could not be written; open it again before another step")
        return self._fd

    @property
    def head(self) -> Head:
        """Return the number of lines and the last line's hash: what a checkpoint names."""
        return len(self._hashes), self._hashes[-1] if self._hashes else NOTHING

    def check_head(self, length: int, digest: str) -> None:
        """Check that the ledger still holds all that a checkpoint saw (it may have grown since).

        Raises:
            BudgetError: when it is shorter, or says something else there.
        """
        if length > len(self._hashes):
            raise BudgetError(f"{self.path} has {len(self._hashes)} lines where the checkpoint saw {length}; {RESTORE}")
        if length > 0 and self._hashes[length - 1] != digest:
            raise BudgetError(f"{self.path} line {length}: not the line that the checkpoint saw; {RESTORE}")

    def append(self, payment: Payment) -> None:
        """Write a payment, whole or not at all; it counts, and is safe on disk, when this returns.

        Raises:
            BudgetError: when the disk fails; then nothing may be run on it.
        """
        if self._appended[1]:
            self._sync()  # one that an interrupt kept from it
        bodies = [payment.to_json()] if self._hashes else [self._header, payment.to_json()]
        content, hashes = chained(bodies, self.head)
        self._appended = ([payment], hashes)
        self._guarded(lambda fd: _write_all(fd, content))
        self._sync()

    def _sync(self) -> None:
        self._guarded(os.fsync)
        paid, hashes = self._appended
        self.payments += paid
        self._hashes += hashes
        self._appended = ([], [])

    def _guarded(self, action: Callable[[int], None]) -> None:
        try:
            action(self._descriptor)
        except OSError as error:
            self.close()
            raise BudgetError(
                f"{self.path} could not be written ({error.strerror}), no step was taken; make room, resume"
            ) from error

    def close(self) -> None:
        """Let go of the file and its lock."""
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = None

    def leave(self) -> None:
        """Let go of the file in a process forked from its holder, which keeps the lock."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def paid_until(paid: Sequence[Payment], run: str) -> int:
    """Return the step before which all that a run may do is paid."""
    return max((payment.to_step for payment in paid if payment.run.id == run), default=0)


def paid_by_peer(paid: Sequence[Payment], run: str) -> dict[int, int]:
    """Return the step up to which each peer's own active steps of a run are paid, by peer."""
    found: dict[int, int] = {}
    for payment in paid:
        for share in payment.shares if payment.run.id == run else ():
            end = max(b for steps, _ in share.parts for _, b in steps)
            found |= {peer: max(end, found.get(peer, 0)) for peer in share.peers}
    return found


def runs_in(paid: Sequence[Payment]) -> dict[str, Alternatives]:
    """Return what each run cost, by its id: the different lists of releases that its peers paid for.

    Which peer held an example in a run depends on how the data were dealt out, so each example is charged as if it had
    been at whichever peer costs most: an upper bound for any partition.
    """
    lists: dict[str, dict[int, list[Release]]] = {}
    for payment in paid:
        for share in payment.shares:
            for peer in share.peers:
                lists.setdefault(payment.run.id, {}).setdefault(peer, []).extend(share.releases)
    return {run: tuple(dict.fromkeys(map(canonical, peers.values()))) for run, peers in lists.items()}


def ledger_path(directory: Path | str, source: str) -> Path:
    """Return where the ledger of a source of data lies."""
    return Path(directory) / f"{re.sub(r'[^A-Za-z0-9._-]', '_', source)}.jsonl"


def _make_folder(folder: Path) -> None:
    """Make a ledger folder, its name safe on disk."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
    except OSError as error:
        raise BudgetError(f"{folder} cannot be made ({error.strerror}); give another ledger folder") from error


def _open_locked(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BudgetError(f"{path} cannot be opened ({error.strerror}); give another ledger folder") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BudgetError(f"{path} is no regular file, which alone keeps what is written; give another ledger folder")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise BudgetError(f"{path} is in use by another run; wait for its end or give another ledger folder") from None
    return fd


def _read_all(fd: int) -> bytes:
    pieces = []
    while piece := os.read(fd, 1 << 20):
        pieces.append(piece)
    return b"".join(pieces)


def _write_all(fd: int, content: bytes) -> None:
    while content:
        content = content[os.write(fd, content) :]
