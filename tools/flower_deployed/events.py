"""What becomes of a relayed run when a part of a Flower deployment fails, stops or is guarded.

    python -m tools.flower_deployed.events [EVENT ...] [--nodes 4] [--poll SECONDS]

| EVENT | what is done |
|---|---|
| `killed` | a SuperNode is killed while it trains, and put back in a later round |
| `restarted` | the SuperLink is restarted in the middle of a round; then a run of the same name is started |
| `stopped` | `flwr stop` in the middle of a round; then a run of the same name is started |
| `guarded` | a SuperNode is under `privdec guard`, and apps with and without a mod come to it |

Without an EVENT all of them, one after the other. Each has a deployment of its own: a SuperLink with a database and
SuperNodes on this machine, TLS on every connection, and the public keys of all peers in each node's `known-peers`. They
run `simulations/adapted-quickstart-sklearn/after`: `PushSum`, and `PeerMod` with noise. Added are a name, so that a run
goes on where it stopped, and two mods. One notes what is trained and what leaves, so that ledgers can be held against
it from outside. The other waits in the middle of training while a file is there, so that each event happens when it
should on a machine of any speed. There is no evaluation by the peers.

Prints what happened at each event. Exits with 1 if it is not what docs/how-to/flower-deployed.md tells, or if a peer
has trained more often than its ledger has lines. On another version of Flower than the installed one:

    python -m tools.flower_versions flwr==1.42.0 -- -m tools.flower_deployed.events guarded
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flower_privdec.reporting.ledgers import ledger_facts, ledgers_below
from tools.flower_deployed.deployment import ROOT, Deployment, flower_version

QUICKSTART = ROOT / "simulations" / "adapted-quickstart-sklearn"
BUDGET = 50.0  # the ε of the app's PeerMod
DELTA = 0.01  # and its δ
OWNERS_BUDGET = 20.0  # the ε of the guard's policy, which lasts for two updates

MODS = """
import json
import os
import time
from pathlib import Path

FOLDER = Path(os.environ["EVENTS"])
TRAINED = []  # of this process, which answers one message


def note(event, context):
    line = {"event": event, "peer": context.node_config["partition-id"]}
    with open(FOLDER / "events.jsonl", "a") as file:
        file.write(json.dumps(line) + chr(10))


def leaves(message, context, app):
    answer = app(message, context)
    if TRAINED and not answer.has_error():
        note("answered", context)
    return answer


def held(message, context, app):
    note("training", context)
    TRAINED.append(message)
    file = FOLDER / f"hold-{context.node_config['partition-id']}"
    if file.exists():
        note("waiting", context)
    while file.exists():
        time.sleep(0.05)
    return app(message, context)
