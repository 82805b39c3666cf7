"""Kits: for each device of a scenario a folder with all that it gets, and nothing more.

    OUT/authority/           mode 0700: the authority's key, by which peers can be made; never copied
    OUT/devices/NAME-I/      what device I gets, all of it to be copied
    OUT/deployed.json        hashes of what was written here, to tell an operator's changes from our own
    OUT/.lock                held while a kit is made

`deploy` may be run again at any time: after a peer was added, an address changed, a certificate was about to expire, or
the last run was killed. It first works out every file, and compares three things: what a file should be now, what it
is, and what this command wrote last. A file that somebody changed is kept if nothing new is to be written; if something
is, the command ends with an error before it writes anything. Each file is replaced atomically, and its new hash is
noted before: so a run that is killed anywhere leaves only files that the next one knows as its own.

Certificates and keys are of `privdec certs`: those that are valid for another month stay, whatever else changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from flower_privdec import __version__
from flower_privdec.common.catalogue import DATASETS
from flower_privdec.common.errors import ScenarioError, option
from flower_privdec.common.fields import OwnSection, own_modules
from flower_privdec.common.files import LOCK, OWNERS_FOLDER, FolderLock, write_atomically
from flower_privdec.common.user_code import LIBRARIES, is_given, load_own
from flower_privdec.devices.kit_texts import (
    CERTIFICATES,
    CONTAINERFILE,
    ENVIRONMENT,
    README,
    SCENARIO,
    UNIT_ENDING,
    DeviceText,
    containerfile,
    environment,
    readme,
    unit,
)
from flower_privdec.devices.stray_keys import is_private_key, private_keys
from flower_privdec.network.joining import check_who_is_left
from flower_privdec.network.members import Operator, read_members
from flower_privdec.network.peer.peer_files import MEMBERS, first_members
from flower_privdec.network.transport.directory import Directory, fingerprint_of_certificate
from flower_privdec.network.transport.tls import (
    AUTHORITY,
    Authority,
    certificate_of,
    files_of,
    is_good,
    open_authority,
    validity_of,
)
from flower_privdec.pushsum.membership import Member, Members
from flower_privdec.scenario import Scenario, to_yaml
from flower_privdec.scenario.loading import find_scenario, read_text, read_yaml, without_folders
from flower_privdec.scenario.sections import PEER, host_label

MANIFEST = "deployed.json"
DEVICES = "devices"
AUTHORITY_FOLDER = "authority"
OWN_NAMES = frozenset((SCENARIO, ENVIRONMENT, CONTAINERFILE, README, CERTIFICATES))  # of every kit
NOT_PLAIN = frozenset("'\"\\$`%\n\r\t #")  # what a unit, a shell or an environment file would read as something else


@dataclass(frozen=True)
class KitPlaces:
    """Where things lie on the devices.

    Attributes:
        folder: of kits; a device's is FOLDER/NAME-I.
        state: of what peers write; a device's is STATE/NAME-I.
        program: the path of `privdec`.
    """

    folder: str = "/etc/privdec"
    state: str = "/var/lib/privdec"
    program: str = "/opt/privdec/bin/privdec"


DEFAULT_PLACES = KitPlaces()


@dataclass(frozen=True)
class DeviceKit:
    """What `deploy` did for one device.

    Attributes:
        name: of its folder, its unit and its state: NAME-I.
        path: of its folder here.
        address: HOST:PORT, or "dials out".
        done: by file, `made`, `updated`, `kept`, or `kept as changed`.
        until: when its certificate expires.
        strays: files in its folder that are none of the kit's.
    """

    name: str
    path: Path
    address: str
    done: Mapping[str, str]
    until: str
    strays: tuple[str, ...] = ()


@dataclass(frozen=True)
class Deployment:
    """What `deploy` did.

    Attributes:
        kits: of all devices.
        authority: the folder of the authority's key; None if it is kept elsewhere.
        notes: what the operator should know.
    """

    kits: tuple[DeviceKit, ...]
    authority: Path | None
    notes: tuple[str, ...] = ()


@dataclass
class _Manifest:
    """Which contents of each file are ours, by their hashes; more than one while a file is replaced."""

    path: Path
    hashes: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> _Manifest:
        try:
            content = json.loads(path.read_text())
            hashes = {str(name): [str(one) for one in known] for name, known in content["files"].items()}
        except FileNotFoundError:
            return cls(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ScenarioError(
                f"{path}: cannot be read as what `privdec deploy` wrote; delete it, and give --replace to write all "
                "files of the kits again",
                code="deploy.manifest",
            ) from error
        return cls(path, hashes)

    def write(self) -> None:
        write_atomically(self.path, (json.dumps({"files": self.hashes}, indent=1) + "\n").encode())


def deploy(
    scenario: Scenario,
    out: Path,
    places: KitPlaces = DEFAULT_PLACES,
    *,
    root: str | None = None,
    authority: Path | None = None,
    authority_key: Path | None = None,
    replace_changed: bool = False,
) -> Deployment:
    """Make a kit for each device of a scenario, or bring those that are there up to date.

    Args:
        out: a folder on this machine.
        root: data.root as the file has it, before relative paths began in its folder; by default the scenario's.
        authority, authority_key: of an authority of one's own; by default the one in OUT/authority, made if missing.
        replace_changed: whether to write over files that were changed by hand.

    Raises:
        ScenarioError: something does not fit, or a file that was changed by hand would be written over; nothing was
            written.
    """
    if scenario.network.peers is None:
        raise ScenarioError(
            "network.peers is missing: list the address of every device, as {address: 10.0.0.7:7100}",
            code="peer.addresses",
        )
    _check_places(places)
    notes: list[str] = []
    shared = _together(_shared_files(scenario, notes))
    root = scenario.data.root if root is None else root
    members = _members(scenario, out / AUTHORITY_FOLDER)
    addresses = [place.address for place in scenario.network.peers]
    Directory.of(members, addresses).check_dialled()
    if len(members.dialling(addresses)) > 1:
        check_who_is_left(scenario, members)
    texts = [_device_text(scenario, members.all[peer], places, root, [*shared]) for peer in members.present]
    wanted = {text.name: {**shared, **_own_files(scenario, text)} for text in texts}

    _check_places_here(out, wanted)
    if authority is not None and authority_key is not None:
        Authority.read(authority, authority_key)

    lock = FolderLock(out)
    lock.take()
    try:
        return _write(scenario, out, members, texts, wanted, (authority, authority_key), replace_changed, notes)
    finally:
        lock.release()


def deployed_root(path: Path, settings: Iterable[str] = ()) -> str | None:
    """Return data.root as a scenario's file has it; None if a setting replaces it, or the file has none."""
    if any(setting.partition("=")[0].strip() in ("data", "data.root") for setting in settings):
        return None
    file = find_scenario(path)
    sections, _ = read_yaml(read_text(file), str(file))
    data = sections.get("data")
    root = data.get("root") if isinstance(data, dict) else None
    return root if isinstance(root, str) else None


