"""Laws of a whole network on a virtual clock, under faults: what was met once, a fixed share of the search, mutants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flower_privdec.common.errors import StandstillError
from flower_privdec.peer.asynchronous import AsynchronousPeer
from flower_privdec.peer.driving import Program
from flower_privdec.peer.faults import FaultSchedule
from flower_privdec.peer.pace import WeightFloor
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.peer.share_exchange import ShareExchange
from flower_privdec.peer.synchronous import SynchronousPeer
from flower_privdec.privacy.noise.kinds.pair_noise import CancellingNoise
from flower_privdec.pushsum.exactly_once import PushSumProtocol
from flower_privdec.pushsum.lockstep import Lockstep
from tools.schedules.light_peers import LightTrainer
from tools.schedules.search import Case, Outcome, run, shrink

SHARE = range(24)  # of the search's cases, each time
SYNCHRONOUS = range(100, 116)  # of those with synchronous peers only
WHOLE = (2, 4, 9, 12, 14, 20, 21, 23)  # of whole peers
QUICK = "links: {latency: 0.05}, work: {train: 0.1, save: 0.05}"


def met(
    faults: str,
    *,
    kind: str = "push-sum",
    mode: Any = "asynchronous",
    n_peers: int = 4,
    rounds: int = 20,
    graph: str = "{name: directed-exponential}",
    network: str = "links: local, deadline: 2.0",
    rest: str = "links: {latency: 0.05}, work: {train: 0.2, save: 0.05}",
) -> Outcome:
    """Return what becomes of a network under faults that were met in the field, or by the search."""
    schedule = FaultSchedule.parse(f"{{{rest}, faults: [{faults}]}}")
    return run(Case(0, kind, mode, n_peers, rounds, graph, network, schedule, clean=False))


def rounds_of(outcome: Outcome) -> list[int]:
    assert outcome.network is not None
    peers: Any = outcome.network.peers
    return [peer.state.round_index for _, peer in sorted(peers.items())]


# --- deadlocks that were met ---


def test_peers_at_their_floors_never_wait_for_ever() -> None:
    """Two that lost their folders, one edge between them, and the finished peers gone with the mass."""
    outcome = met(
        "{kind: lose, peer: 3, down: 0.0, at: 7.291}, {kind: lose, peer: 1, down: 0.0, at: 1.354}, "
        "{kind: lose, peer: 1, down: 0.1, at: 1.012}, {kind: lose, peer: 2, down: 4.093, at: 7.856}"
    )
    assert not outcome.broken
    assert outcome.ends == {"done": 4}
    assert min(rounds_of(outcome)) >= 20


def test_reset_peers_get_a_model() -> None:
    """Three of four began new lives without weight, and the fourth had none to spare."""
    outcome = met(
        "{kind: restore, peer: 0, down: 0.1, copied_at: 1.499, at: 5.128}, "
        "{kind: lose, peer: 0, down: 0.0, at: 7.944}, "
        "{kind: restore, peer: 2, down: 6.611, copied_at: 0.68, at: 6.353}, "
        "{kind: restore, peer: 1, down: 3.894, copied_at: 2.054, at: 6.35}, "
        "{kind: lose, peer: 3, down: 0.0, at: 2.768}, {kind: lose, peer: 3, down: 0.1, at: 3.523}",
        rest="links: {latency: 0.01}, work: {train: 1.0}",
    )
    assert not outcome.broken
    assert outcome.ends == {"done": 4}


def test_a_finished_peer_gives_its_weight_away() -> None:
    """A quorum of two, one neighbour at its floor and done, the other with weight but no edge back."""
    outcome = met(
        "",
        n_peers=8,
        rounds=7,
        graph="{name: directed-ring}",
        network="links: local, deadline: 10.0, commit_every: 2, quorum: 2, lead: null, final_mixing: 2",
        rest="seed: 12, links: {latency: 0.01, jitter: 0.01, loss: 0.02}, work: {train: 0.04, save: 0.005}",
    )
    assert not outcome.broken
    assert outcome.ends == {"done": 8}


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_a_peer_left_alone_says_why_it_ends(mode: str) -> None:
    outcome = met("{kind: lose, peer: 2, down: 40.0, at: 2.0}", mode=mode)
    assert not outcome.broken
    assert outcome.network is not None
    end = outcome.network.ends[2]
    assert isinstance(end, StandstillError)
    assert end.exit_status == 4
    assert "peer 2 waits for" in str(end)
    assert "is not there" in str(end)


def test_peers_that_are_all_restored_charge_what_they_lack() -> None:
    """Each missed lines that the others had seen, so none believed in the other, and no charge ever ended."""
    restored = ", ".join(f"{{kind: restore, peer: {peer}, copied_at: 1.0, at: 2.5, down: 0.1}}" for peer in range(3))
    outcome = met(restored, n_peers=3, rounds=12, graph="{name: complete}")
    assert not outcome.broken
    assert outcome.named["put back"] == 3
    assert outcome.ends.keys() <= {"done", "network.standstill"}


def test_charging_peers_do_not_call_each_other_without_pause() -> None:
    restored = ", ".join(f"{{kind: restore, peer: {peer}, copied_at: 1.0, at: 2.5, down: 0.1}}" for peer in range(3))
    outcome = met(restored, n_peers=4, rounds=12, rest="links: {latency: 0.001}, work: {train: 0.1, save: 0.005}")
    assert not outcome.broken
    assert outcome.network is not None
    assert outcome.network.calls < 40 * 12 * outcome.virtual


def test_parts_on_both_sides_of_a_dead_peer_end() -> None:
    """A star whose hub dies for good: nobody waits for ever, and each says for whom."""
    outcome = met("{kind: crash, peer: 0, at: 2.0}", kind="gossip", graph="{name: star}", rounds=10)
    assert not outcome.broken
    assert outcome.ends == {"virtual.killed": 1, "network.standstill": 3}


# --- a share of the search ---


# The last one: a share that leaves for a life of its receiver which is over, by a late start.
@pytest.mark.parametrize("seed", [*SHARE, 5141])
def test_no_law_breaks_under_drawn_faults(seed: int) -> None:
    case = Case.drawn(seed)
    outcome = run(case)
    assert not outcome.broken, f"{outcome.broken}; again: {case.command}"


@pytest.mark.parametrize("seed", SYNCHRONOUS)
def test_no_law_breaks_among_synchronous_peers(seed: int) -> None:
    case = Case.drawn(seed, "synchronous")
    outcome = run(case)
    assert not outcome.broken, f"{outcome.broken}; again: {case.command}"


@pytest.mark.parametrize("seed", WHOLE)
def test_no_law_breaks_among_whole_peers(seed: int) -> None:
    """With noise that cancels, also in bands; with codecs, rules against liars, and peers that take no part."""
    case = Case.whole(seed)
    outcome = run(case)
    assert not outcome.broken, f"{outcome.broken}; again: {case.command}"


def test_who_waits_by_a_slow_clock_may_stand_still() -> None:
    """Peer 1 left peer 0, which was away for long, and peer 2 still waits: its clock goes slowly."""
    faults = FaultSchedule.parse(
        "{links: {latency: 0.05}, work: {train: 0.1}, faults: [{kind: crash, peer: 0, at: 1.0, down: 20.0}, "
        "{kind: clock, peer: 2, at: 0.9, rate: 0.005}]}"
    )
    network = "links: local, deadline: 2.0, final_mixing: 0"
    case = Case(0, "gossip", "synchronous", 3, 20, "{name: complete}", network, faults, clean=True)
    outcome = run(case)
    assert outcome.ends["network.standstill"] == 1
    assert not outcome.broken


def test_noise_of_whole_peers_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: peers add no more noise of their own when partners are gone."""
    monkeypatch.setattr(CancellingNoise, "_own_noise", lambda *whatever: 0.1)
    settings = ("privacy.noise={kind: cancelling, colluding: 1, bands: 3}",)
    case = Case(
        0,
        "whole",
        "asynchronous",
        4,
        4,
        "{name: complete}",
        "links: local, deadline: 2.0",
        FaultSchedule(),
        clean=True,
        settings=settings,
    )
    assert run(case).law == "law.noise"


