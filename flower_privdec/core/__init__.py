"""Rows of peers, the steps of a round, and the exchanges between them: what every algorithm is written in.

algorithm   a program of steps and exchanges, and `advance`, which runs it up to the next exchange
cohort      the peers of one process; their private steps, which are the choke point of privacy
exchange    the state of a cohort, and how peers mix, gather and reply
optimizers  momentum and Adam on noised gradients
validation  public examples on which groups of models are tried
"""

from flower_privdec.core.algorithm import Algorithm, advance, is_step_next
from flower_privdec.core.cohort import Cohort
from flower_privdec.core.exchange import Edges, Exchange, Gather, Mix, Reply, State

__all__ = ["Algorithm", "Cohort", "Edges", "Exchange", "Gather", "Mix", "Reply", "State", "advance", "is_step_next"]