def _members(scenario: Scenario, folder: Path) -> Members:
    """Return who the peers are now, by the operator's list of members if there is one."""
    if (folder / MEMBERS).is_file():
        return read_members(scenario, folder).members
    return first_members(scenario)


def _write(
    scenario: Scenario,
    out: Path,
    members: Members,
    texts: list[DeviceText],
    wanted: Mapping[str, Mapping[str, bytes]],
    authority: tuple[Path | None, Path | None],
    replace_changed: bool,
    notes: list[str],
) -> Deployment:
    """Write what is wanted, under the lock of the folder."""
    manifest = _Manifest.read(out / MANIFEST)
    actions = {name: _actions(out, name, files, manifest, replace_changed) for name, files in wanted.items()}
    for text in texts:
        _check_no_other_key(out / DEVICES / text.name, text.peer)

    own_authority = out / AUTHORITY_FOLDER
    if authority == (None, None):
        own_authority.mkdir(mode=OWNERS_FOLDER, exist_ok=True)
        own_authority.chmod(OWNERS_FOLDER)
    signing = open_authority(scenario, own_authority, *authority)
    members = _renew_named(scenario, members, out, authority[1], notes)

    kits = []
    for text in texts:
        peer = text.peer
        identity = members.all[peer].identity
        folder = out / DEVICES / text.name
        certificates = folder / CERTIFICATES
        for made in (folder, certificates):
            made.mkdir(parents=True, exist_ok=True)
            made.chmod(OWNERS_FOLDER)
        _remove_parts(folder)

        # What is about to be there is known as ours before it is.
        files = wanted[text.name]
        for file, action in actions[text.name].items():
            known = manifest.hashes.setdefault(f"{text.name}/{file}", [])
            if action in ("made", "updated"):
                known.append(_hash(files[file]))
        manifest.write()

        for file, action in actions[text.name].items():
            if action in ("made", "updated"):
                path = folder / file
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, files[file], public=True)
        done = dict(actions[text.name])
        done[f"{CERTIFICATES}/peer-{peer}"] = _certify(signing, own_authority, certificates, peer, identity)

        for file, action in actions[text.name].items():
            if action in ("made", "updated", "kept"):
                manifest.hashes[f"{text.name}/{file}"] = [_hash(files[file])]
        manifest.write()

        certificate = files_of(certificates, peer)[0].read_bytes()
        kits.append(
            DeviceKit(
                name=text.name,
                path=folder,
                address=text.address or "dials out",
                done=done,
                until=f"{validity_of(certificate)[1]:%Y-%m-%d}",
                strays=tuple(_strays(folder, peer, files)),
            )
        )

    there = {path.name for path in (out / DEVICES).iterdir() if path.is_dir()}
    for name in sorted(there - set(wanted)):
        notes.append(f"{out / DEVICES / name} is of no device of this scenario any more: delete it, and stop its peer")
    kept_here = own_authority if authority == (None, None) else None
    return Deployment(tuple(kits), kept_here, tuple(notes))


