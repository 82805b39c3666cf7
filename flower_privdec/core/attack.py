"""Members that lie, in a simulation: what they send is not what they have.

A scenario with a section `attack` is a test of what stops such members, and not a run whose models are of any use. Only
what a liar *sends* is changed: it trains, pays and mixes as everybody does, and its push-sum weights are as always.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from flower_privdec.common.catalogue import ATTACKS, AttackKeys
from flower_privdec.common.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor


class Attack(ABC):
    """What liars send in place of their models.

    They know everything: all models of a round before they send, as papers assume of them.

    Attributes:
        name: what a scenario calls it.
        line: its line in `privdec list`.
        Section: declares its keys.
        peers: who lies.
    """

    name: ClassVar[str]
    line: ClassVar[str]
    Section: ClassVar[type[AttackKeys]] = AttackKeys

    def __init__(self, peers: Collection[int]) -> None:
        self.peers = tuple(peers)

    @abstractmethod
    def lie(self, own: Tensor, honest: Tensor, generator: torch.Generator) -> Tensor:
        """Return what a liar says its model is, [d].

        Args:
            own: its model, [d].
            honest: the models of those that do not lie, [h, d].
            generator: for what is drawn.
        """

    def told(self, models: Tensor, key: tuple[int, ...]) -> dict[int, Tensor]:
        """Return what each liar says its model is.

        Args:
            models: those of all peers, [n, d].
            key: numbers of the exchange, from which what is drawn follows.
        """
        honest = models[[peer for peer in range(len(models)) if peer not in self.peers]]
        lies = {}
        for peer in self.peers:
            seed = int(np.random.SeedSequence([*key, peer]).generate_state(1, np.uint64)[0])
            generator = torch.Generator(models.device).manual_seed(seed % 2**63)
            lies[peer] = self.lie(models[peer], honest, generator)
        return lies


def attack_note(section: AttackKeys | None) -> str | None:
    """Return in words that a run's models are of no use, for plans and summaries; None if nobody lies."""
    if section is None:
        return None
    who = f"peer {section.peers[0]} lies"
    if len(section.peers) > 1:
        who = f"peers {', '.join(map(str, section.peers))} lie"
    return f"{who} ({section.kind}): this run tests what stops them, and its accuracy is that of no honest network"


def build_attack(section: AttackKeys | None) -> Attack | None:
    """Build the attack that a scenario names; None if it names none."""
    if section is None:
        return None
    kinds: Mapping[str, Any] = ATTACKS
    attack: Attack = kinds[section.kind](**section.options())
    return attack
