"""Resizing with every pixel weighed that falls on one, in torch: an image at a time, as two products of matrices."""

from collections.abc import Callable

import torch
from torch import Tensor

from gpuaug.fusion.ops.geometry import Filter

Window = Callable[[Tensor, Tensor], Tensor]
"""Reads (C, rows, columns) of one image at rows and columns of whole numbers."""


def antialiased(window: Window, resampling: tuple[float, ...], x: Tensor, y: Tensor, kind: Filter) -> Tensor:
    """One image, (C, y, x): the mean of what falls on each output pixel.

    Args:
        window: Reads the image.
        resampling: Scale, first pixel and number of pixels along x, and along y.
        x: Columns of the output, (W',).
        y: Rows of it, (H',).
        kind: How pixels are weighed.
    """
    scale_x, start_x, count_x, scale_y, start_y, count_y = resampling
    if scale_x == scale_y == 1:  # every bit as it is, that of a negative zero too
        return window(start_y + y.clamp(0, count_y - 1), start_x + x.clamp(0, count_x - 1))
    pixels = window(
        start_y + torch.arange(int(count_y), device=x.device), start_x + torch.arange(int(count_x), device=x.device)
    )
    across, down = weights(x, scale_x, int(count_x), kind), weights(y, scale_y, int(count_y), kind)
    made = down @ (pixels @ across.T)
    # 0 · NaN is NaN: one pixel that is no number makes all of the image none. To look for one would hold a GPU's host up.
    return made if made.device.type == "cuda" or made.isfinite().all() else _sums(_sums(pixels, across).mT, down).mT


def _sums(pixels: Tensor, weights: Tensor) -> Tensor:
    """``pixels @ weights.T`` without the pixels that weigh nothing."""
    return torch.stack([pixels[..., each != 0] @ each[each != 0] for each in weights], -1)


def weights(at: Tensor, scale: float, count: int, kind: Filter) -> Tensor:
    """What each of ``count`` pixels weighs in output pixels ``at``: (len(at), count) float32, rows of sum one.

    A triangle is as wide as two output pixels and a cubic (a = -1/2) as four, and both are no narrower than that many input
    pixels.

    Source:
        ``_upsample_bilinear2d_aa`` and ``_upsample_bicubic2d_aa`` of PyTorch.
    """
    centre = ((at.float() + 0.5) * scale)[:, None]
    pixel = torch.arange(count, dtype=torch.float32, device=at.device)
    distance = ((pixel + 0.5 - centre) * min(1 / scale, 1.0)).abs()
    if kind == "triangle":
        shares = (1 - distance).clamp(min=0)
    else:
        near = (1.5 * distance - 2.5) * distance * distance + 1
        far = -0.5 * (((distance - 5) * distance + 8) * distance - 4)
        shares = torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))
    # Without a pixel where the output lies outside of the image, which is filled afterwards.
    total = shares.sum(1, keepdim=True)
    return shares / torch.where(total == 0, 1.0, total)
