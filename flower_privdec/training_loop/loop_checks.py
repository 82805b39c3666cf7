"""Checks of the arguments of `private`, made before any example is read or any step is charged."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from flower_privdec.common.arguments import check_calls, check_numbers, check_paths, check_whole
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.formatting import one_line
from flower_privdec.models import is_constant_norm, keeps_statistics
from flower_privdec.privacy.accountant.accounting import check_delta
from flower_privdec.privacy.mechanism.declared import MOST_INFLATION, OTHER, Drawing, rounding_error
from flower_privdec.privacy.mechanism.events import Release

DTYPES = (torch.float32, torch.float64)
WHOLE_OPTIONS = ("steps", "rounds", "local_epochs", "reserve", "batch_size", "insecure_seed")
MAY_BE_NONE = ("epsilon", "noise_multiplier", "steps", "rounds", "reserve", "insecure_seed", "loss_bound")
LEAST_CLIP_NORM = 1e-12
MOST_LOSS_BOUND = 1e9

# Codes of errors.
ARGUMENT = "training-loop.argument"
LOADER = "training-loop.loader"
MODEL = "training-loop.model"
CRITERION = "training-loop.criterion"

NO_OPTIMIZER: dict[type[Optimizer], str] = {
    torch.optim.LBFGS: "evaluates a batch several times in a step, and one release is paid for",
    torch.optim.SparseAdam: "takes sparse gradients only, and noise is in every number of a gradient",
}


def check_options(given: Mapping[str, Any]) -> None:
    """Refuse options of the wrong type or out of range.

    Args:
        given: the options of `private` that take a number, and `ledger` and `report`, by name.

    Raises:
        ScenarioError: an option is refused; it names the value and the rule.
    """
    whole = {name: value for name, value in given.items() if name in WHOLE_OPTIONS}
    numbers = {name: value for name, value in given.items() if name not in (*WHOLE_OPTIONS, "ledger", "report")}

    # Types first: the comparisons below would fail on a string with an error of Python's own.
    check_whole(whole)
    check_numbers(numbers)
    check_paths({"ledger": given["ledger"]})
    check_calls({"report": given["report"]})

    for name, value in given.items():
        if value is None and name not in MAY_BE_NONE:
            raise ScenarioError(f"{name}=None must be given", code=ARGUMENT)
        if name in whole and name != "insecure_seed" and value is not None and value < 1:
            raise ScenarioError(f"{name}={value} must be >= 1", code=ARGUMENT)

    check_delta(given["delta"])
    for name, value in numbers.items():
        if name == "delta" or value is None:
            continue
        too_small = name == "clip_norm" and value < LEAST_CLIP_NORM
        if not math.isfinite(value) or value <= 0 or too_small:
            raise ScenarioError(
                f"{name}={value} must be finite and > 0 (clip_norm: at least {LEAST_CLIP_NORM:g})", code=ARGUMENT
            )

    bound = given.get("loss_bound")
    if bound is not None and not LEAST_CLIP_NORM <= bound <= MOST_LOSS_BOUND:
        raise ScenarioError(
            f"loss_bound={bound} must be from {LEAST_CLIP_NORM:g} to {MOST_LOSS_BOUND:g}: about the loss of an "
            "untrained model, such as log of the number of classes",
            code=ARGUMENT,
        )
    if not given.get("loss_share", 0.5) < 1:
        raise ScenarioError(
            f"loss_share={given['loss_share']} must be above 0 and below 1, as 0.05: the rest pays for gradients",
            code=ARGUMENT,
        )

    if Path(given["ledger"]).is_dir():
        problem = f"ledger={str(given['ledger'])!r} is a folder: give a file in it, one for each peer and dataset"
        raise ScenarioError(problem, code=ARGUMENT)


def check_loader(loader: object) -> None:
    """Refuse a loader unless its dataset can be sampled example by example.

    Poisson sampling draws every example independently. The loader only gives the dataset and the expected batch; a
    sampler that selects or repeats examples would be ignored, so it is refused.
    """
    if not isinstance(loader, DataLoader):
        problem = f"data_loader is a {type(loader).__name__}: it must be a torch.utils.data.DataLoader"
        raise ScenarioError(problem, code=LOADER)

    dataset: Any = loader.dataset
    is_map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not is_map_style:
        raise ScenarioError(
            f"{type(dataset).__name__} can only be iterated over, so examples cannot be drawn at random: give a "
            "map-style dataset, with __getitem__ and __len__",
            code=LOADER,
        )

    if loader.batch_size is None:
        problem = "the data loader has a batch_sampler, or its dataset makes batches: give it a batch_size instead"
        raise ScenarioError(problem, code=LOADER)

    sampler: Any = loader.sampler
    takes_all_once = isinstance(sampler, RandomSampler | SequentialSampler)
    if not takes_all_once or getattr(sampler, "replacement", False):
        raise ScenarioError(
            f"the data loader's {type(sampler).__name__} decides which examples are drawn, but Poisson sampling must "
            "decide that: leave it out; to train on a part of a dataset, give a torch.utils.data.Subset",
            code=LOADER,
        )

    if len(sampler) != len(dataset) or len(dataset) < 1 or len(loader) < 1:
        raise ScenarioError(
            f"{len(dataset)} examples in batches of {loader.batch_size} make {len(loader)} batches: there must be at "
            "least one; use a sampler over all examples, and no drop_last if a batch is larger than the dataset",
            code=LOADER,
        )


def check_modules(model: nn.Module) -> None:
    """Refuse models with layers that mix examples or that change parameters without a gradient."""
    if not isinstance(model, nn.Module):
        raise ScenarioError(f"model is a {type(model).__name__}: it must be a torch.nn.Module", code=MODEL)

    for path, part in model.named_modules():
        problem = _why_not_private(part)
        if problem:
            raise ScenarioError(f"{type(part).__name__} ({path or 'the model itself'}) {problem}", code=MODEL)

    if isinstance(model, torch.jit.ScriptModule):
        raise ScenarioError(
            "model is scripted or traced by torch.jit, whose parameters cannot be replaced by those of each example: "
            "give the model that it was made from, and script the trained one",
            code=MODEL,
        )
    if any(nn.parameter.is_lazy(parameter) for parameter in model.parameters()):
        raise ScenarioError(
            "the model has lazy layers, whose parameters have no shape before a first call: call it once on a made-up "
            "batch, such as model(torch.zeros(1, 3, 32, 32)), before private()",
            code=MODEL,
        )

    # Each example gets a fresh copy of the model. torch cannot copy a tensor that was computed from parameters, such as
    # the attribute that the older torch.nn.utils.weight_norm keeps.
    try:
        copy.deepcopy(model)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ScenarioError(
            "the model cannot be copied, which is needed for each example; if it uses weight_norm or spectral_norm, "
            "take those of torch.nn.utils.parametrizations; if it is pruned, prune.remove() the masks and register "
            f"them as parametrizations, by torch.nn.utils.parametrize: {one_line(error)}",
            code=MODEL,
        ) from error


def check_criterion(criterion: object) -> None:
    """Refuse what cannot be called as criterion(outputs, targets)."""
    if isinstance(criterion, type):
        name = criterion.__name__
        raise ScenarioError(
            f"criterion is the class {name}, and calling it would only make an object of it: give one, {name}()",
            code=CRITERION,
        )
    if not callable(criterion):
        raise ScenarioError(
            f"criterion is a {type(criterion).__name__}, which cannot be called as criterion(outputs, targets): give "
            "the loss of the loop, such as nn.CrossEntropyLoss() or a function",
            code=CRITERION,
        )


def _why_not_private(part: nn.Module) -> str:
    """Return why a layer cannot be trained privately, as the end of a sentence; "" if it can."""
    if keeps_statistics(part) and not is_constant_norm(part):
        return (
            "mixes the examples of a batch, so that they cannot be clipped one by one: replace it with "
            "flower_privdec.training_loop.group_norm(model) before the optimizer is made, or keep its statistics fixed "
            "with requires_grad_(False) (eval() if it has no weights)"
        )
    if isinstance(part, nn.parallel.DataParallel | nn.parallel.DistributedDataParallel):
        return "cannot be trained privately: give the model that it wraps"
    if getattr(part, "max_norm", None) is not None:
        return "has max_norm, which rescales the weights of the tokens in a batch without noise: leave it out"
    return ""


def trained_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the parameters that the optimizer trains, by name, in the order of the model.

    Raises:
        ScenarioError: it trains parameters of another model or none, or noise cannot be added to them.
    """
    if not isinstance(optimizer, Optimizer):
        raise ScenarioError(f"optimizer is a {type(optimizer).__name__}: it must be a torch.optim.Optimizer")

    why = NO_OPTIMIZER.get(type(optimizer))
    if why is not None:
        raise ScenarioError(
            f"optimizer is a {type(optimizer).__name__}, which {why}: take another, such as SGD or Adam", code=MODEL
        )

    # By identity: a model that was changed or moved after the optimizer was made may have other tensors.
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    trained: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if id(p) in optimized}
    if not trained or len(trained) != len(optimized):
        raise ScenarioError(
            f"the optimizer trains {len(optimized)} parameters, and {len(trained)} of them are the model's: it must "
            "train at least one, and only the model's (make it after the model is changed or moved)",
            code=MODEL,
        )

    check_same_kind(trained)
    return trained


