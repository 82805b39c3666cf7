"""FedDeper for Flower apps: the strategy, and the client's local steps on two models."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, ClassVar

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from flower_privdec.algorithms.feddeper import FedDeper as FedDeperAlgorithm
from flower_privdec.common.errors import RunError
from flower_privdec.flower.mods.peer_messages import MODEL, sent_arrays
from flower_privdec.flower.strategies.peer_network import log_privacy
from flower_privdec.flower.strategies.push_sum import PushSum
from flower_privdec.graph.participation import Participation
from flower_privdec.graph.topology import Topology
from flower_privdec.scenario.loading import validated
from flower_privdec.training_loop import private
from flower_privdec.training_loop.private_loop import LOADER_OPTIONS

log = logging.getLogger("flwr.privdec")

PERSONAL = "feddeper.personal"  # the name of v's record
PREFIX = "feddeper."  # of each setting's key in the train config
SETTINGS = ("learning_rate", "rho", "mixing_rate", "local_steps")
Parameters = dict[str, Tensor]
Criterion = Callable[..., Tensor]


class FedDeperStrategy(PushSum):
    """Let every peer train a model that is averaged and a personalized one that never leaves it.

        y_i ← τ local steps from z_i and the personalized v_i (`train_two_models`);  then, with what PeerMod sends,
        over a server  x ← x + mean over the active peers of (y_i - x),  z_i = x     (FedDeper, Algorithm 1, line 14)
        over a graph   push-sum of (x_i + w_i (y_i - z_i), w_i),  z_i = x_i / w_i

    The ClientApp is a peer (`PeerMod`), whose train function answers with `train_two_models`. η, ρ, λ and τ travel in
    the train config. Every v_i begins at x^0, however late the peer takes part first, and is part of the peer's state.

    Over a server the ServerApp sends x to the round's peers, as FedAvg does, and learns the mean of their models. If
    they seal, it learns it from masked numbers: a round in which one of them does not answer leaves x as it was, and
    deployed peers refuse a round over other peers (`masking.check_set`). A run of the same name goes on from the mean
    of the last round, or from the model that it began with.

    Args:
        topology: server, or the graph of push-sum.
        learning_rate: η.
        rho: ρ >= 0 of the penalty.
        mixing_rate: λ in [1/2, 1].
        local_steps: τ; half of it is FedDeper*.
        any_mixing_rate: allow λ below 1/2.
        options: those of PushSum; over a server `fraction_train` is the share of peers sampled for a round. Peers count
            alike.

    Raises:
        ScenarioError: a number is out of range, or PushSum refuses an option.

    Privacy: that of `PeerMod`: the update y_i - z_i is clipped as a whole, noised and charged. v_i enters it like the
    peer's data and never leaves. For single examples see `train_two_models`.

    Deviations from the paper: over a server none without privacy; peers count alike. Over a graph z_i takes x's place.

    Source: FedDeper, Algorithm 1.
    """

    local_record: ClassVar[str] = PERSONAL
    weighted: ClassVar[bool] = False

    def __init__(
        self,
        topology: str | Topology = "server",
        *,
        learning_rate: float = 0.01,
        rho: float = 0.003,
        mixing_rate: float = 0.5,
        local_steps: int = 10,
        any_mixing_rate: bool = False,
        **options: Any,
    ) -> None:
        self.settings = {
            "learning_rate": learning_rate,
            "rho": rho,
            "mixing_rate": mixing_rate,
            "local_steps": local_steps,
        }
        # Only to check them: a scenario's section has the same rules.
        validated(FedDeperAlgorithm.Section, {"any_mixing_rate": any_mixing_rate, **self.settings}, "FedDeper")

        super().__init__(topology, **options)
        self._over_server = topology == "server"
        self._model = ArrayRecord()  # x, over a server; set when the first round is known

    def _needs_mean(self) -> bool:
        return self._over_server

    def _first_round(self) -> int:
        """Return the round to go on with; over a server, after restoring x from the peers that took part last."""
        if not self._over_server:
            return super()._first_round()
        last = max(self.reports[peer].round_index for peer in self.network.there)
        if last == 0:
            self._model = self._run.initial
        else:
            self._model = self._restored(last)
        return last + 1

    def _restored(self, last: int) -> ArrayRecord:
        """Return x after the last round: the mean of its peers; if the round had no mean, the x that it began with.

        Raises:
            RunError: no peer that took part in the round can say either.
        """
        peers = [peer for peer in self.network.responsive_peers() if self.reports[peer].round_index == last]
        summed = [peer for peer in peers if not self.reports[peer].idle]
        if self._run.sealed:
            # Ask for the sum of the same peers as before: the difference of two masked sums would show single peers.
            sums_before = [self.reports[peer].mean_of for peer in peers if self.reports[peer].mean_of]
            summed = sums_before[0] if sums_before else peers

        mean, answers = self._delivered_mean(peers, summed, last)
        if mean is not None:
            return mean

        # Each peer of the round still has the x that it was sent.
        for reply in answers.values():
            sent_x = reply.content.array_records.get(MODEL)
            if not sent_x:
                continue
            with suppress(RunError):  # of an answer that cannot be read
                if not self._run.layout.misfit(sent_arrays(sent_x)):
                    log.warning("Round %s has no mean: the model is the one that it began with", last)
                    return sent_x
        raise RunError(
            f"the model after round {last} cannot be restored from peers {peers}, which took part in it: "
            "start all of them, or give the run another name",
            code="feddeper.restore",
        )

    def _disagreement(self, graph: Topology, participation: Participation) -> float:
        if not self._over_server:
            return super()._disagreement(graph, participation)
        return 0.0  # all begin a round at the same x

    def _links(self, round_index: int) -> dict[int, list[tuple[int, float]]]:
        if not self._over_server:
            return super()._links(round_index)
        return {peer: [] for peer in range(self.network.n_peers)}  # no peer sends shares to another

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message for each peer that takes part, with the settings and, over a server, x."""
        config.update({PREFIX + name: value for name, value in self.settings.items()})
        return self._with_model(super().configure_train(server_round, arrays, config, grid))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the mean over the peers that took part, which over a server is x, and the metrics that came."""
        mean, metrics = super().aggregate_train(server_round, replies)
        if self._over_server:
            # A round without a mean leaves x as it was, and is evaluated like any other.
            mean = mean or self._model
            self._model = mean
            self._run.mean_of = server_round
        return mean, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message for each peer that is to evaluate z, over a server x, beside its personalized model."""
        return self._with_model(super().configure_evaluate(server_round, arrays, config, grid))

    def _with_model(self, messages: Iterable[Message]) -> list[Message]:
        sent = list(messages)
        if self._over_server:
            for message in sent:
                message.content[MODEL] = self._model
        return sent

    def _deliver(self) -> ArrayRecord | None:
        if not self._over_server:
            return super()._deliver()
        log_privacy(self.reports)
        return self._model


