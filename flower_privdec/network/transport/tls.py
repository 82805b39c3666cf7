"""TLS certificates of peers: an authority signs one for each peer of a scenario, and no connection opens without one.

A peer's identity is a DNS name in its certificate's subject alternative names, on any machine. Both sides of a
connection show a certificate, so each one serves for clients and servers. The scenario maps identities to peers; a
certificate of the same authority with any other identity is a stranger's.
"""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID, NameOID

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.files import write_atomically
from flower_privdec.common.formatting import one_line
from flower_privdec.scenario.sections import HasPeers

AUTHORITY_DAYS = 3650
PEER_DAYS = 365
AUTHORITY = "authority.pem"
AUTHORITY_KEY = "authority.key"
RENEWED = timedelta(days=30)  # before a certificate expires
KNOWN_CERTIFICATES = 64  # that need not be read again
UTC_NOW = partial(datetime.now, UTC)
NEVER = datetime.max.replace(tzinfo=UTC), datetime.min.replace(tzinfo=UTC)
EARLIER = timedelta(minutes=5)  # of a certificate's beginning: clocks differ
USAGES = (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH)
ISSUERS_EXTENSIONS = (ExtensionOID.BASIC_CONSTRAINTS, ExtensionOID.KEY_USAGE, ExtensionOID.EXTENDED_KEY_USAGE)
KEY_USAGES = "digital_signature content_commitment key_encipherment data_encipherment key_agreement"
NO_USAGE = dict.fromkeys(f"{KEY_USAGES} key_cert_sign crl_sign encipher_only decipher_only".split(), False)


@dataclass(frozen=True)
class Credentials:
    """A peer's certificate, its key and the authorities that it trusts, each as PEM.

    Attributes:
        certificate: its own, and those between it and the authority, if any.
        key: its private key.
        authority: certificates of those who may sign a peer's.
    """

    certificate: bytes
    key: bytes
    authority: bytes

    @classmethod
    def read(cls, certificate: Path, key: Path, authority: Path, identity: str) -> Credentials:
        """Read a peer's files.

        Raises:
            ScenarioError: a file cannot be read, they do not belong together, or the certificate is not one that
                another peer would take for this identity now.
        """
        credentials = cls(content_of(certificate), content_of(key), content_of(authority))
        problem = certificate_problem(credentials.certificate, credentials.authority, identity)
        if problem is not None:
            raise ScenarioError(f"{certificate}: {problem}", code=problem.code) from problem
        _key_of(certificate, credentials.certificate, key, credentials.key)
        return credentials


