"""What becomes of a relayed run when a part of a Flower deployment fails, stops or is guarded.

    python -m tools.flower_deployed.events [--nodes 4] [--poll SECONDS]

A SuperLink with a database and SuperNodes on this machine, TLS on every connection, and the public keys of all peers in
each node's `known-peers`, run `simulations/adapted-quickstart-sklearn/after`: `PushSum`, and `PeerMod` with noise.
Added are a name, so that a run goes on where it stopped, and two mods. One notes what is trained and what leaves, so
that ledgers can be held against it from outside. The other waits in the middle of training while a file is there, so
that each event happens when it should on a machine of any speed. There is no evaluation.

Prints what happened at each event. Exits with 1 if it is not what docs/how-to/flower.md tells, or if a peer has trained
more often than its ledger has lines. Other versions of Flower are tried by their folder on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flower_privdec.reporting.ledgers import ledger_facts, ledgers_below
from tools.flower_deployed.deployment import ROOT, Deployment, flower_version

QUICKSTART = ROOT / "simulations" / "adapted-quickstart-sklearn"
ROUNDS = 7
BUDGET = 50.0  # the ε of the app's PeerMod
DELTA = 0.01  # and its δ

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
epsilon: 20.0
delta: 0.01
clip_norm: 0.5
rounds: 2
apps: any
"""

# What a log says of the peers of a run.
TOLD = [
    r"\d+ of \d+ peers trained.*",
    r"Run '.*' goes on.*",
    r"peer \d+ .*is lost.*",
    r"peer \d+ is back.*",
    r"aggregate_\w+: Received \d+ results and \d+ failures",
    r"this device's policy.*",
    r"\w+Error: .*",
]
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Events:
    """The events of one deployment, which wait for each other.

    Args:
        flower: the deployment, with nothing started.
    """

    def __init__(self, flower: Deployment) -> None:
        self.flower = flower
        self.runs = 0  # started so far
        self.wrong = list[str]()

        write_app(flower.folder / "app")
        shutil.copytree(QUICKSTART / "before", flower.folder / "plain", ignore=shutil.ignore_patterns("__pycache__"))

    def begin(self) -> None:
        """Start the SuperLink, and a SuperNode for each peer."""
        self.flower.start_superlink()
        for peer in range(self.flower.nodes):
            self.flower.start_node(peer)

    # --- the events, in order ---

    def node_killed(self) -> Callable[[], str]:
        """Kill a SuperNode while it trains, and put it back; return how to wait for the end of the run.

        Peer 0 is left waiting in the middle of a round.
        """
        n_peers = self.flower.nodes
        killed = n_peers - 1
        ended = self.run("app", ROUNDS)
        self.wait_told(f"{n_peers} of {n_peers} peers trained")
        self.say("A run begins", *self.told())

        self.hold(killed)
        self.flower.kill(f"node-{killed}")
        self.release(killed)
        began = time.monotonic()
        self.flower.wait_until(lambda: not self.flower.is_left(f"node-{killed}"), "its processes end with it")
        self.wait_told(f"{killed} of {n_peers} peers trained")
        seconds = time.monotonic() - began

        # The others wait in the middle of a round, or the run might be over before the node is back.
        self.hold(0)
        self.flower.start_node(killed)
        self.release(0)
        self.wait_told(f"peer {killed} is back")
        self.wait_told(f"is back[^$]*{n_peers} of {n_peers} peers trained")
        self.hold(0)
        self.say(
            "A SuperNode is killed (signal 9) while it trains, and put back in a later round",
            f"what it had started ended with it, and the others waited {seconds:.0f} s, once",
            *self.told(),
            self.spent(),
        )
        return ended

    def superlink_restarted(self, ended: Callable[[], str]) -> None:
        """Restart the SuperLink in the middle of a round."""
        self.flower.end("superlink")
        self.flower.start_superlink()
        self.release(0)
        status = ended()
        self.say("The SuperLink is restarted in the middle of a round", status, self.spent())
        self.expect("finished:failed" in status, "the run that it carried fails")

    def run_stopped(self) -> None:
        """Start a run of the same name, and stop it in the middle of a round."""
        ended = self.run("app", ROUNDS)
        answered = [self.seen("answered", peer) for peer in range(self.flower.nodes)]
        self.hold(0)
        for peer in range(1, self.flower.nodes):
            self.flower.wait_until(
                lambda peer=peer: self.seen("answered", peer) > answered[peer],  # type: ignore[misc]
                f"peer {peer} answers",
            )
        self.flower.flwr("stop", self.flower.run_of(self.runs - 1)["run-id"], "here")
        lines = self.lines()
        self.release(0)
        status = ended()
        time.sleep(10)
        self.say(
            "A run of the same name is started, and `flwr stop` in the middle of a round",
            status,
            *self.told(),
            self.spent(),
        )
        self.expect("finished:stopped" in status, "the run is stopped")
        self.expect("goes on with round" in self.flower.log(self.newest), "it goes on where the failed one stopped")
        self.expect(self.lines() == lines, "peers pay nothing after flwr stop")

    def run_completed(self) -> None:
        """Start a run of the same name once more, which goes on to the end."""
        status = self.run("app", ROUNDS)()
        self.say("A run of the same name is started once more", status, *self.told(), self.spent())
        self.expect("finished:completed" in status, "the run goes on to its end")
        self.expect(max(self.epsilons()) <= BUDGET, "every peer keeps its budget")

    def node_guarded(self) -> None:
        """Put a SuperNode under a guard, and run an app of FedAvg that has no mod."""
        self.flower.end("node-0")
        policy = self.flower.folder / "policy.yaml"
        guarded = self.flower.folder / "guarded"
        policy.write_text(POLICY.format(folder=guarded))
        self.flower.start_node(0, sys.executable, "-m", "flower_privdec", "guard", policy)

        before = len(self.flower.log("node-0"))
        status = self.run("plain", 3)()
        ledger = ledger_of(guarded / "peer-0")
        self.say(
            "A SuperNode under `privdec guard`, whose budget lasts for 2 updates, and 3 rounds of FedAvg without a mod",
            status,
            *self.told(),
            f"the guarded node's ledger: {ledger['lines']} lines, ε = {ledger['epsilon']:.1f}",
            *told(self.flower.log("node-0")[before:]),
        )
        self.expect("finished:completed" in status, "FedAvg goes on with the others")
        self.expect((ledger["lines"], ledger["epsilon"] <= 20) == (2, True), "the guard keeps its owner's budget")

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


def main() -> int:
    """Let the events happen; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--poll", type=float, default=0.1)
    arguments = parser.parse_args()

    print(f"{flower_version()}, {arguments.nodes} SuperNodes")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Deployment(folder, arguments.nodes, arguments.poll, {"EVENTS": name}) as flower:
            events = Events(flower)
            events.begin()
            ended = events.node_killed()
            events.superlink_restarted(ended)
            events.run_stopped()
            events.run_completed()
            events.node_guarded()

    for what in events.wrong:
        print(f"not as documented: {what}", file=sys.stderr)
    return 1 if events.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
