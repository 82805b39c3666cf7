"""Prove that a module keeps the examples of a batch apart, so that one backward pass can serve a whole batch.

The forward is traced once into a graph of operations, with proxies for its inputs. Three things are checked:

1. every operation has a rule (below);
2. no parameter is used outside the layer it belongs to;
3. for batches of one, two and three examples, the axes are as the rules ask.

Then row i of the output depends only on example i, whatever the examples and the parameters: the rules are about
operations and shapes, never values. From then on the *graph* runs, never the user's forward again, so that nothing it
might do differently another time matters to privacy. That the graph computes what the forward computes is tested on
random inputs, never on private ones.

A value of a traced forward is one of five kinds:

| kind | depends on |
|---|---|
| examples | a tensor with the batch as its first axis, whose row i depends only on example i |
| shared | a tensor that depends on no example, such as a buffer |
| number | neither the examples nor how many they are |
| batch size | how many examples there are; its only use is the first axis of a view |
| sizes | the sizes of a tensor of examples, of which the first is a batch size |

A rule takes the kinds and shapes of an operation's arguments and returns the kind of its result, or raises `Unproved`.
An operation without a rule is unproved.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Node
from torch.nn import functional

from flower_privdec.common.errors import RAISED_BY_USERS, CodedError
from flower_privdec.gradients.factored import is_supported
from flower_privdec.gradients.protocol import is_plain, reason
from flower_privdec.models import fix_norms, trained

BATCHES = (1, 2, 3)
# How the graph is compared with the forward.
_TRIED = 4  # examples
_NOISE = 0.05  # by which parameters are moved
_TOLERANCE = 1e-3  # relative difference of outputs and gradients


def prove(module: nn.Module, input_shape: Sequence[int], n_tokens: int | None = None) -> fx.GraphModule:
    """Return the graph of a module that keeps examples apart, with parameters of the same names.

    Args:
        module: any module; it is not changed.
        input_shape: the input shape of one example.
        n_tokens: inputs are whole numbers 0..n_tokens-1; None if they are real numbers.

    Raises:
        Unproved: the first thing that could not be proved.
    """
    _check_parameters(module)
    for path, part in module.named_modules():
        if not is_plain(part):
            raise Unproved(
                f"{_named(path, part)} has hooks, or a method of its own in place of its class's", code="proof.hooks"
            )
        if isinstance(part, nn.Embedding) and n_tokens is None:
            raise Unproved(f"{_named(path, part)} looks up numbers that are not tokens", code="proof.no-tokens")

    with torch.random.fork_rng(devices=[]):
        graph = _trace(module)
        checkers = [_Checker(graph, batch) for batch in BATCHES]
        for batch, checker in zip(BATCHES, checkers, strict=True):
            checker.run(_random(module, (batch, *input_shape), n_tokens))

        # What holds for each size of the batch must be the same for all.
        for name, fact in checkers[0].facts.items():
            if any(checker.facts[name] != fact for checker in checkers):
                raise Unproved(f"the shape of {name!r} depends on how many examples there are", code="proof.shape")

        _check_outputs(module, graph, input_shape, n_tokens)
    return graph


def _check_parameters(module: nn.Module) -> None:
    """Refuse parameters outside the layers whose gradients can be factored, and parameters that layers share."""
    for path, part in module.named_modules():
        own = [name for name, parameter in part.named_parameters(recurse=False) if parameter.requires_grad]
        if own and not is_supported(part):
            raise Unproved(
                f"{_named(path, part)} has parameters ({', '.join(own)}) and is neither Linear nor Conv2d (groups=1, "
                "padded with zeros) nor Embedding nor GroupNorm, LayerNorm or RMSNorm",
                code="proof.parameters",
            )

    seen: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and id(parameter) in seen:
            raise Unproved(f"{seen[id(parameter)]!r} and {name!r} are the same parameter", code="proof.tied")
        seen[id(parameter)] = name


def _named(path: str, part: nn.Module) -> str:
    """Return a module's class, and its path if it is within another one."""
    name = type(part).__name__
    return f"{name} {path!r}" if path else name


