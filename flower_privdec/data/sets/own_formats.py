"""Formats of a user's own files; a ledger counts all of them under one name, see `data.source`."""

from __future__ import annotations

from flower_privdec.data.dataset import Dataset, Request, Source
from flower_privdec.data.image_folders import read_image_folder
from flower_privdec.data.npz_files import read_npz
from flower_privdec.data.svmlight_files import read_svmlight
from flower_privdec.data.table_files import read_table


class NpzData(Dataset):
    """Arrays of NumPy."""

    name = "npz"
    line = "your own: root is an .npz file with x_train, y_train, x_test, y_test"
    own_files = True

    def read(self, request: Request) -> Source:
        """Read the arrays."""
        return read_npz(request)


class CsvData(Dataset):
    """A table as text."""

    name = "csv"
    line = "your own table: root and test are CSV files, whose columns table names"
    own_files = True
    needs = ("table", "test")
    takes = ("labels",)

    def read(self, request: Request) -> Source:
        """Read the columns that the scenario names."""
        return read_table(request)


class ParquetData(Dataset):
    """A table as Parquet."""

    name = "parquet"
    line = "your own table: root and test are Parquet files, whose columns table names"
    own_files = True
    needs = ("table", "test")
    takes = ("labels",)

    def read(self, request: Request) -> Source:
        """Read the columns that the scenario names."""
        return read_table(request)


class ImageFolderData(Dataset):
    """A folder of images for each class."""

    name = "image-folder"
    line = "your own images, DICOM too: root and test have a folder of images for each class of labels"
    own_files = True
    needs = ("test",)
    takes = ("labels", "images")

    def read(self, request: Request) -> Source:
        """Read the images."""
        return read_image_folder(request)


class SvmlightData(Dataset):
    """Sparse rows as text."""

    name = "svmlight"
    line = "your own: root and test are svmlight files (plain, .gz, .bz2) of n_features features, kept sparse"
    own_files = True
    needs = ("n_features", "test")

    def read(self, request: Request) -> Source:
        """Read the rows."""
        return read_svmlight(request)
