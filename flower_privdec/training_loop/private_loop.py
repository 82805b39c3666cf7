"""`private`: example-level privacy for a torch training loop of one's own (DP-SGD, Abadi et al. 2016, Alg. 1).

One call wraps the loop's four objects. In each step:

    PrivateLoader     charges the ledger, then draws a Poisson batch
    PrivateModel      returns outputs that carry no gradient
    PrivateCriterion  computes the clipped sum of per-example gradients, which backward() passes on
    NoisedSteps       adds noise and gives the optimizer the noised mean as its gradient
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from flower_privdec.common.arguments import check_calls, check_numbers, check_paths, check_whole
from flower_privdec.common.door import Door
from flower_privdec.common.errors import RAISED_BY_USERS, BudgetError, RunError, ScenarioError
from flower_privdec.common.formatting import epsilon_text, one_line, setting
from flower_privdec.data.peer_data import draw_poisson
from flower_privdec.models import fix_norms, is_constant_norm, keeps_statistics
from flower_privdec.privacy.accountant.accounting import check_delta, epsilon, epsilon_of_runs, loose_delta
from flower_privdec.privacy.accountant.calibration import ACCEPTED, max_steps, noise_multiplier
from flower_privdec.privacy.ledger.charges import Charge, Entry, RunName
from flower_privdec.privacy.ledger.ledger import Ledger
from flower_privdec.privacy.ledger.noted_budgets import note_budget
from flower_privdec.privacy.ledger.segments import ledger_path, read_entries
from flower_privdec.privacy.ledger.spending import Account, Spending, costs_in, releases_in
from flower_privdec.privacy.mechanism.declared import MOST_INFLATION, OTHER, Drawing, rounding_error
from flower_privdec.privacy.mechanism.events import Release, Spend
from flower_privdec.privacy.noise import NoiseSource, build_deployed_noise, build_noise
from flower_privdec.rows.keys import KEY_BYTES, keyed_generator
from flower_privdec.training_loop.clipped_sum import ClippedSum, Criterion, withheld
from flower_privdec.training_loop.criterion_checks import CriterionTrial, check_finite
from flower_privdec.training_loop.example_checks import LoaderExamples, assumption_of, mixed_batch
from flower_privdec.training_loop.example_fetch import ExamplesAlone, MixedBatch, as_it_is

DTYPES = (torch.float32, torch.float64)
LINES = 16  # about so many ledger entries a pass
LOADER_OPTIONS = (  # of the user's data loader that the private one keeps
    *("num_workers", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "pin_memory_device"),
)
CALL = "_flower_privdec_call"  # an attribute of outputs: what the model was called with
MARK = "_flower_privdec_steps"  # an attribute of an optimizer whose steps are noised
WITHOUT_VALUE = {  # attributes of a loss that backward() needs
    *("backward", "dim", "size", "numel", "is_floating_point"),
    *("requires_grad", "grad_fn", "is_leaf", "shape", "ndim", "dtype", "device", "is_cuda"),
}
# Codes of errors.
ARGUMENT = "training-loop.argument"
LOADER = "training-loop.loader"
MODEL = "training-loop.model"
PRIVATE = "training-loop.private-already"
STEP = "training-loop.one-step-a-batch"
PAST = "training-loop.gradient-past-clipping"
GUARD = "_flower_privdec_guard"  # of a parameter that no other gradient may reach
PEER = np.zeros(1, dtype=np.int64)  # the only peer of this process


class LoopWatch(Protocol):
    """What an observer does with the steps of one loop.

    Attributes:
        behind: how many examples stand behind each batch, whose gradients are shown and not added to its sum.
    """

    behind: int

    def drawn(self, batch: np.ndarray) -> np.ndarray:
        """Return which examples are loaded for a batch that was drawn, int64, the last `behind` of them to be shown."""

    def show(self, gradients: Tensor) -> None:
        """See the gradients of those behind, clipped and in clip norms, [behind, d]."""

    def released(self, total: Tensor, noised: Tensor, noise: float) -> None:
        """See the same step's sum without noise and with it, in clip norms, [d], and the planned noise multiplier."""


class LoopObserver(Protocol):
    """Who watches training loops with privacy of examples: an audit."""

    def admit(self, budget: PrivacyBudget) -> LoopWatch:
        """Return what watches a loop, before it reads an example; raise to refuse the loop."""


LOOPS: Door[LoopObserver] = Door("training loops")


