"""What is known of a network's peers at one moment, from what they answer and from what a run's folder holds.

No I/O: `asker.py` tells it what came, and `page_server.py` asks for `state`, which a browser shows.

Each peer is in one of these states, and each edge, which stands for both directions, in one of the second list:

| peer | when |
|---|---|
| unknown | nothing has been heard of it yet |
| starting | its process runs, and does not answer yet |
| up | it answers |
| waiting | it answers, and waits |
| silent | it has answered before, and does not now |
| gone | its process ended, with an error or killed |
| done | it ended well |
| left | it left for good or was shut out, by the list of members, and does not answer |

| edge | when |
|---|---|
| up | an end that answers has the other one up |
| down | an end that answers cannot reach the other one, or an end is gone |
| refused | an end has quarantined the other one |
| done | an end is done, or left |
| unknown | no end that answers has heard of the other |

What peers say is not trusted: a member may lie, and its text is somebody else's. Numbers are checked and texts are cut
before they are kept; the page shows them as text. What is kept does not grow: events and points are bounded.

So a member that lies shows wrong figures of itself and its own edges. What is shown of all is not one peer's to choose:
the round of the curve and its line are medians, the metric is the one that most peers report, and when there are too
many events, whoever caused the most of them loses one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from statistics import median, median_low
from threading import RLock
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from flower_privdec.common.errors import RunError
from flower_privdec.common.formatting import one_line, printable
from flower_privdec.network.peer.lifetime import DONE, KILLED, End
from flower_privdec.pushsum.membership import Members, shut_out

MOST_EVENTS = 300
DOWN_SECONDS = 3.0  # that an edge is down until that is an event: a call that fails is made again at once
MOST_POINTS = 600  # of a curve; beyond it every second one is dropped
MOST_DRAWN = 150  # peers whose graph is drawn
MOST_TEXT = 300
MOST_COUNT = 2**53  # beyond it a browser has no exact whole numbers
MOST_SIZE = 1e300  # of a number: a curve's span of two of them is finite

Text = Annotated[str, AfterValidator(lambda text: printable(text[:MOST_TEXT]))]
Count = Annotated[int, Field(ge=0, le=MOST_COUNT)]
Number = Annotated[float, Field(ge=-MOST_SIZE, le=MOST_SIZE)]
Named = Annotated[dict[Text, Text], Field(max_length=2000)]
Epsilon = Number | Annotated[str, Field(pattern="^inf$")]


class KnownNeighbour(BaseModel):
    """What a peer says of a neighbour."""

    round: Count | None = None
    failed: Count = 0
    awaited: bool = False


class ListHeight(BaseModel):
    """How many entries of the list of members a peer has."""

    entries: Count = 0


class Report(BaseModel):
    """A peer's status as it is believed: what does not fit is refused, what is not shown is left out."""

    model_config = ConfigDict(extra="ignore")

    peer: Count
    round: Count
    rounds: Count
    waits_for: Text = ""
    neighbours: Annotated[list[Count], Field(max_length=10_000)] = []
    down: Named = {}
    unheard: Annotated[list[Count], Field(max_length=10_000)] = []
    quarantined: Named = {}
    doubted: Named = {}
    known: Annotated[dict[Text, KnownNeighbour], Field(max_length=10_000)] = {}
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    loss: Number | None = None
    figures: Annotated[dict[Text, Number | None], Field(max_length=20)] = {}
    epsilon: Epsilon | None = None
    budget: Number | None = None
    adversaries: Annotated[dict[Text, Epsilon], Field(max_length=10)] = {}
    bytes_sent: Count = 0
    bytes_received: Count = 0
    noise: Text = ""
    idle: Text | None = None
    members: ListHeight = ListHeight()


