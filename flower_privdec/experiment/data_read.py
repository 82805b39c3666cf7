"""What was read of the data, and what was left: for the owner of the machine, and without counts for a summary."""

from __future__ import annotations

from flower_privdec.data.intake import told
from flower_privdec.experiment.agreement import Agreement
from flower_privdec.experiment.own_parts import OwnParts


def data_read(agreement: Agreement, own: OwnParts | None = None, *, counts: bool = True) -> dict[str, str]:
    """Return a line about the training examples of the peers hosted here, and one about the test set.

    Args:
        own: of these peers; None in a process that has none.
        counts: whether to count the training examples of each class, and say what their owner should look at.

    Privacy: with counts, the first line is of private examples and covered by no ε. It stays where they are: it is
    printed or logged there, and neither written to a summary of a private run nor sent.
    """
    public = agreement.public
    lines = {}
    if own is not None and own.examples.intakes:
        intakes = own.examples.intakes
        where = intakes[0].where
        if len(intakes) > 1:
            where = f"data.root={agreement.scenario.data.root}"
        lines["train"] = told(intakes, where, public.n_classes, counts=counts)
    lines["test"] = told([public.intake], public.intake.where, public.n_classes, counts=True)
    return lines