@dataclass(frozen=True, eq=False, repr=False)
class ExamplePrivacy:
    """The wrapped parts of a training loop; unpacks into model, optimizer, data_loader, criterion.

    Attributes:
        model, optimizer, data_loader, criterion: for the training loop, in place of its own.
    """

    model: PrivateModel
    optimizer: Optimizer
    data_loader: PrivateLoader
    criterion: PrivateCriterion
    _steps: NoisedSteps
    _budget: PrivacyBudget

    @property
    def noise_multiplier(self) -> float:
        """Return the noise's standard deviation over the clip norm."""
        return self._budget.release.noise_multiplier

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
        """Detach from the optimizer and the parameters, which continue without privacy."""
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
    show_loss: bool = False,
    hardened: bool = False,
    insecure_seed: int | None = None,
    report: Callable[[str], None] = print,
) -> ExamplePrivacy:
    """Make a training loop differentially private for each example (DP-SGD, Abadi et al. 2016, Alg. 1).

    The loop stays as it is, with what this returns in the place of its own: for each batch of the loader one call of
    the model, of the criterion on what that returned, `backward()` and `step()`. Call it again in each round, in the
    same process or another, with the same ledger: it continues the count.

    Args:
        model: called on batches [examples, ...]; returns one tensor [examples, ...]. Not one that mixes examples; a
            BatchNorm that is frozen stays in eval mode, whatever mode the model is in.
        optimizer: any over parameters of the model, used without a closure. What it does not hold is not trained.
        data_loader: over a map-style dataset; `batch_size` becomes the expected size. Shuffling and `drop_last`
            give way to Poisson sampling; the number of batches stays. Each example is read by `dataset[i]`, and given
            to `collate_fn` without others.
        criterion: called as criterion(outputs, targets, ...); for an example alone the loss of that example. It must
            add up over examples, as a sum or a mean does, which is tried on made-up ones.
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
        show_loss: return the loss of each private batch to the loop. ε does not cover what the loop does with it, such
            as a scheduler that follows it, and every summary says so. Otherwise the loss has `backward()` and no value.
        hardened: round the noise exactly, and add what covers the rounding of sums, so that no digit shows a sum. With
            a batch of 60 a step of a small MLP takes an eighth longer, and that of a CNN a twenty-fifth.
        insecure_seed: INSECURE: batches and noise from a seed, so that who knows it sees through them. For tests alone.
        report: called with a line on ε, its unit, what it assumes and what was charged, after each pass over the
            loader; and before, with a warning if δ is too large to mean anything.

    Returns:
        What unpacks into model, optimizer, data_loader, criterion.

    Raises:
        ScenarioError: what cannot be private, with the remedy.
        BudgetError: from the loader, before a batch is read, when the budget is spent; `allowed` says so before.

    Privacy: unit one example, adjacency zero-out (an example's clipped gradient against 0; the number of examples is
        public), against an adversary who sees the model after every step. It assumes that item i of the dataset reads
        example i only, and every summary says so, unless `separate_items` proves it. Not covered: figures of private
        examples that the loop computes itself, from the model's outputs or from `show_loss`; what it does to a batch
        as a whole
        before the model sees it (normalising by its own mean, mixing its examples); what `example_checks` cannot see;
        what reached the model or the optimizer's state before; the same person behind several examples.

    Deviations: the divisor is the expected batch, not the drawn one.
    """
    options: dict[str, Any] = {"steps": steps, "rounds": rounds, "local_epochs": local_epochs, "reserve": reserve}
    options |= {"delta": delta, "clip_norm": clip_norm, "epsilon": epsilon, "noise_multiplier": noise_multiplier}
    check_options({**options, "insecure_seed": insecure_seed, "ledger": ledger, "report": report})
    _check_loader(data_loader)
    _check_modules(model)
    parameters = _trained(model, optimizer)
    if rounds is not None and steps is None:
        steps = rounds * local_epochs * len(data_loader)
    size = len(data_loader.dataset)  # type: ignore[arg-type]
    examples = LoaderExamples.of(data_loader)
    budget = PrivacyBudget.of(
        ledger,
        size,
        data_loader.batch_size or 1,
        epsilon,
        delta,
        steps,
        noise_multiplier,
        insecure_seed,
        show_loss,
        assumption_of(examples.unproved),
    )
    larger = _noise_inflation(budget.release, next(iter(parameters.values())).dtype) if hardened else 0.0
    if hardened and insecure_seed is not None:
        raise ScenarioError(
            "hardened=True is for noise of the operating system: leave out insecure_seed", code=ARGUMENT
        )
    spent = budget.remaining_steps(budget.entries()) < 1  # then no example is read
    alone = ExamplesAlone(data_loader.dataset, data_loader.collate_fn) if spent else examples.checked()
    trial = CriterionTrial(model, criterion)
    if not spent:
        check_finite(data_loader.dataset)
        trial.before_payment(data_loader, data_loader.collate_fn)
    seed = seed_of(insecure_seed)
    watch = budget.watch
    shown: dict[str, Any] = {} if watch is None else {"behind": watch.behind, "show": watch.show}
    clipped_sum = ClippedSum(model, parameters, criterion, clip_norm, way=way, **shown)
    noised = NoisedSteps(
        optimizer,
        parameters,
        build_deployed_noise(hardened=hardened)
        if seed is None
        else build_noise({0: seed}, next(iter(parameters.values())).device),
        clip_norm=clip_norm,
        noise_multiplier=budget.release.noise_multiplier * (1 + larger),
        expected_batch=budget.release.batch_size,
        watch=watch,
    )
    loader = PrivateLoader(data_loader, noised, budget, alone, reserve=reserve, seed=seed, report=report)
    if warning := loose_delta(delta, size):
        report(f"warning: {warning}")
    loss = PrivateCriterion(criterion, clipped_sum, noised, trial, show_loss)
    return ExamplePrivacy(PrivateModel(model, clipped_sum, noised), optimizer, loader, loss, noised, budget)


