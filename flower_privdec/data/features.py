"""A fixed feature extractor in front of the model: it costs no privacy, because no private example shapes it.

    image → zero mean, unit variance → scattering → group normalisation → average pooling → unit norm
          → whitening by the features of drawings → unit norm times `norm`

Each example goes through by itself, so the features of one never depend on another: a peer computes for its own data
what a simulation does for all peers. Only the last digit may differ, which libraries round by machine and batch.
Whitening takes mean and covariance from `strokes`, synthetic drawings: it removes what every image of pen strokes has
in common, which otherwise fills most of the clip norm, and evens out what is left.

Features are cached on disk, checked, and never unpickled. They are as private as the examples they were made from, and
the name of a file is a hash that confirms a guess of all of them: the folder is for its owner alone, and must stay on
the machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, group_norm, pad

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.files import cache_folder, make_owners_folder, owners_file, replacing
from flower_privdec.common.machine import available_cores, cpu_model
from flower_privdec.common.user_code import require
from flower_privdec.rows.keys import keyed_generator
from flower_privdec.rows.sparse_rows import Features, SparseRows
from flower_privdec.scenario.sections import FeaturesSection

_INSTALL = "pip install 'flower-privdec[features]'"


def n_paths(scales: int, angles: int, order: int) -> int:
    """Return the number of output channels for one input channel."""
    second = angles**2 * scales * (scales - 1) // 2
    return 1 + angles * scales + (second if order == 2 else 0)


class Scattering2D:
    """The 2D scattering transform for images of one size: wavelet moduli of wavelet moduli, averaged.

    With Morlet wavelets ψ_{j,θ} at scales 2^j (j < J) and L angles, and a Gaussian low-pass φ of scale 2^J:

        S_0 x = x ⋆ φ      S_1 x = |x ⋆ ψ_{j1,θ1}| ⋆ φ      S_2 x = ||x ⋆ ψ_{j1,θ1}| ⋆ ψ_{j2,θ2}| ⋆ φ   (j1 < j2)

    Filters, padding and the order of channels are kymatio's, and a test holds the numbers to kymatio's own torch
    front end. The cascade is ours because it is three to four times faster on a CPU: all angles of a scale at once,
    few images at a time so that everything stays in cache, and φ, which is separable, as two small matrix products.
    (kymatio.torch also fails to import with scipy 1.15 or later; its 2D modules alone import.)

    Source: Bruna and Mallat 2013; kymatio 0.3 (Andreux et al. 2020), scattering2d.

    Attributes:
        padded: height and width of the images after reflection, multiples of 2^J.
    """

    def __init__(self, shape: tuple[int, int], scales: int, angles: int, order: int) -> None:
        """Make the filters for images of a shape, at least 2^J each way, with J scales, L angles, and order 1 or 2.

        Raises:
            ScenarioError: kymatio is not installed.
        """
        bank_module = require("kymatio.scattering2d.filter_bank", "features.kind=scattering", _INSTALL)
        utils = require("kymatio.scattering2d.utils", "features.kind=scattering", _INSTALL)
        self.shape = shape
        self.scales = scales
        self.order = order
        self.padded: tuple[int, int] = utils.compute_padding(*shape, scales)
        bank = bank_module.filter_bank(*self.padded, scales, angles)
        self._low = [  # φ at each resolution, a Gaussian and so an outer product, as two matrices
            (_blur(level[:, 0], 2 ** (scales - j)), _blur(level[0] / level[0, 0], 2 ** (scales - j)))
            for j, level in enumerate(bank["phi"]["levels"])
        ]
        self._first = [_aliases(bank, j, 0, 2**j) for j in range(scales)]
        self._second = {(j1, j2): _aliases(bank, j2, j1, 2 ** (j2 - j1)) for j2 in range(scales) for j1 in range(j2)}

    def __call__(self, x: Tensor) -> Tensor:
        """Transform images [n, height, width] to [n, n_paths, ~height / 2^J, ~width / 2^J]."""
        (height, width), (tall, wide) = self.shape, self.padded
        top = (tall - height) // 2
        left = (wide - width) // 2
        margins = (left, wide - width - left, top, tall - height - top)
        x = pad(x.unsqueeze(1), margins, mode="reflect").squeeze(1)
        spectrum = torch.fft.fft2(x)
        outputs = [self._average(x, 0).unsqueeze(1)]
        second = []
        for j1 in range(self.scales):
            u1 = _modulus(torch.fft.ifft2(_filter(spectrum, self._first[j1])))  # [n, L, ...]
            outputs.append(self._average(u1, j1))
            if self.order == 2 and j1 + 1 < self.scales:
                spectrum_1 = torch.fft.fft2(u1)
                paths = []
                for j2 in range(j1 + 1, self.scales):
                    u2 = _modulus(torch.fft.ifft2(_filter(spectrum_1, self._second[j1, j2])))  # [n, L, L, ...]
                    paths.append(self._average(u2, j2))
                second.append(torch.cat(paths, 2).flatten(1, 2))  # in kymatio's order
        return torch.cat(outputs + second, 1)

    def _average(self, u: Tensor, j: int) -> Tensor:
        rows, columns = self._low[j]
        return rows @ u @ columns.T


def _float32(values: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def _blur(response: np.ndarray, step: int) -> Tensor:
    """Return a matrix that blurs along an axis, keeps each step-th number, and drops the margin of one."""
    kernel = np.fft.ifft(response.astype(np.float64)).real
    place = np.arange(len(kernel))
    return _float32(kernel[(place[:, None] - place) % len(kernel)][::step][1:-1])


def _aliases(bank: dict[str, Any], scale: int, resolution: int, step: int) -> Tensor:
    """Return ψ of all angles at a scale as the parts that subsampling by `step` folds onto each other.

    Returns:
        [step², L, height / step, width / step, 2], divided by step², each number twice: the filters are real in
        Fourier space and multiply real and imaginary parts alike.
    """
    levels = [psi["levels"][resolution] for psi in bank["psi"] if psi["j"] == scale]
    parts = _split(_float32(np.stack(levels)), step) / step**2
    return parts.unsqueeze(-1).expand(*parts.shape, 2).contiguous()


def _split(x: Tensor, step: int) -> Tensor:
    """Cut the last two axes into step x step blocks and put the blocks first, [step², ..., h, w]."""
    height = x.shape[-2] // step
    width = x.shape[-1] // step
    blocks = x.reshape(*x.shape[:-2], step, height, step, width)
    return blocks.movedim((-4, -2), (0, 1)).flatten(0, 1)


def _filter(spectrum: Tensor, filters: Tensor) -> Tensor:
    """Multiply [..., h, w] by every angle's filter and subsample: [..., L, h / step, w / step], complex."""
    step = round(len(filters) ** 0.5)
    parts = torch.view_as_real(_split(spectrum, step).contiguous()).unsqueeze(-4)
    out = parts[0] * filters[0]
    for part, response in zip(parts[1:], filters[1:], strict=True):
        out.addcmul_(part, response)
    return torch.view_as_complex(out)


