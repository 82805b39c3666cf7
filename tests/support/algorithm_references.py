"""What the NumPy references of the algorithms share: noise that can be replayed, and one clipped step."""

import numpy as np
import torch

from flower_privdec.engine.engine import Engine

ROUNDS = 6


def softmax_gradients(x, weights, bias, labels):
    """Return the cross-entropy gradient of every example, [b, 10 * 65], weights before bias."""
    logits = x @ weights.T + bias
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(x)), labels] -= 1
    return np.concatenate([(p[:, :, None] * x[:, None, :]).reshape(len(x), p.shape[1] * x.shape[1]), p], axis=1)


class NoiseTape:
    """Noise that a reference can replay: row i of round k is a fixed normal vector."""

    def __init__(self, dimension):
        self.dimension = dimension

    def draw(self, round_index, peer):
        return np.random.default_rng([round_index, int(peer)]).standard_normal(self.dimension)

    def add_(self, out, std, step, peers, purpose="noise", receivers=None):
        for row, peer in enumerate(peers):
            out[row] += std[row] * torch.from_numpy(self.draw(step, peer))


def engine_with(experiment, tape):
    cohort = experiment.cohort()
    cohort.noise = tape
    return Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))


def clipped_step(experiment, tape, k, i, z):
    """Return the noised mean of clipped gradients of peer i's batch of round k at z."""
    batch = experiment.own.sampler.batch(k, [i])
    rows = experiment.own.examples.parts[i][batch.index[0][batch.weight[0] > 0]]
    features = experiment.own.examples.x.double().numpy().reshape(240, -1)
    labels = experiment.own.examples.y.numpy()
    g = softmax_gradients(features[rows], z[:640].reshape(10, 64), z[640:], labels[rows])
    g *= np.minimum(1, 1 / np.linalg.norm(g, axis=1, keepdims=True))
    return (g.sum(0) - experiment.own.protection.noise_multiplier(k)[i] * tape.draw(k, i)) / 12


def exponential_graph(k, n):
    hop = 2 ** (k % (int(np.log2(n - 1)) + 1))
    p = np.zeros((n, n))
    for j in range(n):
        p[j, j] = p[(j + hop) % n, j] = 0.5
    return p
