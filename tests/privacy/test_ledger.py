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
from raising import raises

from flower_privdec.errors import BudgetError
from flower_privdec.privacy.accountant.accounting import epsilon, epsilon_of_runs
from flower_privdec.privacy.ledger import ledger as ledger_module
from flower_privdec.privacy.ledger.ledger import (
    EMPTY_HASH,
    FORMAT,
    Account,
    Charge,
    CohortLedger,
    Ledger,
    RunName,
    chained,
    charged_until,
    hash_of,
    ledger_path,
    read_chain,
    runs_in,
    spending_of,
)
from flower_privdec.privacy.mechanism.events import Release, Spend, canonical, plan_spends

DATA = "digits"
DELTA = 1e-5
STEP = Release("full", 1.0, 50, 50, 20.0)


def run_name(name: str) -> RunName:
    return RunName(name, "scenario", "torch, cpu")


def account(peer=0, rounds=40, budget=None, release=STEP, active=None, noise=None) -> Account:
    active = np.ones(rounds, dtype=bool) if active is None else np.asarray(active)
    return Account(peer, plan_spends(release, active, noise), budget, DELTA)


def opened(directory, run, accounts, **options) -> CohortLedger:
    return CohortLedger(directory, DATA, run_name(run), accounts, **options)


def take(ledger, step) -> np.ndarray:
    """Take a step as a cohort would; return who took it."""
    rows = np.flatnonzero(ledger.allowed(step))
    if len(rows):
        ledger.charge(step, rows)
    return rows


def run_steps(directory, run, accounts, steps, start=0, **options) -> CohortLedger:
    """Run steps as an engine would; return the (closed) ledger."""
    with opened(directory, run, accounts, **options) as ledger:
        for step in range(start, steps):
            take(ledger, step)
    return ledger


def costs(directory) -> dict:
    return runs_in(read_chain(ledger_path(directory, DATA))[1])


def spent(directory) -> float:
    return epsilon_of_runs(costs(directory).values(), DELTA)


def pay(file: Ledger, run: str, spend: Spend, peers=(0,)) -> None:
    file.append(run_name(run), spend.from_step, spend.to_step, [Charge.of(peers, [spend])])


# --- one file ---


def test_payments_add_up_and_survive(tmp_path):
    with Ledger(tmp_path, DATA) as file:
        assert file.head == (0, EMPTY_HASH)
        pay(file, "a", Spend(0, 10, STEP.times(10)))
        pay(file, "b", Spend(0, 5, STEP.times(5)), (3, 4, 9))
        head = file.head
    assert file.path == tmp_path / "digits.jsonl"
    with Ledger(tmp_path, DATA) as again:
        assert again.head == head == (3, again.head[1])
        assert again.entries[1].charges[0].peers == (3, 4, 9)
    assert spent(tmp_path) == epsilon([STEP.times(15)], DELTA)


def test_a_payment_is_on_disk_before_it_is_acknowledged(tmp_path, monkeypatch):
    order = []
    real = os.fsync
    monkeypatch.setattr(ledger_module.os, "fsync", lambda fd: (order.append(os.fstat(fd).st_size), real(fd))[1])
    with Ledger(tmp_path, DATA) as file:
        order.clear()
        pay(file, "a", Spend(0, 1, STEP))
        assert order == [file.path.stat().st_size]


def test_a_second_run_cannot_open_a_ledger_in_use(tmp_path):
    with Ledger(tmp_path, DATA):
        with raises(BudgetError, "ledger.in-use", "digits.jsonl"):
            Ledger(tmp_path, DATA)
        with raises(BudgetError, "ledger.in-use"):
            opened(tmp_path, "b", [account()])
        Ledger(tmp_path, "mnist").close()
    Ledger(tmp_path, DATA).close()


def test_another_process_cannot_open_a_ledger_in_use(tmp_path):
    code = (
        "import sys; from flower_privdec.privacy.ledger.ledger import Ledger\n"
        "from flower_privdec.errors import BudgetError\n"
        f"try: Ledger(sys.argv[1], {DATA!r})\n"
        "except BudgetError as error: print(error)\n"
    )
    with Ledger(tmp_path, DATA):
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "in use by another run" in done.stdout


