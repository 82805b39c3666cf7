"""What a peer's own training adds to its row: the change of its arrays, clipped as a whole and noised."""

from __future__ import annotations

import math

import numpy as np
import torch

from flower_privdec.privacy.noise.system import SystemNoise


def norm(vector: np.ndarray) -> float:
    """Return the Euclidean norm of a vector, float64 [d], of any size without overflow; NaN or ∞ where it has such."""
    largest = float(np.max(np.abs(vector), initial=0.0))
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * float(np.linalg.norm(vector / largest))


def clipped(update: np.ndarray, clip_norm: float) -> np.ndarray:
    """Return u · min(1, C / ‖u‖), float64 [d]; a zero update stays zero.

    Args:
        update: finite, float64 [d].
        clip_norm: C.
    """
    length = norm(update)
    if length <= clip_norm:
        return update
    largest = float(np.max(np.abs(update)))
    short = (update / largest) * (clip_norm / (length / largest))
    return short * min(1.0, clip_norm / norm(short))  # rounding alone could leave it a hair too long


def noised(update: np.ndarray, std: float) -> np.ndarray:
    """Return an update with N(0, std² I) added from the operating system's entropy, float64 [d]."""
    row = torch.from_numpy(update.astype(np.float64, copy=True))[None]
    SystemNoise().add_(row, torch.tensor([std], dtype=torch.float64), 0, np.zeros(1, dtype=np.int64))
    return np.asarray(row[0].numpy())


def unsound(update: np.ndarray) -> str:
    """Return what is wrong with an update in words; empty where nothing is."""
    if np.isnan(update).any():
        return f"{int(np.isnan(update).sum())} of its {update.size} numbers are NaN"
    infinite = int((~np.isfinite(update)).sum())
    return f"{infinite} of its {update.size} numbers are infinite" if infinite else ""
