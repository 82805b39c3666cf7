"""The algorithms by name; a paper's algorithm is a named composition of the four parts."""

from flower_privdec.algorithms.base import Algorithm, Mix, State, advance
from flower_privdec.algorithms.d_psgd import DPSGD
from flower_privdec.algorithms.local import Local
from flower_privdec.algorithms.sgp import SGP, PrivSGP

ALGORITHMS: dict[str, type[Algorithm]] = {cls.name: cls for cls in (SGP, PrivSGP, DPSGD, Local)}

__all__ = ["ALGORITHMS", "Algorithm", "Mix", "State", "advance"]
