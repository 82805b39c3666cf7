"""The 2D scattering transform for images of one size: wavelet moduli of wavelet moduli, averaged.

With Morlet wavelets ψ_{j,θ} at scales 2^j (j < J) and L angles, and a Gaussian low-pass φ of scale 2^J:

    S_0 x = x ⋆ φ      S_1 x = |x ⋆ ψ_{j1,θ1}| ⋆ φ      S_2 x = ||x ⋆ ψ_{j1,θ1}| ⋆ ψ_{j2,θ2}| ⋆ φ   (j1 < j2)

A wavelet of scale 2^j leaves nothing fine, so its output is kept at each 2^j-th pixel only. Convolutions are products
in Fourier space, and there subsampling adds up the parts of the spectrum that fold onto each other. So a filter is
stored as these parts, and a convolution never makes the pixels that it would drop.

Filters, padding and the order of channels are kymatio's, and a test holds the numbers to kymatio's own torch front end.
The cascade is ours because it is three to four times faster on a CPU: all angles of a scale at once, few images at a
time so that everything stays in cache, and φ, which is separable, as two small matrix products. (kymatio.torch also
fails to import with scipy 1.15 or later; its 2D modules alone import.)

Source: Bruna and Mallat 2013; kymatio 0.3 (Andreux et al. 2020), scattering2d.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from flower_privdec.common.user_code import require

INSTALL = "pip install 'flower-privdec[features]'"


def n_paths(scales: int, angles: int, order: int) -> int:
    """Return the number of output channels for one input channel."""
    first = angles * scales
    if order == 1:
        return 1 + first
    second = angles**2 * scales * (scales - 1) // 2
    return 1 + first + second


class Scattering2D:
    """The transform for images of one size.

    Attributes:
        padded: height and width of the images after reflection, multiples of 2^J.
    """

    def __init__(self, shape: tuple[int, int], scales: int, angles: int, order: int) -> None:
        """Make the filters for images of a shape, at least 2^J each way, with J scales, L angles, and order 1 or 2.

        Raises:
            ScenarioError: kymatio is not installed.
        """
        bank_module = require("kymatio.scattering2d.filter_bank", "features.kind=scattering", INSTALL)
        utils = require("kymatio.scattering2d.utils", "features.kind=scattering", INSTALL)
        self.shape = shape
        self.scales = scales
        self.order = order
        self.padded: tuple[int, int] = utils.compute_padding(*shape, scales)
        bank = bank_module.filter_bank(*self.padded, scales, angles)

        # φ at each resolution: a Gaussian is an outer product, so two matrices blur rows and columns.
        self._low: list[tuple[Tensor, Tensor]] = []
        for j, level in enumerate(bank["phi"]["levels"]):
            step = 2 ** (scales - j)
            of_rows = _blur(level[:, 0], step)
            of_columns = _blur(level[0] / level[0, 0], step)
            self._low.append((of_rows, of_columns))

        # ψ for the image itself, by scale, and for the moduli at scale j1, which have each 2^j1-th pixel, by j1 and j2.
        self._first = [_aliases(bank, j, 0, 2**j) for j in range(scales)]
        self._second: dict[tuple[int, int], Tensor] = {}
        for j2 in range(scales):
            for j1 in range(j2):
                self._second[j1, j2] = _aliases(bank, j2, j1, 2 ** (j2 - j1))

    def __call__(self, x: Tensor) -> Tensor:
        """Transform images [n, height, width] to [n, n_paths, ~height / 2^J, ~width / 2^J]."""
        x = self._reflected(x)
        spectrum = torch.fft.fft2(x)
        outputs = [self._average(x, 0).unsqueeze(1)]

        # Kymatio's order of channels: S_0, all of S_1, then S_2 by j1, θ1, j2 and θ2.
        second = []
        for j1 in range(self.scales):
            u1 = _modulus(torch.fft.ifft2(_filter(spectrum, self._first[j1])))  # [n, L, ...]
            outputs.append(self._average(u1, j1))
            if self.order == 1 or j1 + 1 == self.scales:
                continue

            spectrum_1 = torch.fft.fft2(u1)
            paths = []
            for j2 in range(j1 + 1, self.scales):
                u2 = _modulus(torch.fft.ifft2(_filter(spectrum_1, self._second[j1, j2])))  # [n, L, L, ...]
                paths.append(self._average(u2, j2))
            second.append(torch.cat(paths, 2).flatten(1, 2))
        return torch.cat(outputs + second, 1)

    def _reflected(self, x: Tensor) -> Tensor:
        """Extend images [n, height, width] to the padded size by their mirror images."""
        height, width = self.shape
        tall, wide = self.padded
        top = (tall - height) // 2
        left = (wide - width) // 2
        margins = (left, wide - width - left, top, tall - height - top)
        return pad(x.unsqueeze(1), margins, mode="reflect").squeeze(1)  # torch reflects images with channels only

    def _average(self, u: Tensor, j: int) -> Tensor:
        """Return u ⋆ φ, of each 2^J-th pixel, for u that has each 2^j-th."""
        rows, columns = self._low[j]
        return rows @ u @ columns.T


def _float32(values: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def _blur(response: np.ndarray, step: int) -> Tensor:
    """Return a matrix that blurs along an axis, keeps each step-th number, and drops the margin of one.

    Args:
        response: the filter in Fourier space, [size].
        step: how many numbers become one.
    """
    kernel = np.fft.ifft(response.astype(np.float64)).real
    size = len(kernel)
    place = np.arange(size)
    circulant = kernel[(place[:, None] - place) % size]
    return _float32(circulant[::step][1:-1])


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
    """Return |z|; overwrites z. torch.abs is slower, because it guards each number against overflow."""
    squares = torch.view_as_real(z).square_()
    return (squares[..., 0] + squares[..., 1]).sqrt_()
