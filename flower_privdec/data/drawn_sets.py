"""Synthetic datasets, drawn from public random numbers: the same for every scenario."""

from __future__ import annotations

import numpy as np

from flower_privdec.common.deferred import scipy
from flower_privdec.rows.keys import keyed_generator
from flower_privdec.rows.sparse_rows import SparseRows

SYNTHETIC_TRAIN = 2000  # 8 peers of 250

LABELS = 6
LABEL_FEATURES = 20

TOPICS = 4
WORDS = 200
LONGEST = 20  # words of a text
OWN_WORDS = 40  # of a topic

SPARSE_FEATURES = 47_236  # rcv1's
SPARSE_WORDS = 75  # of a text of rcv1, before repeats are joined


def draw_labels(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw examples that have any of six labels: each if the example lies far enough in a direction of the features.

    Returns:
        Features, float32 [count, 20], and labels, float32 [count, 6]: half of the examples have the first, a tenth has
        the last.
    """
    generator = keyed_generator(0, "synthetic labels")
    directions = generator.standard_normal((LABEL_FEATURES, LABELS)) / LABEL_FEATURES**0.5
    x = generator.standard_normal((count, LABEL_FEATURES))
    noise = 0.3 * generator.standard_normal((count, LABELS))
    scores = x @ directions + noise

    thresholds = np.linspace(0, 1.3, LABELS)
    labels = scores > thresholds
    return x.astype(np.float32), labels.astype(np.float32)


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
    is_word = np.arange(LONGEST) < lengths[:, None]
    return np.where(is_word, words, 0), topics


def draw_sparse(count: int) -> tuple[SparseRows, np.ndarray]:
    """Draw texts as rcv1 has them: some 73 of 47,236 words each, by Zipf's law, and the side of a plane they are on.

    Every row has norm 1. So from μ = 1 on, the hinge with the l2 regularizer μ has a known minimum, at which no margin
    has reached 1: x* = Σ_b c_b y_b a_b / μ, with F(x*) = 1 - |Σ_b c_b y_b a_b|² / (2 μ), c_b an example's weight.

    Returns:
        Features, float32 [count, 47236] in compressed rows, and classes, int64 [count].
    """
    generator = keyed_generator(0, "synthetic sparse")
    lengths = 1 + generator.poisson(SPARSE_WORDS, count)
    total = lengths.sum()

    # The exponential of a uniform number: word k has a chance of about 1 / k, which is Zipf's law.
    words = np.exp(generator.random(total) * np.log(SPARSE_FEATURES))
    words = np.minimum(words, SPARSE_FEATURES - 1).astype(np.int64)
    columns = generator.permutation(SPARSE_FEATURES)[words]
    values = generator.random(total) + 0.1

    row_ends = np.cumsum([0, *lengths])
    x = scipy.sparse.csr_matrix((values, columns, row_ends), shape=(count, SPARSE_FEATURES))
    x.sum_duplicates()
    norms = np.sqrt(np.asarray(x.multiply(x).sum(1)).ravel())
    x = scipy.sparse.diags(1 / norms) @ x

    plane = generator.standard_normal(SPARSE_FEATURES)
    scores = x @ plane
    return SparseRows(x.astype(np.float32).tocsr()), (scores > 0).astype(np.int64)