class TwoModels(nn.Module):
    """A model twice, as y and as v: for a batch [examples, ...] their outputs side by side, [examples, 2, ...].

    So per-example clipping sees an example's two gradients as one vector, and bounds its norm.
    """

    def __init__(self, module: nn.Module, y: Parameters, v: Parameters) -> None:
        super().__init__()
        self.y = copy.deepcopy(module)
        self.v = copy.deepcopy(module)
        self.y.load_state_dict(y)
        self.v.load_state_dict(v)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return both models' outputs."""
        return torch.stack((self.y(*args, **kwargs), self.v(*args, **kwargs)), dim=1)


class TwoModelLoss(nn.Module):
    """The sum of the losses of y and v: its gradient is g(y) in y's parameters, and g(v) in v's."""

    def __init__(self, criterion: Criterion) -> None:
        super().__init__()
        self.criterion = criterion

    def forward(self, outputs: Tensor, *targets: Any) -> Tensor:
        """Return the sum for a batch."""
        return self.criterion(outputs[:, 0], *targets) + self.criterion(outputs[:, 1], *targets)


class TwoModelSGD(Optimizer):
    """FedDeper's local step on the gradients of a TwoModels' parameters.

        y ← y - η g(y) - ρ (v + y - 2 x),   v ← v - η g(v)      (v fixed in y's step)

    Attributes:
        steps: how many were taken.
    """

    def __init__(self, models: TwoModels, learning_rate: float, rho: float) -> None:
        y = list(models.y.parameters())
        v = list(models.v.parameters())
        x = [value.detach().clone() for value in y]  # y begins at x
        super().__init__([*y, *v], {"lr": learning_rate})
        self._triples = list(zip(y, v, x, strict=True))
        self._rho = rho
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        rate = self.param_groups[0]["lr"]
        for y, v, x in self._triples:
            pull = v + y - 2 * x  # before either moves
            for parameter in (y, v):
                if parameter.grad is not None:
                    parameter.sub_(rate * parameter.grad)
            y.sub_(self._rho * pull)
        self.steps += 1


