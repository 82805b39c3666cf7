"""The ledger of one data source: everything that was ever charged to its examples.

# Theory of operation

The ledger belongs to the *data source*, before any subset or partition: another part of the data, another order or
number of peers, or a changed pixel is charged to it too. All front ends charge here: a cohort's plan
(`cohort_ledger.CohortLedger`), a torch training loop, a Flower app's peer.

**Pay, then act.** A charge is on disk before the step that it covers draws its batch or its noise. So a crash may count
steps that were never taken, and never the other way round. A charge may cover several steps ahead; a crash then counts
at most these too much.

**Paying twice is free, if it is the same.** An entry names its run and the steps that it covers. A run's name is a hash
of all that determines its numbers (scenario, seed, data, generator, device and versions), so taking charged steps again
gives the same releases bit for bit and reveals nothing more. Anything else over the same data adds up. A run that draws
fresh noise has a new name.

The parts, from below:

| module | has |
|---|---|
| `segments` | what is recorded; how entries lie on disk as hash-chained lines, and are verified |
| `spending` | what entries cost, and how many more steps fit a budget |
| `ledger` | (here) locking, opening, appending, sealing: the only code that writes |
| `cohort_ledger` | a ledger for the rows of one process, whose plan is known |

**What is on disk when.** `append` returns after the line was written, and flushed if the ledger is durable; then it
counts. The file is opened, verified and locked once and stays open; a crash or an error in between leaves at worst one
line without its end. Before the entry that would make a segment too long, the segment is sealed: (1) its copy,
condensed (`segments`), is put on disk under a name of its own; (2) a file that holds only the next header replaces
SOURCE.jsonl. A crash between the two leaves both files, of the same lines; the copy is then removed, and made again
later.

**Who may write.** At most one process, and one `Ledger` in it, may append to a file. The lock is one `flock` on the
descriptor that the lines are written through, so it is a lock on the file itself:

- The system releases it when the process ends, however it ends. Nothing is left behind that could be stale.
- Two opens of one file are two locks, so two threads of one process exclude each other too.
- Whatever path leads to the file (a symbolic link, a mount), it is one lock. A copy of a ledger is another file with a
  lock of its own; that it was continued beside the original is found by other means (see below).
- A forked child shares the lock of its parent, and may close its descriptor without releasing it.

Why not the package filelock: its FileLock opens a descriptor of its own. A lock file beside the ledger could be deleted
while it is held, and two paths to one ledger would have two of them. On a file system without `flock` it falls back to
a marker file, which a killed process leaves behind. It does not say who holds a native lock either. What it has for a
descriptor that is open already is the one call of `flock` below.

What a ledger does that was ...

| | |
|---|---|
| killed while it wrote a line | the line counts if it is complete, and is dropped if not; no step had begun on it |
| killed while it sealed a segment | either file is whole; see above |
| written on a full or failing disk | it closes, and the step is not taken; opening it again verifies what is there |
| opened twice | the second is refused, in this process or another |
| forked with its process | the parent keeps it; the child closes its copy and does not unlock |
| edited, or written by two at once | refused, with the line that does not fit the chain |
| deprived of a sealed segment | refused, with the segment's name |
| deleted, with a checkpoint that saw it | refused (`segments.check_ledger_there`) |
| put back from an old copy | refused if a checkpoint, a neighbour or a sealed segment has newer lines |
| copied, and both continued | refused likewise: each lacks lines of the other that a checkpoint or a neighbour saw |

An old copy of which no one saw a newer state cannot be detected. Nor can one of the very moment before a segment was
sealed, by its files: it looks as after a crash between the two writes of sealing. That is why checkpoints name the head
that they saw (`check_head`), and networked peers tell each other how many lines they wrote (`check_witnessed`).
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

from flower_privdec.common.errors import BudgetError
from flower_privdec.common.files import disk_error, make_owners_folder, open_file, replacing, sync
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.ledger.segments import (
    EMPTY_HASH,
    FORMAT,
    RESTORE,
    Body,
    Charge,
    Entry,
    Head,
    RunName,
    Segment,
    Totals,
    chained,
    check_segments,
    condensed,
    hash_at,
    ledger_path,
    parse,
    sealed_path,
    sealed_segments,
)
from flower_privdec.privacy.ledger.spending import releases_in

SEGMENT = 1 << 19  # bytes after which a segment is sealed; more if its header is long
UNCHANGED = ("st_dev", "st_ino", "st_size", "st_mtime_ns")  # of a file that was not written to meanwhile

_log = logging.getLogger(__name__)


class _Written(NamedTuple):
    """Lines that were handed to the system, and count once they are flushed.

    Attributes:
        entries: their entries; a header has none.
        hashes: their hashes.
        size: their bytes.
        template: the last entry that is written in full, once they count.
    """

    entries: list[Entry]
    hashes: list[str]
    size: int
    template: Entry | None


class WitnessedLedger(Totals, ABC):
    """What every ledger holds and does, on disk (`Ledger`) or in memory (`memory_ledger.MemoryLedger`).

    Attributes:
        path: names it in errors.
        boot: the process, which its lines then name; 0 if no neighbours witness the ledger.
    """

    path: Path
    boot = 0

    @property
    @abstractmethod
    def head(self) -> Head:
        """Return the number of lines and the last line's hash, which a checkpoint names."""

    @property
    @abstractmethod
    def n_entries(self) -> int:
        """Return how many entries were appended."""

    @abstractmethod
    def _hash_at(self, length: int) -> str:
        """Return the hash of a line; `length` is how many lines there are up to it, at least 1."""

    @abstractmethod
    def _keep(self, entry: Entry) -> None:
        """Append an entry, whole or not at all, and count it; it is safe when this returns."""

    @abstractmethod
    def close(self, *, unlock: bool = True) -> None:
        """Release it; `unlock` is False in a process that was forked from the holder, which keeps it."""

    def append(
        self,
        run: RunName,
        from_step: int,
        to_step: int,
        charges: Iterable[Charge],
        *,
        witnessed: Mapping[int, int] | None = None,
    ) -> None:
        """Append one entry, whole or not at all; it counts, and is safe, when this returns.

        Args:
            run: the run that takes the steps.
            from_step, to_step: the steps [from_step, to_step) that are covered.
            charges: the cost to each group of peers.
            witnessed: the lines that this one stands for, see `lacks`.

        Raises:
            BudgetError: it cannot be kept; then no step may be taken.
        """
        boot = self.boot
        lost = {}
        if witnessed is not None:
            # It stands for the lines that are not here already, and none of this process is among them.
            boot = 0
            lost = {process: lines for process, lines in witnessed.items() if lines > self.lines.get(process, 0)}
        self._keep(Entry(run, from_step, to_step, tuple(charges), boot, lost))

    def fits(self, charge: Charge, budget: float, delta: float) -> bool:
        """Return whether a budget allows one more charge, as if one example had taken part in all charges.

        Args:
            charge: what would be added.
            budget: ε; infinity allows everything.
            delta: δ in (0, 1).
        """
        if math.isinf(budget):
            return True
        return epsilon(releases_in(self.entries, charge), delta) <= budget

    # --- what others have seen of it ---

    def check_head(self, head: Sequence[int | str] | None) -> None:
        """Check that the ledger still holds all lines that a checkpoint saw; it may have grown since.

        Raises:
            BudgetError: it is shorter, or differs there.
        """
        length, digest = head or (0, EMPTY_HASH)
        length = int(length)
        n_lines, _ = self.head
        if length > n_lines:
            message = f"{self.path} has {n_lines} lines, and the checkpoint saw {length}; {RESTORE}"
            raise BudgetError(message, code="ledger.stale")

        if length > 0 and self._hash_at(length) != digest:
            message = f"{self.path} line {length}: not the line that the checkpoint saw; {RESTORE}"
            raise BudgetError(message, code="ledger.stale")

    def name_lines(self, boot: int) -> None:
        """Name a boot in each line that is written from now on, so that neighbours can witness them."""
        self.boot = boot

    def lacks(self, witnessed: Mapping[int, int]) -> int:
        """Return how many of the lines that neighbours have seen are not in the ledger.

        Args:
            witnessed: how many lines they have seen of each boot.
        """
        return sum(max(0, lines - self.lines.get(boot, 0)) for boot, lines in witnessed.items())

    def check_witnessed(self, witnessed: Mapping[int, int]) -> None:
        """Check that the ledger holds what a neighbour has seen of it.

        Raises:
            BudgetError: it lacks some lines: it is an old copy or a new ledger, or a copy was continued beside it.
        """
        missing = self.lacks(witnessed)
        if missing:
            raise BudgetError(
                f"{self.path} lacks {missing} lines that a neighbour (or its own state) has seen: it is an old copy or "
                "a new ledger, or a copy was continued beside it, so its ε is too small; put the newest copy back, or "
                "charge the missing lines by --charge-missing (of a SuperNode: charge-missing=true in its "
                "node-config)",
                code="ledger.witnessed",
            )


