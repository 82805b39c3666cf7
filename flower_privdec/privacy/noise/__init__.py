"""Where noise comes from: the sources of its random numbers, and the mechanisms that make noise of them.

- A source (`NoiseSource`) draws standard normal numbers. A simulation's are keyed, so that a run can be repeated
  (`build_noise`); a deployed peer's come from the operating system's entropy (`build_deployed_noise`).
- A mechanism (`NoiseMechanism`) turns a source's numbers into the noise of a step: independent noise, noise that
  cancels between peers, or a user's own (`noise_mechanism`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from flower_privdec.common.catalogue import NOISES, NoiseKeys
from flower_privdec.common.deferred import is_small, torch
from flower_privdec.common.fields import OwnSection, section_from
from flower_privdec.common.user_code import load_own, users_code
from flower_privdec.privacy.mechanism.cancelling import PairPlan
from flower_privdec.privacy.mechanism.correlation import Correlation
from flower_privdec.privacy.noise.deployed import ExactNoise, SystemNoise
from flower_privdec.privacy.noise.kinds.correlated_noise import CorrelatedNoise
from flower_privdec.privacy.noise.kinds.pair_noise import CancellingNoise
from flower_privdec.privacy.noise.plain_philox import PlainPhiloxNoise
from flower_privdec.privacy.noise.source import (
    INDEPENDENT,
    STATE_PREFIX,
    NoisedSum,
    NoiseMechanism,
    NoiseSource,
    PairSecrets,
)
from flower_privdec.scenario.sections import CancellingSection, CorrelatedSection

if TYPE_CHECKING:
    from flower_privdec.privacy.noise.philox import PhiloxNoise


def keyed_noise(keys: Mapping[int, bytes], device: torch.device | str = "cpu") -> NoiseSource:
    """Return the noise source of a peer whose noise follows from keys; see `build_noise`."""
    if is_small():
        return PlainPhiloxNoise(keys)
    return build_noise(keys, device)


def build_noise(keys: Mapping[int, bytes], device: torch.device | str = "cpu") -> PhiloxNoise:
    """Return the noise source of a simulation.

    A peer's numbers are the same in any cohort, in any order, after a resume and, up to rounding, on any device.

    Args:
        keys: a secret key of at least 16 bytes for each peer hosted here, by global id. Derive a run's keys from
            everything that decides its numbers: two runs of equal keys have equal noise, and the difference of their
            releases has none.
        device: the device of the rows. A GPU draws its own noise if Triton can compile for it; else the CPU draws it.

    Raises:
        ValueError: a key is too short.
    """
    # Imported late, because numba and Triton, which these compile with, take long to import.
    if torch.device(device).type == "cuda" and has_triton():
        from flower_privdec.privacy.noise.gpu_philox import GPUNoise

        return GPUNoise(keys, device)

    from flower_privdec.privacy.noise.philox import PhiloxNoise

    return PhiloxNoise(keys)


def build_deployed_noise(*, hardened: bool) -> NoiseSource:
    """Return the noise source of a deployed peer: it has no seed and never repeats itself.

    Args:
        hardened: whether its numbers are rounded exactly, see `privacy.hardened`.

    Raises:
        ScenarioError: the package cryptography is not installed.
    """
    return ExactNoise() if hardened else SystemNoise()


def noise_mechanism(
    section: OwnSection | NoiseKeys | None,
    pairs: PairPlan | None = None,
    correlation: Correlation | None = None,
    *,
    draws_anew: bool = False,
) -> NoiseMechanism:
    """Build the noise mechanism that a scenario names.

    Args:
        section: `privacy.noise` of the scenario; None is independent noise.
        pairs: which peers share noise that cancels, and how strong it is; None if none does.
        correlation: how noise is correlated over steps; None if it is not.
        draws_anew: whether each process draws numbers that no other draws.

    Raises:
        ScenarioError: a user's class cannot be imported, is not a `NoiseMechanism`, or cannot be built.
    """
    # Callers that only ask about memory or code have no plan yet, even if the section says that noise cancels.
    if section is None or isinstance(section, CancellingSection | CorrelatedSection):
        of_one_step = INDEPENDENT if pairs is None else CancellingNoise(pairs)
        if correlation is None or (correlation.bands == 1 and pairs is not None):
            return of_one_step
        return CorrelatedNoise(correlation, of_one_step, draws_anew=draws_anew)

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
    where = f"privacy.noise.module={section.module!r}"
    arguments = section.arguments
    keys = getattr(own, "Section", NoiseKeys)
    if keys is not NoiseKeys:
        # A class that types its keys gets them checked, and with their defaults, whichever door it comes by.
        arguments = section_from(keys, arguments, where).options()
    with users_code(f"{where} could not be called with {arguments}", "noise.build"):
        mechanism = own(**arguments)
    return mechanism


def has_triton() -> bool:
    """Return whether Triton is installed with the C compiler that it needs."""
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
    "keyed_noise",
    "noise_mechanism",
]