def untrained_parameters(model: nn.Module, trained: Mapping[str, Tensor]) -> str:
    """Return a warning of parameters that ask for a gradient and get none; "" if there are none."""
    left = [name for name, parameter in model.named_parameters() if parameter.requires_grad and name not in trained]
    if not left:
        return ""
    listing = ", ".join(left[:5])
    if len(left) > 5:
        listing += f" and {len(left) - 5} more"
    return (
        f"the optimizer does not hold {listing} of the model, which private() therefore leaves as they are, also if "
        "another optimizer holds them: give one optimizer all that is to be trained, in groups if they need settings "
        "of their own, or freeze the others by requires_grad_(False)"
    )


def check_same_kind(trained: Mapping[str, Tensor]) -> None:
    """Refuse parameters of several types or devices, or of a type to which noise cannot be added.

    Their gradients are joined into one vector, to which noise is added.
    """
    kinds = {(parameter.dtype, parameter.device) for parameter in trained.values()}
    dtype, _ = next(iter(kinds))
    if len(kinds) > 1 or dtype not in DTYPES:
        listing = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ScenarioError(
            f"the trained parameters are {listing}: they must be all float32 or all float64 on one device (for half "
            "precision use torch.autocast)",
            code=MODEL,
        )


def noise_inflation(release: Release, dtype: torch.dtype) -> float:
    """Return by how much hardened noise must exceed plain noise, as a share of it.

    Sums of clipped gradients are rounded, so one example can move them by a little more than a clip norm. Hardened
    noise covers that too.

    Raises:
        ScenarioError: sums over a batch are rounded too coarsely in this dtype.
    """
    drawing = Drawing(release.sampling, release.sampling_rate, release.dataset_size, release.batch_size)
    unit_roundoff = torch.finfo(dtype).eps / 2
    inflation = rounding_error(drawing.most, unit_roundoff) + OTHER
    if inflation > MOST_INFLATION:
        dtype_name = str(dtype).removeprefix("torch.")
        raise ScenarioError(
            f"hardened=True: rounding may change a sum of {drawing.most} examples in {dtype_name} by {inflation:.2g} "
            f"clip norms, which must be <= {MOST_INFLATION:g}; use a model in float64, or smaller batches",
            code=ARGUMENT,
        )
    return inflation