@dataclass(frozen=True)
class Authority:
    """A certificate authority, which signs the peers' certificates."""

    certificate: x509.Certificate
    key: CertificateIssuerPrivateKeyTypes

    @classmethod
    def create(cls, name: str) -> Authority:
        """Make a new one, which is called by a name in the certificates that it signs."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} authority"[:64])])
        usage = x509.KeyUsage(**(NO_USAGE | {"key_cert_sign": True, "crl_sign": True}))
        made = (
            _begun(subject, subject, key, None, AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(made, key)

    @classmethod
    def read(cls, certificate: Path, key: Path) -> Authority:
        """Read one that was written.

        Raises:
            ScenarioError: the files cannot be read, or do not belong together.
        """
        return cls(*_key_of(certificate, content_of(certificate), key, content_of(key)))

    @property
    def pem(self) -> bytes:
        """Return its certificate."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        identity: str,
        now: datetime | None = None,
        days: int = PEER_DAYS,
        usages: Sequence[x509.ObjectIdentifier] = USAGES,
    ) -> Credentials:
        """Sign a certificate for a new key.

        Args:
            identity: whose.
            now: when it begins; by default now.
            days: how long it lasts.
            usages: what it is for.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity[:64])])
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.certificate.public_key())  # type: ignore[arg-type]
        made = (
            _begun(subject, self.certificate.subject, key, now, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(**(NO_USAGE | {"digital_signature": True})), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(identity)]), critical=False)
            .add_extension(issuer, critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return Credentials(made.public_bytes(serialization.Encoding.PEM), _key_pem(key), self.pem)

    def write(self, certificate: Path, key: Path) -> None:
        """Write certificate and key, the key for its owner alone."""
        write_atomically(key, _key_pem(self.key))
        write_atomically(certificate, self.pem, public=True)


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime | None, days: int
) -> x509.CertificateBuilder:
    begin = (now or datetime.now(UTC)) - EARLIER
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_pem(key: CertificateIssuerPrivateKeyTypes) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


@lru_cache(KNOWN_CERTIFICATES)
def _read(certificate: bytes) -> x509.Certificate:
    """Return a certificate, which is shown at every call, from its PEM."""
    return x509.load_pem_x509_certificate(certificate)


@lru_cache(KNOWN_CERTIFICATES)
def identities_of(certificate: bytes) -> tuple[str, ...]:
    """Return the DNS names that a certificate is for; none if it cannot be read."""
    try:
        leaf = _read(certificate)
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return ()
    return tuple(names.get_values_for_type(x509.DNSName))


def is_past(moment: datetime) -> bool:
    """Return whether a moment is over."""
    return datetime.now(UTC) > moment


def time_problem(certificate: bytes, now: datetime | None = None) -> ScenarioError | None:
    """Return why a certificate is not valid yet, or no longer; None if it is."""
    leaf = _read(certificate)
    now = now or datetime.now(UTC)
    clock = f"the clock of the device that checks it says {now:%Y-%m-%d %H:%M} UTC"
    if now > leaf.not_valid_after_utc:
        return ScenarioError(
            f"the certificate expired on {leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, and {clock}: `privdec certs` "
            "makes a new one; if that clock is wrong, set it",
            code="certificate.expired",
        )

    if now < leaf.not_valid_before_utc:
        return ScenarioError(
            f"the certificate is valid from {leaf.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on, and {clock}: set that "
            "clock",
            code="certificate.early",
        )

    return None


def certificate_problem(
    certificate: bytes, authority: bytes, identity: str, now: datetime | None = None
) -> ScenarioError | None:
    """Return why a certificate is not valid for a peer; None if it is.

    Args:
        certificate: PEM, the peer's own first.
        authority: PEM, those who may sign it.
        identity: whose it should be.
        now: by default now.
    """
    try:
        chain = _certificates(certificate)
        trusted = _certificates(authority)
    except ScenarioError as error:
        return error

    names = identities_of(certificate)
    if identity not in names:
        return ScenarioError(
            f"it is for {', '.join(names) or 'no DNS name'}, not for {identity}: take the files of that peer, or "
            "correct network.peers",
            code="certificate.identity",
        )

    problem = time_problem(certificate, now) or usage_problem(chain[0])
    if problem is None and not _signed(chain, trusted):
        issuer = chain[-1].issuer.rfc4514_string()
        problem = ScenarioError(
            f"{issuer} signed it, which is not one of the authorities that are trusted where it is checked: give all "
            "devices files of one `privdec certs`",
            code="certificate.authority",
        )
    if problem is None:
        between = [_issuer_problem(one, below, now) for below, one in enumerate(chain[1:])]
        anchors = [_issuer_problem(one, len(between), now) for one in trusted if _issued(chain[-1], one)]
        problem = next((one for one in between if one is not None), None)
        if problem is None and None not in anchors:
            problem = anchors[0]

    return problem


def _issuer_problem(issuer: x509.Certificate, below: int, now: datetime | None) -> ScenarioError | None:
    """Return why an authority may not sign for peers now; None if it may.

    OpenSSL looks at a connection's. Those of session keys are passed on by members, each of whom has a certificate of
    the authority: a member must not be able to sign for another peer.

    Args:
        issuer: its certificate.
        below: how many authorities are between it and the peer.
        now: by default now.
    """
    basic = _extension(issuer, x509.BasicConstraints)
    key_usage = _extension(issuer, x509.KeyUsage)
    extended = _extension(issuer, x509.ExtendedKeyUsage)
    begin = issuer.not_valid_before_utc
    end = issuer.not_valid_after_utc
    unknown = [one.oid for one in issuer.extensions if one.critical and one.oid not in ISSUERS_EXTENSIONS]

    # An authority of X.509's first version has no extension that says what it is; it is trusted by name, or not at all.
    is_authority = basic is not None and basic.ca
    if basic is None and issuer.version == x509.Version.v1 and issuer.issuer == issuer.subject:
        is_authority = True

    if not is_authority or (key_usage is not None and not key_usage.key_cert_sign):
        why = "is not an authority's"
    elif basic is not None and basic.path_length is not None and basic.path_length < below:
        why = f"allows {basic.path_length} authorities below it, and {below} are"
    elif extended is not None and not set(USAGES) <= set(extended):
        why = "is not for signing clients and servers (extended key usage)"
    elif unknown or _extension(issuer, x509.NameConstraints) is not None:
        why = "has constraints that are not understood"
    elif not begin <= (now or datetime.now(UTC)) <= end:
        why = f"is valid from {begin:%Y-%m-%d} to {end:%Y-%m-%d}"
    else:
        return None
    name = issuer.subject.rfc4514_string()
    return ScenarioError(
        f"{name} signed it, whose certificate {why}: take one that an authority signed which may, now",
        code="certificate.issuer",
    )


def usage_problem(leaf: x509.Certificate) -> ScenarioError | None:
    """Return why a certificate may not be used by a peer; None if it may."""
    basic, key_usage, extended = (
        _extension(leaf, kind) for kind in (x509.BasicConstraints, x509.KeyUsage, x509.ExtendedKeyUsage)
    )
    usages = {*USAGES} if extended is None else set(extended)
    if basic is not None and basic.ca:
        why = "it is an authority's, which signs for peers and is none"
    elif key_usage is not None and not key_usage.digital_signature:
        why = "its key may not sign (key usage digitalSignature), as a peer's has to in the handshake"
    elif set(USAGES) <= usages or ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE in usages:
        return None
    else:
        why = "it is not for both clients and servers (extended key usage clientAuth, serverAuth), and a peer is both"
    return ScenarioError(f"{why}; `privdec certs` makes a peer's", code="certificate.usage")


def _extension(leaf: x509.Certificate, kind: type[x509.ExtensionType]) -> Any:
    try:
        return leaf.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None


def validity_of(certificate: bytes) -> tuple[datetime, datetime]:
    """Return from when to when a peer may use a certificate; a span that holds no moment if it never may."""
    try:
        leaf = _read(certificate)
        is_usable = usage_problem(leaf) is None
    except ValueError:
        is_usable = False
    if not is_usable:
        return NEVER
    return leaf.not_valid_before_utc, leaf.not_valid_after_utc


def _signed(chain: Sequence[x509.Certificate], trusted: Sequence[x509.Certificate]) -> bool:
    """Return whether each certificate is signed by the next, and the last by a trusted authority."""
    issuers = [*([one] for one in chain[1:]), trusted]
    return all(any(_issued(one, by) for by in group) for one, group in zip(chain, issuers, strict=True))


def _issued(certificate: x509.Certificate, by: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(by)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def validity_problem(certificate: bytes, now: datetime) -> ScenarioError | None:
    """Return why a peer may not use a certificate at a moment; None if it may."""
    try:
        return time_problem(certificate, now) or usage_problem(_read(certificate))
    except ValueError as error:
        return ScenarioError(f"the certificate cannot be read ({one_line(error)})", code="certificate.unreadable")


def context_of(credentials: Credentials) -> ssl.SSLContext:
    """Return a context by which a peer calls others."""
    context = ssl.create_default_context(cadata=credentials.authority.decode())
    _show(context, credentials)
    return context


def stream_context(credentials: Credentials, is_called: bool) -> ssl.SSLContext:
    """Return a context for a stream between peers, who all have this version: TLS 1.3, with a certificate of each."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_called else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=credentials.authority.decode())

    # Whoever is trusted may have been signed by somebody else, who need not be there.
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    if is_called:
        context.num_tickets = 0  # a certificate is looked at in each handshake
    _show(context, credentials)
    return context


