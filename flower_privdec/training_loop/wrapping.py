"""`private`: what a training loop calls once, around its model, optimizer, loader and criterion."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from flower_privdec.common.arguments import check_calls, check_numbers, check_paths, check_whole
from flower_privdec.common.formatting import one_line
from flower_privdec.errors import ScenarioError
from flower_privdec.privacy.accountant.accounting import check_delta
from flower_privdec.privacy.accountant.calibration import max_steps
from flower_privdec.privacy.mechanism.events import Release
from flower_privdec.privacy.noise import SystemNoise, build_noise
from flower_privdec.training_loop.clipped_sum import ClippedSum, Criterion
from flower_privdec.training_loop.group_norms import mixes
from flower_privdec.training_loop.noised_steps import NoisedSteps
from flower_privdec.training_loop.privacy_budget import PrivacyBudget
from flower_privdec.training_loop.private_loader import PrivateLoader, check_loader
from flower_privdec.training_loop.private_model import PrivateCriterion, PrivateModel

DTYPES = (torch.float32, torch.float64)


class ExamplePrivacy:
    """What `private` returns; unpacks into model, optimizer, data_loader, criterion.

    Attributes:
        model, optimizer, data_loader, criterion: what the training loop uses in place of its own.
        noise_multiplier: noise std over clip norm.
    """

    def __init__(
        self,
        model: PrivateModel,
        optimizer: Optimizer,
        data_loader: PrivateLoader,
        criterion: PrivateCriterion,
        steps: NoisedSteps,
        budget: PrivacyBudget,
    ) -> None:
        self.model, self.optimizer, self.data_loader, self.criterion = model, optimizer, data_loader, criterion
        self.noise_multiplier = budget.release.noise_multiplier
        self._steps, self._budget = steps, budget

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.optimizer, self.data_loader, self.criterion))

    @property
    def allowed(self) -> int:
        """Return how many steps more the ledger allows: 0 where the budget is spent, 10^9 where there is no limit."""
        return self._budget.remaining_steps(self._budget.entries())

    @property
    def epsilon(self) -> float:
        """Return the ε of all that the ledger holds. Unit: example; adjacency: zero-out."""
        return self._budget.epsilon(self._budget.entries())

    def __str__(self) -> str:
        return self._budget.statement(self._budget.entries())

    def close(self) -> None:
        """Leave optimizer and parameters to whoever uses them next, without privacy."""
        self._steps.close()


def private(
    model: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader[Any],
    criterion: Criterion,
    *,
    ledger: str | Path,
    delta: float,
    epsilon: float | None = None,
    steps: int | None = None,
    rounds: int | None = None,
    local_epochs: int = 1,
    noise_multiplier: float | None = None,
    clip_norm: float = 1.0,
    reserve: int | None = None,
    way: str = "auto",
    insecure_seed: int | None = None,
    report: Callable[[str], None] = print,
) -> ExamplePrivacy:
    """Make a training loop differentially private for each example (DP-SGD, Abadi et al. 2016, Alg. 1).

    The loop stays as it is, with what this returns in the place of its own: for each batch of the loader one call of
    the model, of the criterion on what that returned, `backward()` and `step()`. Call it anew in each round, in the
    same process or another, with the same ledger: that goes on counting where it was.

    Args:
        model: called on batches [examples, ...]; returns one tensor [examples, ...]. Not one that mixes examples.
        optimizer: any over parameters of the model, used without a closure. What it does not hold is not trained.
        data_loader: over a map-style dataset; `batch_size` becomes the expected size. Shuffling and `drop_last`
            give way to Poisson sampling; the number of batches stays.
        criterion: called as criterion(outputs, targets, ...); for an example alone the loss of that example.
        ledger: the file in which all steps over this peer's data are counted, `.jsonl`, made if missing. One for each
            peer and dataset, for ever: a new file counts from zero.
        delta: δ; well below one over the examples.
        epsilon: the budget over all rounds; None for no limit.
        steps: in all rounds, for which the noise is solved; or
        rounds, local_epochs: how often the loop is run, and how many passes over the loader it takes.
        noise_multiplier: noise std over clip norm, in the place of steps.
        clip_norm: C, of a gradient of all trained parameters.
        reserve: how many steps a line of the ledger pays for; a crash, or a loop left early, loses at most so many.
            None is a sixteenth of a pass over the loader, or a whole one where it has workers, which read ahead.
        way: how examples are kept apart, see `ClippedSum`.
        insecure_seed: INSECURE: batches and noise from a seed, so that who knows it sees through them. For tests alone.
        report: called with a line on ε, its unit and what was charged, after each pass over the loader.

    Returns:
        What unpacks into model, optimizer, data_loader, criterion.

    Raises:
        ScenarioError: what cannot be private, with the remedy.
        BudgetError: from the loader, before a batch is read, when the budget is spent; `allowed` says so before.

    Privacy: unit one example, adjacency zero-out (an example's clipped gradient against 0; the number of examples is
        public), towards whoever sees the model after every step. Not covered: losses, accuracies and counts on private
        examples that the loop itself reports; what it does to a batch as a whole before the model sees it
        (normalising by its own mean, mixing its examples); what reached the model or the optimizer's state before;
        the same person behind several examples.

    Deviations: the divisor is the expected batch, not the drawn one.
    """
    whole = {"steps": steps, "rounds": rounds, "local_epochs": local_epochs, "reserve": reserve}
    _check_kinds(whole, {"delta": delta, "clip_norm": clip_norm}, {"ledger": ledger, "report": report})
    check_numbers({"epsilon": epsilon, "noise_multiplier": noise_multiplier})
    check_whole({"insecure_seed": insecure_seed})
    if isinstance(model, PrivateModel):
        raise ScenarioError("this model is private already: give private() the model that it was made of")
    check_loader(data_loader)
    _check_modules(model)
    parameters = _trained(model, optimizer)
    if not (clip_norm >= 1e-12 and math.isfinite(clip_norm)):
        raise ScenarioError(f"clip_norm={clip_norm} must be finite and > 0 (1e-12 at least)")
    if Path(ledger).is_dir():
        raise ScenarioError(f"ledger={str(ledger)!r} is a folder: name a file in it, one for each peer and dataset")
    if rounds is not None and steps is None:
        steps = rounds * local_epochs * len(data_loader)
    budget = _budget_of(Path(ledger), data_loader, epsilon, delta, steps, noise_multiplier, insecure_seed is not None)
    seed = None if insecure_seed is None else hashlib.sha256(f"INSECURE {int(insecure_seed)}".encode()).digest()
    clipped_sum = ClippedSum(model, parameters, criterion, clip_norm, way=way)
    noised = NoisedSteps(
        optimizer,
        parameters,
        SystemNoise() if seed is None else build_noise({0: seed}, next(iter(parameters.values())).device),
        clip_norm=clip_norm,
        noise_multiplier=budget.release.noise_multiplier,
        expected_batch=budget.release.batch_size,
    )
    wrapped, loss = PrivateModel(model, clipped_sum, noised), PrivateCriterion(criterion, clipped_sum, noised)
    loader = PrivateLoader(data_loader, noised, budget, reserve=reserve, seed=seed, report=report)
    return ExamplePrivacy(wrapped, optimizer, loader, loss, noised, budget)


def _budget_of(
    ledger: Path,
    loader: DataLoader[Any],
    epsilon: float | None,
    delta: float,
    steps: int | None,
    noise: float | None,
    insecure: bool,
) -> PrivacyBudget:
    """Return the privacy budget of a loader's data, its noise given or solved for."""
    check_delta(delta)
    for name, value in {"steps": steps, "noise_multiplier": noise, "epsilon": epsilon}.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ScenarioError(f"{name}={value} must be finite and > 0")
    size, batch = len(loader.dataset), loader.batch_size or 1  # type: ignore[arg-type]
    batch = min(batch, size)
    sampling, rate = ("poisson", batch / size) if batch < size else ("full", 1.0)
    release = Release(sampling, rate, size, batch, noise or 1.0)
    budget = PrivacyBudget(
        ledger.parent, ledger.name.removesuffix(".jsonl"), release, epsilon, delta, steps, insecure=insecure
    )
    if noise is None:
        return budget.with_noise_solved()
    if epsilon is not None and steps is None:
        return replace(budget, limit=max_steps(release, epsilon, delta))
    return budget


