"""Random numbers that depend on keys alone: the same for any cohort, any order and any resume.

Those of a deployed peer depend on nothing: they come from the operating system.
"""

from flower_privdec.rows.exact import ExactNoise
from flower_privdec.rows.fast import FastNoise
from flower_privdec.rows.generators import DEPLOYED, GENERATORS, build_noise, resolve_generator
from flower_privdec.rows.gpu_noise import GPUNoise
from flower_privdec.rows.keys import KEY_BYTES, Secret, keyed_generator, seed_keys
from flower_privdec.rows.source import NoiseSource
from flower_privdec.rows.system import SystemNoise
from flower_privdec.rows.torch_noise import TorchNoise

__all__ = [
    "DEPLOYED",
    "GENERATORS",
    "KEY_BYTES",
    "ExactNoise",
    "FastNoise",
    "GPUNoise",
    "NoiseSource",
    "Secret",
    "SystemNoise",
    "TorchNoise",
    "build_noise",
    "keyed_generator",
    "resolve_generator",
    "seed_keys",
]
