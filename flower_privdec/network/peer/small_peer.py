"""What a peer without torch can run, and which scenarios need more; see `flower_privdec.small`."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np

from flower_privdec.common.deferred import has_torch
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.fields import own_modules
from flower_privdec.experiment.origin import model_section
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.sections import CancellingSection, CorrelatedSection

MODELS = ("linear", "softmax", "mlp", "text")  # whose gradients are written out, in `stacked` and `words`
SPARSE = ("svmlight", "synthetic-sparse")
DRAWN = ("random-regular", "erdos-renyi", "small-world")  # graphs that networkx draws
READ_ANYWHERE = ("data.", "topology.")  # a user's functions that need not know tensors: they return arrays and edges


def check_small(scenario: Scenario) -> None:
    """Refuse a scenario that needs what a small peer has not.

    Raises:
        ScenarioError: names all of it, and the remedy.
    """
    needs = [*_needs_torch(scenario), *_needs_scipy(scenario), *_needs_networkx(scenario)]
    if not needs:
        return
    remedy = "pip install flower-privdec on this device"
    if has_torch():
        remedy = "leave --small out"
    raise ScenarioError(
        f"a small peer runs on NumPy, and this scenario needs more: {'; '.join(needs)}: {remedy}",
        code="small.needs-more",
    )


def _needs_torch(scenario: Scenario) -> list[str]:
    needs = []
    if int(np.__version__.partition(".")[0]) < 2:
        needs.append(f"NumPy 2.1 or later, not {np.__version__}")
    model = str(model_section(scenario).target)
    if model not in MODELS:
        needs.append(f"model {model!r} needs torch (without it: {', '.join(MODELS)})")
    if scenario.features is not None:
        needs.append("features needs torch")
    if scenario.compute.device == "cuda":
        needs.append("compute.device=cuda needs torch")
    for key, _ in own_modules(scenario):
        if not key.startswith(("model.", *READ_ANYWHERE)):
            needs.append(f"{key}, code of your own, needs torch")
    return needs


def _needs_scipy(scenario: Scenario) -> list[str]:
    if find_spec("scipy") is not None:
        return []

    needs = []
    private = scenario.private
    if scenario.data.dataset in SPARSE:
        needs.append(f"data.dataset={scenario.data.dataset} needs scipy")
    if scenario.algorithm.name == "dp-cga":
        needs.append("algorithm.name=dp-cga needs scipy")
    if private is not None and isinstance(private.noise, CorrelatedSection):
        needs.append("privacy.noise.kind=correlated needs scipy")
    if private is not None and isinstance(private.noise, CancellingSection) and private.noise.bands != 1:
        needs.append(f"privacy.noise.bands={private.noise.bands} needs scipy")
    if private is not None and private.calibration == "paper":
        needs.append("privacy.calibration=paper needs scipy")
    return needs


def _needs_networkx(scenario: Scenario) -> list[str]:
    if find_spec("networkx") is not None:
        return []

    graphs = {"topology.name": scenario.topology.name}
    supergraph = getattr(scenario.topology, "supergraph", None)
    if supergraph is not None:
        graphs["topology.supergraph"] = supergraph
    private = scenario.private
    if private is not None and isinstance(private.noise, CancellingSection):
        graphs["privacy.noise.secrets.name"] = private.noise.secrets.name
    return [f"{key}={name} needs networkx" for key, name in graphs.items() if name in DRAWN]
