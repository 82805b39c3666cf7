"""Whether a loss adds up over examples: a criterion is tried on made-up outputs and targets before anything is paid.

A private step clips the gradient of each example by itself, so what it minimises is the sum of what the criterion says
of one example at a time. A criterion that is a sum or a mean over examples is that sum. Others are not:

    class weights in a weighted mean     one example divides by its own weight, so that all weights cancel
    Cox, Pearson, contrast in a batch    one example has no gradient, or NaN: each step would be paid for noise

Let A_i be the gradient in example i's outputs if it is alone, and G_i the one in a batch S. The law is

    G_i = c_S A_i    for all i of S, with one factor c_S for all of them,

of which a sum has c_S = 1 and a mean c_S = 1 / |S|. A factor that depends on the batch alone, such as one over the
number of examples that have a label, does not weigh examples against each other and is let pass.

Nor may it keep anything of one example until it is called with the next: a private step would then move by what all
others become. Objects are copied for each call; a function that remembers, in a list or in a variable around it, is
refused.

No number of a private example is used: outputs are those of the model on random inputs, targets are random.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from flower_privdec.common.errors import RAISED_BY_USERS, ScenarioError
from flower_privdec.common.formatting import one_line

ROWS = 7  # made-up examples of a trial; odd, so that no usual number of outputs broadcasts against it
SEEDS = (0, 1, 2)
MOST_CLASSES = 4096  # that are tried beside each other
MOST_ALONE = 128  # of them, if each has to be called for by itself
MOST_NUMBERS = 2**22  # in the outputs of a trial
ROUNDED = 1e-6  # of a batch's gradients, below which one is zero
TOLERANCE = 1e-3  # relative, of gradients in float32; weights that differ by less act as none
NUMBERS = (("chances", "bits"), ("normal", "wide"), ("shares",))  # kinds of targets that are numbers, by trial
WIDEST = 3.0  # power of ten up to which made-up numbers and counts go: a weight may depend on how large a target is
SUM_REMEDY = (
    "give it reduction='sum', for a step divides by the expected batch anyway, or multiply each example's loss by its "
    "weight and take the mean"
)


@dataclass
class Trial:
    """What a criterion did on made-up examples.

    Attributes:
        ran: whether it could be called on any of them alone.
        together: whether it could be called on several.
        alive: whether any example alone had a gradient that is finite and not zero.
        nan: whether any example alone had a gradient that is not finite.
        mixes: whether an example's gradient in a batch has another direction than alone, or one of the two is zero.
        weighs: whether examples of a batch are weighed otherwise than alone.
        counts: the same, only if they hold different numbers of positions, by padding or a mask.
        remembers: whether the same example has another gradient after others.
        reaches: whether it has a gradient of parameters, which it holds beside the outputs that it is given.
        returned: the type of what it returned, if that was not a tensor.
        broadcasts: whether outputs [n, 1] stand beside targets [n].
    """

    ran: bool = False
    together: bool = False
    alive: bool = False
    nan: bool = False
    mixes: bool = False
    weighs: bool = False
    counts: bool = False
    remembers: bool = False
    reaches: bool = False
    returned: str = ""
    broadcasts: bool = False

    def add(self, alone: Tensor, batches: Sequence[tuple[Tensor, Tensor]], tolerance: float, *, ragged: bool) -> None:
        """Compare gradients.

        Args:
            alone: of each example alone, [n, k].
            batches: which examples, [b], and their gradients in a batch of these, [b, k].
            tolerance: relative.
            ragged: the examples differ in how many of their positions count.
        """
        self.ran = True
        finite = torch.isfinite(alone).all(1)
        self.nan |= not bool(finite.all())
        largest = 0.0
        for rows, gradients in batches:
            mixes, weighs = compare(alone[rows], gradients, tolerance)
            self.mixes |= mixes
            self.weighs |= weighs and not ragged
            self.counts |= weighs and ragged
            largest = max(largest, float(torch.nan_to_num(gradients).abs().max()))

        # Differences of equal numbers may be rounded to a little more than zero.
        self.alive |= bool((finite & (alone.abs().amax(1) > ROUNDED * largest)).any())


def compare(alone: Tensor, together: Tensor, tolerance: float) -> tuple[bool, bool]:
    """Return whether a batch mixes its examples, and whether it weighs them against each other.

    Args:
        alone: gradients of each example by itself, [b, k], finite.
        together: their gradients in one batch, [b, k].
        tolerance: relative.
    """
    if not bool(torch.isfinite(together).all()):
        return True, False

    # In units of the largest, for squares of tiny or huge numbers are 0 or infinite.
    alone = alone.double() / alone.abs().max().double().clamp_min(1e-300)
    largest = together.abs().max().double().clamp_min(1e-300)
    together = together.double() / largest

    squares = alone.square().sum(1)
    factors = (alone * together).sum(1) / squares.clamp_min(1e-300)
    rest = (together - factors[:, None] * alone).norm(dim=1)
    if bool((rest > tolerance * together.norm(dim=1).clamp_min(0.01)).any()):
        return True, False

    # Tiny gradients are differences that have few digits, of which a factor would be none.
    factors = factors[squares.sqrt() > TOLERANCE]
    if len(factors) < 2:
        return False, False
    spread = factors.max() - factors.min()
    return False, bool(spread > tolerance * factors.abs().max())


def try_criterion(
    criterion: Callable[..., Any], outputs: Sequence[Tensor], targets: Sequence[Any], like: Tensor | None = None
) -> Trial:
    """Try a criterion, which is called as criterion(outputs, *targets).

    Args:
        outputs: several sets of outputs that a model could give, [n, ...] each, of random inputs.
        targets: the arguments after them, tensors [examples, ...] alone or in lists and dicts, and constants. Only
            their kinds and their shapes are used.
        like: the outputs whose shape tells the number of classes, if `outputs` are more than these.
    """
    trial = Trial()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are about made-up examples
        for seed, random_outputs in zip(SEEDS, outputs, strict=False):
            shaped = like
            if shaped is None:
                shaped = random_outputs
            draw = _Draw(random_outputs, targets, seed, shaped)
            if draw.classes:
                # A criterion that fails on a class takes fewer.
                any(_try(trial, criterion, draw(count=count)) for count in draw.classes)
                if seed == SEEDS[0]:
                    _try(trial, criterion, draw.more_classes())
                if random_outputs[0].numel() == 1:
                    _try(trial, criterion, draw(kind="counts"))
            else:
                for kind in NUMBERS[seed % len(NUMBERS)]:
                    _try(trial, criterion, draw(kind=kind))
            if draw.has_flags:
                _try(trial, criterion, draw(flags="ones"))
            if draw.can_be_ragged:
                _try(trial, criterion, draw(flags="some", ragged=True))
    return trial


@dataclass(frozen=True)
class _Drawn:
    """Made-up examples; `ragged` if they differ in how many of their positions count."""

    outputs: Tensor
    targets: Sequence[Any]
    spec: Any
    ragged: bool


def _try(trial: Trial, criterion: Callable[..., Any], drawn: _Drawn) -> bool:
    """Compare each example alone with several batches; return whether the criterion could be called on them."""
    try:
        alone = _alone(criterion, drawn)
        again = _gradient(criterion, drawn, [0], seed=1)
        trial.reaches |= _reaches(criterion, drawn)
    except NoTensorError as error:
        trial.returned = str(error)
        return False
    except RAISED_BY_USERS:
        return False

    if len(drawn.outputs) <= ROWS:
        # With the same random numbers only what was kept of the calls since can make a difference
        after = _gradient(criterion, drawn, [0])
        # (up to the order of a sum, which a GPU may choose).
        rounded = ROUNDED * float(torch.nan_to_num(after).abs().max())
        trial.remembers |= not torch.allclose(alone[:1], after, rtol=1e-5, atol=rounded, equal_nan=True)

    # Only examples that have a loss: one whose label is ignored is 0 / 0 alone.
    usable = torch.isfinite(alone).all(1).nonzero().flatten().tolist()
    random = not torch.equal(torch.nan_to_num(alone[:1]), torch.nan_to_num(again))
    pairs = [list(pair) for pair in zip(usable[::2], usable[1::2], strict=False)]
    sets = [*pairs[: ROWS // 2], usable] if len(usable) > 1 else []

    batches: list[tuple[Tensor, Tensor]] = []
    with suppress(*RAISED_BY_USERS):  # it takes one example and not several, as what is written for one may
        batches = [(torch.tensor(rows), _gradient(criterion, drawn, rows)) for rows in sets]
    tolerance = max(TOLERANCE, 32 * torch.finfo(drawn.outputs.dtype).eps)
    trial.together |= bool(batches)
    trial.add(alone, [] if random else batches, tolerance, ragged=drawn.ragged)
    return True


def _alone(criterion: Callable[..., Any], drawn: _Drawn) -> Tensor:
    """Return the gradient of each example by itself, [n, k]; of many examples the first ones, unless vmap takes them.

    Raises what the criterion raises.
    """
    n = len(drawn.outputs)
    if n > ROWS:
        copied = fresh(criterion)
        places = [place for place, leaf in enumerate(drawn.targets) if isinstance(leaf, Tensor)]

        def value(outputs: Tensor, *tensors: Tensor) -> Tensor:
            leaves = list(drawn.targets)
            for place, tensor in zip(places, tensors, strict=True):
                leaves[place] = tensor[None]
            return summed(copied(outputs[None] * 1, *tree_unflatten(leaves, drawn.spec)))

        with suppress(*RAISED_BY_USERS), _seeded(drawn.outputs.device, 0):
            tensors = [drawn.targets[place] for place in places]
            gradients: Tensor = vmap(grad(value), randomness="different")(drawn.outputs, *tensors)
            return gradients.detach().reshape(n, -1).cpu()
    return torch.cat([_gradient(criterion, drawn, [row]) for row in range(min(n, MOST_ALONE))])


def fresh(criterion: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a criterion, which takes along what it keeps of a call; a function is itself.

    Raises:
        ScenarioError: it cannot be copied.
    """
    try:
        return copy.deepcopy(criterion)
    except (TypeError, RuntimeError, ValueError) as error:  # of a lock, a file, a tensor that is not a leaf
        raise ScenarioError(
            f"the criterion cannot be copied ({one_line(error)}), and a copy is called for each example, so that "
            "nothing is kept of another: give a function, or an object without open files and locks",
            code="loss.not-copied",
        ) from error


