"""torch, imported when something of it is first used.

Importing torch takes longer than `privdec list` or `privdec show` takes altogether. Both describe parts, and the files
of parts compute with torch. So these files, and all that they import, take torch from here:

    from flower_privdec.common.deferred import torch

    if TYPE_CHECKING:
        from torch import Tensor

Nothing of torch may be used while such a file is imported: no base class, decorator or table. What needs that (the
gradient kernels, modules of models) is imported inside the functions that use it.
"""

from __future__ import annotations

import importlib
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["nn", "torch"]


class _Deferred(ModuleType):
    """Stands for a module, which is imported when an attribute is first read."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module."""
        module = importlib.import_module(self.__name__)

        # A class with a __getattr__ is slow to read from, and steps read from torch all the time. So this becomes a
        # plain module with the same attributes; those that the module gets later are still read from there.
        vars(self).update(vars(module), __getattr__=partial(getattr, module))
        self.__class__ = ModuleType  # type: ignore[assignment]
        return getattr(module, name)


if TYPE_CHECKING:
    import torch
    from torch import nn
else:
    torch = _Deferred("torch")
    nn = _Deferred("torch.nn")
