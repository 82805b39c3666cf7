"""What stands between a device and a run, looked at before a peer is started: `privdec doctor`.

Each check looks at one thing and yields findings. It changes nothing: it locks nothing, draws no batch and no noise,
writes no file that has a name, charges nothing, and tells neighbours nothing but this device's certificate. A check
that cannot be made, as another one failed, is left out; so nothing is told twice.

A finding is an error if the peer would not run, or if its ε or its keys would be in danger; a warning if it may run
badly, or if it may mend itself, as neighbours that are not started yet; else ok.
"""

from __future__ import annotations

import errno
import os
import platform
import resource
import secrets
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flower_privdec import __version__
from flower_privdec.common.deferred import is_small
from flower_privdec.common.errors import ArgumentError, PrivdecError, RunError, ScenarioError, option
from flower_privdec.common.files import disk_error, keeping_no_cache
from flower_privdec.common.formatting import memory, printable
from flower_privdec.devices.kit_texts import ENVIRONMENT
from flower_privdec.devices.stray_keys import private_keys
from flower_privdec.network.peer.status import request_status
from flower_privdec.network.transport.directory import Directory
from flower_privdec.network.transport.failures import address_of, calling_error, listening_error
from flower_privdec.network.transport.streams import StreamConnection
from flower_privdec.network.transport.tls import (
    RENEWED,
    UTC_NOW,
    Credentials,
    files_of,
    validity_of,
)
from flower_privdec.scenario.sections import PEER, Scenario, checked_address, is_loopback

if TYPE_CHECKING:
    from flower_privdec.experiment import Experiment
    from flower_privdec.graph.mixing import Mixing
    from flower_privdec.pushsum.membership import Members

OK = "ok"
WARNING = "warning"
ERROR = "error"
SECONDS = 5.0  # for a neighbour to answer
STATUS_BYTES = 1 << 20
APART = 60.0  # seconds between two clocks that are worth a word
FREE_BYTES = 256 << 20  # beside what the peer's checkpoints take
LEDGER_BYTES = 128  # that a step adds to a ledger
CHECKPOINTS = 6  # models' sizes that a peer's folder holds: two checkpoints of rows and shares, and the model
SLOW_SYNC = 0.05  # seconds
SYNCS = 5
VOLATILE = ("tmpfs", "ramfs", "overlay")  # file systems whose files are gone after a start, or with a container
PROGRAM_BYTES = 640 << 20  # that a peer takes beside its data and model
SMALL_PROGRAM_BYTES = 150 << 20  # the same of one without torch
LEAST_DESCRIPTORS = 256
LEAST_PYTHON = (3, 11)
FIREWALL = "a firewall drops"  # in the words of a call that nothing answered
SOON = ("call.refused", "call.silent", "call.no-route")  # causes that go away once a neighbour is started


@dataclass(frozen=True)
class DeviceFinding:
    """What a check found.

    Attributes:
        check: what was looked at.
        level: OK, WARNING or ERROR.
        message: what was found.
        remedy: what to do; empty if nothing.
        code: of the error, if there was one.
    """

    check: str
    level: str
    message: str
    remedy: str = ""
    code: str = ""


@dataclass(frozen=True)
class ExaminedDevice:
    """What a peer of this device would be started with.

    Attributes:
        scenario: the run's.
        peer: its number.
        folder: where it writes.
        certificates: the folder of its certificates.
        data: its own data; None if it takes its part of `data.root`.
        kit: the version that made the device's kit; None if it is not known.
        listen: HOST:PORT that it listens on, in place of the scenario's.
    """

    scenario: Scenario
    peer: int
    folder: Path
    certificates: Path
    data: str | None = None
    kit: str | None = None
    listen: str | None = None


def examine(device: ExaminedDevice) -> list[DeviceFinding]:
    """Look at everything."""
    with keeping_no_cache():
        return list(_Examination(device).findings())


