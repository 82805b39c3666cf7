"""Passes over rows that are compiled on a CPU: what torch computes without them, and rows that stay where they are."""

import numpy as np
import pytest
import torch

from flower_privdec.algorithms import feddeper, tables
from flower_privdec.graph.mixing import average_matrix
from flower_privdec.rows.tensors import empty_rows


def rows_of(*shape, seed=0):
    """Return padded rows of normals."""
    generator = torch.Generator().manual_seed(seed)
    like = torch.empty(0, dtype=torch.float64)
    return empty_rows(like, *shape).copy_(torch.randn(shape, generator=generator, dtype=torch.float64))


@pytest.fixture(params=["compiled", "torch"])
def way(request, monkeypatch):
    """Take the compiled pass, or what stands in for it elsewhere."""
    if request.param == "torch":
        for module in (feddeper, tables):
            monkeypatch.setattr(module, "is_small", lambda: True)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("width", [7, 300])
def test_two_models_are_pulled_apart_in_one_pass(width):
    pair = rows_of(2, 3, width)
    start = rows_of(3, width, seed=1)
    ahead = rows_of(2, 3, width, seed=2)
    feddeper.pull_apart(pair, start, 0.1, ahead)
    torch.testing.assert_close(ahead[0], pair[0] - 0.1 * (pair[1] + pair[0] - 2 * start), rtol=1e-14, atol=1e-14)
    assert torch.equal(ahead[1], pair[1])


@pytest.mark.usefixtures("way")
def test_a_tables_entry_is_renewed_in_one_pass():
    state = {"table": rows_of(4, 3, 200).contiguous(), "table.mean": rows_of(4, 200, seed=1)}
    before = {name: row.clone() for name, row in state.items()}
    out = rows_of(2, 200, seed=2)
    first = out.clone()
    now = rows_of(2, 200, seed=3)
    whole, scale, share = rows_of(3, 2, seed=4)
    tables.renew_(out, state, now, np.array([1, 3]), torch.tensor([2, 0]), whole, scale, share)

    change = now - before["table"][[1, 3], [2, 0]]
    mean = before["table.mean"]
    close = {"rtol": 1e-13, "atol": 1e-13}
    torch.testing.assert_close(out, first + whole[:, None] * mean[[1, 3]] + scale[:, None] * change, **close)
    torch.testing.assert_close(state["table.mean"][[1, 3]], mean[[1, 3]] + share[:, None] * change, **close)
    assert torch.equal(state["table"][[1, 3], [2, 0]], now)
    assert torch.equal(state["table"][[0, 2]], before["table"][[0, 2]])
    assert torch.equal(state["table.mean"][[0, 2]], mean[[0, 2]])


@pytest.mark.parametrize("everybody", [True, False])
def test_an_average_is_written_into_the_rows_themselves(everybody):
    matrix = average_matrix(np.array([True, False, True, False, True]), everybody_receives=everybody)
    x = rows_of(5, 300)
    expected = matrix.apply(x)
    mixed, spare = matrix.replace(x)
    assert mixed is x
    assert spare is None
    assert torch.equal(mixed, expected)
