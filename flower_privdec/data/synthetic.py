"""Synthetic data, drawn from fixed keys and equal in every scenario, to try tasks without a file."""

from __future__ import annotations

import numpy as np
import scipy

from flower_privdec.rows.keys import keyed_generator

LABELS, LABEL_FEATURES = 6, 20
SPARSE_FEATURES, SPARSE_WORDS = 47_236, 75  # rcv1's, before repeats are joined
TOPICS, WORDS, LONGEST, OWN_WORDS = 4, 200, 20, 40


def draw_labels(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw examples that have any of six labels, each where a direction of the features leads far enough.

    Returns:
        Features, float32 [count, 20], and labels, float32 [count, 6], the first in half of the examples, the last in
        a tenth.
    """
    generator = keyed_generator(0, "synthetic labels")
    directions = generator.standard_normal((LABEL_FEATURES, LABELS)) / LABEL_FEATURES**0.5
    x = generator.standard_normal((count, LABEL_FEATURES))
    scores = x @ directions + 0.3 * generator.standard_normal((count, LABELS))
    return x.astype(np.float32), (scores > np.linspace(0, 1.3, LABELS)).astype(np.float32)


def draw_words(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw texts of 5 to 20 words about one of four topics; half of a text's words are its topic's own.

    Returns:
        Words 1..199, padded with 0, int64 [count, 20], and topics, int64 [count].
    """
    generator = keyed_generator(0, "synthetic words")
    topics = generator.integers(TOPICS, size=count)
    common = generator.integers(1, WORDS, (count, LONGEST))
    own = 1 + topics[:, None] * OWN_WORDS + generator.integers(OWN_WORDS, size=(count, LONGEST))
    words = np.where(generator.random((count, LONGEST)) < 0.5, own, common)
    lengths = generator.integers(5, LONGEST + 1, count)
    return np.where(np.arange(LONGEST) < lengths[:, None], words, 0), topics


def draw_sparse(count: int) -> tuple[scipy.sparse.csr_matrix, np.ndarray]:
    """Draw texts as rcv1 has them: some 73 of 47,236 words each, by Zipf's law, and the side of a plane they are on.

    Every row has norm 1. So from μ = 1 on, the hinge with the l2 regularizer μ has its minimum where no margin has
    reached 1, at x* = Σ_b c_b y_b a_b / μ, with F(x*) = 1 - |Σ_b c_b y_b a_b|² / (2 μ), c_b an example's weight.

    Returns:
        Features, float32 [count, 47236], and classes, int64 [count].
    """
    generator = keyed_generator(0, "synthetic sparse")
    lengths = 1 + generator.poisson(SPARSE_WORDS, count)
    words = np.minimum(np.exp(generator.random(lengths.sum()) * np.log(SPARSE_FEATURES)), SPARSE_FEATURES - 1)
    columns = generator.permutation(SPARSE_FEATURES)[words.astype(np.int64)]
    values = generator.random(lengths.sum()) + 0.1
    x = scipy.sparse.csr_matrix((values, columns, np.cumsum([0, *lengths])), shape=(count, SPARSE_FEATURES))
    x.sum_duplicates()
    x = scipy.sparse.diags(1 / np.sqrt(np.asarray(x.multiply(x).sum(1)).ravel())) @ x
    scores = x @ generator.standard_normal(SPARSE_FEATURES)
    return x.astype(np.float32).tocsr(), (scores > 0).astype(np.int64)