# --- a file that was changed ---


@pytest.fixture
def written(tmp_path):
    """Write a ledger of four payments; return its path."""
    with Ledger(tmp_path, DATA) as file:
        for k in range(4):
            pay(file, "a", Spend(k, k + 1, STEP))
    return file.path


def reopen(path):
    Ledger(path.parent, DATA).close()


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
        (lambda ls: [*ls, b"[" * 100_000 + b"\n"], 6, "not a record"),
    ],
)
def test_a_changed_ledger_is_refused_by_file_line_and_remedy(written, change, line, what):
    lines = written.read_bytes().splitlines(keepends=True)
    changed = b"".join(change(lines))
    assert changed != b"".join(lines)
    written.write_bytes(changed)
    with raises(BudgetError, "ledger.damaged", f"{written.name} line {line}: .*{what}"):
        reopen(written)
    assert written.read_bytes() == changed
    with raises(BudgetError, "ledger.damaged", f"line {line}"):
        read_chain(written)


def test_a_ledger_that_keeps_nothing_or_never_ends_is_refused(tmp_path):
    for device in ("/dev/null", "/dev/full"):
        link = tmp_path / device.strip("/").replace("/", "-") / f"{DATA}.jsonl"
        link.parent.mkdir()
        link.symlink_to(device)
        with raises(BudgetError, "ledger.not-a-file"):
            reopen(link)


def test_a_rehashed_line_breaks_the_chain_after_it(written):
    lines = written.read_bytes().splitlines(keepends=True)
    body = json.loads(lines[2])
    body["charges"][0]["releases"][0]["release"]["noise_multiplier"] = 90.0
    del body["hash"]
    lines[2] = json.dumps(body | {"hash": hash_of(body)[1]}).encode() + b"\n"
    written.write_bytes(b"".join(lines))
    with raises(BudgetError, "ledger.damaged", "line 4"):
        reopen(written)


def test_a_fork_is_refused(tmp_path, written):
    copy = tmp_path / "copy" / written.name
    copy.parent.mkdir(parents=True)
    shutil.copy(written, copy)
    for directory, run in ((tmp_path, "b"), (tmp_path / "copy", "c")):
        with Ledger(directory, DATA) as file:
            pay(file, run, Spend(0, 1, STEP))
    written.write_bytes(written.read_bytes() + copy.read_bytes().splitlines(keepends=True)[-1])
    with raises(BudgetError, "ledger.damaged", "line 7"):
        reopen(written)


def test_another_sources_file_is_refused(tmp_path, written):
    shutil.copy(written, written.with_name("mnist.jsonl"))
    with raises(BudgetError, "ledger.source", "line 1.*digits.*mnist"):
        Ledger(tmp_path, "mnist")


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line["charges"][0]["releases"][0]["release"].update(sampling="psychic"),
        lambda line: line.pop("environment"),
        lambda line: line["charges"][0].update(peers=[["a", 3]]),
        lambda line: line.update(charges=None),
    ],
)
def test_a_payment_of_an_unknown_kind_is_refused(tmp_path, written, change):
    odd = json.loads(written.read_bytes().splitlines()[1])
    change(odd)
    body = {key: value for key, value in odd.items() if key not in ("hash", "index", "previous")}
    written.write_bytes(chained([{"format": FORMAT, "source": DATA}, body], (0, EMPTY_HASH))[0])
    with raises(BudgetError, "ledger.damaged", "line 2"):
        reopen(written)


def test_a_torn_last_line_is_dropped_only_when_it_is_incomplete(written, caplog):
    whole = written.read_bytes()
    for cut in range(1, len(whole.splitlines(keepends=True)[-1]), 7):
        written.write_bytes(whole[:-cut])
        reopen(written)
        kept = written.read_bytes()
        assert kept == (whole if cut == 1 else b"".join(whole.splitlines(keepends=True)[:-1]))
    assert "incomplete last line" in caplog.text


