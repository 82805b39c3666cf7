"""The certificates of a scenario's peers, made by an authority of one's own or of the scenario's."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from flower_privdec.common.files import write_atomically
from flower_privdec.errors import ScenarioError
from flower_privdec.network.transport.identity import Authority, Credentials, certificate_problem
from flower_privdec.scenario import Scenario

AUTHORITY, AUTHORITY_KEY = "authority.pem", "authority.key"
RENEWED = timedelta(days=30)  # before a certificate expires


def files_of(folder: Path, peer: int) -> tuple[Path, Path, Path]:
    """Return where a peer's certificate, its key and the authority's certificate lie in a folder."""
    return folder / f"peer-{peer}.pem", folder / f"peer-{peer}.key", folder / AUTHORITY


def identities(scenario: Scenario) -> list[str]:
    """Return the identity of every peer of a scenario."""
    return scenario.network.identities(scenario.name, scenario.n_peers)


def credentials_of(scenario: Scenario, folder: Path, peer: int) -> Credentials:
    """Read a peer's credentials from a folder; raises what `Credentials.read` does."""
    return Credentials.read(*files_of(folder, peer), identities(scenario)[peer])


def make_certificates(
    scenario: Scenario, folder: Path, authority: Path | None = None, authority_key: Path | None = None
) -> dict[str, str]:
    """Make a certificate and a key for each peer of a scenario; those that are there and good for a month are kept.

    Args:
        scenario: says the identities.
        folder: gets authority.pem, and for each peer peer-I.pem and peer-I.key; authority.key too where the authority
            is made here, and whoever has that can make peers.
        authority, authority_key: of an authority of one's own; left out, the folder's, made where there is none.

    Returns:
        What was done for each identity: `made`, or `kept`.

    Raises:
        ScenarioError: the authority cannot be read, or one of its two files is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    signing = _authority(scenario, folder, authority, authority_key)
    write_atomically(folder / AUTHORITY, signing.pem)
    done = {}
    for peer, identity in enumerate(identities(scenario)):
        certificate, key, _ = files_of(folder, peer)
        if _good(files_of(folder, peer), identity):
            done[identity] = "kept"
            continue
        made = signing.issue(identity)
        write_atomically(key, made.key, private=True)
        write_atomically(certificate, made.certificate)
        done[identity] = "made"
    return done


def _good(files: tuple[Path, Path, Path], identity: str) -> bool:
    """Return whether what is there is whole, and will be for a while."""
    try:
        found = Credentials.read(*files, identity)
    except ScenarioError:
        return False
    return certificate_problem(found.certificate, found.authority, identity, datetime.now(UTC) + RENEWED) is None


def _authority(scenario: Scenario, folder: Path, certificate: Path | None, key: Path | None) -> Authority:
    if (certificate is None) != (key is None):
        raise ScenarioError("an authority has a certificate and a key: give both --authority and --authority-key")
    own, own_key = certificate or folder / AUTHORITY, key or folder / AUTHORITY_KEY
    if certificate is None and not own.exists() and not own_key.exists():
        made = Authority.create(scenario.name)
        made.write(own, own_key)
        return made
    return Authority.read(own, own_key)
