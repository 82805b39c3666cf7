"""Example-level privacy for a torch training loop of one's own: the model, optimizer, loader and criterion wrapped."""

from flower_privdec.example_privacy.group_norms import group_norm
from flower_privdec.example_privacy.wrapping import ExamplePrivacy, private

__all__ = ["ExamplePrivacy", "group_norm", "private"]
