"""Laws of a network whose members change while it runs: mass is conserved to the last share, and nobody hangs."""

from __future__ import annotations

import pytest
from changing_network import ADD, Changing, at_random

from flower_privdec.peer.mass_law import BrokenLawError
from flower_privdec.pushsum.exactly_once import PushSumProtocol
from flower_privdec.pushsum.membership import SHUT_OUT, MemberEntries, MemberNews

LEAVE = {"kind": "leave", "peer": 2}


@pytest.mark.parametrize("graph", ["directed-exponential", "ring", "complete"])
def test_a_leaver_hands_over_all_its_mass(graph: str) -> None:
    changing = Changing([(2.0, 0, LEAVE)], rounds=12, graph=f"{{name: {graph}}}", network="links: local, deadline: 2.0")
    ends = changing.run()
    assert ends == dict.fromkeys(range(4))
    weights = changing.weights()
    assert weights[2] == 0.0
    assert sum(weights.values()) == pytest.approx(4.0, rel=1e-12)
    rounds = [peer.state.round_index for _, peer in sorted(changing.network.peers.items())]
    assert rounds[2] < 12 <= min(rounds[0], rounds[1], rounds[3])
    assert not changing.law.named["reset"]


@pytest.mark.parametrize("killed", [2, 0, 1])
@pytest.mark.parametrize("moment", [2.05, 2.2, 2.35])
def test_no_kill_while_a_peer_leaves_costs_mass(killed: int, moment: float) -> None:
    """The leaver is killed, or a neighbour, or the one that was given the list: all of the mass arrives."""
    rest = "seed: 7, links: {latency: 0.05, jitter: 0.1, loss: 0.1}, work: {train: 0.2, save: 0.05}"
    crash = f"{{kind: crash, peer: {killed}, at: {moment}, down: 1.0}}"
    changing = Changing([(2.0, 1, LEAVE)], faults=crash, rest=rest, rounds=14, network="links: local, deadline: 5.0")
    ends = changing.run()
    assert changing.network.faults["crash"] == 1
    assert ends == dict.fromkeys(range(4))
    weights = changing.weights()
    assert weights[2] == 0.0
    assert sum(weights.values()) == pytest.approx(4.0, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 9, 17, 31])
def test_whatever_changes_mass_is_kept(seed: int) -> None:
    """Two of these lost what was sent to a peer that learned late, under losses, that the others had begun."""
    changing, left, peers = at_random(seed)
    assert changing.run() == dict.fromkeys(range(peers))
    assert sum(changing.weights().values()) == pytest.approx(peers, rel=1e-12)
    for peer in left:
        assert changing.law._held[peer].weight == 0.0


def test_a_leaver_waits_for_no_dead_neighbour() -> None:
    dead = "{kind: crash, peer: 3, at: 1.5, down: null}"
    changing = Changing([(2.0, 1, LEAVE)], faults=dead, network="links: local, deadline: 2.0")
    ends = changing.run()
    assert [ends[peer] for peer in (0, 1, 2)] == [None] * 3
    assert changing.law._held[2].weight == 0.0


JOIN = "{kind: join, peer: 4, at: 2.5}"


@pytest.mark.parametrize("graph", ["directed-exponential", "ring", "complete"])
def test_a_peer_joins_and_takes_a_model(graph: str) -> None:
    changing = Changing(
        [(2.0, 0, ADD)],
        faults=JOIN,
        peers=5,
        rounds=12,
        graph=f"{{name: {graph}}}",
        network="links: local, deadline: 2.0",
    )
    changing.network.at(2.4, lambda: changing.give(4))
    assert changing.run() == dict.fromkeys(range(5))
    peers = changing.network.peers
    assert min(peer.state.round_index for peer in peers.values()) >= 12
    assert 4 in peers[3].timetable.neighbours(3)
    assert sum(changing.weights().values()) == pytest.approx(5.0, rel=1e-12)


@pytest.mark.parametrize("graph", ["{name: small-world, degree: 2}", "{name: random-regular, degree: 2}"])
def test_no_graph_keeps_a_peer_from_being_shut_out(graph: str) -> None:
    """One joins, and three are shut out: of the two that are left there is no such graph."""
    revoked = [(3.0 + peer / 2, 0, {"kind": "revoke", "peer": peer}) for peer in (1, 2, 3)]
    changing = Changing(
        [(2.0, 0, ADD), *revoked], faults=JOIN, peers=5, rounds=30, graph=graph, network="links: local, deadline: 2.0"
    )
    changing.network.at(2.4, lambda: changing.give(4))
    ends = changing.run()
    assert ends[0] is None
    assert ends[4] is None
    # Light peers have no transport that tells one of them why it is refused: it may wait until it stands still.
    assert {getattr(ends[peer], "code", "") for peer in (1, 2, 3)} <= {SHUT_OUT, "network.standstill"}
    assert sum(changing.weights().values()) == pytest.approx(5.0, rel=1e-12)


def test_gossip_has_nothing_to_hand_over() -> None:
    changing = Changing([(2.0, 0, LEAVE)], kind="gossip", graph="{name: ring}", network="links: local, deadline: 2.0")
    assert changing.run() == dict.fromkeys(range(4))


def test_a_member_that_withholds_entries_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a ring, one hands nothing on: the others have the entry from the other side."""
    real = MemberNews.entries_for

    def withheld(news: MemberNews, neighbour: int, now: float) -> MemberEntries | None:
        return None if news._peer == 1 else real(news, neighbour, now)

    monkeypatch.setattr(MemberNews, "entries_for", withheld)
    changing = Changing([(2.0, 0, LEAVE)], graph="{name: ring}", network="links: local, deadline: 2.0")
    assert changing.run() == dict.fromkeys(range(4))
    assert {peer: len(changing.home.list_of(peer).entries) for peer in range(4)} == dict.fromkeys(range(4), 1)
    assert changing.weights()[2] == 0.0


def test_the_law_sees_a_leaver_that_forgets_its_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(protocol: PushSumProtocol, round_index: int, receivers: object) -> list[int]:
        for name in protocol.mass:
            protocol.mass[name] = protocol._arithmetic.nothing(protocol.mass[name])
        return [0]

    monkeypatch.setattr(PushSumProtocol, "hand_over", forget)
    with pytest.raises(BrokenLawError):
        Changing([(2.0, 0, LEAVE)], network="links: local, deadline: 2.0").run()