class Ledger(WitnessedLedger):
    """The ledger of one data source, open, verified and locked; a context manager.

    Its `entries` are those that are safe on disk.

    Attributes:
        path: the file of the last segment.
        durable: whether a line outlasts a stop of the machine, and not only of the process.
    """

    def __init__(self, directory: Path | str, source: str, *, durable: bool = True) -> None:
        """Open DIRECTORY/SOURCE.jsonl, created if missing.

        Args:
            durable: see above; False for a folder that is removed in the end.

        Raises:
            BudgetError: the file is in use, was edited, lacks a segment, or belongs to another source.
        """
        super().__init__()
        self.path = ledger_path(directory, source)
        self._source = source
        self.durable = durable
        self._unsynced: _Written | None = None
        self._status: os.stat_result | None = None  # of the file when it was closed
        self._fd: int | None = open_locked(self.path, durable)
        try:
            self._segment, entries = self._verify()
        except BaseException:
            self.close()
            raise

        before = self._segment.before
        self.entries = before.entries
        self.lines = before.lines
        self.count(entries)

    def _verify(self) -> tuple[Segment, list[Entry]]:
        """Verify the file, and undo what a crash left half done."""
        content = b"".join(iter(lambda: os.read(self._descriptor, 1 << 20), b""))
        segment, entries = parse(content, self.path, self._source)

        sealed = sealed_segments(self.path)
        copy = sealed_path(self.path, segment.number)
        if segment.number in sealed and segment.size and copy.read_bytes() == condensed(content):
            # A crash came after the copy of this segment and before the next one replaced it.
            copy.unlink()
            sealed.remove(segment.number)
        check_segments(self.path, segment, sealed, sealed)

        if segment.size < len(content):
            _log.warning("%s: dropped an incomplete last line; no step had begun on it", self.path)
            os.ftruncate(self._descriptor, segment.size)
        elif content and not content.endswith(b"\n"):
            segment.size += os.write(self._descriptor, b"\n")

        if self.durable:
            sync(self.path.parent)
        return segment, entries

    @property
    def _descriptor(self) -> int:
        if self._fd is None:
            raise self._closed()
        return self._fd

    def _closed(self) -> BudgetError:
        message = f"{self.path} is closed, or could not be written; open it again before another step"
        return BudgetError(message, code="ledger.closed")

    # --- what the ledger holds ---

    @property
    def head(self) -> Head:
        """Return the number of lines and the last line's hash, which a checkpoint names."""
        segment = self._segment
        # Once, for another thread may append a line between two readings (`CohortLedger.reserve`).
        length = len(segment.hashes)
        last = segment.hashes[length - 1] if length else EMPTY_HASH
        return segment.first + length, last

    @property
    def n_entries(self) -> int:
        """Return how many entries were appended."""
        n_lines, _ = self.head
        n_headers = self._segment.number + 1
        return max(0, n_lines - n_headers)

    def _hash_at(self, length: int) -> str:
        return hash_at(self.path, self._segment, length)

    # --- writing ---

    def _keep(self, entry: Entry) -> None:
        if self._unsynced is not None:
            self._finish_interrupted(self._unsynced)
        if self._segment.size >= max(SEGMENT, 2 * self._segment.header_size):
            self._seal()
        segment = self._segment

        # Most entries repeat the one before for other steps, and are written in short.
        repeats = segment.template is not None and segment.template.at(entry.from_step) == entry
        bodies = [{"from_step": entry.from_step} if repeats else entry.to_json()]
        if not segment.size:
            bodies.insert(0, self._header(0))
        content, hashes = chained(bodies, self.head)

        # Noted before the write: whatever interrupts it, the next `append` knows that these bytes may be there.
        template = segment.template if repeats else entry
        self._unsynced = _Written([entry], hashes, len(content), template)
        self._guarded(partial(_write, content=content))
        self._sync()

    def _finish_interrupted(self, lines: _Written) -> None:
        """Count lines whose `append` was interrupted between the write and the flush."""
        size = os.fstat(self._descriptor).st_size
        if size != self._segment.size + lines.size:
            # It was interrupted within the write. Opening the ledger again drops what was written of it.
            self.close()
            raise self._closed()
        self._sync()

    def _sync(self) -> None:
        """Flush the lines that were written, and count them."""
        if self.durable:
            self._guarded(os.fsync)
        written = self._unsynced
        assert written is not None
        self._segment.template = written.template
        self._segment.hashes += written.hashes
        self._segment.size += written.size
        self.count(written.entries)
        self._unsynced = None

    def _header(self, number: int) -> Body:
        """Return the header of a segment that follows what there is."""
        _, previous = self.head
        places = {"format": FORMAT, "source": self._source, "segment": number, "previous": previous}
        return places | self.to_json()

    def _seal(self) -> None:
        """Seal the segment, and begin the next; each is on disk, under its name, before the other.

        An interrupt closes the ledger, because it may not know which file is the last segment.
        """
        segment = self._segment
        fd = -1
        done = False
        content, hashes = chained([self._header(segment.number + 1)], self.head)
        try:
            with replacing(sealed_path(self.path, segment.number)) as part:
                part.write_bytes(condensed(os.pread(self._descriptor, segment.size, 0)))

            # The next file is locked before it gets its name, so that no other process can come between.
            with replacing(self.path) as part:
                fd = open_locked(part)
                _write(fd, content)

            size = len(content)
            self._segment = Segment(*segment.end, Totals(), size, size, hashes, self._source)
            sealed = self._descriptor
            self._fd = fd
            done = True
            os.close(sealed)
        except OSError as error:
            raise self._disk_error(error) from error
        finally:
            if not done:
                self.close()
                if fd >= 0:
                    os.close(fd)

    def _guarded(self, action: Callable[[int], None]) -> None:
        """Do something with the file; close the ledger if the disk fails."""
        try:
            action(self._descriptor)
        except OSError as error:
            self.close()
            raise self._disk_error(error) from error

    def _disk_error(self, error: OSError) -> BudgetError:
        error.filename = error.filename or str(self.path)
        return BudgetError(f"{disk_error(error)}; no step was taken", code="ledger.disk")

    # --- closing ---

    def close(self, *, unlock: bool = True) -> None:
        """Close the file.

        Args:
            unlock: whether to release the lock too; False in a process that was forked from the holder, which keeps it.
        """
        if self._fd is None:
            return
        # A file with lines that may not be on disk has to be verified again: `reopen` then refuses it.
        self._status = None if self._unsynced is not None else os.fstat(self._fd)
        if unlock:
            release_lock(self._fd)
        os.close(self._fd)
        self._fd = None

    def reopen(self) -> bool:
        """Open a closed ledger again without reading it, if its file is as it was, and return whether it is.

        Raises:
            BudgetError: it is in use.
        """
        before = self._status
        if before is None or not os.path.exists(self.path):
            return False

        fd = open_locked(self.path, durable=False)
        now = os.fstat(fd)
        if any(getattr(now, name) != getattr(before, name) for name in UNCHANGED):
            os.close(fd)
            return False
        self._fd = fd
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _write(fd: int, content: bytes) -> None:
    """Write all of some bytes; the system may take fewer at a time."""
    while content:
        written = os.write(fd, content)
        content = content[written:]


