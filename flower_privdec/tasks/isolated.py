"""Whether what a user wrote keeps examples apart under torch.func.vmap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def no_own_rules() -> Iterator[None]:
    """Refuse every autograd.Function that would be told of all the examples of a vmap at once.

    What is called under vmap cannot depend on an example's numbers, so that trying it once finds all that is called.
    """
    apply = vars(torch.autograd.Function)["apply"]

    def checked(function: type[torch.autograd.Function], *args: Any, **options: Any) -> Any:
        if function.vmap is not torch.autograd.Function.vmap:
            raise ValueError(f"{function.__name__} has a vmap rule of its own, which sees the examples together")
        return apply.__get__(None, function)(*args, **options)

    torch.autograd.Function.apply = classmethod(checked)
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply
