"""Observe what a peer releases, from outside: `python -m tools.soak.release_counter FILE EVENTS ARGUMENTS`.

Runs `privdec` with ARGUMENTS. A byte is appended to FILE after every private step, before anything of it can leave. To
EVENTS go lines on what depends on which step, and on what came:

    saved DIGEST N      a checkpoint, with N steps taken by this process
    resumed DIGEST      the checkpoint that this process continues
    sent DIGEST N       rows or a share that were put together after N steps of this process
    received DIGEST     rows or a share of a neighbour, refused or not
    drawn DIGEST        what a pair of peers draws from its secret, and this process adds to a release
    noised SUM SHARE    a release, and the noise that the colluders who know most cannot take off it, over what its ε is
                        for: of the peer's own noise and of the draws that it added, as they were

A DIGEST is of numbers, to which noise was added: no two are alike by chance. `ReleaseObserver` joins the lines of all
processes, also of copies and of folders that are gone by then: it counts the steps on which something depends that
a neighbour received.
"""

from __future__ import annotations

import hashlib
import math
import os
import runpy
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from flower_privdec.core.cohort import Cohort, StepRequest, no_examples
from flower_privdec.privacy.mechanism.cancelling import PairPlan
from flower_privdec.privacy.noise import NoisedSum
from flower_privdec.rows.keys import digest as digest_of

PAIR_PURPOSE = "pair"  # of the draws of a pair
ENOUGH = 1 - 1e-6  # of the noise that an ε is for, by rounding


def _opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def count_into(path: Path) -> Callable[[], int]:
    """Append a byte to a file after every private step of this process, and return what returns how many there were.

    The noise that a peer adds when its budget is spent is no private step: it reads no example.
    """
    handle = _opened(path)
    release = Cohort.release_rows_
    taken = [0]

    def counted(cohort: Cohort, request: StepRequest) -> None:
        release(cohort, request)
        if request.estimate is no_examples:
            return
        taken[0] += 1
        os.write(handle, b".")

    Cohort.release_rows_ = counted  # type: ignore[method-assign, assignment]
    return lambda: taken[0]


def counted_in(path: Path) -> int:
    """Return how many private steps were counted; 0 before the first."""
    return path.stat().st_size if path.exists() else 0


def digest(values: Mapping[str, Tensor]) -> str:
    """Return a digest of some rows, whatever their axes."""
    state = hashlib.sha256()
    for name, value in sorted(values.items()):
        state.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return state.hexdigest()[:32]


def record_into(path: Path, taken: Callable[[], int]) -> None:
    """Append lines to a file on what this process sends, receives, saves and resumes."""
    from flower_privdec.peer.peer import RunningPeer
    from flower_privdec.peer.row_exchange import RowExchange
    from flower_privdec.peer.session import Session
    from flower_privdec.privacy.noise.deployed import SystemNoise
    from flower_privdec.privacy.noise.kinds.pair_noise import CancellingNoise
    from flower_privdec.pushsum.exactly_once import FrozenShare, PushSumProtocol, RefusedError
    from flower_privdec.pushsum.frames import RowMessage
    from flower_privdec.pushsum.lockstep import Lockstep

    handle = _opened(path)
    seen = set[str]()

    def note(*words: object) -> None:
        key = f"{words[0]} {words[1]}"
        if key not in seen:
            os.write(handle, (" ".join(map(str, words)) + "\n").encode())
        seen.add(key)

    def before(owner: type, name: str, recording: Callable[..., None]) -> None:
        method = getattr(owner, name)

        def telling(*arguments: Any, **options: Any) -> Any:
            recording(*arguments, **options)
            return method(*arguments, **options)

        setattr(owner, name, telling)

    def shares(protocol: Any, durable: Any, **_: Any) -> None:
        for edge in durable.edges.values():
            for share in edge.frozen:
                note("sent", digest(share.values), taken())

    def posted(exchanges: Any, at: int, round_index: int, rows: Mapping[int, Mapping[str, Tensor]]) -> None:
        for values in rows.values():
            note("sent", digest(values), taken())

    def arrived(machine: Any, place: int, outgoing: Mapping[int, RowMessage], *rest: Any) -> None:
        for message in outgoing.values():
            note("sent", digest(message.values), taken())

    def saved(peer: Any, place: int, state: Any, *rest: Any) -> None:
        note("saved", digest(state.rows), taken())

    def received(session: Any, caller: int, content: memoryview) -> Any:
        try:
            return read(session, caller, content)
        finally:  # what is refused has come, too
            with suppress(RefusedError):
                for message in session.frames.decode_all(content, session.most):
                    if isinstance(message, FrozenShare | RowMessage):
                        note("received", digest(message.values))

    def resumed(peer: Any) -> Any:
        restored = checkpoints(peer)
        for checkpoint in restored[-1:]:
            note("resumed", digest(checkpoint.state.rows))
        return restored

    def drawn(source: SystemNoise, out: Any, std: Any, step: int, peers: Any, purpose: str = "", *rest: Any) -> None:
        if source._key is None:
            own.append(float(std[0]))
        elif purpose == PAIR_PURPOSE:
            keys.append(source._key)
            os.write(handle, f"drawn {hashlib.sha256(source._key).hexdigest()[:32]}\n".encode())

    def noised(mechanism: CancellingNoise, out: Any, std: Any, what: Any) -> None:
        own.clear()
        keys.clear()
        mix(mechanism, out, std, what)
        share = left_of(mechanism.plan, what, float(std[0]), own[-1], keys)
        os.write(handle, f"noised {what.name} {share:.9f}\n".encode())

    own = list[float]()  # the standard deviation of a release's own noise
    keys = list[bytes]()  # of the draws that it added
    mix = CancellingNoise.add_
    CancellingNoise.add_ = noised  # type: ignore[method-assign, assignment]
    before(SystemNoise, "add_", drawn)
    before(PushSumProtocol, "committed", shares)
    before(PushSumProtocol, "restore", shares)
    before(RowExchange, "post", posted)
    before(Lockstep, "arrive", arrived)
    before(RunningPeer, "_save", saved)
    read = Session.read
    checkpoints = RunningPeer._checkpoints
    Session.read = received  # type: ignore[method-assign, assignment]
    RunningPeer._checkpoints = resumed  # type: ignore[method-assign, assignment]


