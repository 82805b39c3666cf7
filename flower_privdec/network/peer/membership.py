"""How a peer becomes one of those that go on without each other: at the beginning, after a crash, late, or put back.

Who has nothing of a run that others have begun without it joins them as they are: in push-sum with no mass, which comes
with the model of its first share; else with the rows of the first neighbour that sends some. Who was put back to an
older checkpoint is told so by its neighbours, and begins anew the same way.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from flower_privdec.common.formatting import one_line
from flower_privdec.core import Exchange, Mix, Reply
from flower_privdec.engine.checkpoint import Checkpoint
from flower_privdec.engine.spent import ledger_folder
from flower_privdec.errors import BudgetError, RunError, ScenarioError
from flower_privdec.graph.mixing.schedule import PartlyHeard
from flower_privdec.network.peer.asynchronous_session import AsynchronousMail
from flower_privdec.network.peer.peer import POLL, RunningPeer
from flower_privdec.network.peer.row_mass import RowMass, TensorArithmetic
from flower_privdec.pushsum.packing import pack, unpack
from flower_privdec.pushsum.share_protocol import FIRST
from flower_privdec.pushsum.shares import Shares
from flower_privdec.pushsum.straggler_policy import Punctuality
from flower_privdec.pushsum.wire_rows import Layout, layout_of
from flower_privdec.scenario import numbers_hash

GREETING_SECONDS = 2.0  # for the others, where they are known to be under way already


class Membership(RunningPeer):
    """A peer of which nobody waits for long, up to its first exchange; see RunningPeer.

    It keeps one checkpoint, with the shares that are under way.
    """

    generations: ClassVar[int] = 1

    def _mail(self, kept: list[Checkpoint]) -> AsynchronousMail:
        scenario, whole = self.experiment.scenario, self.experiment.mixing
        assert whole is not None
        peer, neighbors = self.device.peer, self.timetable.neighbours(self.device.peer)
        self._whole, self._partly = whole, PartlyHeard(whole, peer)
        self.cohort.mixing = self._partly
        deadline = scenario.network.deadline
        first = min(GREETING_SECONDS, deadline) if kept else deadline  # the others may have used its rows, and be done
        self._pace, self._asked = Punctuality(neighbors, first), dict[int, int]()
        self._neighbors, self._commits, self._joining = neighbors, 0, False
        exchanges = {at: self._layout(exchange) for at, exchange in self.timetable.exchanges.items()}
        shares = self._shares_of(exchanges) if whole.sends_shares else {}
        run, life = bytes.fromhex(numbers_hash(scenario)), 1 + secrets.randbelow(2**63)
        mass = RowMass(self.state, shares)
        machine = Shares(peer, neighbors, run, life, mass, TensorArithmetic(self.cohort.dtype))
        self.machine = machine
        rows, answers = {} if shares else exchanges, [at for at in exchanges if self._answers(at)]
        self.mail = AsynchronousMail(machine, neighbors, shares, rows, answers, scenario.network.retry, scenario.rounds)
        self._resumed, self._sent, self._ledger_ends_here, self._paid = bool(kept), False, False, 0
        self.mail.begun = self.state.round_index
        if kept:
            self._restore(kept[-1])
        self._full = self._weight()  # what it was when something was added last
        self._waited = 0.0  # seconds, in the exchange under way
        self._new: set[int] = set()  # whose shares were added since the last exchange in which they are due
        has_begun_anew = bool(machine.mass) and machine.incarnation > FIRST  # with nothing, so that shares may come
        self.mail.fresh = not machine.has_met and not has_begun_anew
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
            asked = {int(neighbor): int(k) for neighbor, k in kept.transport["asked"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ScenarioError(
                f"{self._paths()[0]}: cannot be read as a checkpoint ({one_line(error)}); restore it from a copy, or "
                "start anew with another --out: the peer then joins the others as they are"
            ) from error
        self.machine.restore(found)
        ledger = self.cohort.ledger
        self._ledger_ends_here = ledger is not None and kept.head is not None and ledger.head == tuple(kept.head)
        self._commits, self._asked, self._paid = kept.transport["place"], asked, kept.transport["paid"]
        self._sent = self.state.at in self.timetable.exchanges and found.round_index > self.state.round_index

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
        asked = {str(neighbor): k for neighbor, k in self._asked.items()}
        self._save(self._commits, replace(self.state, rows=rows), {"shares": facts, "asked": asked}, carried)
        with self.courier.changed:
            self.machine.committed(durable)
            self.mail.committed(wanted)
            self.courier.tell()

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
        self._pace.start(time.monotonic(), filter(self.machine.is_open, self._neighbors))

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
        """Become a new incarnation without any mass, which takes over the model that comes with its first share.

        Raises:
            BudgetError: the ledger was put back together with the checkpoint.
        """
        self._check_ledger_is_ahead(self.mail.rolled_back)
        with self.courier.changed:
            self.mail.rolled_back = None
            self.machine.begin_anew()
        self._commit(self.state.round_index)

    def _check_ledger_is_ahead(self, why: str | None) -> None:
        """Refuse a ledger that ends where an older checkpoint does, while steps can be taken that it would not count.

        What neighbours have had of this peer since then was paid for in a ledger that is longer.
        """
        if self.mail.joins or self.device.insecure_seeds or not self._ledger_ends_here:
            return  # it has taken no step yet, or pays for many at once
        if not any(self.cohort.active(k).any() for k in self._unpaid_rounds()):
            return
        raise BudgetError(
            f"{ledger_folder(self.experiment.scenario, self.device.folder)}: {why}; its ledger knows of no step since "
            "its checkpoint, so it was put back as well, and steps that were taken are missing in it: restore the "
            "newest copy of the ledger"
        )

    def _unpaid_rounds(self) -> range:
        """Return the rounds whose steps others have seen, or may have, and the checkpoint has not paid for."""
        if self._whole.sends_shares:
            return range(self.state.round_index, self.state.round_index + 1)
        return range(self._paid // self.cohort.steps_per_round, self.mail.ahead + 1)

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

    def _absorb(self) -> None:
        with self.courier.changed:
            added = self.machine.absorb()
        if added:
            self._full = self._weight()
            self._new |= {share.sender for share in added}

    def _weight(self) -> float:
        """Return this peer's push-sum weight; 1 where there is none."""
        weight = self.machine.mass.get("w")
        return 1.0 if weight is None else float(weight)

    def _on_device(self, values: Any) -> dict[str, Tensor]:
        device = self.experiment.device
        return {name: value if device == torch.device("cpu") else value.to(device) for name, value in values.items()}
