"""Example-level privacy for a torch training loop of one's own: the model, optimizer, loader and criterion wrapped."""

from flower_privdec.training_loop.example_checks import group_norm
from flower_privdec.training_loop.private_loop import ExamplePrivacy, private

__all__ = ["ExamplePrivacy", "group_norm", "private"]