def left_of(plan: PairPlan, noised: NoisedSum, planned: float, own: float, keys: Collection[bytes]) -> float:
    """Return the noise that a release of one peer has against its worst colluders, over what its ε is for.

    If the peer has promised its partners more noise of its own than it adds, it is the share that it adds, if that is
    less: they count on it.

    Args:
        planned: the standard deviation of own noise that it was asked for.
        own: that of what was drawn.
        keys: of the draws of pairs that were added.
    """
    step = noised.step
    peer = int(noised.peers[0])
    needed = plan.needed[step]
    unit = planned / plan.own[step, peer] / needed[peer]  # from the plan's units to the release's
    hidden = []
    for (one, other), std in zip(plan.edges.tolist(), plan.planned_pairs(step).tolist(), strict=True):
        if peer not in (one, other) or not noised.secrets.knows(one, other):
            continue
        if digest_of(32, "pair noise", noised.secrets.of(one, other), step, noised.name) in keys:
            partner = other if one == peer else one
            least = max(float(plan.planned[step, partner]), noised.secrets.promised(partner, step))
            variance = float(least * needed[partner]) ** 2  # that it adds at least
            hidden.append(std**2 * variance / (std**2 + variance))
    unknown = sorted(hidden)[: max(0, len(hidden) - plan.colluding)]
    left = math.sqrt((own / unit) ** 2 + sum(unknown)) / float(needed[peer])

    promised = noised.secrets.promised(peer, step) * float(needed[peer])
    if promised > 0:
        left = min(left, own / unit / promised)
    return left


class ReleaseObserver:
    """Counts the releases of each identity that its neighbours received, over all its processes, folders and copies.

    Args:
        folder: of files PEER.LIFE.events, one for each process.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._sent: dict[str, tuple[str, int]] = {}
        self._saved: dict[str, tuple[str, int]] = {}
        self._resumed: dict[str, str] = {}
        self._unexplained: set[str] = set()
        self._revealed: dict[str, int] = defaultdict(int)  # by life: how many of its steps
        self._drawn: dict[str, list[str]] = defaultdict(list)  # by draw: the peers that added it, each time
        self._least: dict[str, float] = {}  # by peer: the least noise of a release, over what its ε is for

    def look(self) -> None:
        """Read what was written since the last time."""
        for path in sorted(self._folder.glob("*.events")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            life = path.name.removesuffix(".events")
            for line in whole.decode().splitlines():
                kind, name, *steps = line.split()
                if kind == "drawn":
                    self._drawn[name].append(life.split(".")[0])
                elif kind == "noised":
                    peer = life.split(".")[0]
                    self._least[peer] = min(float(steps[0]), self._least.get(peer, math.inf))
                elif kind == "received":
                    self._unexplained.add(name)
                elif kind == "resumed":
                    self._resumed[life] = name
                else:
                    (self._sent if kind == "sent" else self._saved).setdefault(name, (life, int(steps[0])))

        for name in self._unexplained & self._sent.keys():
            self._reveal(*self._sent[name])
        self._unexplained -= self._sent.keys()

    def _reveal(self, life: str, steps: int) -> None:
        """Count some steps of a process, and those before its start that it depends on."""
        is_new = life not in self._revealed
        self._revealed[life] = max(steps, self._revealed[life])
        parent = self._saved.get(self._resumed.get(life, ""))
        if is_new and parent is not None:
            self._reveal(*parent)

    def received(self, peer: int) -> int:
        """Return how many releases of a peer were received by then."""
        return sum(steps for life, steps in self._revealed.items() if life.split(".")[0] == str(peer))

    @property
    def shared(self) -> int:
        """Return how many draws of pairs both of their ends added."""
        return sum(len(peers) == 2 for peers in self._drawn.values())

    @property
    def apart(self) -> int:
        """Return how many draws of pairs one of their ends alone added."""
        return sum(len(peers) == 1 for peers in self._drawn.values())

    def pairs_problem(self) -> str | None:
        """Return what makes an ε of noise that cancels false, or None."""
        for peers in self._drawn.values():
            if len(set(peers)) < len(peers):
                return f"peer {max(peers, key=peers.count)} added a draw that it shares with another to two releases"
            if len(peers) > 2:
                return f"peers {', '.join(peers)} added one draw, which two of them may share"
        for peer, least in self._least.items():
            if least < ENOUGH:
                return f"a release of peer {peer} has {least:.6g} times the noise that its ε is for"
        return None


if __name__ == "__main__":
    record_into(Path(sys.argv[2]), count_into(Path(sys.argv[1])))
    sys.argv = ["privdec", *sys.argv[3:]]
    runpy.run_module("flower_privdec", run_name="__main__", alter_sys=True)