"""

POLICY = """
folder: {folder}
epsilon: {epsilon}
delta: {delta}
clip_norm: 0.5
rounds: 2
apps: [{digest}]
metrics: {{train_loss: 0.0}}
"""
OTHER_APP = "ab" * 32

# What a log says of the peers of a run.
TOLD = [
    r"\d+ of \d+ peers trained.*",
    r"Run '.*' goes on.*",
    r"peer \d+ .*is lost.*",
    r"peer \d+ is back.*",
    r"aggregate_\w+: Received \d+ results and \d+ failures",
    r"The guard refused.*",
    r"the app's FAB has.*",
    r"\w+Error: .*",
]
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Events:
    """The events of one deployment.

    Args:
        flower: the deployment, with nothing started.
    """

    def __init__(self, flower: Deployment) -> None:
        self.flower = flower
        self.runs = 0  # started so far
        self.wrong = list[str]()

        write_app(flower.folder / "app")
        shutil.copytree(QUICKSTART / "before", flower.folder / "plain", ignore=shutil.ignore_patterns("__pycache__"))

    def begin(self, *peers: int) -> None:
        """Start the SuperLink, and the SuperNodes of peers."""
        self.flower.start_superlink()
        for peer in peers:
            self.flower.start_node(peer)

    # --- the events ---

    def node_killed(self) -> None:
        """Kill a SuperNode while it trains, and put it back."""
        n_peers = self.flower.nodes
        killed = n_peers - 1
        self.begin(*range(n_peers))
        ended = self.run("app", 6)
        self.wait_told(f"{n_peers} of {n_peers} peers trained")

        self.hold(killed)
        self.flower.kill(f"node-{killed}")
        self.release(killed)
        began = time.monotonic()
        self.flower.wait_until(lambda: not self.flower.is_left(f"node-{killed}"), "its processes end with it")
        self.wait_told(f"{killed} of {n_peers} peers trained")
        seconds = time.monotonic() - began
        self.say(
            "A SuperNode is killed (signal 9) while it trains",
            f"what it had started ended with it, and the others waited {seconds:.0f} s, once",
            *self.told(),
            self.spent(),
        )

        # The others wait in the middle of a round, or the run might be over before the node is back.
        self.hold(0)
        self.flower.start_node(killed)
        self.release(0)
        self.wait_told(f"peer {killed} is back")
        self.wait_told(f"is back[^$]*{n_peers} of {n_peers} peers trained")
        status = ended()
        self.say("It is started again in a later round", status, *self.told(), self.spent())
        self.expect("finished:completed" in status, "the run goes on to its end")

    def superlink_restarted(self) -> None:
        """Restart the SuperLink in the middle of a round, and start a run of the same name."""
        n_peers = self.flower.nodes
        self.begin(*range(n_peers))
        ended = self.run("app", 3)
        self.wait_told(f"{n_peers} of {n_peers} peers trained")
        self.hold(0)
        self.flower.end("superlink")
        self.flower.start_superlink()
        self.release(0)
        status = ended()
        self.say("The SuperLink is restarted in the middle of a round", status, *self.told(), self.spent())
        self.expect("finished:failed" in status, "the run that it carried fails")
        self.run_again(3)

    def run_stopped(self) -> None:
        """Stop a run in the middle of a round, and start one of the same name."""
        n_peers = self.flower.nodes
        self.begin(*range(n_peers))
        ended = self.run("app", 3)
        self.wait_told(f"{n_peers} of {n_peers} peers trained")
        answered = [self.seen("answered", peer) for peer in range(n_peers)]
        self.hold(0)
        for peer in range(1, n_peers):
            self.flower.wait_until(
                lambda peer=peer: self.seen("answered", peer) > answered[peer],  # type: ignore[misc]
                f"peer {peer} answers",
            )
        stopped = self.flower.run_of(self.runs - 1)["run-id"]
        self.flower.flwr("stop", stopped, "here")
        lines = self.lines()
        self.release(0)
        status = ended()
        time.sleep(10)
        self.say("`flwr stop` in the middle of a round", status, *self.told(), self.spent())
        self.expect("finished:stopped" in status, "the run is stopped")
        self.expect(self.lines() == lines, "peers pay nothing after flwr stop")

        shown = told(self.flower.flwr("log", stopped, "here", "--show"))
        self.say("`flwr log --show` of that run", *shown)
        self.expect(f"{n_peers} of {n_peers} peers trained" in shown, "flwr log shows who trained")
        self.run_again(3)

    def run_again(self, rounds: int) -> None:
        """Start a run of the same name once more, which goes on to the end."""
        status = self.run("app", rounds)()
        self.say("A run of the same name is started", status, *self.told(), self.spent())
        self.expect("goes on with round" in self.flower.log(self.newest), "it goes on where the other one ended")
        self.expect("finished:completed" in status, "the run goes on to its end")
        self.expect(max(self.epsilons()) <= BUDGET, "every peer keeps its budget")

    def node_guarded(self) -> None:
        """Put a SuperNode under a guard, and send it apps with and without a mod."""
        n_peers = self.flower.nodes
        self.begin(*range(1, n_peers))
        guarded = self.flower.folder / "guarded"
        # The others know peer 0 by the key that it has in its own folder.
        shutil.copytree(self.flower.peer_folder(0), guarded / "peer-0")

        self.guard(OTHER_APP)
        status = self.run("plain", 1)()
        log = self.flower.log("node-0")
        self.say(
            "FedAvg without a mod comes to a SuperNode under `privdec guard`, whose policy lists another app",
            status,
            *self.told(),
            "the guarded node's log:",
            *told(log),
        )
        refused = re.search(r"the app's FAB has SHA-256 (\w{64})", log)
        self.expect(bool(refused), "the guard refuses an app that is not in its list, and names it")
        self.expect(not list(guarded.rglob("*.jsonl")), "an app that is refused is charged nothing")
        if refused is None:
            return

        self.flower.end("node-0")
        self.guard(refused[1])
        before = len(self.flower.log("node-0"))
        status = self.run("plain", 3)()
        if "completed" not in status:
            print(self.flower.log(self.newest)[-4000:])
        ledger = ledger_of(guarded / "peer-0")
        received = re.findall(r"aggregate_\w+: Received (\d+) results and (\d+) failures", self.flower.log(self.newest))
        self.say(
            "The owner lists the app, the budget lasts for 2 updates, and FedAvg has 3 rounds",
            status,
            *self.told(),
            f"the guarded node's ledger: {ledger['lines']} lines, ε = {ledger['epsilon']:.1f}",
            "the guarded node's log:",
            *told(self.flower.log("node-0")[before:]),
        )
        everyone = (str(n_peers), "0")
        without = (str(n_peers - 1), "1")
        expected = [everyone, without, everyone, without, without, without]  # train and evaluate by turns
        self.expect("finished:completed" in status, "FedAvg goes on with the others")
        self.expect(received == expected, "the guard answers two updates, and no evaluation")
        self.expect(ledger["lines"] == 2, "two updates are charged")
        self.expect(ledger["epsilon"] <= OWNERS_BUDGET, "the guard keeps its owner's budget")

        process = self.flower.start("isolated", *self.guard_words(), "flower-supernode", "--isolation", "process")
        code = process.wait()
        words = self.flower.log("isolated").splitlines()
        self.say("`privdec guard` before a SuperNode with `--isolation process`", f"exits with {code}", *words)
        self.expect(code != 0 and "--isolation process must be subprocess" in words[-1], "the guard refuses isolation")

    def guard(self, digest: str) -> None:
        """Start peer 0 under a guard that allows one app."""
        policy = self.flower.folder / "policy.yaml"
        folder = self.flower.folder / "guarded"
        policy.write_text(POLICY.format(folder=folder, epsilon=OWNERS_BUDGET, delta=DELTA, digest=digest))
        self.flower.start_node(0, *self.guard_words())

    def guard_words(self) -> list[object]:
        """Return the words of a command that put the policy before another command."""
        return [sys.executable, "-m", "flower_privdec", "guard", self.flower.folder / "policy.yaml"]

    # --- what is done ---

    @property
    def newest(self) -> str:
        """The name of the newest run's log."""
        return f"run-{self.runs - 1}"

    def run(self, app: str, rounds: int) -> Callable[[], str]:
        """Start a run; the function waits for its end and returns its status."""
        number = self.runs
        self.runs += 1
        config = f"num-server-rounds={rounds}"
        process = self.flower.start(self.newest, "flwr", "run", app, "here", "--stream", "--run-config", config)

        def ended() -> str:
            self.flower.wait_until(lambda: process.poll() is not None, f"the end of `flwr run`, {number}")
            self.flower.wait_until(lambda: "finished" in self.flower.run_of(number)["status"], f"the end of {number}")
            return f"{self.flower.run_of(number)['status']}; `flwr run --stream` exited with {process.returncode}"

        return ended

    def hold(self, peer: int) -> None:
        """Wait until a peer waits in the middle of training, which it does until it is released."""
        waiting = self.seen("waiting", peer)
        file = self.flower.folder / f"hold-{peer}"
        file.touch()
        self.flower.wait_until(lambda: self.seen("waiting", peer) > waiting, f"peer {peer} trains")

    def release(self, peer: int) -> None:
        """Let a peer go on that waits."""
        (self.flower.folder / f"hold-{peer}").unlink()

    # --- what is seen ---

    def wait_told(self, pattern: str) -> None:
        """Wait until the newest run's log has a text."""
        self.flower.wait_until(lambda: bool(re.search(pattern, self.flower.log(self.newest))), pattern)

    def told(self) -> list[str]:
        """Return what the newest run's log says of its peers."""
        return told(self.flower.log(self.newest))

    def seen(self, event: str, peer: int) -> int:
        """Return how often a peer has begun to train, waited in the middle of it, or answered."""
        path = self.flower.folder / "events.jsonl"
        if not path.exists():
            return 0
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return lines.count({"event": event, "peer": peer})

    def ledgers(self) -> list[dict[str, Any]]:
        """Return what every peer's ledger says."""
        return [ledger_of(self.flower.peer_folder(peer)) for peer in range(self.flower.nodes)]

    def lines(self) -> list[int]:
        """Return how many lines each ledger has."""
        return [ledger["lines"] for ledger in self.ledgers()]

    def epsilons(self) -> list[float]:
        """Return what each peer has spent."""
        return [ledger["epsilon"] for ledger in self.ledgers()]

    def spent(self) -> str:
        """Return what each peer has trained, sent and paid; what is trained and not paid is wrong."""
        peers = range(self.flower.nodes)
        # The ledgers are read last, or a round that begins meanwhile would seem unpaid.
        answered = [self.seen("answered", peer) for peer in peers]
        trained = [self.seen("training", peer) for peer in peers]
        parts = []
        for peer, ledger in enumerate(self.ledgers()):
            lines = ledger["lines"]
            counts = f"{lines} lines, {trained[peer]} trained, {answered[peer]} sent"
            parts.append(f"peer {peer}: {counts}, ε = {ledger['epsilon']:.1f}")
            self.expect(answered[peer] <= trained[peer] <= lines, f"peer {peer} pays before it trains")
        return "; ".join(parts)

    def say(self, event: str, *happened: str) -> None:
        """Print what happened at an event."""
        print(f"\n{event}")
        for line in happened:
            print(f"  {line}")
        sys.stdout.flush()

    def expect(self, holds: bool, what: str) -> None:
        """Remember what is not as the docs tell."""
        if not holds:
            self.wrong.append(what)


