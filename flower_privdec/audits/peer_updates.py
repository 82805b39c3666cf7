"""An audit of a Flower app whose peers protect their updates: each peer's are there or not, by the toss of a coin.

The app trains as usual. If a peer's coin says no, its updates are replaced by zero before they are clipped and noised:
the adjacency of every ε of `PeerMod`. An observer of all that the peer sends knows the update that it would have sent.
What is released is normal around that, or around zero, so that the log of the likelihood ratio of the two is

    Σ_t (⟨r_t, u_t⟩ - ‖u_t‖² / 2) / (σ C)²,    r_t what was released, u_t the clipped update.

Each peer of each run is a trial. Given what was released before, u_t is the same in both worlds, so that this is the
ratio of the whole run's. It shows most where updates are longer than the clip norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from flower_privdec.audits.bounds import epsilon_at_zero, epsilon_from_scores
from flower_privdec.audits.noise_check import NoiseCheck
from flower_privdec.audits.one_run import OneRun
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.ledger.ledger import Ledger
from flower_privdec.privacy.ledger.segments import Entry
from flower_privdec.privacy.ledger.spending import releases_in
from flower_privdec.privacy.updates import UPDATES
from flower_privdec.rows.keys import keyed_generator

UPDATED = "peers' updates in or out, over runs of the app"


class WatchedPeer:
    """One peer in one run.

    Attributes:
        inside: whether its updates are there.
        score: the log likelihood ratio of all that it released.
        delta: the δ of its ε.
        steps: how many updates it released.
        entries: the entries of its ledger after the last.
    """

    def __init__(self, *, inside: bool, delta: float) -> None:
        self.inside = inside
        self.score = 0.0
        self.delta = delta
        self.steps = 0
        self.entries: list[Entry] = []

    @property
    def epsilon(self) -> float:
        """Return the ε of what its ledger was charged."""
        return epsilon(releases_in(self.entries), self.delta)


class UpdateAudit:
    """An observer of all peers' updates inside `auditing_updates`; an `UpdateObserver`.

    Attributes:
        peers: by the path of their ledger.
    """

    def __init__(self, seed: int, confidence: float) -> None:
        self._seed = seed
        self._confidence = confidence
        self._noise = NoiseCheck()
        self.refusal: ScenarioError | None = None
        self.peers: dict[Path, WatchedPeer] = {}

    def admit(self, ledger: Ledger, delta: float) -> None:
        """Refuse a ledger that had lines before the audit; see UpdateObserver."""
        path = ledger.path.absolute()
        if path in self.peers:
            return
        if ledger.entries:
            error = ScenarioError(
                f"{path} has entries from real training, and the audit would add its own: give the peers a new "
                "folder, and delete it afterwards",
                code="audit.real-ledger",
            )
            self.refusal = self.refusal or error
            raise error
        draws = keyed_generator(self._seed, "audit coins of updates", len(self.peers))
        self.peers[path] = WatchedPeer(inside=bool(draws.random() < 0.5), delta=delta)

    def released(
        self, ledger: Ledger, update: np.ndarray, clip_norm: float, noise: float, release: Callable[..., np.ndarray]
    ) -> np.ndarray:
        """See UpdateObserver."""
        peer = self.peers[ledger.path.absolute()]
        seen = release(clip_norm, noise, update if peer.inside else np.zeros_like(update))

        # The observer clips the update itself, so that a release that is clipped less stands out.
        expected = update.astype(np.float64)
        length = float(np.linalg.norm(expected))
        if length > clip_norm:
            expected *= clip_norm / length

        std = noise * clip_norm
        peer.score += float(seen @ expected - expected @ expected / 2) / std**2
        peer.steps += 1
        peer.entries = list(ledger.entries)

        drawn = seen - expected if peer.inside else seen
        self._noise.see(drawn / std, f"step {peer.steps} of {ledger.path.parent.name}")
        return seen

    @property
    def result(self) -> OneRun:
        """Guess the coins; return the lower bound on ε that this proves, with the largest ε of the peers' ledgers.

        Raises:
            ScenarioError: a ledger was refused.
            RunError: no peer released a protected update.
        """
        if self.refusal is not None:
            raise self.refusal
        peers = [peer for peer in self.peers.values() if peer.steps]
        if not peers:
            raise RunError(
                "no peer released an update that PeerMod protects: give it clip_norm and epsilon or noise_multiplier, "
                "and run the app inside auditing_updates(), in the same thread",
                code="audit.no-step",
            )

        defects = self._noise.result()
        short = [peer for peer in peers if sum(release.steps for release in releases_in(peer.entries)) < peer.steps]
        if short:
            defects["ledger"] = f"{len(short)} peers' ledgers were charged for fewer updates than were released"

        # Most ledgers are charged alike, and an ε takes long to compute.
        different = {(releases_in(peer.entries), peer.delta): peer for peer in peers}
        largest = max(peer.epsilon for peer in different.values())

        delta = max(peer.delta for peer in peers)
        scores = np.array([peer.score for peer in peers])
        inside = np.array([peer.inside for peer in peers])
        absent = scores[~inside]
        present = scores[inside]
        level = (1 + self._confidence) / 2  # of two bounds together
        shown = [bound(absent, present, delta, level) for bound in (epsilon_at_zero, epsilon_from_scores)]
        return OneRun(
            epsilon=largest,
            delta=delta,
            epsilon_lower_bound=max(shown),
            canaries=len(peers),
            guesses=len(peers),
            right=int(((scores > 0) == inside).sum()),
            method=UPDATED,
            defects=defects,
        )


@contextmanager
def auditing_updates(*, seed: int = 0, confidence: float = 0.95) -> Iterator[UpdateAudit]:
    """Audit the protected updates of a Flower app that trains inside the `with` block and in this thread.

    Read `result` afterwards.

    Run the app several times inside, each time over new folders: each peer of each run is a trial.

    Args:
        seed: the seed of the coins. Noise comes from the operating system.
        confidence: the least probability with which the result is a lower bound.

    Raises:
        ScenarioError: raised by `result` if a peer's ledger had entries already.

    Privacy: the ledgers are charged as usual, and the models are releases. Delete both.
    """
    audit = UpdateAudit(seed, confidence)
    with UPDATES.open_to(audit):
        yield audit
