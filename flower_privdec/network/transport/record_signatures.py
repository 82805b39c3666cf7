"""Signatures of session keys by the certificates with which peers connect; see `pushsum.roster`.

TLS has verified a neighbour's certificate. A session key that was passed on brings its certificates along, and they are
checked as TLS would check them: signed by an authority that this peer trusts, for exactly one peer of the scenario,
within their dates, with a key that may sign, and none that the list of members has shut out or replaced.
"""

from __future__ import annotations

import ssl
import struct
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from flower_privdec.network.transport.directory import Directory
from flower_privdec.network.transport.signing import is_signed, signed
from flower_privdec.network.transport.tls import Credentials, certificate_problem, identities_of, is_past

LENGTH = struct.Struct("<H")  # of a certificate in DER, which stands before it
MOST_CERTIFICATES = 8


class _Good(NamedTuple):
    """Certificates that were good: whose, as PEM, and when they are over."""

    peer: int
    pem: bytes
    end: datetime


class CertificateSignatures:
    """Signs with the key of a peer's certificate, and checks others by theirs; see `roster.Signatures`.

    Args:
        credentials: the peer's own.
        identities: of all peers.
        directory: returns whose certificates count no more; all do by default.
    """

    def __init__(
        self,
        credentials: Credentials,
        identities: Sequence[str],
        directory: Callable[[], Directory] = lambda: Directory((), ()),
    ) -> None:
        self._directory = directory
        self._authority = credentials.authority
        self._identities = tuple(identities)
        self._members = frozenset(identities)
        self._key = serialization.load_pem_private_key(credentials.key, password=None)
        self._certificates = b"".join(
            LENGTH.pack(len(der)) + der
            for der in (
                one.public_bytes(serialization.Encoding.DER)
                for one in x509.load_pem_x509_certificates(credentials.certificate)
            )
        )
        self._good: dict[bytes, _Good] = {}  # certificates that were good once

    def sign(self, content: bytes) -> tuple[bytes, bytes]:
        """See Signatures."""
        return signed(self._key, content), self._certificates

    def problem(self, peer: int, content: bytes, signature: bytes, certificates: bytes) -> str | None:
        """See Signatures."""
        try:
            pem = _pem_of(certificates)
            leaf = x509.load_pem_x509_certificate(pem)
        except ValueError:
            return "its certificates cannot be read"

        # As of a connection's certificate: it names one peer of the scenario, and this one.
        named = self._members.intersection(identities_of(pem))
        identity = self._identities[peer]
        if named != {identity}:
            return f"its certificate is for {', '.join(sorted(named)) or 'no peer of this scenario'}, not {identity}"
        wrong = certificate_problem(pem, self._authority, identity)
        if wrong is not None:
            return str(wrong)

        if not is_signed(leaf.public_key(), signature, content):
            return "its signature is not that of its certificate's key for this run"
        refused = self._directory().problem(peer, pem)
        if refused:
            return refused
        end = min(one.not_valid_after_utc for one in x509.load_pem_x509_certificates(pem))
        self._good[certificates] = _Good(peer, pem, end)
        return None

    def is_expired(self, certificates: bytes) -> bool:
        """See Signatures."""
        good = self._good.get(certificates)
        if good is None:
            return False
        return is_past(good.end) or bool(self._directory().problem(good.peer, good.pem))


def _pem_of(certificates: bytes) -> bytes:
    """Return certificates as PEM; raises ValueError if there are none, too many, or bytes that belong to none."""
    pem: list[str] = []
    begin = 0
    while begin < len(certificates):
        if len(pem) == MOST_CERTIFICATES or begin + LENGTH.size > len(certificates):
            raise ValueError
        (size,) = LENGTH.unpack_from(certificates, begin)
        end = begin + LENGTH.size + size
        if not size or end > len(certificates):
            raise ValueError
        pem.append(ssl.DER_cert_to_PEM_cert(certificates[begin + LENGTH.size : end]))
        begin = end
    if not pem:
        raise ValueError
    return "".join(pem).encode()