def _gradient(criterion: Callable[..., Any], drawn: _Drawn, rows: list[int], seed: int = 0) -> Tensor:
    """Return the gradient of a batch in its outputs, [rows, k]; zeros if the criterion has none."""
    outputs = drawn.outputs[rows].clone().requires_grad_()
    with torch.enable_grad():
        loss = _loss(criterion, drawn, rows, outputs, seed)
        if not loss.requires_grad:
            return torch.zeros(len(rows), outputs[0].numel())
        (gradient,) = torch.autograd.grad(loss, [outputs], allow_unused=True, materialize_grads=True)
    return gradient.detach().reshape(len(rows), -1).cpu()


def _reaches(criterion: Callable[..., Any], drawn: _Drawn) -> bool:
    """Return whether parameters are among what the loss of one example was computed from."""
    with torch.enable_grad():
        loss = _loss(criterion, drawn, [0], drawn.outputs[[0]], seed=0)

    # The leaves of the graph of the loss, from its end.
    seen = set[Any]()
    ahead = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            return True
        ahead += [function for function, _ in node.next_functions]
    return False


def _loss(criterion: Callable[..., Any], drawn: _Drawn, rows: list[int], outputs: Tensor, seed: int) -> Tensor:
    """Return the loss of some rows' outputs, by a fresh copy of a criterion."""
    leaves = [leaf[rows].clone() if isinstance(leaf, Tensor) else leaf for leaf in drawn.targets]
    targets = tree_unflatten(leaves, drawn.spec)
    copied = fresh(criterion)
    with _seeded(outputs.device, seed), _LabelsInRange():
        # Another tensor than the leaf: a criterion may change its outputs in place.
        return summed(copied(outputs * 1, *targets))


