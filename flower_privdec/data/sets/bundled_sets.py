"""Datasets that come with scikit-learn, or are drawn: they need no file.

The features of tables are scaled by constants that were known before them. Standardising by the training set's mean and
deviation would publish both: a release that no ledger counts.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.formatting import one_line
from flower_privdec.data.dataset import Dataset, Request, Source, embedded
from flower_privdec.data.drawn_sets import SYNTHETIC_TRAIN, WORDS, draw_labels, draw_sparse, draw_words

DIGITS_TRAIN = 1440  # 8 peers of 180
BREAST_CANCER_TRAIN = 448  # 8 peers of 56
DIABETES_TRAIN = 352  # 8 peers of 44

# The decade of each measure of a cell nucleus, in pixels or as a ratio: radius, texture, perimeter, area, smoothness,
# compactness, concavity, concave points, symmetry, fractal dimension. Standard errors are a decade lower.
NUCLEUS_DECADES = (10.0, 10.0, 100.0, 1000.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)

# A usual age, sex (1 or 2), body mass index, blood pressure and six blood values, and a step of each.
PATIENT_MIDDLE = (50.0, 1.5, 25.0, 100.0, 200.0, 100.0, 50.0, 4.0, 4.5, 90.0)
PATIENT_STEPS = (10.0, 0.5, 5.0, 10.0, 50.0, 50.0, 10.0, 1.0, 0.5, 10.0)


def read_digits() -> Source:
    """Read 1,797 digits: [1, 8, 8], counts of 0 to 16 scaled to [0, 1]."""
    table = _sklearn_table("digits", "digits.csv.gz", delimiter=",")
    images = table[:, :-1].reshape(-1, 1, 8, 8) / 16.0
    return embedded(images, table[:, -1], DIGITS_TRAIN, "digits")


def nucleus_features(x: np.ndarray) -> np.ndarray:
    """Transform the 30 measures of breast-cancer, [N, 30]: log2(0.1 + x / decade), the doublings from a round number.

    Each value depends on its own example and on NUCLEUS_DECADES only.
    """
    means = np.array(NUCLEUS_DECADES)
    decades = np.concatenate([means, means / 10, means])  # of means, standard errors and worst values
    return np.asarray(np.log2(0.1 + x / decades))


def read_breast_cancer() -> Source:
    """Read 569 tumours: [30] by `nucleus_features`."""
    table = _sklearn_table("breast-cancer", "breast_cancer.csv", delimiter=",", skiprows=1)
    return embedded(nucleus_features(table[:, :-1]), table[:, -1], BREAST_CANCER_TRAIN, "breast-cancer")


def read_diabetes() -> Source:
    """Read 442 patients: [10], and how far the disease went in a year."""
    data = _sklearn_table("diabetes", "diabetes_data_raw.csv.gz")
    target = _sklearn_table("diabetes", "diabetes_target.csv.gz")
    x = (data - np.array(PATIENT_MIDDLE)) / np.array(PATIENT_STEPS)
    y = (target[:, None] - 150) / 100
    return embedded(x, y, DIABETES_TRAIN, "diabetes", "numbers")


@lru_cache
def _sklearn_table(name: str, file: str, **options: Any) -> np.ndarray:
    """Read a table from scikit-learn's folder, without importing scikit-learn, which takes long."""
    sklearn_spec = importlib.util.find_spec("sklearn")
    if sklearn_spec is None or sklearn_spec.origin is None:
        raise ScenarioError(f"data.dataset={name} needs sklearn, which is not installed: pip install scikit-learn")

    path = Path(sklearn_spec.origin).parent / "datasets" / "data" / file
    try:
        return np.loadtxt(path, **options)
    except (OSError, ValueError) as error:
        raise ScenarioError(
            f"data.dataset={name}: {path} of scikit-learn cannot be read ({one_line(error)}): install scikit-learn 1.6 "
            "or later"
        ) from error


class DigitsData(Dataset):
    """Handwritten digits."""

    name = "digits"
    line = "1,440 + 357 handwritten digits 8x8, 10 classes; embedded (scikit-learn)"
    reads_files = False

    def read(self, request: Request) -> Source:
        """Read the table."""
        return read_digits()


class BreastCancerData(Dataset):
    """Measures of tumours."""

    name = "breast-cancer"
    line = "448 + 121 tumours, 30 measures, 2 classes; embedded (scikit-learn)"
    reads_files = False

    def read(self, request: Request) -> Source:
        """Read the table."""
        return read_breast_cancer()


class DiabetesData(Dataset):
    """Patients, and how far the disease went in a year."""

    name = "diabetes"
    line = "352 + 90 patients, 10 measures, one number: the disease's progress; embedded (scikit-learn)"
    reads_files = False

    def read(self, request: Request) -> Source:
        """Read the tables."""
        return read_diabetes()


class SyntheticLabels(Dataset):
    """Drawn examples of any of some labels."""

    name = "synthetic-labels"
    line = "2,000 + 500 drawn examples, 20 features, any of 6 labels"
    reads_files = False

    def read(self, request: Request) -> Source:
        """Draw the examples, always the same."""
        return embedded(*draw_labels(2500), SYNTHETIC_TRAIN, "synthetic labels", "labels")


class SyntheticWords(Dataset):
    """Drawn texts."""

    name = "synthetic-words"
    line = "2,000 + 500 drawn texts of up to 20 words of 200, 4 topics"
    reads_files = False

    def read(self, request: Request) -> Source:
        """Draw the texts, always the same."""
        return embedded(*draw_words(2500), SYNTHETIC_TRAIN, "synthetic words", n_tokens=WORDS)


class SyntheticSparse(Dataset):
    """Drawn texts as sparse counts."""

    name = "synthetic-sparse"
    line = "2,000 + 500 drawn texts of 47,236 features, some 73 each, 2 classes"
    reads_files = False

    def read(self, request: Request) -> Source:
        """Draw the texts, always the same."""
        return embedded(*draw_sparse(2500), SYNTHETIC_TRAIN, "synthetic sparse")