class _Tracer(fx.Tracer):
    """Traces into every module but the layers that have a rule."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in LAYERS


def _trace(module: nn.Module) -> fx.GraphModule:
    try:
        root = fix_norms(copy.deepcopy(module))
        for part in root.modules():
            if getattr(part, "inplace", False):
                vars(part).update(inplace=False)

        # Tracing runs the forward, on proxies. It must leave every buffer as it was: the graph would not change it.
        buffers = [(name, part, dict(part.named_buffers(recurse=False))) for name, part in root.named_modules()]
        traced = _Tracer().trace(root)
        for path, part, before in buffers:
            for name, buffer in before.items():
                if vars(part)["_buffers"].get(name) is not buffer:
                    raise Unproved(
                        f"its forward changes the buffer {f'{path}.{name}'.strip('.')!r}", code="proof.buffer"
                    )
        graph = fx.GraphModule(root, traced)
    except Unproved:
        raise
    except RAISED_BY_USERS as error:  # the user's forward runs here, on proxies: it may raise anything
        raise Unproved(f"its forward cannot be traced ({reason(error)})", code="proof.trace") from None

    if sum(node.op == "placeholder" for node in graph.graph.nodes) != 1:
        raise Unproved("its forward must take one argument", code="proof.arguments")
    if not trained(graph):
        raise Unproved("its forward calls no layer that has trained parameters", code="proof.no-layer")
    return graph


class _Checker(fx.Interpreter):
    """Runs a graph and checks every operation against its rule.

    Attributes:
        facts: the shape of each operation's result for one example, or the number; by name.
    """

    def __init__(self, graph: fx.GraphModule, batch: int) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # it would be added to the message of Unproved
        self.facts: dict[str, Any] = {}
        self._batch = batch
        self._kinds: dict[Node, Kind] = {}
        self._trained = trained(graph)
        self._layers = dict(graph.named_modules())

    def run_node(self, n: Node) -> Any:
        """Run one operation and check it against its rule; raise Unproved if it fails or has no rule."""
        try:
            return self._judged(n)
        except Unproved:
            raise
        except RAISED_BY_USERS as error:
            raise Unproved(f"{self._name(n)} fails on random examples ({reason(error)})", code="proof.fails") from None

    def _judged(self, n: Node) -> Any:
        rule = self._rule(n) if n.op.startswith("call_") else None
        tensors = [value for value in map(self.env.get, n.all_input_nodes) if isinstance(value, Tensor)]
        versions = [tensor._version for tensor in tensors]
        result = super().run_node(n)

        # torch counts a tensor's changes in place.
        if versions != [tensor._version for tensor in tensors]:
            raise Unproved(f"{self._name(n)} changes its input in place", code="proof.in-place")

        kind = self._kind(n, rule, result)
        self._kinds[n] = kind
        if isinstance(result, Tensor):
            sizes = tuple(result.shape)
            self.facts[n.name] = sizes[1:] if kind is Kind.EXAMPLES else sizes
        elif kind is Kind.NUMBER:
            self.facts[n.name] = result
        else:
            self.facts[n.name] = kind
        return result

    def _rule(self, n: Node) -> Rule:
        """Return the rule for a call, before it is made."""
        if n.op == "call_function":
            rule = FUNCTIONS.get(n.target)
        elif n.op == "call_method":
            rule = METHODS.get(str(n.target))
        else:
            rule = LAYERS.get(type(self._layers[str(n.target)]))
        if rule is None:
            raise Unproved(f"{self._name(n)} is not known to keep examples apart", code="proof.unknown")
        return rule

    def _kind(self, n: Node, rule: Rule | None, result: Any) -> Kind:
        if rule is not None:
            args = self._valued(n.args)
            kwargs = {name: self._valued(part) for name, part in n.kwargs.items()}
            layer = self._layers[str(n.target)] if n.op == "call_module" else None
            return judge(rule, Call(self._name(n), args, kwargs, result, layer), self._batch)

        # A parameter, a buffer, the input or the output.
        if n.op == "get_attr" and n.target in self._trained:
            raise Unproved(f"its forward uses the parameter {n.target!r} outside its layer", code="proof.parameter")
        if n.op == "output":
            last = n.args[0]
            if not isinstance(last, Node) or self._kinds[last] is not Kind.EXAMPLES or result.ndim != 2:
                raise Unproved("its forward must return a tensor [batch, outputs]", code="proof.output")
        if n.op == "get_attr":
            return Kind.SHARED
        return Kind.EXAMPLES

    def _valued(self, part: Any) -> Any:
        """Return arguments with a Value in place of every operation."""
        if isinstance(part, Node):
            return Value(self._kinds[part], self.env[part])
        if isinstance(part, tuple | list):
            return tuple(self._valued(item) for item in part)
        if isinstance(part, slice):
            return slice(*(self._valued(item) for item in (part.start, part.stop, part.step)))
        return part

    def _name(self, n: Node) -> str:
        if n.op == "call_module":
            return _named(str(n.target), self._layers[str(n.target)])
        if isinstance(n.target, str):
            return n.target
        return str(getattr(n.target, "__name__", n.target))


def _random(module: nn.Module, shape: Sequence[int], n_tokens: int | None = None) -> Tensor:
    """Return random numbers of the parameters' type, or tokens 0..n_tokens-1."""
    like = next(module.parameters())
    generator = torch.Generator().manual_seed(len(shape))
    if n_tokens is not None:
        return torch.randint(n_tokens, tuple(shape), generator=generator).to(like.device)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(like)


