"""A peer's metrics for Prometheus: every one is made when it is asked for, and nothing is counted for it meanwhile.

Names follow the conventions of Prometheus: base units, and an ending for what only grows. Only numbers, and texts from
short lists or of this peer's own, are labels; what others say is in the log and in `privdec status`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from flower_privdec.network.peer.durations import Durations
from flower_privdec.network.peer.telemetry import STARTING, Telemetry

FAILED = "Calls to a neighbour that failed, and were made again."
STATES = (STARTING, "waiting", "training", "mixing", "ending")
Status = Mapping[str, Any]


def exposed(telemetry: Telemetry, accepted: str) -> tuple[bytes, str]:
    """Return a peer's metrics in a format that is accepted, and which that is.

    Args:
        accepted: the header Accept of whoever asks.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(telemetry))
    encode, kind = choose_encoder(accepted)
    content: bytes = encode(registry)
    return content, kind


class _Families(Collector):
    """The metrics of a peer at one moment."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def describe(self) -> Iterable[Metric]:
        """Describe nothing: names depend on the run."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        telemetry = self._telemetry
        status = telemetry.status
        yield from _of_process(telemetry)
        yield _state(status)
        if status is not None:
            yield from _of_run(status)
            yield from _of_privacy(status)
            yield from _of_neighbours(status)
        if telemetry.commits is not None:
            yield from _of_commits(telemetry.commits)


def _of_process(telemetry: Telemetry) -> Iterator[Metric]:
    about = {"version": telemetry.version, "scenario": telemetry.scenario, "peer": str(telemetry.peer)}
    yield InfoMetricFamily("privdec_peer", "Who the peer is.", about)
    yield _gauge("privdec_start_time_seconds", "When the process began, since 1970.", telemetry.began)
    expires = telemetry.expires()
    if expires is not None:
        name = "privdec_certificate_expiry_timestamp_seconds"
        yield _gauge(name, "When the peer's certificate expires, since 1970.", expires)

    lifetime = telemetry.lifetime
    if lifetime is None:
        return
    yield CounterMetricFamily("privdec_starts", "Processes that began in the peer's folder.", lifetime.starts)
    if lifetime.before is not None:
        status = lifetime.before.status
        end = {"reason": lifetime.before.reason, "status": "" if status is None else str(status)}
        yield InfoMetricFamily("privdec_last_exit", "How the process before this one ended.", end)


def _state(status: Status | None) -> Metric:
    if status is None:
        current = STARTING
    elif status["waits_for"]:
        current = "waiting"
    elif status["round"] < status["rounds"]:
        current = "training"
    else:
        current = "mixing"
    if current == "waiting" and status is not None and status["waits_for"] == "its neighbours to end":
        current = "ending"
    is_current = {(name,): float(name == current) for name in STATES}
    return _gauges("privdec_state", "What the peer does.", ["state"], is_current)


def _of_run(status: Status) -> Iterator[Metric]:
    yield _gauge("privdec_round", "Rounds that are done.", status["round"])
    yield _gauge("privdec_planned_rounds", "Rounds of the run.", status["rounds"])
    if status["loss"] is not None:
        name = "privdec_public_loss"
        yield _gauge(name, "Loss on public test examples at the last evaluation, in nats.", status["loss"])
    figures = status.get("figures") or {}
    measured = {(name,): value for name, value in figures.items() if value is not None}
    if measured:
        help_text = "Metrics on public test examples at the last evaluation."
        yield _gauges("privdec_public_metric", help_text, ["metric"], measured)


def _of_privacy(status: Status) -> Iterator[Metric]:
    """Yield ε towards each adversary that the budget names, and what is left towards the one that it is for."""
    adversaries = status.get("adversaries") or {"all": status["epsilon"]}
    spent = {name: float(value) for name, value in adversaries.items()}
    by_adversary = {(name,): value for name, value in spent.items()}
    yield _gauges(
        "privdec_epsilon", "Privacy loss spent so far, over all runs in the ledger.", ["adversary"], by_adversary
    )
    if status["budget"] is None:
        return
    adversary = next(iter(spent))
    budget = float(status["budget"])
    left = max(0.0, budget - spent[adversary])
    yield _gauges("privdec_epsilon_budget", "Privacy loss that is allowed.", ["adversary"], {(adversary,): budget})
    yield _gauges("privdec_epsilon_left", "Budget less what is spent.", ["adversary"], {(adversary,): left})


def _of_neighbours(status: Status) -> Iterator[Metric]:
    neighbours = [str(number) for number in status["neighbours"]]
    down = {str(number) for number in status["down"]}
    unheard = {str(number) for number in status["unheard"]} - down
    counts = {("up",): len(neighbours) - len(down) - len(unheard), ("down",): len(down), ("unheard",): len(unheard)}
    yield _gauges("privdec_neighbours", "Neighbours by what is known of them.", ["state"], counts)
    is_up = {(number,): float(number not in down | unheard) for number in neighbours}
    yield _gauges("privdec_neighbour_up", "Whether a neighbour answers.", ["neighbour"], is_up)

    known = status["known"]
    rounds = {(number,): one["round"] for number, one in known.items() if one["round"] is not None}
    yield _gauges("privdec_neighbour_round", "Round of a neighbour, as far as it reported.", ["neighbour"], rounds)
    awaited = {(number,): float(one["awaited"]) for number, one in known.items()}
    yield _gauges("privdec_neighbour_awaited", "Whether the peer waits and lacks a neighbour.", ["neighbour"], awaited)
    for name, help_text in (("answered", "Calls to a neighbour that were answered."), ("failed", FAILED)):
        calls = CounterMetricFamily(f"privdec_calls_{name}", help_text, labels=["neighbour"])
        for number, one in known.items():
            calls.add_metric([number], one[name])
        yield calls

    suspects = {("quarantined",): len(status["quarantined"]), ("doubted",): len(status["doubted"])}
    yield _gauges("privdec_suspected_neighbours", "Neighbours whose models are wrong, or may be.", ["state"], suspects)
    if "partners" in status:
        partners = {("all",): status["partners"], ("sharing",): status["shares_noise_with"]}
        yield _gauges("privdec_noise_partners", "Peers with whom noise is shared.", ["state"], partners)

    yield CounterMetricFamily("privdec_sent_bytes", "Bytes of calls to neighbours.", status["bytes_sent"])
    yield CounterMetricFamily("privdec_received_bytes", "Bytes of calls of neighbours.", status["bytes_received"])


def _of_commits(commits: Durations) -> Iterator[Metric]:
    counts = list(accumulate(commits.counts))
    bounds = [*map(str, commits.BOUNDS), "+Inf"]
    buckets = [(bound, float(count)) for bound, count in zip(bounds, counts, strict=True)]
    yield HistogramMetricFamily(
        "privdec_commit_seconds", "Time that putting the state on disk took.", buckets=buckets, sum_value=commits.total
    )
    if commits.last >= 0:
        at = time.time() - (time.monotonic() - commits.last)
        yield _gauge("privdec_last_commit_timestamp_seconds", "When the state was last put on disk, since 1970.", at)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value)


def _gauges(name: str, help_text: str, labels: list[str], values: Mapping[Any, float]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=labels)
    for texts, value in values.items():
        family.add_metric(texts, value)
    return family
