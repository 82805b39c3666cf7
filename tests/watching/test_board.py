"""What the live page knows of peers, from answers that may be lies."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from flower_privdec.network.peer.lifetime import DONE, End
from flower_privdec.pushsum.membership import MemberEntry, Members
from flower_privdec.watching import board as board_module
from flower_privdec.watching.board import MOST_EVENTS, MOST_POINTS, MOST_TEXT, Board

RING = ((0, 1), (1, 2), (2, 3), (3, 0))


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "DOWN_SECONDS", 0.0)


def status(peer: int, **changes: Any) -> dict[str, Any]:
    """Return the status of a peer of a ring of four."""
    neighbours = [(peer - 1) % 4, (peer + 1) % 4]
    usual = {"peer": peer, "round": 5, "rounds": 9, "neighbours": neighbours, "down": {}, "unheard": [], "seconds": 5.0}
    return (
        usual | {"epsilon": 0.5, "budget": 1.0, "figures": {"accuracy": 0.5}, "loss": 0.1, "noise": "system"} | changes
    )


def ring() -> Board:
    board = Board("ring", 4, "here", RING)
    for peer in range(4):
        board.answered(peer, status(peer))
    return board


def states(board: Board) -> list[str]:
    return [peer["state"] for peer in board.state()["peers"]]


def edges(board: Board) -> dict[tuple[int, int], str]:
    return {(i, j): how for i, j, how in board.state()["edges"]}


def texts(board: Board) -> str:
    return "\n".join(event["text"] for event in board.state()["events"])


def test_an_edge_is_down_if_an_end_says_so() -> None:
    board = ring()
    assert {*edges(board).values()} == {"up"}
    board.answered(0, status(0, down={"1": "refused"}))
    assert edges(board) == {(0, 1): "down", (1, 2): "up", (2, 3): "up", (0, 3): "up"}
    assert "the edge between peers 0 and 1 is down" in texts(board)
    board.answered(0, status(0))
    assert "the edge between peers 0 and 1 is up again" in texts(board)
    board.process(2, 1, False, None)
    assert states(board)[2] == "gone"
    assert board.state()["peers"][2]["end"] == "killed"
    assert edges(board) == {(0, 1): "up", (1, 2): "down", (2, 3): "down", (0, 3): "up"}
    board.answered(3, status(3, quarantined={"0": "it lies"}))
    assert edges(board)[0, 3] == "refused"
    assert "peer 0: it lies" in texts(board)


def test_a_peer_silent_here_alone_is_no_lost_edge() -> None:
    board = ring()
    board.silent(1, "no route")
    assert states(board) == ["up", "silent", "up", "up"]
    assert {*edges(board).values()} == {"up"}


def test_peers_come_wait_end_and_come_again() -> None:
    board = Board("ring", 4, "here", RING)
    assert states(board) == ["unknown"] * 4
    assert {*edges(board).values()} == {"unknown"}
    board.process(0, 1, True, None)
    assert states(board)[0] == "starting"
    board.answered(0, status(0, waits_for="its neighbours", known={"1": {"awaited": True}, "3": {"failed": 2}}))
    row = board.state()["peers"][0]
    assert (row["state"], row["awaited"], row["retries"]) == ("waiting", [1], 2)
    board.process(0, 1, False, End("disk.full", 1, "no room"))
    assert (states(board)[0], board.state()["peers"][0]["why"]) == ("gone", "no room")
    board.process(0, 2, True, None)
    board.answered(0, status(0, seconds=0.5))
    assert states(board)[0] == "up"
    assert "was started again, for the 2nd time" in texts(board)
    board.process(0, 2, False, End(DONE, 0))
    assert states(board)[0] == "done"
    board.finish("the run is finished")
    board.finish("the run is finished")
    assert texts(board).count("the run is finished") == 1
    board.restarted()
    assert board.state()["finished"] == ""


LIES: list[dict[str, Any]] = [
    {"peer": 1},
    {"round": -1},
    {"round": 10**400},
    {"rounds": math.nan},
    {"epsilon": math.nan},
    {"epsilon": "<b>"},
    {"budget": math.inf},
    {"figures": {"accuracy": math.inf}},
    {"neighbours": "all"},
    {"neighbours": [-1]},
    {"down": ["1"]},
    {"budget": 1.1e300},
    {"members": {"entries": -1}},
    {"known": {"1": []}},
    {"seconds": math.inf},
    {"waits_for": 5},
    {"bytes_sent": "many"},
]


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_status_that_cannot_be_true_is_no_answer(lie: dict[str, Any]) -> None:
    board = Board("ring", 4, "here", RING)
    board.answered(0, status(0) | lie)
    assert states(board)[0] == "unknown"
    assert board.state()["peers"][0]["why"]
    json.dumps(board.state(), allow_nan=False)


def test_what_a_peer_says_stays_short_and_harmless() -> None:
    board = ring()
    long = "\x1b[2J\u202e<script>" + "x" * 10**5
    known = {str(j): {"awaited": True} for j in range(5000)}
    board.answered(0, status(0, waits_for=long, down={"1": long}, neighbours=[*range(5000)], known=known, more=[long]))
    state = json.dumps(board.state(), allow_nan=False)
    assert len(state) < 60_000
    assert board.state()["peers"][0]["waits_for"].isprintable()
    assert len(board.state()["peers"][0]["waits_for"]) < MOST_TEXT + 20
    assert {*edges(board)} <= {(i, j) for i in range(4) for j in range(4)}, "there are four peers"


def test_weeks_of_events_and_points_stay_few() -> None:
    board = ring()
    for round_index in range(3 * MOST_POINTS):
        board.silent(1, "gone")
        board.answered(1, status(1, round=round_index))
        spread = {"mean_model": 0.5, "peer_min": 0.4, "peer_max": 0.6}
        board.measured({"round": round_index, "accuracy": spread, "consensus_distance": 1.0})
    state = board.state()
    assert len(state["events"]) == MOST_EVENTS
    assert len(state["quality"]) <= MOST_POINTS
    assert state["quality"][-1]["round"] == 3 * MOST_POINTS - 1
    rounds = [point["round"] for point in state["quality"]]
    assert rounds == sorted(rounds)


def test_curves_follow_what_is_known() -> None:
    board = ring()
    board.answered(1, status(1, round=6, figures={"accuracy": 0.9}))
    (point,) = board.state()["quality"]
    assert (point["round"], point["most"]) == (5, 0.9), "most peers are in round 5"
    for peer in range(4):
        board.answered(peer, status(peer, round=6, figures={"accuracy": 0.9}))
    (first, last) = board.state()["quality"]
    assert (first["round"], last["round"], last["most"]) == (5, 6, 0.9)
    board.measured({"round": 4, "accuracy": {"mean_model": 0.5, "peer_min": 0.4, "peer_max": None}})
    board.measured({"round": "x", "accuracy": {"peer_min": 0.4}})
    (point,) = board.state()["quality"]
    assert point == {"round": 4, "mean": 0.5, "least": 0.4, "most": None}
    board.measured({"round": 2, "accuracy": {"mean_model": 0.1, "peer_min": 0.1, "peer_max": 0.1}})
    assert [one["round"] for one in board.state()["quality"]] == [2], "a run that begins again has a new curve"
    assert board.state()["metric"] == "accuracy"


@pytest.mark.parametrize("n_peers", [1, 60, 1000])
def test_any_number_of_peers_is_shown(n_peers: int) -> None:
    pairs = [(i, j) for i in range(min(n_peers, 60)) for j in range(i)]
    board = Board("many", n_peers, "here", pairs)
    for peer in range(n_peers):
        board.answered(peer, status(0) | {"peer": peer, "neighbours": [(peer + 1) % n_peers]})
    state = board.state()
    assert len(state["peers"]) == n_peers
    assert state["is_drawn"] == (n_peers <= 150)
    assert len(state["edges"]) == {1: 0, 60: 1770, 1000: 0}[n_peers]


def test_figures_of_a_sample_are_said_to_be() -> None:
    board = ring()
    assert board.state()["tried"] is None, "all four have said their figure"
    board.silent(3, "gone")
    board.answered(0, status(0))
    assert (board.state()["tried"], board.state()["is_sample"]) == ({"peers": 3, "of": 4}, False)

    spread = {"mean_model": 0.5, "peer_min": 0.4, "peer_max": 0.6}
    record: dict[str, Any] = {"round": 5, "accuracy": spread, "consensus_distance": 1.0}
    board.measured(record | {"peers_tried": {"peers": 2, "of": 4}})
    assert (board.state()["tried"], board.state()["is_sample"]) == ({"peers": 2, "of": 4}, True)
    board.measured(record | {"round": 6})
    assert board.state()["tried"] is None
    assert [point["mean"] for point in board.state()["consensus"]] == [1.0, 1.0]


@pytest.mark.parametrize("lie", [math.nan, math.inf, "0.5", True, 10**400, [0.5]], ids=str)
def test_a_damaged_record_leaves_the_page_readable(lie: Any) -> None:
    board = ring()
    spread = {"mean_model": lie, "peer_min": lie, "peer_max": lie}
    board.measured({"round": 5, "accuracy": spread, "consensus_distance": lie, "peers_tried": {"peers": lie, "of": 4}})
    json.dumps(board.state(), allow_nan=False)
    assert board.state()["quality"][-1]["mean"] is None
    assert board.state()["tried"] is None
    board.measured({"round": lie, "accuracy": spread})
    assert len(board.state()["consensus"]) == 1


def test_a_liar_chooses_nothing_that_is_shown_of_all() -> None:
    board = Board("ring", 4, "here", RING)
    lie = status(0, round=2**53, rounds=2**53, figures={"made up": 1e300}, adversaries={"x": 1e300})
    board.answered(0, lie)
    for round_index in range(5, 9):
        for peer in range(1, 4):
            board.answered(peer, status(peer, round=round_index, figures={"accuracy": round_index / 10}))
        board.answered(0, lie)
    state = board.state()
    assert state["metric"] == "accuracy"
    assert [point["round"] for point in state["quality"][-3:]] == [6, 7, 8], "the curve goes on"
    assert [point["mean"] for point in state["quality"][-3:]] == [0.6, 0.7, 0.8]


def test_a_liars_events_push_out_nobody_elses() -> None:
    board = ring()
    board.silent(1, "gone")
    for turn in range(3 * MOST_EVENTS):
        board.answered(0, status(0, seconds=10.0 * (turn % 2), quarantined={"2": "x", str(turn + 9): "made up"}))
    events = board.state()["events"]
    assert len(events) == MOST_EVENTS
    assert [event["number"] for event in events] == sorted({event["number"] for event in events})
    assert "does not answer any more: gone" in texts(board)
    assert "made up" not in texts(board), "there is no such peer"


def test_who_joins_and_leaves_is_shown_by_the_list() -> None:
    board = ring()
    first = Members.first("ring", [f"peer-{peer}" for peer in range(4)])
    board.listed(first)
    assert len(board.state()["events"]) == 4, "each peer's first answer"

    change = {"kind": "add", "peer": 4, "identity": "peer-4", "address": "10.0.0.4:7100"}
    joined = first.after(MemberEntry(1, "", change))
    board.listed(joined)
    assert states(board) == ["up"] * 4 + ["unknown"]
    board.answered(4, status(4, neighbours=[0]))
    board.answered(0, status(0, neighbours=[1, 3, 4]))
    assert edges(board)[0, 4] == "up"

    gone = joined.after(MemberEntry(2, "", {"kind": "leave", "peer": 1}))
    gone = gone.after(MemberEntry(3, "", {"kind": "revoke", "peer": 2}))
    board.listed(gone)
    assert states(board)[1] == "up", "it hands over what it has"
    board.silent(1, "refused")
    board.silent(2, "refused")
    board.listed(gone)
    assert states(board) == ["up", "left", "left", "up", "up"]
    assert "shut out by entry 3" in board.state()["peers"][2]["why"]
    assert {how for edge, how in edges(board).items() if {1, 2} & {*edge}} == {"done"}
    assert texts(board).count("left for good") == 1