def train_two_models(
    message: Message,
    module: nn.Module,
    criterion: Criterion,
    batches: Iterable[Any],
    *,
    privacy: Mapping[str, Any] | None = None,
    examples: int = 1,
) -> Message:
    """Answer a train message of the strategy FedDeper: τ local steps of y and v, of which v stays with the peer.

        y ← x;  τ times:  y ← y - η g(y) - ρ (v + y - 2 x),  v ← v - η g(v)      (v fixed in y's step)
        v ← (1 - λ) v + λ y

    Args:
        message: to a train function of a ClientApp with PeerMod; it has x and v.
        module: the architecture; its own parameters are not changed. Without buffers.
        criterion: called as criterion(outputs, *targets); returns a batch's mean loss.
        batches: of (inputs, *targets), one per step, from the beginning again when they end; a DataLoader if
            `privacy` is given.
        privacy: for example-level privacy, what `private` takes beside model, optimizer, loader and criterion, such as
            {"ledger": peer_folder() / "examples.jsonl", "epsilon": 8.0, "delta": 1e-5, "rounds": 100}, with the
            rounds of the strategy; its app has an unprotected PeerMod(share_metrics=False).
        examples: reported as the metric num-examples; 1 tells nothing about the peer.

    Returns:
        The reply: ArrayRecords with y and v, and the metric.

    Raises:
        RunError: the message is not FedDeper's, the module does not fit it, or there is no batch.
        BudgetError: the example-level budget is spent.

    Privacy: with `privacy`, unit one example; the pair (g(y), g(v)) of an example is clipped together to C and noised,
    so y and v both are functions of what the ledger charged. Without `privacy` nothing is protected here: see
    `PeerMod`.

    Source: FedDeper, Algorithm 1, lines 5 to 11.
    """
    rate, rho, mixing_rate, local_steps = _settings(message.content)
    steps = int(local_steps)

    # The message has two models. The app names the record of x, so it is the one that is not v's.
    others = [name for name in message.content.array_records if name != PERSONAL]
    key = others[0] if others else PERSONAL
    x = _parameters_in(message, key)
    v = personalized(message)
    _check_module(module, x)

    models = TwoModels(module, x, v)
    optimizer = TwoModelSGD(models, rate, rho)
    forward: Any = models
    loss: Any = TwoModelLoss(criterion)
    if privacy is None:
        local_batches = _repeated(batches, steps)
    else:
        if not isinstance(batches, DataLoader):
            raise RunError(f"batches is a {type(batches).__name__}: with privacy it must be a DataLoader")
        # The optimizer that comes back is the same one, which adds noise from now on.
        forward, _, local_batches, loss = private(models, optimizer, _LocalSteps(batches, steps), loss, **privacy)

    device = next(module.parameters()).device
    for inputs, *targets in local_batches:
        optimizer.zero_grad()
        outputs = forward(inputs.to(device))  # [examples, 2, ...]
        loss(outputs, *(target.to(device) for target in targets)).backward()
        optimizer.step()

    y = dict(models.y.named_parameters())
    v = dict(models.v.named_parameters())
    mixed = {name: torch.lerp(v[name], y[name], mixing_rate) for name in v}  # (1 - λ) v + λ y
    reply = {key: _record(y), PERSONAL: _record(mixed), "metrics": MetricRecord({"num-examples": examples})}
    return Message(RecordDict(reply), reply_to=message)  # type: ignore[arg-type]


def personalized(message: Message) -> Parameters:
    """Return the peer's personalized model as a state dict, from a message to its train or evaluate function.

    Raises:
        RunError: the message has none.
    """
    return _parameters_in(message, PERSONAL)


def _parameters_in(message: Message, name: str) -> Parameters:
    """Return the model in one of a message's records as a state dict."""
    record = message.content.array_records.get(name)
    if record is None:
        raise RunError(
            f"the message has no record {name}: start the strategy FedDeper, and make the ClientApp a peer (PeerMod)",
            code="feddeper.no-models",
        )
    return {key: torch.from_numpy(array.numpy().copy()) for key, array in record.items()}


class _LocalSteps(DataLoader[Any]):
    """A loader over the same data that has as many batches as a round has local steps.

    `private` takes the number of steps from the length of its loader.
    """

    def __init__(self, loader: DataLoader[Any], steps: int) -> None:
        options = {name: getattr(loader, name) for name in (*LOADER_OPTIONS, "collate_fn")}
        super().__init__(loader.dataset, loader.batch_size, **options)
        self._steps = steps

    def __len__(self) -> int:
        return self._steps


def _settings(content: RecordDict) -> tuple[float, ...]:
    """Return the values of SETTINGS, in that order, from whichever config record has them."""
    for config in content.config_records.values():
        if PREFIX + SETTINGS[0] in config:
            return tuple(float(config[PREFIX + name]) for name in SETTINGS)  # type: ignore[arg-type]
    raise RunError(
        "the message has no setting feddeper.learning_rate: send it with the strategy FedDeper",
        code="feddeper.no-settings",
    )


def _check_module(module: nn.Module, x: Parameters) -> None:
    """Refuse a module with buffers, or whose parameters are not those of the message."""
    if next(module.buffers(), None) is not None:
        raise RunError(
            "the module has buffers, as BatchNorm does, which belong to neither model: use GroupNorm",
            code="feddeper.buffers",
        )
    shapes = {name: tuple(value.shape) for name, value in x.items()}
    if shapes != {name: tuple(value.shape) for name, value in module.named_parameters()}:
        raise RunError(
            f"the message's arrays {sorted(shapes)} are not the module's parameters: build the same module",
            code="feddeper.other-module",
        )


def _repeated(batches: Iterable[Any], count: int) -> Iterator[Any]:
    """Yield `count` batches; when they end, begin again."""
    left = count
    while left:
        before = left  # to notice an iterable that is empty, or a generator that cannot begin again
        for batch in islice(batches, left):
            yield batch
            left -= 1
        if left == before:
            raise RunError(
                f"there are no batches for {left} more local steps: give a DataLoader or a list",
                code="feddeper.no-batches",
            )


def _record(parameters: Mapping[str, Tensor]) -> ArrayRecord:
    return ArrayRecord({name: Array(value.detach().cpu().numpy()) for name, value in parameters.items()})
