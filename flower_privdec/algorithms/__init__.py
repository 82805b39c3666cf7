"""The algorithms: a paper's algorithm is a named composition of the four parts, one paper a file.

Each class has its name, its keys and its line of description. To add one, put a file here (CONTRIBUTING.md).
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import cast

from flower_privdec.common.registry import OwnPart
from flower_privdec.common.user_code import load_own, users_code
from flower_privdec.core.algorithm import Algorithm, check_algorithm
from flower_privdec.scenario import algorithm_sections
from flower_privdec.scenario.algorithm_sections import AlgorithmSection

ALGORITHMS = cast("MutableMapping[str, type[Algorithm]]", algorithm_sections.ALGORITHMS)


def build_algorithm(section: AlgorithmSection) -> Algorithm:
    """Return the algorithm an `algorithm` section names, or a user's own.

    Raises:
        ScenarioError: a class of a user's own that cannot be had, or is not a whole algorithm.
    """
    if not isinstance(section, OwnPart):
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