def test_a_torn_line_is_replaced_by_the_next_payment(written):
    whole = written.read_bytes()
    written.write_bytes(whole[:-30])
    with Ledger(written.parent, DATA) as file:
        assert charged_until(file.entries, "a") == 3
        pay(file, "a", Spend(3, 4, STEP))
    assert written.read_bytes() == whole


def test_a_checkpoints_head_shows_lines_cut_from_the_end(written):
    with Ledger(written.parent, DATA) as file:
        head = file.head
        file.check_head(head)
        file.check_head((0, EMPTY_HASH))
        pay(file, "a", Spend(4, 5, STEP))
        file.check_head(head)  # grown since
        with raises(BudgetError, "ledger.stale", "line 5"):
            file.check_head((head[0], "0" * 64))
    written.write_bytes(b"".join(written.read_bytes().splitlines(keepends=True)[:3]))
    file = Ledger(written.parent, DATA)
    with file, raises(BudgetError, "ledger.stale", "3 .* 5"):
        file.check_head(head)


def test_reading_needs_no_lock_and_shows_every_payment(written):
    with Ledger(written.parent, DATA):
        first, paid = read_chain(written)
    assert first["source"] == DATA
    assert [(p.run, p.from_step, p.to_step) for p in paid] == [(run_name("a"), k, k + 1) for k in range(4)]
    with raises(BudgetError, "ledger.unreadable"):
        read_chain(written.with_name("nothing"))


def test_a_payment_says_this_and_no_more(written):
    line = json.loads(written.read_text().splitlines()[1])
    assert set(line) == {
        *("index", "run", "scenario", "environment", "from_step", "to_step", "charges", "previous", "hash"),
    }
    assert set(line["charges"][0]) == {"peers", "releases"}


# --- whose ledger: the source's, and each example is charged what any peer paid ---


def test_runs_that_deal_the_data_out_otherwise_add_up_to_the_dearest(tmp_path):
    dear, cheap = Release("full", 1.0, 9, 9, 15.0), Release("full", 1.0, 90, 90, 40.0)
    run_steps(tmp_path, "a", [account(0, release=cheap), account(1, release=dear)], 40)
    run_steps(tmp_path, "b", [account(7, release=dear), account(8, release=cheap)], 40)
    assert spent(tmp_path) == pytest.approx(epsilon([dear.times(80)], DELTA), rel=1e-3)
    assert spent(tmp_path) >= epsilon([dear.times(80)], DELTA)
    third = spending_of(tmp_path, DATA, run_name("c"), [account(0, release=cheap)])
    expected = epsilon([dear.times(80), cheap.times(40)], DELTA)
    assert expected <= third.epsilons(40)[0] <= expected * 1.001


def test_equal_peers_are_one_alternative(tmp_path):
    run_steps(tmp_path, "a", [account(peer) for peer in range(50)], 40)
    assert costs(tmp_path) == {"a": ((STEP.times(40),),)}


def test_another_run_over_the_same_source_adds_up_and_meets_the_budget(tmp_path):
    budget = epsilon([STEP.times(60)], DELTA)
    run_steps(tmp_path, "a", [account(budget=budget)], 40)
    with opened(tmp_path, "b", [account(5, budget=budget)]) as ledger:
        assert ledger.spending.limits.tolist() == [20]
        assert ledger.spending.epsilons(0).tolist() == [epsilon([STEP.times(40)], DELTA)]
        assert ledger.spending.epsilons(40)[0] <= budget
    with CohortLedger(tmp_path, "mnist", run_name("b"), [account(budget=budget)]) as ledger:
        assert ledger.spending.limits.tolist() == [40]  # other data


# --- a cohort's ledger ---


