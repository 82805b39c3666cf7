"""Folders of images: what is read, what is left, and one line for what is wrong."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_files import followed, read
from raising import raises
from tiny_scenario import Tiny

from flower_privdec.common.errors import ScenarioError
from flower_privdec.experiment import Experiment

pillow = pytest.importorskip("PIL.Image")

CT = np.full((4, 6), 1064, np.int16)  # 40 Hounsfield units after an intercept of -1024, but for one pixel
CT[0, 1] = 964


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def png(path: str | Path, size: tuple[int, int] = (6, 4)) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    pillow.new("RGB", size, (255, 0, 128)).save(path)


def folders(write: Callable[[Path], object] | None = None, name: str = "0.png") -> None:
    """Make a training and a test folder of cats and dogs, with one file each."""
    for half in ("train", "test"):
        shutil.rmtree(half, ignore_errors=True)
        for label in ("cat", "dog"):
            folder = Path(half) / label
            folder.mkdir(parents=True)
            (write or png)(folder / name)


def images(**keys: Any) -> dict[str, Any]:
    data: dict[str, Any] = {"dataset": "image-folder", "root": "train", "test": "test", "labels": ["cat", "dog"]}
    if keys:
        data["images"] = keys
    return {**data, "batch": {"size": 1}}


def dicom(
    path: Path, pixels: np.ndarray | None, kind: str = "MONOCHROME2", frames: int | None = None, **tags: Any
) -> None:
    """Write a file of DICOM as a scanner does, with a patient's name."""
    pydicom = pytest.importorskip("pydicom")
    uid = pydicom.uid
    meta = pydicom.dataset.FileMetaDataset()
    meta.MediaStorageSOPClassUID = uid.CTImageStorage
    meta.MediaStorageSOPInstanceUID = uid.generate_uid()
    meta.TransferSyntaxUID = uid.ExplicitVRLittleEndian
    file = pydicom.dataset.FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    file.SOPClassUID = uid.CTImageStorage
    file.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
    file.PatientName = "Secret^Name"
    if pixels is not None:
        is_colour = pixels.ndim == 3 and frames is None
        file.Rows, file.Columns = pixels.shape[:2] if is_colour else pixels.shape[-2:]
        file.SamplesPerPixel = 3 if is_colour else 1
        file.PhotometricInterpretation = kind
        file.BitsAllocated = file.BitsStored = 8 * pixels.dtype.itemsize
        file.HighBit = file.BitsStored - 1
        file.PixelRepresentation = int(pixels.dtype.kind == "i")
        file.PixelData = pixels.tobytes()
        if is_colour:
            file.PlanarConfiguration = 0
        if frames is not None:
            file.NumberOfFrames = frames
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that a test wants wrong
        for name, value in tags.items():
            setattr(file, name, value)
        file.save_as(path, enforce_file_format=True)


def compressed(path: Path, known: bool) -> None:
    """Write a file that is compressed: as RLE, which pydicom decodes itself, or as lossless JPEG."""
    pydicom = pytest.importorskip("pydicom")
    dicom(path, CT)
    file = pydicom.dcmread(path)
    if known:
        file.compress(pydicom.uid.RLELossless)
    else:
        file.file_meta.TransferSyntaxUID = pydicom.uid.JPEGLosslessSV1
        file.PixelData = pydicom.encaps.encapsulate([b"\xff\xd8\xff\xc3" + bytes(60)])
        file["PixelData"].is_undefined_length = True
    file.save_as(path)


def test_an_image_folder_has_one_folder_per_class(tiny: Tiny) -> None:
    for half in ("train", "test"):
        for shade, name in enumerate(("cat", "dog")):
            (Path(half) / name).mkdir(parents=True)
            for number in range(8):
                pillow.new("RGB", (6, 4), (255 * shade, 0, 128)).save(Path(half) / name / f"{number}.png")
    scenario = tiny("data={dataset: image-folder, root: train, test: test, batch: {size: 2}, labels: [dog, cat]}")
    experiment = Experiment.build(scenario)
    assert experiment.public.input_shape == (3, 4, 6)
    assert experiment.public.y.tolist() == [0] * 8 + [1] * 8
    assert experiment.public.x[0, 0, 0, 0] == 2.0
    assert experiment.public.x[8, 0, 0, 0] == -2.0


