"""The ledger: nothing is run that was not counted, whatever crashes; nothing is believed that was changed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from flower_privdec.common.errors import BudgetError
from flower_privdec.privacy.accountant.accounting import epsilon, epsilon_of_runs
from flower_privdec.privacy.ledger import ledger as ledger_module
from flower_privdec.privacy.ledger import segments
from flower_privdec.privacy.ledger.cohort_ledger import CohortLedger
from flower_privdec.privacy.ledger.ledger import Ledger
from flower_privdec.privacy.ledger.segments import (
    EMPTY_HASH,
    Charge,
    Entry,
    RunName,
    chained,
    ledger_path,
    read_chain,
    read_entries,
    sealed_path,
    sealed_segments,
    verified,
)
from flower_privdec.privacy.ledger.spending import (
    Account,
    charged_by_peer,
    charged_until,
    releases_in,
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


def charge_of(peers, spend: Spend) -> Charge:
    return Charge.of(peers, [([(spend.from_step, spend.to_step)], spend.release)])


def pay(file: Ledger, run: str, spend: Spend, peers=(0,)) -> None:
    file.append(run_name(run), spend.from_step, spend.to_step, [charge_of(peers, spend)])


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
        "from flower_privdec.common.errors import BudgetError\n"
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
            lambda ls: [ls[0], ls[1].replace(b'"noise_multiplier":20.0', b'"noise_multiplier":90.0'), *ls[2:]],
            2,
            "edited",
        ),
        (lambda ls: [*ls[:2], ls[2].replace(b'"from_step":1', b'"from_step":0'), *ls[3:]], 3, "edited"),
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
def test_a_changed_ledger_is_refused_by_file_and_line(written, change, line, what):
    lines = written.read_bytes().splitlines(keepends=True)
    changed = b"".join(change(lines))
    assert changed != b"".join(lines)
    written.write_bytes(changed)
    with raises(BudgetError, "ledger.damaged", f"{written.name} line {line}: .*{what}"):
        reopen(written)
    assert written.read_bytes() == changed
    with raises(BudgetError, "ledger.damaged", f"line {line}"):
        read_chain(written)


def test_an_endless_or_volatile_ledger_is_refused(tmp_path):
    for device in ("/dev/null", "/dev/full"):
        link = tmp_path / device.strip("/").replace("/", "-") / f"{DATA}.jsonl"
        link.parent.mkdir()
        link.symlink_to(device)
        with raises(BudgetError, "ledger.not-a-file"):
            reopen(link)


def test_a_rehashed_line_breaks_the_chain_after_it(written):
    lines = written.read_bytes().splitlines(keepends=True)
    lines[2], _ = chained([{"from_step": 7}], (2, json.loads(lines[1])["hash"]))
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
    header, odd = map(json.loads, written.read_bytes().splitlines()[:2])
    change(odd)
    del header["hash"], odd["hash"]
    written.write_bytes(chained([header, odd], (0, EMPTY_HASH))[0])
    with raises(BudgetError, "ledger.damaged", "line 2"):
        reopen(written)


def test_a_torn_last_line_is_dropped_only_if_incomplete(written, caplog):
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
    assert first == DATA
    assert [(p.run, p.from_step, p.to_step) for p in paid] == [(run_name("a"), k, k + 1) for k in range(4)]
    with raises(BudgetError, "ledger.unreadable"):
        read_chain(written.with_name("nothing"))


POSITION = ("from_step", "to_step")


def test_a_payment_says_this_and_no_more(written):
    header, line, again, *_ = map(json.loads, written.read_text().splitlines())
    assert header.keys() == {"index", "format", "source", "segment", "previous", "lines", "charged", "hash"}
    assert line.keys() == {"index", "run", "scenario", "environment", "partition", *POSITION, "charges", "hash"}
    assert line["charges"][0].keys() == {"peers", "releases"}
    assert again.keys() == {"index", "from_step", "hash"}  # it has all else of the line before


def test_a_line_omits_only_what_it_repeats(tmp_path):
    lengths = []
    with Ledger(tmp_path, DATA) as file:
        for boot, run, peers, noise, count in [
            *((7, "a", (0,), 20.0, 1), (7, "a", (0,), 20.0, 1), (9, "a", (0,), 20.0, 1), (9, "b", (0,), 20.0, 1)),
            *((9, "b", (0, 2), 20.0, 1), (9, "b", (0, 2), 30.0, 1), (9, "b", (0, 2), 30.0, 2)),
        ]:
            file.name_lines(boot)
            release = replace(STEP, noise_multiplier=noise).times(count)
            for start in (3, 5):
                pay(file, run, Spend(start, start + count, release), peers)
            lengths += [len(line) for line in file.path.read_bytes().splitlines()[-2:]]
    entries = read_chain(file.path)[1]
    assert [entry.boot for entry in entries] == [7] * 4 + [9] * 10
    assert [entry.run.id for entry in entries] == ["a"] * 6 + ["b"] * 8
    assert [entry.charges[0].peers for entry in entries] == [(0,)] * 8 + [(0, 2)] * 6
    assert [entry.charges[0].releases[0].noise_multiplier for entry in entries] == [20.0] * 10 + [30.0] * 4
    assert [(entry.from_step, entry.to_step) for entry in entries[-2:]] == [(3, 5), (5, 7)]
    assert [length < 120 for length in lengths] == [False, True, True, True] + [False, True] * 5
    assert_adds_up(file.path, entries)


# --- whose ledger: the source's, and each example is charged what any peer paid ---


def test_differently_partitioned_runs_add_up_to_the_dearest(tmp_path):
    dear, cheap = Release("full", 1.0, 9, 9, 15.0), Release("full", 1.0, 90, 90, 40.0)
    run_steps(tmp_path, "a", [account(0, release=cheap), account(1, release=dear)], 40)
    run_steps(tmp_path, "b", [account(7, release=dear), account(8, release=cheap)], 40)
    assert spent(tmp_path) == pytest.approx(epsilon([dear.times(80)], DELTA), rel=1e-3)
    assert spent(tmp_path) >= epsilon([dear.times(80)], DELTA)
    third = spending_of(tmp_path, DATA, run_name("c"), [account(0, release=cheap)])
    expected = epsilon([dear.times(80), cheap.times(40)], DELTA)
    assert expected <= third.epsilons(40)[0] <= expected * 1.001


def test_runs_of_one_partition_add_up_peer_by_peer(tmp_path):
    dear, cheap = Release("full", 1.0, 9, 9, 15.0), Release("full", 1.0, 90, 90, 40.0)
    both = [account(0, release=cheap), account(1, release=dear)]
    same, other = replace(run_name("b"), partition="same"), replace(run_name("c"), partition="other")
    with CohortLedger(tmp_path, DATA, replace(run_name("a"), partition="same"), both) as ledger:
        for step in range(40):
            take(ledger, step)
    for run, first in ((same, cheap), (other, dear)):
        spending = spending_of(tmp_path, DATA, run, both)
        for peer, own in enumerate((cheap, dear)):
            expected = epsilon([(own if peer == 1 else first).times(40), own.times(40)], DELTA)
            assert expected <= spending.epsilons(40)[peer] <= expected * 1.001


def test_equal_peers_are_one_alternative(tmp_path):
    run_steps(tmp_path, "a", [account(peer) for peer in range(50)], 40)
    assert costs(tmp_path) == {"a": ((STEP.times(40),),)}


def test_other_runs_over_one_source_share_its_budget(tmp_path):
    budget = epsilon([STEP.times(60)], DELTA)
    run_steps(tmp_path, "a", [account(budget=budget)], 40)
    with opened(tmp_path, "b", [account(5, budget=budget)]) as ledger:
        assert ledger.spending.limits.tolist() == [20]
        assert ledger.spending.epsilons(0).tolist() == [epsilon([STEP.times(40)], DELTA)]
        assert ledger.spending.epsilons(40)[0] <= budget
    with CohortLedger(tmp_path, "mnist", run_name("b"), [account(budget=budget)]) as ledger:
        assert ledger.spending.limits.tolist() == [40]  # other data


# --- lost lines that are charged without asking ---


def test_confirmed_lines_are_all_charged_and_once(tmp_path):
    with opened(tmp_path, "a", [account()]) as ledger:
        assert ledger.charge_confirmed({5: 30}, {5: 32, 6: 1}) == 33
        assert ledger.charge_confirmed({5: 30}, {5: 32, 6: 1}) == 0
        assert ledger.charged_for_lost() == 33
    with opened(tmp_path, "a", [account()]) as ledger:
        assert ledger.charged_for_lost() == 33
        assert ledger.lacks({5: 32, 6: 1}) == 0


def test_a_lie_costs_a_few_lines_for_ever(tmp_path):
    """However often it is told, and in however small steps: the ledger remembers."""
    charged = 0
    with opened(tmp_path, "a", [account()]) as ledger, raises(BudgetError, "ledger.not-confirmed", "4"):
        for lines in range(1, 10):
            charged += ledger.charge_confirmed({}, {9: lines})
    assert charged == 4
    with opened(tmp_path, "a", [account()]) as ledger:
        with raises(BudgetError, "ledger.not-confirmed"):
            ledger.charge_confirmed({5: 30}, {5: 30, 10: 1})
        assert ledger.charged_for_lost() == 4  # not the 30 either: to pay for a part would leave ε too small


# --- a cohort's ledger ---


@pytest.mark.parametrize("block", [1, 7, 1000, None])
def test_a_finished_runs_cost_does_not_depend_on_blocks(tmp_path, block):
    active = np.random.default_rng(0).random((2, 40)) < 0.5
    noise = np.linspace(20, 30, 40)
    accounts = [account(4, active=active[0]), account(7, active=active[1], noise=noise)]
    run_steps(tmp_path, "a", accounts, 40, block=block)
    found = costs(tmp_path)["a"]
    for a, mask in zip(accounts, active, strict=True):
        assert canonical(s.release for s in a.spends) in found
        assert sum(s.release.steps for s in a.spends) == mask.sum()
    assert len(found) == 2


def test_blocks_reserve_as_stated_within_the_plan(tmp_path):
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


@pytest.mark.parametrize("kind", ["alike", "other noise", "idle between", "limited", "epochs"])
def test_a_step_is_charged_alike_whatever_was_before(tmp_path, kind):
    accounts = {
        "alike": [account(0), account(1, rounds=25)],
        "other noise": [account(noise=np.repeat([10.0, 20.0], 20))],
        "idle between": [account(active=np.tile([True, True, False], 13))],
        "limited": [account(0, budget=epsilon([STEP.times(7)], DELTA)), account(1)],
        "epochs": [Account(0, [Spend(k, k + 10, Release("shuffle", 0.1, 100, 1, 5.0)) for k in (0, 10)], None, DELTA)],
    }[kind]
    with opened(tmp_path, "a", accounts, block=1) as ledger:
        steps = [*range(45), 3, 30]
        assert [ledger._charges_of(step) for step in steps] == [tuple(ledger._charges(s, s + 1, s)) for s in steps]


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


EPOCHS = Release("shuffle", 1 / 3, 30, 10, 5.0)  # of three steps each
GROUPS = Release("poisson", 0.1, 100, 10, 5.0)  # of steps that are paid three at a time


@pytest.mark.parametrize("release", [EPOCHS, GROUPS], ids=["epochs", "groups"])
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(
    "active",
    [[1, 1, 1, 0, 1, 1], [0, 1, 1, 0, 0, 1], [1, 1, 0, 0, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0, 0, 0, 1]],
)
def test_an_epoch_that_begins_idle_is_paid(tmp_path, release, ahead, active):
    is_active = np.array(active, dtype=bool)
    plan = Account(0, plan_spends(release, is_active, together=3), None, DELTA)
    with opened(tmp_path, "a", [plan], block=1, fresh=True) as ledger:
        for step in np.flatnonzero(is_active).tolist():
            ledger.charge(step, np.array([0]))
            if ahead:
                ledger.reserve()
    assert costs(tmp_path) == {"a": ((release.times(len(plan.spends)),),)}


def test_zero_noise_is_refused_by_a_budget_only(tmp_path):
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


def test_a_resumed_run_keeps_paid_steps_beyond_its_budget(tmp_path):
    run_steps(tmp_path, "a", [account()], 10, block=10)
    run_steps(tmp_path, "b", [account()], 40)
    with opened(tmp_path, "a", [account(budget=0.5)]) as ledger:
        assert ledger.spending.limits.tolist() == [10]
        assert len(take(ledger, 9)) == 1
        assert len(take(ledger, 10)) == 0


def test_a_stopped_peer_stays_stopped_whatever_others_paid(tmp_path):
    tight = epsilon([STEP.times(7)], DELTA)
    accounts = [account(0, budget=tight), account(1)]
    run_steps(tmp_path, "a", accounts, 20, block=20)
    with opened(tmp_path, "a", accounts) as ledger:
        assert ledger.spending.limits.tolist() == [7, 40]


def test_fresh_draws_pay_for_every_step(tmp_path):
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


@pytest.mark.parametrize("durable", [True, False])
def test_an_interrupt_before_a_payment_closes_the_ledger(tmp_path, monkeypatch, durable):
    def interrupt(fd: int, content: bytes) -> int:
        raise Killed

    with Ledger(tmp_path, DATA, durable=durable) as file:
        pay(file, "a", Spend(0, 1, STEP))
        with monkeypatch.context() as patch:
            patch.setattr(ledger_module.os, "write", interrupt)
            with pytest.raises(Killed):
                pay(file, "b", Spend(0, 1, STEP))
        with raises(BudgetError, "ledger.closed"):
            pay(file, "b", Spend(1, 2, STEP))
        assert charged_until(file.entries, "b") == 0
    with Ledger(tmp_path, DATA) as file:
        assert charged_until(file.entries, "b") == 0


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
def test_no_sequence_of_runs_exceeds_or_evades_a_budget(tmp_path_factory, runs, budget):
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
def test_a_ledger_stays_in_its_folder_whatever_the_source(tmp_path, source):
    assert ledger_path(tmp_path, source).parent == tmp_path


# --- segments ---


@pytest.fixture
def short(monkeypatch):
    """Seal a segment after about three of the first entries."""
    monkeypatch.setattr(ledger_module, "SEGMENT", 800)


@pytest.fixture
def segmented(tmp_path, short):
    """Write a ledger of 12 payments of two processes and two mechanisms in several segments; return its path."""
    for boot in (7, 9):
        with Ledger(tmp_path, DATA) as file:
            file.name_lines(boot)
            for k in range(6):
                pay(file, f"{boot}", Spend(k, k + 1, replace(STEP, noise_multiplier=20.0 + k % 2)))
    assert len(sealed_segments(file.path)) >= 3
    return file.path


def assert_adds_up(path, entries: list, heads=()) -> None:
    """Check that a ledger holds what its entries add up to, and has its heads."""
    charges = [charge for entry in entries for charge in entry.charges]
    lines: dict[int, int] = {}
    for entry in entries:
        lines |= {entry.boot: lines.get(entry.boot, 0) + 1} if entry.boot else entry.witnessed
    if path.stat().st_size:
        assert read_chain(path) == (DATA, entries)
    with Ledger(path.parent, DATA) as file:
        assert releases_in(file.entries) == canonical(r for charge in charges for r in charge.releases)
        assert runs_in(file.entries) == runs_in(entries) == runs_in(read_entries(path.parent, DATA))
        for run in {entry.run.id for entry in entries}:
            assert charged_until(file.entries, run) == max(e.to_step for e in entries if e.run.id == run)
            assert charged_by_peer(file.entries, run) == charged_by_peer(entries, run)
        assert (file.lines, file.n_entries) == (lines, len(entries))
        for length, digest in heads:
            file.check_head((length, digest))
            with raises(BudgetError, "ledger.stale"):
                file.check_head((length, "0" * 64))
        with raises(BudgetError, "ledger.stale"):
            file.check_head((file.head[0] + 1, "0" * 64))


def test_segments_add_up_to_what_one_file_does(segmented, tmp_path, monkeypatch):
    entries = read_chain(segmented)[1]
    assert_adds_up(segmented, entries)
    monkeypatch.undo()
    with Ledger(tmp_path / "whole", DATA) as file:
        for entry in entries:
            file.name_lines(entry.boot)
            file.append(entry.run, entry.from_step, entry.to_step, entry.charges)
    assert not sealed_segments(file.path)
    assert read_chain(file.path)[1] == entries
    assert runs_in(read_entries(segmented.parent, DATA)) == runs_in(entries)


def test_opening_reads_only_the_last_segment(segmented, monkeypatch):
    read = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path), real(path))[1])
    with Ledger(segmented.parent, DATA) as file:
        assert len(file.entries) < 12
        assert read == []
        file.check_head(file.head)
    read_entries(segmented.parent, DATA)
    assert read == [segmented]


def test_a_header_is_at_most_half_of_its_segment(tmp_path, short):
    with Ledger(tmp_path, DATA) as file:
        for k in range(60):  # of as many mechanisms
            pay(file, "a", Spend(k, k + 1, replace(STEP, noise_multiplier=20.0 + k)))
    sealed = [sealed_path(file.path, number) for number in sorted(sealed_segments(file.path))]
    for path in sealed[1:]:
        header = path.read_bytes().splitlines(keepends=True)[0]
        assert len(header) < path.stat().st_size / 2
    assert len(sealed) < 8
    assert_adds_up(file.path, read_chain(file.path)[1])


def edit(path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


def rehashed(path) -> None:
    """Recompute the hashes of a segment whose content was edited."""
    first, *rest = [json.loads(line) for line in path.read_bytes().splitlines()]
    for body in (first, *rest):
        del body["hash"]
    path.write_bytes(chained([first, *rest], (first["index"], first["previous"]))[0])


def exchange(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def other_ledger(path: Path) -> Path:
    """Write a ledger of another run over the same data, in as many segments, and return its path."""
    wanted = len(sealed_segments(path))
    with Ledger(path.parent / "other", DATA) as file:
        step = 0
        while len(sealed_segments(file.path)) < wanted:
            pay(file, "other", Spend(step, step + 1, replace(STEP, noise_multiplier=30.0 + step % 2)))
            step += 1
    return file.path


OPENING = {  # what opening refuses
    "a segment is missing": (lambda path: sealed_path(path, 1).unlink(), "ledger.segment"),
    "the last segment is missing": (lambda path: path.unlink(), "ledger.stale"),
    "the last segment is empty": (lambda path: path.write_bytes(b""), "ledger.stale"),
    "an old copy of the last segment": (lambda path: shutil.copy(sealed_path(path, 1), path), "ledger.stale"),
    "the summary was edited": (
        lambda path: edit(path, b'"noise_multiplier":20.0', b'"noise_multiplier":90.0'),
        "ledger.damaged",
    ),
    "the counts were edited": (lambda path: edit(path, b'"lines":[[7,6]', b'"lines":[[7,9]'), "ledger.damaged"),
    "a line was edited": (lambda path: edit(path, b'"from_step":5', b'"from_step":4'), "ledger.damaged"),
    "a cut copy of the last sealed one": (
        lambda path: path.write_bytes(sealed_path(path, 2).read_bytes()[:-90]),
        "ledger.stale",
    ),
    "another format": (lambda path: edit(path, b"ledger-5", b"ledger-4"), "ledger.format"),
}
VERIFYING = {  # what only reading all of it shows, for it changes no ε
    "a sealed line was edited": (lambda path: edit(sealed_path(path, 1), b'"from_step":', b'"from_step":1')),
    "a sealed segment was rewritten": (
        lambda path: (edit(sealed_path(path, 1), b'"to_step":', b'"to_step":1'), rehashed(sealed_path(path, 1)))
    ),
    "a sealed line was cut": (lambda path: sealed_path(path, 1).write_bytes(sealed_path(path, 1).read_bytes()[:-90])),
    "a segment took another's place": (lambda path: shutil.copy(sealed_path(path, 0), sealed_path(path, 1))),
    "two segments were exchanged": (lambda path: exchange(sealed_path(path, 0), sealed_path(path, 1))),
    "a segment of another run took its place": (
        lambda path: shutil.copy(sealed_path(other_ledger(path), 1), sealed_path(path, 1))
    ),
    "the last segment is that of another run": (lambda path: shutil.copy(other_ledger(path), path)),
    "the summary was forged with the lines after it": (
        lambda path: (edit(path, b'"noise_multiplier":20.0', b'"noise_multiplier":90.0'), rehashed(path))
    ),
}


@pytest.mark.parametrize("damage", OPENING)
def test_a_ledger_whose_segments_were_changed_is_not_opened(segmented, damage):
    change, code = OPENING[damage]
    change(segmented)
    with raises(BudgetError, code):
        reopen(segmented)
    with raises(BudgetError, code):
        read_entries(segmented.parent, DATA)


@pytest.mark.parametrize("damage", VERIFYING)
def test_a_sealed_segment_that_was_changed_does_not_verify(segmented, damage):
    VERIFYING[damage](segmented)
    with raises(BudgetError, "ledger.damaged"):
        list(verified(segmented))
    if "forged" not in damage and "last" not in damage:
        with Ledger(segmented.parent, DATA) as file, raises(BudgetError, "ledger.damaged"):
            file.check_head((1, "0" * 64))


def test_a_copy_from_before_sealing_is_missed_elsewhere(segmented, tmp_path, monkeypatch):
    """It looks as a crash before the next segment began: who saw later lines, a checkpoint or a neighbour, knows."""
    monkeypatch.setattr(ledger_module, "SEGMENT", 1 << 19)
    with Ledger(tmp_path, DATA) as file:
        file.name_lines(11)
        pay(file, "b", Spend(0, 1, STEP))
        full = segmented.read_bytes()
        monkeypatch.setattr(ledger_module, "SEGMENT", 1)
        pay(file, "b", Spend(1, 2, STEP))
        head = file.head
        lines = dict(file.lines)

    segmented.write_bytes(full)
    with Ledger(tmp_path, DATA) as file:
        assert file.head[0] < head[0]
        with raises(BudgetError, "ledger.stale"):
            file.check_head(head)
        with raises(BudgetError, "ledger.witnessed"):
            file.check_witnessed(lines)


def test_a_fork_of_segments_does_not_verify(segmented, tmp_path):
    copy = Path(shutil.copytree(tmp_path, tmp_path / "copy")) / segmented.name
    for path, run in ((segmented, "b"), (copy, "c")):
        with Ledger(path.parent, DATA) as file:
            before = len(sealed_segments(path))
            while len(sealed_segments(path)) < before + 2:
                pay(file, run, Spend(file.n_entries, file.n_entries + 1, STEP))
            head = file.head
    shutil.copy(copy, segmented)  # and not the sealed ones
    with raises(BudgetError, "ledger.damaged"):
        read_chain(segmented)
    with Ledger(tmp_path, DATA) as file:
        file.check_head(head)
        with raises(BudgetError, "ledger.damaged"):
            file.check_head((2, "0" * 64))


def test_an_opening_of_a_file_sealed_meanwhile_is_refused(written, monkeypatch):
    """Another process replaces the file between opening and locking, and holds the new one."""
    real = ledger_module.fcntl.flock

    def seal_first(fd: int, operation: int) -> None:
        copy = written.with_name("next")
        shutil.copy(written, copy)
        copy.replace(written)
        real(fd, operation)

    with monkeypatch.context() as patch:
        patch.setattr(ledger_module.fcntl, "flock", seal_first)
        with raises(BudgetError, "ledger.in-use"):
            reopen(written)
    reopen(written)


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def without_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(ledger_module.fcntl, "flock", without_locks)
    with raises(BudgetError, "ledger.no-locks"):
        Ledger(tmp_path, DATA)


class FaultyDisk(Disk):
    """A disk that dies, or is full from, the n-th write, flush or rename on."""

    def __init__(self, monkeypatch, folder, die_at: int, full: bool) -> None:
        self.full, self._replace, self._write_bytes = full, os.replace, Path.write_bytes
        super().__init__(monkeypatch, die_at)
        self.synced = {path.stat().st_ino: path.stat().st_size for path in folder.iterdir()}
        monkeypatch.setattr(os, "replace", self.replace)
        monkeypatch.setattr(Path, "write_bytes", lambda path, content: self.write_bytes(path, content))

    def _step(self) -> None:
        self.calls += 1
        if self.calls == self.die_at or (self.full and self.calls > self.die_at):
            raise OSError(28, "No space left on device") if self.full else Killed

    def write_bytes(self, path: Path, content: bytes) -> int:
        self._write_bytes(path, content[: len(content) // 2])
        self._step()
        return self._write_bytes(path, content)

    def replace(self, old, new) -> None:
        self._step()
        self._replace(old, new)

    def lose_power(self, folder, part: float) -> None:
        super().lose_power(folder, part)
        assert all(path.stat().st_size for path in folder.glob("*.sealed"))


actions = st.lists(
    st.tuples(
        st.sampled_from(["charge", "charge", "charge", "reopen", "kill", "full", "tear", "witnessed"]),
        st.sampled_from(["a", "b"]),  # the run
        st.sampled_from([(0,), (0, 1), (1,)]),  # the peers
        st.sampled_from([20.0, 40.0]),  # noise
        st.integers(1, 3),  # steps
        st.integers(1, 12),  # where the disk fails
        st.sampled_from([0.0, 0.5, 1.0]),  # how much of what was not flushed is left
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=60)
@given(actions, st.sampled_from([1, 900, 1500, 1 << 19]))
def test_crashes_and_segments_never_change_a_ledgers_total(tmp_path_factory, sequence, segment):
    folder = tmp_path_factory.mktemp("ledger")
    path, entries, heads, step = ledger_path(folder, DATA), [], [], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger_module, "SEGMENT", segment)
        patch.setattr(segments, "MERGED", 3)
        file, boot = Ledger(folder, DATA), 1
        for action, run, peers, noise, steps, failing, part in sequence:
            release = Release("full", 1.0, 50, 50, noise)
            file.name_lines(boot)
            wanted = Entry(
                run_name(run),
                step,
                step + steps,
                (charge_of(peers, Spend(step, step + steps, release.times(steps))),),
                boot,
            )
            more = {}
            if action == "witnessed":
                more = {"witnessed": {boot: file.lines.get(boot, 0) + 2, 999: 3}}
                lacking = {b: n for b, n in more["witnessed"].items() if n > file.lines.get(b, 0)}
                wanted = replace(wanted, boot=0, witnessed=lacking)
            failed = False
            with pytest.MonkeyPatch.context() as broken:
                disk = FaultyDisk(broken, folder, failing, action == "full") if action in ("kill", "full") else None
                try:
                    file.append(wanted.run, step, step + steps, wanted.charges, **more)
                except (Killed, BudgetError):
                    failed = True
                if disk is not None:
                    file.close()
                    if action == "kill":
                        disk.lose_power(folder, part)
            step += steps
            if action in ("kill", "full", "reopen", "tear"):
                file.close()
                if action == "tear" and not failed:
                    path.write_bytes(path.read_bytes()[: -1 - failing])
                file = Ledger(folder, DATA)
                boot += action == "reopen"
            if failed or action == "tear":  # it counts, or not, and never in part
                assert file.n_entries in (len(entries), len(entries) + 1)
                failed = file.n_entries == len(entries)
            if not failed:
                entries.append(wanted)
            assert file.n_entries == len(entries)
            heads.append(file.head)
        file.close()
        heads = [head for head in heads if head[0]]
        assert_adds_up(path, entries, heads[:: max(1, len(heads) // 4)])
