"""The push-sum mass of a run, read from the folders of its peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from flower_privdec.common.files import CHECKPOINTS
from flower_privdec.peer.store import read_checkpoints
from flower_privdec.pushsum.frames import TensorArithmetic, unpack, wire_codec


def mass_on_disk(folders: Sequence[Path], names: Sequence[str] = ("x", "w"), codec: str = "exact") -> dict[str, Tensor]:
    """Return Σ mass + Σ shares in flight over all peers of a run in asynchronous mode, float64, by name.

    Without gradient steps it stays what it was at the beginning, under any loss, repetition and kill: for w that is
    the number of peers. A peer that was reset, or joined late, has no mass of its own: then it is less.

    Args:
        folders: of every peer, by number, while none of them is writing.
        names: of the rows that are shared.
        codec: how shares are encoded.
    """
    arithmetic = TensorArithmetic(wire_codec(codec))
    disks = []
    parts = list[Mapping[str, Tensor]]()
    for peer, folder in enumerate(folders):
        checkpoint = read_checkpoints(folder / CHECKPOINTS)[-1]
        mass = {name: checkpoint.state.rows[name][0] for name in names}
        disks.append(unpack(peer, checkpoint.transport["shares"], checkpoint.carried, mass))

    for disk in disks:
        parts.append(disk.mass)
        for receiver, edge in disk.edges.items():
            for share in edge.frozen:
                back = disks[receiver].edges[share.sender]
                is_new = back.incarnation != share.incarnation or back.received < share.number
                if share.addressed == disks[receiver].incarnation and is_new:
                    shared, _ = arithmetic.open(share.values, disk.mass, back.heard)
                    parts.append(shared)

    return {name: torch.stack([part[name].double() for part in parts]).sum(0) for name in names}
