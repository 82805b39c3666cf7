"""`private`: example-level privacy for a torch training loop of one's own (DP-SGD, Abadi et al. 2016, Alg. 1).

# Theory of operation

A training loop has four objects: a model, an optimizer, a data loader and a criterion. `private` wraps all four, and
the loop stays as it is:

    for inputs, targets in data_loader:            # 1  pays, then draws a Poisson batch       PrivateLoader
        optimizer.zero_grad()
        outputs = model(inputs)                    # 2  outputs that carry no gradient         PrivateModel
        loss = criterion(outputs, targets)         # 3  the clipped sum of the gradients       PrivateCriterion
        loss.backward()                            # 4  hands the sum over                     _Loss
        optimizer.step()                           # 5  adds noise; the mean is the gradient   NoisedSteps

What the optimizer gets as its gradient in 5 is

    grad = (sum_b g_b min(1, C / |g_b|) + σ C N(0, I)) / expected batch

for the gradients g_b of each example alone. They are computed in 3, by `ClippedSum`, from the model and the arguments
that it was called with in 2. torch's own backward pass through the model never runs.

Between two steps of the optimizer there is exactly one batch. `NoisedSteps` keeps it, and refuses what does not fit:

| the batch is ... | `drawn` | a loss arrives (4) | the optimizer steps (5) | the next batch is drawn (1) |
|---|---|---|---|---|
| not there | None | refused | refused | drawn |
| drawn | no total | summed | refused, unless it is empty | refused |
| summed | with its total | refused: it came twice | released; then not there | refused |

A loop may look at a gradient between 4 and 5, clip it once more or scale it: it finds the noised mean, to which the
noise is added when it looks (`NoisedGradient`).

What can go wrong in a user's loop, and where it is caught:

- A gradient that is not clipped reaches a parameter, past 2 and 3: a hook on each parameter (`_guard`), and an output
  whose backward pass raises (`_WithoutGradient`).
- The loss is scaled or changed before `backward()`: `_Loss` accepts only a gradient of 1.
- The loop reads the loss, which no ε covers: `PrivateLoss` has no value.
- An error's message contains private numbers: it is withheld (`clipped_sum.without_revealing`), and the step is paid
  for before an error is raised that only private examples cause.

**The loss, paid for.** With `loss_bound` the sum in 3 has one number more, of the clipped losses (`PaidLoss`), and is
released as a whole when the criterion is called: the loss that the loop gets is that number, noised, over the expected
batch.

**When it pays.** Every block of steps is charged before its first batch is drawn, except the very first: that is
charged when its noise is added, so that a loop with a mistake in it costs nothing. Nothing of a batch has left by then.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

from flower_privdec.common.errors import RAISED_BY_USERS, RunError, ScenarioError
from flower_privdec.common.formatting import percent
from flower_privdec.models import fix_norms, padding_rows
from flower_privdec.models.layers.model_outputs import Output, with_tensors
from flower_privdec.privacy.accountant.accounting import loose_delta
from flower_privdec.privacy.noise import NoiseSource, build_deployed_noise, build_noise
from flower_privdec.training_loop.clipped_sum import ClippedSum, Criterion, PaidLoss, withheld
from flower_privdec.training_loop.criterion_checks import CriterionTrial, by_position, check_finite
from flower_privdec.training_loop.example_checks import LoaderExamples, assumption_of, mixed_batch
from flower_privdec.training_loop.example_fetch import ExamplesAlone, MixedBatch, as_it_is
from flower_privdec.training_loop.loop_budget import LINES, PEER, LoopPayments, LoopWatch, PrivacyBudget, seed_of
from flower_privdec.training_loop.loop_checks import (
    ARGUMENT,
    check_criterion,
    check_loader,
    check_modules,
    check_options,
    check_same_kind,
    noise_inflation,
    trained_parameters,
    untrained_parameters,
)
from flower_privdec.training_loop.noised_gradient import KIND, NoisedGradient, function_name

LOADER_OPTIONS = (  # of the user's data loader that the private one keeps
    *("num_workers", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "pin_memory_device"),
)
WITHOUT_VALUE = {"backward", *KIND}  # functions and attributes of a loss that backward() needs

# Attributes that are set on a user's objects.
ORIGIN = "_flower_privdec_origin"  # on outputs: what the model was called with
MARK = "_flower_privdec_steps"  # on an optimizer whose steps are noised
GUARD = "_flower_privdec_guard"  # on a parameter that no other gradient may reach

# Codes of errors.
PRIVATE = "training-loop.private-already"
STEP = "training-loop.one-step-a-batch"
PAST = "training-loop.gradient-past-clipping"


class NotPickled:
    """What can be copied within a process, and not be written to a file or sent to another process.

    It holds the optimizer, the ledger and the noise of this process, none of which a copy elsewhere may go on with.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ScenarioError(
            f"{type(self).__name__} cannot be saved or sent as an object, for it holds the ledger and the noise of "
            "this process: save model.state_dict() and optimizer.state_dict(), whose names are those of your own model "
            "and optimizer, and load them into these before private(); to save a whole model, take the one that "
            "private() was given, model.module",
            code="training-loop.not-pickled",
        )

    # `copy` would take the way of pickle, too: torch's averages of weights copy a model.

    def __copy__(self) -> Any:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = object.__new__(type(self))
        memo[id(self)] = twin  # before its parts, some of which lead back to it
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin


