"""The mass of a push-sum network as it lies on the disks of its peers: what nothing that happens to them may change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from flower_privdec.engine.checkpoint import Checkpoint, read_checkpoint
from flower_privdec.pushsum.packing import unpack
from flower_privdec.pushsum.share_protocol import Durable, FrozenShare


def mass_on_disk(folders: Sequence[Path], names: Sequence[str] = ("x", "w")) -> dict[str, Tensor]:
    """Return Σ mass + Σ shares in flight over all peers of a run in asynchronous mode, float64, by name.

    Without gradient steps it stays what it was at the beginning, whatever was lost, repeated or killed: for w that is
    the number of peers. A peer that was rolled back, or joined late, begins anew without mass: then it is less.

    Args:
        folders: of every peer, by number, while none of them is writing.
        names: of the rows that are shared.
    """
    kept = [read_checkpoint(folder / "checkpoint-0") for folder in folders]
    disks = [_durable(peer, each, names) for peer, each in enumerate(kept)]
    parts = [disk.mass for disk in disks] + [share.values for share in _in_flight(disks)]
    return {name: torch.stack([part[name].double() for part in parts]).sum(0) for name in names}


def _durable(peer: int, kept: Checkpoint, names: Sequence[str]) -> Durable[Tensor]:
    return unpack(peer, kept.transport["shares"], kept.carried, {name: kept.state.rows[name][0] for name in names})


def _in_flight(disks: Sequence[Durable[Tensor]]) -> Iterator[FrozenShare[Tensor]]:
    """Yield every share that its sender has on disk and its receiver has not, and can still take."""
    for disk in disks:
        for receiver, link in disk.links.items():
            share = link.frozen
            if share is None or share.addressed != disks[receiver].incarnation:
                continue
            back = disks[receiver].links[share.sender]
            if back.incarnation != share.incarnation or back.received < share.number:
                yield share
