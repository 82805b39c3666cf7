"""Experiments of some of a network's peers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from salts import ONE_SALT

from flower_privdec.experiment import Agreement, Experiment, OwnParts


def hosting(agreement: Agreement, peers: Iterable[int]) -> Experiment:
    """Return the view of a process that hosts some peers."""
    own = OwnParts.of(agreement, np.array(list(peers)), salt=ONE_SALT)
    return Experiment.joined(agreement, own)
