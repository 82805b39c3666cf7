"""Read a dataset of a user's own: a function that gives arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flower_privdec.data.npz import ARRAYS, from_arrays
from flower_privdec.data.readers import Source
from flower_privdec.errors import PrivdecError, ScenarioError
from flower_privdec.user_code import load_own
from flower_privdec.words import one_line

OWN = "own"  # what a ledger calls all data that users' functions give: one name, lest a renamed function be free


def read_own(target: str, root: str | None, arguments: Mapping[str, Any]) -> Source:
    """Call a user's function, and take what it gives for a dataset.

    Args:
        target: where the function lies, `package.module:name`.
        root: given to it by this name, where the scenario has one.
        arguments: by name.

    Returns:
        The arrays that it gives, x_train, y_train, x_test and y_test in this order or by name, read like those of an
        .npz file.

    Raises:
        ScenarioError: the function cannot be had, fails, or gives something else.
    """
    function, where = load_own(target, "data.dataset.module"), f"data.dataset.module={target!r}"
    given = {} if root is None else {"root": root}
    try:
        made = function(**{**given, **arguments})
    except PrivdecError:
        raise
    except Exception as error:  # a user's own function may raise anything
        raise ScenarioError(f"{where} could not be read with {dict(arguments)}: {one_line(error)}") from error
    if isinstance(made, tuple | list) and len(made) == len(ARRAYS):
        made = dict(zip(ARRAYS, made, strict=True))
    if not isinstance(made, Mapping) or set(made) != set(ARRAYS):
        raise ScenarioError(f"{where} must give {', '.join(ARRAYS)}, as a tuple or by name")
    try:
        arrays = {name: np.asarray(made[name]) for name in ARRAYS}
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors elsewhere
        raise ScenarioError(f"{where} gives what are no arrays: {one_line(error)}") from error
    return from_arrays(arrays, target)
