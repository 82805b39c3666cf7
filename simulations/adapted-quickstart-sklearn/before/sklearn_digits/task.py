"""The model and the data: logistic regression on scikit-learn's handwritten digits."""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier

DIGITS = 10
PIXELS = 64
TEST = np.arange(1797) % 5 == 0  # every fifth digit is the common test set, the others are the clients'


def make_model(local_epochs: int, penalty: float) -> SGDClassifier:
    """Return an untrained model of the right shape, zero everywhere."""
    model = SGDClassifier(
        loss="log_loss",
        alpha=penalty,
        learning_rate="constant",
        eta0=0.05,
        max_iter=local_epochs,
        tol=None,
        random_state=0,
    )
    model.classes_ = np.arange(DIGITS)
    model.coef_, model.intercept_ = np.zeros((DIGITS, PIXELS)), np.zeros(DIGITS)
    return model


def get_params(model: SGDClassifier) -> list[np.ndarray]:
    """Return the model's arrays."""
    return [model.coef_, model.intercept_]


def set_params(model: SGDClassifier, params: list[np.ndarray]) -> None:
    """Put arrays into the model."""
    model.coef_, model.intercept_ = params


def load_test() -> tuple[np.ndarray, np.ndarray]:
    """Return the common test set."""
    images, labels = load_digits(return_X_y=True)
    return images[TEST] / 16, labels[TEST]


def load_data(partition: int, partitions: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return one client's share of the other digits, four fifths to train on and one to test on."""
    images, labels = load_digits(return_X_y=True)
    own = np.random.default_rng(0).permutation(np.flatnonzero(~TEST))[partition::partitions]
    x = images[own] / 16
    y = labels[own]
    cut = len(own) * 4 // 5
    return x[:cut], y[:cut], x[cut:], y[cut:]
