"""Whether a peer goes on with other data than it began with, as its owner may say when it starts again.

Its checkpoint holds a model, push-sum mass and shares under way, all of them made of what was released, whose ε the
ledger has. To go on from there with other examples is sequential composition: what was released with the old examples
stays charged in the peer's ledger, each further step is charged beside it, and so an example that is among both pays
for both. An example that is only among one of them pays as if it were among both, for a ledger knows no examples. The
noise of further steps is solved for the number of new examples, and the ledger allows those that fit the budget.

A row that no other peer may see, as a table of gradients, remembers the old examples without noise. What a step with
new examples would then reveal of the old ones is not what the step declares, so such a state is not gone on from.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from flower_privdec.common.errors import ScenarioError
from flower_privdec.core.optimizers import PREFIX
from flower_privdec.experiment.checkpoint import Checkpoint
from flower_privdec.privacy.ledger.segments import RunName


def is_of_other_data(checkpoint: Checkpoint, run: RunName) -> bool:
    """Return whether a checkpoint is of a run of the same scenario with other examples."""
    made = checkpoint.run
    if made.id == run.id or made.scenario != run.scenario:
        return False

    # Without privacy a run has no partition, and its id is made of its data.
    return made.partition != run.partition or not run.partition


def check_rows(path: Path, checkpoint: Checkpoint, open_rows: Iterable[str]) -> None:
    """Refuse a state that remembers examples in rows without noise.

    Args:
        path: where the checkpoint is.
        open_rows: those that other peers may see.

    Raises:
        ScenarioError: it has such rows.
    """
    allowed = {*open_rows}
    closed = sorted(name for name in checkpoint.state.rows if name not in allowed and not name.startswith(PREFIX))
    if closed:
        raise ScenarioError(
            f"{path}: --new-data: its {', '.join(closed)} remember the old data without noise, so the peer cannot go "
            "on with other data from there; put the old data back, or begin another run with the same privacy.ledger",
            code="checkpoint.remembers-data",
        )
