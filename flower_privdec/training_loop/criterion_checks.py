"""Tries a training loop's criterion on made-up examples before its first step is paid for.

A criterion that does not add up over examples (`tasks.additivity`) is not what the loop minimises once each example is
alone. How a loop splits a batch into the model's inputs and the criterion's targets is known only once it calls them.
So the usual ways are tried before, on random numbers of the shapes of one item; and if the loop then calls them with
other shapes, these are tried before its first step, which is when the first batch is paid for.
"""

from __future__ import annotations

import copy
import inspect
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from flower_privdec.common.errors import RAISED_BY_USERS, ScenarioError
from flower_privdec.models import fix_norms
from flower_privdec.models.layers.model_outputs import Output, likely_place, tensor_at
from flower_privdec.tasks.additivity import ROWS, SEEDS, SUM_REMEDY, Trial, fresh, refuse, try_criterion
from flower_privdec.training_loop.clipped_sum import Criterion

TARGET_NAMES = ("label", "labels", "target", "targets", "y")  # of a batch's entries, likeliest first
SHAKEN = 0.5  # how far the model's weights are moved in a trial, in units of their usual size

_log = logging.getLogger(__name__)


class CriterionTrial:
    """Tries a criterion once for each kind of arguments, and refuses one that does not add up over examples.

    Privacy: of private examples it uses kinds and shapes only; what it refuses or says depends on nothing else.
    """

    def __init__(self, module: nn.Module, criterion: Criterion) -> None:
        """Look at a criterion; raises ScenarioError if it cannot be copied for each call."""
        fresh(criterion)
        self._module = module
        self._criterion = criterion
        self._trials: list[tuple[Any, Trial]] = []
        self._said = False

    def before_payment(self, loader: DataLoader[Any], collate: Callable[[list[Any]], Any]) -> None:
        """Try the criterion in the usual ways to call it, and refuse it if it adds up in none of those that work.

        Raises:
            ScenarioError: it does not add up.
        """
        try:
            with _unchanged_generators(self._module):
                batch = tree_map(_blank, collate([loader.dataset[0]]))
        except RAISED_BY_USERS:  # which the first batch will raise, without its message
            return

        # An unlikely way counts only if no likely one works at all.
        calls = list(usual_calls(batch, self._module))
        for likely in (True, False):
            refusals = []
            for args, kwargs, targets, is_likely in calls:
                if is_likely == likely:
                    refusals += self._refusals(args, kwargs, targets)
            if None in refusals:
                return
            if refusals:
                raise refusals[0]

    def _refusals(self, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[Any]) -> list[Any]:
        """Return what is wrong with each way to call the criterion that works, None if nothing is.

        Many loops give targets [n] another axis beside outputs [n, 1].
        """
        ways = [targets]
        if targets and isinstance(targets[0], Tensor) and targets[0].ndim == 1:
            ways.append([targets[0][:, None], *targets[1:]])

        refusals: list[ScenarioError | None] = []
        for way in ways:
            try:
                if self.try_call(args, kwargs, [LIKELY, *way]):
                    refusals.append(None)
            except ScenarioError as error:
                refusals.append(error)
        return refusals

    def try_call(self, args: Sequence[Any], kwargs: Mapping[str, Any], arguments: Sequence[Any]) -> bool:
        """Try the criterion on random numbers of the shapes of some arguments; return whether it took several examples.

        Args:
            args, kwargs: the model's.
            arguments: the criterion's, with an `Output` for each of the model's outputs; LIKELY for the likely one.

        Raises:
            ScenarioError: it does not add up.
        """
        kind = _kind((list(args), dict(kwargs), list(arguments)))
        trial = next((trial for tried, trial in self._trials if tried == kind), None)
        if trial is None:
            trial = self._tried_on(args, kwargs, arguments)
            self._trials.append((kind, trial))

        remedy = SUM_REMEDY
        if trial.broadcasts:
            remedy = (
                "the outputs are [examples, 1] and the targets [examples], so that each is compared with each: give "
                "targets[:, None], or let the model return [examples], as by squeeze(-1)"
            )
        refuse(trial, f"the criterion ({name_of(self._criterion)})", remedy=remedy)
        if trial.counts and not self._said:
            self._said = True
            _log.warning(
                "the criterion (%s) is a mean over the positions that count, of a batch by padding or a mask; private "
                "steps take each example's own mean, so that short examples weigh as much as long ones: for equal "
                "weights of positions sum over them and divide by a constant",
                name_of(self._criterion),
            )
        return trial.together

    def _tried_on(self, args: Sequence[Any], kwargs: Mapping[str, Any], arguments: Sequence[Any]) -> Trial:
        """Return what the criterion did; nothing if the model or the criterion cannot be called so."""
        leaves, spec = tree_flatten(list(arguments))
        outputs = []
        with _unchanged_generators(self._module):
            for seed in SEEDS:
                try:
                    returned = _outputs(self._module, args, kwargs, seed)
                except RAISED_BY_USERS:  # which the first call will raise, without private numbers in its message
                    return Trial()

                if any(leaf is LIKELY for leaf in leaves):
                    place = likely_place(returned)
                    if place is None:
                        return Trial()  # which tensor it is given, the first call will tell
                    leaves = [Output(place) if leaf is LIKELY else leaf for leaf in leaves]
                some = [tensor_at(returned, leaf.place) for leaf in leaves if isinstance(leaf, Output)]
                if not all(_is_of_rows(output) for output in some):
                    return Trial()
                outputs.append(some)

            # A trial is of one tensor, so several outputs are put beside each other, and apart again for the criterion.
            targets = [leaf for leaf in leaves if not isinstance(leaf, Output)]
            shapes = [output.shape[1:] for output in outputs[0]]
            is_output = [isinstance(leaf, Output) for leaf in leaves]
            criterion = _OfOneTensor(self._criterion, is_output, spec, shapes)
            joined = [some[0] for some in outputs]
            if len(shapes) > 1:
                joined = [torch.cat([output.reshape(ROWS, -1) for output in some], dim=1) for some in outputs]
            trial = try_criterion(criterion, joined, targets, like=outputs[0][0])

            first = next((leaf for leaf in targets if isinstance(leaf, Tensor)), None)
            trial.broadcasts = shapes == [torch.Size([1])] and first is not None and first.ndim == 1
            return trial