def _check_kinds(whole: dict[str, Any], numbers: dict[str, Any], others: dict[str, Any]) -> None:
    """Refuse settings of the wrong kind, whole numbers below 1, and what must be given and is None."""
    check_whole(whole)
    for name, value in whole.items():
        if value is not None and value < 1:
            raise ScenarioError(f"{name}={value} must be >= 1")
    for name, value in {**numbers, **others, "local_epochs": whole["local_epochs"]}.items():
        if value is None:
            raise ScenarioError(f"{name}=None must be given")
    check_numbers(numbers)
    check_paths({"ledger": others["ledger"]})
    check_calls({"report": others["report"]})


def _check_modules(model: nn.Module) -> None:
    """Refuse layers by which examples reach each other, or a model's parameters change without a gradient."""
    if not isinstance(model, nn.Module):
        raise ScenarioError(f"model is a {type(model).__name__}: it must be a torch.nn.Module")
    for path, part in model.named_modules():
        kind, where = type(part).__name__, path or "the model itself"
        if mixes(part):
            raise ScenarioError(
                f"{kind} ({where}) mixes the examples of a batch, so that none can be clipped alone: use "
                "flower_privdec.training_loop.group_norm(model), before the optimizer is made"
            )
        if isinstance(part, nn.parallel.DataParallel | nn.parallel.DistributedDataParallel):
            raise ScenarioError(f"{kind} ({where}) cannot be private: give the model in it")
        if getattr(part, "max_norm", None) is not None:
            raise ScenarioError(
                f"{kind} ({where}) has max_norm, which changes the weights of what occurs without noise: leave it out"
            )
    try:
        copy.deepcopy(model)
    except (RuntimeError, TypeError, ValueError) as error:  # what torch says of a tensor with a gradient's history
        raise ScenarioError(
            "the model cannot be copied, as it is for each example; torch.nn.utils.parametrizations has the norms of "
            f"weights that can: {one_line(error)}"
        ) from error


def _trained(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the parameters that the optimizer trains, by name.

    Raises:
        ScenarioError: none, one of another model, or one that noise cannot be added to.
    """
    if not isinstance(optimizer, Optimizer):
        raise ScenarioError(f"optimizer is a {type(optimizer).__name__}: it must be a torch.optim.Optimizer")
    held = {id(each): each for group in optimizer.param_groups for each in group["params"] if each.requires_grad}
    found: dict[str, Tensor] = {name: each for name, each in model.named_parameters() if id(each) in held}
    if not found or len(found) != len(held):
        raise ScenarioError(
            f"the optimizer trains {len(held)} parameters, of which {len(found)} are the model's: it must train some "
            "of the model's and no others (make it after the model is changed or moved)"
        )
    kinds = {(each.dtype, each.device) for each in found.values()}
    if len(kinds) > 1 or next(iter(kinds))[0] not in DTYPES:
        said = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ScenarioError(
            f"the trained parameters are {said}: they must be all float32 or all float64 on one device (for half "
            "precision use torch.autocast)"
        )
    return found
