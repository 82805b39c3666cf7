"""The engine: all peers of a scenario as rows of one computation in one process."""

from __future__ import annotations

from flower_privdec.core import Algorithm, Exchange, State, advance
from flower_privdec.core.cohort import Cohort
from flower_privdec.core.exchange import Spares


class Engine:
    """Runs rounds of an algorithm on a cohort that hosts the whole network."""

    def __init__(self, algorithm: Algorithm, cohort: Cohort, state: State) -> None:
        self.algorithm = algorithm
        self.cohort = cohort
        self.state = state
        self._spares: Spares = {}

    trial = None  # the caller evaluates the models

    def collected(self) -> State:
        """Return the state between two rounds."""
        return self.state

    def close(self) -> None:
        """Do nothing: an engine in one process holds no resources."""

    def rounds(self, count: int) -> None:
        """Run some whole rounds."""
        for _ in range(count):
            self.round()

    def round(self) -> None:
        """Run one whole round: every step, every exchange."""
        while (exchange := advance(self.algorithm, self.cohort, self.state)) is not None:
            self.perform(exchange)

    def perform(self, exchange: Exchange) -> None:
        """Perform an exchange among all peers."""
        if self.cohort.mixing is None:
            raise TypeError(f"{self.algorithm.name} exchanges rows but has no mixing weights")
        exchange.together(self.state, self.cohort.mixing, self._spares).apply_(self.state)