# --- the lock ---


def open_locked(path: Path, durable: bool = True) -> int:
    """Open a ledger's file, created with its folder if missing, and lock it.

    Args:
        durable: whether the name of a new folder has to outlast a stop of the machine.

    Returns:
        A descriptor that appends. Closing it releases the lock.

    Raises:
        BudgetError: the file cannot be created, is not a regular file, is in use, or its file system has no locks.
    """
    try:
        if durable or not path.parent.exists():
            make_owners_folder(path.parent)
        if durable:
            sync(path.parent.parent)
        fd = open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        message = f"{error.filename or path} cannot be created ({error.strerror}); give another ledger folder"
        raise BudgetError(message, code="ledger.folder") from error

    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        message = f"{path} is not a regular file, so what is written to it may be lost; give another ledger folder"
        raise BudgetError(message, code="ledger.not-a-file")

    try:
        is_ours = _lock(fd, path)
    except OSError as error:
        os.close(fd)
        message = f"{path} cannot be locked ({error.strerror}); give a ledger folder on a file system that has locks"
        raise BudgetError(message, code="ledger.no-locks") from error
    if not is_ours:
        os.close(fd)
        message = f"{path} is in use by another run; wait for it to end, or give another ledger folder"
        raise BudgetError(message, code="ledger.in-use")
    return fd


def _lock(fd: int, path: Path) -> bool:
    """Lock an open file, without waiting, and return whether that succeeded; raises OSError if it has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False

    # Between open and flock, the last holder may have sealed its segment and put a new file under this path, or taken
    # the file away. The lock would then be on a file that no process appends to.
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def release_lock(fd: int) -> None:
    """Release the lock of an open file, for every process that shares it."""
    fcntl.flock(fd, fcntl.LOCK_UN)
