"""Noise sources by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from flower_privdec.errors import ScenarioError
from flower_privdec.privacy.noise.exact import ExactNoise
from flower_privdec.privacy.noise.fast import FastNoise
from flower_privdec.privacy.noise.gpu_noise import GPUNoise, has_triton
from flower_privdec.privacy.noise.source import NoiseSource
from flower_privdec.privacy.noise.system import SystemNoise
from flower_privdec.privacy.noise.torch_noise import TorchNoise

GENERATORS = {
    "auto": "fast where numba (CPU) or Triton and a C compiler (GPU) are installed, else torch",
    "fast": "Philox4x32-7 and Box-Muller compiled by numba (CPU) or Triton (GPU)",
    "torch": "torch's own generator, started anew for each row (any device)",
    "system": "AES-256 under fresh keys of the operating system, for deployed peers: never the same twice (any device)",
    "exact": "normals of the same entropy with all their digits, rounded exactly: see privacy.hardened (any device)",
}
# from the operating system; they read no key
DEPLOYED: dict[str, Callable[[], NoiseSource]] = {
    "system": SystemNoise,
    "exact": ExactNoise,
}


def build_noise(generator: str, keys: Mapping[int, bytes], device: torch.device | str = "cpu") -> NoiseSource:
    """Build a noise source by name.

    Args:
        generator: one of GENERATORS.
        keys: a secret key of 16 bytes or more for each peer hosted here, by global id. A run's keys should follow
            from all that decides its numbers, so that no other run shares a draw with it. Those of DEPLOYED read none.
        device: where the rows live.

    Raises:
        ScenarioError: an unknown generator, or one that cannot run here.
        ValueError: a key is too short.
    """
    device = torch.device(device)
    if generator not in GENERATORS:
        raise ScenarioError(f"compute.generator={generator!r} must be one of {', '.join(GENERATORS)}")
    if generator in DEPLOYED:
        return DEPLOYED[generator]()
    if resolve_generator(generator, device) == "torch":
        return TorchNoise(keys, device)
    if not _has_fast(device):
        needed = (
            "numba, which is not installed: pip install 'flower-privdec[fast]'"
            if device.type == "cpu"
            else "Triton and a C compiler, of which one is not here: install both"
        )
        raise ScenarioError(f"compute.generator='fast' on {device} needs {needed}, or set generator to torch")
    return FastNoise(keys) if device.type == "cpu" else GPUNoise(keys, device)


def resolve_generator(generator: str, device: torch.device) -> str:
    """Return which generator `auto` stands for here; any other is itself."""
    if generator != "auto":
        return generator
    return "fast" if _has_fast(device) else "torch"


def _has_fast(device: torch.device) -> bool:
    if device.type != "cpu":
        return device.type == "cuda" and has_triton()
    try:
        from flower_privdec.privacy.noise import philox  # noqa: F401 (what it needs is the question)
    except ImportError:
        return False
    return True
