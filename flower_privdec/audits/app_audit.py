"""An audit of a Flower app: of the updates that its peers protect, or of the examples that it protects in training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, chdir
from pathlib import Path
from tempfile import TemporaryDirectory

from flower_privdec.audits.loop import LoopAudit, auditing
from flower_privdec.audits.one_run import OneRun
from flower_privdec.audits.peer_updates import UpdateAudit, auditing_updates
from flower_privdec.common.arguments import check_whole
from flower_privdec.common.errors import PrivdecError, ScenarioError


def audit_app(
    run: Callable[[Path], object],
    n_nodes: int,
    *,
    trials: int,
    one_run: int | None,
    seed: int,
    on_trials: Callable[[int, int], None] = lambda count, total: None,
) -> OneRun:
    """Run an app over nodes in this process under attack, and return what that shows of ε.

    Args:
        run: runs the app once, its nodes' own folder being the given one.
        n_nodes, trials, one_run, seed, on_trials: see `api.commands.audit_app`.

    Raises:
        ScenarioError: an argument is out of range, or a ledger has payments of real training.
        RunError: nothing is protected in it, or the app fails.
    """
    check_whole({"n_nodes": n_nodes, "trials": trials, "one_run": one_run})
    if trials < 8:
        raise ScenarioError(f"trials={trials} must be >= 8", code="audit.trials")

    total = trials if one_run is None else 1
    attack: LoopAudit | UpdateAudit
    with TemporaryDirectory() as place, ExitStack() as closing:
        closing.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)  # every run would log its rounds and its ε
        if one_run is None:
            attack = closing.enter_context(auditing_updates(seed=seed))
        else:
            attack = closing.enter_context(auditing(one_run, seed=seed))

        for count in range(0, total, n_nodes):
            on_trials(count, total)
            folder = Path(place) / f"run-{count}"
            folder.mkdir()
            try:
                with chdir(folder):
                    run(folder / "nodes")
            except PrivdecError:
                # Flower may have put an error of its own in the place of why the attack refused a ledger.
                if attack.refusal is not None:
                    raise attack.refusal from None
                raise
        on_trials(total, total)
        return attack.result
