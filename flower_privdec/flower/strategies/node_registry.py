"""Which node is which peer: found by asking, known by what the nodes' own configurations say, over restarts too."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from flower_privdec.errors import RunError
from flower_privdec.flower.apps.nodes import reason
from flower_privdec.flower.mods.orders import SAYS, Asked, Told

log = logging.getLogger("flwr.privdec")

NO_MOD = "its ClientApp is no peer: write app = ClientApp(mods=[PeerMod(...)])"


MOST = 2**20  # peers: what masked sums hold, and a graph that fits into memory


@dataclass
class Census:
    """Peers and nodes.

    A node says in its node-config which partition it is, and that is the peer that it is: a SuperNode that was
    restarted has another node id and is the same peer.

    Attributes:
        n_peers: as the nodes say; 0 before the first answer.
        node_of: the node of each peer that was met.
        gone: peers whose node is not there any more.
        silent: peers that did not answer the last time.
        asked: messages without an answer yet: whose, by message id.
        unmet: introductions without an answer yet: the node, by message id.
    """

    n_peers: int = 0
    node_of: dict[int, int] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    asked: dict[str, int] = field(default_factory=dict)
    unmet: dict[str, int] = field(default_factory=dict)

    @property
    def there(self) -> list[int]:
        """Return the peers whose node is there, ascending."""
        return [peer for peer in sorted(self.node_of) if peer not in self.gone]

    def peer_at(self, node: int) -> int:
        """Return which peer a node is."""
        return next(peer for peer, each in self.node_of.items() if each == node)

    def look(self, grid: Grid, order: Asked, patience: float, hear: Callable[[Told], None]) -> None:
        """Notice nodes that are gone, and meet those that are new.

        Args:
            order: the introduction.
            patience: seconds to wait for the answers of nodes that are new.
            hear: is told what each new peer says.

        Raises:
            RunError: a new node is no peer, or claims to be one that another node is.
        """
        there = set(grid.get_node_ids())
        self.gone = {peer for peer, node in self.node_of.items() if node not in there}
        new = sorted(there - set(self.node_of.values()) - set(self.unmet.values()))
        messages = [Message(RecordDict({SAYS: order.record()}), node, "train") for node in new]
        sent = list(grid.push_messages(messages)) if messages else []
        self.unmet |= dict(zip(sent, new, strict=True))
        for _, reply in answers(grid, self.unmet, set(sent), patience):
            told = self._read(reply)
            self._admit(told, reply.metadata.src_node_id, there)
            hear(told)

    def _read(self, reply: Message) -> Told:
        node = reply.metadata.src_node_id
        if reply.has_error():
            raise RunError(f"SuperNode {node} failed when it was asked which peer it is: {reason(reply.error.reason)}")
        return Told.of(reply.content, f"SuperNode {node}: {NO_MOD}")

    def _admit(self, told: Told, node: int, there: set[int]) -> None:
        if not 0 <= told.peer < told.n_peers <= MOST:
            raise RunError(
                f"SuperNode {node} says partition-id={told.peer} of num-partitions={told.n_peers}: it must be 0 to "
                f"num-partitions - 1, of at most {MOST:,}"
            )
        self.n_peers = self.n_peers or told.n_peers
        if told.n_peers != self.n_peers:
            raise RunError(
                f"SuperNode {node} says num-partitions={told.n_peers}, others {self.n_peers}: set them alike"
            )
        before = self.node_of.get(told.peer)
        if before in there and told.peer not in self.silent:
            raise RunError(
                f"SuperNodes {before} and {node} both claim to be peer {told.peer}; give each its own partition-id"
            )
        self.node_of[told.peer] = node
        for told_of in (self.gone, self.silent):
            told_of.discard(told.peer)

    def ask(
        self, grid: Grid, messages: Iterable[Message], patience: float, hear: Callable[[int, Message], None]
    ) -> list[Message]:
        """Send messages and pass the answers on, those to earlier messages too, until each has answered or time is up.

        Who has not is silent until its answer comes, however late, and nobody waits for the silent as long as others
        are asked too: a message to them is a knock at the door.

        Returns:
            The answers to these messages.
        """
        sent, replies = list(messages), []
        peers = [self.peer_at(message.metadata.dst_node_id) for message in sent]
        waiting = dict(zip(grid.push_messages(sent), peers, strict=True))
        self.asked |= waiting
        wanted = {name for name, peer in waiting.items() if peer not in self.silent} or set(waiting)
        self.silent |= set(peers)
        for peer, reply in answers(grid, self.asked, wanted, patience):
            self.silent.discard(peer)
            hear(peer, reply)
            if reply.metadata.reply_to_message_id in waiting:
                replies.append(reply)
        return replies


def answers(grid: Grid, asked: dict[str, int], wanted: set[str], patience: float) -> Iterator[tuple[int, Message]]:
    """Yield what comes in answer to messages, with who was asked, until all that are wanted are in or time is up.

    Args:
        asked: who was asked, by message id; loses what is answered.
        wanted: the messages whose answers are waited for, for `patience` seconds.
    """
    deadline, pause = time.monotonic() + patience, 0.001
    while asked:
        for reply in grid.pull_messages(list(asked)):
            name = reply.metadata.reply_to_message_id
            if name in asked:
                yield asked.pop(name), reply
        if not wanted & asked.keys() or time.monotonic() > deadline:
            return
        time.sleep(pause := min(0.2, 2 * pause))


def said_by(peers: Mapping[int, str]) -> str:
    """Return what several peers say, equal words together."""
    words: dict[str, list[int]] = {}
    for peer, word in sorted(peers.items()):
        words.setdefault(word, []).append(peer)
    return "; ".join(f"peer{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {word}" for word, who in words.items())
