"""The written-out gradients of a mean of words: those of the kernel that torch peers take."""

from __future__ import annotations

import torch

from flower_privdec.gradients import build_kernel
from flower_privdec.gradients.protocol import RowsOfBatch
from flower_privdec.gradients.words import WordsKernel
from flower_privdec.models import flatten
from flower_privdec.models.layers import MeanOfWords
from flower_privdec.tasks.losses import resolve_loss

TOKENS = 11
LENGTH = 6


def test_sums_and_bounds_are_those_of_torch_peers() -> None:
    torch.manual_seed(0)
    for hidden, activation in (([], "relu"), ([5], "tanh"), ([5, 4], "relu")):
        module = MeanOfWords(3, TOKENS, 4, hidden, activation)
        theirs = build_kernel(module, "cross-entropy", [LENGTH], n_tokens=TOKENS)
        ours = WordsKernel(module, resolve_loss("cross-entropy"), 2**28, LENGTH, TOKENS)

        # Repeated tokens, padding, an example of padding only, one with an unknown token, and padding of the batch.
        x = torch.randint(TOKENS, (2, 7, LENGTH))
        x[0, 0] = 3
        x[0, 1] = 0
        x[1, 2, 0] = TOKENS
        weight = torch.ones(2, 7)
        weight[1, -1] = 0
        batch = RowsOfBatch(x, torch.randint(3, (2, 7)), weight)
        params = flatten(module) + torch.randn(2, ours.d)
        step = (torch.tensor([0.1, 0.5]), torch.tensor([-0.3, 2.0]), torch.tensor([1.0, 0.25]))

        sums = []
        for kernel in (ours, theirs):
            out = torch.zeros(2, ours.d)
            norms = kernel.add_clipped_(out, params, batch, *step)
            sums.append((out, norms))
        torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-6)
        assert sums[0][1][1, 2] == 0  # the unknown token's example counts as zero
        torch.testing.assert_close(ours.logits(params, x[0]), theirs.logits(params, x[0]))
