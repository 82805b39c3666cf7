"""One cohort over several processes or machines, started by torchrun: each rank hosts a part of the peers.

torchrun --nproc-per-node 2 shards.py SCENARIO --out FOLDER        two processes of this machine

Each rank builds its own peers only, charges their ledger, and trains them. Ranks send each other the rows that cross,
by gloo. At an evaluation rank 0 collects the rows that other peers may see, and writes the folder that `privdec run`
writes: `privdec report FOLDER` reads it.

Privacy: ranks trust each other. torchrun's rendezvous and gloo know neither encryption nor authentication.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch.distributed import Store, rendezvous

import flower_privdec as fp
from flower_privdec.core import State
from flower_privdec.engine.shards.communication_plan import Shards
from flower_privdec.engine.shards.process_group import ProcessGroup
from flower_privdec.engine.shards.rendezvous import THIS_MACHINE
from flower_privdec.engine.shards.shard_engine import ShardEngine
from flower_privdec.experiment import Agreement, Experiment, OwnParts
from flower_privdec.experiment.recorder import Recorder, check_no_training_loss, check_one_stage, evaluation_rounds
from flower_privdec.experiment.run_name import new_salt, public_name
from flower_privdec.experiment.spent import Spent, check_budget, epsilons
from flower_privdec.scenario import load_scenario, to_yaml
from flower_privdec.scenario.sections import CancellingSection


def check(scenario: fp.Scenario) -> None:
    """Refuse what shards do not do.

    Raises:
        ScenarioError: with the key and the remedy.
    """
    check_one_stage(scenario, "shards keep no checkpoint")
    check_no_training_loss(scenario)

    remedy = "or run it in one process by `privdec run`"
    codec = scenario.network.codec.name
    if codec != "exact":
        raise fp.ScenarioError(
            f"network.codec={codec}: shards send rows as they are: leave it out, {remedy}", code="shards.scenario"
        )

    private = scenario.private
    if private is None:
        return
    if private.ledger is not None:
        raise fp.ScenarioError(
            f"privacy.ledger={private.ledger}: each rank keeps a ledger of its own below --out: leave it out, {remedy}",
            code="shards.scenario",
        )
    if isinstance(private.noise, CancellingSection):
        raise fp.ScenarioError(
            "privacy.noise.kind=cancelling: ranks agree on no secrets of pairs: leave privacy.noise out, or "
            "`privdec run SCENARIO --runtime flower --mode sharded`",
            code="shards.scenario",
        )


def experiment_of(agreement: Agreement, shards: Shards, rank: int, store: Store) -> Experiment:
    """Return the part of the experiment that this rank hosts; nothing of other peers is read."""
    # Code of a user's own has a random salt in its keys, which must be one for all ranks.
    if rank == 0:
        store.set("salt", new_salt())
    salt = store.get("salt").decode()

    # The number of shards decides how sums are rounded, so it is part of the run's name, as in Flower's mode.
    own = OwnParts.of(agreement, shards.peers(rank), runtime=f"{len(shards)} shards", salt=salt)
    return Experiment.joined(agreement, own)


def digest(experiment: Experiment) -> bytes:
    """Return a digest of what all ranks must have alike."""
    facts = [to_yaml(experiment.scenario), public_name(experiment, experiment.own.source).environment]
    digested = hashlib.sha256(json.dumps(facts).encode())
    digested.update(experiment.initial.detach().cpu().contiguous().numpy().tobytes())
    return digested.digest()


def gathered(group: ProcessGroup, spent: Spent) -> Spent:
    """Return what the peers of all ranks have spent, in the order of the peers."""
    # A group gathers equally many bytes of each rank: the text is padded to the longest.
    text = json.dumps(asdict(spent)).encode()
    lengths = group.gather(len(text).to_bytes(8, "big"))
    longest = max(int.from_bytes(length, "big") for length in lengths)
    parts = [json.loads(part) for part in group.gather(text.ljust(longest))]

    first = parts[0]
    lists = [name for name, value in first.items() if isinstance(value, list)]
    joined = {name: [value for part in parts for value in part[name]] for name in lists}
    notes = [part["note"] for part in parts if part["note"]]
    breaches = {condition: words for part in parts for condition, words in part["breaches"].items()}
    return Spent(**(first | joined | {"note": next(iter(notes), None), "breaches": breaches}))


def train(scenario: fp.Scenario, group: ProcessGroup, store: Store, out: Path) -> None:
    """Run all rounds of this rank's peers, and on rank 0 evaluate those of all."""
    agreement = Agreement.of(scenario)
    experiment = experiment_of(agreement, group.shards, group.shard, store)
    group.agree(digest(experiment))

    recorder = None
    if group.shard == 0:
        recorder = Recorder(agreement, None, out, "torchrun")
        recorder.transport = {"shards": len(group.shards)}
        recorder.start(lambda: State(np.arange(scenario.n_peers)), None)

    ledger = out / "ledger" / f"shard-{group.shard}"
    cohort = experiment.cohort(ledger)
    try:
        check_budget(cohort, ledger)
        # No rank pays for a step before all are ready: one that cannot begin has ended by now.
        group.gather(b"ready")

        engine = ShardEngine(experiment.algorithm, cohort, experiment.initial_state(cohort), group)
        rows = None
        for stop in evaluation_rounds(scenario.rounds, scenario.evaluation.every):
            began = time.perf_counter()
            engine.rounds(stop - engine.state.round_index)
            seconds = time.perf_counter() - began

            rows = engine.collect()  # None but on rank 0
            largest = [
                struct.unpack("d", part)[0] for part in group.gather(struct.pack("d", max(epsilons(cohort, stop))))
            ]
            if recorder is not None and rows is not None:
                recorder.seconds += seconds
                line = recorder.record(rows, stop, largest)
                print(f"round {stop}/{scenario.rounds}: loss {line['loss']['mean_model']:.4f}, ε {max(largest):.3g}")

        spent_by_all = gathered(group, Spent.of(cohort, scenario.rounds))
        if recorder is not None and rows is not None:
            recorder.finish(rows, spent_by_all)
        group.wait_for_all()
    finally:
        if cohort.ledger is not None:
            cohort.ledger.close()
        if recorder is not None:
            recorder.close()


def main(words: Sequence[str] | None = None) -> None:
    """Take this rank's part of a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the run")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of the scenario")
    parser.add_argument("--address", default=THIS_MACHINE, help="this machine's address, to which other ranks connect")
    given = parser.parse_args(words)
    if "RANK" not in os.environ:
        parser.error("this process has no RANK: start it by torchrun --nproc-per-node 2 shards.py ...")

    scenario = load_scenario(given.scenario, given.set)
    check(scenario)
    torch.set_num_threads(scenario.compute.threads)
    store, rank, count = next(rendezvous("env://"))
    shards = Shards.split(scenario.n_peers, count)
    if len(shards) < count:
        parser.error(f"{count} ranks for {scenario.n_peers} peers: start at most one rank for each peer")

    group = ProcessGroup.join(store, rank, shards, given.address)
    try:
        train(scenario, group, store, given.out)
    except fp.PrivdecError as error:
        sys.exit(f"rank {rank}: error: {error}")
    finally:
        group.close()


if __name__ == "__main__":
    main()
