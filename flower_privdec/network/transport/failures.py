"""Why an address cannot be listened on or called: each cause by its name, with what the device's owner can do."""

from __future__ import annotations

import errno
import socket
import ssl
from contextlib import closing

from flower_privdec.common.errors import PrivdecError, RunError
from flower_privdec.common.formatting import one_line
from flower_privdec.network.transport.tls import Credentials, certificate_problem, context_of, identities_of
from flower_privdec.network.transport.transport import GREETING, UnreachableError, greeting_problem

NO_IPV6 = "this device has no IPv6: give an address of IPv4, or switch IPv6 on"
LISTENING = {
    errno.EADDRINUSE: ("in-use", "another process listens there: stop it, or give this peer another port"),
    errno.EADDRNOTAVAIL: (
        "not-here",
        "no interface of this device has that address: correct it in network.peers, wait until the network is up, or, "
        "if the others reach this device by it through a router, listen elsewhere, as --listen 0.0.0.0:PORT",
    ),
    errno.EAFNOSUPPORT: ("no-family", NO_IPV6),
    errno.EACCES: ("forbidden", "this user may not use that port: take one above 1023 in network.peers"),
}
CALLING = {
    errno.ECONNREFUSED: ("refused", "no peer listens on that port: start it, or correct network.peers"),
    errno.EHOSTUNREACH: (
        "no-route",
        "its device is off or in another network, or a firewall rejects the call: check these, and network.peers",
    ),
    errno.ENETUNREACH: ("no-route", "this device has no route there: is its network up?"),
    errno.EAFNOSUPPORT: ("no-family", NO_IPV6),
    errno.EACCES: ("forbidden", "a rule of this device's own firewall or routes forbids it: let TCP out to that port"),
    errno.EPERM: ("forbidden", "a rule of this device's own firewall or routes forbids it: let TCP out to that port"),
    errno.ETIMEDOUT: (
        "silent",
        "its device is off, or a firewall drops what is sent to it: start it, or open its port; if nobody can dial it, "
        "give it dial: out in place of its address, and neighbours that it can dial",
    ),
    errno.ECONNRESET: ("hung-up", "what listens there hung up: is it a peer of this scenario?"),
    errno.EMFILE: ("few-descriptors", "this process has no descriptor left: raise the limit of open files (ulimit -n)"),
}


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def listening_error(address: str) -> RunError:
    """Return why an address could not be listened on, by trying it again."""
    code = "failed"
    why = "it was free when it was tried again: start this peer again"
    try:
        host, port = address_of(address)
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with closing(socket.socket(family, kind, protocol)) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(where)
            trial.listen()
    except socket.gaierror as error:
        code = "unknown"
        why = f"{error.strerror}: its host name has no address here; correct it in network.peers"
    except OSError as error:
        code, remedy = LISTENING.get(error.errno or 0, ("failed", "mend that, then start this peer again"))
        why = f"{error.strerror}: {remedy}"

    return RunError(f"{address} cannot be listened on ({why})", code=f"listen.{code}")


def calling_error(
    address: str, identity: str | None, credentials: Credentials, seconds: float
) -> UnreachableError | None:
    """Return why a peer cannot be called, by trying a TLS handshake, whose errors are exact; None if it can be.

    Args:
        address: HOST:PORT.
        identity: that its certificate has to be for; None for any peer's.
        credentials: one's own.
        seconds: to wait at most.
    """
    peer = f"{identity or 'the peer'} at {address}"
    context = context_of(credentials)
    context.check_hostname = identity is not None
    try:
        with (
            socket.create_connection(address_of(address), timeout=seconds) as plain,
            context.wrap_socket(plain, server_hostname=identity) as secured,
        ):
            secured.settimeout(seconds)
            # In TLS 1.3 it is now that one's own certificate is looked at.
            answer = secured.recv(len(GREETING))
            while answer and len(answer) < len(GREETING) and (more := secured.recv(len(GREETING) - len(answer))):
                answer += more
    except ssl.SSLCertVerificationError as error:
        problem = _problem_of(address, identity, credentials, seconds)
        why = error.verify_message if problem is None else str(problem)
        code = "certificate.refused" if problem is None else problem.code
        return UnreachableError(f"{peer}: its certificate is refused here: {why}", code=code)
    except ssl.SSLError as error:
        if not (error.reason or "").startswith(("TLSV1_ALERT", "SSLV3_ALERT", "TLSV13_ALERT")):
            why = f"what listens there speaks no TLS that a peer speaks ({error.reason}): is it a peer?"
            return UnreachableError(f"{peer}: {why}", code="call.no-tls")
        answer = b""
    except ConnectionResetError:
        answer = b""
    except TimeoutError:
        return UnreachableError(f"{peer} does not answer: {CALLING[errno.ETIMEDOUT][1]}", code="call.silent")
    except socket.gaierror as error:
        why = f"{error.strerror}: its host name has no address here; correct it in network.peers, or mend the DNS"
        return UnreachableError(f"{peer}: {why}", code="call.unknown")
    except OSError as error:
        code, remedy = CALLING.get(error.errno or 0, ("failed", "mend that"))
        return UnreachableError(f"{peer}: {error.strerror or error}: {remedy}", code=f"call.{code}")

    if answer == GREETING:
        return None
    if answer:
        return UnreachableError(f"{peer}: {greeting_problem(answer)}", code="call.greeting")

    return UnreachableError(
        f"{peer} refuses this peer's certificate; it has to be of an authority that is trusted there, for clients and "
        "servers, and valid by the clock there",
        code="call.certificate",
    )


def _problem_of(address: str, identity: str | None, credentials: Credentials, seconds: float) -> PrivdecError | None:
    """Return what is wrong with the certificate that a peer shows."""
    try:
        shown = shown_certificate(address, credentials, seconds, identity=identity, verify=ssl.CERT_NONE)
    except OSError:
        return None
    return certificate_problem(shown, credentials.authority, identity or next(iter(identities_of(shown)), ""))


def shown_certificate(
    address: str,
    credentials: Credentials,
    seconds: float,
    *,
    identity: str | None = None,
    verify: ssl.VerifyMode = ssl.CERT_REQUIRED,
) -> bytes:
    """Return the certificate (PEM) that a peer shows, of any identity.

    Raises:
        OSError: nothing listens there, or something that is not a peer.
        ValueError: the address is none.
    """
    context = context_of(credentials)
    context.check_hostname = False
    context.verify_mode = verify
    with (
        socket.create_connection(address_of(address), timeout=seconds) as plain,
        context.wrap_socket(plain, server_hostname=identity) as secured,
    ):
        return ssl.DER_cert_to_PEM_cert(secured.getpeercert(binary_form=True) or b"").encode()


def identity_at(address: str, credentials: Credentials, seconds: float = 5.0) -> str:
    """Return the identity of the peer at an address, verified by a trusted authority.

    Raises:
        RunError: no peer listens there, or one of another authority.
    """
    try:
        names = identities_of(shown_certificate(address, credentials, seconds))
    except OSError as error:  # a certificate that does not verify is a ValueError too
        raise calling_error(address, None, credentials, seconds) or RunError(
            f"{address}: {one_line(error)}; is a peer running there?", code="call.failed"
        ) from error
    except ValueError as error:
        raise RunError(f"{address}: must be HOST:PORT ({one_line(error)})", code="call.address") from error
    if not names:
        problem = f"{address}: its certificate is for no DNS name, so it is not a peer"
        raise RunError(problem, code="certificate.no-name")
    return names[0]
