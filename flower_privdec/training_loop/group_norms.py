"""GroupNorm in the place of BatchNorm, which mixes the examples of a batch."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin

from flower_privdec.common.arguments import check_whole
from flower_privdec.errors import ScenarioError


def mixes(part: nn.Module) -> bool:
    """Return whether a layer is a BatchNorm of any kind, or keeps running statistics as one does."""
    if isinstance(part, _InstanceNorm):
        return bool(part.track_running_stats)
    return isinstance(part, _BatchNorm)


def group_norm(model: nn.Module, groups: int = 32) -> nn.Module:
    """Put a GroupNorm in the place of each BatchNorm of a model (Wu and He 2018), in place, and return the model.

    Each keeps the weight, bias and eps of the layer it replaces, and takes the most groups, up to `groups`, that divide
    the channels and leave two or more in each. Running statistics go: all peers must do so before they exchange models.

    Args:
        model: changed in place; one that is itself a BatchNorm is returned as a GroupNorm.
        groups: the most groups of a layer.

    Raises:
        ScenarioError: the model is none, `groups` is no whole number or below 1, or a lazy layer does not know its
            channels yet.

    Examples:
        >>> group_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))[1].num_groups
        4
    """
    if not isinstance(model, nn.Module):
        raise ScenarioError(f"model is a {type(model).__name__}: it must be a torch.nn.Module")
    check_whole({"groups": groups})
    if groups is None or groups < 1:
        raise ScenarioError(f"groups={groups} must be >= 1")
    return _replaced(model, groups, {})


def _replaced(part: nn.Module, groups: int, done: dict[int, nn.Module]) -> nn.Module:
    """Return what takes a module's place, the same one wherever the module stands."""
    if id(part) not in done:
        done[id(part)] = part
        if mixes(part):
            done[id(part)] = _grouped(part, groups)
        for name, child in part.named_children():
            setattr(part, name, _replaced(child, groups, done))
    return done[id(part)]


def _grouped(norm: nn.Module, groups: int) -> nn.Module:
    if isinstance(norm, LazyModuleMixin) or not isinstance(norm, _BatchNorm | _InstanceNorm):
        raise ScenarioError(f"{type(norm).__name__} does not know its channels yet: call the model on one batch first")
    channels = int(norm.num_features)
    count = max(n for n in range(1, groups + 1) if channels % n == 0 and (n == 1 or channels // n > 1))
    replacement = nn.GroupNorm(count, channels, eps=norm.eps, affine=norm.affine).train(norm.training)
    if norm.affine:
        replacement.weight, replacement.bias = norm.weight, norm.bias
    return replacement