def check_options(given: Mapping[str, Any]) -> None:
    """Refuse options of the wrong kind or out of their range.

    Args:
        given: those of `private` with a number, `ledger` and `report`, by name.

    Raises:
        ScenarioError: naming the value and the rule.
    """
    wholes = ("steps", "rounds", "local_epochs", "reserve", "batch_size", "insecure_seed")
    whole = {name: value for name, value in given.items() if name in wholes}
    numbers = {name: value for name, value in given.items() if name not in (*wholes, "ledger", "report")}
    check_whole(whole)
    check_numbers(numbers)
    check_paths({"ledger": given["ledger"]})
    check_calls({"report": given["report"]})
    for name, value in given.items():
        if value is None and name not in ("epsilon", "noise_multiplier", "steps", "rounds", "reserve", "insecure_seed"):
            raise ScenarioError(f"{name}=None must be given", code=ARGUMENT)
        if name in whole and name != "insecure_seed" and value is not None and value < 1:
            raise ScenarioError(f"{name}={value} must be >= 1", code=ARGUMENT)
    check_delta(given["delta"])
    for name, value in numbers.items():
        too_small = name == "clip_norm" and value < 1e-12
        if name != "delta" and value is not None and not (math.isfinite(value) and value > 0 and not too_small):
            raise ScenarioError(f"{name}={value} must be finite and > 0 (clip_norm: 1e-12 at least)", code=ARGUMENT)
    if Path(given["ledger"]).is_dir():
        problem = f"ledger={str(given['ledger'])!r} is a folder: name a file in it, one for each peer and dataset"
        raise ScenarioError(problem, code=ARGUMENT)


def seed_of(insecure_seed: int | None) -> bytes | None:
    """Return the key of batches and noise that are drawn from a seed; None for the operating system's entropy."""
    return None if insecure_seed is None else hashlib.sha256(f"INSECURE {int(insecure_seed)}".encode()).digest()


def _noise_inflation(release: Release, dtype: torch.dtype) -> float:
    """Return by how much hardened noise has to be larger; raises ScenarioError where sums are too coarse for it."""
    drawing = Drawing(release.sampling, release.sampling_rate, release.dataset_size, release.batch_size)
    more = rounding_error(drawing.most, torch.finfo(dtype).eps / 2) + OTHER
    if more > MOST_INFLATION:
        raise ScenarioError(
            f"hardened=True: a sum of {drawing.most} examples in {str(dtype).removeprefix('torch.')} may be wrong by "
            f"{more:.2g} times what one of them adds, which must be <= {MOST_INFLATION:g}; use a model in float64, or "
            "smaller batches",
            code=ARGUMENT,
        )
    return more


def _check_modules(model: nn.Module) -> None:
    """Refuse layers by which examples reach each other, or a model's parameters change without a gradient."""
    if not isinstance(model, nn.Module):
        raise ScenarioError(f"model is a {type(model).__name__}: it must be a torch.nn.Module", code=MODEL)
    if isinstance(model, PrivateModel):
        raise ScenarioError("this model is private already: give private() the model in it", code=PRIVATE)
    for path, part in model.named_modules():
        problem = ""
        if keeps_statistics(part) and not is_constant_norm(part):
            problem = (
                "mixes the examples of a batch, so that none can be clipped alone: use "
                "flower_privdec.training_loop.group_norm(model), before the optimizer is made, or freeze it by "
                "requires_grad_(False) (without weights: eval()), so that its statistics stay as they are"
            )
        elif isinstance(part, nn.parallel.DataParallel | nn.parallel.DistributedDataParallel):
            problem = "cannot be private: give the model in it"
        elif getattr(part, "max_norm", None) is not None:
            problem = "has max_norm, which changes the weights of what occurs without noise: leave it out"
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


