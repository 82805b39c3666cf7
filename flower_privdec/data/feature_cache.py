"""Computed features on disk: found again by what they were made from, checked, never unpickled.

Privacy: features are as private as the examples they were made from, and the name of a file is a hash that
confirms a guess of all of them: the folder is for its owner alone, and must stay on the machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flower_privdec.common.files import cache_folder, replacing


def cached(recipe: dict[str, Any], x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """Return what was computed from `x` by a recipe, from disk where it lies there, else computed and kept.

    Processes that want the same features wait for the first one to compute them. A damaged file is computed
    afresh; where the folder cannot be written nothing is kept. Both are said on stderr.

    Args:
        recipe: all that decides the result beside `x`, as JSON; part of the key.
        x: float32 examples [N, ...].
        compute: makes the result, float32 [N, D].
    """
    key = _key(recipe, x)
    path = cache_folder() / "features" / f"{key}.safetensors"
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            stack.enter_context(_alone(path.with_suffix(".lock")))
        except OSError as error:
            _say(f"not kept for the next run: {error}")
            return compute()
        if path.exists():
            features = _read(path, key, len(x))
            if features is not None:
                return features
            _say(f"{path} is damaged: computed afresh")
        result = compute()
        try:
            _write(path, key, result)
        except (OSError, SafetensorError) as error:
            _say(f"not kept for the next run: {error}")
        return result


def _key(recipe: dict[str, Any], x: Tensor) -> str:
    described = json.dumps([recipe, list(x.shape), str(x.dtype)], sort_keys=True)
    return _hash(described.encode(), x)


def _hash(start: bytes, x: Tensor) -> str:
    digest = hashlib.sha256(start)
    digest.update(x.contiguous().numpy().data)
    return digest.hexdigest()


def _read(path: Path, key: str, count: int) -> Tensor | None:
    """Return a file's features, or None where they are not, whole and unchanged, those of the key."""
    with suppress(SafetensorError, KeyError):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            features: Tensor = file.get_tensor("features")
        right = features.dtype is torch.float32 and features.ndim == 2 and len(features) == count
        if right and metadata.get("key") == key and metadata.get("checksum") == _hash(b"", features):
            return features
    return None


def _write(path: Path, key: str, features: Tensor) -> None:
    with replacing(path, private=True) as part:
        save_file({"features": features.contiguous()}, part, {"key": key, "checksum": _hash(b"", features)})


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock on a file while the context lasts."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(message: str) -> None:
    print(f"features: {message}", file=sys.stderr)
