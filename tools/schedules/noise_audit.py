"""The noise that releases of peers really had, counted from outside, whatever the peers believe.

A draw that two peers add cancels in their mean, and hides each of them from all but the other. So each may be used once
by each of two peers, and what hides a release has to suffice without the draws of those who collude.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from flower_privdec.privacy.noise.deployed import SharedNoise
from flower_privdec.privacy.noise.kinds.pair_noise import CancellingNoise
from flower_privdec.privacy.noise.source import NoiseMechanism


class ShortNoiseError(Exception):
    """A release had less noise than its ε needs, or a draw was used twice."""


@dataclass
class Release:
    """What one process added to a step's sum, in the units in which it is added.

    Attributes:
        peer, step: whose, and which.
        needed: the standard deviation of noise that the peer's ε needs.
        own: that of its own noise.
        draws: that of each draw that it added, by its key.
    """

    peer: int
    step: int
    needed: float
    own: float = 0.0
    draws: dict[bytes, float] = field(default_factory=dict)


@dataclass
class Audit:
    """All releases of a network."""

    releases: list[Release] = field(default_factory=list)

    def by_draw(self) -> dict[bytes, list[Release]]:
        """Return the releases that each draw was added to."""
        found = defaultdict(list)
        for release in self.releases:
            for key in release.draws:
                found[key].append(release)
        return found

    def check(self, colluding: int, share: float = 1.0) -> None:
        """Check that each draw was used once by each of two peers, and that enough noise hides each release.

        An adversary knows all but what the release's peer drew itself, and its partners' own noise.

        Args:
            share: of the noise that a peer needs, which is to be left.

        Raises:
            ShortNoiseError: names the release.
        """
        by_draw = self.by_draw()
        for users in by_draw.values():
            names = [(user.peer, user.step) for user in users]
            if len(users) > 2 or len({peer for peer, _ in names}) < len(users):
                raise ShortNoiseError(f"a side used a draw twice: peers and steps {names}")
            if len({step for _, step in names}) > 1:
                raise ShortNoiseError(f"a draw was used in two steps: peers and steps {names}")

        for release in self.releases:
            hidden = []
            for key, std in release.draws.items():
                others = [user.own for user in by_draw[key] if user is not release]
                own = others[0] if others else float("inf")
                hidden.append(std**2 / (1 + (std / own) ** 2))
            honest = sorted(hidden)[: max(0, len(hidden) - colluding)]
            variance = release.own**2 + sum(honest)
            enough = (share * release.needed) ** 2 * (1 - 1e-9)
            if variance < enough:
                raise ShortNoiseError(
                    f"step {release.step} of peer {release.peer} has noise of {variance**0.5:.4g} against {colluding} "
                    f"colluding peers, and its ε needs {share * release.needed:.4g}"
                )

    def one_sided(self) -> list[tuple[int, int]]:
        """Return peer and step of each draw that only one side has used."""
        return [(users[0].peer, users[0].step) for users in self.by_draw().values() if len(users) == 1]


@contextmanager
def audited() -> Iterator[Audit]:
    """Record what the noise mechanism of cancelling noise adds, in this process, as long as the context lasts."""
    audit = Audit()
    add = CancellingNoise.add_in_units_
    add_shared = SharedNoise.add_
    add_own = NoiseMechanism.add_

    def released(mechanism: CancellingNoise, out: Any, std: Any, units: Any, noised: Any) -> None:
        (peer,) = noised.peers.tolist()
        planned = float(std[0]) / float(units[0])
        needed = planned / float(mechanism.plan.own[noised.step, peer])
        audit.releases.append(Release(peer, noised.step, needed))
        add(mechanism, out, std, units, noised)

    def shared(source: SharedNoise, out: Any, std: Any, *rest: Any) -> None:
        draws = audit.releases[-1].draws
        if source._key in draws:
            raise ShortNoiseError("a release has a draw twice")
        draws[source._key] = abs(float(std[0]))
        add_shared(source, out, std, *rest)

    def own(mechanism: NoiseMechanism, out: Any, std: Any, noised: Any) -> None:
        audit.releases[-1].own = float(std[0])
        add_own(mechanism, out, std, noised)

    with (
        patch.object(CancellingNoise, "add_in_units_", released),
        patch.object(SharedNoise, "add_", shared),
        patch.object(NoiseMechanism, "add_", own),
    ):
        yield audit
