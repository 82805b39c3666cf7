"""Transport baseline: the messages of a run as opaque bytes over bare gRPC with TLS.

Nothing is computed, checked, copied together or put on disk: processes wait for each other at every place, as
synchronous peers do. Messages are sent in one of three ways (`KINDS`): in pieces of a call each, whole in a call each,
or whole over a stream that stays open, which acknowledges each.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Condition
from typing import Any

import grpc
from grpc.experimental import ChannelOptions

from flower_privdec.network.transport.tls import files_of

PIECE = 1 << 20
METHOD = "/baseline.Peer/Call"
ALIVE = [
    ("grpc.max_receive_message_length", PIECE + (1 << 16)),
    ("grpc.max_send_message_length", PIECE + (1 << 16)),
]
SERVING = [*ALIVE, ("grpc.so_reuseport", 0)]
CALLING = [
    *ALIVE,
    ("grpc.enable_retries", 0),
    (ChannelOptions.SingleThreadedUnaryStream, 1),  # a call takes no thread that waits for its answer
]
KINDS = ("pieces", "unary", "stream")
LIMITS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
PATIENCE = 60.0  # seconds for a message, and for the others to be there


def _options(options: Sequence[tuple[str, Any]], kind: str) -> list[tuple[str, Any]]:
    """Return options of gRPC for a way of sending: of two limits of one name, the library takes the first."""
    if kind == "pieces":
        return list(options)
    return [*LIMITS, *(option for option in options if option not in ALIVE)]


class BaselinePeer:
    """One process that discards what it receives and sends as many bytes at each place.

    Args:
        peer: its number.
        plan: addresses and identities of all; `certs`, their folder; `bytes` of a message; `kind`, one of KINDS; and
            `receivers`, of every peer at every place.
    """

    def __init__(self, peer: int, plan: dict[str, Any]) -> None:
        self._peer = peer
        self._plan = plan
        self._kind = plan["kind"]
        self._heard = [0] * len(plan["receivers"])
        self._changed = Condition()
        certificate, key, authority = (path.read_bytes() for path in files_of(Path(plan["certs"]), peer))
        self._own = key, certificate, authority
        options = _options(SERVING, self._kind)
        self._server = grpc.server(ThreadPoolExecutor(8), options=options)
        handlers = {
            "pieces": grpc.stream_unary_rpc_method_handler(self._take),
            "unary": grpc.unary_unary_rpc_method_handler(self._take_whole),
            "stream": grpc.stream_stream_rpc_method_handler(self._take_all),
        }
        handler = handlers[self._kind]
        service, _, method = METHOD.strip("/").partition("/")
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        shown = grpc.ssl_server_credentials(((key, certificate),), authority, require_client_auth=True)
        self._server.add_secure_port(plan["addresses"][peer], shown)
        self._server.start()
        self._methods: dict[int, Any] = {}
        self._streams: dict[int, tuple[SimpleQueue[bytes], Any]] = {}

    def _take(self, parts: Iterator[bytes], context: Any) -> bytes:
        place = int.from_bytes(next(parts), "little")
        for _ in parts:
            pass
        self._hear(place)
        return b""

    def _take_whole(self, message: bytes, context: Any) -> bytes:
        self._hear(int.from_bytes(message[:8], "little"))
        return b""

    def _take_all(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for message in messages:
            self._hear(int.from_bytes(message[:8], "little"))
            yield b""

    def _hear(self, place: int) -> None:
        with self._changed:
            self._heard[place] += 1
            self._changed.notify_all()

    def _method(self, receiver: int) -> Any:
        if receiver not in self._methods:
            key, certificate, authority = self._own
            name = self._plan["identities"][receiver]
            named = [("grpc.ssl_target_name_override", name), ("grpc.default_authority", name)]
            options = [*_options(CALLING, self._kind), *named]
            shown = grpc.ssl_channel_credentials(authority, key, certificate)
            channel = grpc.secure_channel(self._plan["addresses"][receiver], shown, options=options)
            makers = {"pieces": channel.stream_unary, "unary": channel.unary_unary, "stream": channel.stream_stream}
            self._methods[receiver] = makers[self._kind](METHOD)
        return self._methods[receiver]

    def run(self) -> list[tuple[float, float]]:
        """Go through all places; return the clock and this process's CPU time after each."""
        size = self._plan["bytes"]
        stamps = []
        whole = bytes(size)
        pieces = [bytes(min(PIECE, size - start)) for start in range(0, size, PIECE)]
        with ThreadPoolExecutor(8) as pool:
            for place, receivers in enumerate(self._plan["receivers"]):
                parts = [place.to_bytes(8, "little"), *pieces]
                if self._kind != "pieces":
                    parts = [place.to_bytes(8, "little") + whole]
                calls = [pool.submit(self._send, receiver, parts) for receiver in receivers[self._peer]]
                awaited = sum(self._peer in peers for peers in receivers)
                self._await(place, awaited)
                for call in calls:
                    call.result()
                stamps.append((time.monotonic(), time.process_time()))
        return stamps

    def _await(self, place: int, messages: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._heard[place] >= messages, PATIENCE):
                raise TimeoutError(f"peer {self._peer} heard nothing at place {place}")

    def _send(self, receiver: int, parts: list[bytes]) -> None:
        method = self._method(receiver)
        if self._kind == "pieces":
            method(iter(parts), timeout=PATIENCE, wait_for_ready=True)
        elif self._kind == "unary":
            method(parts[0], timeout=PATIENCE, wait_for_ready=True)
        else:
            if receiver not in self._streams:
                queue = SimpleQueue[bytes]()
                self._streams[receiver] = queue, method(iter(queue.get, b""), wait_for_ready=True)
            queue, answers = self._streams[receiver]
            queue.put(parts[0])
            next(answers)


def run_peer(plan: str, peer: int) -> list[tuple[float, float]]:
    """Be one of the processes, whose plan is a file of JSON; return the stamps. It goes on taking what comes."""
    return BaselinePeer(peer, json.loads(Path(plan).read_text())).run()
