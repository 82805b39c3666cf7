"""The sum of a batch's clipped gradients, each example alone with the user's model and criterion.

Two dangers shape this module. One example could reach another's gradient, so model and criterion only ever see one at a
time, and a fresh copy of each. And what a user's code says when it fails could contain private numbers, so its errors
are replaced (`without_revealing`).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from flower_privdec.common.errors import RAISED_BY_USERS, RunError, ScenarioError
from flower_privdec.gradients.protocol import batchable, beyond, reason, row_chunks, upper
from flower_privdec.models import fix_norms
from flower_privdec.tasks.additivity import fresh
from flower_privdec.tasks.own_losses import no_custom_vmap_rules

WAYS = ("auto", "vmap", "loop")
BOTH = "the model or the criterion, on one example at a time,"
CONSTANTS = (bool, int, float, str, type(None))
Criterion = Callable[..., Tensor]
Values = dict[str, Tensor]
Show = Callable[[Tensor], None]
Rebuild = Callable[[Sequence[Tensor]], tuple[list[Any], dict[str, Any], list[Any]]]

_log = logging.getLogger(__name__)


class ClippedSum:
    """Sums clipped gradients of one model's chosen parameters.

        sum_b g_b min(1, C / |g_b|),    |g_b| its norm or a little more (`gradients.protocol`)

    where g_b is the gradient of criterion(model(x_b), y_b), of example b as a batch of one (Abadi et al. 2016, Alg. 1).
    An example whose gradient is not finite, or beyond `protocol.LARGEST`, counts as zero. Model and criterion never see
    two examples together: `vmap` takes some at a time and lets none reach another, `loop` calls the model on one after
    the other, on a fresh copy of it each time. State in the model and the criterion is discarded; state elsewhere, in
    globals, files or the variables around a function, is not.
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
    ) -> None:
        """Take a model and those of its parameters that are trained, by name.

        Args:
            behind: how many examples at the end of each batch are not added; `show` is called with their gradients,
                clipped and in clip norms, [behind, d].
            way: one of WAYS; `auto` is vmap if the model can be called so, else the loop, which is slow.
            memory_bytes: about how much memory the gradients of single examples may take.
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
        self._ways = WAYS[1:] if way == "auto" else (way,)
        self._way = ""

    def outputs(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the model's outputs for a batch, without a gradient and without a change to the model."""
        with torch.no_grad():
            module = fix_norms(copy.deepcopy(self._module))
            return without_revealing("the model", lambda args, kwargs: module(*args, **kwargs), [args, kwargs])

    def loss(self, outputs: Tensor, targets: Sequence[Any]) -> Tensor:
        """Return the loss of a batch, without a gradient and without a change to the criterion."""
        with torch.no_grad():
            loss: Tensor = without_revealing("the criterion", fresh(self._criterion), [outputs.detach(), *targets])
            return loss

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any], targets: Sequence[Any]) -> tuple[Tensor, int]:
        """Return the sum [d] for a batch, and how many examples it has.

        Args:
            args, kwargs: what the model is called with.
            targets: the criterion's arguments after the model's outputs.

        Raises:
            ScenarioError: the arguments are no batch, or the model or criterion cannot take one example alone.
            RunError: these fail on the examples; their message is withheld, for it may reveal them.
        """
        tensors, rebuild = batched(args, kwargs, targets)
        like = next(iter(self._parameters.values()))
        total = torch.zeros(self.d, dtype=like.dtype, device=like.device)
        examples = len(tensors[0])
        if examples == 0:
            return total, 0

        added = examples - self._behind
        if self._behind:
            gradients = self.gradients(rebuild, [tensor[added:] for tensor in tensors])
            self._show(gradients / upper(gradients).clamp_min(self.clip_norm)[:, None])

        # As many examples at once as fit into memory.
        for part in row_chunks(added, self.d * like.element_size(), self._memory):
            gradients = self.gradients(rebuild, [tensor[part] for tensor in tensors])  # [b, d]
            norms = upper(gradients)
            bad = beyond(norms)
            if bad is not None:
                gradients = gradients.masked_fill(bad[:, None], 0)
                norms = norms.masked_fill(bad, 0)
            total.add_((self.clip_norm / norms).clamp(max=1) @ gradients)
        return total, examples

    def gradients(self, rebuild: Rebuild, tensors: list[Tensor]) -> Tensor:
        """Return the gradients [b, d] of some examples, not clipped; see `batched`."""
        self._way = self._way or self._first_way_that_works(rebuild, tensors)
        rows: Tensor = without_revealing(BOTH, lambda *some: self._gradients(self._way, rebuild, some), tensors)
        return rows

    @property
    def d(self) -> int:
        """Return the number of parameters."""
        return sum(parameter.numel() for parameter in self._parameters.values())

    def _first_way_that_works(self, rebuild: Rebuild, tensors: list[Tensor]) -> str:
        """Return the first way that works on zeros of the examples' shapes, whose errors reveal nothing of the data."""
        zeros = [torch.zeros_like(tensor[:1]).expand(2, *tensor.shape[1:]).clone() for tensor in tensors]
        reasons = []
        for way in self._ways:
            # An operator with a rule of its own for vmap could see examples together.
            checked = no_custom_vmap_rules() if way == "vmap" else nullcontext()
            try:
                with torch.random.fork_rng(devices=[]), checked:
                    self._gradients(way, rebuild, zeros)
            except RAISED_BY_USERS as error:  # the user's forward may raise anything
                reasons.append(reason(error))
                continue
            if reasons:
                _log.warning("the model is called on one example after the other, which is slow: %s", reasons[0])
            return way
        raise ScenarioError(
            f"the model and the criterion cannot take one example alone, as a batch of one: {reasons[-1]}; let the "
            "model turn [1, ...] into one tensor [1, ...], and the criterion that and its targets into a number",
            code="training-loop.batch-of-one",
        )

    def _gradients(self, way: str, rebuild: Rebuild, tensors: Sequence[Tensor]) -> Tensor:
        """Return the gradients [b, d] of some examples."""
        with torch.enable_grad():
            if way == "vmap":
                axes = (None, *(0 for _ in tensors))  # of the parameters none, of each tensor the first
                by_example = vmap(grad(self._value(rebuild)), axes, randomness="different")
                gradients: Values = by_example(self._values(), *tensors)
                columns = [gradients[name].detach().reshape(len(tensors[0]), -1) for name in self._parameters]
                return torch.cat(columns, dim=1)

            rows = []
            for example in zip(*tensors, strict=True):
                values = {name: value.requires_grad_() for name, value in self._values().items()}
                loss = self._value(rebuild)(values, *example)
                parts = torch.autograd.grad(loss, list(values.values()), allow_unused=True, materialize_grads=True)
                dense = [part.to_dense() if part.is_sparse else part for part in parts]
                rows.append(torch.cat([part.reshape(-1) for part in dense]))
            return torch.stack(rows)

    def _values(self) -> Values:
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    def _value(self, rebuild: Rebuild) -> Callable[..., Tensor]:
        """Return the loss of one example as a function of the parameters, by copies that keep nothing of another."""
        module = fix_norms(copy.deepcopy(self._module))
        criterion = fresh(self._criterion)

        def value(values: Values, *example: Tensor) -> Tensor:
            args, kwargs, targets = rebuild([tensor[None] for tensor in example])
            with batchable(module):
                output = functional_call(module, values, tuple(args), kwargs)
            if not isinstance(output, Tensor) or output.ndim == 0 or len(output) != 1:
                shape = type(output).__name__
                if isinstance(output, Tensor):
                    shape = str(list(output.shape))
                raise ValueError(f"one example [1, ...] is turned into {shape}: it must be one tensor [1, ...]")
            loss: Tensor = criterion(output, *targets).sum()
            return loss

        return value


