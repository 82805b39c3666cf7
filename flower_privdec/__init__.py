"""Private decentralized learning for Flower: peers train together without a server in the data path.

What stands in `__all__` is the Python API. Each name is imported when it is first asked for, so that importing the
package costs nothing.

Examples:
    >>> import flower_privdec as fp
    >>> scenario = fp.make_scenario(
    ...     name="small",
    ...     n_peers=4,
    ...     rounds=10,
    ...     data={"dataset": "digits", "batch": {"size": 12}},
    ...     model={"name": "softmax"},
    ...     algorithm={"name": "privsgp", "learning_rate": 0.5},
    ...     privacy={"epsilon": 3, "delta": 1e-3},
    ... )
    >>> result = fp.run(scenario)
    >>> result.model()(result.model()[1].weight.new_zeros(1, 1, 8, 8)).shape
    torch.Size([1, 10])
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from flower_privdec.api.commands import (
        AuditResult,
        GraphDescription,
        StudyResult,
        audit,
        audit_app,
        ledger,
        report,
        study,
        topology,
        up,
    )
    from flower_privdec.api.comparing import Comparison, compare
    from flower_privdec.api.planning import Plan, WhoLearnsWhat, plan, who_learns_what
    from flower_privdec.api.rehearsing import RehearsalResult, rehearse
    from flower_privdec.api.run_result import RunResult, load_run
    from flower_privdec.api.running import OnEnd, OnEvaluation, OnRound, run
    from flower_privdec.api.scenarios import load_scenario, make_scenario
    from flower_privdec.common.errors import BudgetError, PrivdecError, RunError, ScenarioError
    from flower_privdec.reporting.progress import scalars
    from flower_privdec.scenario import Scenario
    from flower_privdec.training_loop.private_estimators import PrivateClassifier, PrivateRegressor
else:
    from importlib import import_module as _import_module

    _NAMES = {  # by module
        "api.commands": "AuditResult GraphDescription StudyResult audit audit_app ledger report study topology up",
        "api.comparing": "Comparison compare",
        "api.planning": "Plan WhoLearnsWhat plan who_learns_what",
        "api.rehearsing": "RehearsalResult rehearse",
        "api.run_result": "RunResult load_run",
        "api.running": "OnEnd OnEvaluation OnRound run",
        "api.scenarios": "load_scenario make_scenario",
        "common.errors": "BudgetError PrivdecError RunError ScenarioError",
        "reporting.progress": "scalars",
        "scenario": "Scenario",
        "training_loop.private_estimators": "PrivateClassifier PrivateRegressor",
    }
    _HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(_import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__})


__all__ = [
    "AuditResult",
    "BudgetError",
    "Comparison",
    "GraphDescription",
    "OnEnd",
    "OnEvaluation",
    "OnRound",
    "Plan",
    "PrivateClassifier",
    "PrivateRegressor",
    "PrivdecError",
    "RehearsalResult",
    "RunError",
    "RunResult",
    "Scenario",
    "ScenarioError",
    "StudyResult",
    "WhoLearnsWhat",
    "audit",
    "audit_app",
    "compare",
    "ledger",
    "load_run",
    "load_scenario",
    "make_scenario",
    "plan",
    "rehearse",
    "report",
    "run",
    "scalars",
    "study",
    "topology",
    "up",
    "who_learns_what",
]
