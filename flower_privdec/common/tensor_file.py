"""Tensors on disk, as safetensors has them, without a copy of them on the way."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from flower_privdec.common.files import replacing

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Write a safetensors file in the place of another, whole or not at all.

    Args:
        tensors: by name; wherever and however they lie.
        facts: strings beside them.

    Raises:
        OSError: the disk is full, or the path cannot be written.
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    with replacing(path) as part, part.open("wb", buffering=0) as file:
        for left in (memoryview(_header(ordered, facts)), *map(_bytes, ordered.values())):
            while left:
                left = left[file.write(left) :]


def _header(tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> bytes:
    """Return the length of what describes the tensors, and that, filled up with spaces to a multiple of 8."""
    described = json.dumps({"__metadata__": dict(facts), **dict(_described(tensors))}, separators=(",", ":")).encode()
    described += b" " * (-len(described) % 8)
    return len(described).to_bytes(8, "little") + described


def _described(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, object]]]:
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        yield name, {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}


def _bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's own bytes, row after row."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