@pytest.mark.parametrize("block", [1, 7, 1000, None])
def test_what_a_finished_run_cost_does_not_depend_on_blocks(tmp_path, block):
    active = np.random.default_rng(0).random((2, 40)) < 0.5
    noise = np.linspace(20, 30, 40)
    accounts = [account(4, active=active[0]), account(7, active=active[1], noise=noise)]
    run_steps(tmp_path, "a", accounts, 40, block=block)
    found = costs(tmp_path)["a"]
    for a, mask in zip(accounts, active, strict=True):
        assert canonical(s.release for s in a.spends) in found
        assert sum(s.release.steps for s in a.spends) == mask.sum()
    assert len(found) == 2


def test_blocks_reserve_what_they_say_and_never_beyond_the_plan(tmp_path):
    with opened(tmp_path, "a", [account(0), account(1, rounds=25)], block=10) as ledger:
        assert ledger.head == (0, EMPTY_HASH)  # opening costs nothing
        take(ledger, 0)
        assert costs(tmp_path) == {"a": ((STEP.times(10),),)}
        head = ledger.head
        take(ledger, 9)
        assert ledger.head == head
        for step in (10, 20, 30, 39, 40, 99):
            take(ledger, step)
        assert set(costs(tmp_path)["a"]) == {(STEP.times(40),), (STEP.times(25),)}


def test_one_block_a_step_pays_for_one_step(tmp_path):
    with opened(tmp_path, "a", [account()], block=1) as ledger:
        for k in range(5):
            take(ledger, k)
            assert costs(tmp_path) == {"a": ((STEP.times(k + 1),),)}


def test_adaptive_blocks_write_seldom(tmp_path):
    assert run_steps(tmp_path, "a", [account(rounds=5000)], 5000).head[0] <= 1 + 17


def test_only_planned_steps_within_budget_are_allowed(tmp_path):
    active = np.tile([True, False], 20)
    tight = epsilon([STEP.times(7)], DELTA)
    accounts = [account(2, active=active, budget=tight), account(5, budget=tight), account(8, rounds=10)]
    with opened(tmp_path, "a", accounts) as ledger:
        ran = [set(take(ledger, k).tolist()) for k in range(60)]
        assert [k for k in range(60) if 0 in ran[k]] == [0, 2, 4, 6, 8, 10, 12]
        assert [k for k in range(60) if 1 in ran[k]] == list(range(7))
        assert [k for k in range(60) if 2 in ran[k]] == list(range(10))
        assert np.all(ledger.spending.epsilons(60)[:2] <= tight)
        with raises(BudgetError, "ledger.not-allowed", "step 8"):
            ledger.charge(8, np.array([0, 1]))


def test_a_plan_solved_for_the_budget_runs_whole(tmp_path):
    exact = epsilon([STEP.times(40)], DELTA)
    with opened(tmp_path, "a", [account(budget=exact)]) as ledger:
        assert len(take(ledger, 39)) == 1
        assert ledger.spending.epsilons(40)[0] == exact


def test_an_epoch_is_paid_whole_and_refused_whole(tmp_path):
    release = Release("shuffle", 0.1, 100, 10, 5.0)
    two = epsilon([release.times(2)], DELTA)
    with opened(tmp_path, "a", [account(release=release, budget=two)], block=3) as ledger:
        take(ledger, 0)
        assert costs(tmp_path) == {"a": ((release,),)}
        assert ledger.spending.limits.tolist() == [20]
        for k in range(40):
            take(ledger, k)
        assert costs(tmp_path) == {"a": ((release.times(2),),)}
        assert ledger.spending.epsilons(40)[0] == two


def test_no_noise_is_refused_by_a_budget_and_recorded_without_one(tmp_path):
    silent = Release("full", 1.0, 50, 50, 0.0)
    with opened(tmp_path, "a", [account(release=silent, budget=100.0)]) as ledger:
        assert len(take(ledger, 0)) == 0
        assert ledger.head == (0, EMPTY_HASH)
    run_steps(tmp_path, "b", [account(release=silent)], 40)
    assert spent(tmp_path) == np.inf


