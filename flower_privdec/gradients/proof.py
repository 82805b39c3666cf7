"""Prove that a module keeps the examples of a batch apart, so that one backward pass can serve a whole batch.

The forward is traced once into a graph of operations, with proxies for its inputs. Where every operation is one of
`operations`, where no parameter is used outside the layer it belongs to, and where the axes are as the rules ask for
batches of one, two and three examples, row i of the output depends on example i alone, whatever the examples and the
parameters: the rules are about operations and shapes, never values. The *graph* then runs, never the user's
forward again, so that nothing it might do differently another time matters to privacy. That the graph computes what
the forward computes is tested on random inputs, never on private ones.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Node

from flower_privdec.errors import RAISED_BY_USERS
from flower_privdec.gradients.layers import is_supported
from flower_privdec.gradients.operations import FUNCTIONS, LAYERS, METHODS, Call, Kind, Rule, Unproved, Value, judge
from flower_privdec.gradients.protocol import is_plain, reason

BATCHES = (1, 2, 3)
_TRIED, _NOISE, _TOLERANCE = 4, 0.05, 1e-3  # examples, change of the parameters, relative difference of outputs


def prove(module: nn.Module, input_shape: Sequence[int]) -> fx.GraphModule:
    """Return the graph of a module that keeps examples apart, with parameters of the same names.

    Args:
        module: any module; it is not changed.
        input_shape: of one example.

    Raises:
        Unproved: the first thing that could not be proved.
    """
    _check_parameters(module)
    for path, part in module.named_modules():
        if not is_plain(part):
            raise Unproved(f"{_named(path, part)} has hooks, or a method of its own in place of its class's")
    with torch.random.fork_rng(devices=[]):
        graph = _trace(module)
        checkers = [_Checker(graph, batch) for batch in BATCHES]
        for batch, checker in zip(BATCHES, checkers, strict=True):
            checker.run(_random(module, (batch, *input_shape)))
        for name, fact in checkers[0].facts.items():
            if any(checker.facts[name] != fact for checker in checkers):
                raise Unproved(f"the shape of {name!r} depends on how many examples there are")
        _check_outputs(module, graph, input_shape)
    return graph


def _check_parameters(module: nn.Module) -> None:
    """Refuse parameters outside the layers whose gradients can be factored, and parameters that layers share."""
    for path, part in module.named_modules():
        own = [name for name, _ in part.named_parameters(recurse=False)]
        if own and not is_supported(part):
            raise Unproved(
                f"{_named(path, part)} has parameters ({', '.join(own)}) and is neither Linear nor Conv2d (groups=1, "
                "padded with zeros) nor GroupNorm"
            )
    seen: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            raise Unproved(f"{seen[id(parameter)]!r} and {name!r} are the same parameter")
        seen[id(parameter)] = name


def _named(path: str, part: nn.Module) -> str:
    return f"{type(part).__name__} {path!r}" if path else type(part).__name__


class _Tracer(fx.Tracer):
    """Traces into every module but the layers that have a rule in `operations`."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in LAYERS


def _trace(module: nn.Module) -> fx.GraphModule:
    try:
        root = copy.deepcopy(module)
        for part in root.modules():
            if getattr(part, "inplace", False):
                vars(part).update(inplace=False)
        graph = fx.GraphModule(root, _Tracer().trace(root))
    except RAISED_BY_USERS as error:  # the user's forward runs here, on proxies: it may raise anything
        raise Unproved(f"its forward cannot be traced ({reason(error)})") from None
    if sum(node.op == "placeholder" for node in graph.graph.nodes) != 1:
        raise Unproved("its forward must take one argument")
    if not list(graph.parameters()):
        raise Unproved("its forward calls no layer that has parameters")
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
        self._buffers = dict(graph.named_buffers())
        self._layers = dict(graph.named_modules())

    def run_node(self, n: Node) -> Any:
        """Run one operation and check it against its rule; one that fails or has no rule is not proved."""
        try:
            return self._judged(n)
        except Unproved:
            raise
        except RAISED_BY_USERS as error:
            raise Unproved(f"{self._name(n)} fails on random examples ({reason(error)})") from None

    def _judged(self, n: Node) -> Any:
        rule = self._rule(n) if n.op.startswith("call_") else None
        tensors = [value for value in map(self.env.get, n.all_input_nodes) if isinstance(value, Tensor)]
        versions = [tensor._version for tensor in tensors]
        result = super().run_node(n)
        if versions != [tensor._version for tensor in tensors]:
            raise Unproved(f"{self._name(n)} changes its input in place")
        self._kinds[n] = kind = self._kind(n, rule, result)
        self.facts[n.name] = _fact(kind, result)
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
            raise Unproved(f"{self._name(n)} is not known to keep examples apart")
        return rule

    def _kind(self, n: Node, rule: Rule | None, result: Any) -> Kind:
        if rule is not None:
            args, kwargs = self._valued(n.args), {name: self._valued(part) for name, part in n.kwargs.items()}
            layer = self._layers[str(n.target)] if n.op == "call_module" else None
            return judge(rule, Call(self._name(n), args, kwargs, result, layer), self._batch)
        if n.op == "get_attr" and n.target not in self._buffers:
            raise Unproved(f"its forward uses the parameter {n.target!r} outside its layer")
        if n.op == "output":
            last = n.args[0]
            if not isinstance(last, Node) or self._kinds[last] is not Kind.EXAMPLES or result.ndim != 2:
                raise Unproved("its forward must return a tensor [batch, outputs]")
        return Kind.SHARED if n.op == "get_attr" else Kind.EXAMPLES

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
        return str(n.target) if isinstance(n.target, str) else str(getattr(n.target, "__name__", n.target))


def _fact(kind: Kind, result: Any) -> Any:
    if isinstance(result, Tensor):
        return tuple(result.shape[kind is Kind.EXAMPLES :])
    return result if kind is Kind.NUMBER else kind


def _random(module: nn.Module, shape: Sequence[int]) -> Tensor:
    like = next(module.parameters())
    values = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)
    return values.to(like)


def _check_outputs(module: nn.Module, graph: fx.GraphModule, input_shape: Sequence[int]) -> None:
    """Compare the graph with the forward, near the module's parameters; the graph's parameters are changed."""
    twin, x = copy.deepcopy(module), _random(module, (_TRIED, *input_shape))
    moved = dict(twin.named_parameters())
    with torch.no_grad():
        for parameter in moved.values():
            parameter.add_(_random(module, parameter.shape), alpha=_NOISE)
        for name, parameter in graph.named_parameters():
            parameter.copy_(moved[name])
    try:
        expected = [_results(twin, x, moved) for _ in range(2)]
    except RAISED_BY_USERS as error:  # the user's forward again
        raise Unproved(f"its forward fails on random examples ({reason(error)})") from None
    computed = _results(graph, x, moved | dict(graph.named_parameters()))
    pairs = [pair for results in expected for pair in zip(computed, results, strict=True)]
    if not all(bool((value - other).norm() <= _TOLERANCE * other.norm()) for value, other in pairs):
        raise Unproved("its forward and its trace compute different outputs, or it is not deterministic")


def _results(module: nn.Module, x: Tensor, parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """Return outputs, and the gradients of their weighted sum."""
    with torch.enable_grad():
        outputs: Tensor = module(x)
        total = (outputs * torch.linspace(1, 2, outputs.numel()).view_as(outputs).to(outputs)).sum()
    gradients = torch.autograd.grad(total, list(parameters.values()), materialize_grads=True, allow_unused=True)
    return [outputs.detach(), *gradients]