def test_synchronous_peers_put_back_are_explained() -> None:
    """One takes a step again, with other rows; who has its former ones, and did not use them yet, counts those."""
    outcome = met(
        "{kind: slow, peer: 0, at: 0.0, factor: 40}, {kind: link, sender: 1, receiver: 0, loss: 1.0, at: 6.0, "
        "until: 8.5}, {kind: restore, peer: 1, copied_at: 6.0, at: 7.0, down: 0.05, charges: true}",
        mode="synchronous",
        n_peers=3,
        rounds=3,
        graph="{name: directed-ring}",
        network="links: local, deadline: 20.0, final_mixing: 0",
        rest=QUICK,
    )
    assert not outcome.broken
    assert outcome.named["put back"] == 1
    assert outcome.named["came again with other rows"] == 1
    assert outcome.ends == {"done": 3}


def test_a_failure_shrinks_and_is_repeated_by_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is paid, in this mutant, so each case breaks the law of payment, with and without faults."""
    monkeypatch.setattr(LightTrainer, "_pay", lambda self: None)
    case = next(case for case in map(Case.drawn, range(9)) if case.schedule.faults)
    outcome = run(case)
    assert outcome.law == "law.paid"
    smallest, again = shrink(case, outcome)
    assert again.law == "law.paid"
    assert smallest.schedule.faults == []
    assert case.command == f"python -m tools.schedules --seeds {case.seed}"


# --- mutants: each law is seen to fail ---


def first_broken(cases: range) -> set[str]:
    return {run(Case.drawn(seed)).law for seed in cases} - {""}


def test_a_share_added_twice_breaks_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    added = PushSumProtocol._add

    def twice(self: Any, values: Any) -> None:
        added(self, values)
        added(self, values)

    monkeypatch.setattr(PushSumProtocol, "_add", twice)
    outcome = met("", n_peers=3, rounds=4)
    assert outcome.law == "law.mass"


MANY_REPEATS = "links: {latency: 0.05, jitter: 0.2, duplicates: 0.5}, work: {train: 0.2, save: 0.05}"


def test_rows_used_twice_break_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated rows of an earlier place are taken for those of this one."""
    take = Lockstep.take
    monkeypatch.setattr(Lockstep, "take", lambda self, j, place, rows: take(self, j, max(place, self.place), rows))
    outcome = met("", mode="synchronous", graph="{name: complete}", rest=MANY_REPEATS)
    assert outcome.law == "law.mass"
    assert "what it was sent at the place before" in outcome.broken


