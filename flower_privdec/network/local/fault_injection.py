"""What `privdec up` does to its own peers when it is asked to, so that one can see what a network makes of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from flower_privdec.errors import ScenarioError

FORM = re.compile(r"(?P<peer>[0-9]{1,9})@(?P<round>[0-9]{1,9})")


@dataclass(frozen=True)
class Mishap:
    """A peer is killed without a warning, once everybody has handed in a round.

    Attributes:
        peer: which.
        round_index: the round.
        comes_back: whether it is started again, and goes on from its disk.
    """

    peer: int
    round_index: int
    comes_back: bool


def mishaps(kill: Iterable[str], restart: Iterable[str], n_peers: int, rounds: int) -> tuple[Mishap, ...]:
    """Read mishaps as a command line has them, PEER@ROUND.

    Args:
        kill: those after which the peer does not come back.
        restart: those after which it does.

    Raises:
        ScenarioError: one names no peer or no round before the last, or nobody would be left.
    """
    found = [_mishap("--kill", each, n_peers, rounds, False) for each in kill]
    gone = {each.peer for each in found}
    if len(gone) >= n_peers:
        raise ScenarioError(f"--kill ends all {n_peers} peers: leave one, or more that can still train together")
    return (*found, *(_mishap("--restart", each, n_peers, rounds, True) for each in restart))


def _mishap(option: str, said: str, n_peers: int, rounds: int, comes_back: bool) -> Mishap:
    form = FORM.fullmatch(said)
    if form is None:
        raise ScenarioError(f"{option} {said!r} must be PEER@ROUND, as 3@100")
    peer, round_index = int(form["peer"]), int(form["round"])
    if peer >= n_peers:
        raise ScenarioError(f"{option} {said}: there are the peers 0 to {n_peers - 1}")
    if not round_index < rounds:
        raise ScenarioError(f"{option} {said}: the round must be before the last, {rounds}")
    return Mishap(peer, round_index, comes_back)
