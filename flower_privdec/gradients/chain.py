"""Modules that are a chain of known layers, one after the other."""

from __future__ import annotations

from collections.abc import Mapping

from flower_privdec.common.deferred import nn


def parse_chain(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]] | None:
    """Return the layers of (nested) Sequentials with their names; None if one is of another kind."""
    if type(module) is not nn.Sequential:
        if not _is_link(module):
            return None
        return [(prefix, module)]

    layers: list[tuple[str, nn.Module]] = []
    children: Mapping[str, nn.Module | None] = module._modules
    for name, child in children.items():
        if child is None:
            return None
        path = f"{prefix}.{name}" if prefix else name
        part = parse_chain(child, path)
        if part is None:
            return None
        layers += part
    return layers


def _is_link(layer: nn.Module) -> bool:
    if type(layer) is nn.Conv2d:
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    if type(layer) is nn.MaxPool2d:
        return not layer.return_indices
    if type(layer) is nn.Flatten:
        return (layer.start_dim, layer.end_dim) == (1, -1)
    return type(layer) in (nn.Linear, nn.ReLU, nn.Tanh, nn.Identity)