LIKELY = Output(-1)  # the output that a loop most likely gives to its criterion


def _is_of_rows(output: Any) -> bool:
    return isinstance(output, Tensor) and output.is_floating_point() and output.shape[:1] == (ROWS,)


@dataclass(frozen=True)
class _OfOneTensor:
    """A criterion as a function of all outputs that it is given, in one tensor, and of its other arguments.

    Attributes:
        criterion: the user's.
        is_output: of each of its arguments, flat, whether it is an output.
        spec: how they are nested.
        shapes: of each output for one example.
    """

    criterion: Criterion
    is_output: list[bool]
    spec: Any
    shapes: list[torch.Size]

    def __call__(self, outputs: Tensor, *others: Any) -> Any:
        separate = [outputs]
        if len(self.shapes) > 1:
            sizes = [shape.numel() for shape in self.shapes]
            parts = outputs.split(sizes, dim=1)
            separate = [part.reshape(len(outputs), *shape) for part, shape in zip(parts, self.shapes, strict=True)]

        of_outputs = iter(separate)
        of_others = iter(others)
        leaves = [next(of_outputs) if is_output else next(of_others) for is_output in self.is_output]
        return self.criterion(*tree_unflatten(leaves, self.spec))

    def __deepcopy__(self, memo: dict[int, Any]) -> _OfOneTensor:
        return replace(self, criterion=copy.deepcopy(self.criterion, memo))


