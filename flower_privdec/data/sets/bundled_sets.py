"""Datasets that come with scikit-learn, or are drawn: they need no file."""

from __future__ import annotations

from flower_privdec.data.dataset import Dataset, Request, Source, embedded
from flower_privdec.data.drawn_sets import SYNTHETIC_TRAIN, WORDS, draw_labels, draw_sparse, draw_words
from flower_privdec.data.embedded_tables import read_breast_cancer, read_diabetes, read_digits


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