def _trained(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the parameters that the optimizer trains, by name; refuse those that noise cannot be added to."""
    if not isinstance(optimizer, Optimizer):
        raise ScenarioError(f"optimizer is a {type(optimizer).__name__}: it must be a torch.optim.Optimizer")
    of_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    trained: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if id(p) in of_optimizer}
    kinds = {(parameter.dtype, parameter.device) for parameter in trained.values()}
    problem = ""
    if not trained or len(trained) != len(of_optimizer):
        problem = (
            f"the optimizer trains {len(of_optimizer)} parameters, of which {len(trained)} are the model's: it must "
            "train some of the model's and no others (make it after the model is changed or moved)"
        )
    elif len(kinds) > 1 or next(iter(kinds))[0] not in DTYPES:
        listing = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        problem = (
            f"the trained parameters are {listing}: they must be all float32 or all float64 on one device (for half "
            "precision use torch.autocast)"
        )
    if problem:
        raise ScenarioError(problem, code=MODEL)
    return trained


def _check_loader(loader: object) -> None:
    """Raise ScenarioError unless a loader's dataset can be sampled example by example."""
    if isinstance(loader, PrivateLoader):
        raise ScenarioError("this data loader is private already: give private() the loader in it", code=PRIVATE)
    if not isinstance(loader, DataLoader):
        problem = f"data_loader is a {type(loader).__name__}: it must be a torch.utils.data.DataLoader"
        raise ScenarioError(problem, code=LOADER)
    dataset = loader.dataset
    sampler = loader.sampler
    problem = ""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        problem = (
            f"{type(dataset).__name__} can only be iterated over, so no example can be drawn at random: give a "
            "map-style dataset, with __getitem__ and __len__"
        )
    elif loader.batch_size is None:
        problem = "the data loader has a batch_sampler, or batches of its own: give it a batch_size instead"
    elif not isinstance(sampler, RandomSampler | SequentialSampler) or getattr(sampler, "replacement", False):
        problem = (
            f"the data loader's {type(sampler).__name__} decides which examples are drawn, and Poisson sampling has "
            "to: leave it out; a part of a dataset is a torch.utils.data.Subset of it"
        )
    elif len(sampler) != len(dataset) or len(dataset) < 1 or len(loader) < 1:
        problem = (
            f"{len(dataset)} examples in batches of {loader.batch_size} make {len(loader)} batches: give at least one, "
            "a sampler over all examples, and no drop_last where there are fewer than a batch"
        )
    if problem:
        raise ScenarioError(problem, code=LOADER)


class PrivateLoader:
    """The user's loader with Poisson batches: each example is in each with chance batch_size / examples.

    It has as many batches as the user's. An empty batch is not yielded: its step, on noise
    alone, is taken here. The ledger is locked while the loader is being iterated over.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        steps: NoisedSteps,
        budget: PrivacyBudget,
        alone: ExamplesAlone,
        *,
        reserve: int | None,
        seed: bytes | None,
        report: Callable[[str], None],
    ) -> None:
        """Draw from a loader's dataset, by a key or else from the operating system's entropy; see `private`.

        Args:
            alone: makes batches of the loader's dataset.
        """
        self._loader = loader
        self._steps = steps
        self._budget = budget
        self._seed = seed
        self._report = report
        self._alone = alone
        self._reserve = reserve or (len(loader) if loader.num_workers else max(1, len(loader) // LINES))

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        with LoopPayments(self._budget, len(self), self._reserve, self._report) as payments:
            self._steps.pay = payments.pay
            for count, first in payments.blocks():
                # The first batch of all shows whether loop, model and criterion work: it is paid for when its noise is
                # added, so that a mistake costs nothing. Every other is paid for before it is drawn.
                if self._steps.has_released:
                    payments.pay()
                yield from self._batches(count, first)

    def _batches(self, count: int, first: int) -> Iterator[Any]:
        """Yield the batches of some steps."""
        batches_drawn = self._budget.draw(count, first, self._seed)
        drawn = [batch.tolist() for batch in batches_drawn if len(batch)]
        options: Mapping[str, Any] = {name: getattr(self._loader, name) for name in LOADER_OPTIONS}
        batches = iter(DataLoader(self._alone, batch_sampler=drawn, collate_fn=as_it_is, **options))
        for number, size in enumerate(map(len, batches_drawn), start=first):
            if size == 0:
                self._steps.step_on_noise(number)
                continue
            failure = ""
            try:
                batch = next(batches)
            except RAISED_BY_USERS as error:
                failure = type(error).__name__
            if failure:  # raised here, an error that does not carry the other one along
                self._steps.pay()
                raise withheld("the dataset or the collate_fn", failure)
            if isinstance(batch, MixedBatch):
                self._steps.pay()
                raise mixed_batch()
            self._steps.draw(size, number)
            yield batch
            self._steps.check_taken()


@dataclass(frozen=True)
class _Call:
    """What a model was called with, the version of what it returned, and the batch that awaited its step then."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    version: int
    of: Drawn | None


class PrivateModel(nn.Module):
    """The user's model; its state_dict, its parameters and its other attributes are those of the model itself.

    Where gradients are on, its outputs carry none: only the private criterion turns them into a loss.
    """

    def __init__(self, module: nn.Module, clipped_sum: ClippedSum, steps: NoisedSteps) -> None:
        super().__init__()
        self.module = module
        self._clipped_sum = clipped_sum
        self._steps = steps
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs for a batch, by a copy: what the model keeps of its inputs would leave with it.

        Raises:
            ScenarioError: where gradients are on and these are not one tensor.
        """
        if not torch.is_grad_enabled():
            return fix_norms(copy.deepcopy(self.module))(*args, **kwargs)
        with self._steps.paying_for_errors():
            output = self._clipped_sum.outputs(args, kwargs)
        if not isinstance(output, Tensor):
            kind = type(output).__name__
            raise ScenarioError(f"the model returns a {kind}: it must return one tensor [examples, ...]", code=MODEL)
        outputs: Tensor = _WithoutGradient.apply(output.requires_grad_() if output.is_floating_point() else output)
        setattr(outputs, CALL, _Call(args, kwargs, outputs._version, self._steps.drawn))
        return outputs

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own, under its own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the model's own; raises ScenarioError for `assign`, which would replace the watched parameters."""
        if assign:
            raise ScenarioError("assign=True must be left out: the optimizer and the noise hold the parameters")
        return self.module.load_state_dict(state_dict, strict)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Yield the model's own, under its own names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """Yield the model's own, under its own names."""
        return self.module.named_buffers(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class PrivateCriterion(nn.Module):
    """The user's criterion; backward() of its loss passes on the clipped sum of the batch."""

    def __init__(
        self, criterion: Criterion, clipped_sum: ClippedSum, steps: NoisedSteps, trial: CriterionTrial, show_loss: bool
    ) -> None:
        """Wrap a criterion, called as criterion(outputs, targets, ...)."""
        super().__init__()
        self.criterion = criterion
        self._clipped_sum = clipped_sum
        self._steps = steps
        self._trial = trial
        self._show_loss = show_loss

    def forward(self, outputs: Tensor, *targets: Any) -> Tensor:
        """Return the loss of a batch: a `PrivateLoss` where gradients are on, unless the loss is shown.

        Raises:
            RunError: the outputs are no longer what the model returned.
            ScenarioError: the criterion does not add up over examples, see `criterion_checks`.
        """
        call: _Call | None = getattr(outputs, CALL, None)
        if not torch.is_grad_enabled():
            return self.criterion(outputs, *targets)
        if call is None or call.version != outputs._version:
            raise RunError(
                "the criterion must be given the model's outputs unchanged, for an operation between them could mix "
                "examples: move it into the model or into the criterion",
                code=PAST,
            )
        self._trial.try_call(call.args, call.kwargs, targets)
        with self._steps.paying_for_errors():
            shown = self._clipped_sum.loss(outputs, targets) if self._show_loss else torch.full((), math.nan)
            total, examples = (None, 0) if call.of is None else self._clipped_sum(call.args, call.kwargs, targets)
        if self._show_loss:
            self._steps.pay()
        arrive = partial(self._steps.arrive, total, examples, call.of)
        loss: Tensor = _Loss.apply(torch.zeros((), requires_grad=True), shown, arrive)
        return loss if self._show_loss else loss.as_subclass(PrivateLoss)


class PrivateLoss(Tensor):
    """The loss of private examples: it has `backward()`, and its value was never computed.

    Raises:
        RunError: on every operation that reads it, compares it or computes with it.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(getattr(function, "__self__", None), "__name__", "") or getattr(function, "__name__", "")
        if name in WITHOUT_VALUE:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise RunError(
            f"the loss of private examples has no value to read or to compute with ({name}): no ε would "
            "cover what a scheduler, an early stop or a report makes of it. Call backward() on it as it is (no "
            "scaling, no penalty; mixed precision is torch.autocast with bfloat16), and follow progress on public "
            "examples under torch.no_grad(); private(show_loss=True) shows it, and every summary says so",
            code="training-loop.loss-is-private",
        )


class _WithoutGradient(torch.autograd.Function):
    """Outputs through which no gradient goes."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor) -> Tensor:
        return outputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RunError(
            "a loss was computed from the model's outputs without the criterion that private() returned, so that its "
            "gradient is not clipped: use that criterion alone",
            code=PAST,
        )


class _Loss(torch.autograd.Function):
    """A loss whose backward pass passes on the sum that was clipped when the loss was computed."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, shown: Tensor, arrive: Callable[[], None]) -> Tensor:
        ctx.arrive = arrive
        return shown.detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if gradients[0].numel() != 1 or float(gradients[0]) != 1.0:
            raise RunError(
                "the loss was changed before backward() (divided, scaled by a GradScaler, averaged, squared?), which "
                "the clipping would not see: call backward() on what the criterion returned; a scale belongs into the "
                "learning rate, mixed precision into torch.autocast with bfloat16, which needs no scaler",
                code=PAST,
            )
        ctx.arrive()
        return None, None, None


@dataclass(eq=False)
class Drawn:
    """A batch that was drawn and paid for, before its step.

    Attributes:
        size: how many examples it has.
        number: of its step.
        total: the sum of their clipped gradients, once it has arrived.
    """

    size: int
    number: int
    total: Tensor | None = None


class NoisedSteps:
    """Gives an optimizer, before each of its steps, the noised mean of a batch as its gradient.

        grad = (sum_b g_b min(1, C / |g_b|) + σ C N(0, I)) / expected batch

    (Abadi et al. 2016, Alg. 1.) Everything else is the optimizer's own. Between two steps there must be one backward
    pass over one drawn batch: anything else was not charged, and raises RunError.

    Attributes:
        drawn: the batch that awaits its step, or None.
        pay: pays for the steps whose batches are being drawn, once; called before anything of their examples leaves.
        has_released: whether a step was taken.

    Privacy: one release of the step's mechanism, which `pay` charges before the noise is added.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: dict[str, Tensor],
        noise: NoiseSource,
        *,
        clip_norm: float,
        noise_multiplier: float,
        expected_batch: float,
        watch: LoopWatch | None = None,
    ) -> None:
        """Hook into an optimizer and watch its parameters; raises ScenarioError if it is in use by another instance."""
        if hasattr(optimizer, MARK):
            problem = "this optimizer is private already: keep what private() returned, or close() it first"
            raise ScenarioError(problem, code=PRIVATE)
        self._optimizer = optimizer
        self._parameters = parameters
        self._noise = noise
        self._std = noise_multiplier * clip_norm
        self._divisor = expected_batch
        self._clip_norm = clip_norm
        self._watch = watch
        self.drawn: Drawn | None = None
        self.pay: Callable[[], None] = _nothing_due
        self.has_released = False
        self._handle = optimizer.register_step_pre_hook(self._before_step)
        setattr(optimizer, MARK, self)
        for name, parameter in parameters.items():
            parameter.grad = None  # one from before is not noised
            _guard(name, parameter, self)

    def draw(self, size: int, number: int) -> None:
        """Record a batch that was drawn and paid for; see `check_taken`."""
        self.check_taken()
        self.drawn = Drawn(size, number)

    def check_taken(self) -> None:
        """Raise RunError unless a step was taken for the last batch."""
        if self.drawn is not None:
            self.drawn = None
            raise RunError(
                "a batch was drawn and no step taken for it, which reveals something of its examples that was not "
                "counted: take optimizer.step() for each batch, without exception",
                code=STEP,
            )

    def arrive(self, total: Tensor | None, examples: int, of: Drawn | None) -> None:
        """Take the clipped sum of the drawn batch, from its backward pass.

        Args:
            of: the batch that awaited its step when the model was called.

        Raises:
            RunError: no batch awaits it, it is of another batch, or is the second one.
        """
        problem = ""
        if self.drawn is None or of is not self.drawn:
            problem = (
                "without a batch of the private loader, or of one before: iterate over what private() returned, and "
                "call the model and backward() once for each batch"
            )
        elif self.drawn.total is not None:
            problem = (
                "came twice for one batch, which would count its examples twice (gradient accumulation, two losses?): "
                "call it once before each step, and make batch_size larger instead"
            )
        elif examples != self.drawn.size:
            problem = (
                "is over another number of examples than the loader drew: give the model every batch whole, as it was "
                "drawn"
            )
        if problem:
            raise RunError(f"loss.backward() {problem}", code=STEP)
        assert self.drawn is not None
        self.drawn.total = total

    @contextmanager
    def paying_for_errors(self) -> Iterator[None]:
        """Pay before an error that only private examples cause goes on; others tell nothing of them."""
        try:
            yield
        except RunError:
            self.pay()
            raise

    def step_on_noise(self, number: int) -> None:
        """Take the step of an empty batch: noise alone."""
        self.draw(0, number)
        self._optimizer.step()

    def close(self) -> None:
        """Detach from the optimizer and its parameters, which continue without privacy."""
        self._handle.remove()
        if getattr(self._optimizer, MARK, None) is self:
            delattr(self._optimizer, MARK)
        for parameter in self._parameters.values():
            handle, owner = getattr(parameter, GUARD, (None, None))
            if handle is not None and owner is self:
                handle.remove()
                delattr(parameter, GUARD)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise RunError(
                "optimizer.step(closure) evaluates a batch more than once, and one release was paid: call "
                "loss.backward() and step() without a closure (LBFGS cannot be private)",
                code=STEP,
            )
        trained = {id(parameter) for parameter in self._parameters.values()}
        of_optimizer = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if any(parameter.requires_grad and id(parameter) not in trained for parameter in of_optimizer):
            raise RunError(
                "the optimizer was given more parameters after private(), whose gradients are not clipped: give it all "
                "before",
                code=PAST,
            )
        drawn = self.drawn
        self.drawn = None
        if drawn is None or (drawn.total is None and drawn.size):
            lacking = "a batch of the private loader: take one step for each batch"
            if drawn is not None:
                lacking = "loss.backward() through the model and the criterion that private() returned"
            raise RunError(f"optimizer.step() without {lacking}", code=STEP)
        self._release(drawn)

    @torch.no_grad()
    def _release(self, drawn: Drawn) -> None:
        """Pay for a batch, add noise to its sum, and set the parameters' gradients to its mean."""
        self.pay()
        self.has_released = True
        like = next(iter(self._parameters.values()))
        sizes = [parameter.numel() for parameter in self._parameters.values()]
        row = like.new_zeros(sum(sizes)) if drawn.total is None else drawn.total.clone()
        total = row.clone() if self._watch is not None else row
        self._noise.add_(row[None], row.new_tensor([self._std]), drawn.number, PEER)
        if self._watch is not None:
            self._watch.released(total / self._clip_norm, row / self._clip_norm, self._std / self._clip_norm)
        row /= self._divisor
        for parameter, part in zip(self._parameters.values(), row.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter).clone()


