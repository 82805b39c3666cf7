"""Signatures of session keys by the certificates with which peers connect; see `pushsum.roster`.

TLS has verified a neighbour's certificate. A session key that was passed on brings its certificates along, and they are
checked as TLS would check them: signed by an authority that this peer trusts, for exactly one peer of the scenario,
within their dates, and with a key that may sign. No certificate is revoked, here or there: a new authority is.
"""

from __future__ import annotations

import ssl
import struct
from collections.abc import Sequence
from datetime import datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, padding, rsa

from flower_privdec.network.transport.tls import Credentials, certificate_problem, identities_of, is_past

LENGTH = struct.Struct("<H")  # of a certificate in DER, which stands before it
MOST_CERTIFICATES = 8
PSS = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)


class CertificateSignatures:
    """Signs with the key of a peer's certificate, and checks others by theirs; see `roster.Signatures`.

    Args:
        credentials: the peer's own.
        identities: of all peers.
    """

    def __init__(self, credentials: Credentials, identities: Sequence[str]) -> None:
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
        self._ends: dict[bytes, datetime] = {}  # when certificates that were good are over

    def sign(self, content: bytes) -> tuple[bytes, bytes]:
        """See Signatures."""
        key = self._key
        if isinstance(key, ec.EllipticCurvePrivateKey):
            signature = key.sign(content, ec.ECDSA(hashes.SHA256()))
        elif isinstance(key, rsa.RSAPrivateKey):
            signature = key.sign(content, PSS, hashes.SHA256())
        else:
            assert isinstance(key, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey), "TLS 1.3 has no other"
            signature = key.sign(content)
        return signature, self._certificates

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

        if not _is_signed(leaf, signature, content):
            return "its signature is not that of its certificate's key for this run"
        self._ends[certificates] = min(one.not_valid_after_utc for one in x509.load_pem_x509_certificates(pem))
        return None

    def is_expired(self, certificates: bytes) -> bool:
        """See Signatures."""
        end = self._ends.get(certificates)
        return end is not None and is_past(end)


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


def _is_signed(leaf: x509.Certificate, signature: bytes, content: bytes) -> bool:
    """Return whether a signature is that of a certificate's key."""
    key = leaf.public_key()
    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, content, ec.ECDSA(hashes.SHA256()))
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, content, PSS, hashes.SHA256())
        elif isinstance(key, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey):
            key.verify(signature, content)
        else:
            return False
    except InvalidSignature:
        return False
    return True