@dataclass(frozen=True, eq=False, repr=False)
class ExamplePrivacy(NotPickled):
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

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.optimizer, self.data_loader, self.criterion))

    @property
    def noise_multiplier(self) -> float:
        """Return the standard deviation of the gradient's noise over the clip norm."""
        return self._steps.noise_multiplier

    @property
    def losses(self) -> list[float]:
        """Return the mean losses that were paid for and released, noised, of all steps in order, of empty batches too.

        They are what the loop got, and may be published. Empty without `loss_bound`.
        """
        return list(self._steps.losses)

    @property
    def loss_std(self) -> float | None:
        """Return the standard deviation of the noise of each of `losses`; None without `loss_bound`."""
        return self._steps.loss_std

    @property
    def allowed(self) -> int:
        """Return how many more steps the ledger allows: 0 if the budget is spent, 10^9 if there is no limit."""
        return self._budget.remaining_steps(self._budget.entries())

    @property
    def epsilon(self) -> float:
        """Return the ε of all that the ledger holds. Unit: example; adjacency: zero-out.

        It is infinite if any of it was drawn from a seed.
        """
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
    loss_bound: float | None = None,
    loss_share: float = 0.05,
    hardened: bool = False,
    insecure_seed: int | None = None,
    report: Callable[[str], None] = print,
) -> ExamplePrivacy:
    """Make a training loop differentially private for each example (DP-SGD, Abadi et al. 2016, Alg. 1).

    The loop stays as it is, with what this returns in the place of its own objects: for each batch of the loader one
    call of the model, one of the criterion on what that returned, `backward()` and `step()`. Call it again in each
    round, in the same process or another, with the same ledger: it continues the count.

    Args:
        model: called on batches [examples, ...]; returns a tensor [examples, ...], or several, as the models of
            transformers do, of which the criterion is given any (`outputs.logits`). It must not mix examples. A
            BatchNorm that is frozen stays in eval mode, whatever mode the model is in.
        optimizer: any over parameters of the model, used without a closure. What it does not hold is not trained.
        data_loader: over a map-style dataset; `batch_size` becomes the expected size. Shuffling and `drop_last`
            give way to Poisson sampling; the number of batches stays. Each example is read by `dataset[i]`, and given
            to `collate_fn` without others.
        criterion: called as criterion(outputs, targets, ...); for an example alone it is the loss of that example. It
            must add up over examples, as a sum or a mean does, which is tried on made-up ones.
        ledger: the file in which all steps over this peer's data are counted, `.jsonl`, made if missing. One for each
            peer and dataset, for ever: a new file counts from zero.
        delta: δ; well below one over the examples.
        epsilon: the budget over all rounds; None for no limit.
        steps: in all rounds, for which the noise is solved; or
        rounds, local_epochs: how often the loop is run, and how many passes over the loader it takes.
        noise_multiplier: noise std over clip norm, in place of steps.
        clip_norm: C, of a gradient of all trained parameters.
        reserve: how many steps a line of the ledger pays for; a crash, or a loop left early, loses at most so many.
            None is a sixteenth of a pass over the loader, or a whole one if it has workers, which read ahead.
        way: how examples are kept apart, see `ClippedSum`.
        show_loss: return the loss of each private batch to the loop. ε does not cover what the loop does with it, such
            as a scheduler that follows it, and every summary says so. Otherwise the loss has `backward()` and no value,
            unless it is paid for:
        loss_bound: L, a public constant. The loop gets the mean loss of each batch with noise, each example's clipped
            to [-L, L], and may do with it what it likes: it is in ε. Its noise is `loss_std`; average over many steps.
        loss_share: how much of the cost pays for the loss. The noise of gradients is 1 / sqrt(1 - loss_share) times as
            large, 1.026 by default, and that of the mean loss std σ L / sqrt(loss_share) over the expected batch.
        hardened: round the noise exactly, and add what covers the rounding of sums, so that no digit shows a sum. With
            a batch of 60 a step of a small MLP takes an eighth longer, and that of a CNN a twenty-fifth.
        insecure_seed: INSECURE: batches and noise from a seed, so that who knows it sees through them. Only for tests.
        report: called with a line on ε, its unit, what it assumes and what was charged, after each pass over the
            loader; and before, with a warning, if δ is too large to mean anything.

    Returns:
        What unpacks into model, optimizer, data_loader, criterion.

    Raises:
        ScenarioError: what cannot be private, with the remedy.
        BudgetError: from the loader, before a batch is read, when the budget is spent; `allowed` says so before.

    Privacy: unit one example, adjacency zero-out (an example's clipped gradient against 0; the number of examples is
        public), against an adversary who sees the model after every step. It assumes that item i of the dataset reads
        only example i, and every summary says so, unless `separate_items` proves it. Not covered: figures of private
        examples that the loop computes itself, from the model's outputs or from `show_loss`; what it does to a batch
        as a whole before the model sees it (normalising by its own mean, mixing its examples); what `example_checks`
        cannot see; what reached the model or the optimizer's state before; the same person behind several examples.

    Deviations: the divisor is the expected batch, not the drawn one.
    """
    # First whatever can be refused without reading an example or the ledger.
    check_options(
        {
            "ledger": ledger,
            "delta": delta,
            "epsilon": epsilon,
            "steps": steps,
            "rounds": rounds,
            "local_epochs": local_epochs,
            "noise_multiplier": noise_multiplier,
            "clip_norm": clip_norm,
            "reserve": reserve,
            "loss_bound": loss_bound,
            "loss_share": loss_share,
            "insecure_seed": insecure_seed,
            "report": report,
        }
    )
    if show_loss and loss_bound is not None:
        problem = "show_loss=True shows losses without noise, and loss_bound releases them with noise: leave one out"
        raise ScenarioError(problem, code=ARGUMENT)
    if isinstance(data_loader, PrivateLoader):
        raise ScenarioError("this data loader is private already: give private() the loader in it", code=PRIVATE)
    check_loader(data_loader)
    if isinstance(model, PrivateModel):
        raise ScenarioError("this model is private already: give private() the model in it", code=PRIVATE)
    check_modules(model)
    if isinstance(criterion, PrivateCriterion):
        raise ScenarioError("this criterion is private already: give private() the criterion in it", code=PRIVATE)
    check_criterion(criterion)
    parameters = trained_parameters(model, optimizer)
    like = next(iter(parameters.values()))

    # The budget, with the noise that it asks for.
    if rounds is not None and steps is None:
        steps = rounds * local_epochs * len(data_loader)
    n_examples = len(data_loader.dataset)  # type: ignore[arg-type]
    examples = LoaderExamples.of(data_loader)
    paid_loss = None
    also = ""
    if loss_bound is not None:
        paid_loss = PaidLoss(loss_bound, loss_share)
        also = f"; a step of this loop releases its mean loss, too, for {percent(loss_share)} of its cost"
        if noise_multiplier is not None:
            noise_multiplier *= clip_norm / paid_loss.norm(clip_norm)
    budget = PrivacyBudget.of(
        ledger,
        n_examples,
        data_loader.batch_size or 1,
        epsilon,
        delta,
        steps,
        noise_multiplier,
        insecure_seed,
        show_loss,
        assumption_of(examples.unproved),
        also,
    )
    inflation = 0.0
    if hardened:
        inflation = noise_inflation(budget.release, like.dtype)
        if insecure_seed is not None:
            problem = "hardened=True is for noise of the operating system: leave out insecure_seed"
            raise ScenarioError(problem, code=ARGUMENT)

    # Then what has to read some examples; a spent budget reads none.
    trial = CriterionTrial(model, criterion)
    is_spent = budget.remaining_steps(budget.entries()) < 1
    if is_spent:
        alone = ExamplesAlone(data_loader.dataset, data_loader.collate_fn)
    else:
        alone = examples.checked()
        check_finite(data_loader.dataset)
        trial.before_payment(data_loader, data_loader.collate_fn)

    watch = budget.watch
    options: dict[str, Any] = {"way": way, "paid_loss": paid_loss}
    if watch is not None:
        options |= {"behind": watch.behind, "show": watch.show}
    clipped_sum = ClippedSum(model, parameters, criterion, clip_norm, **options)

    seed = seed_of(insecure_seed)
    noise: NoiseSource
    if seed is None:
        noise = build_deployed_noise(hardened=hardened)
    else:
        noise = build_noise({0: seed}, like.device)
    noised = NoisedSteps(
        optimizer,
        parameters,
        noise,
        clip_norm=clip_norm,
        noise_multiplier=budget.release.noise_multiplier * (1 + inflation),
        expected_batch=budget.release.batch_size,
        watch=watch,
        paid_loss=paid_loss,
        padding=padding_rows(model),
    )
    loader = PrivateLoader(data_loader, noised, budget, alone, reserve=reserve, seed=seed, report=report)

    for warning in (loose_delta(delta, n_examples), untrained_parameters(model, parameters)):
        if warning:
            report(f"warning: {warning}")
    return ExamplePrivacy(
        model=PrivateModel(model, clipped_sum, noised),
        optimizer=optimizer,
        data_loader=loader,
        criterion=PrivateCriterion(criterion, clipped_sum, noised, trial, show_loss),
        _steps=noised,
        _budget=budget,
    )


