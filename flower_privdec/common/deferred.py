"""torch, imported when something of it is first used; or what stands in for it at a small peer.

Importing torch takes longer than `privdec list` or `privdec show` takes altogether. Both describe parts, and the files
of parts compute with torch. So these files, and all that they import, take torch from here:

    from flower_privdec.common.deferred import torch

    if TYPE_CHECKING:
        from torch import Tensor

Nothing of torch may be used while such a file is imported: no base class, decorator or table. What needs that (the
gradient kernels, modules of models) is imported inside the functions that use it.

All that a peer imports takes torch from here too, for a peer of a small model does without it: in its process these
names stand for `flower_privdec.small`, which is NumPy, and `scipy` for the part of it that accounts need. That is so if
torch is not installed, or if `use_small` was called before anything of torch was used.
"""

from __future__ import annotations

import importlib
from functools import cache, partial
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["has_torch", "is_small", "nn", "scipy", "torch", "use_small"]

STAND_IN = "flower_privdec.small"
_chosen = ""  # the package that stands behind `torch`, once something of it was used


class _Deferred(ModuleType):
    """Stands for a module, which is imported when an attribute is first read."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module."""
        module = _in_place_of(self.__name__) if is_small() else importlib.import_module(self.__name__)

        # A class with a __getattr__ is slow to read from, and steps read from torch all the time. So this becomes a
        # plain module with the same attributes; those that the module gets later are still read from there.
        vars(self).update(vars(module), __getattr__=partial(getattr, module))
        self.__class__ = ModuleType  # type: ignore[assignment]
        return getattr(module, name)


def _in_place_of(name: str) -> Any:
    """Return what stands for a module in a small peer's process."""
    if name == "scipy":
        return importlib.import_module(f"{STAND_IN}.numerics")
    stand_in = importlib.import_module(STAND_IN)
    return stand_in.nn if name == "torch.nn" else stand_in


@cache
def has_torch() -> bool:
    """Return whether torch is installed, without importing it."""
    return find_spec("torch") is not None


def use_small() -> None:
    """Let NumPy stand in for torch in this process.

    Raises:
        RuntimeError: something of torch was used already, and tensors of two kinds would meet.
    """
    global _chosen
    if _chosen == "torch":
        raise RuntimeError("torch is in use in this process: choose what stands in for it before")
    _chosen = STAND_IN


def is_small() -> bool:
    """Return whether NumPy stands in for torch in this process; from then on that stays so."""
    global _chosen
    if not _chosen:
        _chosen = "torch" if has_torch() else STAND_IN
    return _chosen == STAND_IN


if TYPE_CHECKING:
    import scipy
    import torch
    from torch import nn
else:
    scipy = _Deferred("scipy")
    torch = _Deferred("torch")
    nn = _Deferred("torch.nn")
