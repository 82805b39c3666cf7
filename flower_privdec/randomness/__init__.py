"""Random numbers that depend on keys alone: the same for any cohort, any order and any resume.

Those of a deployed peer depend on nothing: they come from the operating system.
"""

from flower_privdec.randomness.build import GENERATORS, build_noise, resolve_generator
from flower_privdec.randomness.fast import FastNoise
from flower_privdec.randomness.keys import KEY_BYTES, Secret, keyed_generator, seed_keys
from flower_privdec.randomness.source import NoiseSource
from flower_privdec.randomness.system import SystemNoise
from flower_privdec.randomness.torch_noise import TorchNoise

__all__ = [
    "GENERATORS",
    "KEY_BYTES",
    "FastNoise",
    "NoiseSource",
    "Secret",
    "SystemNoise",
    "TorchNoise",
    "build_noise",
    "keyed_generator",
    "resolve_generator",
    "seed_keys",
]
