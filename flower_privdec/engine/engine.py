"""The engine: all peers of a scenario as rows of one computation in one process.

No message is ever made: an exchange among all rows is a product with the mixing matrix, unless the network's wire codec
rounds what peers send; then each share is encoded and decoded as it would be between synchronous peers.
`engine/workers` computes the same numbers in several processes, and `engine/shards` in several Flower nodes.
"""

from __future__ import annotations

from flower_privdec.core import Algorithm, Exchange, State, advance
from flower_privdec.core.cohort import Cohort
from flower_privdec.core.exchange import Spares
from flower_privdec.pushsum.coded_mix import CodedMix
from flower_privdec.pushsum.frames import TensorArithmetic


class Engine:
    """Runs rounds of an algorithm on a cohort that hosts the whole network.

    Args:
        algorithm, cohort, state: of all peers.
        arithmetic: that of the network's wire codec; None mixes rows as they are.

    Attributes:
        state: the state of all peers; between two calls of `rounds` it is at the end of a round.
        trial: a function that tries the models on the test set in parallel; None if the caller has to do it.
    """

    trial = None

    def __init__(
        self, algorithm: Algorithm, cohort: Cohort, state: State, arithmetic: TensorArithmetic | None = None
    ) -> None:
        self.algorithm = algorithm
        self.cohort = cohort
        self.state = state
        self._spares: Spares = {}
        self._coded: CodedMix | None = None
        if arithmetic is not None and not arithmetic.is_exact:
            self._coded = CodedMix(arithmetic)

    def collected(self) -> State:
        """Return the state between two rounds."""
        return self.state

    def close(self) -> None:
        """Do nothing, since an engine in one process holds no resources."""

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
        if self._coded is not None:
            self._coded.together_(exchange, self.state, self.cohort.mixing)
            return
        exchange.together(self.state, self.cohort.mixing, self._spares).apply_(self.state)
