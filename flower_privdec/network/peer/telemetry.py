"""What a running peer tells programs on its own device over HTTP: metrics, and whether it lives and is ready.

    GET /metrics    metrics in the formats of Prometheus (`exposition.py`)
    GET /live       200 as long as the peer's loop turns; else 503: restart the process
    GET /ready      200 if it takes part, with as many neighbours up as it needs; else 503, and why not

Nothing can be changed by it. It is off unless its owner gives an address, and nothing is imported or started then.

It listens on loopback, and answers only calls that name loopback as their host: a web page that its owner opens in a
browser could otherwise read it, by a name whose address it changes (DNS rebinding). With `exposed` it listens wherever
it is told to, and whoever reaches that address reads it.

What is told is what members of the run may know anyway (see `RunningPeer.status`), and counts of this process. How long
training takes is left out, and so are CPU time and memory: they follow from which examples a batch has, and no ε covers
them. The durations of commits are those of a disk.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from socket import AF_INET, AF_INET6, getaddrinfo
from threading import BoundedSemaphore, Thread
from typing import Any, Protocol

from flower_privdec.common.errors import ArgumentError, RunError, ScenarioError, option
from flower_privdec.common.formatting import one_line
from flower_privdec.common.user_code import require
from flower_privdec.network.peer.durations import Durations
from flower_privdec.network.peer.lifetime import Lifetime
from flower_privdec.scenario.sections import checked_address, host_and_port, is_loopback

_log = logging.getLogger(__name__)

STUCK_SECONDS = 60.0  # in which the peer's loop has not turned
CALL_SECONDS = 5.0  # for a call to come
MOST_CALLS = 8  # at once; more are hung up on
STARTING = "starting"


class Driven(Protocol):
    """What a peer's driver tells; see `Driver`."""

    @property
    def commits(self) -> Durations: ...

    def status(self) -> dict[str, Any]: ...

    def quiet_seconds(self) -> float: ...


class Telemetry:
    """What is known of a peer, from the first second of its process on.

    Attributes:
        scenario, peer: the run's name, and the peer's number.
        version: of this package.
        began: when the process did, in seconds since 1970.
        expires: returns when the peer's certificate does, in seconds since 1970; None before it is known.
        lifetime: of the processes in its folder; None before that is known.
    """

    def __init__(self, scenario: str, peer: int, version: str) -> None:
        self.scenario = scenario
        self.peer = peer
        self.version = version
        self.began = time.time()
        self.expires: Callable[[], float | None] = lambda: None
        self.lifetime: Lifetime | None = None
        self._driven: Driven | None = None

    def attach(self, driven: Driven, lifetime: Lifetime, expires: Callable[[], float | None]) -> None:
        """Tell of this peer from now on."""
        self.lifetime = lifetime
        self.expires = expires
        self._driven = driven

    @property
    def status(self) -> dict[str, Any] | None:
        """Return the peer's status; None as long as it starts."""
        return None if self._driven is None else self._driven.status()

    @property
    def commits(self) -> Durations | None:
        """Return how long its commits took; None as long as it starts."""
        return None if self._driven is None else self._driven.commits

    def live(self) -> tuple[bool, list[str]]:
        """Return whether the peer's loop turns, and why not."""
        if self._driven is None:
            return True, [STARTING]
        seconds = self._driven.quiet_seconds()
        if seconds > STUCK_SECONDS:
            return False, [f"its loop has not turned for {seconds:.0f} s"]
        return True, []

    def ready(self) -> tuple[bool, list[str]]:
        """Return whether the peer takes part with as many neighbours as it needs, and what is not as usual."""
        is_live, reasons = self.live()
        status = self.status
        if not is_live or status is None:
            return False, reasons

        unheard = [str(one) for one in status["unheard"]]
        missing = {*unheard, *status["down"]}
        up = len(status["neighbours"]) - len(missing)
        reasons += [f"peer {number}: {why}" for number, why in status["down"].items()]
        reasons += [f"peer {number} has not reported yet" for number in unheard if number not in status["down"]]
        if status["waits_for"]:
            reasons.append(f"it waits for {status['waits_for']}")
        if status.get("idle"):
            reasons.append(str(status["idle"]))
        return up >= status["quorum"], reasons


