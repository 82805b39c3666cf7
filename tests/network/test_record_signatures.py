"""Who has signed a session key that others passed on: exactly the peer whose certificate an authority signed."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from flower_privdec.network.transport import record_signatures
from flower_privdec.network.transport.directory import Directory
from flower_privdec.network.transport.record_signatures import LENGTH, CertificateSignatures
from flower_privdec.network.transport.tls import (
    NO_USAGE,
    USAGES,
    Authority,
    Credentials,
    certificate_problem,
)

NOW = datetime.now(UTC)
NAMES = [f"peer-{peer}.tiny" for peer in range(4)]
PEM = serialization.Encoding.PEM
PKCS8 = serialization.PrivateFormat.PKCS8


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("tiny")


def issued(
    authority: Authority,
    names: list[str],
    key=None,
    *,
    ca: bool = False,
    says_usage: bool = True,
    path_length: int | None = None,
    days: tuple[int, int] = (-1, 300),
    more: list[tuple[x509.ExtensionType, bool]] | None = None,
    above: bytes = b"",
) -> tuple[Authority, Credentials]:
    """Sign a certificate as nobody should, or for an authority in between; return it in both roles.

    Args:
        says_usage: whether the certificate says what its key may do.
        days: from when until when it is valid, from now.
        more: further extensions, and whether they are critical.
        above: certificates between the signer and the authority at the top, PEM.
    """
    key = key or ec.generate_private_key(ec.SECP256R1())
    usage = {"key_cert_sign": True} if ca else {"digital_signature": True}
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])]))
        .issuer_name(authority.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW + timedelta(days=days[0]))
        .not_valid_after(NOW + timedelta(days=days[1]))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=path_length), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
    )
    if says_usage:
        builder = builder.add_extension(x509.KeyUsage(**(NO_USAGE | usage)), critical=True)
    for extension, is_critical in more or []:
        builder = builder.add_extension(extension, is_critical)
    made = builder.sign(authority.key, hashes.SHA256())
    pem = made.public_bytes(PEM) + above
    key_pem = key.private_bytes(PEM, PKCS8, serialization.NoEncryption())
    return Authority(made, key), Credentials(pem, key_pem, authority.pem)


def problem(authority: Authority, signer: Credentials, peer: int = 1, content: bytes = b"content") -> str | None:
    """Return why peer 0 refuses what a signer signed as peer 1; None if it does not."""
    signature, certificates = CertificateSignatures(signer, NAMES).sign(b"content")
    checks = CertificateSignatures(authority.issue(NAMES[0]), NAMES)
    return checks.problem(peer, content, signature, certificates)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ec.generate_private_key(ec.SECP256R1()),
        lambda: ec.generate_private_key(ec.SECP384R1()),
        lambda: rsa.generate_private_key(65537, 2048),
        ed25519.Ed25519PrivateKey.generate,
    ],
    ids=["P-256", "P-384", "RSA", "Ed25519"],
)
def test_any_key_of_a_certificate_signs(authority: Authority, make: Callable[[], object]) -> None:
    _, signer = issued(authority, [NAMES[1]], make())
    assert problem(authority, signer) is None
    assert "not that of its certificate's key" in str(problem(authority, signer, content=b"other content"))


@pytest.mark.parametrize(
    ("signer", "why"),
    [
        (lambda authority: authority.issue(NAMES[2]), "not peer-1.tiny"),
        (lambda authority: authority.issue("peer-1.other"), "no peer of this scenario"),
        (lambda authority: issued(authority, [NAMES[1], NAMES[2]])[1], "peer-1.tiny, peer-2.tiny"),
        (lambda authority: Authority.create("tiny").issue(NAMES[1]), "not one of the authorities"),
        (lambda authority: authority.issue(NAMES[1], NOW - timedelta(days=3), 2), "expired"),
        (lambda authority: authority.issue(NAMES[1], NOW + timedelta(days=1), 2), "is valid from"),
        (
            lambda authority: authority.issue(NAMES[1], usages=[ExtendedKeyUsageOID.SERVER_AUTH]),
            "not for both clients and servers",
        ),
    ],
    ids=["another member", "stranger", "two peers", "foreign authority", "expired", "early", "usage"],
)
def test_others_do_not_sign_for_a_peer(authority: Authority, signer, why: str) -> None:
    assert why in str(problem(authority, signer(authority)))


@pytest.mark.parametrize("says_usage", [True, False])
def test_a_member_is_no_authority(authority: Authority, says_usage: bool) -> None:
    """With its own certificate it signs one for another peer, and passes both on; a handshake refuses them, too."""
    member, own = issued(authority, [NAMES[2]], says_usage=says_usage)
    assert problem(authority, own, peer=2) is None
    _, signer = issued(member, [NAMES[1]], above=own.certificate)
    assert "is not an authority's" in str(problem(authority, signer))


@pytest.mark.parametrize(
    ("between", "why"),
    [
        ({}, None),
        ({"days": (-20, -10)}, "is valid from"),
        ({"more": [(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), False)]}, "extended key usage"),
        ({"more": [(x509.ExtendedKeyUsage(USAGES), False)]}, None),
        ({"more": [(x509.NameConstraints([x509.DNSName("hospital")], None), True)]}, "constraints"),
        ({"more": [(x509.PolicyConstraints(0, None), True)]}, "constraints"),
    ],
    ids=["good", "expired", "for code", "for peers", "other names", "policies"],
)
def test_authorities_in_between_are_checked(between, why: str | None) -> None:
    top = Authority.create("top")
    root, _ = issued(top, ["root"], top.key, ca=True)  # one that allows authorities below it
    root = Authority(root.certificate, top.key)
    middle, shown = issued(root, ["site"], ca=True, path_length=0, **between)
    _, signer = issued(middle, [NAMES[1]], above=shown.certificate)
    found = certificate_problem(signer.certificate, root.pem, NAMES[1])
    if why is None:
        assert found is None
    else:
        assert why in str(found)
        assert found is not None
        assert found.code == "certificate.issuer"


def test_an_authority_allows_no_more_below_than_it_says() -> None:
    top = Authority.create("top")  # allows none
    middle, shown = issued(top, ["site"], ca=True)
    _, signer = issued(middle, [NAMES[1]], above=shown.certificate)
    assert "allows 0 authorities" in str(certificate_problem(signer.certificate, top.pem, NAMES[1]))


@pytest.mark.parametrize(
    "certificates",
    [b"", b"\1", b"\0\0", LENGTH.pack(100) + b"short", LENGTH.pack(5) + b"bytes", (LENGTH.pack(1) + b"x") * 9],
)
def test_bytes_that_are_no_certificates_are_refused(authority: Authority, certificates: bytes) -> None:
    checks = CertificateSignatures(authority.issue(NAMES[0]), NAMES)
    assert checks.problem(1, b"content", b"signature", certificates) == "its certificates cannot be read"


def test_a_certificate_that_was_good_expires(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = CertificateSignatures(authority.issue(NAMES[0]), NAMES)
    signature, certificates = CertificateSignatures(authority.issue(NAMES[1], days=2), NAMES).sign(b"content")
    assert checks.problem(1, b"content", signature, certificates) is None
    assert not checks.is_expired(certificates)

    monkeypatch.setattr(record_signatures, "is_past", lambda moment: moment < NOW + timedelta(days=3))
    assert checks.is_expired(certificates)


def test_a_certificate_that_was_shut_out_signs_nothing(authority: Authority) -> None:
    refused: dict[int, str] = {}
    directory = Directory(("",) * len(NAMES), tuple(NAMES), refused)
    checks = CertificateSignatures(authority.issue(NAMES[0]), NAMES, lambda: directory)
    signature, certificates = CertificateSignatures(authority.issue(NAMES[1]), NAMES).sign(b"content")
    assert checks.problem(1, b"content", signature, certificates) is None
    assert not checks.is_expired(certificates)

    refused[1] = "it was shut out"
    assert checks.problem(1, b"content", signature, certificates) == "it was shut out"
    assert checks.is_expired(certificates)  # so no noise is shared with it any more


def test_the_size_of_a_record(authority: Authority) -> None:
    signature, certificates = CertificateSignatures(authority.issue(NAMES[1]), NAMES).sign(b"content")
    assert len(signature) + len(certificates) < 700
    assert ssl.DER_cert_to_PEM_cert(certificates[LENGTH.size :])
