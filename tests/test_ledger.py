"""The ledger: nothing is run that was not counted, whatever crashes; nothing is believed that was changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_privdec.errors import BudgetError
from flower_privdec.privacy import peer_ledger
from flower_privdec.privacy.accounting import epsilon
from flower_privdec.privacy.chain import NOTHING, read_chain
from flower_privdec.privacy.events import Release, Spend, canonical, plan_spends
from flower_privdec.privacy.ledger import Account, CohortLedger, Ledger
from flower_privdec.privacy.peer_ledger import ledger_path

DATA = "ab" * 32
DELTA = 1e-5
STEP = Release("full", 1.0, 50, 50, 20.0)


def account(peer=0, rounds=40, budget=None, release=STEP, active=None, noise=None) -> Account:
    active = np.ones(rounds, dtype=bool) if active is None else np.asarray(active)
    return Account(peer, plan_spends(release, active, noise), budget, DELTA)


def run_rounds(directory, run, accounts, rounds, block=None, start=0) -> CohortLedger:
    """Run rounds as an engine would; return the (closed) ledger."""
    with CohortLedger.open(directory, DATA, run, accounts, block=block) as ledger:
        for k in range(start, rounds):
            ledger.reserve(k)
            ledger.allowed(k)
    return ledger


def spent(directory, peer=0) -> float:
    with Ledger.open(directory, DATA, peer, None, DELTA) as ledger:
        return ledger.spent()


# --- one ledger ---


def test_payments_add_up_and_survive(tmp_path):
    with Ledger.open(tmp_path, DATA, 3, 5.0, DELTA) as ledger:
        assert ledger.head == (0, NOTHING)
        assert ledger.spent() == 0.0
        ledger.spend("a", Spend(0, 10, STEP.times(10)))
        ledger.spend("b", Spend(0, 5, STEP.times(5)))
        head = ledger.head
    assert ledger.path == tmp_path / DATA[:16] / "peer-00003.jsonl"
    with Ledger.open(tmp_path, DATA, 3, 5.0, DELTA) as again:
        assert again.head == head == (3, again.head[1])
        assert again.releases == (STEP.times(15),)
        assert again.spent() == epsilon([STEP.times(15)], DELTA)


def test_rounds_that_a_run_has_paid_are_free_and_another_runs_are_not(tmp_path):
    with Ledger.open(tmp_path, DATA, 0, None, DELTA) as ledger:
        ledger.spend("a", Spend(0, 10, STEP.times(10)))
        ledger.spend("a", Spend(0, 10, STEP.times(10)))
        ledger.spend("a", Spend(4, 12, STEP.times(8)))
        assert ledger.releases == (STEP.times(12),)
        ledger.spend("b", Spend(0, 10, STEP.times(10)))
        assert ledger.releases == (STEP.times(22),)


def test_a_payment_over_budget_is_refused_and_leaves_no_trace(tmp_path):
    budget = epsilon([STEP.times(10)], DELTA)
    with Ledger.open(tmp_path, DATA, 0, budget, DELTA) as ledger:
        ledger.spend("a", Spend(0, 10, STEP.times(10)))
        content = ledger.path.read_bytes()
        with pytest.raises(BudgetError, match="does not allow rounds 10 to 11"):
            ledger.spend("a", Spend(10, 11, STEP))
        assert ledger.path.read_bytes() == content
        assert ledger.spent() <= budget


def test_a_payment_is_on_disk_before_it_is_acknowledged(tmp_path, monkeypatch):
    order = []
    real = os.fsync
    monkeypatch.setattr(peer_ledger.os, "fsync", lambda fd: (order.append(os.fstat(fd).st_size), real(fd))[1])
    with Ledger.open(tmp_path, DATA, 0, None, DELTA) as ledger:
        order.clear()
        ledger.spend("a", Spend(0, 1, STEP))
        assert order == [ledger.path.stat().st_size]


def test_a_second_run_cannot_open_a_ledger_in_use(tmp_path):
    with Ledger.open(tmp_path, DATA, 0, None, DELTA):
        with pytest.raises(BudgetError, match=r"peer-00000.jsonl is in use by another run"):
            Ledger.open(tmp_path, DATA, 0, None, DELTA)
        with pytest.raises(BudgetError, match="in use"):
            CohortLedger.open(tmp_path, DATA, "b", [account(1), account(0)])
        Ledger.open(tmp_path, DATA, 1, None, DELTA).close()  # peer 1 was let go of again
    Ledger.open(tmp_path, DATA, 0, None, DELTA).close()


def test_another_process_cannot_open_a_ledger_in_use(tmp_path):
    code = (
        "import sys; from flower_privdec.privacy.peer_ledger import Ledger\n"
        "from flower_privdec.errors import BudgetError\n"
        f"try: Ledger.open(sys.argv[1], {DATA!r}, 0, None, 1e-5)\n"
        "except BudgetError as error: print(error)\n"
    )
    with Ledger.open(tmp_path, DATA, 0, None, DELTA):
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "in use by another run" in done.stdout


# --- a file that was changed ---


@pytest.fixture
def written(tmp_path):
    """Write a ledger of four payments; return its path."""
    with Ledger.open(tmp_path, DATA, 0, None, DELTA) as ledger:
        for k in range(4):
            ledger.spend("a", Spend(k, k + 1, STEP))
    return ledger.path


def reopen(path):
    Ledger.open(path.parent.parent, DATA, 0, None, DELTA).close()


def swap(lines: list[bytes]) -> list[bytes]:
    return [lines[0], lines[2], lines[1], *lines[3:]]


@pytest.mark.parametrize(
    ("change", "line", "what"),
    [
        (
            lambda ls: [
                *ls[:2],
                ls[2].replace(b'"noise_multiplier":20.0', b'"noise_multiplier":90.0'),
                *ls[3:],
            ],
            3,
            "edited",
        ),
        (lambda ls: [*ls[:2], *ls[3:]], 3, "does not follow"),
        (swap, 2, "does not follow"),
        (lambda ls: [*ls, ls[-1]], 6, "does not follow"),
        (lambda ls: [*ls[:2], b"\n", *ls[2:]], 3, "not a record"),
        (lambda ls: [*ls[:3], ls[3][:40] + b"\n", *ls[4:]], 4, "not a record"),
        (lambda ls: [*ls[:3], ls[3][:-1] + ls[4]], 4, "not a record"),
        (lambda ls: ls[1:], 1, "does not follow"),
        (lambda ls: [*ls[:4], b"{}\n"], 5, "not a record"),
        (lambda ls: [b"\x00" * 20 + b"\n"], 1, "not a record"),
    ],
)
def test_a_changed_ledger_is_refused_by_file_line_and_remedy(written, change, line, what):
    lines = written.read_bytes().splitlines(keepends=True)
    changed = b"".join(change(lines))
    assert changed != b"".join(lines)
    written.write_bytes(changed)
    with pytest.raises(BudgetError, match=f"{written.name} line {line}: .*{what}.*; restore it from a backup"):
        reopen(written)
    assert written.read_bytes() == changed
    with pytest.raises(BudgetError, match=f"line {line}"):
        read_chain(written)


def test_a_rehashed_line_breaks_the_chain_after_it(written):
    from flower_privdec.privacy.chain import hash_of

    lines = written.read_bytes().splitlines(keepends=True)
    body = json.loads(lines[2])
    body["releases"][0]["release"]["noise_multiplier"] = 90.0
    del body["hash"]
    lines[2] = json.dumps(body | {"hash": hash_of(body)}).encode() + b"\n"
    written.write_bytes(b"".join(lines))
    with pytest.raises(BudgetError, match="line 4: does not follow"):
        reopen(written)


def test_a_fork_is_refused(tmp_path, written):
    copy = tmp_path / "copy" / DATA[:16] / written.name
    copy.parent.mkdir(parents=True)
    shutil.copy(written, copy)
    for directory, run in ((tmp_path, "b"), (tmp_path / "copy", "c")):
        with Ledger.open(directory, DATA, 0, None, DELTA) as ledger:
            ledger.spend(run, Spend(0, 1, STEP))
    written.write_bytes(written.read_bytes() + copy.read_bytes().splitlines(keepends=True)[-1])
    with pytest.raises(BudgetError, match="line 7: does not follow"):
        reopen(written)


def test_another_peers_or_data_sets_file_is_refused(tmp_path, written):
    shutil.copy(written, written.with_name("peer-00001.jsonl"))
    with pytest.raises(BudgetError, match="line 1: peer is not this run's"):
        Ledger.open(tmp_path, DATA, 1, None, DELTA)
    with pytest.raises(BudgetError, match="line 1: dataset is not this run's"):
        Ledger.open(tmp_path, DATA[:16] + "cd" * 24, 0, None, DELTA)


def test_a_payment_of_an_unknown_kind_is_refused(tmp_path):
    with Ledger.open(tmp_path, DATA, 0, None, DELTA) as ledger:
        ledger.spend("a", Spend(0, 1, STEP))
        odd = json.loads(ledger.path.read_bytes().splitlines()[1])
    from flower_privdec.privacy.chain import chained, header

    odd["releases"][0]["release"]["sampling"] = "psychic"
    body = {k: v for k, v in odd.items() if k not in ("hash", "index", "previous")}
    ledger.path.write_bytes(chained([header(DATA, 0), body], (0, NOTHING))[0])
    with pytest.raises(BudgetError, match="line 2: not a payment"):
        reopen(ledger.path)


def test_a_torn_last_line_is_dropped_only_when_it_is_incomplete(written, caplog):
    whole = written.read_bytes()
    for cut in range(1, len(whole.splitlines(keepends=True)[-1])):
        written.write_bytes(whole[:-cut])
        reopen(written)
        kept = written.read_bytes()
        assert kept == (whole if cut == 1 else b"".join(whole.splitlines(keepends=True)[:-1]))
    assert "incomplete last line" in caplog.text


def test_a_torn_line_is_replaced_by_the_next_payment(written):
    whole = written.read_bytes()
    written.write_bytes(whole[:-30])
    with Ledger.open(written.parent.parent, DATA, 0, None, DELTA) as ledger:
        assert ledger.paid_until("a") == 3
        ledger.spend("a", Spend(3, 4, STEP))
    assert written.read_bytes() == whole


def test_a_checkpoints_head_shows_lines_cut_from_the_end(written):
    with Ledger.open(written.parent.parent, DATA, 0, None, DELTA) as ledger:
        head = ledger.head
        ledger.check_head(*head)
        ledger.check_head(0, NOTHING)
        ledger.spend("a", Spend(4, 5, STEP))
        ledger.check_head(*head)  # grown since
        with pytest.raises(BudgetError, match="line 5: not the line that the checkpoint saw"):
            ledger.check_head(head[0], "0" * 64)
    written.write_bytes(b"".join(written.read_bytes().splitlines(keepends=True)[:3]))
    ledger = Ledger.open(written.parent.parent, DATA, 0, None, DELTA)
    with ledger, pytest.raises(BudgetError, match="has 3 lines where the checkpoint saw 5; restore"):
        ledger.check_head(*head)


def test_reading_needs_no_lock_and_shows_every_payment(written):
    with Ledger.open(written.parent.parent, DATA, 0, None, DELTA):
        first, paid = read_chain(written)
    assert (first["dataset"], first["peer"]) == (DATA, 0)
    assert [(p.run, p.from_round, p.to_round) for p in paid] == [("a", k, k + 1) for k in range(4)]
    with pytest.raises(BudgetError, match="cannot be read"):
        read_chain(written.with_name("nothing"))


def test_a_payment_says_this_and_no_more(written):
    text = written.read_text()
    assert set(json.loads(text.splitlines()[1])) == {
        *("index", "run", "from_round", "to_round", "releases", "previous", "hash"),
    }


# --- a cohort's ledgers ---


@pytest.mark.parametrize("block", [1, 7, 1000, None])
def test_what_a_finished_run_cost_does_not_depend_on_blocks(tmp_path, block):
    active = np.random.default_rng(0).random((2, 40)) < 0.5
    noise = np.linspace(20, 30, 40)
    accounts = [account(4, active=active[0]), account(7, active=active[1], noise=noise)]
    run_rounds(tmp_path, "a", accounts, 40, block)
    for a, mask in zip(accounts, active, strict=True):
        with Ledger.open(tmp_path, DATA, a.peer, None, DELTA) as ledger:
            assert ledger.releases == canonical(s.release for s in a.spends)
            assert sum(r.steps for r in ledger.releases) == mask.sum()


def test_blocks_reserve_what_they_say_and_never_beyond_the_plan(tmp_path):
    with CohortLedger.open(tmp_path, DATA, "a", [account(0), account(1, rounds=25)], block=10) as ledger:
        assert ledger.spent_all().tolist() == [0, 0]  # opening costs nothing
        ledger.reserve(0)
        assert ledger.spent(0) == epsilon([STEP.times(10)], DELTA)
        heads = ledger.heads()
        ledger.reserve(9)
        assert ledger.heads() == heads
        ledger.reserve(10)
        ledger.reserve(20)
        ledger.reserve(30)
        ledger.reserve(39)
        ledger.reserve(40)
        assert ledger.spent_all().tolist() == [epsilon([STEP.times(n)], DELTA) for n in (40, 25)]


def test_one_block_a_round_pays_for_one_round(tmp_path):
    with CohortLedger.open(tmp_path, DATA, "a", [account()], block=1) as ledger:
        for k in range(5):
            ledger.reserve(k)
            assert ledger.spent(0) == epsilon([STEP.times(k + 1)], DELTA)


def test_adaptive_blocks_write_seldom(tmp_path):
    ledger = run_rounds(tmp_path, "a", [account(rounds=5000)], 5000)
    assert ledger.heads()["0"][0] <= 1 + 17


def test_only_planned_rounds_within_budget_are_allowed(tmp_path):
    active = np.tile([True, False], 20)
    tight = epsilon([STEP.times(7)], DELTA)
    accounts = [account(2, active=active, budget=tight), account(5, budget=tight), account(8, rounds=10)]
    with CohortLedger.open(tmp_path, DATA, "a", accounts) as ledger:
        allowed = []
        for k in range(60):
            ledger.reserve(k)
            allowed.append(ledger.allowed(k).copy())
        ran = np.array(allowed).T
        assert np.flatnonzero(ran[0]).tolist() == [0, 2, 4, 6, 8, 10, 12]
        assert np.flatnonzero(ran[1]).tolist() == list(range(7))
        assert np.flatnonzero(ran[2]).tolist() == list(range(10))
        assert np.all(ledger.spent_all()[:2] <= tight)


def test_a_plan_solved_for_the_budget_runs_whole(tmp_path):
    exact = epsilon([STEP.times(40)], DELTA)
    with CohortLedger.open(tmp_path, DATA, "a", [account(budget=exact)]) as ledger:
        ledger.reserve(39)
        assert ledger.allowed(39).all()
        assert ledger.spent(0) == exact


def test_an_epoch_is_paid_whole_and_refused_whole(tmp_path):
    release = Release("shuffle", 0.1, 100, 10, 5.0)
    two = epsilon([release.times(2)], DELTA)
    with CohortLedger.open(tmp_path, DATA, "a", [account(release=release, budget=two)], block=1) as ledger:
        ledger.reserve(0)
        assert ledger.spent(0) == epsilon([release], DELTA)
        assert ledger.limits.tolist() == [20]
        for k in range(40):
            ledger.reserve(k)
        assert ledger.spent(0) == two


def test_no_noise_is_refused_by_a_budget_and_recorded_without_one(tmp_path):
    silent = Release("full", 1.0, 50, 50, 0.0)
    with CohortLedger.open(tmp_path, DATA, "a", [account(release=silent, budget=100.0)]) as ledger:
        ledger.reserve(0)
        assert not ledger.allowed(0).any()
        assert ledger.spent(0) == 0.0
    run_rounds(tmp_path, "b", [account(release=silent)], 40)
    assert spent(tmp_path) == np.inf


def test_another_run_over_the_same_data_adds_up_and_meets_the_budget(tmp_path):
    budget = epsilon([STEP.times(60)], DELTA)
    run_rounds(tmp_path, "a", [account(budget=budget)], 40)
    with CohortLedger.open(tmp_path, DATA, "b", [account(budget=budget)]) as ledger:
        assert ledger.limits.tolist() == [20]
        ledger.reserve(0)
        ledger.reserve(39)
        assert ledger.spent(0) <= budget
    with CohortLedger.open(tmp_path, "cd" * 32, "b", [account(budget=budget)]) as ledger:
        assert ledger.limits.tolist() == [40]  # other data


def test_a_resumed_run_is_not_charged_twice(tmp_path):
    run_rounds(tmp_path, "a", [account(0), account(1)], 13, block=5)
    assert spent(tmp_path) == epsilon([STEP.times(15)], DELTA)
    resumed = run_rounds(tmp_path, "a", [account(0), account(1)], 40, block=5, start=8)
    assert spent(tmp_path) == epsilon([STEP.times(40)], DELTA)
    again = run_rounds(tmp_path, "a", [account(0), account(1)], 40)
    assert again.heads() == resumed.heads()


def test_a_resumed_run_keeps_what_it_paid_for_under_a_budget_now_spent(tmp_path):
    run_rounds(tmp_path, "a", [account()], 10, block=10)
    run_rounds(tmp_path, "b", [account()], 40)
    with CohortLedger.open(tmp_path, DATA, "a", [account(budget=0.5)]) as ledger:
        assert ledger.limits.tolist() == [10]
        ledger.reserve(5)
        assert ledger.allowed(9).all()
        assert not ledger.allowed(10).any()


def test_a_run_that_changed_its_mechanism_is_refused(tmp_path):
    run_rounds(tmp_path, "a", [account()], 10, block=10)
    for other in (account(release=Release("full", 1.0, 50, 50, 21.0)), account(active=np.arange(40) != 5)):
        with pytest.raises(BudgetError, match="rounds 0 to 10 of this run were paid with another mechanism"):
            CohortLedger.open(tmp_path, DATA, "a", [other])
    CohortLedger.open(tmp_path, DATA, "a", [account()]).close()  # and all locks were let go of


def test_heads_of_a_checkpoint_are_checked_for_every_peer(tmp_path):
    with CohortLedger.open(tmp_path, DATA, "a", [account(3), account(9)], block=4) as ledger:
        ledger.reserve(0)
        heads = json.loads(json.dumps(ledger.heads()))
        ledger.check_heads(heads)
        ledger.reserve(4)
        ledger.check_heads(heads)
        with pytest.raises(BudgetError, match=r"peer-00009.jsonl has 3 lines where the checkpoint saw 7"):
            ledger.check_heads(heads | {"9": [7, "f" * 64]})


def test_peers_are_known_by_id_not_by_row(tmp_path):
    run_rounds(tmp_path, "a", [account(3), account(9, release=Release("full", 1.0, 9, 9, 30.0))], 40)
    with Ledger.open(tmp_path, DATA, 9, None, DELTA) as ledger:
        assert ledger.releases[0].dataset_size == 9


# --- crashes ---


class Killed(BaseException):
    """Stands for SIGKILL: nothing handles it."""


class Disk:
    """Writes and fsyncs of the ledgers, dying at the n-th call; what was not synced is left in part."""

    def __init__(self, monkeypatch, die_at: int) -> None:
        self.calls, self.die_at, self.synced = 0, die_at, {}
        self._write, self._fsync = os.write, os.fsync
        monkeypatch.setattr(peer_ledger.os, "write", self.write)
        monkeypatch.setattr(peer_ledger.os, "fsync", self.fsync)

    def _step(self) -> None:
        self.calls += 1
        if self.calls == self.die_at:
            raise Killed

    def write(self, fd: int, content: bytes) -> int:
        written = self._write(fd, content)
        self._step()
        return written

    def fsync(self, fd: int) -> None:
        self._step()
        self.synced[os.fstat(fd).st_ino] = os.fstat(fd).st_size

    def lose_power(self, folder, part: float) -> None:
        for path in folder.rglob("*.jsonl"):
            safe, size = self.synced.get(path.stat().st_ino, 0), path.stat().st_size
            os.truncate(path, safe + int((size - safe) * part))


def die(folder, accounts, monkeypatch, die_at, block) -> tuple[int, Disk]:
    """Run until the disk dies; return the last round that was begun, or -1."""
    ran = -1
    with monkeypatch.context() as patch:
        disk, ledger = Disk(patch, die_at), None
        try:
            ledger = CohortLedger.open(folder, DATA, "a", accounts, block=block)
            for k in range(12):
                ledger.reserve(k)
                ran = k
        except Killed:
            pass
        if ledger is not None:
            ledger.close()  # the kernel would
    return ran, disk


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("block", [1, 3, None])
def test_a_crash_anywhere_never_counts_too_little(tmp_path, monkeypatch, block, part):
    noise = np.where(np.arange(12) % 2, 20.0, 25.0)
    accounts = [account(0, rounds=12), account(1, noise=noise, active=np.arange(12) != 4)]
    crashes = 0
    for die_at in range(1, 200, 3 if block == 1 else 1):
        folder = tmp_path / str(die_at)
        ran, disk = die(folder, accounts, monkeypatch, die_at, block)
        disk.lose_power(folder, part)
        for a in accounts:
            with Ledger.open(folder, DATA, a.peer, None, DELTA) as found:
                paid = {k for p in found.payments for rounds, _ in p.parts for x, y in rounds for k in range(x, y)}
                assert paid >= {k for s in a.spends for k in range(s.from_round, s.to_round) if k <= ran}
        run_rounds(folder, "a", accounts, 12, block, start=max(ran, 0))
        for a in accounts:
            with Ledger.open(folder, DATA, a.peer, None, DELTA) as found:
                assert found.releases == canonical(s.release for s in a.spends)
        if disk.calls < die_at:
            break
        crashes += 1
    assert crashes >= 6


def test_a_full_disk_stops_the_run_and_loses_nothing(tmp_path, monkeypatch):
    with CohortLedger.open(tmp_path, DATA, "a", [account()], block=5) as ledger:
        ledger.reserve(0)

        def full(fd: int, content: bytes) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(peer_ledger.os, "write", full)
            with pytest.raises(BudgetError, match=r"could not be written \(No space left on device\)"):
                ledger.reserve(5)
        with pytest.raises(BudgetError, match="is closed, or could not be written"):
            ledger.reserve(5)
    run_rounds(tmp_path, "a", [account()], 40, start=5)
    assert spent(tmp_path) == epsilon([STEP.times(40)], DELTA)


def test_an_interrupted_payment_counts_and_the_chain_goes_on(tmp_path, monkeypatch):
    with Ledger.open(tmp_path, DATA, 0, None, DELTA) as ledger:
        with monkeypatch.context() as patch:
            Disk(patch, 2)
            with pytest.raises(Killed):
                ledger.spend("a", Spend(0, 1, STEP))
        ledger.spend("a", Spend(0, 2, STEP.times(2)))
        assert ledger.spent() == epsilon([STEP.times(3)], DELTA)
    assert spent(tmp_path) == epsilon([STEP.times(3)], DELTA)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BudgetError, match="cannot be made"):
        CohortLedger.open(tmp_path / "file", DATA, "a", [account()])


plans = st.lists(
    st.tuples(
        st.lists(st.booleans(), min_size=1, max_size=15),  # activity
        st.sampled_from([10.0, 20.0, 40.0]),  # noise
        st.sampled_from([1, 4, None]),  # block
        st.integers(0, 15),  # the run is cut off here, and resumed or not
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=30, derandomize=True, deadline=None)
@given(plans, st.floats(0.3, 2.0))
def test_no_sequence_of_runs_exceeds_a_budget_or_runs_uncounted(tmp_path_factory, runs, budget):
    folder = tmp_path_factory.mktemp("ledger")
    executed: dict[tuple[str, int], Release] = {}
    for number, (active, noise, block, cut, resumed) in enumerate(runs):
        run, step = f"run-{number}", Release("full", 1.0, 50, 50, noise)
        plan = account(budget=budget, release=step, active=active)
        for start, stop in ((0, cut), (cut, len(active))) if resumed else ((0, cut),):
            with CohortLedger.open(folder, DATA, run, [plan], block=block) as ledger:
                for k in range(start, min(stop, len(active))):
                    ledger.reserve(k)
                    if ledger.allowed(k)[0]:
                        assert active[k]
                        executed[run, k] = step
                assert epsilon(executed.values(), DELTA) <= ledger.spent(0) <= budget


def test_ledger_paths_are_by_data_set_and_peer(tmp_path):
    assert ledger_path(tmp_path, DATA, 12) == tmp_path / ("ab" * 8) / "peer-00012.jsonl"