def _show(context: ssl.SSLContext, credentials: Credentials) -> None:
    """Let a context show a peer's certificate."""
    with tempfile.TemporaryDirectory() as folder:  # mode 0700; ssl.load_cert_chain reads files alone
        certificate = Path(folder) / "certificate"
        key = Path(folder) / "key"
        certificate.write_bytes(credentials.certificate)
        key.write_bytes(credentials.key)
        context.load_cert_chain(certificate, key)


def content_of(path: Path) -> bytes:
    """Return a file's bytes.

    Raises:
        ScenarioError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ScenarioError(
            f"{path}: cannot be read ({error.strerror}); name its folder by --certs, or PRIVDEC_CERTS in a kit's "
            "peer.env; `privdec certs` makes it",
            code="certificate.missing",
        ) from error


def _certificates(pem: bytes, where: str = "the certificate") -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ScenarioError(
            f"{where} cannot be read as PEM ({one_line(error)}); `privdec certs` makes a new one",
            code="certificate.unreadable",
        ) from error


def _key_of(
    certificate: Path, certificate_pem: bytes, path: Path, pem: bytes
) -> tuple[x509.Certificate, CertificateIssuerPrivateKeyTypes]:
    """Return a file's first certificate and its private key, of another file; refuse a key of another certificate."""
    own = _certificates(certificate_pem, str(certificate))[0]
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise ScenarioError(
            f"{path}: cannot be read as a private key without a password ({one_line(error)})", code="certificate.key"
        ) from error

    if not hasattr(key, "sign"):
        raise ScenarioError(
            f"{path}: is a key that cannot sign; give one of an elliptic curve, or RSA", code="certificate.key"
        )

    if key.public_key() != own.public_key():
        raise ScenarioError(
            f"{path}: is not the key of {certificate}; give the two that were made together", code="certificate.key"
        )

    return own, key  # type: ignore[return-value]


