"""A scenario made concrete: what all know, what is one's own, and how models are tried; `view` has the overview."""

from flower_privdec.experiment.agreement import Agreement
from flower_privdec.experiment.own_parts import OwnParts
from flower_privdec.experiment.view import Experiment

__all__ = ["Agreement", "Experiment", "OwnParts"]