def read_environment(path: Path) -> dict[str, str]:
    """Read an environment file: KEY=VALUE in each line, and comments."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ScenarioError(
            f"{path}: cannot be read ({why}); give the kit's {ENVIRONMENT}, or leave {option('env')} out",
            code="doctor.environment",
        ) from error

    values = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith(("#", ";")):
            continue
        key, equals, value = text.partition("=")
        if not equals or not key.strip().isidentifier():
            raise ScenarioError(f"{path}:{number}: must read KEY=VALUE", code="doctor.environment")
        values[key.strip()] = value.strip().strip("'\"")
    return values


class _Examination:
    """The checks, in the order in which an owner would mend what they find."""

    def __init__(self, device: ExaminedDevice) -> None:
        self.device = device
        self.scenario = device.scenario
        self.credentials: Credentials | None = None
        self.directory: Directory | None = None
        self.experiment: Experiment | None = None
        self.members: Members | None = None
        self.runs_already = False

    def findings(self) -> Iterator[DeviceFinding]:
        """Yield the findings of all checks."""
        checks: tuple[Callable[[], Iterator[DeviceFinding]], ...] = (
            self._versions,
            self._membership,
            self._certificates,
            self._disk,
            self._ledger,
            self._data,
            self._memory,
            self._port,
            self._neighbours,
            self._limits,
        )
        for check in checks:
            try:
                yield from check()
            except PrivdecError as error:
                yield _of_error(check.__name__.strip("_"), error)
            except OSError as error:
                yield _of_error(check.__name__.strip("_"), disk_error(error))

    # --- the program ---

    def _versions(self) -> Iterator[DeviceFinding]:
        python = platform.python_version()
        if sys.version_info < LEAST_PYTHON:
            least = ".".join(map(str, LEAST_PYTHON))
            yield DeviceFinding("versions", ERROR, f"Python {python}", f"install Python {least} or a later one")

        packages = []
        for name in ("torch", "numpy", "cryptography", "pydantic"):
            if name == "torch" and is_small():
                packages.append("without torch")
                continue
            try:
                packages.append(f"{name} {version(name)}")
            except PackageNotFoundError:
                remedy = f"`pip install {name}`"
                yield DeviceFinding("versions", ERROR, f"{name} is not installed", remedy, "doctor.not-installed")

        if is_small():
            from flower_privdec.network.peer.small_peer import check_small

            check_small(self.scenario)

        kit = self.device.kit
        if kit is not None and kit != __version__:
            yield DeviceFinding(
                "versions",
                WARNING,
                f"flower-privdec {__version__} is installed, and the kit was made by {kit}",
                f"`pip install flower-privdec=={kit}`, as peers of two versions may refuse each other",
                "doctor.other-version",
            )
        else:
            names = ", ".join([f"flower-privdec {__version__}", f"Python {python}", *packages])
            yield DeviceFinding("versions", OK, names)

    def _limits(self) -> Iterator[DeviceFinding]:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY and limit < LEAST_DESCRIPTORS:
            yield DeviceFinding(
                "limits",
                WARNING,
                f"{limit} files may be open at once",
                "raise the limit (ulimit -n, or LimitNOFILE= of the unit) to 1024",
                "doctor.few-descriptors",
            )

    # --- who it is ---

    def _membership(self) -> Iterator[DeviceFinding]:
        from flower_privdec.network.members import read_members

        peers = self.scenario.network.peers
        if peers is None:
            raise ScenarioError(
                "network.peers is missing: list the address of every peer, as {address: 10.0.0.7:7100}",
                code="peer.addresses",
            )
        member_list = read_members(self.scenario, self.device.certificates)
        members = member_list.members
        if self.device.peer >= len(members.all):
            raise ScenarioError(
                f"--id {self.device.peer} must be 0 to {len(members.all) - 1}: give this device's number",
                code="peer.id",
            )
        self.members = members
        self.directory = Directory.of(members, [one.address for one in peers])
        why = self.directory.refused.get(self.device.peer)
        if why:
            yield DeviceFinding(
                "membership", ERROR, why, "ask the operator, who holds the authority's key", "members.refused"
            )

        # What follows looks at the scenario as this peer has it: one that joined has a number beyond its peers.
        if self.device.peer >= self.scenario.n_peers:
            from flower_privdec.algorithms import build_algorithm
            from flower_privdec.experiment.pair_plan import secret_pairs
            from flower_privdec.network.peer.driver import PeerDevice
            from flower_privdec.network.peer.foreground import joined_scenario
            from flower_privdec.peer.member_graph import check_joins

            cancels = len(secret_pairs(self.scenario)) > 0
            check_joins(self.scenario, build_algorithm(self.scenario.algorithm), cancels)
            peer = PeerDevice(
                self.device.peer,
                self.device.folder,
                data=self.device.data,
                members=member_list,
                addresses=self.directory.addresses,
            )
            self.scenario = joined_scenario(self.scenario, peer)

    def _certificates(self) -> Iterator[DeviceFinding]:
        if self.directory is None:
            return
        files = files_of(self.device.certificates, self.device.peer)
        stray = next((path for path in private_keys(self.device.certificates) if path != files[1]), None)
        if stray is not None:
            yield DeviceFinding(
                "certificates",
                ERROR,
                f"{stray} is a private key of somebody else: the authority's, by which peers can be made, or a peer's",
                "delete it here; the authority's belongs on the operator's machine only",
                "doctor.authority-key",
            )

        identity = self.directory.identities[self.device.peer]
        self.credentials = Credentials.read(*files, identity)
        problem = self.directory.problem(self.device.peer, self.credentials.certificate)
        if problem:
            yield DeviceFinding("certificates", ERROR, problem, "put the newest files in place", "certificate.replaced")

        mode = stat.S_IMODE(files[1].stat().st_mode)
        if mode & 0o077:
            yield DeviceFinding(
                "certificates",
                WARNING,
                f"{files[1]} may be read by others (mode {mode:04o})",
                f"`chmod 600 {files[1]}`",
                "doctor.key-mode",
            )

        begin, end = validity_of(self.credentials.certificate)
        left = end - UTC_NOW()
        span = f"{identity} from {begin:%Y-%m-%d} to {end:%Y-%m-%d}, by this device's clock in {left.days} days"
        if left < RENEWED:
            remedy = "renew it: `privdec deploy` again, and copy the certificate and its key"
            yield DeviceFinding("certificates", WARNING, f"certificate of {span}", remedy, "certificate.soon")
        else:
            yield DeviceFinding("certificates", OK, f"certificate of {span}")

    # --- where it writes ---

    def _disk(self) -> Iterator[DeviceFinding]:
        folder = self.device.folder
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not os.access(there, os.W_OK | os.X_OK):
            user = f"user {os.getuid()}"
            yield DeviceFinding(
                "disk",
                ERROR,
                f"{there} cannot be written to by {user}",
                "make the peer's folder for the user that the peer runs as, and run doctor as that user",
                "disk.forbidden",
            )
            return

        kind = _file_system(there)
        if kind in VOLATILE:
            yield DeviceFinding(
                "disk",
                WARNING,
                f"{there} is on {kind}, whose files may be gone after the next start: the ledger with them",
                "give the peer a folder on a disk (PRIVDEC_OUT), or mount one into the container",
                "doctor.volatile",
            )

        slowest = _sync_seconds(there)
        if slowest > SLOW_SYNC:
            yield DeviceFinding(
                "disk",
                WARNING,
                f"a flush takes {1000 * slowest:.0f} ms on {there}, and a private step needs one",
                "take a faster disk or card, or raise network.commit_every",
                "doctor.slow-disk",
            )

        found = os.statvfs(there)
        free = found.f_bavail * found.f_frsize
        text = f"{memory(free)} free on {there}, a flush takes {1000 * slowest:.1f} ms"
        if free < FREE_BYTES:
            yield DeviceFinding("disk", ERROR, text, f"free some space: {memory(FREE_BYTES)} at least", "disk.full")
        else:
            yield DeviceFinding("disk", OK, text)

    def _ledger(self) -> Iterator[DeviceFinding]:
        from flower_privdec.experiment.spent import ledger_folder
        from flower_privdec.privacy.ledger.segments import verified

        if self.scenario.private is None:
            yield DeviceFinding("ledger", OK, "without privacy there is none")
            return
        folder = ledger_folder(self.scenario, self.device.folder)
        ledgers = sorted(folder.glob("*.jsonl"))
        if not ledgers:
            checkpoints = self.device.folder / "checkpoints"
            if checkpoints.exists():
                yield DeviceFinding(
                    "ledger",
                    ERROR,
                    f"{folder} has no ledger, and {checkpoints} is there",
                    "put the newest ledger back; without one, delete the peer's folder, and charge what its neighbours "
                    "have seen (--charge-missing)",
                    "ledger.stale",
                )
            else:
                yield DeviceFinding("ledger", OK, f"none in {folder} yet: the peer begins")
            return
        for path in ledgers:
            lines = sum(len(entries) for _, entries in verified(path))
            yield DeviceFinding("ledger", OK, f"{path}: {lines:,} lines, verified")

    # --- what it trains ---

    def _data(self) -> Iterator[DeviceFinding]:
        import numpy as np

        from flower_privdec.experiment import Agreement, Experiment, OwnParts
        from flower_privdec.experiment.data_read import data_read
        from flower_privdec.peer.trainer import network_mixing

        if self.device.peer >= self.scenario.n_peers:
            return  # it cannot join, or has another number, which was said
        data = self.device.data
        try:
            agreement = Agreement.of(self.scenario)
        except ScenarioError as error:
            if error.code != "network.dials-out":
                raise
            yield _of_error("neighbours", error)
            return
        network_mixing(agreement)

        # A secret of its own, which is kept nowhere: what follows from it is not looked at.
        secret = secrets.token_bytes(32)
        peers = np.array([self.device.peer])
        own = OwnParts.of(agreement, peers, secret, data, "network", whole=data is not None)
        self.experiment = Experiment.joined(agreement, own)
        for half, line in data_read(self.experiment, own.examples).items():
            yield DeviceFinding("data", OK, f"{half}: {line}")

        root = data or self.scenario.data.root
        if root is not None:
            path = Path(root.replace(PEER, str(self.device.peer)))
            with suppress(OSError):
                if stat.S_IMODE(path.stat().st_mode) & 0o004:
                    yield DeviceFinding(
                        "data",
                        WARNING,
                        f"{path} may be read by every user of this device",
                        f"`chmod o-r {path}`",
                        "doctor.data-mode",
                    )

    def _memory(self) -> Iterator[DeviceFinding]:
        if self.experiment is None:
            return
        from flower_privdec.common.deferred import torch
        from flower_privdec.common.machine import available_bytes
        from flower_privdec.experiment.memory_estimate import memory_need

        examples = self.experiment.own.examples
        public = self.experiment.public
        model = self.experiment.initial.nbytes
        if is_small():  # the estimate looks into modules of torch
            data = sum(tensor.nbytes for tensor in (examples.x, examples.y, public.x, public.y))
            needed = SMALL_PROGRAM_BYTES + data + CHECKPOINTS * model
        else:
            needed = PROGRAM_BYTES + memory_need(self.experiment).total
        free = available_bytes(torch.device("cpu")) + _own_resident()
        text = f"about {memory(needed)} needed, {memory(free)} free"
        if needed > free:
            remedy = "end other processes, add swap, or lower compute.memory_mib and the batch"
            yield DeviceFinding("memory", WARNING, text, remedy, "doctor.memory")
        else:
            yield DeviceFinding("memory", OK, text)

        steps = self.scenario.rounds * self.scenario.algorithm.steps_per_round
        on_disk = CHECKPOINTS * model + LEDGER_BYTES * steps
        there = next(path for path in (self.device.folder, *self.device.folder.absolute().parents) if path.exists())
        found = os.statvfs(there)
        if found.f_bavail * found.f_frsize < on_disk + FREE_BYTES:
            yield DeviceFinding(
                "disk",
                ERROR,
                f"the run writes about {memory(on_disk)}, and {memory(found.f_bavail * found.f_frsize)} are free",
                "free some space, or give the peer a folder on another disk (PRIVDEC_OUT)",
                "disk.full",
            )

    # --- whom it talks to ---

    @cached_property
    def _connections(self) -> dict[int, str | None]:
        """Return the address of each neighbour, or of all others if the graph is not known; None if it dials out."""
        from flower_privdec.pushsum.lockstep import Timetable

        assert self.directory is not None
        others = [peer for peer in range(len(self.directory.addresses)) if peer != self.device.peer]
        if self.members is not None:
            others = [peer for peer in self.members.present if peer != self.device.peer]
        mixing = self._mixing
        if self.experiment is not None and mixing is not None:
            timetable = Timetable(self.experiment.algorithm, mixing, self.scenario.rounds, 0)
            others = timetable.neighbours(self.device.peer)
        return {peer: self.directory.addresses[peer] for peer in others if peer not in self.directory.refused}

    @property
    def _mixing(self) -> Mixing | None:
        """Return the mixing of those who take part now; None if the run has no graph, or it is not known."""
        from flower_privdec.experiment.agreement import build_exchange
        from flower_privdec.peer.member_graph import MemberGraph

        began = self.device.scenario
        if self.experiment is None or self.members is None:
            return None
        if self.members.present == tuple(range(began.n_peers)):
            return self.experiment.mixing
        first, _ = build_exchange(began, self.experiment.algorithm)
        if first is None:
            return None
        return MemberGraph.of(began, first, self.members).mixing

    @property
    def _listens_at(self) -> str | None:
        """Return where this device's peer listens; None if it only dials out."""
        assert self.directory is not None
        peers = self.scenario.network.peers or []
        listen = self.device.listen
        if listen is None and self.device.peer < len(peers):
            listen = peers[self.device.peer].listen
        return listen or self._address

    @property
    def _address(self) -> str | None:
        """Return where the others dial this device; None if it only dials out."""
        assert self.directory is not None
        return self.directory.addresses[self.device.peer]

    def _port(self) -> Iterator[DeviceFinding]:
        if self.directory is None:
            return
        self.directory.check_dialled(own=self.device.peer)
        address = self._listens_at
        if address is None:
            yield DeviceFinding("port", OK, "this device only dials out, and listens to nobody")
            return
        if self.device.listen is not None:
            try:
                checked_address(address)
            except ArgumentError as error:
                raise ScenarioError(f"--listen {address}: {error}", code=error.code) from error
        dialled = self._address
        if dialled is not None and is_loopback(address) and not is_loopback(dialled):
            yield DeviceFinding(
                "port",
                WARNING,
                f"it listens at {address}, which no other device reaches, and the others dial {dialled}",
                f"unless a program of this device forwards what comes there, listen on all of its addresses: "
                f"--listen 0.0.0.0:{address_of(address)[1]}",
                "doctor.loopback",
            )

        host, port = address_of(address)
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with closing(socket.socket(family, kind, protocol)) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(where)
                trial.listen()
        except OSError as error:
            self.runs_already = error.errno == errno.EADDRINUSE and self._is_itself(address)
            if self.runs_already:
                yield DeviceFinding("port", OK, f"this device's peer runs already, at {address}")
                return
            yield _of_error("port", listening_error(address))
            return
        text = f"{address} is free"
        if dialled is not None and dialled != address:
            text += f"; the others dial {dialled}, which has to lead there"
        yield DeviceFinding("port", OK, text)

    def _is_itself(self, address: str) -> bool:
        """Return whether what listens on this device's address is its peer."""
        if self.credentials is None or self.directory is None:
            return False
        identity = self.directory.identities[self.device.peer]
        return calling_error(address, identity, self.credentials, SECONDS) is None

    def _neighbours(self) -> Iterator[DeviceFinding]:
        if self.credentials is None or self.directory is None:
            return
        with ThreadPoolExecutor(8) as pool:
            for found in pool.map(lambda item: [*self._neighbour(*item)], self._connections.items()):
                yield from found

    def _neighbour(self, peer: int, address: str | None) -> Iterator[DeviceFinding]:
        assert self.credentials is not None
        assert self.directory is not None
        identity = self.directory.identities[peer]
        if address is None:
            # Two that only dial out were refused by their graph, or the graph is not known.
            if self._address is not None:
                yield DeviceFinding("neighbours", OK, f"peer {peer} only dials out: {identity} calls this device")
            return
        problem = calling_error(address, identity, self.credentials, SECONDS)
        if problem is not None:
            level = WARNING if problem.code in SOON else ERROR
            yield _of_error("neighbours", problem, level)
            return

        connection = StreamConnection(address, identity, self.credentials, STATUS_BYTES)
        before = UTC_NOW()
        try:
            status = request_status(connection.call, SECONDS)
        except RunError as error:
            yield _of_error("neighbours", error, WARNING)
            return
        finally:
            connection.close()
        after = UTC_NOW()

        yield DeviceFinding("neighbours", OK, f"peer {peer} at {address}: {identity}, {_progress(status)}")
        yield from self._unreached(peer, status)
        apart = _seconds_apart(status, before, after)
        if apart is not None and abs(apart) > APART:
            yield DeviceFinding(
                "clock",
                WARNING,
                f"the clock of peer {peer} is {apart:+.0f} s from this device's; certificates are looked at by both",
                "set the clock that is wrong, as by NTP",
                "doctor.clock",
            )

    def _unreached(self, peer: int, status: Mapping[str, Any]) -> Iterator[DeviceFinding]:
        """Say if a neighbour that knew this device cannot reach it, though its peer runs, or as nothing answers at all.

        What a firewall here lets in nobody sees from inside. But a neighbour says why its calls fail, and a device
        without one refuses them at once as long as its peer is not started.
        """
        address = self._address
        if address is None:
            return

        down = status.get("down")
        if not isinstance(down, dict):
            return
        why = down.get(str(self.device.peer))
        if not isinstance(why, str):
            return
        if self.runs_already or FIREWALL in why:
            port = address_of(address)[1]
            yield DeviceFinding(
                "neighbours",
                WARNING,
                f"peer {peer} cannot reach this device at {address}: {printable(why)[:200]}",
                f"let TCP in to port {port} of this device, in its firewall and in every router before it; if nobody "
                "can dial it, give it dial: out in place of its address",
                "doctor.unreached",
            )