# --- 1: batches that are paid for ---


class PrivateLoader(NotPickled):
    """The user's loader with Poisson batches: each example is in each with chance batch_size / examples.

    It has as many batches as the user's. An empty batch is not yielded: its step, which is only noise, is taken here.
    The ledger is locked while the loader is being iterated over.
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
        if reserve is not None:
            self._reserve = reserve
        elif loader.num_workers:
            self._reserve = len(loader)  # workers are started for each block, and read ahead within it
        else:
            self._reserve = max(1, len(loader) // LINES)

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
                # added, so that a mistake costs nothing. All later batches are paid for before they are drawn.
                if self._steps.has_released:
                    payments.pay()
                yield from self._batches(count, first)

    def _batches(self, count: int, first: int) -> Iterator[Any]:
        """Yield the batches of some steps.

        Args:
            count: how many steps.
            first: the number of the first of them.
        """
        drawn = self._budget.draw(count, first, self._seed)

        # torch's loader reads the batches that have an example, with the user's workers and options.
        not_empty = [batch.tolist() for batch in drawn if len(batch)]
        options: Mapping[str, Any] = {name: getattr(self._loader, name) for name in LOADER_OPTIONS}
        batches = iter(DataLoader(self._alone, batch_sampler=not_empty, collate_fn=as_it_is, **options))

        for number, examples in enumerate(drawn, start=first):
            if len(examples) == 0:
                self._steps.step_on_noise(number)
                continue
            batch = self._next(batches)
            self._steps.draw(len(examples), number)
            yield batch
            self._steps.check_taken()

    def _next(self, batches: Iterator[Any]) -> Any:
        """Read the next batch; pay before an error of it is raised, whose message is withheld."""
        failure = ""
        try:
            batch = next(batches)
        except RAISED_BY_USERS as error:
            failure = type(error).__name__

        # Outside of `except`: an error raised in it would carry the other one, with its message, along.
        if failure:
            self._steps.pay()
            raise withheld("the dataset or the collate_fn", failure)
        if isinstance(batch, MixedBatch):
            self._steps.pay()
            raise mixed_batch()
        return batch


# --- 2: outputs without a gradient ---


@dataclass(frozen=True)
class _Call:
    """A call of the model.

    Attributes:
        args, kwargs: what it was called with.
        of: the batch that awaited its step then.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    of: Drawn | None


