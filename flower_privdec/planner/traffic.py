"""What peers of a network send: the bytes of a round, and whether the wire codec lets models agree."""

from __future__ import annotations

from typing import Any

import numpy as np

from flower_privdec.core import Exchange
from flower_privdec.core.attack import attack_note
from flower_privdec.experiment import Experiment
from flower_privdec.pushsum.frames import formats_of, frame_size

MEASURED = 64  # rounds of a random graph whose receivers are counted


def traffic_facts(experiment: Experiment) -> dict[str, Any] | None:
    """Return what a peer of a network sends in a round; None if the algorithm exchanges nothing.

    Returns:
        codec: its name; bytes: of the frames to one receiver; receivers: how many there are, on average.
    """
    mixing = experiment.mixing
    if mixing is None:
        return None

    n_bytes = 0
    for item in experiment.algorithm.program:
        if isinstance(item, Exchange):
            # All rows that peers exchange are as long as the model, but for push-sum weights.
            weight = experiment.initial.new_ones(())
            rows = {name: weight if name.endswith("w") else experiment.initial for name in item.names}
            n_bytes += frame_size(formats_of({name: experiment.arithmetic.encode(row) for name, row in rows.items()}))

    rounds = min(mixing.topology.period or MEASURED, experiment.scenario.rounds, MEASURED)
    sent = []
    for round_index in range(rounds):
        senders, receivers, _ = mixing.matrix(round_index * mixing.steps).links()
        sent.append(np.count_nonzero(senders != receivers) / mixing.n_peers)
    return {"codec": experiment.scenario.network.codec.name, "bytes": n_bytes, "receivers": float(np.mean(sent))}


def codec_warnings(experiment: Experiment) -> list[str]:
    """Return warnings about a wire codec that is too coarse for models to agree, or soon enough."""
    return [f"network.codec: {caution}" for caution in experiment.arithmetic.cautions()]


def attack_warnings(experiment: Experiment) -> list[str]:
    """Return a warning if peers of the scenario lie."""
    lies = attack_note(experiment.scenario.attack)
    return [] if lies is None else [f"attack: {lies}"]
