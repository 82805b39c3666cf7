"""A scenario made concrete: what all peers know, what is one's own, and how models are tried."""

from flower_privdec.experiment.build import Experiment

__all__ = ["Experiment"]