def ledger_of(folder: Path) -> dict[str, Any]:
    """Return what a peer's ledger says, as `privdec ledger` does."""
    (path,) = ledgers_below(folder)
    return ledger_facts(path, DELTA, None)


def told(log: str) -> list[str]:
    """Return what a log says of peers, a line each."""
    found = []
    for line in log.splitlines():
        match = re.search("|".join(TOLD), COLOUR.sub("", line))
        if match:
            found.append(match[0][:230])
    return found


def write_app(folder: Path) -> None:
    """Write the app: the adapted quickstart with a name, and with the two mods around its PeerMod."""
    shutil.copytree(QUICKSTART / "after", folder, ignore=shutil.ignore_patterns("__pycache__"))
    package = folder / "sklearn_digits"
    (package / "events.py").write_text(MODS)
    replace(package / "server_app.py", 'exponential")', 'exponential", name="digits", fraction_evaluate=0.0)')
    replace(package / "client_app.py", "mods=[", "mods=[leaves, ")
    replace(package / "client_app.py", "delta=0.01)]", "delta=0.01), held]")
    replace(package / "client_app.py", "app = ", "from sklearn_digits.events import held, leaves\n\napp = ")


def replace(path: Path, old: str, new: str) -> None:
    """Replace a text in a file, once; raises ValueError if it is not there."""
    text = path.read_text()
    if old not in text:
        raise ValueError(f"{path} has no {old!r}")
    path.write_text(text.replace(old, new, 1))


EVENTS = {
    "killed": Events.node_killed,
    "restarted": Events.superlink_restarted,
    "stopped": Events.run_stopped,
    "guarded": Events.node_guarded,
}


def main() -> int:
    """Let the events happen; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("events", nargs="*", metavar="EVENT", help=f"of {', '.join(EVENTS)}; default: all")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--poll", type=float, default=0.1)
    arguments = parser.parse_args()
    unknown = [event for event in arguments.events if event not in EVENTS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: an EVENT is one of {', '.join(EVENTS)}")

    # A deployment ends with its `with` block, which this signal would otherwise skip.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    wrong = list[str]()
    for event in arguments.events or EVENTS:
        print(f"{flower_version()}, {arguments.nodes} SuperNodes: {event}")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with Deployment(folder, arguments.nodes, arguments.poll, {"EVENTS": name}) as flower:
                events = Events(flower)
                EVENTS[event](events)
        wrong += events.wrong

    for what in wrong:
        print(f"not as documented: {what}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
