"""The schedule of final mixing over random graphs, weights, participations and lengths of a run, without I/O."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from mutants import mutated
from torch import Tensor

from flower_privdec.core import Mix
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.participation import build_participation
from flower_privdec.graph.topology import build_topology
from flower_privdec.pushsum import lockstep

SCHEDULES = 40
GRAPHS = [
    ("directed-exponential", "column-stochastic"),
    ("directed-ring", "column-stochastic"),
    ("complete", "column-stochastic"),
    ("ring", "metropolis"),
    ("complete", "metropolis"),
    ("random-edges", "metropolis"),
]


class Program:
    """An algorithm of one or two exchanges a round."""

    def __init__(self, exchanges: int) -> None:
        self.program = tuple(Mix(("x",)) for _ in range(exchanges))
        self.final_exchange = self.program[-1]

    def robustly(self, mix: Mix) -> Mix:
        """See Algorithm: nobody judges."""
        return mix


def check_schedule(draw: Random, code: Any = lockstep) -> None:
    """Mix the peers' models as each peer's own turns in final mixing have it, and look at what comes out."""
    name, weights = draw.choice(GRAPHS)
    n, rounds = draw.randint(3, 7), draw.randint(1, 9)
    kind = draw.choice(["all", "uniform"])
    active = build_participation(kind, n, draw.randrange(99), 0.6 if kind == "uniform" else None)
    mixing = Mixing(build_topology(name, n, seed=draw.randrange(99)), weights, active)
    final, left = code.final_rounds(mixing, rounds, "auto")
    table = code.Timetable(Program(draw.choice([1, 2])), mixing, rounds, final)
    assert left is not None
    x, w = torch.eye(n, dtype=torch.float64), torch.ones(n, 1, dtype=torch.float64)
    places = []
    for k in range(rounds, table.end):
        assert apart(x / w) > code.AGREED or k == table.end - 1, "one round more than it takes, to see that all agree"
        turns = {i: table.turn(i, table.place(k, table.final_at)) for i in range(n)}
        places.append(table.place(k, table.final_at))
        x, w = mixed(turns, x, mixing.sends_shares), mixed(turns, w, mixing.sends_shares)
        torch.testing.assert_close(x.sum(0), torch.ones(n, dtype=torch.float64), rtol=1e-12, atol=0)
        assert float(w.sum()) == pytest.approx(n, rel=1e-12)
        assert bool((w > 0).all())
    assert places == [*range(table.places - final, table.places)]
    assert table.place(rounds - 1, 0) < places[0]
    assert apart(x / w) <= code.AGREED, f"{name} of {n} after {final} rounds: {apart(x / w)}"


def apart(models: Tensor) -> float:
    """Return how far models are from their mean at most, whatever the peers began with, over the largest distance."""
    return float((models - models.mean(0)).abs().sum(1).max())


def mixed(turns: dict[int, Any], rows: Tensor, sends_shares: bool) -> Tensor:
    """Return rows after one exchange; each peer does what its own turn has."""
    found = torch.zeros_like(rows)
    for i, turn in turns.items():
        assert turn.receivers == {*turn.weights}
        assert turn.senders == {j for j, other in turns.items() if i in other.receivers}, "each message is awaited"
        assert 0 <= sum(turn.weights.values()) < 1
        kept = 1 - (sum(turn.weights.values()) if sends_shares else sum(turns[j].weights[i] for j in turn.senders))
        found[i] += kept * rows[i]
        for j, weight in turn.weights.items():
            found[j] += weight * rows[i]
    return found


def check_all(code: Any = lockstep) -> None:
    for seed in range(SCHEDULES):
        check_schedule(Random(seed), code)


def test_own_turns_bring_one_model_without_losing_mass() -> None:
    check_all()


MUTANTS = {
    "one round less": ("return math.ceil(needed / damping) + 1, left", "return max(1, needed - 1), left"),
    "many rounds more": ("return math.ceil(needed / damping) + 1, left", "return needed + 3, left"),
    "measured from the first round of the run": ("everybody(mixing), rounds, max(", "everybody(mixing), 0, max("),
    "only those that are active mix": ("self.final_mixing = everybody(mixing)", "self.final_mixing = mixing"),
    "a place twice": ("min(round_index, self.end) - self.rounds", "max(0, round_index - self.rounds - 1)"),
    "the graph of another round": (
        "self.final_mixing, self.rounds + place - self._exchanges",
        "self.final_mixing, self.rounds",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str) -> None:
    code = mutated(lockstep, *MUTANTS[name])
    with pytest.raises(AssertionError):
        check_all(code)