def test_a_resumed_run_is_not_charged_twice(tmp_path):
    run_steps(tmp_path, "a", [account(0), account(1)], 13, block=5)
    assert spent(tmp_path) == epsilon([STEP.times(15)], DELTA)
    resumed = run_steps(tmp_path, "a", [account(0), account(1)], 40, block=5, start=8)
    assert spent(tmp_path) == epsilon([STEP.times(40)], DELTA)
    again = run_steps(tmp_path, "a", [account(0), account(1)], 40)
    assert again.head == resumed.head


def test_a_resumed_run_keeps_what_it_paid_for_under_a_budget_now_spent(tmp_path):
    run_steps(tmp_path, "a", [account()], 10, block=10)
    run_steps(tmp_path, "b", [account()], 40)
    with opened(tmp_path, "a", [account(budget=0.5)]) as ledger:
        assert ledger.spending.limits.tolist() == [10]
        assert len(take(ledger, 9)) == 1
        assert len(take(ledger, 10)) == 0


def test_a_peer_that_its_budget_stopped_does_not_go_on_because_others_paid_further(tmp_path):
    tight = epsilon([STEP.times(7)], DELTA)
    accounts = [account(0, budget=tight), account(1)]
    run_steps(tmp_path, "a", accounts, 20, block=20)
    with opened(tmp_path, "a", accounts) as ledger:
        assert ledger.spending.limits.tolist() == [7, 40]


def test_who_draws_afresh_pays_for_every_step_it_takes(tmp_path):
    with opened(tmp_path, "a", [account(budget=100.0)], block=1, fresh=True) as ledger:
        for k in range(6):
            take(ledger, k)
    with opened(tmp_path, "b", [account(budget=100.0)], block=1, fresh=True, start=6) as ledger:
        take(ledger, 6)
    assert costs(tmp_path) == {"a": ((STEP.times(6),),), "b": ((STEP,),)}
    with opened(tmp_path, "c", [account(budget=100.0)], block=1, fresh=True, start=3) as ledger:
        take(ledger, 3)  # steps taken again from a checkpoint, with other noise
        assert ledger.spending.epsilons(4)[0] == epsilon([STEP.times(8)], DELTA)
    assert spent(tmp_path) == epsilon([STEP.times(8)], DELTA)


def test_a_run_that_changed_its_mechanism_is_refused(tmp_path):
    run_steps(tmp_path, "a", [account()], 10, block=10)
    for other in (account(release=Release("full", 1.0, 50, 50, 21.0)), account(active=np.arange(40) != 5)):
        with raises(BudgetError, "ledger.other-plan", "0 to 10"):
            opened(tmp_path, "a", [other])
    opened(tmp_path, "a", [account()]).close()  # and the lock was let go of


def test_the_head_of_a_checkpoint_is_checked(tmp_path):
    with opened(tmp_path, "a", [account(3), account(9)], block=4) as ledger:
        ledger.check_head(None)
        take(ledger, 0)
        head = json.loads(json.dumps(ledger.head))
        ledger.check_head(head)
        take(ledger, 4)
        ledger.check_head(head)
        with raises(BudgetError, "ledger.stale", "digits.jsonl.* 3 .* 7"):
            ledger.check_head([7, "f" * 64])


# --- crashes ---


class Killed(BaseException):
    """Stands for SIGKILL: nothing handles it."""


class Disk:
    """Writes and fsyncs of the ledgers, dying at the n-th call; what was not synced is left in part."""

    def __init__(self, monkeypatch, die_at: int) -> None:
        self.calls, self.die_at, self.synced = 0, die_at, {}
        self._write, self._fsync = os.write, os.fsync
        monkeypatch.setattr(ledger_module.os, "write", self.write)
        monkeypatch.setattr(ledger_module.os, "fsync", self.fsync)

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
    """Run until the disk dies; return the last step that was begun, or -1."""
    ran = -1
    with monkeypatch.context() as patch:
        disk, ledger = Disk(patch, die_at), None
        try:
            ledger = opened(folder, "a", accounts, block=block)
            for k in range(12):
                take(ledger, k)
                ran = k
        except Killed:
            pass
        if ledger is not None:
            ledger.close()  # the kernel would
    return ran, disk