class _LabelsInRange(TorchFunctionMode):
    """Lets a CTC loss fail on a made-up label that its outputs do not have: it is defined for the others only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func in (nn.functional.ctc_loss, torch.ctc_loss):
            given = dict(zip(("log_probs", "targets"), args, strict=False)) | named
            classes = given["log_probs"].shape[-1]
            if int(given["targets"].max()) >= classes:
                raise ValueError(f"a made-up label is beyond the {classes} classes of the outputs")
        return func(*args, **named)


class NoTensorError(TypeError):
    """A criterion returned something else than a tensor; the message is the name of its type."""


def summed(returned: Any) -> Tensor:
    """Return the sum of what a criterion returned; raise NoTensorError if that is no tensor."""
    if not isinstance(returned, Tensor):
        raise NoTensorError(type(returned).__name__)
    return returned.sum()


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Draw the same random numbers each time, and leave the generators as they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


class _Draw:
    """Draws targets of the kinds that a criterion could take.

    The first tensor is taken for the target; others are flags: weights, masks or lengths. Each example has as many
    positions that count as any other, unless `ragged`.

    Attributes:
        classes: how many classes the target could have, the likeliest first; none if it is numbers.
        has_flags: whether there are flags of real numbers that may have to be 1.
        can_be_ragged: whether examples may differ in how many positions count.
    """

    def __init__(self, outputs: Tensor, targets: Sequence[Any], seed: int, like: Tensor) -> None:
        self._outputs = outputs
        self._generator = torch.Generator().manual_seed(seed)
        self._leaves, self._spec = tree_flatten(list(targets))
        places = [place for place, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        self._main = places[0] if places else -1
        tensors = [self._leaves[place] for place in places]

        is_classes = bool(tensors) and not tensors[0].is_floating_point()
        self.classes = class_counts(like) if is_classes else []
        self.has_flags = any(leaf.is_floating_point() for leaf in tensors[1:])
        has_positions = any(leaf.ndim > 1 and leaf[:1].numel() > 1 for leaf in tensors)
        counted = any(not leaf.is_floating_point() for leaf in tensors[1:])
        self.can_be_ragged = counted or (has_positions and (is_classes or len(tensors) > 1))

    def __call__(self, *, count: int = 0, kind: str = "", flags: str = "weights", ragged: bool = False) -> _Drawn:
        """Return examples.

        Args:
            count: of classes; by default the likeliest.
            kind: of numbers; by default chances, or classes if the target has some.
            flags: `weights` draws one for each example, `ones` are all 1, `some` are 0 or 1.
        """
        return self._drawn(self._outputs, count, kind, flags, ragged=ragged)

    def more_classes(self) -> _Drawn:
        """Return one example or more of each class, up to some hundreds, for one may weigh more than all others."""
        count = self.classes[0]
        size = min(count, MOST_CLASSES, MOST_NUMBERS // max(1, self._outputs[0].numel()))
        outputs = blended(self._outputs, max(size, len(self._outputs)), self._generator)
        return self._drawn(outputs, count, "", "weights", ragged=False)

    def _drawn(self, outputs: Tensor, count: int, kind: str, flags: str, *, ragged: bool) -> _Drawn:
        replaced: list[Any] = []
        for place, leaf in enumerate(self._leaves):
            if not isinstance(leaf, Tensor):
                replaced.append(leaf)
                continue
            shape = (len(outputs), *leaf.shape[1:])
            if place != self._main:
                values = self._flags(shape, leaf, flags)
            elif self.classes and not kind:
                values = self._labels(shape, count or self.classes[0], ragged=ragged)
            else:
                values = self._numbers(shape, kind)
            replaced.append(values.to(leaf.device, leaf.dtype))
        return _Drawn(outputs, replaced, self._spec, ragged)

    def _labels(self, shape: tuple[int, ...], count: int, *, ragged: bool) -> Tensor:
        """Return classes, in each example one for all its positions unless they are ragged."""
        if not ragged:
            order = torch.randperm(count, generator=self._generator)
            labels = order[torch.arange(shape[0]) % count]
            return labels.view(-1, *(1,) * (len(shape) - 1)).expand(shape)
        labels = torch.randint(count, shape, generator=self._generator)
        if len(shape) == 1:
            return labels

        # Torch's losses ignore a position of -100. Each example keeps another number of positions.
        place = torch.arange(labels[0].numel()).view(shape[1:])
        counts = 1 + torch.arange(shape[0]).view(-1, *(1,) * (len(shape) - 1))
        return labels.masked_fill(place >= counts, -100)

    def _numbers(self, shape: tuple[int, ...], kind: str) -> Tensor:
        if kind == "bits":
            return torch.randint(2, shape, generator=self._generator)
        if kind in ("", "chances"):
            return torch.rand(shape, generator=self._generator).clamp(0.01, 0.99)
        if kind == "counts":
            return torch.pow(10.0, WIDEST * torch.rand(shape, generator=self._generator)).floor()
        numbers = torch.randn(shape, generator=self._generator)
        if kind == "wide":
            return numbers * torch.pow(10.0, WIDEST * torch.rand(shape, generator=self._generator))
        if kind == "shares" and len(shape) > 1:
            return numbers.softmax(-1)
        return numbers

    def _flags(self, shape: tuple[int, ...], leaf: Tensor, flags: str) -> Tensor:
        positions = math.prod(shape[1:]) > 1
        if flags == "some":
            return torch.randint(2, shape, generator=self._generator)
        if flags == "weights" and leaf.is_floating_point() and not positions:
            return torch.rand(shape, generator=self._generator).add(0.1)
        return torch.ones(shape)


def class_counts(outputs: Tensor) -> list[int]:
    """Return how many classes outputs [n, ...] could be of, the likeliest first."""
    sizes = [outputs.shape[axis] for axis in (1, -1) if outputs.ndim > 1]
    return list(dict.fromkeys([size for size in sizes if size > 1] + [2]))


def blended(outputs: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return more outputs [count, ...], each between two given ones, so that chances stay chances."""
    first = torch.randint(len(outputs), (count,), generator=generator)
    second = torch.randint(len(outputs), (count,), generator=generator)
    share = torch.rand(count, *(1,) * (outputs.ndim - 1), generator=generator).to(outputs)
    return outputs[first.to(outputs.device)] * share + outputs[second.to(outputs.device)] * (1 - share)


