"""What peers that go on without each other say: hellos, shares that count once, and rows of which the newest counts.

A call holds one frame or several. A hello is said until a neighbour is open, and then now and again, which also tells
it how far this peer is. Shares and acknowledgements are said once they follow from what is on disk, and a share again
where the neighbour says that it has not come. Rows of an exchange are replaced by newer ones as long as they have not
been taken away: a slow neighbour gets the newest alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from torch import Tensor

from flower_privdec.errors import RunError
from flower_privdec.network.transport.channel import UnreachableError
from flower_privdec.pushsum.frames import Framed, FrameHeader, FrameKind, RowMessage, decode, encode, read_header
from flower_privdec.pushsum.parts import Parts
from flower_privdec.pushsum.send_queue import Outgoing
from flower_privdec.pushsum.share_protocol import Acknowledgement, FrozenShare, Hello, RefusedError, RolledBackError
from flower_privdec.pushsum.shares import Shares
from flower_privdec.pushsum.wire_rows import Layout, frame_size

Words = list[Framed]
SMALL, MANY = 256, 16  # the bytes of a frame without rows, at most, and how many frames are in a call beside rows


class AsynchronousMail:
    """The mail of a peer that nobody waits for.

    Attributes:
        machine: its shares; without any mass where no push-sum is done, and then for its hellos alone.
        fatal: see Mail.
        rounds: how far each neighbour said it is: the round whose shares or rows it sends next.
        fresh: whether this peer has nothing of the run yet; then it joins late where a neighbour is under way.
        joins: whether it does.
        places: round and place in the program of the last rows of each neighbour, but for answers.
        rolled_back: why this peer has to begin anew, until it does.
        begun: the round that this process goes on from.
        ahead: the last round of which a neighbour says that it had rows of this peer before; -1 where none does.
        cap: bytes of a call at most.
    """

    def __init__(
        self,
        machine: Shares[Tensor],
        neighbors: Iterable[int],
        shares: Layout,
        exchanges: Mapping[int, Layout],
        answers: Collection[int],
        retry: float,
        last: int,
    ) -> None:
        """Begin without a word.

        Args:
            neighbors: of the peer.
            shares: the rows of a share; none where there are no shares.
            exchanges: the rows of the exchange at each place of the program that has no shares.
            answers: at which of these places somebody is answered, whose round the rows are then for.
            retry: seconds between two hellos.
            last: the number of rounds, after which there is none.
        """
        self.machine, self._shares, self._exchanges, self._answers = machine, shares, exchanges, answers
        self._retry, self._last = retry, last
        self.fatal: RunError | None = None
        self.rounds: dict[int, int] = {}
        self._lives: dict[int, int] = {}  # in which each neighbour said so
        self.fresh = self.joins = False
        self.places: dict[int, tuple[int, int]] = {}
        self.rolled_back: str | None = None
        self.begun, self.ahead = 0, -1
        self._met: set[int] = set()  # neighbours that have heard this process
        self._out = {neighbor: Outgoing() for neighbor in neighbors}
        self._answering: Counter[int] = Counter()  # the calls of each neighbour whose answer is waited with
        self._told: dict[int, int] = {}  # the round that each neighbour has heard of
        self._rows: dict[int, dict[int, RowMessage]] = {at: {} for at in exchanges}
        sizes = [frame_size(layout) for layout in (shares, *exchanges.values())]
        self._frame_cap, self._most = max(*sizes, SMALL), MANY + len(sizes)
        self.cap = sum(sizes) + MANY * SMALL

    # --- what the peer asks of it ---

    def committed(self, wanted: Collection[int]) -> None:
        """Say what follows from a commit.

        Args:
            wanted: neighbours that may wait for a share of this round: who gets none is told the round.
        """
        for word in self.machine.acknowledgements():
            self._out[word.receiver].taken = [word]
        due = {share.receiver for share in self.machine.shares_to_send()}
        for neighbor in set(wanted) - due:
            self._out[neighbor].hello_at = 0.0

    def post(self, at: int, round_index: int, rows: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Have rows of an exchange taken to neighbours.

        Args:
            at: its place in the program.
            round_index: the round that they are for.
            rows: by neighbour.
        """
        for neighbor, values in rows.items():
            message = RowMessage(self.machine.peer, neighbor, round_index, at, values)
            self._out[neighbor].rows[at] = message

    def has_rows(self, at: int, neighbor: int, round_index: int) -> bool:
        """Return whether rows of an exchange have come from a neighbour, of a round or a later one."""
        message = self._rows[at].get(neighbor)
        return message is not None and message.round_index >= round_index

    def senders(self, at: int) -> set[int]:
        """Return whose rows of an exchange have come and were not collected."""
        return set(self._rows.get(at, ()))

    def collect(self, at: int, senders: Collection[int]) -> dict[int, RowMessage]:
        """Return the newest rows of an exchange from each of some neighbours, and forget them."""
        return {neighbor: self._rows[at].pop(neighbor) for neighbor in sorted(senders) if neighbor in self._rows[at]}

    def is_told(self, neighbor: int, round_index: int) -> bool:
        """Return whether nothing is left to say to a neighbour, which knows of a round."""
        out = self._out[neighbor]
        return not (out.words or out.taken) and self._told.get(neighbor, -1) >= round_index

    def is_gone(self, neighbor: int) -> bool:
        """Return whether a neighbour has not been reached for some calls; one that refuses them is there."""
        return self._out[neighbor].is_given_up

    # --- what the courier asks of it ---

    def read(self, caller: int, content: memoryview) -> Words:
        """See Mail."""
        found: Words = []
        view = content
        while len(view):
            header = read_header(view, self._frame_cap)
            self._check(caller, header, len(found))
            found.append(decode(view[: header.length], self._layout(header), self._frame_cap))
            view = view[header.length :]
        return found

    def _check(self, caller: int, header: FrameHeader, before: int) -> None:
        if (header.sender, header.receiver) != (caller, self.machine.peer):
            raise RefusedError(
                f"peer {caller} brought a frame from peer {header.sender} to {header.receiver}, and this is peer "
                f"{self.machine.peer}; a peer speaks for itself alone"
            )
        if header.round_index > self._last:
            raise RefusedError(
                f"a frame of peer {caller} is of round {header.round_index}, and the run has {self._last}"
            )
        if before >= self._most:
            raise RefusedError(f"a call of peer {caller} has more than {self._most} frames, which no peer has to say")

    def _layout(self, header: FrameHeader) -> Layout:
        if header.kind in (FrameKind.HELLO, FrameKind.ACKNOWLEDGEMENT):
            return {}
        if header.kind == FrameKind.SHARE and self._shares:
            return self._shares
        if header.kind == FrameKind.EXCHANGE and header.place in self._exchanges:
            return self._exchanges[header.place]
        raise RefusedError(
            f"a frame of peer {header.sender} of kind {header.kind}, for place {header.place} of the program, is none "
            "that this algorithm has; all peers must run one scenario"
        )

    def take(self, caller: int, said: Words) -> Callable[[], Words]:
        """See Mail; an answer to a share says, where that is so by then, that the share was taken."""
        answers = self._taken(caller, said)
        waits = not self.is_answered(caller, said)
        self._answering[caller] += waits
        return lambda: self._answer(caller, answers, waited=waits)

    def is_answered(self, caller: int, said: Words) -> bool:
        """See Mail: who brought a share that was kept waits for the next commit, which acknowledges it."""
        kept = caller in self.machine.waiting_rounds() or caller in self.machine.uncommitted()
        return not kept or not any(isinstance(message, FrozenShare) for message in said)

    def _answer(self, caller: int, answers: Words, *, waited: bool) -> Words:
        self._answering[caller] -= waited
        if not self.machine.is_open(caller):
            return answers
        out = self._out[caller]
        taken, out.taken = out.taken, []
        return [*answers, *taken]

    def _taken(self, caller: int, said: Words) -> Words:
        answers = [self._heard(caller, message) for message in said]
        return [answer for answer in answers if answer is not None]

    def _heard(self, caller: int, message: Framed) -> Hello | None:
        if isinstance(message, Hello):
            return self._greeted(message)
        if isinstance(message, Acknowledgement):
            self.machine.acknowledge(message)
            return None
        if isinstance(message, FrozenShare):
            if self.machine.receive(message):
                self._is_at(caller, message.round_index + 1)
        elif self.machine.is_open(caller):
            self._rows[message.place][caller] = message
            if message.place not in self._answers:
                self._is_at(caller, message.round_index)
                self.places[caller] = message.round_index, message.place
        else:
            raise RefusedError(f"peer {caller} must greet peer {self.machine.peer} first, which has started since")
        return None

    def _greeted(self, hello: Hello) -> Hello | None:
        if self.rolled_back is not None:
            return None
        seen, hello = hello.seen, hello if self._shares else replace(hello, seen=0)
        self.machine.check_hello(hello)
        neighbor, out = hello.sender, self._out[hello.sender]
        if self.fresh and hello.round_index > 0 and not hello.knows:  # it began without having met this peer
            self.fresh, self.joins = False, True
            if self.machine.mass:  # which has to come with the shares of others
                self.rolled_back = f"peer {neighbor} is in round {hello.round_index} already"
                return None
        try:
            answer = self.machine.receive_hello(hello)
        except RolledBackError as error:
            self.rolled_back = str(error)
            return None
        if self._lives.get(neighbor) != hello.life:
            self._lives[neighbor] = hello.life
            self.rounds[neighbor] = hello.round_index
            out.failures = 0  # to reach the life before
        self._is_at(neighbor, hello.round_index)
        if out.share is not None and out.share.number > hello.seen:
            out.share = None  # it did not come
        if not self._shares and self.machine.is_open(neighbor) and neighbor not in self._met:
            self._met.add(neighbor)
            self._check_rows(neighbor, seen - 1)
        return None if answer is None else self._with_rows(answer)

    def _check_rows(self, neighbor: int, last: int) -> None:
        """Find out, where no shares do, that a neighbour had rows of this peer which this peer does not remember."""
        if last > max(self.begun, self.ahead):
            self.ahead = last
            self.joins |= self.fresh  # it has lost all it had
            self.rolled_back = f"peer {neighbor} has rows of round {last} of this peer, which remembers {self.begun}"

    def _with_rows(self, hello: Hello) -> Hello:
        """Return a hello that says, where no shares do, which rows of a neighbour were the last to come."""
        return hello if self._shares else replace(hello, seen=self.places.get(hello.receiver, (-1, 0))[0] + 1)

    def _is_at(self, neighbor: int, round_index: int) -> None:
        """Take note of a neighbour's round; what was under way for a while does not set it back, only a new life does.

        A hello that says the last round may come before a share of an earlier one, and is the last word there is.
        """
        self.rounds[neighbor] = max(round_index, self.rounds.get(neighbor, 0))

    def has_news(self, neighbor: int, now: float) -> bool:
        """See Mail."""
        out = self._out[neighbor]
        if self.rolled_back is not None or not self.machine.can_greet:
            return False
        if now >= out.hello_at or out.words:
            return True
        return self.machine.is_open(neighbor) and bool(self._taken_from(neighbor) or out.rows or self._share(neighbor))

    def _taken_from(self, neighbor: int) -> list[Acknowledgement]:
        """Return what a call has to acknowledge, where no answer will."""
        return [] if self._answering[neighbor] else self._out[neighbor].taken

    def _share(self, neighbor: int) -> FrozenShare[Tensor] | None:
        """Return the share that is to be brought to a neighbour."""
        brought = self._out[neighbor].share
        for share in self.machine.shares_to_send():
            if share.receiver == neighbor and share is not brought:
                return share
        return None

    def news(self, neighbor: int, now: float) -> list[Words]:
        """See Mail: one call with everything, hellos first, for without them the rest may be refused."""
        out = self._out[neighbor]
        found: Words = [*out.words, *([self._with_rows(self.machine.hello(neighbor))] if now >= out.hello_at else [])]
        if self.machine.is_open(neighbor):
            share = self._share(neighbor)
            found += [*self._taken_from(neighbor), *([share] if share is not None else []), *out.rows.values()]
        if not all(isinstance(word, Acknowledgement) for word in found):  # all others say in which round this peer is
            out.hello_at = now + self._retry
        return [found] if found else []

    def written(self, neighbor: int, words: Words) -> Parts:
        """See Mail."""
        return Parts(tuple(part for message in words for part in encode(message).held))

    def answered(self, neighbor: int, words: Words, said: Words) -> None:
        """See Mail."""
        out = self._out[neighbor]
        out.failures = 0
        for message in words:
            if isinstance(message, FrozenShare):
                out.share = message
            elif isinstance(message, Hello):
                self._told[neighbor] = message.round_index
            elif isinstance(message, RowMessage) and out.rows.get(message.place) is message:
                del out.rows[message.place]
        out.words = [word for word in out.words if word not in words]
        out.taken = [word for word in out.taken if word not in words]
        out.words = [*out.words, *self._taken(neighbor, said)][-1:]  # type: ignore[assignment]

    def failed(self, neighbor: int, error: RunError, again: float) -> None:
        """See Mail: what was lost with the call is said again; who stays away or refuses it has to be greeted anew."""
        out, unreachable = self._out[neighbor], isinstance(error, UnreachableError)
        out.failures = out.failures + 1 if unreachable else 0
        if self.is_gone(neighbor) or not unreachable:
            self.machine.close(neighbor)
            out.taken.clear()  # the counters of a hello say it
        out.words.clear()
        out.share, out.hello_at = None, again
