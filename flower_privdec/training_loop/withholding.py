"""A user's code on private examples: what it says when it fails may tell of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from flower_privdec.errors import RAISED_BY_USERS, RunError, ScenarioError
from flower_privdec.gradients.protocol import reason


def without_telling(what: str, call: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Call a user's code; where it fails, pass on what it says of zeros in the tensors' place, and nothing else.

    A server that hears why a client failed would hear of its examples, as "target 7 is out of bounds" does.

    Args:
        what: the code, as an error names it.

    Raises:
        ScenarioError: it fails on zeros too; with what it said of them.
        RunError: it fails on the examples alone; with the error's kind.
    """
    failure = said = None
    try:
        return call(*arguments)
    except RAISED_BY_USERS as error:
        failure = type(error).__name__
    try:
        call(*tree_map(_zeros, list(arguments)))
    except RAISED_BY_USERS as error:
        said = reason(error)
    if said is not None:  # raised here, errors that do not carry the other ones along
        raise ScenarioError(f"{what} fails on zeros of the batch's shapes too: {said}")
    raise RunError(
        f"{what} raised {failure} on private examples (what it said is withheld, for it may tell of them); try it on "
        "made-up ones, of every size and class"
    )


def _zeros(leaf: Any) -> Any:
    return torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf
