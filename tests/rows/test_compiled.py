"""Compilation where nothing can be kept on disk."""

import numba
import pytest

from flower_privdec.rows import tensors


def test_loops_compile_without_a_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def njit(function, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return original(function, **options)

    original = numba.njit
    monkeypatch.setattr(numba, "njit", njit)
    assert tensors.compiled(lambda x: 1 / x)(0.0) == float("inf")
