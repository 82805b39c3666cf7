"""Example-level privacy for a torch training loop of one's own, and for scikit-learn's linear models."""

from flower_privdec.training_loop.example_checks import group_norm
from flower_privdec.training_loop.linear_models import fit_privately
from flower_privdec.training_loop.private_loop import ExamplePrivacy, private

__all__ = ["ExamplePrivacy", "fit_privately", "group_norm", "private"]