def _modulus(z: Tensor) -> Tensor:
    """Return |z|; overwrites z. Vectorised, where torch.abs guards each number against overflow."""
    squares = torch.view_as_real(z).square_()
    return (squares[..., 0] + squares[..., 1]).sqrt_()


VERSION = 1  # raise it with any change of the numbers: it invalidates the features cached on disk
CHUNK, IMAGES = 256, 32  # examples that a thread takes at a time, and images that stay in its cache
DRAWINGS = 2000
TINY = 1e-6


def apply_features(x: Features, section: FeaturesSection) -> Tensor:
    """Return the features, float32 [N, D], of images [N, channels, height, width].

    Computed once for the same examples and settings, then read from disk. The name, under which a ledger pays, stays
    that of the examples: the same private data under another transform is still the same private data.

    Raises:
        ScenarioError: the examples are no images, or of a size or kind that the settings do not fit.

    Privacy: costs nothing; see above.
    """
    shape = tuple(x.shape[1:])
    if isinstance(x, SparseRows) or len(shape) != 3:
        raise ScenarioError(
            f"features.kind={section.kind} needs images [channels, height, width] and this dataset has examples "
            f"of shape {list(shape)}: remove the section features",
            code="features.no-images",
        )
    channels = shape[0]
    side = min(shape[1:])
    reach = 2**section.scales
    if reach >= side:
        raise ScenarioError(
            f"features.scales={section.scales} needs images of more than {reach} pixels a side and these have "
            f"{side}: lower it"
        )
    if section.pool > -(-side // reach):
        raise ScenarioError(
            f"features.pool={section.pool} must be <= {-(-side // reach)}, the side of the scattering's output "
            f"for images of {side} pixels at {section.scales} scales"
        )
    total = channels * n_paths(section.scales, section.angles, section.order)
    if section.groups and total % section.groups:
        fitting = [groups for groups in range(1, total + 1) if total % groups == 0]
        raise ScenarioError(
            f"features.groups={section.groups} must divide the {total} channels: take one of "
            f"{', '.join(map(str, fitting))}, or 0 for no group normalisation"
        )
    if section.whitening == "strokes" and channels != 1:
        raise ScenarioError(f"features.whitening=strokes is for images of one channel, not {channels}: set it to none")
    # Keys of noise name the machine and these versions, so a feature must not be one that other ones have rounded.
    made_by = [cpu_model(), torch.__version__, features_version()]
    return cached({"version": VERSION, "by": made_by, **section.model_dump()}, x, partial(_compute, section, x))


def features_version() -> str:
    """Return the version of the library whose filters features are made with."""
    return f"kymatio {version('kymatio')}"


class Extractor:
    """The features of images of one shape; every example by itself."""

    def __init__(self, section: FeaturesSection, shape: tuple[int, ...]) -> None:
        """Make the filters and, with whitening, take mean and covariance of the drawings' features."""
        self._section = section
        self._scatter = Scattering2D((shape[1], shape[2]), section.scales, section.angles, section.order)
        self._whitening: tuple[Tensor, Tensor] | None = None
        if section.whitening == "strokes":
            drawings = torch.from_numpy(draw_strokes(DRAWINGS, (shape[1], shape[2])))
            self._whitening = whitening(self._scattered(drawings.unsqueeze(1)), section.ridge)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the features [n, D] of images [n, channels, height, width]."""
        z = self._scattered(x)
        if self._whitening is not None:
            mean, matrix = self._whitening
            z = _unit((z - mean) @ matrix)
        return z.mul_(self._section.norm)

    def _scattered(self, x: Tensor) -> Tensor:
        """Return scattering coefficients, normalised and pooled, [n, D], each row of norm 1."""
        deviation, mean = torch.std_mean(x, (1, 2, 3), correction=0, keepdim=True)
        images = ((x - mean) / (deviation + TINY)).flatten(0, 1)
        paths = torch.cat([self._scatter(part) for part in torch.split(images, IMAGES)])
        z = paths.reshape(len(x), -1, *paths.shape[-2:])
        if self._section.groups:
            z = group_norm(z, self._section.groups)
        return _unit(adaptive_avg_pool2d(z, self._section.pool).flatten(1))


def whitening(z: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Return mean and (Σ / λ_max + ridge I)^{-1/2} of the rows of z, with Σ their covariance.

    The symmetric root does not depend on which eigenvectors a machine's library happens to return.
    """
    rows = z.double()
    mean = rows.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov(rows.T, correction=0))
    scale = (values.clamp_min(0) / values[-1] + ridge).rsqrt()
    return mean.to(z.dtype), ((vectors * scale) @ vectors.T).to(z.dtype)


