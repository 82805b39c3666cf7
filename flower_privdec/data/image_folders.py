"""Images of a user's own: a folder with a folder of images for each class, whose names the scenario lists."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ScenarioError
from flower_privdec.data.dataset import Request, Rows, Source, Split
from flower_privdec.data.pixels import decode_images

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".gif")


def read_image_folder(request: Request) -> Source:
    """Return a folder's images as RGB [3, height, width], scaled by PLAIN_PIXELS.

    Raises:
        ScenarioError: there is no such folder; or later, when a half is read: a folder is not a class, or a file is not
            an image.
    """
    path = request.path("one with a folder for each class; give it", folder=True)
    labels = request.section.labels
    if request.targets != "classes" or labels is None:
        raise ScenarioError(
            "data.dataset=image-folder has classes: list the names of their folders in data.labels, and take a loss of "
            "classes",
            code="data.labels",
        )
    half = partial(_images, Path(path), request.where, labels)
    return Source(half, half, len(labels))


def _images(folder: Path, where: str, classes: Sequence[str]) -> Split:
    for part in sorted(folder.iterdir()):
        if part.is_dir() and part.name not in classes:
            raise ScenarioError(f"{where}: the folder {part.name!r} is not in data.labels: add it", code="data.labels")

    # Sorted, so that every machine numbers the examples alike.
    paths = []
    labels = []
    for label, name in enumerate(classes):
        for path in sorted((folder / name).glob("*")):
            if path.suffix.lower() in IMAGE_ENDINGS:
                paths.append(path)
                labels.append(label)
    if not paths:
        raise ScenarioError(
            f"{where} holds no image ({', '.join(IMAGE_ENDINGS)}) in {', '.join(classes)}", code="data.empty"
        )

    def read(rows: Rows) -> torch.Tensor:
        chosen = [paths[row] for row in np.arange(len(paths))[rows].tolist()]
        return decode_images(chosen, [str(path) for path in chosen])

    return Split(np.array(labels, dtype=np.int64), read)