def _renew_named(
    scenario: Scenario, members: Members, out: Path, authority_key: Path | None, notes: list[str]
) -> Members:
    """Renew the certificates of peers of which the list of members names the only one that counts; return the members.

    A new certificate of theirs counts from a new entry of the list on, which comes before any kit gets the list.
    """
    here = out / AUTHORITY_FOLDER
    for peer in members.present:
        member = members.all[peer]
        if not member.certificate:
            continue

        name = f"{host_label(scenario.name)}-{peer}"
        places = (files_of(here, peer), files_of(out / DEVICES / name / CERTIFICATES, peer))
        good = [files[0] for files in places if is_good((*files[:2], here / AUTHORITY), member.identity)]
        if not good:
            entry = Operator(scenario, here, authority_key).renew(peer, only=True)
            assert entry is not None
            notes.append(
                f"entry {entry.number} of the list of members: {entry.says()}; copy the kit of {name} before the "
                "others, whose peers refuse it until it has the new files"
            )
        elif fingerprint_of_certificate(good[0].read_bytes()) != member.certificate:
            notes.append(
                f"the certificate in the kit of {name} does not count any more, by the list of members: put the newest "
                f"one into {here}, or make one (`privdec members ... renew --id {peer} --only`)"
            )
    return _members(scenario, here)


