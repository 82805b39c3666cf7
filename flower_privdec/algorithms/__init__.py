"""The algorithms by name; a paper's algorithm is a named composition of the four parts."""

from flower_privdec.algorithms.adp2_sgd import ADP2SGD
from flower_privdec.algorithms.cga import CrossGradientAggregation
from flower_privdec.algorithms.d_psgd import DP2SGD, DPDPSGD, DecentralizedSGD
from flower_privdec.algorithms.dual_averaging import DDA, DPDDA
from flower_privdec.algorithms.dyn_d2p import ConstD2P, DynCD2P, DynD2P, DynMuD2P
from flower_privdec.algorithms.feddeper import FedDeper, FedDeperStar
from flower_privdec.algorithms.federated import FedAvg, FedProx, Scaffold
from flower_privdec.algorithms.local import DPSGD, Local
from flower_privdec.algorithms.muffliato import Muffliato
from flower_privdec.algorithms.net_fleet import DPNetFleet
from flower_privdec.algorithms.pdsl import PDSL
from flower_privdec.algorithms.privsgp_vr import PrivSGPVR
from flower_privdec.algorithms.sgp import SGP, PrivSGP
from flower_privdec.common import catalogue
from flower_privdec.common.user_code import load_own, users_code
from flower_privdec.core.algorithm import Algorithm, check_algorithm
from flower_privdec.scenario.sections import AlgorithmSection, OwnAlgorithmSection

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
        "dp-dpsgd": DPDPSGD,
        "adp2-sgd": ADP2SGD,
        "muffliato": Muffliato,
        "dp-net-fleet": DPNetFleet,
        "local": Local,
        "dp-sgd": DPSGD,
        "fedavg": FedAvg,
        "fedprox": FedProx,
        "scaffold": Scaffold,
        "feddeper": FedDeper,
        "feddeper*": FedDeperStar,
        "dp-dda": DPDDA,
        "dda": DDA,
        "pdsl": PDSL,
        "dp-cga": CrossGradientAggregation,
    }
)


def build_algorithm(section: AlgorithmSection) -> Algorithm:
    """Return the algorithm an `algorithm` section names, or a user's own.

    Raises:
        ScenarioError: a class of a user's own that cannot be had, or is no whole algorithm.
    """
    if not isinstance(section, OwnAlgorithmSection):
        return ALGORITHMS[section.name](section)
    own = load_own(
        section.module,
        "algorithm.module",
        accepts=lambda part: isinstance(part, type) and issubclass(part, Algorithm),
        must_be="a subclass of flower_privdec.core.Algorithm",
    )
    where = f"algorithm.module={section.module!r}"
    with users_code(f"{where} could not be built", code="code.fails"):
        algorithm: Algorithm = own(section)
    check_algorithm(algorithm, where)
    return algorithm


__all__ = ["ALGORITHMS", "build_algorithm"]
