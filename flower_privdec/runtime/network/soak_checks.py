"""What has to be so whatever goes wrong, looked at from outside: ledgers, mass, and how much memory a peer takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flower_privdec.privacy.ledger_format import read_chain
from flower_privdec.runtime.checkpoint import read_state
from flower_privdec.runtime.network.share_protocol import Durable, FrozenShare, PeerLink
from flower_privdec.runtime.network.witness import counted_in


@dataclass(frozen=True)
class Paid:
    """What a ledger says of the steps that it pays for.

    Attributes:
        steps: how many.
        most: of how many at a time at most.
        records: in how many lines.
    """

    steps: int = 0
    most: int = 0
    records: int = 0

    @classmethod
    def of(cls, folder: Path) -> Paid:
        """Read what a ledger of one peer says, once its chain is verified; nothing where there is none yet.

        Raises:
            BudgetError: it does not hold together.
        """
        lengths = [
            payment.to_step - payment.from_step
            for path in sorted(folder.glob("*.jsonl"))
            if path.stat().st_size
            for payment in read_chain(path)[1]
        ]
        return cls(sum(lengths), max(lengths, default=0), len(lengths))


def ledger_problem(paid: Paid, before: Paid, counted: int, counted_later: int, lives: int) -> str | None:
    """Return what is wrong with a ledger, or None.

    Args:
        paid: what it says.
        before: what it said when it was looked at before.
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
    """Look at the ledger of a peer that may run meanwhile.

    Args:
        folder: of the ledger.
        counts: where its steps are counted, see `witness`.
        before: what it said before.
        lives: how often the peer was started.

    Returns:
        What it says, and what is wrong with it, or None.
    """
    counted = counted_in(counts)
    paid = Paid.of(folder)
    return paid, ledger_problem(paid, before, counted, counted_in(counts), lives)


def weight_at_the_end(folders: Sequence[Path]) -> tuple[float, float] | None:
    """Return Σw of the states that all peers have on disk at the end of their rounds, and what rounding may do to it.

    In a synchronous run nothing is on its way then, and Σw is the number of peers, w_i being 1 at the beginning and
    mixing column-stochastic. None for an algorithm that has no push-sum weights.

    Args:
        folders: of all peers, with their checkpoints.
    """
    states = [
        max((read_state(path) for path in folder.glob("checkpoint-?")), key=lambda state: (state.round_index, state.at))
        for folder in folders
    ]
    if any("w" not in state.rows for state in states):
        return None
    weights = torch.cat([state.rows["w"] for state in states])
    additions = sum(state.round_index * len(states) for state in states)
    return float(weights.double().sum()), torch.finfo(weights.dtype).eps * additions


def mass_with_shares_on_their_way(disks: Mapping[int, Durable[Tensor]], name: str) -> Tensor:
    """Return the sum of what all peers hold and of the frozen shares that are still to be taken, from their disks.

    With exactly-once shares this is what there was at the beginning and what steps added since; for the push-sum
    weights it is the number of peers, as long as none has lost its disk.

    Args:
        disks: what is on the disk of each peer, by peer, while none of them runs.
        name: of a row.
    """
    parts = [durable.mass[name].double() for durable in disks.values()]
    for sender, durable in disks.items():
        for receiver, link in durable.links.items():
            share = link.frozen
            if share is not None and _to_be_taken(share, disks[receiver].links.get(sender), disks[receiver]):
                parts.append(share.values[name].double())
    return torch.stack(parts).sum(0)


def _to_be_taken(share: FrozenShare[Tensor], known: PeerLink[Tensor] | None, receiver: Durable[Tensor]) -> bool:
    if share.addressed != receiver.incarnation:
        return False  # it was for one that is gone, and nobody may take it
    taken = known is not None and known.incarnation == share.incarnation and known.received >= share.number
    return not taken


def resident_bytes(process: int) -> int | None:
    """Return how much memory a process takes (resident); None where this system does not say, or it is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:")), None)
