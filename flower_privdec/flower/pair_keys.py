"""Secrets of pairs of peers of a scenario, which nodes agree on through a server or a network that they do not trust.

A node draws an X25519 key for every *session*: one message if it is a shard, and if it is relayed the messages from a
start of the run to its end, failure or restart. It announces the public half to every node with which its peers have
pairs:

    announcement = key | HMAC(X25519(both identities), key | own identity)
    secret       = HKDF(X25519(both keys) | X25519(both identities), run, both peers and keys)

Only the two nodes have their secret, whatever messages others read, change or replay:

- A key that they put in place of another has no valid HMAC: the node stops before it releases anything.
- An announcement of an earlier session is accepted, because it is the other node's own. The noise then does not
  cancel, which costs accuracy and no ε: the other node has forgotten that key, and this one's is new.
- Another scenario, or other numbers of examples, is another run, whose HMACs are not valid here.
- If a server says that a node is gone, the others share no noise with it, and add what is missing themselves: each peer
  has the noise that it needs by itself and its own partners (see `mechanism.partners`). This costs accuracy, too.

A draw belongs to a step of two sessions, and a session takes a step once. A relayed session's key is in the
node's context, in the memory of its SuperNode, and a file in the node's folder names the one session that is open there
and counts its messages, before each of them releases anything. A message that comes with an old context, or to an old
folder, stops.

In a simulation one person has all nodes, and no identity vouches for a key.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from flwr.app import ConfigRecord, RecordDict

from flower_privdec.common.errors import RunError
from flower_privdec.common.files import make_owners_folder, write_atomically
from flower_privdec.engine.shards.process_group import ProcessGroup
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.pair_plan import partners, secret_pairs
from flower_privdec.experiment.view import pair_run
from flower_privdec.flower.node_settings import HostSettings
from flower_privdec.peer.identity import Identity, KnownPeers
from flower_privdec.privacy.noise.agreed import KEY, AgreedSecrets

if TYPE_CHECKING:
    from flower_privdec.flower.apps.client_app import Node
    from flower_privdec.flower.apps.records import WorkRequest

PAIRS = "pairs"  # the record of announcements, and of a session in a context
ANNOUNCEMENT = KEY + 32  # bytes
COUNT = "pair-session"  # the file that counts the messages of a session
KEYS = "keys"  # beside the announcements: a hash of what a simulation draws from in place of secrets
PRIVATE = "private"  # of a session: its key
MESSAGES = "messages"  # of a session: how many of its messages are done


class PairKeys:
    """A node's key for one session, and the secrets that follow from it and the others' keys.

    Args:
        settings: the node's.
        experiment: the experiment that its peers belong to.
        private: the session's private key, 32 bytes; by default a new one.

    Attributes:
        secrets: the secrets of the pairs whose other key was learned.
        partners: see `view.partners`.

    Raises:
        RunError: the node's identity, or its file of known peers, cannot be read.
    """

    def __init__(self, settings: HostSettings, experiment: Experiment, private: bytes | None = None) -> None:
        scenario = experiment.scenario
        peers = experiment.own.peers
        self._run = pair_run(experiment)
        names = [str(peer) for peer in range(scenario.n_peers)]
        self.secrets = AgreedSecrets(peers.tolist(), self._run, names, private)
        self.partners = partners(scenario, peers)
        self._identity = None
        self._known = None
        if not settings.simulated:
            self._identity = Identity(settings.folder)
            self._known = KnownPeers(settings.folder, settings.known_peers)

    def count(self, messages: int) -> bytes:
        """Return what the node's folder holds once so many messages of the session have begun."""
        return f"{self.secrets.public.hex()} {messages}".encode()

    def announcement(self, other: int) -> bytes:
        """Return this node's key with an HMAC for the node of another peer."""
        public = self.secrets.public
        identity = b"" if self._identity is None else self._identity.public
        return public + self._mac(other, public, identity)

    def learn(self, announcements: Mapping[int, bytes], absent: Collection[int] = ()) -> None:
        """Take the keys of all partners that are there: with others no noise is shared.

        Raises:
            RunError: one is missing, or was not announced by the node whose identity is known.
        """
        for other in self.partners:
            if other in absent:
                continue
            content = announcements.get(other, b"")
            public = content[:KEY]
            identity = b"" if self._known is None else self._known.key(other)

            # In constant time, or the time would tell how much of an invented HMAC is right.
            if not hmac.compare_digest(content[KEY:], self._mac(other, public, identity)):
                raise RunError(
                    f"the key that was announced for peer {other} was not sealed by the node whose identity this node "
                    "knows, for this run: another scenario, version or number of examples there, an identity.pub that "
                    "is not in known-peers as it is, or someone in between who would have the secret; compare them, "
                    "and start again with --resume",
                    code="noise.pair-announced",
                )

            try:
                self.secrets.learn(other, public, self._vouched(other, b"noise"))
            except ValueError as error:
                raise RunError(
                    f"no secret can be made of the key that was announced for peer {other} ({error}): start again with "
                    "--resume",
                    code="noise.pair-announced",
                ) from error

    def _vouched(self, other: int, purpose: bytes) -> bytes:
        """Return a key that only the identities of this node and of another peer's know; empty in a simulation."""
        if self._identity is None or self._known is None:
            return b""
        return self._identity.key_for(self._known.key(other), self._run, b"pair " + purpose)

    def _mac(self, other: int, public: bytes, sender: bytes) -> bytes:
        key = self._vouched(other, b"announcement")
        if not key:
            return bytes(ANNOUNCEMENT - KEY)
        return hmac.digest(key, public + sender, "sha256")


