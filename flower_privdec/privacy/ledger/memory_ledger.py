"""A ledger in memory, for peers of a rehearsal: charged, witnessed and composed like one on disk, at no disk's cost.

`LedgerLines` takes the place of the file. It outlasts the ledger that is opened on it, as a file outlasts a process,
and can be copied, put back and emptied, as an operator may do with a file. Nothing here protects a real release: the
lines are gone with the process.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

from flower_privdec.common.errors import BudgetError
from flower_privdec.common.files import disk_error
from flower_privdec.privacy.ledger.cohort_ledger import PlannedLedger
from flower_privdec.privacy.ledger.segments import EMPTY_HASH, Entry, Head, RunName, Totals
from flower_privdec.privacy.ledger.spending import Account

DIGEST = sha256().digest_size


class LedgerLines:
    """The lines of a ledger, each with its hash.

    Args:
        observe: called with each entry that is appended, here or to a copy.

    Attributes:
        totals: what the lines add up to; those of one run are merged, so that a run of weeks keeps few.
        digests: of each line 32 bytes, which name all lines before it too.
        starts: how many processes have opened it.
        is_full: whether nothing can be written, as on a full disk.
    """

    def __init__(self, observe: Callable[[Entry], None] = lambda entry: None) -> None:
        self._observe = observe
        self.totals = Totals()
        self.digests = bytearray()
        self.starts = 0
        self.is_full = False

    @property
    def head(self) -> Head:
        """Return the number of lines and the last line's hash."""
        length = len(self.digests) // DIGEST
        if not length:
            return 0, EMPTY_HASH
        return length, self.hash_at(length)

    def hash_at(self, length: int) -> str:
        """Return the hash of the line after which the ledger has so many."""
        return self.digests[(length - 1) * DIGEST : length * DIGEST].hex()

    def append(self, entry: Entry) -> None:
        """Append a line.

        Raises:
            BudgetError: there is no room; no step may be taken.
        """
        if self.is_full:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the ledger")
            raise BudgetError(f"{disk_error(full)}; no step was taken", code="ledger.disk") from full
        _, before = self.head
        facts = (before, entry.run.id, entry.from_step, entry.to_step, entry.boot, sorted(entry.witnessed.items()))
        self.digests += sha256(repr(facts).encode()).digest()
        self.totals.count([entry])
        self._observe(entry)

    def copy(self) -> LedgerLines:
        """Return a backup."""
        backup = LedgerLines(self._observe)
        backup.totals = self.totals.copy()
        backup.digests = self.digests.copy()
        backup.starts = self.starts
        return backup


class MemoryLedger(PlannedLedger):
    """The ledger of some peers of a rehearsal; see `CohortLedger` for the arguments.

    Args:
        lines: what is there; lines are appended to it.
    """

    path = Path("the ledger")

    def __init__(
        self,
        lines: LedgerLines,
        run: RunName,
        accounts: Sequence[Account],
        *,
        fresh: bool = False,
        start: int = 0,
    ) -> None:
        super().__init__()
        self._lines = lines
        self._is_open = True
        self.count(lines.totals.entries)
        self.lines = {**lines.totals.lines}  # merged entries do not say who wrote them
        self._plan(run, accounts, block=1, fresh=fresh, start=start)

    @property
    def head(self) -> Head:
        return self._lines.head

    @property
    def n_entries(self) -> int:
        return self._lines.head[0]

    def _hash_at(self, length: int) -> str:
        return self._lines.hash_at(length)

    def _keep(self, entry: Entry) -> None:
        if not self._is_open:
            raise BudgetError("the ledger is closed; open it again before another step", code="ledger.closed")
        self._lines.append(entry)
        self.count([entry])

    def close(self, *, unlock: bool = True) -> None:
        self._is_open = False
