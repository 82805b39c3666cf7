"""The engine: all peers of a scenario as rows of one computation in one process."""

from __future__ import annotations

from torch import Tensor

from flower_privdec.algorithms import Algorithm, Mix, State, advance
from flower_privdec.algorithms.cohort import Cohort


class Engine:
    """Runs rounds of an algorithm on a cohort that hosts the whole network.

    Mixing writes into one spare buffer a name, which then changes places with the row it replaces, or in place.
    """

    def __init__(self, algorithm: Algorithm, cohort: Cohort, state: State) -> None:
        self.algorithm, self.cohort, self.state = algorithm, cohort, state
        self._spare: dict[str, Tensor | None] = {}

    def round(self) -> None:
        """Run one whole round: every step, every exchange."""
        while (exchange := advance(self.algorithm, self.cohort, self.state)) is not None:
            self._mix(exchange)
            self.state.at += 1

    def _mix(self, exchange: Mix) -> None:
        if self.cohort.mixing is None:
            raise TypeError(f"{self.algorithm.name} exchanges rows but has no mixing weights")
        matrix = self.cohort.mixing.matrix(self.state.round_index)
        for name in exchange.names:
            self.state.rows[name], self._spare[name] = matrix.replace(self.state.rows[name], self._spare.get(name))