def _progress(status: Mapping[str, Any]) -> str:
    return f"in round {status.get('round', '?')} of {status.get('rounds', '?')}"


def _seconds_apart(status: Mapping[str, Any], before: datetime, after: datetime) -> float | None:
    """Return by how much a neighbour's clock is ahead, beyond what the call took; None if it does not say."""
    try:
        theirs = datetime.fromisoformat(str(status["clock"]))
        if theirs < before:
            return (theirs - before).total_seconds()
        return max(0.0, (theirs - after).total_seconds())
    except (KeyError, ValueError, TypeError):
        return None


def _of_error(check: str, error: PrivdecError, level: str = ERROR) -> DeviceFinding:
    """Return an error as a finding: its message ends with the remedy."""
    message = str(error)
    head, mark, tail = message.rpartition("; ")
    if not mark:
        head, mark, tail = message.rpartition(": ")
    if tail.count(")") > tail.count("("):
        tail = tail.removesuffix(")")  # what stood in brackets in the message
    return DeviceFinding(check, level, message, tail if mark and head else "", error.code)


def _file_system(path: Path) -> str:
    """Return the kind of file system that a folder is on; empty if it is not known."""
    best = ""
    kind = ""
    with suppress(OSError):
        real = os.path.realpath(path)
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, name, *_ = line.split()
            inside = real == mount or real.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best = mount
                kind = name
    return kind


def _sync_seconds(folder: Path) -> float:
    """Return the median time of a flush in a folder, by a file without a name, which leaves nothing behind."""
    took = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(SYNCS):
            file.write(b"\0" * 4096)
            file.flush()
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began)
    return sorted(took)[SYNCS // 2]


def _own_resident() -> int:
    """Return what this process takes, which a peer in its place would have too."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def report_lines(findings: list[DeviceFinding]) -> list[str]:
    """Return the findings for people: what is wrong first in each line, and the remedy where the message lacks it."""
    lines = []
    for one in findings:
        text = f"{one.level:<8}{one.check:<13}{one.message}"
        if one.remedy and one.remedy not in one.message:
            text += f": {one.remedy}"
        lines.append(text)

    count = partial(_count, findings)
    lines.append(f"{count(ERROR)} errors, {count(WARNING)} warnings, {count(OK)} ok")
    return lines


def _count(findings: list[DeviceFinding], level: str) -> int:
    return sum(one.level == level for one in findings)