def report_of(status: Mapping[str, Any], peer: int, n_peers: int) -> Report:
    """Return a status as it is believed, without what it says of peers that there are not.

    Raises:
        RunError: it is none, or another peer's.
    """
    try:
        report = Report.model_validate(status)
    except (ValidationError, RecursionError) as error:
        raise RunError(f"it answers what is no status ({one_line(error)})", code="watch.no-status") from error
    if report.peer != peer:
        raise RunError(f"it says that it is peer {report.peer}", code="watch.another-peer")

    numbers = {str(number) for number in range(n_peers)}
    of_peers = {
        name: {number: value for number, value in getattr(report, name).items() if number in numbers}
        for name in ("down", "quarantined", "doubted", "known")
    }
    listed = {
        name: [number for number in dict.fromkeys(getattr(report, name)) if number < n_peers]
        for name in ("neighbours", "unheard")
    }
    return report.model_copy(update={**of_peers, **listed})


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def locked(
    method: Callable[Concatenate[Board, Arguments], Result],
) -> Callable[Concatenate[Board, Arguments], Result]:
    """Let one thread at a time call a method of a board."""

    @wraps(method)
    def call(board: Board, /, *arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        with board._lock:
            return method(board, *arguments, **options)

    return call


@dataclass
class _Peer:
    """What is known of one peer.

    Attributes:
        report: its last one; None before the first.
        answered_at: the moment of that, by the clock of the board; None if the last question had no answer.
        why: why it does not answer; "" if it does.
        runs: whether a process of it runs, as far as that can be known here.
        end: how its process ended; None if it runs, or nobody knows.
        starts: how many processes it has had, as far as its folder says.
        left: why it takes part no more, by the list of members; "" if it does.
    """

    report: Report | None = None
    answered_at: float | None = None
    is_up: bool = False
    why: str = ""
    runs: bool = False
    end: End | None = None
    starts: int | None = None
    left: str = ""

    @property
    def state(self) -> str:
        if self.is_up and self.report is not None:
            return "waiting" if self.report.waits_for else "up"
        if self.left:
            return "left"
        if self.end is not None:
            return "done" if self.end.reason == DONE else "gone"
        if self.report is not None:
            return "silent"
        return "starting" if self.runs else "unknown"


@dataclass(frozen=True)
class _Event:
    """What happened, and which peer's answer, or process, it follows from; None for nobody's."""

    cause: int | None
    what: dict[str, Any]


@dataclass
class Board:
    """What is known of the peers of one run.

    Attributes:
        name: of the run.
        n_peers: how many peers it ever had; it grows if some join.
        where: what is watched, for the page's head.
        is_deployed: whether peers are asked on their devices, so that their models are nowhere at hand.
        metric: what the curve of the models' quality shows; "" before anything was measured.
    """

    name: str
    n_peers: int
    where: str
    edges: Iterable[tuple[int, int]] = ()
    metric: str = ""
    finished: str = ""
    is_deployed: bool = False
    _peers: list[_Peer] = field(init=False)
    _edges_of: list[set[tuple[int, int]]] = field(init=False)
    _edge_states: dict[tuple[int, int], str] = field(default_factory=dict, init=False)
    _events: list[_Event] = field(default_factory=list, init=False)
    _n_events: int = field(default=0, init=False)
    _tried: dict[str, int] | None = field(default=None, init=False)
    _quality: list[dict[str, Any]] = field(default_factory=list, init=False)
    _consensus: list[dict[str, Any]] = field(default_factory=list, init=False)
    _has_records: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._lock = RLock()  # it is told in one thread and asked in another
        self._peers = [_Peer() for _ in range(self.n_peers)]
        self._edges_of = [set() for _ in range(self.n_peers)]
        self._down_since: dict[tuple[int, int], float] = {}
        self._said_down = set[tuple[int, int]]()
        for i, j in self.edges:
            self._add_edge(i, j)

    def _add_edge(self, i: int, j: int) -> None:
        if i != j and max(i, j) < self.n_peers:
            pair = (min(i, j), max(i, j))
            self._edges_of[i].add(pair)
            self._edges_of[j].add(pair)
            self._edge_states.setdefault(pair, "unknown")

    # --- what came ---

    @locked
    def listed(self, members: Members) -> None:
        """Take in who the members are by now."""
        for number in range(self.n_peers, len(members.all)):
            self._peers.append(_Peer())
            self._edges_of.append(set())
            self._say(number, "joined", "joins")
        self.n_peers = len(members.all)

        for member in members.all:
            one = self._peers[member.number]
            if member.is_present or one.left:
                continue
            one.left = f"{member.identity} left for good, by entry {member.left} of the list of members"
            if member.revoked:
                one.left = shut_out(member)
            self._say(member.number, "left", one.left)
            self._note_edges(member.number)

    @locked
    def answered(self, peer: int, status: Mapping[str, Any]) -> int:
        """Take in a peer's answer; return how many entries of the list of members it has, 0 if it tells none."""
        try:
            report = report_of(status, peer, self.n_peers)
        except RunError as error:
            self.silent(peer, str(error))
            return 0

        one = self._peers[peer]
        before = one.report
        if not one.is_up:
            word = "answers" if before is None else "answers again"
            self._say(peer, "up", f"{word}, in round {report.round} of {report.rounds}")
        if before is not None and report.seconds + 1 < before.seconds:
            self._say(peer, "restart", f"is another process, in round {report.round}")
        for number, why in report.quarantined.items():
            if before is None or number not in before.quarantined:
                self._say(peer, "quarantine", f"has quarantined peer {number}: {why}")
        for number, why in report.doubted.items():
            if before is None or number not in before.doubted:
                self._say(peer, "doubt", f"doubts peer {number}: {why}")

        one.report = report
        one.answered_at = time.monotonic()
        one.is_up = True
        one.why = ""
        one.end = None
        for neighbour in report.neighbours:
            self._add_edge(peer, neighbour)
        self._note_figures()
        self._note_edges(peer)
        return report.members.entries

    @locked
    def silent(self, peer: int, why: str) -> None:
        """Take in that a peer gave no answer, and why."""
        one = self._peers[peer]
        why = printable(why[:MOST_TEXT])
        if one.is_up:
            self._say(peer, "silent", f"does not answer any more: {why}")
        one.is_up = False
        one.why = why
        self._note_edges(peer)

    @locked
    def process(self, peer: int, starts: int, runs: bool, end: End | None) -> None:
        """Take in what a peer's folder says of its process."""
        one = self._peers[peer]
        if one.starts is not None and starts > one.starts:
            self._say(peer, "restart", f"was started again, for the {_ordinal(starts)} time")
        one.starts = starts
        one.runs = runs
        if runs:
            one.end = None
            return
        ended = end or End(KILLED)
        if one.end is None and ended.reason == DONE:
            self._say(peer, "done", "is done")
        elif one.end is None:
            says = f": {ended.message}" if ended.message else ""
            self._say(peer, "gone", f"has ended: {ended.reason}{says}")
        one.end = ended
        one.is_up = False
        self._note_edges(peer)

    @locked
    def measured(self, record: Mapping[str, Any]) -> None:
        """Take in an evaluation of all models, as metrics.jsonl has it."""
        round_index = record.get("round")
        figures = {name: value for name, value in record.items() if isinstance(value, dict) and "peer_min" in value}
        if not isinstance(round_index, int) or not 0 <= round_index <= MOST_COUNT or not figures:
            return
        if not self._has_records:  # they tell more than the peers' own figures
            self._has_records = True
            self._quality.clear()
        name = self._choose(figures)
        values = figures[name]
        point = {"round": round_index, "mean": _number(values.get("mean_model"))}
        point |= {"least": _number(values.get("peer_min")), "most": _number(values.get("peer_max"))}
        _append(self._quality, point)
        _append(self._consensus, {"round": round_index, "mean": _number(record.get("consensus_distance"))})
        self._tried = _sample_of(record.get("peers_tried"))

    @locked
    def restarted(self) -> None:
        """Take in that all peers begin again, at other addresses."""
        if any(one.report is not None or one.end is not None for one in self._peers):
            self._say(None, "restart", "the run was started again")
        for one in self._peers:
            one.is_up = False
            one.end = None
            one.runs = False
        self.finished = ""

    @locked
    def finish(self, how: str) -> None:
        """Take in that the whole run is over."""
        if how != self.finished:
            self._say(None, "done", how)
        self.finished = printable(how)

    # --- what follows ---

    def _choose(self, figures: Collection[str]) -> str:
        """Choose the metric of the curve among some, the best first; the present one stays if it is among them."""
        if self.metric not in figures:
            self.metric = "accuracy" if "accuracy" in figures else next(iter(figures))
        return self.metric

    def _note_figures(self) -> None:
        """Add a point to the curve of the models' quality, from what the peers say of themselves."""
        if self._has_records:
            return
        reports = [one.report for one in self._peers if one.report is not None and one.is_up]
        present = len([one for one in self._peers if not one.left])
        reported = Counter(name for report in reports for name, value in report.figures.items() if value is not None)
        if not reported or 2 * len(reports) < present:  # a few peers, such as the first that answers, are not all
            return

        # Of the metrics that most peers report, so that none chooses for the others what is shown.
        most = max(reported.values())
        name = self._choose([name for name, count in reported.items() if count == most])
        values = [value for report in reports if (value := report.figures.get(name)) is not None]
        self._tried = None
        if len(values) < present:
            self._tried = {"peers": len(values), "of": present}

        # The lower median: a peer that says a round far ahead, or behind, moves it by one peer at most.
        round_index = median_low(report.round for report in reports)
        point = {"round": round_index, "mean": median(values), "least": min(values), "most": max(values)}
        last = self._quality[-1] if self._quality else None
        if last is not None and round_index <= last["round"]:
            self._quality[-1] = point | {"round": last["round"]}
        elif last is None or {**last, "round": 0} != {**point, "round": 0}:
            _append(self._quality, point)

    def _note_edges(self, peer: int) -> None:
        """Note how a peer's edges are now, and say which went down or came up again."""
        for edge in self._edges_of[peer]:
            state = self._edge_state(*edge)
            self._edge_states[edge] = state
            where = f"the edge between peers {edge[0]} and {edge[1]}"
            if state == "down":
                now = time.monotonic()
                since = self._down_since.setdefault(edge, now)
                if edge not in self._said_down and now - since >= DOWN_SECONDS:
                    self._said_down.add(edge)
                    self._say(None, "edge-down", f"{where} is down", peer)
            else:
                self._down_since.pop(edge, None)
                if edge in self._said_down and state == "up":
                    self._said_down.discard(edge)
                    self._say(None, "edge-up", f"{where} is up again", peer)

    def _edge_state(self, i: int, j: int) -> str:
        ends = ((i, j), (j, i))
        states = {self._peers[one].state for one in (i, j)}
        says = set()
        for one, other in ends:
            peer = self._peers[one]
            if peer.report is None or not peer.is_up:
                continue
            if str(other) in peer.report.quarantined:
                says.add("refused")
            elif str(other) in peer.report.down:
                says.add("down")
            elif other in peer.report.unheard:
                says.add("unknown")
            elif other in peer.report.neighbours:  # else the graph has changed, as when a peer joins
                says.add("up")
        if "left" in states:
            return "done"
        if "gone" in states:
            return "down"
        if "done" in states:
            return "done"
        for worst in ("refused", "down", "up"):
            if worst in says:
                return worst
        return "unknown"

    def _say(self, peer: int | None, kind: str, text: str, cause: int | None = None) -> None:
        """Add an event.

        Args:
            cause: the peer whose answer it follows from; by default the one that it is about.
        """
        if cause is None:
            cause = peer
        what = {"number": self._n_events, "at": time.time(), "peer": peer, "kind": kind, "text": printable(text)}
        self._n_events += 1
        self._events.append(_Event(cause, what))
        if len(self._events) <= MOST_EVENTS:
            return

        # A peer that flaps, or makes things up, pushes out its own events and nobody else's.
        counts = Counter(event.cause for event in self._events)
        busiest, _ = counts.most_common(1)[0]
        oldest = next(place for place, event in enumerate(self._events) if event.cause == busiest)
        del self._events[oldest]

    # --- for the page ---

    @locked
    def state(self) -> dict[str, Any]:
        """Return all that the page shows, as JSON can hold it."""
        now = time.monotonic()
        drawn: list[Any] = []
        if self.n_peers <= MOST_DRAWN:
            drawn = [[*edge, state] for edge, state in sorted(self._edge_states.items())]
        return {
            "name": printable(self.name),
            "where": printable(self.where),
            "now": time.time(),
            "n_peers": self.n_peers,
            "finished": self.finished,
            "is_deployed": self.is_deployed,
            "peers": [self._row(number, one, now) for number, one in enumerate(self._peers)],
            "edges": drawn,
            "is_drawn": self.n_peers <= MOST_DRAWN,
            "metric": printable(self.metric),
            "tried": self._tried,
            "is_sample": self._has_records,
            "quality": list(self._quality),
            "consensus": list(self._consensus),
            "events": [event.what for event in self._events],
        }

    @staticmethod
    def _row(number: int, one: _Peer, now: float) -> dict[str, Any]:
        row: dict[str, Any] = {"peer": number, "state": one.state, "why": one.left or one.why, "starts": one.starts}
        if one.end is not None:
            row["end"] = one.end.reason[:MOST_TEXT]
            row["why"] = one.end.message[:MOST_TEXT]
        report = one.report
        if report is None:
            return row
        awaited = [int(j) for j, known in report.known.items() if known.awaited]
        missing = {*map(str, report.unheard), *report.down}
        row |= {
            "age": None if one.answered_at is None else round(now - one.answered_at, 1),
            "round": report.round,
            "rounds": report.rounds,
            "waits_for": report.waits_for if one.is_up else "",
            "awaited": awaited if one.is_up and report.waits_for else [],
            "neighbours": len(report.neighbours),
            "up": len([j for j in report.neighbours if str(j) not in missing]),
            "epsilon": report.epsilon,
            "budget": report.budget,
            "adversaries": report.adversaries,
            "loss": report.loss,
            "figures": report.figures,
            "sent": report.bytes_sent,
            "received": report.bytes_received,
            "retries": sum(known.failed for known in report.known.values()),
            "insecure": report.noise.startswith("INSECURE"),
            "idle": report.idle,
        }
        return row


def _number(value: object) -> float | None:
    """Return a number of a file as a page can hold it; None if it is none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if abs(value) <= MOST_SIZE else None  # NaN is no number either


def _sample_of(tried: object) -> dict[str, int] | None:
    """Return how many peers' models were tried, of how many; None if all were."""
    if not isinstance(tried, dict):
        return None
    peers = _number(tried.get("peers"))
    of = _number(tried.get("of"))
    if peers is None or of is None:
        return None
    return {"peers": int(peers), "of": int(of)}


def _append(points: list[dict[str, Any]], point: dict[str, Any]) -> None:
    """Add a point to a curve; a round that came again, as after a restart, replaces what came after it."""
    while points and points[-1]["round"] >= point["round"]:
        points.pop()
    points.append(point)
    if len(points) > MOST_POINTS:
        del points[1:-1:2]


def _ordinal(number: int) -> str:
    ends: Sequence[str] = ("th", "st", "nd", "rd")
    end = "th"
    if number % 100 not in (11, 12, 13) and number % 10 < len(ends):
        end = ends[number % 10]
    return f"{number}{end}"