def agrees(experiment: Experiment) -> bool:
    """Return whether a node agrees on secrets with others. It does not if a simulation's noise follows from keys."""
    return experiment.own.from_system and len(secret_pairs(experiment.scenario)) > 0


def shard_secrets(settings: HostSettings, experiment: Experiment, group: ProcessGroup) -> AgreedSecrets:
    """Return the secrets of a shard's peers for one message; all shards call this at once."""
    keys = PairKeys(settings, experiment)

    # All shards send as many bytes: a slot for each peer, empty for those with which this shard has no pair.
    slots = []
    for peer in range(experiment.scenario.n_peers):
        slots.append(keys.announcement(peer) if peer in keys.partners else bytes(ANNOUNCEMENT))
    gathered = group.gather(b"".join(slots))  # one string for each shard

    announcements = {}
    for other, own in keys.partners.items():
        sent = gathered[int(group.shards.of(other))]
        start = own * ANNOUNCEMENT
        announcements[other] = sent[start : start + ANNOUNCEMENT]
    keys.learn(announcements)
    return keys.secrets


def open_session(node: Node, stored: RecordDict) -> ConfigRecord:
    """Draw a new session's key into the context, and return its announcements.

    From now on the node's folder belongs to this session.
    """
    private = os.urandom(KEY)
    keys = PairKeys(node.settings, node.experiment, private)
    make_owners_folder(node.folder)
    write_atomically(node.folder / COUNT, keys.count(0))
    stored[PAIRS] = ConfigRecord({PRIVATE: private, MESSAGES: 0})
    return ConfigRecord({str(other): keys.announcement(other) for other in keys.partners})


def session_secrets(
    node: Node, request: WorkRequest, content: RecordDict, stored: RecordDict
) -> tuple[AgreedSecrets, ConfigRecord]:
    """Return the secrets for a message's steps, and the session's record for the context once they are taken.

    The caller has the node's ledger open, so that no other process of the node is here.

    Args:
        node: the peers and their folder.
        request: what the message asks for. One that goes on from what is on disk begins a session.
        content: the content of the message. The first of a session has the others' announcements, and a later one those
            of nodes that are back, whose sessions are new.
        stored: the context's state.

    Raises:
        RunError: the session does not go on with this message, or a key is not a partner's.
    """
    session = stored.config_records.get(PAIRS, ConfigRecord())
    path = node.folder / COUNT
    private = session.get(PRIVATE)
    messages = session.get(MESSAGES)
    if isinstance(private, bytes) and isinstance(messages, int) and (messages == 0) == (request.begin >= 0):
        keys = PairKeys(node.settings, node.experiment, private)
        if path.exists() and path.read_bytes() == keys.count(messages):
            # What was announced before is in the context.
            announced = dict(content.config_records.get(PAIRS, ConfigRecord()))
            if messages:
                announced = {**session, **announced}
            values = {other: announced.get(str(other)) for other in keys.partners}
            sealed = {other: value for other, value in values.items() if isinstance(value, bytes)}
            keys.learn(sealed, request.absent)

            # Counted before anything is released: a repeated message, or an old copy of the folder, then stops.
            write_atomically(path, keys.count(messages + 1))
            record = {str(other): value for other, value in sealed.items()}
            return keys.secrets, ConfigRecord({PRIVATE: private, MESSAGES: messages + 1, **record})
    raise RunError(
        "this message does not continue the session of this node's keys, and noise of pairs would be drawn twice: the "
        "message was repeated, the node's folder or context is an old copy, or another run began in that folder; start "
        "again with --resume",
        code="noise.pair-session",
    )