def _certify(signing: Authority, here: Path, certificates: Path, peer: int, identity: str) -> str:
    """Put the certificates of a device, and the list of members if there is one, into its kit; return what was done.

    What `privdec members renew --certs OUT/authority` made is moved to the kit: a device's key is there only.
    """
    _write_if_other(certificates / AUTHORITY, signing.pem)
    members = here / MEMBERS
    if members.is_file():
        _write_if_other(certificates / MEMBERS, members.read_bytes())

    new = files_of(here, peer)
    if is_good(new, identity):
        for made, place in zip(new[1::-1], files_of(certificates, peer)[1::-1], strict=True):
            write_atomically(place, made.read_bytes(), public=place.suffix != ".key")
        for made in new[:2]:
            made.unlink()
        return "renewed"

    was_there = files_of(certificates, peer)[0].exists()
    done = certificate_of(signing, certificates, peer, identity)
    return "renewed" if was_there and done == "made" else done


# --- what a kit has ---


def _device_text(
    scenario: Scenario, member: Member, places: KitPlaces, root: str | None, files: list[str]
) -> DeviceText:
    """Return what the texts of a device's kit say."""
    peer = member.number
    address = member.address
    listens = member.address
    peers = scenario.network.peers
    if peers is not None and peer < len(peers):
        address = address or peers[peer].address
        listens = peers[peer].listen or address
    label = host_label(scenario.name)
    name = f"{label}-{peer}"
    folder = str(PurePosixPath(places.folder) / name)
    state = str(PurePosixPath(places.state) / name)

    data = None
    if root is not None:
        # A path that begins at the root of the device's disk is the operator's choice; any other begins in the state.
        data = root.replace(PEER, str(peer))
        if not os.path.isabs(data):
            data = str(PurePosixPath(state) / os.path.basename(data))
        _check_plain("data.root", data)
    return DeviceText(
        name=name,
        peer=peer,
        scenario_name=scenario.name,
        address=address or "",
        listens=listens or "",
        folder=folder,
        state=state,
        program=places.program,
        data=data,
        has_modules=any(file.endswith(".py") for file in files),
        uses_gpu=scenario.compute.device != "cpu",
        version=__version__,
    )


def _own_files(scenario: Scenario, text: DeviceText) -> dict[str, bytes]:
    """Return the files of one device, by their paths in its kit."""
    copy = without_folders(scenario)
    private = copy.private
    if private is not None and private.ledger is not None:
        ledger = str(PurePosixPath(text.state) / os.path.basename(private.ledger))
        copy = copy.model_copy(update={"privacy": private.model_copy(update={"ledger": ledger})})
    return {
        SCENARIO: to_yaml(copy).encode(),
        ENVIRONMENT: environment(text).encode(),
        f"{text.unit}": unit(text).encode(),
        CONTAINERFILE: containerfile(text).encode(),
        README: readme(text).encode(),
    }


def _together(files: Iterable[tuple[str, bytes]]) -> dict[str, bytes]:
    """Return the files that all devices get alike, by their paths in a kit.

    Raises:
        ScenarioError: two of them, or one of them and a file of the kit's own, would have one path; or one of them
            holds a private key.
    """
    found: dict[str, bytes] = {}
    for name, content in files:
        first = name.partition("/")[0]
        is_taken = first in OWN_NAMES or first.endswith(UNIT_ENDING) or found.get(name, content) != content
        if is_taken:
            raise ScenarioError(
                f"a file that the scenario names would be {name} in the kits, where another one lies: give one of the "
                "two another name",
                code="deploy.same-name",
            )

        if is_private_key(PurePosixPath(name).name, content):
            raise ScenarioError(
                f"{name}, which every device would get, holds a private key: move it out of the folder that the "
                "scenario names",
                code="deploy.private-key",
            )

        found[name] = content
    return found


