"""A scenario made concrete: what all peers know, what is one's own, and how models are tried."""

from flower_privdec.experiment.agreement import Agreement
from flower_privdec.experiment.view import Experiment, OwnParts

__all__ = ["Agreement", "Experiment", "OwnParts"]