def _nothing_due() -> None:
    """Pay for nothing: without a loader, the caller of `draw` has charged."""


def _guard(name: str, parameter: Tensor, owner: NoisedSteps) -> None:
    """Refuse each gradient that reaches a parameter past the clipping, until its last owner is closed."""
    if hasattr(parameter, GUARD):
        setattr(parameter, GUARD, (getattr(parameter, GUARD)[0], owner))
        return

    def refuse(gradient: Tensor) -> None:
        raise RunError(
            f"a gradient reached {name} past the model and the criterion that private() returned, neither clipped nor "
            "counted: use these alone in the loss (weight decay: the optimizer's weight_decay)",
            code=PAST,
        )

    setattr(parameter, GUARD, (parameter.register_hook(refuse), owner))


UNLIMITED = 10**9  # steps, where there is no limit


@dataclass(frozen=True)
class PrivacyBudget:
    """What a peer may still spend on its data: a ledger, the mechanism of a step, and a budget.

    Each pass over the loader is a run of its own in the ledger, since it draws fresh noise; ε is that of all runs
    together, whichever process wrote them.

    Attributes:
        folder, source: the ledger is FOLDER/SOURCE.jsonl.
        release: one step.
        budget: ε, or None for no limit (every step is still recorded).
        delta: δ of ε.
        steps: of this mechanism, over all runs, or None where the budget alone ends them.
        limit: an upper bound on the steps that remain.
        insecure: whether batches and noise come from a seed, so that there is no ε against those who know it.
        loss_shown: whether the loop is shown the losses of private batches, which ε does not cover.
        assumption: what ε assumes of the examples, in words; empty if their items are proved separate.
        watch: of an observer of the loop, see `LOOPS`.
    """

    folder: Path
    source: str
    release: Release
    budget: float | None
    delta: float
    steps: int | None = None
    limit: int = UNLIMITED
    insecure: bool = False
    loss_shown: bool = False
    assumption: str = ""
    watch: LoopWatch | None = None

    @classmethod
    def of(
        cls,
        ledger: str | Path,
        size: int,
        batch_size: int,
        epsilon: float | None,
        delta: float,
        steps: int | None,
        noise_multiplier: float | None,
        insecure_seed: int | None,
        loss_shown: bool = False,
        assumption: str = "",
    ) -> PrivacyBudget:
        """Return the budget of Poisson batches, its noise given or solved, and note it for the peer around.

        Args:
            size: how many examples there are.
            batch_size: the expected batch.
            ledger, epsilon, delta, steps, noise_multiplier, insecure_seed, loss_shown: see `private`.
            assumption: what ε assumes of the examples, in words.

        Raises:
            ScenarioError: no noise can be solved for.
        """
        path = Path(ledger)
        batch = min(batch_size, size)
        sampling, rate = ("poisson", batch / size) if batch < size else ("full", 1.0)
        release = Release(sampling, rate, size, batch, noise_multiplier=noise_multiplier or 1.0)
        insecure = insecure_seed is not None
        place = (path.parent, path.name.removesuffix(".jsonl"))
        budget = cls(*place, release, epsilon, delta, steps)
        budget = replace(budget, insecure=insecure, loss_shown=loss_shown, assumption=assumption)
        if noise_multiplier is None:
            budget = budget.with_noise_solved()
        elif epsilon is not None and steps is None:
            budget = replace(budget, limit=max_steps(budget.release, epsilon, delta))
        if (observer := LOOPS.observer()) is not None:
            budget = replace(budget, watch=observer.admit(budget))
        caveat = "; batches and noise from a seed, INSECURE" * insecure
        caveat += "; the loop was shown private losses" * loss_shown
        note_budget(budget.path.absolute(), delta, caveat, assumption)
        return budget

    def paid(self, steps: int, reserve: int, report: Callable[[str], None]) -> Generator[tuple[int, int], None, None]:
        """Yield blocks of steps, once each is charged on disk: how many, and the number of the first of all runs.

        Args:
            steps: in all blocks.
            reserve: the most in a block.
            report: called with a line in the end.

        Raises:
            BudgetError: the budget allows no more.
        """
        with LoopPayments(self, steps, reserve, report) as payments:
            for block in payments.blocks():
                payments.pay()
                yield block

    def draw(self, steps: int, first: int, seed: bytes | None) -> list[np.ndarray]:
        """Return the examples of each of some steps' Poisson batches, ascending.

        Args:
            first: the number of the first step.
            seed: INSECURE: a key to draw by; None for the operating system's entropy.
        """
        generator = keyed_generator(os.urandom(2 * KEY_BYTES) if seed is None else seed, "sampling", first)
        sizes, examples = draw_poisson(generator, steps, self.release.dataset_size, self.release.sampling_rate)
        batches = np.split(examples, np.cumsum(sizes)[:-1])
        return batches if self.watch is None else [self.watch.drawn(batch) for batch in batches]

    @property
    def path(self) -> Path:
        """Return the ledger's file."""
        return ledger_path(self.folder, self.source)

    def entries(self) -> list[Entry]:
        """Return all entries of the ledger without locking it; raises BudgetError if it fails verification."""
        return read_entries(self.folder, self.source)

    def with_noise_solved(self) -> PrivacyBudget:
        """Return this budget with the least noise whose `steps` fit it: the noise already in the ledger if that does.

        Raises:
            ScenarioError: there is no ε or no number of steps, or no noise fits.
        """
        if self.budget is None or self.steps is None:
            raise ScenarioError(
                "give epsilon and rounds (with local_epochs) or steps, so that the noise can be solved for, or give "
                "noise_multiplier",
                code="training-loop.noise",
            )
        for charged in releases_in(self.entries()):
            same = replace(charged, noise_multiplier=1.0, steps=1) == replace(self.release, noise_multiplier=1.0)
            if same and ACCEPTED * self.budget <= epsilon([charged.times(self.steps)], self.delta) <= self.budget:
                return replace(self, release=charged.times(1))
        one = self.release
        noise = noise_multiplier(
            self.budget,
            self.delta,
            sampling=one.sampling,
            sampling_rate=one.sampling_rate,
            dataset_size=one.dataset_size,
            batch_size=one.batch_size,
            steps=self.steps,
        )
        return replace(self, release=replace(one, noise_multiplier=noise))

    def remaining_steps(self, entries: Sequence[Entry]) -> int:
        """Return how many more steps fit."""
        limit = self.limit if self.steps is None else self.steps - self.taken(entries)
        if limit <= 0:
            return 0
        account = Account(0, (Spend(0, limit, self.release.times(limit)),), self.budget, self.delta)
        return int(Spending(entries, [account]).limits[0])

    def taken(self, entries: Sequence[Entry]) -> int:
        """Return how many steps of this mechanism were charged."""
        return sum(r.steps for r in releases_in(entries) if r.mechanism == self.release.mechanism)

    def epsilon(self, entries: Sequence[Entry]) -> float:
        """Return the ε of everything charged."""
        return epsilon_of_runs(costs_in(entries), self.delta)

    def statement(self, entries: Sequence[Entry]) -> str:
        """Return one line: ε with its unit, its adjacency, what was charged, and what remains."""
        ways = {"poisson": "Poisson sampling at rate {:.3g} of", "full": "taking all of"}
        charged = "; ".join(
            f"{r.steps:,} step{'' if r.steps == 1 else 's'} by "
            f"{ways.get(r.sampling, f'{r.sampling} sampling of').format(r.sampling_rate)} {r.dataset_size:,} examples, "
            f"noise multiplier {r.noise_multiplier:.3g}"
            for r in releases_in(entries)
        )
        rest = "no budget" if self.budget is None else f"budget ε = {setting(self.budget)}"
        rest += "" if self.budget is None and self.steps is None else f", {self.remaining_steps(entries):,} steps left"
        warning = "INSECURE, drawn from a seed: " if self.insecure else ""
        spent = f"ε = {epsilon_text(self.epsilon(entries))} at δ = {setting(self.delta)}"
        unit = f"unit: example; adjacency: zero-out; {self.assumption or 'items: proved separate'}"
        shown = "; not covered: the loop was shown private losses" if self.loss_shown else ""
        return f"{warning}{spent} ({unit}; charged: {charged or 'nothing yet'}; {rest}; ledger: {self.path}{shown})"


