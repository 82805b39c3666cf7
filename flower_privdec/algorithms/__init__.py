"""The algorithms by name; a paper's algorithm is a named composition of the four parts."""

from flower_privdec import catalogue
from flower_privdec.algorithms.adp2_sgd import ADP2SGD
from flower_privdec.algorithms.algorithm import Algorithm, advance
from flower_privdec.algorithms.d_psgd import DP2SGD, DecentralizedSGD
from flower_privdec.algorithms.dyn_d2p import ConstD2P, DynCD2P, DynD2P, DynMuD2P
from flower_privdec.algorithms.exchange import Exchange, Gather, Mix, Reply
from flower_privdec.algorithms.feddeper import FedDeper, FedDeperStar
from flower_privdec.algorithms.federated import FedAvg, FedProx, Scaffold
from flower_privdec.algorithms.local import DPSGD, Local
from flower_privdec.algorithms.privsgp_vr import PrivSGPVR
from flower_privdec.algorithms.sgp import SGP, PrivSGP
from flower_privdec.algorithms.state import Edges, State
from flower_privdec.scenario.algorithm_sections import GradientSection

ALGORITHMS: dict[str, type[Algorithm]] = catalogue.ALGORITHMS.bind(
    {
        "sgp": SGP,
        "privsgp": PrivSGP,
        "privsgp-vr": PrivSGPVR,
        "dyn-d2p": DynD2P,
        "dyn-c-d2p": DynCD2P,
        "dyn-mu-d2p": DynMuD2P,
        "const-d2p": ConstD2P,
        "d-psgd": DecentralizedSGD,
        "dp2-sgd": DP2SGD,
        "adp2-sgd": ADP2SGD,
        "local": Local,
        "dp-sgd": DPSGD,
        "fedavg": FedAvg,
        "fedprox": FedProx,
        "scaffold": Scaffold,
        "feddeper": FedDeper,
        "feddeper*": FedDeperStar,
    }
)


def build_algorithm(section: GradientSection) -> Algorithm:
    """Return the algorithm an `algorithm` section names."""
    return ALGORITHMS[section.name](section)


__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Edges",
    "Exchange",
    "Gather",
    "Mix",
    "Reply",
    "State",
    "advance",
    "build_algorithm",
]