@dataclass(frozen=True)
class _Origin:
    """Where a tensor among the model's outputs is from, as it remembers it.

    Attributes:
        call: the call that returned it.
        place: its place among the outputs, see `model_outputs`.
        version: its version; torch counts it up with each change in place.
    """

    call: _Call
    place: int
    version: int


class PrivateModel(NotPickled, nn.Module):
    """The user's model; its state_dict, its parameters and its other attributes are those of the model itself.

    While gradients are on, its outputs carry none: only the private criterion turns them into a loss.
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
            ScenarioError: gradients are on, and there is no tensor among the outputs, or a loss of the batch; or it is
                called to be exported, or by a transformation of functions.
        """
        if torch._C._is_tracing() or torch.compiler.is_exporting() or torch._C._functorch.peek_interpreter_stack():
            raise _exported()

        if not torch.is_grad_enabled():
            return fix_norms(copy.deepcopy(self.module))(*args, **kwargs)

        self._steps.check_parameters(self.module)
        _follow_weights(self.module)
        with self._steps.paying_for_errors():
            outputs = self._clipped_sum.outputs(args, kwargs)
        call = _Call(args, kwargs, self._steps.drawn)

        def without_gradient(tensor: Tensor, place: int) -> Tensor:
            # Only a tensor that asks for a gradient calls the backward pass that raises.
            if tensor.is_floating_point():
                tensor = tensor.requires_grad_()
            output: Tensor = _WithoutGradient.apply(tensor)
            setattr(output, ORIGIN, _Origin(call, place, output._version))
            return output

        return with_tensors(outputs, without_gradient)

    def __prepare_scriptable__(self) -> Any:
        raise _exported()  # torch.jit.script asks for what it shall compile

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