def check_metrics_address(address: str, exposed: bool) -> None:
    """Refuse an address that is none, or that others reach unless that is meant.

    Raises:
        ScenarioError: says which.
    """
    try:
        checked_address(address)
    except ArgumentError as error:
        raise ScenarioError(f"{option('metrics', repr(address))} {error}", code=error.code) from error
    if not exposed and not is_loopback(address):
        raise ScenarioError(
            f"{option('metrics', address)} is reached by other devices, which would read rounds, ε and who the "
            "neighbours are: take a loopback address, as 127.0.0.1:9464, or add --expose-metrics",
            code="metrics.exposed",
        )


class TelemetryServer:
    """Serves a peer's telemetry in threads of its own; a context manager.

    Attributes:
        address: HOST:PORT that it listens on.
    """

    def __init__(self, address: str, telemetry: Telemetry, exposed: bool = False) -> None:
        """Listen.

        Raises:
            ScenarioError: see `check_metrics_address`, or prometheus-client is not installed.
            RunError: the address cannot be listened on.
        """
        check_metrics_address(address, exposed)
        install = "pip install 'flower-privdec[watch]'"
        exposition = require("flower_privdec.network.peer.exposition", option("metrics"), install)
        host, port = host_and_port(address)
        try:
            self._server = _Server(host, port, telemetry, exposition.exposed, exposed)
        except OSError as error:
            raise RunError(
                f"{option('metrics', address)} cannot be listened on ({error.strerror}): another process may listen "
                "there; give another port, or leave it out",
                code="metrics.listen",
            ) from error
        self.address = address
        self._thread = Thread(target=self._server.serve_forever, args=(1.0,), name="peer-telemetry", daemon=True)
        self._thread.start()
        _log.info("metrics and health are at http://%s/metrics, /live and /ready", self.address)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> TelemetryServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


Expose = Callable[[Telemetry, str], tuple[bytes, str]]


class _Server(ThreadingHTTPServer):
    """The server of a `TelemetryServer`, with a bounded number of calls at once."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, telemetry: Telemetry, expose: Expose, exposed: bool) -> None:
        self.telemetry = telemetry
        self.expose = expose
        self.exposed = exposed
        self.has_failed = False
        self._free = BoundedSemaphore(MOST_CALLS)
        family = getaddrinfo(host, port)[0][0]
        self.address_family = family if family in (AF_INET, AF_INET6) else AF_INET
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or hang up if too many calls are under way."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: the caller hung up."""


class _Handler(BaseHTTPRequestHandler):
    """Answers one call."""

    timeout = CALL_SECONDS
    server: _Server
    server_version = "privdec"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with metrics or health."""
        if not self.server.exposed and not is_loopback_host(self.headers.get("Host", "")):
            self._answer(403, b"this is for programs on this device\n")
            return

        telemetry = self.server.telemetry
        path = self.path.partition("?")[0]
        try:
            if path == "/metrics":
                content, kind = self.server.expose(telemetry, self.headers.get("Accept", ""))
                self._answer(200, content, kind)
            elif path == "/live":
                self._answer_health(*telemetry.live())
            elif path == "/ready":
                self._answer_health(*telemetry.ready())
            else:
                self._answer(404, b"there are /metrics, /live and /ready\n")
        except OSError:
            raise  # the caller hung up
        except Exception as error:
            # Said once: whoever asks decides how often it asks.
            if not self.server.has_failed:
                self.server.has_failed = True
                _log.exception("%s could not be answered", path)
            self._answer(500, f"{one_line(error)}\n".encode())

    def _answer_health(self, is_well: bool, reasons: list[str]) -> None:
        content = json.dumps({"ok": is_well, "reasons": reasons}).encode() + b"\n"
        self._answer(200 if is_well else 503, content, "application/json")

    def _answer(self, status: int, content: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log no calls."""


def is_loopback_host(host: str) -> bool:
    """Return whether a call's header Host, with a port or without, names this device's loopback."""
    name = host.lower()
    if not name.endswith("]"):
        before, colon, port = name.rpartition(":")
        if colon and port.isdecimal():
            name = before
    name = name.strip("[]")
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"
