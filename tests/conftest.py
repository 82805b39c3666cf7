"""Small scenarios that several tests share, and how all tests are run."""

import ast
import gc
import os
import resource
import sys

# One thread for each process: tests' tensors are tiny, and threads that wait for each other take three times the CPU.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tiny_scenario import TINY

from flower_privdec.experiment import Experiment
from flower_privdec.scenario import Scenario, parse_scenario

# Compiled modules are reused: compiling takes 7 CPU seconds where tests are collected, and 0.5 in a process of theirs.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.pop("COLUMNS", None)  # readline, in the process that starts those of `pytest -n`, sets it

# The core runs without Flower; so do all tests of the core.
collect_ignore_glob = [] if find_spec("flwr") else ["flower/*"]

# Python 3.11 fails where two threads parse at once ("AST constructor recursion depth mismatch"), as numpy.load does in
# the Flower apps of peers that are threads of a test.
if sys.version_info < (3, 12):
    _parse, _parsing = ast.parse, Lock()

    def _parse_alone(*arguments: Any, **options: Any) -> Any:
        with _parsing:
            return _parse(*arguments, **options)

    ast.parse = _parse_alone

# Examples that are the same in each run, however long they take: no run fails by luck. `pytest
# --hypothesis-profile=explore` looks at others.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]}
settings.register_profile("explore", **PATIENT)
settings.register_profile("same", derandomize=True, **PATIENT)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="a sample for the inner loop: see `sample` in conftest.py")
    parser.addoption("--cpu", type=int, metavar="N", help="print CPU seconds by room, file, and the N dearest tests")


def pytest_configure() -> None:
    """Look for no garbage while tests are collected: what is imported stays, and a look takes half a CPU second."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave what is there when tests begin to no later garbage collection: half a second of CPU for each full one."""
    gc.collect()
    gc.freeze()
    gc.enable()
    _cpu_mark[0] = _cpu_seconds()


def pytest_unconfigure() -> None:
    """Free triton's objects, if it was imported: at exit it would print each that is left."""
    if "triton" in sys.modules:
        gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With --cpu, give each report of a phase (setup, call, teardown) the CPU seconds since the one before."""
    report = yield
    if item.config.getoption("--cpu"):
        before, _cpu_mark[0] = _cpu_mark[0], _cpu_seconds()
        report.cpu = _cpu_mark[0] - before
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With --cpu, print the CPU seconds of all tests, of each room and file, and of the tests that took most."""
    if not config.getoption("--cpu"):
        return
    test, file, room = Counter[str](), Counter[str](), Counter[str]()
    reports = (report for some in terminalreporter.stats.values() for report in some if hasattr(report, "cpu"))
    for report in reports:
        path = report.nodeid.partition("::")[0]
        for total, name in ((test, report.nodeid), (file, path), (room, path.rpartition("/")[0])):
            total[name] += report.cpu
    terminalreporter.section(f"CPU seconds: {test.total():.1f} in tests, {_cpu_seconds():.1f} in all")
    for total, most in ((room, None), (file, None), (test, config.getoption("--cpu"))):
        for name, seconds in total.most_common(most):
            terminalreporter.write_line(f"{seconds:8.2f}  {name}")


_cpu_mark = [0.0]  # at the end of the last phase


def _cpu_seconds() -> float:
    """Return the CPU seconds, user and system, of this process and of all below it that are waited for or still run."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    running = sum(_ticks_below(os.getpid())) / os.sysconf("SC_CLK_TCK")
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + running


def _ticks_below(process: int) -> Iterator[int]:
    """Yield the clock ticks of the processes that a process started and that still run, where the system tells."""
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # it ended just now
            for child in map(int, children.read_text().split()):
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                yield sum(map(int, fields[11:15]))  # its own, and those of its children that it has waited for
                yield from _ticks_below(child)


def sample(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return a sample of the tests that are not slow: log8(n) cases of one with n >= 8 (a law), 1 in 10 of the others.

    Hashes of their names decide, so that the choice stays as it is when other tests come or go.
    """
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    least = {
        item
        for name, cases in functions.items()
        if len(cases) >= 8 or _digest(name)[0] < 26
        for item in sorted(cases, key=lambda item: _digest(item.nodeid))[: max(1, len(cases).bit_length() // 3)]
    }
    return [item for item in items if item in least]


def _digest(name: str) -> bytes:
    return sha256(name.encode()).digest()


@pytest.fixture(scope="session")
def some(pytestconfig: pytest.Config) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return what takes all of some cases, or with --quick the first of every four."""
    return lambda cases: cases[::4] if pytestconfig.getoption("--quick") else cases


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take a sample where that is asked for; put slow tests first, so that none runs on alone at the end."""
    if config.getoption("--quick"):
        chosen = set(sample(items))
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Let fsync return at once in the tests' own process, some milliseconds each of many thousand times.

    No test cuts the power, and a process that is killed loses nothing that it has written. Processes that tests start
    wait as ever, and tests of what is synced, and when, put a function of their own here.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", os.fstat)  # which refuses, too, what is no open file
        yield


@pytest.fixture
def pictures() -> None:
    """Let commands draw the pictures of a run."""


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands draw no picture of a run, which takes half a CPU second, unless a test asks for `pictures`."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("flower_privdec.reporting.plots.save_run_plots", lambda folder: [])


@pytest.fixture
def tiny_text() -> str:
    """Return the YAML of a scenario that runs in well under a second."""
    return TINY


@pytest.fixture
def tiny() -> Callable[..., Scenario]:
    """Return a maker of tiny scenarios: tiny("rounds=3", ...)."""
    return lambda *settings: parse_scenario(TINY, overrides=settings)


@pytest.fixture
def build(tiny: Callable[..., Scenario]) -> Callable[..., Experiment]:
    """Return a maker of built tiny experiments."""
    return lambda *settings: Experiment.build(tiny(*settings))


@pytest.fixture
def alike() -> Callable[[Experiment, Experiment], Experiment]:
    """Return a function that gives an experiment the keys of another, so that both draw the same noise and batches."""

    def with_keys_of(experiment: Experiment, other: Experiment) -> Experiment:
        sampler = experiment.own.sampler.like(keys=other.own.sampler.keys)
        return replace(experiment, own=replace(experiment.own, keys=other.own.keys, sampler=sampler))

    return with_keys_of


@pytest.fixture
def label_partitions() -> None:
    """Skip a test where the library that partitions by label is not installed."""
    pytest.importorskip("flwr_datasets")