def _exported() -> ScenarioError:
    return ScenarioError(
        "the model that private() returned computes by copies of yours, which torch.jit, torch.export, torch.onnx and "
        "torch.func cannot follow: give them the model that private() was given, model.module",
        code="training-loop.exported",
    )


@torch.no_grad()
def _follow_weights(module: nn.Module) -> None:
    """Let parametrizations in training, such as spectral_norm, follow the weights, as in each call of the model.

    What they keep in the copies that see examples is lost with these. Here they see the weights only, which have left
    with the last step anyway.
    """
    for part in module.modules():
        if is_parametrized(part):
            parametrized: Any = part.parametrizations
            for name in parametrized:
                getattr(part, name)


class _WithoutGradient(torch.autograd.Function):
    """Outputs whose backward pass raises."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor) -> Tensor:
        return outputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RunError(
            "a loss was computed from the model's outputs without the criterion that private() returned, so that its "
            "gradient is not clipped: use only that criterion",
            code=PAST,
        )


# --- 3 and 4: a loss whose backward pass hands over the clipped sum ---


class PrivateCriterion(NotPickled, nn.Module):
    """The user's criterion; backward() of its loss passes on the clipped sum of the batch."""

    def __init__(
        self, criterion: Criterion, clipped_sum: ClippedSum, steps: NoisedSteps, trial: CriterionTrial, show_loss: bool
    ) -> None:
        """Wrap a criterion, called as criterion(outputs, targets, ...) or in any other way with the model's outputs."""
        super().__init__()
        self.criterion = criterion
        self._clipped_sum = clipped_sum
        self._steps = steps
        self._trial = trial
        self._show_loss = show_loss

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a batch: a `PrivateLoss` while gradients are on, unless the loss is shown.

        Raises:
            RunError: it is given no outputs of the model, or some that are no longer what one call of it returned.
            ScenarioError: it does not add up over examples, see `criterion_checks`.
        """
        if not torch.is_grad_enabled():
            loss: Tensor = self.criterion(*args, **kwargs)
            return loss

        given = by_position(self.criterion, args, kwargs)
        call, arguments = _followed(given)
        self._trial.try_call(call.args, call.kwargs, arguments)

        with self._steps.paying_for_errors():
            shown = torch.full((), math.nan)
            if self._show_loss:
                shown = self._clipped_sum.loss(given)

            # Without a drawn batch there is nothing to sum: `arrive` will refuse the loss.
            total = None
            n_examples = 0
            if call.of is not None:
                total, n_examples = self._clipped_sum(call.args, call.kwargs, arguments)
        if self._show_loss:
            self._steps.pay()  # the loss leaves now
        elif self._steps.pays_for_loss:
            shown = torch.tensor(self._steps.release_loss(total, n_examples, call.of))

        arrive = partial(self._steps.arrive, total, n_examples, call.of)
        private_loss: Tensor = _Loss.apply(torch.zeros((), requires_grad=True), shown, arrive)
        if self._show_loss or self._steps.pays_for_loss:
            return private_loss
        return private_loss.as_subclass(PrivateLoss)


def _followed(given: Sequence[Any]) -> tuple[_Call, list[Any]]:
    """Return the call of the model whose outputs a criterion is given, and its arguments with these as `Output`s.

    Wherever the criterion is given an output, it computes with that of one example alone. The one that it got here is
    of the batch, whose examples the model may have mixed, and has no gradient.

    Raises:
        RunError: there is no output, or it was changed, or another call of the model returned it.
    """
    leaves, spec = tree_flatten(list(given))
    calls: list[_Call] = []
    followed = []
    for leaf in leaves:
        origin: _Origin | None = getattr(leaf, ORIGIN, None)
        is_changed = origin is not None and origin.version != leaf._version
        is_computed = origin is None and isinstance(leaf, Tensor) and leaf.requires_grad
        if is_changed or is_computed:
            raise _not_as_returned()
        if origin is None:
            followed.append(leaf)
            continue
        calls.append(origin.call)
        followed.append(Output(origin.place))

    if not calls:
        raise _not_as_returned()
    if any(call is not calls[0] for call in calls):
        raise RunError(
            "the criterion is given outputs of several calls of the model, and a step follows those of one: let one "
            "call take all parts of an example, as in model(anchor, positive, negative), and return an output for "
            "each; or compute what needs no gradient, such as a teacher's outputs, under torch.no_grad()",
            code="training-loop.several-calls",
        )
    return calls[0], tree_unflatten(followed, spec)


def _not_as_returned() -> RunError:
    return RunError(
        "the criterion must be given the model's outputs as they were returned, for an operation between could mix "
        "examples and is not followed: move it into the model or into the criterion",
        code=PAST,
    )


class PrivateLoss(Tensor):
    """The loss of private examples: it has `backward()`, and its value was never computed.

    Raises:
        RunError: on every operation that reads it, compares it or computes with it.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function_name(function)
        if name in WITHOUT_VALUE:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise RunError(
            f"the loss of private examples has no value to read or to compute with ({name}): no ε would "
            "cover what a scheduler, an early stop or a report makes of it. Call backward() on it as it is (weights of "
            "examples, a mean or a second loss belong into the criterion, which may take all outputs of the model; no "
            "scaling, no penalty; mixed precision is torch.autocast with bfloat16), and follow progress on public "
            "examples under torch.no_grad(); private(loss_bound=...) gives its noised mean, which is in ε; "
            "private(show_loss=True) shows it, and every summary says so",
            code="training-loop.loss-is-private",
        )


