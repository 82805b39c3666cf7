"""Aligned rows: the same numbers, each row on a boundary, and a state that keeps to it through a run."""

import numpy as np
import pytest
import torch

from flower_privdec.core import State
from flower_privdec.rows.tensors import BOUNDARY, aligned, empty_rows, is_aligned, padded


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 1001), (4, 1024)])
def test_every_long_row_begins_on_a_boundary(shape, dtype):
    rows = torch.randn(shape).to(dtype)
    copy = aligned(rows)
    assert torch.equal(copy, rows)
    assert all(row.data_ptr() % BOUNDARY == 0 for row in copy)
    copy.zero_()
    assert rows.abs().sum() > 0


@pytest.mark.parametrize("shape", [(5,), (3, 7), (1, 1001), (2, 300, 300)])
def test_short_single_and_odd_rows_stay_unchanged(shape):
    rows = torch.randn(shape)
    assert is_aligned(rows)
    assert State(np.arange(shape[0]), rows={"x": rows}).rows["x"] is rows


def test_a_state_aligns_its_rows_once():
    state = State(np.arange(3), rows={"x": torch.randn(3, 1001)})
    assert is_aligned(state.rows["x"])
    assert not state.rows["x"].is_contiguous()
    assert State(np.arange(3), rows=state.rows).rows["x"] is state.rows["x"]


@pytest.mark.parametrize("shape", [(5,), (3, 7), (1, 1001), (2, 30, 300), (3, 1001), (4, 1024)])
def test_a_state_read_anywhere_is_aligned_alike(shape):
    first = State(np.arange(shape[0]), rows={"x": torch.randn(shape)}).rows["x"]
    anywhere = torch.empty(first.numel() + 2)[2:].view(shape).copy_(first)  # 8 bytes off, as a file may have it
    read = State(np.arange(shape[0]), rows={"x": anywhere}).rows["x"]
    assert torch.equal(read, first)
    assert read.stride() == first.stride()
    assert read.data_ptr() % BOUNDARY == first.data_ptr() % BOUNDARY == 0


def test_padding_is_seen_only_in_its_storage():
    rows = aligned(torch.randn(3, 1001))
    whole = padded(rows)
    assert whole is not None
    assert whole.is_contiguous()
    assert whole.data_ptr() == rows.data_ptr()
    assert torch.equal(whole[:, :1001], rows)
    plain = torch.randn(3, 10)
    assert padded(plain) is plain
    assert padded(torch.randn(3, 10)[:, 2:]) is None  # the last row has no padding behind it
    assert padded(torch.randn(10, 3).t()) is None
    assert empty_rows(plain, 4).shape == (4,)