def _check_outputs(module: nn.Module, graph: fx.GraphModule, input_shape: Sequence[int], n_tokens: int | None) -> None:
    """Compare the graph with the forward, near the module's trained parameters; the graph's are changed."""
    twin = fix_norms(copy.deepcopy(module))
    x = _random(module, (_TRIED, *input_shape), n_tokens)
    moved: dict[str, Tensor] = {**trained(twin)}
    with torch.no_grad():
        for parameter in moved.values():
            parameter.add_(_random(module, parameter.shape), alpha=_NOISE)
        for name, parameter in trained(graph).items():
            parameter.copy_(moved[name])

    # Twice, for a forward that draws random numbers or counts its calls.
    try:
        expected = [_results(twin, x, moved) for _ in range(2)]
    except RAISED_BY_USERS as error:  # the user's forward again
        raise Unproved(f"its forward fails on random examples ({reason(error)})", code="proof.fails") from None

    computed = _results(graph, x, moved | dict(trained(graph)))
    pairs = [pair for results in expected for pair in zip(computed, results, strict=True)]
    if not all(bool((value - other).norm() <= _TOLERANCE * other.norm()) for value, other in pairs):
        raise Unproved(
            "its forward and its trace compute different outputs, or it is not deterministic",
            code="proof.outputs-differ",
        )