# --- the certificates of a scenario's peers ---


def files_of(folder: Path, peer: int) -> tuple[Path, Path, Path]:
    """Return where a peer's certificate, its key and the authority's certificate lie in a folder."""
    return folder / f"peer-{peer}.pem", folder / f"peer-{peer}.key", folder / AUTHORITY


def identities(scenario: HasPeers) -> list[str]:
    """Return the identity of every peer of a scenario."""
    return scenario.network.identities(scenario.name, scenario.n_peers)


def credentials_of(scenario: HasPeers, folder: Path, peer: int) -> Credentials:
    """Read a peer's credentials from a folder; raises what `Credentials.read` does."""
    return Credentials.read(*files_of(folder, peer), identities(scenario)[peer])


def make_certificates(
    scenario: HasPeers,
    folder: Path,
    authority: Path | None = None,
    authority_key: Path | None = None,
) -> dict[str, str]:
    """Make a certificate and a key for each peer of a scenario; those that are valid for another month stay.

    Args:
        scenario: has the identities.
        folder: gets authority.pem, and for each peer peer-I.pem and peer-I.key; authority.key too where the authority
            is made here; its holder can make peers.
        authority, authority_key: of an authority of one's own; left out, the folder's, made if there is none.

    Returns:
        For each identity `made` or `kept`.

    Raises:
        ScenarioError: the authority cannot be read, or one of its two files is missing.
    """
    signing = open_authority(scenario, folder, authority, authority_key)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / AUTHORITY, signing.pem, public=True)
    return {
        identity: certificate_of(signing, folder, peer, identity) for peer, identity in enumerate(identities(scenario))
    }


def certificate_of(signing: Authority, folder: Path, peer: int, identity: str) -> str:
    """Make a peer's certificate and key in a folder that has the authority's, unless good ones are there.

    Returns:
        `made` or `kept`.

    Raises:
        ScenarioError: the authority's own certificate is not valid now.
    """
    certificate, key, authority = files_of(folder, peer)
    if is_good((certificate, key, authority), identity):
        return "kept"

    made = signing.issue(identity)
    problem = certificate_problem(made.certificate, made.authority, identity)
    if problem is not None:
        raise ScenarioError(
            f"a certificate that this authority signs is not taken: {problem}", code=problem.code
        ) from problem
    write_atomically(key, made.key)
    write_atomically(certificate, made.certificate, public=True)
    return "made"


def is_good(files: tuple[Path, Path, Path], identity: str) -> bool:
    """Return whether the files are whole, and valid for another month."""
    try:
        own = Credentials.read(*files, identity)
    except ScenarioError:
        return False
    return certificate_problem(own.certificate, own.authority, identity, datetime.now(UTC) + RENEWED) is None


def open_authority(scenario: HasPeers, folder: Path, certificate: Path | None, key: Path | None) -> Authority:
    """Read the authority that signs the peers' certificates: the one given, or a folder's, made if there is none."""
    if (certificate is None) != (key is None):
        raise ScenarioError(
            "an authority has a certificate and a key: give both --authority and --authority-key",
            code="certificate.two-files",
        )
    own = certificate or folder / AUTHORITY
    own_key = key or folder / AUTHORITY_KEY
    if certificate is None and not own.exists() and not own_key.exists():
        made = Authority.create(scenario.name)
        folder.mkdir(parents=True, exist_ok=True)
        made.write(own, own_key)
        return made
    return Authority.read(own, own_key)
