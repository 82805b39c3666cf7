"""Images as numbers: pixels are scaled by public constants, and image files are decoded.

without a window    8-bit images become RGB [3, height, width], PLAIN_PIXELS of their values
with a window       greys of any depth become [1, height, width], PLAIN_PIXELS of (value - black) / width in [0, 1]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.machine import check_room
from flower_privdec.common.user_code import require
from flower_privdec.data.dicom_images import is_dicom, read_dicom
from flower_privdec.scenario.file_sections import ImagesSection

if TYPE_CHECKING:
    from torch import Tensor


Constants = tuple[tuple[float, ...], tuple[float, ...]]

# Mean and deviation of the pixels in [0, 1], by channel, as published with each benchmark; never recomputed.
MNIST_PIXELS = ((0.1307,), (0.3081,))
FASHION_PIXELS = ((0.2860,), (0.3530,))
CIFAR10_PIXELS = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
# Any other 8-bit image: mid-grey is 0, black is -2, white is 2.
PLAIN_PIXELS = ((0.5,), (0.25,))

# Pillow's modes with 8 bits a channel. It would clip others, such as 16-bit greys, without a word.
_8_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB", "La", "RGBa")


# Its modes of one channel with more bits: whole numbers of 16 and 32 bits, and floating point.
DEEP_GREYS = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")


def scale_pixels(images: Tensor, constants: Constants) -> Tensor:
    """Convert 8-bit images [N, C, H, W] to (v / 255 - mean) / std in one float32 tensor."""
    mean = torch.tensor(constants[0]).view(-1, 1, 1) * 255
    std = torch.tensor(constants[1]).view(-1, 1, 1) * 255
    x = images.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    return x.sub_(mean).div_(std)


def channels_first(images: Tensor) -> Tensor:
    """View [N, H, W] or [N, H, W, C] images as [N, C, H, W]."""
    if images.ndim == 3:
        return images.unsqueeze(1)
    return images.permute(0, 3, 1, 2)


def decode_images(
    files: Sequence[Any],
    names: Sequence[str],
    formats: Sequence[str] | None = None,
    section: ImagesSection | None = None,
) -> Tensor:
    """Decode images of one size to float32 [N, channels, height, width], scaled by PLAIN_PIXELS.

    Args:
        files: paths, or open files.
        names: what to call each image in an error.
        formats: the formats that are read; by default all that Pillow knows, and DICOM.
        section: how files are read; by default as RGB of 8 bits.

    Raises:
        ScenarioError: a file is not such an image, or has another size, 16 bits or several images; or all together
            need more memory than is free.
    """
    pillow = require("PIL.Image", "a data set of images", "pip install 'flower-privdec[images]'")
    section = section or ImagesSection()
    images = np.zeros((0, 1, 1, 3), np.uint8)  # [N, height, width(, 3)], once the first image tells the size
    for position, (file, name) in enumerate(zip(files, names, strict=True)):
        pixels = _resized(pillow, _decode(pillow, file, name, formats, section), section)
        if position == 0:
            # All have the size of the first, so what they need is known before anything is allocated: the images as
            # they are, and float32 ones that are made of them.
            needed = len(files) * (pixels.nbytes + 4 * pixels.size)
            check_room(needed, f"{len(files)} images like {name}", "give fewer or smaller ones")
            images = np.empty((len(files), *pixels.shape), pixels.dtype)

        if pixels.shape != images.shape[1:]:
            height, width = pixels.shape[:2]
            first_height, first_width = images.shape[1:3]
            raise ScenarioError(
                f"{name} is {height} x {width} pixels and those before it {first_height} x {first_width}: all must be "
                f"alike; resize them, or set data.images.size=[{first_height}, {first_width}]",
                code="data.image",
            )
        images[position] = pixels

    if section.window is None:
        return scale_pixels(channels_first(torch.from_numpy(images)), PLAIN_PIXELS)
    mean, std = PLAIN_PIXELS
    return torch.from_numpy(images).unsqueeze(1).sub_(mean[0]).div_(std[0])


def _resized(pillow: Any, pixels: np.ndarray, section: ImagesSection) -> np.ndarray:
    """Return pixels in the size that the scenario gives, if it gives one."""
    if section.size is None or section.size == pixels.shape[:2]:
        return pixels
    height, width = section.size
    return np.asarray(pillow.fromarray(pixels).resize((width, height), pillow.Resampling.BILINEAR))


def _decode(pillow: Any, file: Any, name: str, formats: Sequence[str] | None, section: ImagesSection) -> np.ndarray:
    """Return the pixels of one image: uint8 [height, width, 3]; or with a window float32 [height, width] in [0, 1]."""
    try:
        if isinstance(file, Path) and formats is None and is_dicom(file):
            values, inverted = read_dicom(file, name)
        else:
            values = _picture(pillow, file, name, formats)
            inverted = False
    # Pillow raises SyntaxError for some broken PNG files.
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        if isinstance(error, ScenarioError):
            raise
        kind = " or ".join(formats) if formats else "an image"
        raise ScenarioError(
            f"{name} cannot be read as {kind} ({type(error).__name__}); mend or remove it", code="data.image"
        ) from error

    is_deep = values.ndim == 2
    if section.window is None:
        if is_deep:
            raise ScenarioError(
                f"{name} has greys of more than 8 bits, or is DICOM: set data.images.window to the usual center and "
                "width of such images, as data.images.window=[40, 400] for soft tissue in CT, or [128, 256], "
                "[2048, 4096], [32768, 65536] for all that 8, 12 or 16 bits can hold",
                code="data.image-window",
            )
        return values
    if not is_deep:
        raise ScenarioError(
            f"{name} is an image of 8 bits or of colours, and data.images.window is for greys of more: leave the "
            "window out, or give images that are not windowed yet",
            code="data.image-window",
        )

    center, width = section.window
    shares = np.clip((values - (center - width / 2)) / width, 0, 1)
    if inverted:
        shares = 1 - shares
    return np.asarray(shares, dtype=np.float32)


def _picture(pillow: Any, file: Any, name: str, formats: Sequence[str] | None) -> np.ndarray:
    """Return the pixels of an image that Pillow reads: RGB, uint8 [height, width, 3]; or deep greys, float64."""
    with pillow.open(file, formats=formats) as image:
        n_frames = getattr(image, "n_frames", 1)
        if n_frames > 1 and image.format != "MPO":  # a phone's photograph, with its previews behind it
            raise ScenarioError(
                f"{name} is {n_frames} images in one: save each as a file of its own, or move it away",
                code="data.image",
            )
        if image.mode in DEEP_GREYS:
            return np.asarray(image, dtype=np.float64)
        if image.mode not in _8_BITS:
            raise ScenarioError(
                f"{name} is {image.mode} and must be one image of 8 bits a channel: convert it", code="data.image"
            )
        # A camera that was held upright writes a turned image, and how to turn it back.
        upright = require("PIL.ImageOps", "images", "pip install 'flower-privdec[images]'").exif_transpose(image)
        return np.asarray(upright.convert("RGB"))
