"""Normals per second of each noise source, timed side by side."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from flower_privdec.privacy.noise import ExactNoise, NoiseSource, SystemNoise, build_noise
from flower_privdec.rows.keys import seed_keys
from tools.bench.timing import paired, quiet

NAME = "noise"
SIZE = 1_000_000  # normals of a row


def measure_noise(device: torch.device, rounds: int, size: int = SIZE) -> dict[str, Any]:
    """Time one row of noise from each source.

    Returns:
        description; normals: by source, how many a second, in float32.
    """
    row = torch.zeros(1, size, device=device)
    std = torch.ones(1, device=device)
    sources: dict[str, NoiseSource] = {"simulated": build_noise(seed_keys(1, [0]), device)}
    sources |= {"system": SystemNoise(), "exact": ExactNoise()}
    with quiet():
        times = paired({name: partial(_fill, source, row, std) for name, source in sources.items()}, rounds, device)
    per_second = {name: size / float(np.median(source.clock)) for name, source in times.items()}
    return {"description": f"{size:,} normals in float32", "normals": per_second}


def _fill(source: NoiseSource, row: torch.Tensor, std: torch.Tensor) -> None:
    source.add_(row, std, 0, np.zeros(1, dtype=np.int64))
