"""A shard that is killed in the middle of a round: `python dying_shard.py MEETING SCENARIO`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from shards_together import engines_of
from torch.distributed import FileStore

from flower_privdec.engine.shards.process_group import Wires
from flower_privdec.engine.shards.rendezvous import THIS_MACHINE
from flower_privdec.engine.shards.shard_assignment import Shards
from flower_privdec.scenario import parse_scenario


def main(meeting: str, text: str) -> None:
    scenario = parse_scenario(text)
    shards = Shards.deal(scenario.n_peers, 2)
    make = engines_of(scenario, shards)
    wires = Wires.meet(FileStore(meeting, 2), 1, shards, THIS_MACHINE)
    engine = make(wires)
    engine.round()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).read_text())
