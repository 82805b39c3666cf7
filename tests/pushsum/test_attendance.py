"""Who counts as there: two peers that decide for themselves draw nearly the same, whatever becomes of them."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from flower_privdec.pushsum.attendance import LEVEL, SILENT, Attendance


class Two:
    """Two peers, what each has heard of the other, and the draws of their pair: (both processes, round) by peer."""

    def __init__(self) -> None:
        self.rounds = [0, 0]
        self.processes = [0, 0]
        self.heard: list[tuple[int, int] | None] = [None, None]
        self.sides = [Attendance(0, [1]), Attendance(1, [0])]
        self.drawn: list[set[tuple[int, int, int]]] = [set(), set()]
        self.hear()

    def hear(self) -> None:
        """Let each learn of the other."""
        self.heard = [(self.processes[1], self.rounds[1]), (self.processes[0], self.rounds[0])]

    def step(self, side: int) -> bool:
        """Let one take a round's step; return whether it counts on the other."""
        other = 1 - side
        heard = self.heard[side]
        absent = self.sides[side].begin_round(self.rounds[side], {} if heard is None else {other: heard})
        if not absent:
            assert heard is not None
            one, two = self.processes[side], heard[0]
            names = (one, two) if side == 0 else (two, one)
            draw = (*names, self.rounds[side])
            assert draw not in self.drawn[side], "a draw was used twice"
            self.drawn[side].add(draw)
        self.rounds[side] += 1
        return not absent

    def restart(self, side: int) -> None:
        """Start another process, which has heard nothing yet."""
        self.processes[side] += 1
        self.heard[side] = None
        self.sides[side] = Attendance(side, [1 - side])

    def together(self, rounds: int, deaf: bool = False) -> list[bool]:
        """Let both take some rounds, and hear of each other meanwhile."""
        counted = list[bool]()
        for _ in range(rounds):
            counted += [self.step(0), self.step(1)]
            if not deaf:
                self.hear()
        return counted

    @property
    def one_sided(self) -> int:
        """Return how many draws only one has used."""
        return len(self.drawn[0] ^ self.drawn[1])


def test_partners_in_step_or_behind_always_count() -> None:
    two = Two()
    assert all(two.together(40))
    for _ in range(20):  # one gets behind, and gets on
        assert two.step(0)
        two.hear()
        if two.rounds[0] % 3 == 0:
            assert two.step(1)
            two.hear()
    while two.rounds[1] < two.rounds[0]:  # the other is done, and takes no more steps
        assert two.step(1)
    assert two.one_sided == 0


def test_a_partner_that_is_gone_counts_no_more() -> None:
    two = Two()
    two.together(10)
    counted = [two.step(0) for _ in range(30)]
    noticed = SILENT + 1
    assert counted == [True] * noticed + [False] * (30 - noticed)
    assert two.sides[0].since == {1: 10 + noticed}
    assert two.one_sided == noticed


def test_a_restarted_partner_draws_from_where_both_are() -> None:
    """It begins some rounds behind, whose draws nobody would take out again."""
    two = Two()
    two.together(10)
    for _ in range(20):
        two.step(0)
    before = two.one_sided
    two.restart(1)
    two.hear()
    two.together(40)
    while two.rounds[1] < two.rounds[0]:
        two.step(1)
    assert two.one_sided == before
    assert (0, 1, 30) in two.drawn[0] & two.drawn[1]
    assert min(number for _, process, number in two.drawn[1] if process == 1) == 30
    assert not two.sides[0].absent


@pytest.mark.parametrize("both_go_on", [True, False])
def test_a_cut_off_partner_counts_again_once_heard(both_go_on: bool) -> None:
    """With the secret that they have: no draw is used twice, and only what was drawn before they noticed is left."""
    two = Two()
    two.together(10)
    for _ in range(30):
        two.step(0)
        if both_go_on:
            two.step(1)
    assert two.sides[0].absent
    two.hear()
    two.together(40)
    while two.rounds[1] < two.rounds[0]:
        two.step(1)
    assert two.one_sided <= SILENT + LEVEL
    assert not two.sides[0].absent
    assert not two.sides[1].absent


@pytest.mark.parametrize("seed", range(20))
def test_what_only_one_draws_follows_from_interruptions(seed: int) -> None:
    """Whatever happens: some rounds' noise for each time that one is cut off, killed or far behind, and no more."""
    draw = Random(seed)
    two = Two()
    events = Counter[str]()
    for _ in range(25):
        kind = draw.choice(["together", "deaf", "alone", "restart"])
        if kind == "together":
            two.together(draw.randrange(1, 30))
            continue
        events[kind] += 1
        if kind == "deaf":
            two.together(draw.randrange(1, 30), deaf=True)
        elif kind == "alone":
            side = draw.randrange(2)
            for _ in range(draw.randrange(1, 30)):
                two.step(side)
        else:
            two.restart(draw.randrange(2))
        two.hear()
    slowest = min((0, 1), key=lambda side: two.rounds[side])
    while two.rounds[slowest] < two.rounds[1 - slowest]:
        two.step(slowest)
    # An interruption leaves the draws of the rounds in which it was not noticed, at either end, twice.
    assert two.one_sided <= 2 * (SILENT + LEVEL) * events.total()
