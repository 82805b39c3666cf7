"""What `private` refuses before anything is read or charged: options, loaders, models and optimizers."""

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
WHOLES = ("steps", "rounds", "local_epochs", "reserve", "batch_size", "insecure_seed")  # options that are whole numbers
OPTIONAL = ("epsilon", "noise_multiplier", "steps", "rounds", "reserve", "insecure_seed")  # options that may be None
LEAST_CLIP_NORM = 1e-12

# Codes of errors.
ARGUMENT = "training-loop.argument"
LOADER = "training-loop.loader"
MODEL = "training-loop.model"


def check_options(given: Mapping[str, Any]) -> None:
    """Refuse options of the wrong kind or out of their range.

    Args:
        given: those of `private` with a number, `ledger` and `report`, by name.

    Raises:
        ScenarioError: naming the value and the rule.
    """
    whole = {name: value for name, value in given.items() if name in WHOLES}
    numbers = {name: value for name, value in given.items() if name not in (*WHOLES, "ledger", "report")}
    check_whole(whole)
    check_numbers(numbers)
    check_paths({"ledger": given["ledger"]})
    check_calls({"report": given["report"]})

    for name, value in given.items():
        if value is None and name not in OPTIONAL:
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
                f"{name}={value} must be finite and > 0 (clip_norm: {LEAST_CLIP_NORM:g} at least)", code=ARGUMENT
            )

    if Path(given["ledger"]).is_dir():
        problem = f"ledger={str(given['ledger'])!r} is a folder: name a file in it, one for each peer and dataset"
        raise ScenarioError(problem, code=ARGUMENT)


def check_loader(loader: object) -> None:
    """Raise ScenarioError unless a loader's dataset can be sampled example by example."""
    if not isinstance(loader, DataLoader):
        problem = f"data_loader is a {type(loader).__name__}: it must be a torch.utils.data.DataLoader"
        raise ScenarioError(problem, code=LOADER)

    dataset: Any = loader.dataset
    is_map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not is_map_style:
        raise ScenarioError(
            f"{type(dataset).__name__} can only be iterated over, so no example can be drawn at random: give a "
            "map-style dataset, with __getitem__ and __len__",
            code=LOADER,
        )

    if loader.batch_size is None:
        problem = "the data loader has a batch_sampler, or batches of its own: give it a batch_size instead"
        raise ScenarioError(problem, code=LOADER)

    sampler: Any = loader.sampler
    takes_all_once = isinstance(sampler, RandomSampler | SequentialSampler)
    if not takes_all_once or getattr(sampler, "replacement", False):
        raise ScenarioError(
            f"the data loader's {type(sampler).__name__} decides which examples are drawn, and Poisson sampling has "
            "to: leave it out; a part of a dataset is a torch.utils.data.Subset of it",
            code=LOADER,
        )

    if len(sampler) != len(dataset) or len(dataset) < 1 or len(loader) < 1:
        raise ScenarioError(
            f"{len(dataset)} examples in batches of {loader.batch_size} make {len(loader)} batches: give at least one, "
            "a sampler over all examples, and no drop_last if there are fewer than a batch",
            code=LOADER,
        )


def check_modules(model: nn.Module) -> None:
    """Refuse layers by which examples reach each other, or a model's parameters change without a gradient."""
    if not isinstance(model, nn.Module):
        raise ScenarioError(f"model is a {type(model).__name__}: it must be a torch.nn.Module", code=MODEL)

    for path, part in model.named_modules():
        problem = _problem_of(part)
        if problem:
            raise ScenarioError(f"{type(part).__name__} ({path or 'the model itself'}) {problem}", code=MODEL)

    try:
        copy.deepcopy(model)
    except (RuntimeError, TypeError, ValueError) as error:  # of a tensor with a gradient's history
        raise ScenarioError(
            "the model cannot be copied, as it is for each example; torch.nn.utils.parametrizations has the norms of "
            f"weights that can: {one_line(error)}",
            code=MODEL,
        ) from error


def _problem_of(part: nn.Module) -> str:
    """Return why a layer cannot be private; "" if it can."""
    if keeps_statistics(part) and not is_constant_norm(part):
        return (
            "mixes the examples of a batch, so that none can be clipped alone: use "
            "flower_privdec.training_loop.group_norm(model), before the optimizer is made, or freeze it by "
            "requires_grad_(False) (without weights: eval()), so that its statistics stay as they are"
        )
    if isinstance(part, nn.parallel.DataParallel | nn.parallel.DistributedDataParallel):
        return "cannot be private: give the model in it"
    if getattr(part, "max_norm", None) is not None:
        return "has max_norm, which changes the weights of what occurs without noise: leave it out"
    return ""


def trained_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the parameters that the optimizer trains, by name; refuse those that noise cannot be added to."""
    if not isinstance(optimizer, Optimizer):
        raise ScenarioError(f"optimizer is a {type(optimizer).__name__}: it must be a torch.optim.Optimizer")

    of_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    trained: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if id(p) in of_optimizer}
    if not trained or len(trained) != len(of_optimizer):
        raise ScenarioError(
            f"the optimizer trains {len(of_optimizer)} parameters, of which {len(trained)} are the model's: it must "
            "train some of the model's and no others (make it after the model is changed or moved)",
            code=MODEL,
        )

    # They become one row of numbers, to which noise is added.
    kinds = {(parameter.dtype, parameter.device) for parameter in trained.values()}
    dtype, _ = next(iter(kinds))
    if len(kinds) > 1 or dtype not in DTYPES:
        listing = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ScenarioError(
            f"the trained parameters are {listing}: they must be all float32 or all float64 on one device (for half "
            "precision use torch.autocast)",
            code=MODEL,
        )
    return trained


def noise_inflation(release: Release, dtype: torch.dtype) -> float:
    """Return by how much hardened noise has to be larger, relative to plain noise.

    Raises:
        ScenarioError: sums of the batch are too coarse in this type.
    """
    drawing = Drawing(release.sampling, release.sampling_rate, release.dataset_size, release.batch_size)
    unit_roundoff = torch.finfo(dtype).eps / 2
    more = rounding_error(drawing.most, unit_roundoff) + OTHER
    if more > MOST_INFLATION:
        raise ScenarioError(
            f"hardened=True: a sum of {drawing.most} examples in {str(dtype).removeprefix('torch.')} may be wrong by "
            f"{more:.2g} times what one of them adds, which must be <= {MOST_INFLATION:g}; use a model in float64, or "
            "smaller batches",
            code=ARGUMENT,
        )
    return more
