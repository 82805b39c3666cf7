"""Masked means against a ServerApp that chooses the sets: no sums of few peers, nor two that differ by few."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from peer_states import state_in
from raising import raises
from routing_peers import client, sets_its_values_once, zeros

from flower_privdec.common.errors import RunError
from flower_privdec.flower import LocalGrid, PushSum
from flower_privdec.flower.mods.peer_messages import PeerRequest
from flower_privdec.flower.node_settings import PeerSettings
from flower_privdec.peer.masking import unmasked_sum

N, RUN = 4, "run"


class Server:
    """A ServerApp that asks deployed peers for whatever sums it likes, after an honest round of push-sum."""

    def __init__(self, folder: Path, **config: Any) -> None:
        app = client(sets_its_values_once)
        self.grid = LocalGrid(app, N, config={peer: {"folder": str(folder), **config} for peer in range(N)})
        self.folder, self.round, self.label = folder, 1, count(3)
        PushSum(name=RUN, fraction_evaluate=0.0).start(self.grid, zeros(), 1)
        self.step(range(N))

    def models(self) -> np.ndarray:
        """Return what the server must not learn: (x, w) of each peer, [peer, 4]."""
        states = [state_in(self.folder / f"peer-{peer}", RUN) for peer in range(N)]
        return np.array([[*state.x, state.w] for state in states if state is not None])

    def ask(self, peer: int, kind: str, **fields: Any) -> RecordDict:
        """Return what a peer answers to a request."""
        known = {"neighbors": list(range(N)), **self.introduction()}
        request = PeerRequest(kind, RUN, peer, **{**known, **fields})
        (reply,) = self.grid.send_and_receive(
            [
                Message(
                    RecordDict(
                        {"privdec.says": request.record(), "config": ConfigRecord({"server-round": self.round})}
                    ),
                    100 + peer,
                    "train",
                )
            ]
        )
        assert not reply.has_error(), reply.error.reason
        return reply.content

    def step(self, peers: Iterable[int], **fields: Any) -> None:
        """Let some peers take part in one more round, in which no mean is asked for."""
        self.round = max(self.round + 1, next(self.label))
        self.label = count(self.round)
        for peer in peers:
            self.ask(peer, "round", round_index=self.round, rounds=self.round, **fields)

    def introduction(self) -> dict[str, Any]:
        states = [state_in(self.folder / f"peer-{peer}", RUN) for peer in range(N)]
        keys = [bytes.fromhex((self.folder / f"peer-{peer}" / "identity.pub").read_text()) for peer in range(N)]
        return {"incarnations": [state.shares.incarnation for state in states if state is not None], "keys": keys}

    def sum_of(self, peers: Sequence[int], label: int | None = None) -> np.ndarray | None:
        """Return the sum of what some peers hand in, and None where one of them refuses."""
        fields = {
            "wants_mass": True,
            "mean_of": list(peers),
            "round_index": next(self.label) if label is None else label,
        }
        answers = [self.ask(peer, "deliver", **fields) for peer in peers]
        masses = [answer["privdec.mass"]["mass"].numpy() for answer in answers if "privdec.mass" in answer]
        return unmasked_sum(masses) if len(masses) == len(peers) else None

    def solved(self, sets: Iterable[Sequence[int]]) -> np.ndarray | None:
        """Return peer 0's (x, w) by linear algebra over the sums of sets, and None where they do not determine it."""
        rows, sums = [], []
        for peers in sets:
            if (total := self.sum_of(peers)) is not None:
                rows.append([float(peer in peers) for peer in range(N)])
                sums.append(total)
        if not rows:
            return None
        weights, *_ = np.linalg.lstsq(np.array(rows).T, np.eye(N)[0], rcond=None)
        return weights @ np.array(sums) if np.allclose(np.array(rows).T @ weights, np.eye(N)[0]) else None


EVERYBODY = range(N)
CHOSEN = {
    "pairs": list(combinations(EVERYBODY, 2)),
    "all but one": [EVERYBODY, (1, 2, 3)],
    "triples": list(combinations(EVERYBODY, 3)),
    "a triangle": [(0, 1), (1, 2), (0, 2)],
}


@pytest.mark.parametrize("config", [{}, {"mean-peers": 3}, {"mean-peers": 2}], ids=["all", "three", "two"])
@pytest.mark.parametrize("sets", CHOSEN.values(), ids=list(CHOSEN))
def test_sums_over_chosen_sets_hide_each_model(
    sets: list[Sequence[int]], config: dict[str, Any], tmp_path: Path
) -> None:
    server = Server(tmp_path, **config)
    assert server.solved(sets) is None


@pytest.mark.parametrize(("config", "least"), [({}, N), ({"mean-peers": 2}, 2)])
def test_every_sum_covers_as_many_peers_as_required(config: dict[str, Any], least: int, tmp_path: Path) -> None:
    server = Server(tmp_path, **config)
    assert server.sum_of(range(least - 1)) is None
    assert server.sum_of(range(least)) is not None


def test_a_round_in_between_makes_no_near_set(tmp_path: Path) -> None:
    """Each state enters one sum, but the models of two rounds are near: so are the sums' differences."""
    server = Server(tmp_path, **{"mean-peers": 3})
    assert server.sum_of(EVERYBODY) is not None
    server.step(EVERYBODY)
    assert server.sum_of((1, 2, 3)) is None
    assert server.sum_of(EVERYBODY) is not None


def test_a_moving_peer_is_hidden_in_successive_sums(tmp_path: Path) -> None:
    server = Server(tmp_path)
    assert server.sum_of(EVERYBODY) is not None
    server.step([0], receivers=[1], weights=[0.5])  # half of its mass is on its way: the sum would change by that
    assert server.sum_of(EVERYBODY) is None


def test_the_same_sum_again_is_the_same_bytes(tmp_path: Path) -> None:
    server = Server(tmp_path)
    one, two = (server.sum_of(EVERYBODY, label=7) for _ in range(2))
    np.testing.assert_array_equal(one, two)
    np.testing.assert_allclose(one, server.models().sum(axis=0), rtol=1e-12)
    answers = [server.ask(0, "deliver", wants_mass=True, mean_of=list(EVERYBODY), round_index=7) for _ in range(2)]
    masses = [answer["privdec.mass"]["mass"].numpy() for answer in answers]
    np.testing.assert_array_equal(*masses)


@pytest.mark.parametrize("value", [1, N + 1, 2.5])
def test_mean_peers_of_a_node_config_is_checked(value: Any, tmp_path: Path) -> None:
    context = Context(
        1, 2, {"partition-id": 0, "num-partitions": N, "folder": str(tmp_path), "mean-peers": value}, RecordDict(), {}
    )
    code = "node.peers" if isinstance(value, int) else "node.whole-number"
    with raises(RunError, code, f"mean-peers={value}"):
        PeerSettings.of(context, -1, "", None)
