"""The sum of a batch's clipped gradients, with each example computed apart from all others.

A user's model and criterion are code that we cannot trust in two ways, and both shape this module:

- They could let one example reach another's gradient, and clipping would then bound nothing. So they only ever see one
  example at a time, and each call gets a fresh copy of them (`_loss_of_one`).
- When they fail, the message could contain private numbers. So it is replaced by one that was raised on zeros, or
  withheld (`without_revealing`).

A step calls `ClippedSum`: it splits the batch into tensors (`batched`), computes some examples' gradients at a time
(`gradients`), clips them and adds them up. `_first_way_that_works` decides once whether vmap can take the model.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from flower_privdec.common.errors import RAISED_BY_USERS, RunError, ScenarioError
from flower_privdec.gradients.protocol import batchable, beyond, reason, row_chunks, upper
from flower_privdec.models import fix_norms, padding_rows
from flower_privdec.models.layers.model_outputs import Output, filled, part_of_whole
from flower_privdec.tasks.additivity import fresh, summed
from flower_privdec.tasks.own_losses import no_custom_vmap_rules

WAYS = ("auto", "vmap", "loop")
BOTH = "the model or the criterion, on one example at a time,"  # the subject of an error's sentence
CONSTANTS = (bool, int, float, str, type(None), Output)  # arguments that all examples of a batch may share

Criterion = Callable[..., Tensor]
Values = dict[str, Tensor]  # the trained parameters, or their gradients, by name
Show = Callable[[Tensor], None]
Rebuild = Callable[[Sequence[Tensor]], tuple[list[Any], dict[str, Any], list[Any]]]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PaidLoss:
    """The loss of an example, clipped to [-L, L], as one more number beside its clipped gradient.

        v_b = (clipped g_b, sqrt(s / (1 - s)) C clip(l_b, L) / L),        |v_b| <= C / sqrt(1 - s)

    The sum of these over a batch is released as a whole, with noise of one standard deviation σ C / sqrt(1 - s) on each
    number: one Gaussian mechanism of noise multiplier σ, which costs what a step without the loss costs at that σ. So
    no accountant has to know of it. The price is in the gradient, whose own noise is 1 / sqrt(1 - s) times as large.
    The noise of the sum of losses is σ L / sqrt(s).

    Attributes:
        bound: L.
        share: s, how much of 1 / σ², in which cost is counted, the loss takes from the gradient; above 0 and below 1.
    """

    bound: float
    share: float

    def norm(self, clip_norm: float) -> float:
        """Return the largest norm of what one example adds, for gradients clipped to C."""
        return clip_norm / math.sqrt(1 - self.share)

    def column(self, losses: Tensor, clip_norm: float) -> Tensor:
        """Return what each of some losses [b] adds to the last number of the sum; 0 for NaN."""
        weight = self._weight(clip_norm)
        clipped = losses.nan_to_num(0.0, self.bound, -self.bound).clamp(-self.bound, self.bound)
        return clipped / self.bound * weight

    def mean(self, summed: float, clip_norm: float, expected_batch: float) -> float:
        """Return the mean loss that the last number of a noised sum says."""
        return summed / self._weight(clip_norm) * self.bound / expected_batch

    def std(self, noise_multiplier: float, expected_batch: float) -> float:
        """Return the standard deviation of that mean's noise."""
        return noise_multiplier * self.bound / math.sqrt(self.share) / expected_batch

    def _weight(self, clip_norm: float) -> float:
        # A little less than the norm allows, which covers how products of it are rounded in float32.
        return clip_norm * math.sqrt(self.share / (1 - self.share)) * (1 - 1e-6)


