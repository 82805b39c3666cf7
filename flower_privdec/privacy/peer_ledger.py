"""One peer's ledger for one data set: the file, its lock, and what the budget leaves."""

from __future__ import annotations

import fcntl
import logging
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from flower_privdec.errors import BudgetError
from flower_privdec.privacy.accounting import check_delta, epsilon
from flower_privdec.privacy.chain import (
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
from flower_privdec.privacy.events import Release, Spend, canonical

_log = logging.getLogger(__name__)


class Ledger:
    """One peer's ledger, open, verified and locked; a context manager.

    Attributes:
        path: the file.
        budget, delta: ε of the budget (None for no limit) and its δ.
        payments: every payment that is safe on disk, oldest first.
        head: the number of lines and the last line's hash.
    """

    def __init__(self, path: Path, dataset_fingerprint: str, peer: int, budget: float | None, delta: float) -> None:
        """Open and lock a file in a folder that exists; see `open`."""
        check_delta(delta)
        self.path, self.budget, self.delta = path, budget, delta
        self._header = header(dataset_fingerprint, peer)
        self._appended: tuple[list[Payment], list[str]] = ([], [])
        self._fd: int | None = _open_locked(path)
        try:
            bodies = self._load()
            self.payments = payments(bodies, path)
        except BaseException:
            self.close()
            raise
        self._hashes = [str(body["hash"]) for body in bodies]

    @classmethod
    def open(
        cls,
        directory: Path | str,
        dataset_fingerprint: str,
        peer: int,
        budget_epsilon: float | None,
        delta: float,
    ) -> Self:
        """Open directory/<first 16 of the fingerprint>/peer-<id>.jsonl, made if missing.

        Raises:
            BudgetError: when the file is in use, was edited, or is another data set's or peer's.
        """
        path = ledger_path(directory, dataset_fingerprint, peer)
        make_folder(path.parent)
        ledger = cls(path, dataset_fingerprint, peer, budget_epsilon, delta)
        sync_folder(path.parent)
        return ledger

    def _load(self) -> list[Body]:
        content = _read_all(self._descriptor)
        bodies, kept = parse(content, self.path)
        for name, value in self._header.items():
            if bodies and bodies[0].get(name) != value:
                raise BudgetError(f"{self.path} line 1: {name} is not this run's; give another ledger folder")
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

    @property
    def releases(self) -> tuple[Release, ...]:
        """Return all that was paid for by any run, equal mechanisms together."""
        return canonical(release for payment in self.payments for _, release in payment.parts)

    def spent(self) -> float:
        """Return the ε of everything recorded, rounds reserved ahead included."""
        return epsilon(self.releases, self.delta)

    def paid_until(self, run: str) -> int:
        """Return the round before which all that a run may do is paid."""
        return max((payment.to_round for payment in self.payments if payment.run == run), default=0)

    def fits(self, releases: Iterable[Release]) -> bool:
        """Return whether the budget allows releases beside what is recorded."""
        if self.budget is None or self.budget == math.inf:
            return True
        return epsilon([*self.releases, *releases], self.delta) <= self.budget

    def spend(self, run: str, spend: Spend) -> None:
        """Pay for rounds of a run, in order; safe on disk when this returns. What the run has paid is free.

        Raises:
            BudgetError: when the budget does not allow it (nothing is recorded), or the disk fails.
        """
        due = spend.between(self.paid_until(run), spend.to_round)
        if due is None:
            return
        if not self.fits([due.release]):
            raise BudgetError(
                f"epsilon={self.budget} does not allow rounds {due.from_round} to {due.to_round}: "
                f"{self.spent():.4g} is spent ({self.path}); raise the budget or stop here"
            )
        self.append(Payment.of(run, [due]))
        self.sync()

    def append(self, payment: Payment) -> None:
        """Write a payment, whole or not at all, without a look at the budget; it counts after `sync`."""
        if self._appended[1]:
            self.sync()  # one that an interrupt kept from it
        bodies = [payment.to_json()] if self._hashes else [self._header, payment.to_json()]
        content, hashes = chained(bodies, self.head)
        self._appended = ([payment], hashes)
        self._guarded(lambda fd: _write_all(fd, content))

    def sync(self) -> None:
        """Make what was appended safe on disk, and count it."""
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def ledger_path(directory: Path | str, dataset_fingerprint: str, peer: int) -> Path:
    """Return where a peer's ledger for a data set lies."""
    return Path(directory) / dataset_fingerprint[:16] / f"peer-{peer:05d}.jsonl"


def make_folder(folder: Path) -> None:
    """Make a ledger folder, its name safe on disk."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
    except OSError as error:
        raise BudgetError(f"{folder} cannot be made ({error.strerror}); give another ledger folder") from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder safe on disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _open_locked(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BudgetError(f"{path} cannot be opened ({error.strerror}); give another ledger folder") from error
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
