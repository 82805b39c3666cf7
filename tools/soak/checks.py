"""The invariants of a soak, checked from outside the peers: ledgers, push-sum mass, and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from flower_privdec.common.files import CHECKPOINTS
from flower_privdec.experiment.checkpoint import Checkpoint
from flower_privdec.peer.peer import APART
from flower_privdec.peer.store import read_checkpoints
from flower_privdec.peer.trainer import rows_path
from flower_privdec.privacy.ledger.segments import read_chain
from tools.mass_on_disk import mass_on_disk
from tools.soak.release_counter import counted_in

STEPS_ALONE = 2  # of a peer that is cut off: the one under way, and one more


@dataclass(frozen=True)
class Paid:
    """The steps that a ledger pays for.

    Attributes:
        steps: how many.
        most: of how many at a time at most.
        records: in how many lines.
        charged: steps among them in place of lines that the ledger had lost.
    """

    steps: int = 0
    most: int = 0
    records: int = 0
    charged: int = 0

    @classmethod
    def of(cls, folder: Path) -> Paid:
        """Verify the chain of one peer's ledger and count its steps; zero if there is no ledger yet.

        Raises:
            BudgetError: the chain is broken.
        """
        entries = [
            entry for path in sorted(folder.glob("*.jsonl")) if path.stat().st_size for entry in read_chain(path)[1]
        ]
        lengths = [entry.to_step - entry.from_step for entry in entries]
        charged = sum(entry.to_step - entry.from_step for entry in entries if entry.witnessed)
        return cls(sum(lengths), max(lengths, default=0), len(lengths), charged)


def ledger_problem(paid: Paid, before: Paid, counted: int, counted_later: int, lives: int) -> str | None:
    """Return the violated invariant of a ledger, or None.

    Args:
        paid: its steps now.
        before: its steps at the last check.
        counted: steps that were taken, as counted before it was read.
        counted_later: as counted after that.
        lives: how often the peer was started: each may end between a payment and the steps that this reserved.
    """
    if paid.records < before.records or paid.steps < before.steps:
        return f"it paid for {before.steps} steps, and now for {paid.steps}"
    if paid.steps < counted:
        return f"it pays for {paid.steps} steps, and {counted} were taken"
    if paid.steps > counted_later + lives * paid.most:
        return (
            f"it pays for {paid.steps} steps, and {counted_later} were taken by {lives} processes, each of which may "
            f"have lost {paid.most} at most"
        )
    return None


def look_at_ledger(folder: Path, counts: Path, before: Paid, lives: int) -> tuple[Paid, str | None]:
    """Check the ledger of a peer that may be running.

    Args:
        folder: of the ledger.
        counts: where its steps are counted, see `release_counter`.
        before: its steps at the last check.
        lives: how often the peer was started.

    Returns:
        Its steps, and the violated invariant, or None.
    """
    counted = counted_in(counts)
    paid = Paid.of(folder)
    return paid, ledger_problem(paid, before, counted, counted_in(counts), lives)


@dataclass(frozen=True)
class Weight:
    """The push-sum weights of a network as they lie on its peers' disks.

    Attributes:
        total: Σw, with what is on its way.
        expected: the number of peers that have mass.
        rounding: by how much the two may differ.
    """

    total: float
    expected: int
    rounding: float

    @property
    def is_right(self) -> bool:
        """Return whether nothing was lost, and nothing counted twice."""
        return abs(self.total - self.expected) <= self.rounding


def weight_on_disk(folders: Sequence[Path], at_the_end: bool) -> Weight | None:
    """Return Σw over all peers of an algorithm that sends shares; None if their disks cannot tell, or it has none.

    Each w_i is 1 at the beginning and mixing is column-stochastic, so that Σw stays what it was. Where peers wait for
    each other, what is on its way is on no disk, and only the end tells. Where they do not, shares are on the disks of
    their senders; a peer that joined later begins with the same weight, once its first share has come.

    Args:
        folders: of all peers, by number, while none of them runs.
        at_the_end: whether all of them came to the end of their rounds.
    """
    newest = [_newest(folder) for folder in folders]
    states = [checkpoint.state for checkpoint in newest if checkpoint is not None]
    if len(states) < len(folders) or any("w" not in state.rows for state in states):
        return None
    additions = sum((state.round_index + 1) * len(states) for state in states)
    rounding = torch.finfo(states[0].rows["w"].dtype).eps * additions
    shares = [c.transport["shares"] for c in newest if c is not None and "shares" in c.transport]
    if len(shares) == len(folders):
        began = sum(bool(state.rows["w"].any()) for state in states)
        return Weight(float(mass_on_disk(folders, ["w"])["w"]), began, rounding)
    total = float(torch.cat([state.rows["w"] for state in states]).double().sum())
    return Weight(total, len(states), rounding) if at_the_end else None


def _newest(folder: Path) -> Checkpoint | None:
    if (folder / CHECKPOINTS).exists():
        return read_checkpoints(folder / CHECKPOINTS)[-1]
    return None


@dataclass(frozen=True)
class Models:
    """The models that the devices of a run end with.

    Attributes:
        devices: how many there are that agreed.
        farthest: the largest distance of one of them from their mean, over the mean's norm.
    """

    devices: int
    farthest: float


def models_problem(folders: Sequence[Path], models: Models) -> str | None:
    """Return what is wrong with the models of devices that came to the end and reported no disagreement, or None."""
    if models.farthest <= 2 * APART:
        return None
    return f"of {models.devices} devices that agreed one is {models.farthest:.1%} from the mean of {len(folders)}"


def last_models(folders: Sequence[Path]) -> Models | None:
    """Return how far the last models of some devices are from each other; None if there are no two.

    Args:
        folders: of the devices that came to the end and reported no disagreement.
    """
    paths = [path for folder in folders if (path := rows_path(folder, None)).exists()]
    rows = [load_file(path) for path in paths]
    if len(rows) < 2:
        return None
    models = torch.cat([row["x"] / row["w"][:, None] if "w" in row else row["x"] for row in rows]).double()
    mean = models.mean(0)
    distances = (models - mean).norm(dim=1) / mean.norm()
    return Models(len(rows), float(distances.max()))


def isolated_problem(before: int, after: int) -> str | None:
    """Return what is wrong with the steps of a peer that was cut off, or None.

    Args:
        before, after: how many steps it had taken when it was cut off, and when that ended. One was under way, and what
            its neighbours had sent before allows one more.
    """
    if after - before <= STEPS_ALONE:
        return None
    return (
        f"it took {after - before} private steps while nothing came through from or to it, and may take {STEPS_ALONE}"
    )


def resident_bytes(process: int) -> int | None:
    """Return how much memory a process takes (resident); None if this system does not say, or it is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:")), None)
