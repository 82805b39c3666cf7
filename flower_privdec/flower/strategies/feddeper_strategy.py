"""FedDeper for a plain Flower app: a strategy, and the client's two-model local steps around its own loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn
from torch.func import functional_call

from flower_privdec.errors import RunError
from flower_privdec.scenario.algorithm_sections import FedDeperSection
from flower_privdec.scenario.loading import validated

PERSONAL, START, PREFIX = "feddeper.personal", "feddeper.start", "feddeper."
NAMES = ("learning_rate", "rho", "mixing_rate", "local_steps")
Parameters = dict[str, Tensor]
LossFunction = Callable[[Callable[..., Tensor], Any], Tensor]


class FedDeperStrategy(FedAvg):
    """Average what the clients' depersonalized models moved by, and add it to the global model.

        x ← x + mean over the sampled clients of (y - x)                          (FedDeper, Algorithm 1, line 14)

    The clients answer with `train_two_models`. η, ρ, λ and τ travel in the train config: they are set here alone. With
    its first message a client is sent x^0 beside x, for its v begins there, however late it is sampled first.

    Args:
        learning_rate: η.
        rho: ρ >= 0 of the penalty.
        mixing_rate: λ in [1/2, 1].
        local_steps: τ; half of it is FedDeper*.
        any_mixing_rate: allow λ below 1/2.
        options: of Flower's FedAvg: fraction_train, min_train_nodes, min_available_nodes and so on.

    Raises:
        ScenarioError: a number out of its range.

    Privacy: none. The algorithm `feddeper` of a scenario has clipping, noise and a ledger.

    Deviations from the paper: none; clients count alike, whatever weighted_by_key says, which is for metrics.

    Source: FedDeper, Algorithm 1.
    """

    def __init__(
        self,
        *,
        learning_rate: float = 0.01,
        rho: float = 0.003,
        mixing_rate: float = 0.5,
        local_steps: int = 10,
        any_mixing_rate: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        given = dict(zip(NAMES, (learning_rate, rho, mixing_rate, local_steps), strict=True))
        data = {"name": "feddeper", "any_mixing_rate": any_mixing_rate, **given}
        validated(FedDeperSection, data, type(self).__name__)
        self.settings = given
        self._global: Parameters = {}
        self._start: ArrayRecord | None = None
        self._met: set[int] = set()  # the nodes that have a personalized model

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send x and the settings to the sampled clients, and x^0 to those that are new."""
        self._global, self._start = _tensors(arrays), self._start or arrays
        for name, value in self.settings.items():
            config[PREFIX + name] = value
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for message in messages:
            if message.metadata.dst_node_id not in self._met:
                message.content = RecordDict({**message.content, START: self._start})
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return x plus the clients' mean change, and their metrics; None where no client answered."""
        valid, failed = self._check_and_log_replies(replies, is_train=True)
        self._met |= {message.metadata.src_node_id for message in valid}
        self._met -= {message.metadata.src_node_id for message in failed}
        if not valid:
            return None, None
        contents = [message.content for message in valid]
        changes = [_tensors(next(iter(content.array_records.values()))) for content in contents]
        moved = {name: x + sum(change[name] for change in changes) / len(changes) for name, x in self._global.items()}
        return _record(moved), self.train_metrics_aggr_fn(contents, self.weighted_by_key)


def train_two_models(
    message: Message,
    context: Context,
    module: nn.Module,
    loss: LossFunction,
    batches: Iterable[Any],
    *,
    examples: int = 1,
) -> Message:
    """Answer a train message: τ local steps of y and v, of which y - x is sent and v stays in the context.

        y ← x;  τ times:  y ← y - η g(y) - ρ (v + y - 2 x),  v ← v - η g(v)      (v fixed in y's step)
        v ← (1 - λ) v + λ y

    v begins at x^0, which comes with a client's first message.

    Args:
        message: from the strategy `FedDeperStrategy`.
        context: of the client; keeps v under "feddeper.personal".
        module: the architecture; its own parameters are not changed. Without buffers.
        loss: takes a model to call and a batch, and returns the batch's mean loss.
        batches: one a step, begun anew when it ends (a DataLoader, or any iterable).
        examples: what the metric num-examples says; 1 tells nothing about the client.

    Returns:
        The reply: an ArrayRecord with y - x, and the metric.

    Raises:
        RunError: the message is not FedDeper's, the module does not fit it, there is no batch, or v is lost.

    Source: FedDeper, Algorithm 1, lines 5 to 11.
    """
    key, record = next((key, record) for key, record in message.content.array_records.items() if key != START)
    rate, rho, mixing_rate, steps = _settings(message.content)
    x = _fitting(_tensors(record), module)
    kept = context.state.array_records.get(PERSONAL) or message.content.array_records.get(START)
    if kept is None:
        raise RunError("the personalized model is lost, and the message has no x^0: the next one will bring it")
    y, v = dict(x), _fitting(_tensors(kept), module)
    for batch in _repeated(batches, int(steps)):
        g_y, g_v = (_gradient(module, parameters, loss, batch) for parameters in (y, v))
        y = {name: y[name] - rate * g_y[name] - rho * (v[name] + y[name] - 2 * x[name]) for name in x}
        v = {name: v[name] - rate * g_v[name] for name in x}
    context.state[PERSONAL] = _record({name: torch.lerp(v[name], y[name], mixing_rate) for name in x})
    reply = {key: _record({name: y[name] - x[name] for name in x}), "metrics": MetricRecord({"num-examples": examples})}
    return Message(RecordDict(reply), reply_to=message)  # type: ignore[arg-type]


def personalized(context: Context) -> Parameters | None:
    """Return the client's personalized model, as a state dict, or None before it has trained."""
    kept = context.state.array_records.get(PERSONAL)
    return None if kept is None else _tensors(kept)


def _settings(content: RecordDict) -> tuple[float, ...]:
    for config in content.config_records.values():
        if PREFIX + NAMES[0] in config:
            return tuple(float(config[PREFIX + name]) for name in NAMES)  # type: ignore[arg-type]
    raise RunError("the message has no setting feddeper.learning_rate: send it with the strategy FedDeperStrategy")


def _fitting(parameters: Parameters, module: nn.Module) -> Parameters:
    """Return parameters on the module's device; refuse what is not the module's."""
    if next(module.buffers(), None) is not None:
        raise RunError("the module has buffers, as BatchNorm does, which belong to neither model: use GroupNorm")
    own = dict(module.named_parameters())
    shapes = {name: tuple(value.shape) for name, value in parameters.items()}
    if shapes != {name: tuple(value.shape) for name, value in own.items()}:
        raise RunError(f"the message's arrays {sorted(shapes)} are not the module's parameters: build the same module")
    return {name: value.to(own[name].device) for name, value in parameters.items()}


def _gradient(module: nn.Module, parameters: Parameters, loss: LossFunction, batch: Any) -> Parameters:
    leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}

    def model(*args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = functional_call(module, leaves, args, kwargs)
        return output

    found = torch.autograd.grad(loss(model, batch), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def _repeated(batches: Iterable[Any], count: int) -> Iterator[Any]:
    """Yield so many batches, from the beginning again where they end."""
    left = count
    while left:
        before = left
        for batch in batches:
            yield batch
            left -= 1
            if not left:
                return
        if left == before:
            raise RunError(f"there are no batches for {left} more local steps: give a DataLoader or a list")


def _tensors(record: ArrayRecord) -> Parameters:
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}


def _record(parameters: Parameters) -> ArrayRecord:
    return ArrayRecord({name: Array(value.detach().cpu().numpy()) for name, value in parameters.items()})
