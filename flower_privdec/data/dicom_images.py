"""DICOM images, read by pydicom (extra `dicom`): greys after rescaling, before any window; or colours of 8 bits.

A file holds a patient's name beside the image, and so may what pydicom warns of: no word of a file's content is quoted.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.machine import check_room
from flower_privdec.common.user_code import require

PREAMBLE = 128  # bytes before the mark
MARK = b"DICM"
ENDINGS = (".dcm", ".dicom", ".ima")
GREYS = ("MONOCHROME1", "MONOCHROME2")
BYTES_EACH = 24  # of memory for a pixel while it is decoded: as stored, as read, and rescaled in float64


def is_dicom(path: Path) -> bool:
    """Return whether a file is DICOM, by its ending or its mark."""
    if path.suffix.casefold() in ENDINGS:
        return True
    with path.open("rb") as file:
        return file.read(PREAMBLE + len(MARK))[PREAMBLE:] == MARK


def read_dicom(path: Path, name: str) -> tuple[np.ndarray, bool]:
    """Return one image, and whether white is its least value (MONOCHROME1).

    Args:
        path: the file.
        name: what to call it in an error.

    Returns:
        Greys after the file's own rescaling, float64 [height, width]; or colours, uint8 [height, width, 3].

    Raises:
        ScenarioError: the file is damaged, holds none or several images, or is compressed in a way that needs another
            library.
    """
    pydicom = require("pydicom", "DICOM", "pip install 'flower-privdec[dicom]'")
    pixels = require("pydicom.pixels", "DICOM", "pip install 'flower-privdec[dicom]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they quote what is in the file
        try:
            file = pydicom.dcmread(path, defer_size="1 MB")
            _check_image(file, name)
            values = file.pixel_array
            if file.SamplesPerPixel == 1:
                values = np.asarray(pixels.apply_modality_lut(values, file), dtype=np.float64)
        except ScenarioError:
            raise
        except Exception as error:  # pydicom and its decoders raise whatever a damaged file makes them raise
            raise _unread(error, name, pydicom, path) from error

    if values.ndim == 3:
        return np.ascontiguousarray(values, dtype=np.uint8), False
    if not np.isfinite(values).all():
        raise ScenarioError(f"{name} has pixels that are not finite after rescaling: mend it", code="data.image")
    return values, file.PhotometricInterpretation == "MONOCHROME1"


def _check_image(file: Any, name: str) -> None:
    """Refuse a file that is not one image of greys, or of 8-bit colours."""
    if "PixelData" not in file and "FloatPixelData" not in file and "DoubleFloatPixelData" not in file:
        raise ScenarioError(f"{name} is DICOM without an image: move it away", code="data.image")

    frames = int(file.get("NumberOfFrames", 1) or 1)
    if frames != 1:
        raise ScenarioError(
            f"{name} has {frames} images in one: save each as a file of its own, or move it away", code="data.image"
        )

    kind = str(file.PhotometricInterpretation)
    is_grey = file.SamplesPerPixel == 1 and kind in GREYS
    is_colour = file.SamplesPerPixel == 3 and file.BitsAllocated == 8
    if not (is_grey or is_colour):
        raise ScenarioError(
            f"{name} has the colours {kind[:20]} of {int(file.BitsAllocated)} bits, which are not read: convert it to "
            "greys, or to RGB of 8 bits",
            code="data.image",
        )
    check_room(BYTES_EACH * int(file.Rows) * int(file.Columns), f"{name}: its pixels", "give a smaller image")


def _unread(error: Exception, name: str, pydicom: Any, path: Path) -> ScenarioError:
    """Return the error of a file that could not be read, without a word of its content."""
    syntax = None
    with suppress(Exception):  # of a damaged file, which is told below
        syntax = pydicom.dcmread(path, stop_before_pixels=True).file_meta.TransferSyntaxUID

    if syntax is not None and syntax.is_compressed and isinstance(error, RuntimeError | NotImplementedError):
        return ScenarioError(
            f"{name} is compressed as {syntax.name}, and no installed library of pydicom's decodes it: pip install "
            "pylibjpeg[all], or decompress it (gdcmconv --raw, dcmdjpeg)",
            code="data.image",
        )
    return ScenarioError(
        f"{name} cannot be read as DICOM ({type(error).__name__}); mend or remove it", code="data.image"
    )
