"""What limits a neighbour that lies: a rule that says how much of each neighbour's model counts.

A peer measures how every neighbour's model relates to its own (`Seen`), and a rule answers with one number for each:
1 takes the neighbour as it is, 0 puts the peer itself in its place, and a number between moves the neighbour's model
that far from the peer's own.

    counted_j = own + kept_j (model_j - own)

Push-sum mixes pairs of x and w, whose model is x / w. A rule moves the model only: the weight w of a share is added as
it came, so the sum of all weights stays what it was, whatever anybody sends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from flower_privdec.common.catalogue import ROBUST_RULES, RobustKeys
from flower_privdec.common.fields import OwnSection, section_from
from flower_privdec.common.user_code import load_own, users_code

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Seen:
    """How the models of a peer's neighbours were when each last came, N of them that came at least once.

    Attributes:
        distances: from the peer's own model as it was then, [N]; inf if a model was not finite.
        progress: how far each has come along the peer's own way, [2, N]: the projection of its model on the peer's own,
            over the length of that; first from zero, then from the model with which all began. 1 is as far, 0 is not at
            all, below 0 is the other way. -inf if a model was not finite.
        moved: how far the peer's own model is from the one with which all began.
        ahead: how much farther than the peer itself each has come along that way, on average over its last exchanges,
            [2, N]: a distance, from zero and from the model with which all began; below 0 is behind.
        steady: how far each has been from the middle of all *on average*, [N]. What points elsewhere in each exchange,
            as noise does, counts in it as in `distances`, and what always points the same way some times as much.
    """

    distances: Numbers
    progress: Numbers
    moved: float
    ahead: Numbers
    steady: Numbers


class RobustRule(ABC):
    """Decides how much of each neighbour's model counts.

    A rule of the package is one file in `core/rules`. One of a user's own is a subclass in a module that the scenario
    names, `network.robust: {module: my_rules:Mine, arguments: {byzantine: 1}}`.

    Attributes:
        name: what a scenario calls it, for one of the package.
        line: its line in `privdec list`.
        Section: declares its keys.
        byzantine: how many of a peer's neighbours may lie.
    """

    name: ClassVar[str]
    line: ClassVar[str]
    Section: ClassVar[type[RobustKeys]] = RobustKeys

    def __init__(self, byzantine: int) -> None:
        self.byzantine = byzantine

    @abstractmethod
    def kept(self, seen: Seen) -> Numbers:
        """Return how much of each neighbour's difference from the peer counts, [N], from 0 to 1.

        Privacy: a function of models that were released, and of the peer's own as it was released: it costs no ε.
        """


def robust_rule(section: OwnSection | RobustKeys | None) -> RobustRule | None:
    """Build the rule that a scenario names; None if it names none.

    Raises:
        ScenarioError: a user's class cannot be imported, is not a `RobustRule`, or cannot be built.
    """
    if section is None:
        return None

    rule: RobustRule
    if isinstance(section, RobustKeys):
        built_in: Any = ROBUST_RULES[section.kind]
        rule = built_in(**section.options())
        return rule

    own = load_own(
        section.module,
        "network.robust.module",
        accepts=lambda part: isinstance(part, type) and issubclass(part, RobustRule),
        must_be="a subclass of flower_privdec.core.robust_rule.RobustRule",
    )
    where = f"network.robust.module={section.module!r}"
    arguments = section_from(own.Section, section.arguments, where).options()
    with users_code(f"{where} could not be called with {arguments}", "code.fails"):
        rule = own(**arguments)
    return rule


def of_the_others(values: Numbers, rank: int) -> Numbers:
    """Return for each of N values the `rank`-th largest of the others, [N]; NaN if there are fewer.

    Args:
        rank: from 1.
    """
    found = np.full(len(values), np.nan)
    if len(values) <= rank:
        return found

    descending = np.argsort(-values, kind="stable")
    found[descending[:rank]] = values[descending[rank]]
    found[descending[rank:]] = values[descending[rank - 1]]
    return found
