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
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["nn", "torch"]


class _Deferred(ModuleType):
    """Stands for a module, which is imported when an attribute is first read. Each is then kept here."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module."""
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    import torch
    from torch import nn
else:
    torch = _Deferred("torch")
    nn = _Deferred("torch.nn")
