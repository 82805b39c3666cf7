"""Rows of peers, the steps of a round, and the exchanges between them: what every algorithm is written in."""

from flower_privdec.core.algorithm import Algorithm, advance
from flower_privdec.core.cohort import Cohort
from flower_privdec.core.exchange import Edges, Exchange, Gather, Mix, Reply, State

__all__ = ["Algorithm", "Cohort", "Edges", "Exchange", "Gather", "Mix", "Reply", "State", "advance"]