def test_a_weight_that_drifts_breaks_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    def drift(self: Any, turn: Any, place: int) -> None:
        self.state.rows["w"].mul_(1 + 1e-6)

    monkeypatch.setattr(SynchronousPeer, "_keep_weight", drift)
    outcome = met("", mode="synchronous", n_peers=3, rounds=4)
    assert outcome.law == "law.mass"
    assert "the graph makes it" in outcome.broken


def test_other_rows_after_a_restart_break_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = LightTrainer.open

    def other(self: Any, state: Any, paid: int, head: Any) -> Any:
        found = opened(self, state, paid, head)
        found.rows["x"] += 1
        return found

    monkeypatch.setattr(LightTrainer, "open", other)
    outcome = met("{kind: crash, peer: 1, at: 1.0, down: 0.1}", mode="synchronous")
    assert outcome.law == "law.mass"
    assert "twice" in outcome.broken


def test_who_leaves_before_its_rows_are_used_breaks_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(self: Any) -> Program[None]:
        yield from self._saving(self.timetable.places, self.state)
        self._arrive(self.state, self.timetable.places)

    monkeypatch.setattr(SynchronousPeer, "_leave", leave)
    outcome = met("{kind: slow, peer: 2, at: 0.0, factor: 5}", mode="synchronous", rounds=4, rest=QUICK)
    assert outcome.law == "law.ends"


def test_a_restored_folder_hides_no_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that starts again adds its first share twice, while shares of its former state are under way."""
    restore = PushSumProtocol.restore
    added = PushSumProtocol._add
    to_add_twice = list[Any]()

    def restored(self: Any, *of: Any, **named: Any) -> None:
        restore(self, *of, **named)
        to_add_twice.append(self)

    def add(self: Any, values: Any) -> None:
        added(self, values)
        if self in to_add_twice:
            to_add_twice.remove(self)
            added(self, values)

    monkeypatch.setattr(PushSumProtocol, "restore", restored)
    monkeypatch.setattr(PushSumProtocol, "_add", add)
    outcome = met(
        "{kind: restore, peer: 1, copied_at: 1.1, at: 1.35, down: 0.0, charges: true}", graph="{name: complete}"
    )
    assert outcome.law == "law.mass"
    assert "peer 1's w is" in outcome.broken


def test_who_lost_nothing_gives_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that starts again takes its state for an old copy."""
    restore = PushSumProtocol.restore
    receive_hello = PushSumProtocol.receive_hello
    in_doubt = list[Any]()

    def restored(self: Any, *of: Any, **named: Any) -> None:
        restore(self, *of, **named)
        in_doubt.append(self)

    def doubting(self: Any, theirs: Any) -> Any:
        if self in in_doubt:
            in_doubt.remove(self)
            raise self._stale(self.incarnation, "in doubt")
        return receive_hello(self, theirs)

    monkeypatch.setattr(PushSumProtocol, "restore", restored)
    monkeypatch.setattr(PushSumProtocol, "receive_hello", doubting)
    outcome = met("{kind: crash, peer: 1, at: 2.0, down: 0.1}")
    assert outcome.law == "law.mass"
    assert "never put back or lost" in outcome.broken


def test_peers_that_send_nothing_break_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before finished peers gave their weight away: peers stand at their floors and send nothing."""

    def nothing(self: Any, round_index: int) -> Program[None]:
        yield from ()

    monkeypatch.setattr(WeightFloor, "parts", lambda self, weight, weights: {})
    monkeypatch.setattr(ShareExchange, "mix_meanwhile", nothing)
    monkeypatch.setattr(AsynchronousPeer, "can_begin", lambda self: False)
    monkeypatch.setattr(RunningPeer, "check_standstill", lambda self: None)
    outcome = met("", n_peers=3, rounds=4, network="links: lan, deadline: 2.0")
    assert outcome.law == "law.progress"


def test_the_same_case_gives_the_same_events() -> None:
    case = Case.drawn(3)
    first = run(case)
    again = run(replace(case))
    assert (first.events, first.virtual, first.faults) == (again.events, again.virtual, again.faults)