class LoopPayments:
    """Pays for one pass over a loader, block by block; a context manager.

    The ledger is locked from the first payment on, and made by it if there is none: what fails before leaves nothing.
    """

    def __init__(self, budget: PrivacyBudget, steps: int, reserve: int, report: Callable[[str], None]) -> None:
        """Pay for steps of a budget; see `PrivacyBudget.paid`."""
        self._budget = budget
        self._steps = steps
        self._reserve = reserve
        self._report = report
        self._run = RunName(secrets.token_hex(16), "example-level", f"torch {torch.__version__}")
        self._ledger: Ledger | None = None
        self._done = 0  # steps of blocks before
        self._due = 0  # steps of this block that are not paid
        self._has_paid = False
        self._is_over = False

    def __enter__(self) -> LoopPayments:
        if self._budget.path.exists():
            self._ledger = self._opened()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        if self._ledger is None:
            return
        try:
            if self._has_paid:
                self._report(self._budget.statement(self._ledger.entries))
        finally:
            self._close()

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield blocks of steps that the budget allows: how many, and the number of the first of all runs.

        Raises:
            BudgetError: the budget allows no more.
        """
        entries = self._budget.entries() if self._ledger is None else self._ledger.entries
        taken = self._budget.taken(entries)
        remaining = self._budget.remaining_steps(entries)
        while self._done < self._steps:
            self._due = min(self._reserve, self._steps - self._done, remaining - self._done)
            if self._due < 1:
                raise self._spent()
            count = self._due
            yield count, taken + self._done
            self._done += count

    def pay(self) -> None:
        """Charge the block on disk, unless that was done.

        Raises:
            BudgetError: the ledger is in use, or another process has spent the budget meanwhile.
        """
        if self._due == 0:
            return
        if self._ledger is None:
            self._ledger = self._opened()
            if self._budget.remaining_steps(self._ledger.entries) < self._due:
                raise self._spent()
        spend = Spend(self._done, self._done + self._due, self._budget.release.times(self._due))
        self._ledger.append(self._run, self._done, self._done + self._due, [Charge.of([0], [spend])])
        self._due = 0
        self._has_paid = True
        if self._is_over:  # a batch of an iterator that is closed
            self._close()

    def _close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    def _opened(self) -> Ledger:
        return Ledger(self._budget.folder, self._budget.source)

    def _spent(self) -> BudgetError:
        entries = self._budget.entries() if self._ledger is None else self._ledger.entries
        return BudgetError(
            f"{self._budget.path}: the privacy budget is spent, and no batch was read: "
            f"{self._budget.statement(entries)}; check `allowed` before training",
            code="ledger.budget-spent",
        )
