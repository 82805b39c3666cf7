"""Images as numbers: 8-bit pixels are scaled by public constants, and image files are decoded to RGB."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.machine import check_room
from flower_privdec.common.user_code import require

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


def decode_images(files: Sequence[Any], names: Sequence[str], formats: Sequence[str] | None = None) -> Tensor:
    """Decode images of one size to RGB [N, 3, height, width], scaled by PLAIN_PIXELS.

    Args:
        files: paths, or open files.
        names: what to call each image in an error.
        formats: the formats that are read; by default all that Pillow knows.

    Raises:
        ScenarioError: a file is not such an image, or has another size, 16 bits or several images; or all together
            need more memory than is free.
    """
    pillow = require("PIL.Image", "a data set of images", "pip install 'flower-privdec[images]'")
    images = np.zeros((0, 1, 1, 3), np.uint8)  # [N, height, width, 3], once the first image tells the size
    for position, (file, name) in enumerate(zip(files, names, strict=True)):
        pixels = _decode(pillow, file, name, formats)
        if position == 0:
            # All have the size of the first, so what they need is known before anything is allocated: the 8-bit images,
            # and float32 ones that are made of them.
            check_room(5 * len(files) * pixels.nbytes, f"{len(files)} images like {name}", "give fewer or smaller ones")
            images = np.empty((len(files), *pixels.shape), np.uint8)

        if pixels.shape != images.shape[1:]:
            height, width = pixels.shape[:2]
            first_height, first_width = images.shape[1:3]
            raise ScenarioError(
                f"{name} is {height} x {width} pixels and those before it {first_height} x {first_width}: all must be "
                "alike; resize them",
                code="data.image",
            )
        images[position] = pixels
    return scale_pixels(channels_first(torch.from_numpy(images)), PLAIN_PIXELS)


def _decode(pillow: Any, file: Any, name: str, formats: Sequence[str] | None) -> np.ndarray:
    """Return the pixels of one image, uint8 [height, width, 3]."""
    try:
        with pillow.open(file, formats=formats) as image:
            n_frames = getattr(image, "n_frames", 1)
            if n_frames > 1 or image.mode not in _8_BITS:
                kind = image.mode
                if n_frames > 1:
                    kind = f"{n_frames} images in one"
                raise ScenarioError(
                    f"{name} is {kind} and must be one image of 8 bits a channel: convert it", code="data.image"
                )
            return np.asarray(image.convert("RGB"))
    # Pillow raises SyntaxError for some broken PNG files.
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        kind = " or ".join(formats) if formats else "an image"
        raise ScenarioError(
            f"{name} cannot be read as {kind} ({type(error).__name__}); mend or remove it", code="data.image"
        ) from error