def batched(args: Sequence[Any], kwargs: dict[str, Any], targets: Sequence[Any]) -> tuple[list[Tensor], Rebuild]:
    """Take a batch apart: return its tensors, whose first axis is the example, and a function that puts it together.

    The function takes as many other tensors, such as those of one example, and returns args, kwargs and targets.
    """
    leaves, spec = tree_flatten((list(args), dict(kwargs), list(targets)))
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *CONSTANTS)):
            raise ScenarioError(
                f"the model or the criterion is given a {type(leaf).__name__}, which cannot be split into examples: "
                "give tensors [examples, ...], alone or in lists and dicts",
                code="training-loop.batch",
            )

    if not tensors or any(tensor.ndim == 0 or len(tensor) != len(tensors[0]) for tensor in tensors):
        raise ScenarioError(
            "the model and the criterion must be given tensors [examples, ...] of as many examples each, to be split "
            "into examples; keep what all examples share in the model",
            code="training-loop.batch",
        )

    def rebuild(others: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any], list[Any]]:
        replacements = iter(others)
        # Constants are the same for all examples.
        replaced = [next(replacements) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        rebuilt: tuple[list[Any], dict[str, Any], list[Any]] = tree_unflatten(replaced, spec)
        return rebuilt

    return tensors, rebuild


def without_revealing(what: str, call: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Call a user's code; if it fails, call it again with zeros in place of the tensors, and raise that error instead.

    The text of an error on private examples, such as "target 7 is out of bounds", would reveal them to the server.

    Args:
        what: the code, as an error names it.

    Raises:
        ScenarioError: it fails on zeros too; with that error's text.
        RunError: it fails only on the examples; with the error's type.
    """
    failure = ""
    explanation = None
    try:
        return call(*arguments)
    except RAISED_BY_USERS as error:
        failure = type(error).__name__

    try:
        call(*tree_map(_zeros, list(arguments)))
    except RAISED_BY_USERS as error:
        explanation = reason(error)

    # Outside of `except`: an error raised in it would carry the other one, with its message, along.
    if explanation is not None:
        problem = f"{what} fails on zeros of the batch's shapes too: {explanation}"
        raise ScenarioError(problem, code="training-loop.fails-on-zeros")
    raise withheld(what, failure)


def withheld(what: str, failure: str) -> RunError:
    """Return the error of a user's code that failed on private examples, with nothing but its type."""
    return RunError(
        f"{what} raised {failure} on private examples (its message is withheld, for it may contain them); try it on "
        "made-up ones, of every size and class",
        code="training-loop.withheld",
    )


def _zeros(leaf: Any) -> Any:
    return torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf
