"""Laws of a run that is given more rounds: all go on from the same place, and mass is kept."""

from __future__ import annotations

from typing import Any

import pytest
from changing_network import ADD, Changing, sign
from raising import raises

from flower_privdec.common.errors import ScenarioError, StandstillError
from flower_privdec.peer.asynchronous import AsynchronousPeer
from flower_privdec.pushsum.membership import MemberList
from tools.schedules.light_peers import LightDisk

MORE = {"kind": "extend", "rounds": 16}
SHORT = "links: local, deadline: 2.0"
END = 3.7  # when the first of 10 rounds' peers mix finally, on a calm network


def check_all_took(changing: Changing, rounds: int, extra: int = 0) -> None:
    """Check that every peer came to its end, took each step once, and that no mass was won or lost.

    `extra` is how many steps a peer may have taken again after kills.
    """
    peers = changing.network.peers
    assert changing.network.ends == dict.fromkeys(peers)
    for number, peer in peers.items():
        assert (peer.rounds, peer.state.round_index) == (rounds, peer.end)
        assert rounds <= changing.home.drawn[number] <= rounds + extra
    if changing.home.kind == "push-sum":
        assert sum(changing.weights().values()) == pytest.approx(len(peers), rel=1e-12)


@pytest.mark.parametrize("moment", [1.0, END, END + 0.3, END + 0.6])
def test_all_take_more_rounds_whenever_they_hear(moment: float) -> None:
    """In the middle, in the last round, and in final mixing, which some have done and others not begun."""
    changing = Changing([(moment, 0, MORE)], rounds=10, network=SHORT)
    changing.run()
    check_all_took(changing, 16)


@pytest.mark.parametrize(
    "case",
    [
        {"kind": "gossip", "graph": "{name: ring}"},
        {"graph": "{name: directed-exponential, mixing_steps: 2}"},
        {"graph": "{name: complete}"},
    ],
)
def test_every_exchange_goes_on_after_the_end(case: dict[str, Any]) -> None:
    changing = Changing([(END + 0.2, 0, MORE)], rounds=10, network=SHORT, **case)
    changing.run()
    check_all_took(changing, 16)


@pytest.mark.parametrize("killed", [0, 2])
@pytest.mark.parametrize("moment", [END - 0.1, END + 0.15, END + 0.4])
def test_no_kill_at_the_old_end_costs_mass(killed: int, moment: float) -> None:
    rest = "seed: 3, links: {latency: 0.05, jitter: 0.1, loss: 0.1}, work: {train: 0.2, save: 0.05}"
    crash = f"{{kind: crash, peer: {killed}, at: {moment}, down: 0.4}}"
    changing = Changing([(END, 1, MORE)], faults=crash, rest=rest, rounds=10, network="links: local, deadline: 5.0")
    changing.run()
    assert changing.network.faults["crash"] == 1
    check_all_took(changing, 16, extra=1)


def test_one_that_was_away_takes_the_rounds_too() -> None:
    away = "{kind: crash, peer: 3, at: 1.5, down: 3.0}"
    changing = Changing([(2.0, 0, MORE)], faults=away, rounds=10, network="links: local, deadline: 6.0")
    changing.run()
    check_all_took(changing, 16, extra=1)


def started_again(changing: Changing, peers: range, given: int) -> None:
    """Give the list to a peer, and start peers that were done."""
    network = changing.network
    changing.give(given)
    for peer in peers:
        network.ends.pop(peer)
        network.machines[peer].start_at(network.now + 0.1 * peer)
    network.run()


def test_peers_that_were_done_go_on_when_started() -> None:
    changing = Changing([], rounds=10, network=SHORT)
    changing.run()
    changing.home.operators.append(MORE, sign)
    started_again(changing, range(4), given=2)
    check_all_took(changing, 16)

    # And once more, from the end of the further rounds.
    changing.home.operators.append({"kind": "extend", "rounds": 19}, sign)
    started_again(changing, range(4), given=0)
    check_all_took(changing, 19)


