"""The exit codes of `privdec`: one table, by which the command ends, a service unit restarts, and the docs explain.

A unit knows of a process only the number with which it ended. So each number stands for one kind of end after which
something else is to be done: start it again, leave it, or ask its owner.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Restart(Enum):
    """What a service unit does after an end."""

    DONE = "leaves it: it is done"
    AGAIN = "starts it again, later each time"
    OWNER = "leaves it until its owner has seen to it"


class ExitCode(NamedTuple):
    """One way in which a command ends.

    Attributes:
        status: the number.
        meaning: what happened.
        restart: what a unit of `privdec deploy` does then.
        remedy: what its owner does, if anything.
    """

    status: int
    meaning: str
    restart: Restart
    remedy: str


FINISHED = 0
FAILED = 1
WRONG_INPUT = 2
NOT_AGREED = 3
STALLED = 4
LEDGER_SHORT = 5
NOT_VALID_NOW = 6
SHUT_OUT = 7
INTERRUPTED = 130

EXIT_CODES = (
    ExitCode(
        FINISHED,
        "finished. Of `privdec doctor`: nothing is an error, whatever it warns of; of `deploy`: all kits are as they "
        "should be, changed or not",
        Restart.DONE,
        "",
    ),
    ExitCode(
        FAILED,
        "a run that had started could not go on: a disk is full, a port is in use, no neighbour answered, or memory "
        "ran out; its state is on disk. Of `privdec doctor`: it found an error; of `audit`, `flower-run` and `soak`: a "
        "claim is refuted, the app failed, an invariant is broken; of `deploy`: the disk failed, and the same command "
        "goes on",
        Restart.AGAIN,
        "read the last line of its log",
    ),
    ExitCode(
        WRONG_INPUT,
        "the scenario, a file or an option is wrong, or the budget allows no step; nothing was written. Of `privdec "
        "deploy` also: a kit's file was changed by hand, and another one would replace it",
        Restart.OWNER,
        "mend what the error names",
    ),
    ExitCode(
        NOT_AGREED,
        "the rounds are done, and the model differs from the neighbours'",
        Restart.DONE,
        "raise `network.final_mixing`, or take a graph with more edges, in the next run",
    ),
    ExitCode(
        STALLED,
        "nothing that the peer waits for has come for as long as `network.links` allows; its state is on disk",
        Restart.AGAIN,
        "start the devices that are missing",
    ),
    ExitCode(
        LEDGER_SHORT,
        "the ledger lacks lines that neighbours or the checkpoint have seen (a folder was lost, restored or copied), "
        "or two processes run as one peer",
        Restart.OWNER,
        "put the newest folder back, or charge what is missing: `--charge-missing`, `--charge-witnessed`",
    ),
    ExitCode(
        NOT_VALID_NOW,
        "a certificate is not valid: it has expired, or the clock of this device is wrong, as it may be after a start "
        "without a network, or the list of members counts another one of this peer",
        Restart.AGAIN,
        "set the clock, or put a renewed certificate in place",
    ),
    ExitCode(
        SHUT_OUT,
        "the list of members shuts this peer out",
        Restart.OWNER,
        "ask the operator; a device that was revoked is done",
    ),
    ExitCode(INTERRUPTED, "stopped by Ctrl-C or SIGTERM; its state is on disk", Restart.DONE, ""),
)

# Errors whose end is not that of their class, by their codes.
STATUS_OF = {
    "ledger.witnessed": LEDGER_SHORT,
    "ledger.stale": LEDGER_SHORT,
    "ledger.segment": LEDGER_SHORT,
    "ledger.not-confirmed": LEDGER_SHORT,
    "network.runs-twice": LEDGER_SHORT,
    "ledger.disk": FAILED,
    "disk.is-folder": WRONG_INPUT,
    "disk.no-folder": WRONG_INPUT,
    "disk.missing": WRONG_INPUT,
    "disk.long-name": WRONG_INPUT,
    "call.revoked": SHUT_OUT,
    "certificate.expired": NOT_VALID_NOW,
    "certificate.early": NOT_VALID_NOW,
    "certificate.replaced": NOT_VALID_NOW,
}


def statuses(restart: Restart) -> tuple[int, ...]:
    """Return the statuses after which a unit does something."""
    return tuple(one.status for one in EXIT_CODES if one.restart is restart)


def exit_code_table() -> str:
    """Return the table as Markdown."""
    rows = [f"| {one.status} | {one.meaning} | {one.restart.value} | {one.remedy} |" for one in EXIT_CODES]
    return "\n".join(["| status | what happened | a unit | its owner |", "|---|---|---|---|", *rows])