def _unit(z: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(z, dim=1, keepdim=True)
    return z / norms.clamp_min(TINY)


_extractor = lru_cache(maxsize=1)(Extractor)  # the test set's is the training set's


def _compute(section: FeaturesSection, x: Tensor) -> Tensor:
    """Extract the features of all examples, on every core that this process may use."""
    before = torch.get_num_threads()
    with ThreadPoolExecutor(available_cores(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        extractor = pool.submit(_extractor, section, tuple(x.shape[1:])).result()
        out = x.new_empty(len(x), extractor(x[:1]).shape[1])

        def fill(start: int) -> None:
            out[start : start + CHUNK] = extractor(x[start : start + CHUNK])

        began, moving = time.monotonic(), sys.stderr.isatty()  # on a terminal a line is updated
        for number, _ in enumerate(pool.map(fill, range(0, len(x), CHUNK)), start=1):
            if moving:
                done = min(number * CHUNK, len(x))
                print(f"\rfeatures: {done:,} of {len(x):,} examples", end="", file=sys.stderr, flush=True)
        start = "\r" if moving else ""
        print(f"{start}features: {len(x):,} examples in {time.monotonic() - began:.1f} s", file=sys.stderr)
    torch.set_num_threads(before)  # what threads started later begin with
    return out


REACH = (9 / 28, 7 / 28)  # how far the points of a stroke lie from the centre, of height and width
PEN = (0.8 / 28, 1.6 / 28)  # half the width of the line, of the shorter side
DOTS = 16  # places in a segment from which distances to the line are measured
# Uniform cubic Catmull-Rom spline: powers of the position in the segment by the four points around it.
_SPLINE = np.array([[0, 2, 0, 0], [-1, 0, 1, 0], [2, -5, 4, -1], [-1, 3, -3, 1]]) / 2


def draw_strokes(count: int, shape: tuple[int, int]) -> np.ndarray:
    """Draw images of one or two curved strokes each, centred by mass.

    Args:
        count: how many; the first ones are the same for any count.
        shape: height and width in pixels.

    Returns:
        float32 [count, height, width], 0 is paper and 1 is ink.
    """
    drawings = []
    for i in range(count):
        generator = keyed_generator(0, "strokes", i)
        ink = np.zeros(shape)
        for _ in range(generator.integers(1, 3)):
            corners = generator.uniform(-1, 1, (generator.integers(3, 6), 2)) * REACH + 0.5
            pen = generator.uniform(*PEN) * min(shape)
            ends = 2 * corners[[0, -1]] - corners[[1, -2]]
            around = np.concatenate([ends[:1], corners, ends[1:]])
            place = np.linspace(0, 1, DOTS)[:, None] ** np.arange(4)
            dots = np.concatenate([place @ _SPLINE @ around[i : i + 4] for i in range(len(corners) - 1)])
            np.maximum(ink, _line(dots * shape - 0.5, pen, shape), out=ink)
        drawings.append(_centred(ink).astype(np.float32))
    return np.stack(drawings)


def _line(dots: np.ndarray, pen: float, shape: tuple[int, int]) -> np.ndarray:
    """Return the ink of a line through some dots: full within 2/3 of the pen, none beyond twice the pen."""
    rows = (np.arange(shape[0]) - dots[:, :1]) ** 2
    columns = (np.arange(shape[1]) - dots[:, 1:]) ** 2
    distance = np.sqrt((rows[:, :, None] + columns[:, None, :]).min(0))
    return np.asarray(np.clip(1.5 - 0.75 * distance / pen, 0, 1))


def _centred(ink: np.ndarray) -> np.ndarray:
    """Shift an image by whole pixels so that its centre of mass is at its centre."""
    mass = ink.sum()
    means = [(ink.sum(1 - axis) * np.arange(size)).sum() / mass for axis, size in enumerate(ink.shape)]
    shift = [round((size - 1) / 2 - mean) for mean, size in zip(means, ink.shape, strict=True)]
    return np.roll(ink, shift, axis=(0, 1))


def cached(recipe: dict[str, Any], x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """Return the result of a computation on `x`, from the cache on disk where it is there.

    Processes that need the same features wait for the first one to compute them. A damaged file is computed
    again; where the folder cannot be written nothing is cached. Both are reported on stderr.

    Args:
        recipe: all that decides the result besides `x`, as JSON; part of the key.
        x: float32 examples [N, ...].
        compute: returns the result, float32 [N, D].
    """
    key = _hash(json.dumps([recipe, list(x.shape), str(x.dtype)], sort_keys=True).encode(), x)
    path = cache_folder() / "features" / f"{key}.safetensors"
    with ExitStack() as stack:
        try:
            make_owners_folder(path.parent)
            lock = stack.enter_context(open(path.with_suffix(".lock"), "a", opener=owners_file))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            _report(f"not cached: {error}")
            return compute()
        if path.exists():
            features = _read(path, key, len(x))
            if features is not None:
                return features
            _report(f"{path} is damaged: computed again")
        result = compute()
        try:
            with replacing(path) as part:
                save_file({"features": result.contiguous()}, part, {"key": key, "checksum": _hash(b"", result)})
        except (OSError, SafetensorError) as error:
            _report(f"not cached: {error}")
        return result


def _hash(start: bytes, x: Tensor) -> str:
    digest = hashlib.sha256(start)
    digest.update(x.contiguous().numpy().data)
    return digest.hexdigest()


def _read(path: Path, key: str, count: int) -> Tensor | None:
    """Return a file's features, or None where they are not, whole and unchanged, those of the key."""
    with suppress(SafetensorError, KeyError):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            features: Tensor = file.get_tensor("features")
        right = features.dtype is torch.float32 and features.ndim == 2 and len(features) == count
        if right and metadata.get("key") == key and metadata.get("checksum") == _hash(b"", features):
            return features
    return None


def _report(message: str) -> None:
    print(f"features: {message}", file=sys.stderr)
