"""A fixed feature extractor in front of the model: it costs no privacy, because no private example shapes it.

    image → zero mean, unit variance → scattering → group normalisation → average pooling → unit norm
          → whitening by the features of drawings → unit norm times `norm`

Each example goes through by itself, so the features of one never depend on another: a peer computes for its own data
what a simulation does for all peers. Only the last digit may differ, which libraries round by machine and batch.
Whitening takes mean and covariance from `strokes`, synthetic drawings: it removes what every image of pen strokes has
in common, which otherwise fills most of the clip norm, and evens out what is left.

    scattering.py      the transform
    strokes.py         the drawings
    feature_cache.py   features on disk
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, group_norm

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.machine import available_cores, cpu_model
from flower_privdec.common.user_code import require
from flower_privdec.data.feature_cache import cached
from flower_privdec.data.scattering import INSTALL, Scattering2D, n_paths
from flower_privdec.data.strokes import draw_strokes
from flower_privdec.rows.sparse_rows import Features, SparseRows
from flower_privdec.scenario.sections import FeaturesSection

VERSION = 1  # raise it with any change of the numbers: it invalidates the features cached on disk
CHUNK = 256  # examples that a thread takes at a time
IMAGES = 32  # images that stay in its cache
DRAWINGS = 2000
TINY = 1e-6


def apply_features(x: Features, section: FeaturesSection) -> Tensor:
    """Return the features, float32 [N, D], of images [N, channels, height, width].

    Computed once for the same examples and settings, then read from disk. The name under which a ledger pays stays that
    of the examples: the same private data under another transform is still the same private data.

    Raises:
        ScenarioError: the examples are not images, or of a size or kind that the settings do not fit.

    Privacy: costs nothing; see above.
    """
    shape = tuple(x.shape[1:])
    if isinstance(x, SparseRows) or len(shape) != 3:
        raise ScenarioError(
            f"features.kind={section.kind} needs images [channels, height, width] and this dataset has examples "
            f"of shape {list(shape)}: remove the section features",
            code="features.no-images",
        )
    _check_fit(section, shape)

    # Keys of noise name the machine and these versions, so a feature must not be one that other ones have rounded.
    made_by = [cpu_model(), torch.__version__, features_version()]
    recipe = {"version": VERSION, "by": made_by, **section.model_dump()}
    return cached(recipe, x, partial(_compute, section, x))


def _check_fit(section: FeaturesSection, shape: tuple[int, ...]) -> None:
    """Raise ScenarioError for settings that do not fit images of a shape [channels, height, width]."""
    channels = shape[0]
    side = min(shape[1:])
    reach = 2**section.scales
    if reach >= side:
        raise ScenarioError(
            f"features.scales={section.scales} needs images of more than {reach} pixels a side and these have "
            f"{side}: lower it"
        )

    output_side = -(-side // reach)  # rounded up
    if section.pool > output_side:
        raise ScenarioError(
            f"features.pool={section.pool} must be <= {output_side}, the side of the scattering's output "
            f"for images of {side} pixels at {section.scales} scales"
        )

    total = channels * n_paths(section.scales, section.angles, section.order)
    if section.groups and total % section.groups:
        fitting = [str(groups) for groups in range(1, total + 1) if total % groups == 0]
        raise ScenarioError(
            f"features.groups={section.groups} must divide the {total} channels: take one of "
            f"{', '.join(fitting)}, or 0 for no group normalisation"
        )
    if section.whitening == "strokes" and channels != 1:
        raise ScenarioError(f"features.whitening=strokes is for images of one channel, not {channels}: set it to none")


def features_version() -> str:
    """Return the version of the library whose filters features are made with.

    Raises:
        ScenarioError: it is not installed.
    """
    try:
        return f"kymatio {version('kymatio')}"
    except PackageNotFoundError:
        require("kymatio", "features.kind=scattering", INSTALL)  # which raises
        raise


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
        images = ((x - mean) / (deviation + TINY)).flatten(0, 1)  # [n channels, height, width]
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
    values, vectors = torch.linalg.eigh(torch.cov(rows.T, correction=0))  # eigenvalues ascend

    # Rounding may leave an eigenvalue a little below 0.
    scale = (values.clamp_min(0) / values[-1] + ridge).rsqrt()
    root = (vectors * scale) @ vectors.T
    return mean.to(z.dtype), root.to(z.dtype)


def _unit(z: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(z, dim=1, keepdim=True)
    return z / norms.clamp_min(TINY)


_extractor = lru_cache(maxsize=1)(Extractor)  # the test set's is the training set's


def _compute(section: FeaturesSection, x: Tensor) -> Tensor:
    """Extract the features of all examples, on every core that this process may use."""
    is_terminal = sys.stderr.isatty()
    line_start = "\r" if is_terminal else ""
    threads_before = torch.get_num_threads()

    # A thread for each core, each of which computes by itself: torch must not start more.
    with ThreadPoolExecutor(available_cores(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        extractor = pool.submit(_extractor, section, tuple(x.shape[1:])).result()
        out = x.new_empty(len(x), extractor(x[:1]).shape[1])

        def fill(start: int) -> None:
            out[start : start + CHUNK] = extractor(x[start : start + CHUNK])

        began = time.monotonic()
        for number, _ in enumerate(pool.map(fill, range(0, len(x), CHUNK)), start=1):
            if is_terminal:
                done = min(number * CHUNK, len(x))
                print(f"\rfeatures: {done:,} of {len(x):,} examples", end="", file=sys.stderr, flush=True)
        seconds = time.monotonic() - began
        print(f"{line_start}features: {len(x):,} examples in {seconds:.1f} s", file=sys.stderr)

    # Threads that start later begin with the number that was set last, in whichever thread.
    torch.set_num_threads(threads_before)
    return out