def weights_cancel(function: Callable[[Tensor, Tensor], Tensor], outputs: int, classes: int) -> bool:
    """Return whether a loss of one example divides by a weight of its class, by which it multiplied before.

    What is written for one example need not take several, so a batch of two proves something only if the loss is then a
    weighted mean of the two, whose weights follow the classes and nothing else.

    Args:
        function: called on an example's outputs [k] and its class, without axes.
        outputs: k.
        classes: how many there are.
    """
    generator = torch.Generator().manual_seed(0)
    alone = torch.randn(outputs, generator=generator)
    with suppress(*RAISED_BY_USERS), _WeightedMeans() as watch:
        function(alone, torch.zeros((), dtype=torch.int64))
        if watch.cancels:
            return True

    for other in range(1, min(classes, MOST_ALONE)):
        labels = torch.tensor([0, other])
        ratios = []
        for _ in SEEDS:
            pair = torch.randn(2, outputs, generator=generator)
            factors = _factors_of_mean(function, pair, labels)
            if factors is None:
                return False
            ratios.append(factors[0] / factors[1])
        if max(ratios) - min(ratios) > 10 * TOLERANCE * min(ratios):
            return False
        if abs(ratios[0] - 1) > 10 * TOLERANCE:
            return True

    return False


def _factors_of_mean(
    function: Callable[[Tensor, Tensor], Tensor], pair: Tensor, labels: Tensor
) -> tuple[float, float] | None:
    """Return the positive weights, of sum 1, with which two examples enter a loss of both; None if it is not a mean."""
    drawn = _Drawn(pair, [labels], tree_flatten([labels])[1], ragged=False)

    def single(outputs: Tensor, targets: Tensor) -> Tensor:
        return function(outputs[0], targets[0])

    try:
        alone = torch.cat([_gradient(single, drawn, [row]) for row in range(2)]).double()
        if function(pair, labels).ndim:
            return None
        together = _gradient(function, drawn, [0, 1]).double()
    except RAISED_BY_USERS:
        return None

    if not bool(torch.isfinite(alone).all()) or compare(alone, together, TOLERANCE)[0]:
        return None
    first, second = ((alone * together).sum(1) / alone.square().sum(1)).tolist()
    is_mean = first > 0 and second > 0 and abs(first + second - 1) < 10 * TOLERANCE
    return (first, second) if is_mean else None