class _Loss(torch.autograd.Function):
    """A loss whose backward pass passes on the sum that was clipped when the loss was computed."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, shown: Tensor, arrive: Callable[[], None]) -> Tensor:
        # `root` is there to ask for a gradient: without one, torch would not call `backward`.
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


# --- 5: noise ---


@dataclass(eq=False)
class Drawn:
    """A batch that was drawn, before its step.

    Attributes:
        size: how many examples it has.
        number: the number of its step.
        total: the sum of their clipped gradients, [d], or [d + 1] with a paid loss, once it has arrived.
        noised: the same with its noise, if it was released with the loss already.
        offered: the gradients that the loop finds, by parameter, once the sum has arrived.
        is_filled: whether these are filled in, since the loop looked at one of them.
    """

    size: int
    number: int
    total: Tensor | None = None
    noised: Tensor | None = None
    offered: dict[str, NoisedGradient] = field(default_factory=dict)
    is_filled: bool = False


def _nothing_due() -> None:
    """Pay for nothing: without a loader, the caller of `draw` has charged."""


class NoisedSteps(NotPickled):
    """Gives an optimizer, before each of its steps, the noised mean of a batch as its gradient.

    Everything else is the optimizer's own. Between two steps there must be one backward pass over one drawn batch:
    anything else was not charged, and raises RunError. See the table of states above.

    Attributes:
        drawn: the batch that awaits its step, or None.
        pay: pays for the steps whose batches are being drawn, once; called before anything of their examples leaves.
        has_released: whether a sum was released.
        losses: the noised mean losses that were released, in order.

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
        paid_loss: PaidLoss | None = None,
        padding: Mapping[str, int] | None = None,
    ) -> None:
        """Hook into an optimizer and watch its parameters; raises ScenarioError if it is in use by another instance."""
        if hasattr(optimizer, MARK):
            problem = "this optimizer is private already: keep what private() returned, or close() it first"
            raise ScenarioError(problem, code=PRIVATE)
        self._optimizer = optimizer
        self._parameters = parameters
        self._noise = noise
        # What one example adds at most, for which the noise is scaled; more than C with a paid loss.
        self._norm = clip_norm
        if paid_loss is not None:
            self._norm = paid_loss.norm(clip_norm)
        self._std = noise_multiplier * self._norm
        self._divisor = expected_batch
        self._clip_norm = clip_norm
        self._watch = watch
        self._paid_loss = paid_loss
        self._padding = padding or {}
        self.losses: list[float] = []
        self.drawn: Drawn | None = None
        self.pay: Callable[[], None] = _nothing_due
        self.has_released = False

        self._handle = optimizer.register_step_pre_hook(self._before_step)
        setattr(optimizer, MARK, self)
        for name, parameter in parameters.items():
            parameter.grad = None  # one from before is not noised
            _guard(name, parameter, self)

    def close(self) -> None:
        """Detach from the optimizer and its parameters, which continue without privacy."""
        self._handle.remove()
        if getattr(self._optimizer, MARK, None) is self:
            delattr(self._optimizer, MARK)
        for parameter in self._parameters.values():
            guard: _Guard | None = getattr(parameter, GUARD, None)
            if guard is not None and guard.owner is self:
                guard.handle.remove()
                delattr(parameter, GUARD)
            if isinstance(parameter.grad, NoisedGradient):
                parameter.grad = None

    @property
    def noise_multiplier(self) -> float:
        """Return the standard deviation of the gradient's noise over its clip norm."""
        return self._std / self._clip_norm

    @property
    def pays_for_loss(self) -> bool:
        """Return whether each step releases the mean loss, too."""
        return self._paid_loss is not None

    @property
    def loss_std(self) -> float | None:
        """Return the standard deviation of the noise of each mean loss."""
        if self._paid_loss is None:
            return None
        return self._paid_loss.std(self._std / self._norm, self._divisor)

    def draw(self, size: int, number: int) -> None:
        """Record a batch that was drawn; see `check_taken`."""
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
        drawn = self._check_whole(examples, of)
        drawn.total = total
        for name, parameter in self._parameters.items():
            drawn.offered[name] = NoisedGradient.of(parameter, partial(self._fill, drawn))
            parameter.grad = drawn.offered[name]

    def release_loss(self, total: Tensor | None, examples: int, of: Drawn | None) -> float:
        """Release the drawn batch's sum, with its losses, and return their noised mean; see `arrive`."""
        drawn = self._check_whole(examples, of)
        if drawn.noised is not None:
            raise RunError(
                "the criterion came twice for one batch, and one loss of it was paid for: call it once before each "
                "step, and compute other losses under torch.no_grad() on public examples",
                code=STEP,
            )
        drawn.noised = self._noised(total, drawn.number)
        return self.losses[-1]

    def _check_whole(self, examples: int, of: Drawn | None) -> Drawn:
        """Return the batch that awaits its sum; raise RunError if the sum is not of that batch as it was drawn."""
        # See the table of states: the batch must be drawn, not summed, and the one that the model was called with.
        drawn = self.drawn
        if drawn is None or of is not drawn:
            raise RunError(
                "loss.backward() without a batch of the private loader, or of one before: iterate over what private() "
                "returned, and call the model and backward() once for each batch",
                code=STEP,
            )

        if drawn.total is not None:
            raise RunError(
                "loss.backward() came twice for one batch, which would count its examples twice (gradient "
                "accumulation, two losses?): call it once before each step, and make batch_size larger instead",
                code=STEP,
            )

        if examples != drawn.size:
            raise RunError(
                "loss.backward() is over another number of examples than the loader drew: give the model every batch "
                "whole, as it was drawn",
                code=STEP,
            )
        return drawn

    @contextmanager
    def paying_for_errors(self) -> Iterator[None]:
        """Pay before an error that only private examples cause goes on; other errors tell nothing of them."""
        try:
            yield
        except RunError:
            self.pay()
            raise

    def step_on_noise(self, number: int) -> None:
        """Take the step of an empty batch, which is only noise."""
        self.draw(0, number)
        self._optimizer.step()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check that a batch was summed, and release it; torch calls this as the first thing of `optimizer.step`.

        Args:
            args: the optimizer itself, and what `step` was called with.
        """
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise RunError(
                "optimizer.step(closure) evaluates a batch more than once, and one release was paid: call "
                "loss.backward() and step() without a closure (LBFGS cannot be private)",
                code=STEP,
            )

        trained = {id(parameter) for parameter in self._parameters.values()}
        for group in optimizer.param_groups:
            if any(parameter.requires_grad and id(parameter) not in trained for parameter in group["params"]):
                raise RunError(
                    "the optimizer was given more parameters after private(), whose gradients are not clipped: give it "
                    "all parameters before you call private()",
                    code=PAST,
                )

        drawn = self.drawn
        self.drawn = None
        if drawn is None:
            problem = "optimizer.step() without a batch of the private loader: take one step for each batch"
            raise RunError(problem, code=STEP)
        if drawn.total is None and drawn.size:
            problem = "optimizer.step() without loss.backward() through the model and criterion of private()"
            raise RunError(problem, code=STEP)

        if not drawn.is_filled:
            for name, gradient in self._gradients(drawn).items():
                self._parameters[name].grad = gradient
            return

        # The loop has seen the noised gradients, so what it made of them counts: of those that it cleared, nothing.
        for parameter in self._parameters.values():
            if isinstance(parameter.grad, NoisedGradient):
                parameter.grad = parameter.grad.plain()

    @torch.no_grad()
    def check_parameters(self, model: nn.Module) -> None:
        """Refuse a model that does not train what it did when private() was called: other layers, or frozen ones."""
        present = dict(model.named_parameters(remove_duplicate=False))

        # The same parameters, still trained.
        for name, parameter in self._parameters.items():
            if present.get(name) is not parameter:
                raise RunError(
                    f"the model's {name} is another parameter than private() was given, and would not be trained: "
                    "change the model first, make its optimizer, then call private()",
                    code=PAST,
                )
            if not parameter.requires_grad:
                raise RunError(
                    f"the model's {name} was frozen after private(), which would go on training it: call close() on "
                    "what private() returned, freeze, and call private() again with the same ledger",
                    code=PAST,
                )

        check_same_kind(self._parameters)  # they may have been converted, as by half()

    def _fill(self, drawn: Drawn) -> None:
        """Release a batch whose gradients the loop looks at before its step; does nothing the second time."""
        if drawn is not self.drawn:
            raise RunError(
                "a gradient was used of a batch for which no step was taken, so that it was never noised: take "
                "optimizer.step() for each batch, and read gradients between backward() and step(), or after it",
                code=STEP,
            )
        if drawn.is_filled:
            return
        for name, gradient in self._gradients(drawn).items():
            drawn.offered[name].set(gradient)
        drawn.is_filled = True

    @torch.no_grad()
    def _gradients(self, drawn: Drawn) -> dict[str, Tensor]:
        """Return the noised mean of a batch, by parameter."""
        row = drawn.noised
        if row is None:
            row = self._noised(drawn.total, drawn.number)

        row = row[: self._d] / self._divisor
        sizes = [parameter.numel() for parameter in self._parameters.values()]
        gradients = {}
        for (name, parameter), part in zip(self._parameters.items(), row.split(sizes), strict=True):
            gradient = part.view_as(parameter).clone()

            # An embedding's row for padding has no gradient, whatever the examples, so what stands here is only noise.
            # The whole sum was noised and paid for; a zero in the place of a number that nobody can have another
            # gradient in is post-processing, and everybody knows which row it is, from the model.
            if name in self._padding:
                gradient[self._padding[name]] = 0
            gradients[name] = gradient
        return gradients

    @torch.no_grad()
    def _noised(self, total: Tensor | None, number: int) -> Tensor:
        """Pay for a batch, and return its sum with noise; keep the mean loss in it, if one is paid for.

        Args:
            total: the sum; None for an empty batch.
            number: the number of the step.
        """
        # Pay first, and durably. A crash may then count a step too many, never one too few.
        self.pay()
        self.has_released = True

        if total is None:
            like = next(iter(self._parameters.values()))
            total = like.new_zeros(self._d + self.pays_for_loss)
        row = total.clone()
        self._noise.add_(row[None], row.new_tensor([self._std]), number, PEER)
        if self._watch is not None:
            self._watch.released(total / self._norm, row / self._norm, self._std / self._norm)

        if self._paid_loss is not None:
            self.losses.append(self._paid_loss.mean(float(row[-1]), self._clip_norm, self._divisor))
        return row

    @property
    def _d(self) -> int:
        return sum(parameter.numel() for parameter in self._parameters.values())


@dataclass(eq=False)
class _Guard:
    """The hook on a parameter, and whose it is.

    A parameter is saved with its attributes, but not with its hooks. So this is saved as None, and a model that was
    given to `private` can be saved as a whole.
    """

    handle: Any
    owner: NoisedSteps

    def __reduce__(self) -> Any:
        return type(None), ()


def _guard(name: str, parameter: Tensor, owner: NoisedSteps) -> None:
    """Refuse each gradient that reaches a parameter past the clipping, until its last owner is closed."""
    guard: _Guard | None = getattr(parameter, GUARD, None)
    if guard is not None:
        guard.owner = owner
        return

    def refuse(gradient: Tensor) -> None:
        raise RunError(
            f"a gradient reached {name} past the model and the criterion that private() returned, neither clipped nor "
            "counted: use only these in the loss (weight decay: the optimizer's weight_decay)",
            code=PAST,
        )

    setattr(parameter, GUARD, _Guard(parameter.register_hook(refuse), owner))