def test_other_endings_and_names_are_read() -> None:
    folders()
    pillow.new("RGB", (6, 4), (255, 0, 128)).save("train/cat/1.webp", lossless=True)
    pillow.new("RGB", (6, 4), (255, 0, 128)).save("train/cat/2.tif")
    pillow.new("RGB", (6, 4), (255, 0, 128)).save("train/cat/3.JPG")
    shutil.copy("train/cat/3.JPG", "train/cat/4.jfif")
    shutil.copy("train/cat/0.png", "train/cat/export 5")
    result = read(images())
    assert result.sizes == [7]
    assert result.x[:, 0, 0, 0].min() > 1.9


def test_files_that_are_no_images_are_told() -> None:
    folders()
    for name in ("cat/notes.txt", "cat/.DS_Store", "cat/Thumbs.db", "cat/DICOMDIR", "cat/below/list.csv", "README.md"):
        path = Path("train") / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    Path("train/.cache").mkdir()
    result = read(images())
    assert result.sizes == [2]
    assert "2 files, 2 rows, 3 x 4 x 6 each, 2 classes (cat 1, dog 1); left 6 files" in result.line
    assert ".txt 1" in result.line


def test_photographs_of_phones_are_read_upright() -> None:
    folders()
    turned = pillow.Exif()
    turned[0x112] = 6  # to be turned a quarter
    pillow.new("RGB", (4, 6), (255, 0, 128)).save("train/cat/1.jpg", exif=turned)
    views = [pillow.new("RGB", (6, 4), shade) for shade in ("red", "blue")]
    views[0].save("train/cat/2.jpg", format="MPO", save_all=True, append_images=views[1:])
    result = read(images())
    assert result.x.shape == (4, 3, 4, 6)
    assert result.x[:, 0].min() > 1.9


def test_accents_of_folders_may_be_two_signs() -> None:
    folders()
    for half in ("train", "test"):
        (Path(half) / "cat").rename(Path(half) / "Ka\u0308tzchen")
    assert read(images() | {"labels": ["K\u00e4tzchen", "dog"]}).sizes == [2]


