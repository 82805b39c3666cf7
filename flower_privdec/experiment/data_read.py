"""What was read of the data, and what was left: for the owner of the machine, and without counts for a summary."""

from __future__ import annotations

import numpy as np

from flower_privdec.data import Examples
from flower_privdec.data.datasets import check_fit, training_place
from flower_privdec.data.intake import told
from flower_privdec.experiment.agreement import Agreement
from flower_privdec.experiment.run_name import read_own
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.sections import placed


def data_read(agreement: Agreement, examples: Examples | None, *, counts: bool = True) -> dict[str, str]:
    """Return a line about the training examples of the peers hosted here, and one about the test set.

    Args:
        examples: of these peers; None in a process that has none.
        counts: whether to count the training examples of each class, and say what their owner should look at.

    Privacy: with counts, the first line is of private examples and covered by no ε. It stays where they are: it is
    printed or logged there, and neither written to a summary of a private run nor sent.
    """
    public = agreement.public
    lines = {}
    if examples is not None and examples.intakes:
        where = examples.intakes[0].where
        if len(examples.intakes) > 1:
            where = training_place(agreement.scenario.data.root)
        lines["train"] = told(examples.intakes, where, public.n_classes, counts=counts)
    lines["test"] = told([public.intake], public.intake.where, public.n_classes, counts=True)
    return lines


@placed
def data_of(scenario: Scenario) -> dict[str, str]:
    """Read the data of a scenario's peers and its test set, and return a line about each, see `data_read`.

    Raises:
        ScenarioError: they cannot be read, or do not fit.
    """
    agreement = Agreement.of(scenario)
    examples = read_own(agreement, np.arange(scenario.n_peers), None)
    check_fit(examples, agreement.public, scenario.data.root)
    return data_read(agreement, examples)
