"""The tiny scenario as sections of the Python API."""

from __future__ import annotations

from typing import Any

SECTIONS: dict[str, Any] = {
    "name": "tiny",
    "seed": 3,
    "n_peers": 4,
    "rounds": 6,
    "data": {"dataset": "digits", "samples": 240, "test_samples": 100, "batch": {"size": 12}},
    "model": {"name": "softmax"},
    "algorithm": {"name": "privsgp", "learning_rate": 0.5},
    "privacy": {"epsilon": 3.0, "delta": 1.0e-3},
    "evaluation": {"every": 2},
    "compute": {"dtype": "float64", "generator": "portable"},
}