LEFT: dict[str, Callable[[], object]] = {
    "heic": lambda: Path("train/cat/a.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(30)),
    "heic under another name": lambda: Path("train/cat/a.old").write_bytes(b"\0\0\0\x18ftypheic" + bytes(30)),
    "a volume": lambda: Path("train/cat/a.nii.gz").write_bytes(b"\x1f\x8b" + bytes(30)),
    "an archive": lambda: Path("train/cat/a.zip").write_bytes(b"PK" + bytes(30)),
    "a pipe": lambda: os.mkfifo("train/cat/0.jpg"),
    "a link that leads nowhere": lambda: Path("train/cat/1.png").symlink_to("nowhere"),
    "a name of two lines": lambda: Path("train/cat/a\nb.heic").write_bytes(b"x"),
    "a name that is no text": lambda: Path(os.fsdecode(b"train/cat/\xff.heic")).write_bytes(b"x"),
    "beside the folders": lambda: png("train/0.png"),
    "in a folder below": lambda: png("train/cat/patient-1/0.png"),
}


@pytest.mark.parametrize("kind", LEFT)
def test_no_image_is_left_in_silence(kind: str) -> None:
    folders()
    LEFT[kind]()
    with raises(ScenarioError, "data.image-left", names="train") as caught:
        read(images())
    assert "\n" not in str(caught.value)
    str(caught.value).encode()  # which a terminal can show


def test_folders_below_a_class_are_read_by_a_key() -> None:
    folders()
    png("train/cat/patient-1/series/0.png")
    data = images()
    assert followed(data) == ["data.images.nested=true"]
    assert read(data).sizes == [3]

    Path("train/cat/loop").symlink_to(Path("train/cat").resolve())
    with raises(ScenarioError, "data.image-left", names="loop"):
        read(data)


def test_a_class_that_vanishes_is_refused() -> None:
    folders()
    shutil.rmtree("train/dog")
    with raises(ScenarioError, "data.labels", names="'dog'"):
        read(images())
    Path("train/dog").mkdir()
    with raises(ScenarioError, "data.empty-class", names="'dog'"):
        read(images())
    Path("train/dog").rename("train/Dog")
    with raises(ScenarioError, "data.labels", names="'Dog'.*'dog'"):
        read(images())


def test_a_peer_may_lack_a_class_but_not_all() -> None:
    folders()
    for peer in range(3):
        shutil.copytree("train", f"peer-{peer}")
    data = images() | {"root": "peer-{peer}"}
    Path("peer-1/dog/0.png").unlink()
    result = read(data, 3)
    assert result.sizes == [2, 1, 2]
    assert "2 classes (cat 3, dog 2)" in result.line

    shutil.rmtree("peer-1/dog")
    with raises(ScenarioError, "data.labels", names="peer-1.*'dog'"):
        read(data, 3)
    Path("peer-1/dog").mkdir()
    for peer in (0, 2):
        Path(f"peer-{peer}/dog/0.png").unlink()
    with raises(ScenarioError, "data.empty-class", names="'dog'"):
        read(data, 3)


@pytest.mark.parametrize(
    ("root", "test", "moved"),
    [
        ("all", "test", "all"),
        ("all", "test", "all/of/images"),
        ("all/train/cat", "test", "all"),
        ("all/train", "all", "all"),
    ],
)
def test_a_root_beside_its_classes_names_theirs(root: str, test: str, moved: str) -> None:
    folders()
    Path(moved).mkdir(parents=True)
    shutil.move("train", f"{moved}/train")
    shutil.copytree("test", f"{moved}/test")
    data = images() | {"root": root, "test": test}
    with raises(ScenarioError, "data.no-classes-here"):
        read(data)
    assert followed(data)
    assert read(data).sizes == [2]


def test_a_folder_for_each_patient_names_no_single_one() -> None:
    folders()
    for patient in range(3):
        shutil.copytree("train", f"patients/{patient}")
    with raises(ScenarioError, "data.no-classes-here", names="3 places.*nested"):
        read(images() | {"root": "patients"})


@pytest.mark.parametrize(
    ("labels", "code"),
    [
        (["cats", "dogs"], "data.no-classes-here"),
        (["cat", "../test"], "data.labels"),
        (["cat", "train/dog"], "data.labels"),
        (["cat", "."], "data.labels"),
    ],
)
def test_labels_that_are_no_folders_are_refused(labels: list[str], code: str) -> None:
    folders()
    with raises(ScenarioError, code, names=r"'cat|folder in the root"):
        read(images() | {"labels": labels})


def test_images_of_other_sizes_are_resized_by_a_key() -> None:
    folders()
    png("train/cat/1.png", (12, 8))
    data = images()
    assert followed(data) == ["data.images.size=[4, 6]"]
    assert read(data).x.shape == (3, 3, 4, 6)


def deep(path: Path) -> None:
    pillow.fromarray(np.array([[1000, 500, 1500, 1250, 0, 60000]] * 4, np.uint16)).save(path)


def test_16_bits_need_a_window_of_public_constants() -> None:
    folders(deep)
    data = images()
    with raises(ScenarioError, "data.image-window", names=r"data\.images\.window=\[40, 400\]"):
        read(data)
    data["images"] = {"window": [1000, 1000]}
    assert read(data).x[0, 0, 0].tolist() == [0, -2, 2, 1, -2, 2]
    pillow.fromarray(np.full((4, 6), 1250, np.float32)).save("train/dog/1.tif")
    pillow.fromarray(np.full((4, 6), 1250, np.int32)).save("train/dog/2.tif")
    assert read(data).x[2:].eq(1).all()

    png("train/cat/9.png")
    with raises(ScenarioError, "data.image-window", names="8 bits"):
        read(data)


def test_a_pixel_depends_on_no_other_image() -> None:
    folders(deep)
    data = images(window=[1000, 1000], size=[8, 8])
    before = read(data).x[0]
    pillow.fromarray(np.full((4, 6), 65535, np.uint16)).save("train/dog/0.png")
    assert torch.equal(read(data).x[0], before)


@pytest.mark.parametrize("name", ["IM000001", "a.dcm", "a.IMA"])
def test_dicom_is_read_in_its_units(name: str) -> None:
    folders(lambda path: dicom(path, CT, RescaleSlope=1, RescaleIntercept=-1024), name)
    data = images()
    assert followed(data) == ["data.images.window=[40, 400]"]
    x = read(data).x
    assert x.shape == (2, 1, 4, 6)
    assert x[0, 0, 0, :3].tolist() == [0, -1, 0]


def test_kinds_of_dicom_mean_what_they_say() -> None:
    folders(lambda path: dicom(path, CT.astype(np.uint16), "MONOCHROME1"), "a.dcm")
    assert read(images(window=[1064, 400])).x[0, 0, 0, :2].tolist() == [0, 1]  # white is the least value
    folders(lambda path: compressed(path, known=True), "a.dcm")
    assert read(images(window=[1064, 400])).x[0, 0, 0, :2].tolist() == [0, -1]
    folders(lambda path: dicom(path, np.full((4, 6), 192, np.uint8)), "a.dcm")
    assert read(images(window=[128, 256])).x.eq(1).all()
    folders(lambda path: dicom(path, np.full((4, 6, 3), 255, np.uint8), "RGB"), "a.dcm")
    assert read(images()).x.eq(2).all()


WRONG_DICOM: dict[str, tuple[Callable[[Path], object], str]] = {
    "several images": (lambda path: dicom(path, np.zeros((3, 4, 6), np.uint16), frames=3), "3 images"),
    "no image": (lambda path: dicom(path, None), "without an image"),
    "a palette": (lambda path: dicom(path, CT, "PALETTE COLOR"), "PALETTE"),
    "compressed": (lambda path: compressed(path, known=False), "pip install pylibjpeg"),
    "cut short": (lambda path: (dicom(path, CT), path.write_bytes(path.read_bytes()[:-20])), "mend"),
    "a page of a login": (lambda path: path.write_bytes(b"<html>"), "mend"),
    "a slope that is no number": (lambda path: dicom(path, CT, RescaleSlope="nan", RescaleIntercept=0), "finite"),
    "an untrue size": (lambda path: dicom(path, CT, Rows=65000, Columns=65000), "GiB|mend"),
}


@pytest.mark.parametrize("kind", WRONG_DICOM)
def test_wrong_dicom_is_one_line_without_its_content(kind: str) -> None:
    write, names = WRONG_DICOM[kind]
    folders(write, "a.dcm")
    with pytest.raises(ScenarioError) as caught:
        read(images(window=[40, 400]))
    message = str(caught.value)
    assert re.search(names, message)

    assert "a.dcm" in message
    assert "\n" not in message
    assert "Secret" not in message


def test_dicom_is_read_without_warnings_of_its_content(recwarn: pytest.WarningsRecorder) -> None:
    folders(lambda path: dicom(path, CT, PatientBirthDate="Secret"), "a.dcm")
    recwarn.clear()
    read(images(window=[1064, 400]))
    assert not [warning for warning in recwarn if "Secret" in str(warning.message)]


@pytest.mark.parametrize("wrong", ["9.png", "9.gif"])
def test_a_file_that_is_no_one_image_is_named(wrong: str) -> None:
    folders()
    path = Path("test/cat") / wrong
    frames = [pillow.new("L", (6, 4), shade) for shade in (0, 255)]
    if wrong.endswith("gif"):
        frames[0].save(path, save_all=True, append_images=frames[1:])
    else:
        path.write_bytes(b"no image")
    with raises(ScenarioError, "data.image", names=wrong.replace(".", r"\.")):
        read(images())


def test_a_window_is_of_image_folders_only() -> None:
    data = {"dataset": "npz", "root": "a.npz", "images": {"window": [40, 400]}, "batch": {"size": 1}}
    with raises(ScenarioError, "data.images", names="image-folder"):
        read(data)
    with raises(ScenarioError, "images.window", names="width"):
        read(images(window=[40, 0]))