def _shared_files(scenario: Scenario, notes: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield each file that all devices get alike, with its path in a kit."""
    yield from _public_test_set(scenario, notes)
    graph = getattr(scenario.topology, "file", None)
    if graph is not None:
        yield from _tree(Path(graph), "topology.file")
    yield from _modules(scenario, notes)

    origin = getattr(scenario.model, "origin", None)
    if origin is not None:
        notes.append(f"model.from is not in the kits: put {origin} into each device's kit, under its own name")
    secrets = None
    if scenario.private is not None:
        secrets = getattr(getattr(scenario.private.noise, "secrets", None), "file", None)
    if secrets is not None:
        notes.append(f"privacy.noise.secrets.file is not in the kits: put each device's own {secrets} into its kit")


def _public_test_set(scenario: Scenario, notes: list[str]) -> Iterator[tuple[str, bytes]]:
    data = scenario.data
    if data.test is not None:
        _check_public(scenario, Path(data.test))
        yield from _tree(Path(data.test), "data.test")
        return
    if data.root is None:
        return  # it comes with the package

    has_own_files = isinstance(data.dataset, OwnSection) or DATASETS[data.dataset].own_files
    if has_own_files:
        raise ScenarioError(
            f"data.test is missing: data.root={data.root} holds private examples, and is not copied to other devices; "
            "put the public test set into a file of its own, and name it",
            code="data.no-test",
        )
    notes.append(f"data.root is not in the kits: put the dataset's files on each device, where {ENVIRONMENT} says")


def _check_public(scenario: Scenario, test: Path) -> None:
    """Refuse a public test set in whose folder private examples lie."""
    root = scenario.data.root
    if root is None:
        return
    private = re.compile(re.escape(str(Path(root).resolve())).replace(re.escape(PEER), r"\d+") + "(/|$)")
    folder = test.resolve()
    found = next((path for path in (folder, *folder.rglob("*")) if private.match(str(path))), None)
    if found is not None:
        raise ScenarioError(
            f"data.test={test} holds {found}, private examples of data.root, and is copied to every device: put the "
            "public test set into a place of its own",
            code="data.test-is-private",
        )


def _modules(scenario: Scenario, notes: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the code of the user's own that a scenario names, but for what is installed."""
    tops = {}
    for key, module in own_modules(scenario):
        if is_given(module):
            raise ScenarioError(
                f"{key} was given as a Python object, which a device does not have: put it into a module",
                code="code.not-here",
            )
        if not module.startswith("flower_privdec."):
            load_own(module, key)
            tops[module.partition(":")[0].partition(".")[0]] = key

    for top, key in tops.items():
        file = getattr(sys.modules[top], "__file__", None)
        if file is None or file.startswith(LIBRARIES):
            notes.append(f"{key}: {top} is installed here; install it on each device, too")
        elif Path(file).name == "__init__.py":
            for path in sorted(Path(file).parent.rglob("*.py")):
                yield f"{top}/{path.relative_to(Path(file).parent).as_posix()}", path.read_bytes()
        else:
            yield Path(file).name, Path(file).read_bytes()


def _tree(path: Path, key: str) -> Iterator[tuple[str, bytes]]:
    """Yield a file, or all files of a folder, with the paths that they get in a kit."""
    try:
        if path.is_file():
            yield path.name, path.read_bytes()
            return
        files = sorted(one for one in path.rglob("*") if one.is_file())
        for one in files:
            yield f"{path.name}/{one.relative_to(path).as_posix()}", one.read_bytes()
    except OSError as error:
        raise ScenarioError(f"{key}={path}: cannot be read ({error.strerror})", code="deploy.unreadable") from error
    if not files:
        raise ScenarioError(
            f"{key}={path}: is not here, and each device gets a copy: give its path on this machine",
            code="deploy.unreadable",
        )


# --- what is there ---


def _check_places_here(out: Path, wanted: Mapping[str, Mapping[str, bytes]]) -> None:
    """Refuse a folder of kits in which a file lies in the place of a folder, or a folder in that of a file.

    Raises:
        ScenarioError: see above; nothing was written.
    """
    files = [out / LOCK, out / MANIFEST, out / AUTHORITY_FOLDER / MEMBERS, out / AUTHORITY_FOLDER / AUTHORITY]
    folders = [out / AUTHORITY_FOLDER, out / DEVICES]
    for name, own in wanted.items():
        kit = out / DEVICES / name
        folders += [kit, kit / CERTIFICATES]
        files += [kit / file for file in own]
        files += [kit / CERTIFICATES / file for file in (AUTHORITY, MEMBERS)]
    for file in files:
        within = [above for above in file.parents if above.is_relative_to(out)]
        folders += within

    # A path below a file is not there, so it is the file that is named.
    for folder in dict.fromkeys(folders):
        if folder.exists() and not folder.is_dir():
            raise ScenarioError(
                f"{folder}: a file is there, and `privdec deploy` keeps a folder of that name: move it away, or give "
                f"another {option('out')}",
                code="deploy.no-folder",
            )
    for file in files:
        if file.is_dir():
            raise ScenarioError(
                f"{file}: a folder is there, and `privdec deploy` writes a file of that name: move it away, or give "
                f"another {option('out')}",
                code="deploy.is-folder",
            )


def _actions(
    out: Path, name: str, files: Mapping[str, bytes], manifest: _Manifest, replace_changed: bool
) -> dict[str, str]:
    """Return what is to be done with each file of a device.

    Raises:
        ScenarioError: a file was changed by hand, and another is wanted than was written before.
    """
    actions = {}
    for file, content in files.items():
        path = out / DEVICES / name / file
        known = manifest.hashes.get(f"{name}/{file}", [])
        if not path.exists():
            actions[file] = "made"
            continue

        there = _hash(path.read_bytes())
        if there == _hash(content):
            actions[file] = "kept"
        elif there in known or replace_changed:
            actions[file] = "updated"
        elif _hash(content) in known:
            actions[file] = "kept as changed"
        else:
            raise ScenarioError(
                f"{path} was changed since `privdec deploy` wrote it, or is not of it, and a new one would replace it: "
                f"move it away, or give {option('replace')}, which writes over all such files",
                code="deploy.changed",
            )
    return actions


def _write_if_other(path: Path, content: bytes) -> None:
    """Write a public file, unless it is that already."""
    if not path.exists() or path.read_bytes() != content:
        write_atomically(path, content, public=True)


def _remove_parts(folder: Path) -> None:
    """Remove what a killed run of this command left half written."""
    for part in folder.rglob("*.part"):
        part.unlink()


def _strays(folder: Path, peer: int, files: Iterable[str]) -> Iterator[str]:
    """Yield the files in a device's folder that are none of its kit's."""
    own = {folder / file for file in files} | {*files_of(folder / CERTIFICATES, peer), folder / CERTIFICATES / MEMBERS}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path not in own:
            yield path.relative_to(folder).as_posix()


def _check_no_other_key(folder: Path, peer: int) -> None:
    """Refuse a kit in which somebody put the authority's key, or that of another device."""
    own = files_of(folder / CERTIFICATES, peer)[1]
    found = next((path for path in private_keys(folder) if path != own), None)
    if found is not None:
        raise ScenarioError(
            f"{found} is a private key, the authority's or another device's, among files that are copied to a device: "
            "move it away; if it was copied, make a new one",
            code="deploy.private-key",
        )


def _check_places(places: KitPlaces) -> None:
    for name, value in (("folder", places.folder), ("state", places.state), ("program", places.program)):
        if not PurePosixPath(value).is_absolute() or ".." in PurePosixPath(value).parts:
            raise ScenarioError(f"{option(name, value)} must be an absolute path on the devices", code="deploy.place")
        _check_plain(option(name), value)


def _check_plain(key: str, value: str) -> None:
    if NOT_PLAIN & set(value) or not value.isprintable():
        raise ScenarioError(
            f"{key}={value!r} has a character that units, shells or environment files read otherwise: give a path of "
            "letters, digits, and ._-/",
            code="deploy.place",
        )


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