def test_one_peer_alone_does_not_go_on() -> None:
    """The others had ended before they could hear: it waits for them, takes no step, and says for whom."""
    changing = Changing([], rounds=10, network=SHORT)
    changing.run()
    changing.home.operators.append(MORE, sign)
    started_again(changing, range(1), given=0)
    assert isinstance(changing.network.ends[0], StandstillError)
    assert changing.home.drawn[0] == 10
    started_again(changing, range(4), given=0)
    check_all_took(changing, 16)


def test_more_rounds_beside_joins_and_leaves() -> None:
    changes: list[tuple[float, int, dict[str, Any]]] = [
        (1.5, 0, ADD),
        (2.0, 1, MORE),
        (2.6, 3, {"kind": "leave", "peer": 2}),
    ]
    join = "{kind: join, peer: 4, at: 1.6}"
    changing = Changing(changes, faults=join, peers=5, rounds=10, network=SHORT)
    changing.network.at(1.55, lambda: changing.give(4))
    assert changing.run() == dict.fromkeys(range(5))
    weights = changing.weights()
    assert weights[2] == 0.0
    assert sum(weights.values()) == pytest.approx(5.0, rel=1e-12)
    assert {peer.rounds for peer in changing.network.peers.values()} == {16}
    assert all(changing.home.drawn[peer] >= 16 for peer in (0, 1, 3))


def test_an_older_list_brings_no_end_back() -> None:
    """Whoever puts an old copy into a folder changes nothing; a folder that lost the list is refused by name."""
    changing = Changing([(1.0, 0, MORE)], rounds=10, network=SHORT)
    older = MemberList(changing.home.first, lambda content, signature: True).content

    def put_back() -> None:
        members = changing.network.peers[1].device.members
        assert members is not None
        assert members.take(older, "an old file") == 0

    changing.network.at(2.0, put_back)
    changing.run()
    check_all_took(changing, 16)

    changing.home.kept[1] = older
    disk = changing.network.machines[1].disk
    assert isinstance(disk, LightDisk)
    with raises(ScenarioError, "checkpoint.rounds", names="with 16 rounds"):
        changing.home.start(1, disk, changing.network.draw)


def test_two_lists_part_and_the_peers_say_so() -> None:
    """The authority signed two entries of one number: each peer stays with its own, ends, and names the other."""
    changing = Changing([], rounds=10, network=SHORT)
    other = MemberList(changing.home.first, lambda content, signature: signature == sign(content))
    other.append({"kind": "extend", "rounds": 13}, sign)
    changing.home.operators.append(MORE, sign)

    def give() -> None:
        for peer in (0, 1):
            changing.give(peer)
        changing.home.operators = other
        for peer in (2, 3):
            changing.give(peer)

    changing.network.at(1.0, give)
    changing.run()
    peers = changing.network.peers
    assert {number: peer.rounds for number, peer in peers.items()} == {0: 16, 1: 16, 2: 13, 3: 13}
    assert [changing.home.drawn[peer] for peer in range(4)] == [16, 16, 13, 13]
    assert sum(changing.weights().values()) == pytest.approx(4.0, rel=1e-12)


def test_counts_never_go_back_over_ends() -> None:
    changing = Changing([(0.1, 0, MORE)], rounds=10, network=SHORT, graph="{name: ring, mixing_steps: 2}")
    changing.run()
    peer = changing.network.peers[0]
    assert isinstance(peer, AsynchronousPeer)
    counts = [peer.count(k) for k in range(peer.end + 1)]
    assert counts == sorted(set(counts))
    assert [peer.round_of(count) for count in counts] == [*range(peer.end + 1)]
    places = [peer.place_of(count) for count in counts[: peer.rounds]]
    assert places == [2 * k for k in range(peer.rounds)]

    # Of one that has not heard of more rounds and mixes finally, it is known that its rounds are done.
    assert {peer.round_of(20 + k) for k in range(30)} == {10}
    assert counts[9] < 20 < 20 + 30 < counts[10]
