"""Images of a user's own: a folder with a folder of images for each class, whose names the scenario lists.

Every file below the root is read, told as left, or refused: one that looks like an image is never left in silence.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ScenarioError, did_you_mean
from flower_privdec.common.formatting import printable
from flower_privdec.data.dataset import Request, Rows, Source, Split
from flower_privdec.data.intake import Intake, counted, listed
from flower_privdec.data.pixels import decode_images
from flower_privdec.scenario.file_sections import ImagesSection, composed

# The endings of images that are read. The first bytes tell DICOM, which often has no ending, and others whose ending is
# another word for one of these.
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".gif")
DICOM = (".dcm", ".dicom", ".ima")
IMAGE_ENDINGS = PICTURES + DICOM

# Endings of images, or of many at once, that are not read.
OTHER_IMAGES = (
    *(".heic", ".heif", ".avif", ".jp2", ".j2k", ".jpx", ".jxl", ".svg", ".psd", ".exr", ".hdr", ".raw", ".dng"),
    *(".cr2", ".nef", ".arw", ".nii", ".nii.gz", ".mha", ".mhd", ".nrrd", ".img", ".svs", ".ndpi", ".mrxs", ".czi"),
    *(".pgm", ".ppm", ".pbm", ".tga", ".ico", ".mp4", ".avi", ".mov", ".mkv", ".npy", ".npz", ".mat", ".h5", ".zip"),
    *(".tar", ".gz", ".7z", ".rar", ".part", ".crdownload"),
)
# What the first bytes of a file without such an ending say it is, and whether that is read.
MAGIC = (
    (128, b"DICM", "DICOM", True),
    (0, b"\x89PNG", "PNG", True),
    (0, b"\xff\xd8\xff", "JPEG", True),
    (0, b"GIF8", "GIF", True),
    (0, b"II*\x00", "TIFF", True),
    (0, b"MM\x00*", "TIFF", True),
    (8, b"WEBP", "WebP", True),
    (4, b"ftypheic", "HEIC", False),
    (4, b"ftypmif1", "HEIF", False),
    (4, b"ftypavif", "AVIF", False),
    (4, b"jP  ", "JPEG 2000", False),
    (344, b"n+1\x00", "NIfTI", False),
)
# What systems and tools leave beside images; names that begin with a point count, too.
LITTER = frozenset(("thumbs.db", "desktop.ini", "dicomdir", "__macosx", "@eadir"))

DEEPEST = 4  # levels below a root in which the folders of its classes are looked for
MOST_LOOKED_AT = 2000  # folders


def read_image_folder(request: Request) -> Source:
    """Return a folder's images as RGB [3, height, width], or with a window as greys [1, height, width].

    Raises:
        ScenarioError: there is no such folder; or later, when a half is read: a folder is not a class, or a file is not
            an image that can be read.
    """
    path = request.path("one with a folder for each class; give it", folder=True)
    labels = request.section.labels
    if request.targets != "classes" or labels is None:
        raise ScenarioError(
            "data.dataset=image-folder has classes: list the names of their folders in data.labels, and take a loss of "
            "classes",
            code="data.labels",
        )
    for name in labels:
        # A scenario may come from elsewhere, and must not lead out of the root.
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise ScenarioError(f"data.labels: {name!r} must be the name of a folder in the root", code="data.labels")

    section = request.section.images or ImagesSection()
    half = partial(_images, Path(path), request, labels, section)
    return Source(half, half, len(labels))


def _images(folder: Path, request: Request, classes: Sequence[str], section: ImagesSection) -> Split:
    where = request.where
    found = _Found(where, section.nested)
    try:
        folders = _class_folders(folder, request, classes, found)
        paths = []
        labels = []
        for label, path in enumerate(folders):
            images = found.images_of(path)
            paths += images
            labels += [label] * len(images)
    except OSError as error:
        raise ScenarioError(
            f"{where} cannot be read ({error.strerror}): make it readable", code="data.unreadable"
        ) from error
    if not paths:
        raise ScenarioError(
            f"{where} holds no image ({', '.join(IMAGE_ENDINGS)}) in {', '.join(classes)}", code="data.empty"
        )

    def read(rows: Rows) -> torch.Tensor:
        chosen = [paths[row] for row in np.arange(len(paths))[rows].tolist()]
        return decode_images(chosen, [_named(path) for path in chosen], section=section)

    intake = Intake(files=len(paths), names=tuple(classes), left=found.told())
    return Split(np.array(labels, dtype=np.int64), read, intake)


# --- folders


def _class_folders(root: Path, request: Request, classes: Sequence[str], found: _Found) -> list[Path]:
    """Return the folder of each class.

    Raises:
        ScenarioError: one is missing, or another is there; it says where the classes' folders are, if they are near.
    """
    where = request.where
    places = {composed(path.name): path for path in _entries(root) if path.is_dir() and not _is_litter(path.name)}
    classes = [composed(name) for name in classes]
    names = set(places)
    if not names & set(classes):
        raise ScenarioError(f"{where} {_elsewhere(root, request, classes)}", code="data.no-classes-here")

    missing = [name for name in classes if name not in names]
    for name in sorted(names - set(classes)):
        remedy = f"add it, move it away, or rename it{did_you_mean(name, missing)}"
        raise ScenarioError(f"{where}: the folder {name!r} is not in data.labels: {remedy}", code="data.labels")
    if missing:
        raise ScenarioError(
            f"{where} has no folder {listed(map(repr, missing))}, which data.labels lists: add it (an empty one, if a "
            "peer has no image of the class), or take it out of data.labels at all peers",
            code="data.labels",
        )

    # Files beside the folders belong to no class.
    for path in _entries(root):
        if not path.is_dir() and found.is_image(path):
            raise ScenarioError(
                f"{_named(path)} is an image beside the folders of {where}, and of no class: move it into one, or away",
                code="data.image-left",
            )
    return [places[name] for name in classes]


def _elsewhere(root: Path, request: Request, classes: Sequence[str]) -> str:
    """Return what is wrong with a root that has no folder of a class, and where those folders are, if they are near."""
    wanted = set(classes)
    if root.name in wanted and wanted <= {path.name for path in _entries(root.parent)}:
        return f"is the folder of one class: set {request.key}={root.parent}"

    places = []
    for looked_at, (path, folders, _) in enumerate(os.walk(root)):
        folders.sort()
        depth = len(Path(path).relative_to(root).parts)
        if depth >= DEEPEST or looked_at > MOST_LOOKED_AT:
            folders.clear()
        elif depth and wanted <= {composed(name) for name in folders}:
            places.append(Path(path))
            folders.clear()
    if places:
        places.sort(key=lambda path: _unlikely(path, root, request.key))
        others = listed((str(path) for path in places[1:]), 3)
        is_named_for_half = not _unlikely(places[0], root, request.key)[0]
        if len(places) > 1 and not is_named_for_half:
            return (
                f"has folders of its classes in {len(places)} places ({places[0]}, {others}): move the images of each "
                "class into one folder; those of a patient may have a folder below, by data.images.nested"
            )
        more = f" (or {others})" if others else ""
        return f"is above the folders of its classes: set {request.key}={places[0]}{more}"

    names = [path.name for path in _entries(root) if path.is_dir() and not _is_litter(path.name)]
    if not names:
        files = sum(1 for path in _entries(root) if path.is_file())
        return (
            f"has no folder, and {counted(files, 'file')}: make a folder for each class of data.labels "
            f"({listed(classes)}), with its images"
        )
    near = ""
    for name in classes:
        near = near or did_you_mean(name, names)
    return (
        f"has the folders {listed(map(repr, sorted(names)))}, and data.labels lists {listed(map(repr, classes))}: "
        f"rename the folders, or list their names{near}"
    )


def _unlikely(path: Path, root: Path, key: str) -> tuple[bool, int, str]:
    """Return a key by which the likeliest place of a half sorts first: its name, and then the one that is nearest."""
    words = {"train", "training"}
    if key == "data.test":
        words = {"test", "val", "valid", "validation"}
    parts = [part.casefold() for part in path.relative_to(root).parts]
    return (words.isdisjoint(parts), len(parts), str(path))


def _named(path: Path) -> str:
    """Return a path as an error names it, on one line whatever is in it."""
    return printable(str(path))


def _entries(folder: Path) -> list[Path]:
    # Sorted, so that every machine numbers the examples alike.
    return sorted(folder.iterdir())


def _is_litter(name: str) -> bool:
    return name.startswith(".") or name.casefold() in LITTER


# --- files


@dataclass
class _Found:
    """What lies in the folders of a root.

    Attributes:
        where: what to call the root in an error.
        nested: whether images in folders below a class's are read.
        left: how many files are not read, by their endings.
    """

    where: str
    nested: bool
    left: Counter[str] = field(default_factory=Counter)

    def images_of(self, folder: Path) -> list[Path]:
        """Return the images of a class, in an order that is the same on every machine.

        Raises:
            ScenarioError: an image lies in a folder below, and is not asked for; or has a format that is not read.
        """
        return [path for path in self._files(folder, folder) if self.is_image(path)]

    def _files(self, folder: Path, of_class: Path) -> Iterator[Path]:
        for path in _entries(folder):
            if not path.is_dir():
                yield path
                continue
            if _is_litter(path.name):
                self.left["in hidden folders"] += sum(len(files) for _, _, files in os.walk(path))
                continue
            if path.is_symlink() and folder.resolve().is_relative_to(path.resolve()):
                raise ScenarioError(f"{_named(path)} is a link to a folder above it: remove it", code="data.image-left")

            inner = list(self._files(path, of_class))
            if inner and not self.nested:
                images = [file for file in inner if self.is_image(file)]
                if images:
                    raise ScenarioError(
                        f"{_named(path)} has {counted(len(images), 'image')} in a folder below that of its class: set "
                        "data.images.nested=true if they are examples of it, else move them away",
                        code="data.image-left",
                    )
                continue
            yield from inner

    def is_image(self, path: Path) -> bool:
        """Return whether a file is an image that is read; count it as left if it is none.

        Raises:
            ScenarioError: it is an image, or an archive, of another format.
        """
        name = path.name.casefold()
        if _is_litter(path.name):
            self.left["hidden"] += 1
            return False
        if not path.is_file():
            raise ScenarioError(
                f"{_named(path)} is no file (a link that leads nowhere, or a device): remove it", code="data.image-left"
            )
        if name.endswith(IMAGE_ENDINGS):
            return True

        kind, is_read = _looks_like(path)
        if is_read:
            return True
        if kind or name.endswith(OTHER_IMAGES):
            endings = [ending for ending in OTHER_IMAGES if name.endswith(ending)]
            kind = kind or f"a file of the kind {max(endings, key=len)}"
            raise ScenarioError(
                f"{_named(path)} is {kind}, which is not read: convert it to PNG or DICOM, or move it away from "
                f"{self.where}",
                code="data.image-left",
            )
        self.left[path.suffix.casefold() or "no ending"] += 1
        return False

    def told(self) -> tuple[str, ...]:
        """Return what was left, in a line."""
        total = sum(self.left.values())
        if not total:
            return ()
        kinds = [f"{ending} {count}" for ending, count in sorted(self.left.items())]
        return (f"{counted(total, 'file')} ({listed(kinds)})",)


def _looks_like(path: Path) -> tuple[str, bool]:
    """Return what the first bytes of a file say it is, "" if they say nothing, and whether that is read."""
    with path.open("rb") as file:
        begins = file.read(352)
    for place, magic, kind, is_read in MAGIC:
        if begins[place : place + len(magic)] == magic:
            return kind, is_read
    return "", False
