"""Gaussian noise: from keys in a simulation, from the operating system's entropy at a deployed peer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from flower_privdec.common.catalogue import NOISES, NoiseKeys
from flower_privdec.common.fields import OwnSection
from flower_privdec.common.user_code import load_own, users_code
from flower_privdec.privacy.mechanism.cancelling import PairPlan
from flower_privdec.privacy.noise.deployed import ExactNoise, SystemNoise
from flower_privdec.privacy.noise.kinds.pair_noise import CancellingNoise
from flower_privdec.privacy.noise.source import (
    INDEPENDENT,
    STATE_PREFIX,
    NoisedSum,
    NoiseMechanism,
    NoiseSource,
    PairSecrets,
)
from flower_privdec.scenario.sections import CancellingSection

if TYPE_CHECKING:
    from flower_privdec.privacy.noise.philox import PhiloxNoise


def build_noise(keys: Mapping[int, bytes], device: torch.device | str = "cpu") -> PhiloxNoise:
    """Return the noise of a simulation: the same numbers for any cohort, order, resume and device but for roundings.

    Args:
        keys: a secret key of 16 bytes or more for each peer hosted here, by global id. A run's keys should follow
            from all that decides its numbers, so that no other run shares a draw with it.
        device: where the rows live. A GPU draws its own noise if Triton can compile for it; else the CPU draws for it.

    Raises:
        ValueError: a key is too short.
    """
    if torch.device(device).type == "cuda" and has_triton():
        from flower_privdec.privacy.noise.gpu_philox import GPUNoise

        return GPUNoise(keys, device)

    from flower_privdec.privacy.noise.philox import PhiloxNoise

    return PhiloxNoise(keys)


def build_deployed_noise(*, hardened: bool) -> NoiseSource:
    """Return the noise of a deployed peer: never seeded, and never the same twice.

    Args:
        hardened: whether it is rounded exactly, see `privacy.hardened`.

    Raises:
        ScenarioError: the package cryptography is not installed.
    """
    return ExactNoise() if hardened else SystemNoise()


def noise_mechanism(section: OwnSection | NoiseKeys | None, pairs: PairPlan | None = None) -> NoiseMechanism:
    """Return the mechanism that `privacy.noise` names, called with its arguments; None is independent noise.

    Args:
        section: of the scenario.
        pairs: the plan of noise that cancels, if it does.

    Raises:
        ScenarioError: the class cannot be imported, is no `NoiseMechanism`, or could not be built.
    """
    if section is None or isinstance(section, CancellingSection):
        return INDEPENDENT if pairs is None else CancellingNoise(pairs)

    mechanism: NoiseMechanism
    if isinstance(section, NoiseKeys):
        built_in: Any = NOISES[section.kind]
        mechanism = built_in(**section.options())
        return mechanism

    own = load_own(
        section.module,
        "privacy.noise.module",
        accepts=lambda part: isinstance(part, type) and issubclass(part, NoiseMechanism),
        must_be="a subclass of flower_privdec.privacy.noise.NoiseMechanism",
    )
    with users_code(f"privacy.noise.module={section.module!r} could not be built", "noise.build"):
        mechanism = own(**section.arguments)
    return mechanism


def has_triton() -> bool:
    """Return whether Triton is installed, and the C compiler that it needs."""
    if find_spec("triton") is None:
        return False
    compilers = (os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang"))
    return any(compilers)


__all__ = [
    "INDEPENDENT",
    "STATE_PREFIX",
    "ExactNoise",
    "NoiseMechanism",
    "NoiseSource",
    "NoisedSum",
    "PairSecrets",
    "SystemNoise",
    "build_deployed_noise",
    "build_noise",
    "has_triton",
    "noise_mechanism",
]
