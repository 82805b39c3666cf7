"""Signatures by the keys of certificates: of a peer's, and of the authority's."""

from __future__ import annotations

from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, padding, rsa

PSS = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)


def signed(key: Any, content: bytes) -> bytes:
    """Return a private key's signature of some bytes; the key is of a kind that TLS 1.3 has."""
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(content, ec.ECDSA(hashes.SHA256()))
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(content, PSS, hashes.SHA256())
    assert isinstance(key, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey), "TLS 1.3 has no other"
    return key.sign(content)


def is_signed(key: Any, signature: bytes, content: bytes) -> bool:
    """Return whether a signature is that of a public key."""
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
