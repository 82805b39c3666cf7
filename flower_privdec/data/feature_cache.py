"""Features kept on disk: locked while they are made, checked when they are read, and never unpickled.

They are as private as the examples they were made from, and the name of a file is a hash that confirms a guess of all
of them. The folder is for its owner only, and must stay on the machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from flower_privdec.common.deferred import torch
from flower_privdec.common.files import cache_folder, keeps_cache, make_owners_folder, owners_file, replacing

if TYPE_CHECKING:
    from torch import Tensor


def cached(recipe: dict[str, Any], x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """Return the result of a computation on `x`, from the cache on disk if it is there.

    Processes that need the same features wait for the first one to compute them. A damaged file is computed again; if
    the folder cannot be written, nothing is cached. Both are reported on stderr.

    Args:
        recipe: all that decides the result besides `x`, as JSON; part of the key.
        x: float32 examples [N, ...].
        compute: returns the result, float32 [N, D].
    """
    settings = json.dumps([recipe, list(x.shape), str(x.dtype)], sort_keys=True)
    key = _hash(settings.encode(), x)
    path = cache_folder() / "features" / f"{key}.safetensors"

    if not keeps_cache():
        features = _read(path, key, len(x)) if path.exists() else None
        return compute() if features is None else features

    # The lock is held until the file is whole, so that a second process finds it.
    with ExitStack() as stack:
        try:
            make_owners_folder(path.parent)
            lock = stack.enter_context(open(path.with_suffix(".lock"), "a", opener=owners_file))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            _report(f"not cached: {error}")
            return compute()

        if path.exists():
            features = _read(path, key, len(x))
            if features is not None:
                return features
            _report(f"{path} is damaged: computed again")

        result = compute()
        try:
            with replacing(path) as part:
                save_file({"features": result.contiguous()}, part, {"key": key, "checksum": _hash(b"", result)})
        except (OSError, SafetensorError) as error:
            _report(f"not cached: {error}")
        return result


def _hash(start: bytes, x: Tensor) -> str:
    digest = hashlib.sha256(start)
    digest.update(x.contiguous().numpy().data)
    return digest.hexdigest()


def _read(path: Path, key: str, count: int) -> Tensor | None:
    """Return a file's features; None unless they are whole, unchanged and those of the key."""
    with suppress(SafetensorError, KeyError):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            features: Tensor = file.get_tensor("features")

        is_matrix = features.dtype is torch.float32 and features.ndim == 2 and len(features) == count
        if is_matrix and metadata.get("key") == key and metadata.get("checksum") == _hash(b"", features):
            return features
    return None


def _report(message: str) -> None:
    print(f"features: {message}", file=sys.stderr)
