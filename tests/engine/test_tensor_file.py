"""Tensors are written as safetensors reads them, whole or not at all."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from flower_privdec.experiment.checkpoint import NAMES, write_tensors
from flower_privdec.rows.tensors import all_finite


def some_tensors() -> dict[str, torch.Tensor]:
    """Return a tensor of every type and of many shapes, one of them a view that does not lie in a row."""
    tensors = {str(dtype): torch.arange(7).to(dtype) for dtype in NAMES}
    tensors |= {"none": torch.empty(0, 3), "one": torch.tensor(1.5), "turned": torch.arange(6.0).view(2, 3).T}
    return tensors | {"part": torch.arange(10.0)[2:5], "nan": torch.tensor([math.nan, -math.inf, 1e25])}


def test_safetensors_reads_the_written_file(tmp_path: Path) -> None:
    path, tensors = tmp_path / "file", some_tensors()
    write_tensors(path, tensors, {"said": 'a "word", é'})
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"said": 'a "word", é'}
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, equal_nan=True)
    assert list(tmp_path.iterdir()) == [path]


def test_it_is_the_librarys_file_to_the_last_byte(tmp_path: Path) -> None:
    tensors = {"x": torch.ones(2, 5), "w": torch.ones(2), "edge.y": torch.arange(3.0).double(), "y": torch.empty(0)}
    write_tensors(tmp_path / "file", tensors, {"privdec": "x"})
    assert (tmp_path / "file").read_bytes() == save(tensors, {"privdec": "x"})


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opened = tmp_path / "file", os.fdopen
    write_tensors(path, {"x": torch.ones(3)}, {})
    before = path.read_bytes()

    class Full:
        """A file that takes 100 bytes, a few at a time."""

        def __init__(self, file: Any) -> None:
            self.file, self.left = file, 100

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, content: memoryview) -> int:
            if self.left <= 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.left -= 7
            return int(self.file.write(content[:7]))

    def full(*how: Any, **given: Any) -> Any:
        return Full(opened(*how, **given))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdopen", full)
        write_tensors(tmp_path / "small", {}, {})
        with pytest.raises(OSError, match="No space left"):
            write_tensors(path, {"x": torch.zeros(1000)}, {})
    assert load_file(tmp_path / "small") == {}
    assert path.read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "small"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_nan_is_found_anywhere_in_a_tensor(wrong: float, dtype: torch.dtype) -> None:
    for place in range(40):
        values = torch.linspace(-6e4, 6e4, 40).to(dtype)
        assert all_finite(values)
        values[place] = wrong
        assert not all_finite(values)
        assert not all_finite(values.view(4, 10))
    assert all_finite(torch.empty(0, dtype=dtype))
    assert not all_finite(torch.tensor(wrong, dtype=dtype))