def _results(module: nn.Module, x: Tensor, parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """Return outputs, and the gradients of their weighted sum."""
    with torch.enable_grad():
        outputs: Tensor = module(x)
        total = (outputs * torch.linspace(1, 2, outputs.numel()).view_as(outputs).to(outputs)).sum()
    gradients = torch.autograd.grad(total, list(parameters.values()), materialize_grads=True, allow_unused=True)
    return [outputs.detach(), *gradients]


class Unproved(CodedError):  # noqa: N818 - it names what a proof lacks; nothing went wrong
    """Why a module could not be proved to keep examples apart, in words that follow "because"."""


class Kind(Enum):
    """What a value of a traced forward depends on."""

    EXAMPLES = "examples"
    SHARED = "shared"
    NUMBER = "number"
    BATCH_SIZE = "batch size"
    SIZES = "sizes"


@dataclass(frozen=True)
class Value:
    """A value of a traced forward, computed for some batch."""

    kind: Kind
    content: Any

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return int(self.content.ndim)


@dataclass(frozen=True)
class Call:
    """One operation: its arguments, with a Value for each that was computed, and its result.

    Attributes:
        name: its name in messages.
        layer: the module that is called; None for functions and methods.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    layer: nn.Module | None = None

    def leaves(self) -> Iterator[Any]:
        """Yield all arguments, including those in lists, tuples and slices."""
        yield from _leaves((self.args, tuple(self.kwargs.values())))

    def refuse(self, what: str, code: str) -> Unproved:
        """Return the reason why this call is not proved."""
        return Unproved(f"{self.name} {what}", code=code)

    def option(self, position: int, *names: str) -> Any:
        """Return the argument at a position or under one of some names; None if it was not given."""
        if len(self.args) > position:
            return self.args[position]
        return next((self.kwargs[name] for name in names if name in self.kwargs), None)

    def first(self, least_axes: int = 1) -> Value:
        """Return the first argument, a tensor of examples, if all others are constants."""
        value, *others = self.leaves()
        if not isinstance(value, Value) or value.kind is not Kind.EXAMPLES or value.ndim < least_axes:
            raise self.refuse(f"needs examples of {least_axes - 1} axes or more as its first argument", "proof.first")
        if any(isinstance(other, Value) and other.kind is not Kind.NUMBER for other in others):
            raise self.refuse("takes more than one tensor, or the size of the batch", "proof.more-tensors")
        return value

    def axes(self, option: Any, count: int) -> tuple[int, ...]:
        """Return the axes of an option, a number or several, counted from 0."""
        several = option
        if not isinstance(option, tuple | list):
            several = (option,)
        if not several or not all(type(axis) is int for axis in several):
            raise self.refuse("names no axes, so it works over the batch too", "proof.no-axes")
        return tuple(axis % count for axis in several)


Rule = Callable[[Call], Kind]


def _leaves(part: Any) -> Iterator[Any]:
    if isinstance(part, tuple | list):
        for item in part:
            yield from _leaves(item)
    elif isinstance(part, slice):
        yield from (part.start, part.stop, part.step)
    else:
        yield part


def judge(rule: Rule, call: Call, batch: int) -> Kind:
    """Return the kind of a call's result for a batch of a size.

    Raises:
        Unproved: the rule does not hold, or the first axis is not the batch's afterwards.
    """
    # Whatever is computed from neither examples nor sizes is as public as these.
    kinds = {value.kind for value in call.leaves() if isinstance(value, Value)}
    if kinds <= {Kind.NUMBER, Kind.SHARED}:
        if isinstance(call.result, Tensor):
            return Kind.SHARED
        return Kind.NUMBER

    kind = rule(call)
    has_batch = isinstance(call.result, Tensor) and call.result.shape[:1] == (batch,)
    if kind is Kind.EXAMPLES and not has_batch:
        raise call.refuse("moves the axis of the batch", "proof.batch-moved")
    return kind


def _elementwise(call: Call) -> Kind:
    """Elementwise: the shape stays."""
    if call.first().content.shape != call.result.shape:
        raise call.refuse("changes the shape", "proof.shape")
    return Kind.EXAMPLES


def _combine(call: Call) -> Kind:
    """Elementwise over several tensors, with axes of length 1 or missing ones broadcast."""
    for value in call.leaves():
        if not isinstance(value, Value) or value.kind is Kind.NUMBER:
            continue
        if value.kind not in (Kind.EXAMPLES, Kind.SHARED):
            raise call.refuse("computes with the size of the batch", "proof.batch-size")
        aligned = value.ndim == call.result.ndim
        if value.kind is Kind.EXAMPLES and not aligned:
            raise call.refuse("lines the batch up with another axis", "proof.aligned")
        if value.kind is Kind.SHARED and aligned and value.content.shape[0] != 1:
            raise call.refuse("treats examples by their place in the batch", "proof.place")
    return Kind.EXAMPLES


def _over_axes(call: Call) -> Kind:
    """Over some axes, none of which is the batch's."""
    value = call.first()
    if 0 in call.axes(call.option(1, "dim", "axis"), value.ndim):
        raise call.refuse("works over the axis of the batch", "proof.over-batch")
    return Kind.EXAMPLES


def _reshape(call: Call) -> Kind:
    """The same numbers in the same order: as long as the first axis is the batch, no number leaves its example."""
    value, *sizes = call.leaves()
    if not isinstance(value, Value) or value.kind is not Kind.EXAMPLES:
        raise call.refuse("needs examples as its first argument", "proof.first")
    for size in sizes:
        if type(size) is not int and getattr(size, "kind", None) not in (Kind.NUMBER, Kind.BATCH_SIZE):
            raise call.refuse("needs sizes as its other arguments", "proof.sizes")
    return Kind.EXAMPLES


def _rearrange(call: Call) -> Kind:
    """The axes in another order: the only axis whose length follows the batch size is the batch's."""
    call.first()
    return Kind.EXAMPLES


def _join(call: Call) -> Kind:
    """Along an axis that is not the batch's."""
    parts = call.args[0] if call.args else None
    if not isinstance(parts, tuple | list) or not all(getattr(part, "kind", None) is Kind.EXAMPLES for part in parts):
        raise call.refuse("joins tensors that are not examples", "proof.joined")
    if 0 in call.axes(call.option(1, "dim", "axis"), call.result.ndim):
        raise call.refuse("works over the axis of the batch", "proof.over-batch")
    return Kind.EXAMPLES


def _product(call: Call) -> Kind:
    """A product of matrices of each example with each other, or with a shared matrix from the right."""
    if len(call.args) != 2 or call.kwargs or not all(isinstance(value, Value) for value in call.args):
        raise call.refuse("is not a product of two tensors", "proof.product")
    left, right = call.args
    if left.kind is not Kind.EXAMPLES or right.kind not in (Kind.EXAMPLES, Kind.SHARED):
        raise call.refuse("is not a product of examples from the left", "proof.product")

    if right.kind is Kind.EXAMPLES:
        apart = left.ndim == right.ndim > 2
    else:
        apart = left.ndim >= 2 >= right.ndim
    if not apart:
        raise call.refuse("multiplies along the axis of the batch", "proof.product")
    return Kind.EXAMPLES


def _image(call: Call) -> Kind:
    """Operations on images [b, C, H, W]; with three axes they would take the batch for the channels."""
    if call.first().ndim != 4:
        raise call.refuse("needs images [batch, channels, height, width]", "proof.images")
    return Kind.EXAMPLES


def _item(call: Call) -> Kind:
    """Parts of every example, or one of a tensor's sizes."""
    value, index = call.args
    if not isinstance(value, Value):
        raise call.refuse("is indexed by a computed number", "proof.index")
    if value.kind is Kind.SIZES:
        return _one_size(call, value.content, index)

    # The first index must take the whole batch: `:`, or `...` that reaches its axis.
    first, *rest = index if isinstance(index, tuple) else (index,)
    call.first()
    used = [part for part in rest if part is not None and part is not Ellipsis]
    if not all(type(part) in (int, slice) for part in used):
        raise call.refuse("is indexed by more than numbers and slices", "proof.index")
    if first != slice(None) and not (first is Ellipsis and len(used) < value.ndim):
        raise call.refuse("selects examples of the batch", "proof.index")
    return Kind.EXAMPLES


def _attribute(call: Call) -> Kind:
    if call.args[1:] != ("shape",):
        raise call.refuse(f"{call.args[1]!r} is not known to keep examples apart", "proof.unknown")
    return Kind.SIZES


def _size(call: Call) -> Kind:
    value = call.args[0]
    axis = call.option(1, "dim")
    if axis is None:
        return Kind.SIZES
    return _one_size(call, value.content.shape, axis)


def _one_size(call: Call, sizes: torch.Size, axis: Any) -> Kind:
    if type(axis) is not int:
        raise call.refuse("reads several sizes at once", "proof.sizes")
    if axis % len(sizes) == 0:
        return Kind.BATCH_SIZE
    return Kind.NUMBER


def _cast(call: Call) -> Kind:
    """The same numbers as another type; of a second tensor only the type is taken."""
    value = call.args[0]
    if not isinstance(value, Value) or value.kind not in (Kind.EXAMPLES, Kind.SHARED):
        raise call.refuse("needs examples as its first argument", "proof.first")
    return Kind(value.kind)


_NAMES: dict[Rule, str] = {
    _elementwise: "relu relu6 tanh sigmoid gelu silu mish elu selu celu leaky_relu softplus softsign logsigmoid "
    "hardtanh hardswish hardsigmoid hardshrink softshrink tanhshrink exp expm1 log log1p sqrt rsqrt square abs neg "
    "reciprocal sin cos erf clamp clip pow clone contiguous",
    _combine: "add sub mul div maximum minimum where gt lt ge le eq ne",
    _over_axes: "mean sum amax amin prod logsumexp softmax log_softmax cumsum std var",
    _reshape: "view reshape flatten unflatten squeeze unsqueeze",
    _rearrange: "transpose swapaxes permute",
    _join: "cat concat stack",
    _product: "matmul bmm",
    _image: "max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d",
    _size: "size",
    _cast: "to type_as float double long",
}
_OPERATORS = "add sub mul truediv floordiv mod gt lt ge le eq ne"
METHODS: dict[str, Rule] = {name: rule for rule, names in _NAMES.items() for name in names.split()}
FUNCTIONS: dict[Any, Rule] = {
    getattr(place, name): rule
    for name, rule in METHODS.items()
    for place in (torch, functional)
    if hasattr(place, name)
} | {
    operator.neg: _elementwise,
    operator.abs: _elementwise,
    operator.pow: _elementwise,
    operator.getitem: _item,
    getattr: _attribute,
    operator.matmul: _product,
    **{getattr(operator, name): _combine for name in _OPERATORS.split()},
}


def _vectors(call: Call) -> Kind:
    call.first(2)
    return Kind.EXAMPLES


def _over_last_axes(call: Call) -> Kind:
    """A norm over the last axes, none of which is the batch's."""
    layer: Any = call.layer
    if call.first().ndim <= len(layer.normalized_shape):
        raise call.refuse("works over the axis of the batch", "proof.over-batch")
    return _elementwise(call)


def _constant_norm(call: Call) -> Kind:
    """A BatchNorm by constants."""
    layer: Any = call.layer
    if layer.training or layer.running_mean is None or call.first().ndim < 2:
        raise call.refuse("works over the axis of the batch", "proof.over-batch")
    return _elementwise(call)


def _look_up(call: Call) -> Kind:
    """A row of a table for each token."""
    layer: Any = call.layer
    if layer.max_norm is not None:
        raise call.refuse("changes its table", "proof.table")
    call.first()
    return Kind.EXAMPLES


def _over_own_axis(call: Call) -> Kind:
    if call.layer is None or 0 in call.axes(call.layer.dim, call.first().ndim):
        raise call.refuse("works over the axis of the batch", "proof.over-batch")
    return Kind.EXAMPLES


def _not_dropped(call: Call) -> Kind:
    if call.layer is None or call.layer.p:
        raise call.refuse("draws random numbers", "proof.random")
    return _elementwise(call)


_ELEMENTWISE = (nn.Identity, nn.ReLU, nn.ReLU6, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.SELU)
_MORE = (nn.CELU, nn.LeakyReLU, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid)
_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
LAYERS: dict[type[nn.Module], Rule] = {
    nn.Linear: _vectors,
    nn.GroupNorm: _vectors,
    nn.Conv2d: _image,
    nn.Flatten: _reshape,
    nn.Embedding: _look_up,
    nn.LayerNorm: _over_last_axes,
    nn.RMSNorm: _over_last_axes,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _constant_norm),
    nn.Softmax: _over_own_axis,
    nn.LogSoftmax: _over_own_axis,
    nn.Dropout: _not_dropped,
    **dict.fromkeys((*_ELEMENTWISE, *_MORE), _elementwise),
    **dict.fromkeys(_POOLS, _image),
}