def by_position(criterion: Criterion, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a call of a criterion by position.

    Raises:
        ScenarioError: one of them can only be given by name, or there is none of such a name.
    """
    if not kwargs:
        return list(args)

    called = criterion.forward if isinstance(criterion, nn.Module) else criterion
    try:
        bound = inspect.signature(called).bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise ScenarioError(
            f"the criterion ({name_of(criterion)}) cannot be called so: {error}", code="training-loop.criterion"
        ) from None
    if bound.kwargs:
        raise ScenarioError(
            f"the criterion ({name_of(criterion)}) is given {', '.join(bound.kwargs)} by name only: let it take all "
            "arguments by position, or fix constants in it, as with functools.partial",
            code="training-loop.criterion",
        )
    return list(bound.args)


def name_of(criterion: Any) -> str:
    """Return the name of a criterion for messages."""
    return getattr(criterion, "__name__", type(criterion).__name__)


Call = tuple[list[Any], dict[str, Any], list[Any], bool]


def usual_calls(batch: Any, module: nn.Module) -> Iterator[Call]:
    """Yield the ways in which loops usually call a model and a criterion for a batch, the likeliest first.

    Each is args and kwargs of the model, the criterion's targets, and whether no other way is likely if this one works.
    """
    if isinstance(batch, list | tuple) and len(batch) == 1:
        (batch,) = batch
    if isinstance(batch, Tensor):  # an autoencoder
        yield [batch], {}, [batch], True
        return

    if isinstance(batch, Mapping):
        names = [name for name in TARGET_NAMES if name in batch]
        others = [name for name in reversed(list(batch)) if name not in names]
        known = _names_of(module)
        for target in (*names, *others):
            inputs = {name: value for name, value in batch.items() if name != target}
            given = {name: value for name, value in inputs.items() if known is None or name in known}
            if given:
                yield [], given, [batch[target]], target in names
            for value in inputs.values():
                yield [value], {}, [batch[target]], target in names
        return

    if not isinstance(batch, list | tuple) or len(batch) < 2:
        return

    # The first entries are the inputs, the others the targets.
    for count in range(1, len(batch)):
        yield list(batch[:count]), {}, list(batch[count:]), True
        if count == 1 and isinstance(batch[0], Mapping):
            yield [], dict(batch[0]), list(batch[1:]), True
    yield [batch[0]], {}, [batch[-1]], False
    yield [batch[0]], {}, [batch[0]], False


def _names_of(module: nn.Module) -> set[str] | None:
    """Return the names of a model's arguments; None if it takes any."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # of what is not written in Python
        return set()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def _outputs(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int) -> Any:
    """Return what a model gives for random inputs, with its weights moved at random except for the first seed.

    Models often begin with outputs that are all alike, for which a criterion may add up by chance.
    """
    generator = torch.Generator().manual_seed(seed)
    moved = fix_norms(copy.deepcopy(module))
    made_up_args, made_up_kwargs = tree_map(lambda leaf: _made_up(leaf, generator), (list(args), dict(kwargs)))
    with torch.no_grad():
        if seed != SEEDS[0]:
            _shake(moved, generator)
        torch.manual_seed(seed)
        return moved(*made_up_args, **made_up_kwargs)


def _shake(module: nn.Module, generator: torch.Generator) -> None:
    """Move a module's weights by SHAKEN of their usual size."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            usual = 1.0
            if parameter.ndim >= 2:
                usual = (len(parameter) / parameter.numel()) ** 0.5  # one over the root of a unit's inputs
            parameter.add_(SHAKEN * usual * torch.randn(parameter.shape, generator=generator).to(parameter))


def _made_up(leaf: Any, generator: torch.Generator) -> Any:
    """Return random numbers of a leaf's shape: of whole numbers only 0 and 1, which every embedding has."""
    if not isinstance(leaf, Tensor):
        return leaf
    shape = (ROWS, *leaf.shape[1:])
    if leaf.is_floating_point():
        return torch.randn(shape, generator=generator).to(leaf)
    return torch.randint(2, shape, generator=generator).to(leaf.device, leaf.dtype)


def _blank(leaf: Any) -> Any:
    """Return zeros of an item's shape, so that none of its numbers is used."""
    return torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf


def _kind(arguments: Any) -> Any:
    """Return what two calls have in common that need one trial: the kinds of their arguments, and their shapes."""
    leaves, spec = tree_flatten(arguments)
    kinds = [(leaf.dtype, leaf.shape[1:]) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return spec, kinds


def check_finite(dataset: Any) -> None:
    """Refuse tensors with NaN or infinity, whose examples would be paid for and add nothing.

    Only datasets of tensors are looked at, for others have to be read item by item.

    Raises:
        ScenarioError: some number is not finite. It says neither which nor how many; whether it is raised depends on
            the data.
    """
    for tensor, rows in _tensors_of(dataset, None):
        if _is_finite(tensor):
            continue
        # Rows are copied only if there is something to look for among them.
        if rows is None or not _is_finite(tensor[rows.to(tensor.device)]):
            raise ScenarioError(
                "the dataset's tensors hold NaN or infinity, and an example whose gradient is not a number would be "
                "paid for and add nothing: put a number there (for a missing value, and a mask beside it), or leave "
                "these examples out, by a Subset",
                code="training-loop.not-finite",
            )


def _is_finite(tensor: Tensor) -> bool:
    if tensor.numel() == 0:
        return True
    ends = torch.stack(torch.aminmax(tensor))  # of which NaN is both, and which takes no copy
    return bool(torch.isfinite(ends).all())


def _tensors_of(dataset: Any, rows: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the tensors of real numbers in a dataset, each with those of its rows that are items; None for all."""
    if type(dataset) is Subset:
        indices = torch.as_tensor(np.asarray(dataset.indices, dtype=np.int64))
        yield from _tensors_of(dataset.dataset, indices if rows is None else indices[rows])
    elif type(dataset) is ConcatDataset and rows is None:
        for part in dataset.datasets:
            yield from _tensors_of(part, None)
    elif type(dataset) is TensorDataset:
        for tensor in dataset.tensors:
            if tensor.is_floating_point():
                yield tensor, rows


@contextmanager
def _unchanged_generators(module: nn.Module) -> Iterator[None]:
    """Leave all generators as they were, whatever the model or the dataset draws."""
    python = random.getstate()
    legacy = np.random.get_state()  # noqa: NPY002
    on_gpu = {parameter.device for parameter in module.parameters() if parameter.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=list(on_gpu)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
