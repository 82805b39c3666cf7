"""Serves the live page on loopback: three files of this package and one JSON, and nothing else.

Nothing is loaded from anywhere else, and nothing can be changed by it. The page's policy (Content-Security-Policy)
allows its own script and style, and no code in the page.

The attacker is a page of the web, or a program of another user's on this device, in the browser that shows this page:

- by a name whose address it changes (*DNS rebinding*): only calls that name loopback as their host are answered;
- from its own origin, as a script, an image, a frame or by `fetch`: no answer names another origin that may read it,
  and what a browser marks as another site's (`Sec-Fetch-Site`) is refused before anything is computed;
- with a call that changes something: there is none.
"""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import closing
from importlib.resources import files
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flower_privdec.common.errors import RunError, option
from flower_privdec.common.formatting import printable
from flower_privdec.network.peer.telemetry import is_loopback_host
from flower_privdec.watching.board import Board

HOST = "127.0.0.1"
PAGES = {
    "/": ("watch.html", "text/html; charset=utf-8"),
    "/watch.css": ("watch.css", "text/css; charset=utf-8"),
    "/watch.js": ("watch.js", "text/javascript; charset=utf-8"),
}
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MOST_CALLS = 64  # at once
OWN_SITES = (b"same-origin", b"none")  # by a browser: this page's own calls, and an address that a person typed
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def application(board: Board) -> Callable[[Message, Receive, Send], Awaitable[None]]:
    """Return the page of a board, as an application of ASGI."""
    folder = files("flower_privdec.watching") / "static"
    routes = []
    for path, (name, kind) in PAGES.items():
        content = (folder / name).read_bytes()
        routes.append(Route(path, _file(content, kind), methods=["GET"]))

    async def state(request: Request) -> Response:
        # Escaped beyond ASCII and "<", so that it stays data wherever it is put.
        text = json.dumps(board.state(), allow_nan=False).replace("<", "\\u003c")
        return Response(text, media_type="application/json", headers=HEADERS)

    routes.append(Route("/state.json", state, methods=["GET"]))
    inner = Starlette(routes=routes)

    async def guarded(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            why = _refused(scope)
            if why:
                refusal = Response(f"{why}\n", 403, headers=HEADERS)
                await refusal(scope, receive, send)
                return
        await inner(scope, receive, send)

    return guarded


def _refused(scope: Message) -> str:
    """Return why a call is not answered; "" if it is."""
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    if len(hosts) != 1 or not is_loopback_host(hosts[0]):
        return "this is for programs on this device"

    # A link from elsewhere to the page itself is one that a person follows, and shows them nothing of a stranger's.
    sites = [value for name, value in scope["headers"] if name == b"sec-fetch-site"]
    if scope["path"] != "/" and any(site not in OWN_SITES for site in sites):
        return "this is for the page itself"
    return ""


def _file(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return Response(content, headers={**HEADERS, "Content-Type": kind})

    return answer


def listening(port: int) -> socket.socket:
    """Return a socket that listens on a port of loopback.

    Raises:
        RunError: it cannot be had, for another `privdec watch`, which it names, or another process has it.
    """
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((HOST, port))
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise RunError(
            f"{option('port', port)} cannot be listened on ({error.strerror}): {_who_listens(port)}; give another "
            "port, or end that",
            code="watch.port",
        ) from error
    return sock


def _who_listens(port: int) -> str:
    """Return in words what listens on a port."""
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with closing(opener.open(f"http://{HOST}:{port}/state.json", timeout=1)) as answer:
            content = json.loads(answer.read(1 << 22))
        return f"another privdec watch shows {printable(str(content['name'])[:60])!r} there"
    except (OSError, ValueError, LookupError, TypeError):
        return "another process listens there"


def serve(board: Board, sock: socket.socket) -> None:
    """Serve a board's page until Ctrl-C or SIGTERM."""
    server_of(board).run(sockets=[sock])


def server_of(board: Board) -> uvicorn.Server:
    """Return the server of a board's page, which does not run yet."""
    config = uvicorn.Config(
        application(board),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MOST_CALLS,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)
