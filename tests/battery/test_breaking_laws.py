"""The laws of the battery, each broken on purpose: it says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from battery_rows import row_of

from flower_privdec.common import files
from flower_privdec.experiment import Experiment, checkpoint, run_key, spent
from flower_privdec.flower.apps.server_app import Relay
from flower_privdec.gradients.protocol import Clipping
from flower_privdec.graph.participation import Leaving
from flower_privdec.planner import peers as planned_peers
from flower_privdec.planner import plan
from flower_privdec.privacy.ledger.spending import Spending
from flower_privdec.privacy.mechanism.correlation import Correlation
from flower_privdec.privacy.mechanism.events import Adversary, Release
from flower_privdec.privacy.noise.philox import PhiloxNoise
from flower_privdec.pushsum.coded_mix import CodedMix
from flower_privdec.reporting import ledgers
from flower_privdec.scenario import loading
from tools.battery.laws import try_case
from tools.battery.rows import Case

Break = Callable[[pytest.MonkeyPatch], None]


def relay_is_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row that a node waits for is that of the sender before."""
    true = Relay._rows_for

    def rows_for(relay: Relay, peers: np.ndarray) -> dict[str, Any]:
        sent = list(relay._outbox.items())
        relay._outbox = {key: sent[at - 1][1] for at, (key, _) in enumerate(sent)}
        return true(relay, peers)

    monkeypatch.setattr(Relay, "_rows_for", rows_for)


def setting_of_a_deep_key_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    true = loading.put

    def put(data: dict[str, Any], path: Sequence[str], value: Any) -> None:
        if len(path) < 3:
            true(data, path, value)

    monkeypatch.setattr(loading, "put", put)


def noise_is_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    true = PhiloxNoise.add_

    def add_(source: PhiloxNoise, out: Any, std: Any, *rest: Any) -> None:
        true(source, out, 0.8 * std, *rest)

    monkeypatch.setattr(PhiloxNoise, "add_", add_)


def epsilon_times(factor: float) -> Break:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        true = spent.epsilons
        monkeypatch.setattr(spent, "epsilons", lambda *given: [factor * value for value in true(*given)])

    return patch


def data_are_in_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_key, "fingerprint", lambda x, y: b"any data")


def resumed_rows_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    true = checkpoint.restored

    def restored(*given: Any) -> Any:
        read = true(*given)
        read.state.rows["x"] += 1e-6
        return read

    monkeypatch.setattr(checkpoint, "restored", restored)


def planned_epsilon_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_peers, "json_number", lambda value: value * (1 + 1e-6))


def files_are_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "OWNER_ONLY", 0o644)


def earlier_runs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spending, "_paid_before", lambda *given: ())
    monkeypatch.setattr(Spending, "_costs_elsewhere", lambda *given: [])


def everybody_keeps_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger's ε against all other peers is that against as many as a scenario names."""
    true = Release.towards

    def towards(release: Release, adversary: Adversary) -> Release:
        return true(release, Adversary(1))

    monkeypatch.setattr(Release, "towards", towards)


def ledger_command_adds_up_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    true = ledgers.epsilon_of_runs
    monkeypatch.setattr(ledgers, "epsilon_of_runs", lambda *given: 0.999 * true(*given))


def gradients_are_clipped_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gradient is clipped to a fifth more than its bound."""
    true = Clipping.coefficient

    def coefficient(clipping: Clipping, norms: Any, weight: Any) -> Any:
        return true(clipping, norms / 1.2, weight)

    monkeypatch.setattr(Clipping, "coefficient", coefficient)


def what_codecs_cut_off_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    true = CodedMix.send
    monkeypatch.setattr(CodedMix, "send", lambda *given: replace(true(*given), lost={}))


def rules_cost_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    true = plan.peer_rows

    def peer_rows(experiment: Experiment) -> list[dict[str, Any]]:
        rows = true(experiment)
        if experiment.scenario.network.robust is not None:
            for row in rows:
                row["epsilon"] *= 1 + 1e-9
        return rows

    monkeypatch.setattr(plan, "peer_rows", peer_rows)


def peers_that_left_take_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leaving, "active", lambda leaving, round_index: leaving.whole.active(round_index))


def blocks_are_charged_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of steps is charged as if an example moved it by a tenth less than it does."""

    def norm(correlation: Correlation) -> float:
        return 0.9 * float(np.linalg.norm(correlation.coefficients))

    monkeypatch.setattr(Correlation, "norm", property(norm))


@pytest.mark.parametrize(
    ("break_it", "levels", "law"),
    [
        (relay_is_off_by_one, {"graph": "ring", "runtime": "relay"}, "runtimes agree"),
        (setting_of_a_deep_key_is_lost, {"sampling": "uniform"}, "yaml, --set and Python agree"),
        (noise_is_smaller, {}, "law.noise"),
        (epsilon_times(0.97), {}, "no ε is below the truth"),
        (epsilon_times(1.05), {}, "no ε is 2 % above the truth"),
        (data_are_in_no_key, {"data": "npz", "edit": "example"}, "what changes numbers changes keys"),
        (resumed_rows_are_moved, {"ending": "stopped"}, "straight and resumed agree"),
        (planned_epsilon_is_another, {}, "plan and summary agree"),
        (files_are_for_everybody, {}, "files are private"),
        (
            earlier_runs_are_forgotten,
            {"ledger": "shared", "second": "other algorithm"},
            "no ε is below the truth",
        ),
        (everybody_keeps_secrets, {"noise": "cancelling 1"}, "no ε is below the truth"),
        (ledger_command_adds_up_wrongly, {}, "ledger and summary agree"),
        (gradients_are_clipped_too_late, {"clip": "unequal"}, "law.sensitivity"),
        (what_codecs_cut_off_is_lost, {"codec": "int8"}, "mass is kept"),
        (rules_cost_epsilon, {"trust": "robust"}, "codecs, rules and lies cost no ε"),
        (peers_that_left_take_steps, {"participation": "away"}, "who is away takes no step"),
        (blocks_are_charged_too_little, {"noise": "correlated"}, "no ε is below the truth"),
        (blocks_are_charged_too_little, {"noise": "correlated"}, "noise of steps is what is drawn"),
        (blocks_are_charged_too_little, {"noise": "cancelling correlated"}, "no ε is below the truth"),
        (everybody_keeps_secrets, {"noise": "cancelling correlated"}, "no ε is below the truth"),
    ],
    ids=[
        "relay",
        "settings",
        "noise",
        "too little",
        "too much",
        "keys",
        "resume",
        "plan",
        "files",
        "second run",
        "adversaries",
        "ledger",
        "clipping",
        "codec",
        "rule",
        "away",
        "blocks",
        "whitened",
        "blocks of pairs",
        "adversaries of blocks",
    ],
)
def test_a_law_that_is_broken_is_seen(
    break_it: Break, levels: dict[str, str], law: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    outcome = try_case(Case.of(row_of(**levels), tmp_path / "row"))
    assert law in [violation.law for violation in outcome.violations], outcome