class ClippedSum:
    """Sums the clipped gradients of a model's trained parameters over a batch.

        sum_b g_b min(1, C / n_b)

    Here g_b is the gradient of criterion(model(x_b), y_b) for example b as a batch of one, and n_b is an upper bound on
    its norm, larger by roundings only (`gradients.protocol`). See Abadi et al. 2016, Alg. 1. If g_b is not finite, or
    its norm is beyond `protocol.LARGEST`, the example counts as zero.

    Model and criterion never see two examples together. `vmap` computes many examples at once, but lets none reach
    another; `loop` calls a fresh copy of the model on one example after the other. State that the model or criterion
    keeps is discarded. State elsewhere, in globals, files or the variables around a function, is not.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Values,
        criterion: Criterion,
        clip_norm: float,
        *,
        way: str = "auto",
        memory_bytes: int = 2**28,
        behind: int = 0,
        show: Show = lambda gradients: None,
        paid_loss: PaidLoss | None = None,
    ) -> None:
        """Prepare to sum; the model is first called by the first batch.

        Args:
            module: the model.
            parameters: those of its parameters that are trained, by name. d is the number of their elements.
            criterion: the loss of one example, of its outputs and targets.
            clip_norm: C.
            way: one of WAYS; `auto` is vmap if the model can be called so, else the loop, which is slow.
            memory_bytes: about how much memory the gradients of single examples may take.
            behind: how many examples at the end of each batch are only shown to an observer and not added to the sum.
            show: called with what those examples would add, divided by the most that one may, [behind, d].
            paid_loss: sums up clipped losses, too, as one more number behind the d of a gradient.
        """
        if way not in WAYS:
            raise ScenarioError(f"way={way!r} must be one of {', '.join(WAYS)}", code="training-loop.way")
        self._module = module
        self._parameters = parameters
        self._criterion = criterion
        self.clip_norm = clip_norm
        self._memory = memory_bytes
        self._behind = behind
        self._show = show
        self._paid_loss = paid_loss
        self._ways = WAYS[1:] if way == "auto" else (way,)  # to try, in this order
        self._way = ""  # the one that works; empty until the first batch

    def outputs(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the model's outputs for a batch, without a gradient and without a change to the model."""
        with torch.no_grad():
            module = fix_norms(copy.deepcopy(self._module))
            return without_revealing("the model", lambda args, kwargs: module(*args, **kwargs), [args, kwargs])

    def loss(self, arguments: Sequence[Any]) -> Tensor:
        """Return the loss of a batch, without a gradient and without a change to the criterion."""

        def detach(leaf: Any) -> Any:
            return leaf.detach() if isinstance(leaf, Tensor) else leaf

        detached = tree_map(detach, list(arguments))
        with torch.no_grad():
            loss: Tensor = without_revealing("the criterion", fresh(self._criterion), detached)
            return loss

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any], arguments: Sequence[Any]) -> tuple[Tensor, int]:
        """Return the sum [d] over a batch, and how many examples the batch has, those behind included.

        With a paid loss the sum is [d + 1], see `PaidLoss`.

        Args:
            args, kwargs: the model's arguments.
            arguments: the criterion's, with an `Output` for each of the model's outputs.

        Raises:
            ScenarioError: the arguments are not a batch, or the model or criterion cannot take a batch of one.
            RunError: the model or criterion fails on the examples. Its message is withheld because it may reveal them.
        """
        tensors, rebuild = batched(args, kwargs, arguments)
        like = next(iter(self._parameters.values()))
        total = torch.zeros(self.width, dtype=like.dtype, device=like.device)
        examples = len(tensors[0])
        if examples == 0:
            return total, 0

        added = examples - self._behind
        if self._behind:
            shown, losses = self.gradients(rebuild, [tensor[added:] for tensor in tensors])  # [behind, d]
            rows = shown * (self.clip_norm / upper(shown).clamp_min(self.clip_norm))[:, None]
            if self._paid_loss is not None:
                column = self._paid_loss.column(losses.to(rows), self.clip_norm)
                rows = torch.cat([rows, column[:, None]], dim=1)
            self._show(rows / self.norm)

        # As many examples at once as fit into memory.
        bytes_per_example = self.d * like.element_size()
        for part in row_chunks(added, bytes_per_example, self._memory):
            gradients, losses = self.gradients(rebuild, [tensor[part] for tensor in tensors])  # [b, d]
            norms = upper(gradients)  # [b]
            bad = beyond(norms)
            if bad is not None:
                # The gradient too, not only its scale: 0 * inf would make the whole sum NaN.
                gradients = gradients.masked_fill(bad[:, None], 0)
                norms = norms.masked_fill(bad, 0)

            # A norm of 0 gives the scale min(inf, 1) = 1.
            scales = (self.clip_norm / norms).clamp(max=1)
            total[: self.d].add_(scales @ gradients)
            if self._paid_loss is not None:
                total[self.d] += self._paid_loss.column(losses.to(total), self.clip_norm).sum()
        return total, examples

    def gradients(self, rebuild: Rebuild, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the gradients [b, d] of some examples and their losses [b], not clipped; see `batched`."""
        if not self._way:
            self._way = self._first_way_that_works(rebuild, tensors)

        def computed(*some: Tensor) -> tuple[Tensor, Tensor]:
            try:
                return self._gradients(self._way, rebuild, some)
            except RAISED_BY_USERS:
                if self._way == self._ways[-1]:
                    raise

            # What takes examples of one length together, as CTC does, need not take those of several. The sums are the
            # same; only the time tells of it.
            return self._gradients(self._ways[-1], rebuild, some)

        both: tuple[Tensor, Tensor] = without_revealing(BOTH, computed, tensors)
        return both

    @property
    def d(self) -> int:
        """Return the number of trained parameters, counted by element."""
        return sum(parameter.numel() for parameter in self._parameters.values())

    @property
    def width(self) -> int:
        """Return how many numbers are summed: d, and one for a paid loss."""
        return self.d + (self._paid_loss is not None)

    @property
    def norm(self) -> float:
        """Return the largest norm of what one example adds: C, or more with a paid loss."""
        if self._paid_loss is None:
            return self.clip_norm
        return self._paid_loss.norm(self.clip_norm)

    def _first_way_that_works(self, rebuild: Rebuild, tensors: list[Tensor]) -> str:
        """Return the first way that works on made-up examples of the examples' shapes."""
        # Not the examples themselves: the errors are logged and shown, and those of made-up ones reveal nothing.
        two = [tensor[:1].expand(2, *tensor.shape[1:]) for tensor in tensors]
        reasons = []
        for way in self._ways:
            failure = ""
            for made_up in MADE_UP:
                failure = self._failure_of(way, rebuild, [made_up(tensor) for tensor in two])
                if not failure:
                    break
            if failure:
                reasons.append(failure)
                continue

            if reasons:
                _log.warning("the model is called on one example after the other, which is slow: %s", reasons[0])
            self._check_padding(way, rebuild, [ones(tensor) for tensor in two])
            return way

        rule = (
            "the model must turn [1, ...] into one tensor [1, ...], and the criterion must turn that and its targets "
            "into a number"
        )
        *_, arguments = rebuild(two)
        part = part_of_whole(arguments)
        if part:
            rule = f"the criterion was given all outputs of the model: if it takes one, give it that, as in {part}"
        raise ScenarioError(
            f"the model and the criterion cannot take a batch of one example: {reasons[-1]}; {rule}",
            code="training-loop.batch-of-one",
        )

    def _failure_of(self, way: str, rebuild: Rebuild, tensors: Sequence[Tensor]) -> str:
        """Return why a way does not work on some made-up examples; "" if it does."""
        # An operator with its own vmap rule is handed all examples at once, so vmap would not keep them apart.
        checked = no_custom_vmap_rules() if way == "vmap" else nullcontext()
        try:
            with torch.random.fork_rng(devices=[]), checked:
                self._gradients(way, rebuild, tensors)
        except RAISED_BY_USERS as error:  # the user's forward may raise anything
            return reason(error)
        return ""

    def _check_padding(self, way: str, rebuild: Rebuild, tensors: Sequence[Tensor]) -> None:
        """Refuse a model whose row for padding has a gradient nevertheless, which would be left out of its training.

        Args:
            tensors: made-up examples that are not padding only, for which a model's features may all be zeros.
        """
        padding = padding_rows(self._module)
        if not padding.keys() & self._parameters.keys():
            return

        try:
            with torch.random.fork_rng(devices=[]):
                gradients, _ = self._gradients(way, rebuild, tensors)
        except RAISED_BY_USERS:  # which says nothing of the row
            return

        sizes = [parameter.numel() for parameter in self._parameters.values()]
        for (name, parameter), part in zip(self._parameters.items(), gradients.split(sizes, dim=1), strict=True):
            row = padding.get(name)
            if row is not None and bool(part.reshape(-1, *parameter.shape)[:, row].any()):
                raise ScenarioError(
                    f"row {row} of {name} is for padding, which keeps its numbers in training, but the model computes "
                    "with it beside the embedding: give it to the other layer as its weight, as in self.head.weight = "
                    "self.embedding.weight, and the row is trained; or leave out padding_idx",
                    code="training-loop.padding",
                )

    def _gradients(self, way: str, rebuild: Rebuild, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the gradients [b, d] of some examples and their losses [b], in a given way."""
        examples = len(tensors[0])

        # The caller may be inside `no_grad`.
        with torch.enable_grad():
            if way == "vmap":
                axes = (None, *(0 for _ in tensors))  # parameters are shared, each tensor is mapped over its first axis
                gradient_of_one = grad_and_value(self._loss_of_one(rebuild))
                by_example = vmap(gradient_of_one, axes, randomness="different")
                gradients: Values
                gradients, losses = by_example(self._values(), *tensors)
                columns = [gradients[name].detach().reshape(examples, -1) for name in self._parameters]
                return torch.cat(columns, dim=1), losses.detach()

            rows = []
            values_of_losses = []
            for example in zip(*tensors, strict=True):
                values = {name: value.requires_grad_() for name, value in self._values().items()}
                loss = self._loss_of_one(rebuild)(values, *example)
                parts = torch.autograd.grad(loss, list(values.values()), allow_unused=True, materialize_grads=True)
                dense = [part.to_dense() if part.is_sparse else part for part in parts]
                rows.append(torch.cat([part.reshape(-1) for part in dense]))
                values_of_losses.append(loss.detach())
            return torch.stack(rows), torch.stack(values_of_losses)

    def _values(self) -> Values:
        # Copies, so that a forward that writes to a parameter changes neither the model nor the next example.
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    def _loss_of_one(self, rebuild: Rebuild) -> Callable[..., Tensor]:
        """Return the loss of one example as a function of the parameters.

        It calls fresh copies of model and criterion, which have seen no other example.
        """
        module = fix_norms(copy.deepcopy(self._module))
        criterion = fresh(self._criterion)

        def loss_of_one(values: Values, *example: Tensor) -> Tensor:
            args, kwargs, arguments = rebuild([tensor[None] for tensor in example])  # a batch of one
            with batchable(module):
                outputs = functional_call(module, values, tuple(args), kwargs)

            def of_one(output: Any) -> Tensor:
                if not isinstance(output, Tensor) or output.ndim == 0 or len(output) != 1:
                    shape = type(output).__name__
                    if isinstance(output, Tensor):
                        shape = str(list(output.shape))
                    raise ValueError(f"the model turns one example [1, ...] into {shape}: it must be a tensor [1, ...]")
                return output

            return summed(criterion(*filled(arguments, outputs, of_one)))

        return loss_of_one


def batched(args: Sequence[Any], kwargs: dict[str, Any], arguments: Sequence[Any]) -> tuple[list[Tensor], Rebuild]:
    """Split the arguments of a batch into its tensors and a function that puts them together again.

    The arguments may be nested in lists, tuples and dicts. The first axis of each tensor is the example. Given as many
    other tensors, such as those of one example, the function returns args, kwargs and the criterion's arguments around
    them.
    """
    leaves, spec = tree_flatten((list(args), dict(kwargs), list(arguments)))
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *CONSTANTS)):
            raise ScenarioError(
                f"the model or the criterion is given a {type(leaf).__name__}, which cannot be split into examples: "
                "give tensors [examples, ...], also in lists and dicts",
                code="training-loop.batch",
            )

    if not tensors or any(tensor.ndim == 0 or len(tensor) != len(tensors[0]) for tensor in tensors):
        raise ScenarioError(
            "every tensor given to the model or the criterion must have the shape [examples, ...] with the same number "
            "of examples; keep in the model what all examples share, and move a transpose into it",
            code="training-loop.batch",
        )

    def rebuild(others: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any], list[Any]]:
        replacements = iter(others)
        replaced = [next(replacements) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        rebuilt: tuple[list[Any], dict[str, Any], list[Any]] = tree_unflatten(replaced, spec)
        return rebuilt

    return tensors, rebuild


def without_revealing(what: str, call: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Call a user's code; if it fails, raise an error that reveals nothing of the examples.

    The text of an error on private examples, such as "target 7 is out of bounds", would reveal them to the server. So a
    failed call is repeated with zeros in place of the tensors, and the error of that call is raised instead.

    Args:
        what: the name of the code in an error.
        call: the code.
        arguments: its arguments.

    Raises:
        ScenarioError: it fails on zeros too; the message has the text of that error.
        RunError: it fails only on the examples; the message has only the type of that error.
    """
    failure = ""
    explanation = None
    try:
        return call(*arguments)
    except RAISED_BY_USERS as error:
        failure = type(error).__name__

    # It tells nothing of the examples only if it fails on whatever else there is in their place: on zeros, which are no
    # lengths, and on ones.
    for made_up in reversed(MADE_UP):
        explanation = None
        try:
            call(*tree_map(lambda leaf, made_up=made_up: _replaced(leaf, made_up), list(arguments)))
        except RAISED_BY_USERS as error:
            explanation = reason(error)
        if explanation is None:
            break

    # Not inside an `except` clause: the new error would carry the caught one, with its message, as its context.
    if explanation is not None:
        problem = f"{what} fails on zeros of the batch's shapes too: {explanation}"
        raise ScenarioError(problem, code="training-loop.fails-on-zeros")
    raise withheld(what, failure)


def withheld(what: str, failure: str) -> RunError:
    """Return the error to raise if a user's code failed on private examples; it tells only the type of the failure."""
    return RunError(
        f"{what} raised {failure} on private examples (its message is withheld because it may contain them); try it on "
        "made-up examples of every size and class",
        code="training-loop.withheld",
    )


def ones(tensor: Tensor) -> Tensor:
    """Return ones in the place of whole numbers, which may be lengths or counts, and zeros in that of others."""
    if tensor.is_floating_point():
        return torch.zeros_like(tensor)
    return torch.ones_like(tensor)


MADE_UP: tuple[Callable[[Tensor], Tensor], ...] = (torch.zeros_like, ones)  # in the place of a batch's numbers


def _replaced(leaf: Any, made_up: Callable[[Tensor], Tensor]) -> Any:
    return made_up(leaf) if isinstance(leaf, Tensor) else leaf