class _WeightedMeans(TorchDispatchMode):
    """Watches torch's losses of classes for a mean over one target, that divides by the weight of its class."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cancels = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default):
            _, target, weight, reduction = args[:4]
            is_mean = weight is not None and reduction == 1 and target.numel() == 1
            self.cancels |= is_mean and len(set(weight.tolist())) > 1
        return func(*args, **(kwargs or {}))


def refuse(trial: Trial, what: str, *, remedy: str = SUM_REMEDY) -> None:
    """Raise ScenarioError for a criterion that one example at a time cannot stand for, naming what is wrong.

    Args:
        what: the criterion, as an error names it.
        remedy: for weights that cancel.
    """
    if trial.returned and not trial.ran:
        raise ScenarioError(
            f"{what} returns a {trial.returned}: it must return the loss, one tensor, and nothing beside it: return "
            "only the tensor that backward() is called on, not its item(); compute other figures, such as an accuracy, "
            "outside of it, on public examples",
            code="loss.not-a-tensor",
        )

    if trial.remembers:
        raise ScenarioError(
            f"{what} gives the same example another gradient after it was called with others: it keeps something of "
            "each call, or draws random numbers that are not torch's, and private steps take each example alone: "
            "compute the loss from the arguments only, and pass what changes between steps as one of them",
            code="loss.remembers",
        )

    if trial.reaches:
        raise ScenarioError(
            f"{what} computes with parameters beside the outputs that it is given (a penalty on weights, a model that "
            "it calls, or parameters of its own), and private steps follow each example's loss through the model's "
            "outputs only, so that these would stay without effect: for a penalty give the optimizer a weight_decay, "
            "which costs no privacy; let the model compute what else has parameters, as part of its outputs",
            code="loss.parameters",
        )

    if trial.ran and not trial.alive:
        wrong = "is not a number" if trial.nan else "is zero"
        raise ScenarioError(
            f"{what} {wrong} in its gradient for each example alone (a rank, a correlation or a contrast between the "
            "examples of a batch, or a count of errors?), so that every step would be noise and be paid for: give a "
            "loss that one example has by itself",
            code="loss.no-gradient",
        )

    if trial.mixes:
        raise ScenarioError(
            f"{what} does not add up over examples: in a batch the gradient of one depends on the others (a norm, a "
            "mean or a rank of the batch?), and private steps take each alone: give a sum or a mean over examples of a "
            "loss that each has by itself",
            code="loss.not-additive",
        )

    if trial.weighs:
        raise ScenarioError(
            f"{what} does not add up over examples: in a batch it weighs them against each other, and one alone has no "
            "weight (class weights that a weighted mean divides by cancel; or a maximum, a root, or outputs [n, 1] "
            f"beside targets [n]): {remedy}",
            code="loss.not-additive",
        )