def paid_steps(folder, peer) -> set[int]:
    path = ledger_path(folder, DATA)
    charges = (
        [charge for p in read_chain(path)[1] for charge in p.charges if peer in charge.peers] if path.exists() else []
    )
    return {k for charge in charges for steps, _ in charge.parts for a, b in steps for k in range(a, b)}


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("block", [1, 3, None])
def test_a_crash_anywhere_never_counts_too_little(tmp_path, monkeypatch, block, part):
    noise = np.where(np.arange(12) % 2, 20.0, 25.0)
    accounts = [account(0, rounds=12), account(1, noise=noise, active=np.arange(12) != 4)]
    crashes = 0
    for die_at in range(1, 200):
        folder = tmp_path / str(die_at)
        ran, disk = die(folder, accounts, monkeypatch, die_at, block)
        disk.lose_power(folder, part)
        if ledger_path(folder, DATA).exists():
            reopen(ledger_path(folder, DATA))  # drops a torn line
        for a in accounts if ran >= 0 else ():
            wanted = {k for s in a.spends for k in range(s.from_step, s.to_step) if k <= ran}
            assert paid_steps(folder, a.peer) >= wanted
        run_steps(folder, "a", accounts, 12, start=max(ran, 0), block=block)
        assert set(costs(folder)["a"]) == {canonical(s.release for s in a.spends) for a in accounts}
        if disk.calls < die_at:
            break
        crashes += 1
    assert crashes >= 6


def test_a_full_disk_stops_the_run_and_loses_nothing(tmp_path, monkeypatch):
    with opened(tmp_path, "a", [account()], block=5) as ledger:
        take(ledger, 0)

        def full(fd: int, content: bytes) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(ledger_module.os, "write", full)
            with raises(BudgetError, "ledger.disk", "No space left on device"):
                take(ledger, 5)
        with raises(BudgetError, "ledger.closed"):
            take(ledger, 5)
    run_steps(tmp_path, "a", [account()], 40, start=5)
    assert spent(tmp_path) == epsilon([STEP.times(40)], DELTA)


def test_an_interrupted_payment_counts_and_the_chain_goes_on(tmp_path, monkeypatch):
    with Ledger(tmp_path, DATA) as file:
        with monkeypatch.context() as patch:
            Disk(patch, 2)
            with pytest.raises(Killed):
                pay(file, "a", Spend(0, 1, STEP))
        pay(file, "a", Spend(1, 3, STEP.times(2)))
        assert file.head[0] == 3
    assert spent(tmp_path) == epsilon([STEP.times(3)], DELTA)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with raises(BudgetError, "ledger.folder"):
        opened(tmp_path / "file", "a", [account()])


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


@settings(max_examples=30)
@given(plans, st.floats(0.3, 2.0))
def test_no_sequence_of_runs_exceeds_a_budget_or_runs_uncounted(tmp_path_factory, runs, budget):
    folder = tmp_path_factory.mktemp("ledger")
    executed: dict[tuple[str, int], Release] = {}
    for number, (active, noise, block, cut, resumed) in enumerate(runs):
        run, step = f"run-{number}", Release("full", 1.0, 50, 50, noise)
        plan = account(budget=budget, release=step, active=active)
        for start, stop in ((0, cut), (cut, len(active))) if resumed else ((0, cut),):
            with opened(folder, run, [plan], block=block) as ledger:
                for k in range(start, min(stop, len(active))):
                    if len(take(ledger, k)):
                        assert active[k]
                        executed[run, k] = step
                recorded = spent(folder) if ledger.head[0] else 0.0
                assert epsilon(executed.values(), DELTA) <= recorded <= budget


@pytest.mark.parametrize("source", ["../../evil", "a/b", "digits"])
def test_a_ledger_lies_in_its_folder_whatever_the_source_is_called(tmp_path, source):
    assert ledger_path(tmp_path, source).parent == tmp_path
