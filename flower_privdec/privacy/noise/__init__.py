"""Noise that depends on keys alone, the same for any cohort, any order and any resume.

A deployed peer's depends on nothing: it comes from the operating system.
"""

from flower_privdec.privacy.noise.exact import ExactNoise
from flower_privdec.privacy.noise.fast import FastNoise
from flower_privdec.privacy.noise.generators import DEPLOYED, GENERATORS, build_noise, resolve_generator
from flower_privdec.privacy.noise.gpu_noise import GPUNoise
from flower_privdec.privacy.noise.source import NoiseSource
from flower_privdec.privacy.noise.system import SystemNoise
from flower_privdec.privacy.noise.torch_noise import TorchNoise

__all__ = [
    "DEPLOYED",
    "GENERATORS",
    "ExactNoise",
    "FastNoise",
    "GPUNoise",
    "NoiseSource",
    "SystemNoise",
    "TorchNoise",
    "build_noise",
    "resolve_generator",
]
