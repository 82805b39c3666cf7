"""A peer that goes on without those who do not come: a slow or lost neighbour costs its own edges alone.

Push-sum algorithms send shares that are added exactly once (`shares`), whatever is lost, repeated or killed. All others
send rows, of which a neighbour uses the newest it has, once; the weight of who was not heard in time returns to the
peer itself for that round (`PartlyHeard`). Whom to wait for, and how long, is `Punctuality`'s to say.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from flower_privdec.algorithms import Exchange, Mix, Reply, State
from flower_privdec.errors import RunError, ScenarioError
from flower_privdec.mixing.partly_heard import PartlyHeard
from flower_privdec.runtime.checkpoint import Checkpoint
from flower_privdec.runtime.network.asynchronous_mail import AsynchronousMail
from flower_privdec.runtime.network.packing import pack, unpack
from flower_privdec.runtime.network.peer import POLL, RunningPeer
from flower_privdec.runtime.network.punctuality import Punctuality
from flower_privdec.runtime.network.row_mass import RowMass, TensorArithmetic
from flower_privdec.runtime.network.shares import Shares
from flower_privdec.runtime.network.wire_rows import Layout, layout_of
from flower_privdec.scenario import numbers_hash
from flower_privdec.words import one_line

LEAST_WEIGHT = 1e-9  # of a peer that nobody sends to: it keeps the rest for itself
GREETING_SECONDS = 2.0  # for the others, once a neighbour is known to be under way already


class AsynchronousPeer(RunningPeer):
    """One peer of a run in which nobody waits for those who do not come; see RunningPeer.

    It keeps one checkpoint, with the shares that are under way.
    """

    generations: ClassVar[int] = 1

    def _mail(self, kept: list[Checkpoint]) -> AsynchronousMail:
        scenario, whole = self.experiment.scenario, self.experiment.mixing
        assert whole is not None
        peer, neighbors = self.device.peer, self.timetable.neighbours(self.device.peer)
        self._whole, self._partly = whole, PartlyHeard(whole, peer)
        self.cohort.mixing = self._partly
        self._pace, self._asked = Punctuality(neighbors, scenario.network.deadline), dict[int, int]()
        self._neighbors, self._commits, self._joining = neighbors, 0, False
        exchanges = {at: self._layout(exchange) for at, exchange in self.timetable.exchanges.items()}
        shares = self._shares_of(exchanges) if whole.sends_shares else {}
        run, life = bytes.fromhex(numbers_hash(scenario)), 1 + secrets.randbelow(2**63)
        mass = RowMass(self.state, shares)
        machine = Shares(peer, neighbors, run, life, mass, TensorArithmetic(self.cohort.dtype))
        self.machine = machine
        rows, answers = {} if shares else exchanges, [at for at in exchanges if self._answers(at)]
        self.mail = AsynchronousMail(machine, neighbors, shares, rows, answers, scenario.network.retry)
        self._resumed, self.mail.fresh = bool(kept), not kept
        if kept:
            self._restore(kept[-1])
        return self.mail

    def _layout(self, exchange: Exchange) -> Layout:
        return layout_of(self._rows_of(exchange), self.cohort.dtype)

    def _answers(self, at: int) -> bool:
        return isinstance(self.timetable.exchanges[at], Reply)

    def _shares_of(self, exchanges: dict[int, Layout]) -> Layout:
        if len(exchanges) > 1:
            raise ScenarioError(
                f"algorithm.name={self.experiment.algorithm.name} sends push-sum shares {len(exchanges)} times a "
                "round, and network.mode=asynchronous counts them once a round: use network.mode synchronous"
            )
        (layout,) = exchanges.values()
        return layout

    def _restore(self, kept: Checkpoint) -> None:
        try:
            found = unpack(self.device.peer, kept.transport["shares"], kept.carried, dict(self.machine.mass))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ScenarioError(
                f"{self._paths()[0]}: cannot be read as a checkpoint ({one_line(error)}); restore it from a copy, or "
                "start anew with another --out: the peer then joins the others as they are"
            ) from error
        self.machine.restore(found)
        self._commits = kept.transport["place"]

    def _cap(self) -> int:
        return self.mail.cap

    def _begin(self) -> None:
        if not self._resumed:
            self._commit(0)

    # --- what is on disk ---

    def _commit(self, round_index: int, wanted: Collection[int] = ()) -> None:
        """Put everything on disk, and say what follows from it.

        Args:
            wanted: who may wait for a share of this round.
        """
        with self.courier.changed:
            durable = self.machine.snapshot(round_index)
        facts, carried = pack(durable)
        rows = self.state.rows | {name: value[None] for name, value in durable.mass.items()}
        self._commits += 1
        self._save(self._commits, replace(self.state, rows=rows), {"shares": facts}, carried)
        with self.courier.changed:
            self.machine.committed(durable)
            self.mail.committed(wanted)
            self.courier.changed.notify_all()

    def _due(self, round_index: int) -> bool:
        """Return whether a round is one that is committed, and in which shares are sent."""
        every = self.experiment.scenario.network.commit_every
        return (round_index + 1) % every == 0 or round_index + 1 == self.experiment.scenario.rounds

    # --- the neighbours ---

    def _meet(self) -> None:
        """Greet the neighbours; who finds them under way, and has nothing of the run, joins as they are.

        Raises:
            RunError: none of them can be reached.
        """
        network, since = self.experiment.scenario.network, time.monotonic()
        while True:
            self._wait(lambda: self._greeted(since), POLL)
            if self._greeted(since):
                break
            if time.monotonic() - since > network.start:
                raise RunError(self._nobody(network.start))
        self.mail.fresh = False
        self._joining = self.mail.joins and not self.machine.mass
        if not (self.mail.joins or self._resumed):
            self._pace.call_punctual(filter(self.machine.is_open, self._neighbors))

    def _greeted(self, since: float) -> bool:
        """Return whether all neighbours are open, or enough of them to begin."""
        opened = [self.machine.is_open(neighbor) for neighbor in self._neighbors]
        took, scenario = time.monotonic() - since, self.experiment.scenario
        patience = GREETING_SECONDS if self._resumed or self.mail.joins else scenario.network.start
        return all(opened) or (took > patience and (any(opened) or self.machine.round_index >= scenario.rounds))

    def _nobody(self, seconds: float) -> str:
        why = "; ".join(self.courier.why(peer) for peer in self._neighbors)
        return (
            f"none of the peers {self._neighbors} could be greeted for {seconds:g} s ({why}); mend that, then run the "
            "same command again, with --resume where it was used before, or raise network.start"
        )

    def _begin_anew(self) -> None:
        """Become a new incarnation without any mass, which takes over the model that comes with its first share."""
        with self.courier.changed:
            self.mail.rolled_back = None
            self.machine.begin_anew()
        self._commit(self.state.round_index)

    def _wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait until something is so, or for some seconds; meanwhile begin anew where that has to be.

        Raises:
            StoppedError: `stop` was called.
        """
        until = time.monotonic() + seconds
        while True:
            self._check_stopped()
            left = min(POLL, until - time.monotonic())
            done = self.courier.wait(lambda: self.mail.rolled_back is not None or ready(), max(0.0, left))
            if self.mail.rolled_back is not None:
                self._begin_anew()
            elif done or left <= 0:
                return done

    def _await(self, wanted: Collection[int], has_come: Callable[[int], bool]) -> None:
        """Wait for those of some neighbours who are punctual, as long as that pays."""

        def missing() -> list[int]:
            return [j for j in wanted if not has_come(j) and self.machine.is_open(j) and self._pace.is_punctual(j)]

        self._wait(lambda: not missing(), self._pace.patience)

    def _note(self, wanted: Collection[int], has_come: Callable[[int], bool]) -> None:
        """Remember who of those wanted in an exchange had come."""
        if wanted:
            there = {neighbor for neighbor in wanted if has_come(neighbor)}
            self._pace.exchanged(time.monotonic(), there, set(wanted) - there)

    # --- exchanges ---

    def _before(self, round_index: int) -> None:
        """Before a round's steps: wait until there is a model to take them at.

        Raises:
            RunError: no neighbour sent one.
        """
        self._partly.hear(None)
        since, network = time.monotonic(), self.experiment.scenario.network
        while not self._has_model(round_index):
            self._wait(self._is_offered_a_model, POLL)
            if time.monotonic() - since > network.start:
                raise RunError(f"no neighbour sent a model for {network.start:g} s; {self._nobody(network.start)}")

    def _has_model(self, round_index: int) -> bool:
        """Return whether steps can be taken; take over what neighbours offer where not."""
        weight = self.machine.mass.get("w")
        if weight is not None and float(weight) <= 0 and self.machine.waiting_rounds():
            self._absorb()
            self._commit(round_index)
        elif self._joining:
            self._joining = not self._adopt()
        return not self._joining and (weight is None or float(self.machine.mass["w"]) > 0)

    def _is_offered_a_model(self) -> bool:
        return bool(self.machine.waiting_rounds()) or any(map(self.mail.senders, self._mixes()))

    def _mixes(self) -> list[int]:
        return [at for at, exchange in self.timetable.exchanges.items() if isinstance(exchange, Mix)]

    def _adopt(self) -> bool:
        """Take over the rows of a neighbour, where some have come, before anything of one's own is sent."""
        for at in self._mixes():
            with self.courier.changed:
                found = self.mail.collect(at, self.mail.senders(at))
            if found:
                newest = max(found.values(), key=lambda message: message.round_index)
                rows = {name: value[None].clone() for name, value in self._on_device(newest.values).items()}
                self.state.rows.update(rows)
                return True
        return False

    def _exchange(self, exchange: Exchange) -> None:
        resumed, self._resumed = self._resumed, False
        if self._whole.sends_shares:
            self._push(self.state.round_index, resumed)
            self.state.at, self.state.waiting = self.state.at + 1, False
            self._settle()
        else:
            self._gossip(exchange, self.state, resumed)

    def _push(self, round_index: int, resumed: bool) -> None:
        """Send shares, commit, and add those that come."""
        if not self._due(round_index):
            self._absorb()
            return
        outgoing = self.timetable.column(self.device.peer, round_index)
        incoming = self.timetable.senders(self.device.peer, self.timetable.place(round_index, self.state.at))
        if not resumed:
            self._make_ready(outgoing)
            self._split(round_index, outgoing)
            self._commit(round_index + 1, outgoing)
        self._await(incoming, lambda j: self._is_through(j, round_index))
        self._note(incoming, lambda j: self._is_through(j, round_index))
        self._absorb()

    def _make_ready(self, receivers: Collection[int]) -> None:
        """Wait until shares can be sent, and acknowledge meanwhile what others wait for the same way."""
        while True:
            self._await(receivers, lambda j: self.machine.is_ready(j) or j in self.machine.waiting_rounds())
            if all(self.machine.is_ready(j) for j in receivers) or not self.machine.waiting_rounds():
                return
            self._absorb()
            self._commit(self.state.round_index)

    def _split(self, round_index: int, weights: dict[int, float]) -> None:
        with self.courier.changed:
            weight = self.machine.mass.get("w")
            self.machine.split(round_index, weights if weight is None or float(weight) > LEAST_WEIGHT else {})

    def _is_through(self, neighbor: int, round_index: int) -> bool:
        """Return whether a neighbour's share has come, or it sends none in this round."""
        return neighbor in self.machine.waiting_rounds() or self.mail.rounds.get(neighbor, 0) > round_index

    def _absorb(self) -> None:
        with self.courier.changed:
            self.machine.absorb()

    def _settle(self) -> None:
        """Commit once more where an edge is used again in the next round, which has to be acknowledged before."""
        following = self.state.round_index + 1
        if following < self.experiment.scenario.rounds and self._due(following):
            senders = self.timetable.senders(self.device.peer, self.timetable.place(following, self.state.at - 1))
            if self.machine.uncommitted() & senders:
                self._commit(following)

    def _gossip(self, exchange: Exchange, state: State, resumed: bool) -> None:
        """Send rows, and go on with those that have come."""
        k, at = state.round_index, state.at
        sent = exchange.outgoing(state, self._whole)
        if self._due(k) and not resumed:
            self._commit(k)
        self._post(at, k, {receiver: rows for (_, receiver), rows in sent.items()})
        wanted = self.timetable.senders(self.device.peer, self.timetable.place(k, at))

        def has_come(neighbor: int) -> bool:
            return self.mail.has_rows(at, neighbor, k)

        self._await(wanted, lambda j: has_come(j) or self.mail.places.get(j, (0, 0)) > (k, at))
        self._note(wanted, has_come)
        self._mix(exchange, state, wanted)

    def _post(self, at: int, round_index: int, rows: dict[int, Any]) -> None:
        with self.courier.changed:
            for neighbor, values in rows.items():
                self.mail.post(at, self._asked[neighbor] if self._answers(at) else round_index, {neighbor: values})
            self.courier.changed.notify_all()

    def _mix(self, exchange: Exchange, state: State, wanted: Collection[int]) -> None:
        """Perform an exchange with the rows that have come."""
        with self.courier.changed:
            found = self.mail.collect(state.at, wanted)
        if isinstance(exchange, Reply):  # an answer is to what was asked in this round
            found = {j: message for j, message in found.items() if message.round_index == state.round_index}
        else:
            self._asked.update({j: message.round_index for j, message in found.items()})
        self._partly.hear(found)
        peer = self.device.peer
        messages = {(j, peer): self._on_device(message.values) for j, message in found.items()}
        exchange.incoming(state, self._partly, messages).apply_(state)

    def _on_device(self, values: Any) -> dict[str, Tensor]:
        device = self.experiment.device
        return {name: value if device == torch.device("cpu") else value.to(device) for name, value in values.items()}

    # --- the end ---

    def _leave(self) -> None:
        """Relay for those who are not done, and stay until everybody who can be reached knows all that it needs.

        Who cannot be reached is waited for as long as a deadline, and no longer.
        """
        rounds, network = self.experiment.scenario.rounds, self.experiment.scenario.network
        self._resumed = False
        self._commit(rounds, self._neighbors)
        lost = time.monotonic()
        while not self._stopped.is_set():
            waiting = [j for j in self._neighbors if not self._is_over(j)]
            if any(self.machine.is_open(j) for j in waiting):
                lost = time.monotonic()
            if not waiting or time.monotonic() - lost > network.deadline:
                break
            if self._relay(rounds):
                continue
            with self.courier.changed:
                self.courier.changed.wait(POLL)

    def _is_over(self, neighbor: int) -> bool:
        """Return whether a neighbour is done, and has all that this peer owes it or has left."""
        rounds = self.experiment.scenario.rounds
        if self.mail.rounds.get(neighbor, -1) < rounds:
            return False
        frozen = {share.receiver for share in self.machine.shares_to_send()}
        told = self.mail.is_told(neighbor, rounds) and neighbor not in frozen
        return told or not self.machine.is_open(neighbor)

    def _relay(self, rounds: int) -> bool:
        """Take part in the mixing of those who are not done, without a step; return whether there was something."""
        if self.mail.rolled_back is not None:
            self._begin_anew()
        if self._whole.sends_shares:
            return self._relay_shares(rounds)
        done = False
        for at, exchange in self.timetable.exchanges.items():
            behind = self._behind(self.mail.senders(at))
            if behind and isinstance(exchange, Mix):
                state = replace(self.state, round_index=min(self.mail.rounds[j] for j in behind), at=at)
                sent = exchange.outgoing(state, self._whole)
                self._post(at, rounds, {j: rows for (_, j), rows in sent.items() if j in behind})
                self._mix(exchange, state, self.mail.senders(at))
                self.state.rows = state.rows
                done = True
        return done

    def _behind(self, neighbors: Iterable[int]) -> list[int]:
        """Return which of some neighbours are not done."""
        return [j for j in neighbors if self.mail.rounds.get(j, 0) < self.experiment.scenario.rounds]

    def _relay_shares(self, rounds: int) -> bool:
        waiting = self.machine.waiting_rounds()
        if not waiting:
            return False
        behind = self._behind(waiting)
        self._absorb()
        if behind:
            column = self.timetable.column(self.device.peer, min(waiting[j] for j in behind))
            self._split(rounds, {j: column[j] for j in self._behind(column)})
        self._commit(rounds, self._neighbors)
        return True
