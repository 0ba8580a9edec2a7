"""Antialiased resizing in torch, image by image, as two matrix products."""

from collections.abc import Callable

import torch
from torch import Tensor

from gpuaug.fusion.ops.geometry import Filter

Window = Callable[[Tensor, Tensor], Tensor]
"""Function that returns (C, rows, columns) of one image at integer rows and columns."""


def antialiased(window: Window, resampling: tuple[float, ...], x: Tensor, y: Tensor, kind: Filter) -> Tensor:
    """Resize one image: return (C, H', W').

    Args:
        window: Function that reads the image.
        resampling: Scale, first pixel and number of pixels along x, and along y.
        x: (W',) columns of the output.
        y: (H',) rows of the output.
        kind: Filter.
    """
    scale_x, start_x, count_x, scale_y, start_y, count_y = resampling
    if scale_x == scale_y == 1:  # bit for bit, negative zeros included
        return window(start_y + y.clamp(0, count_y - 1), start_x + x.clamp(0, count_x - 1))
    pixels = window(
        start_y + torch.arange(int(count_y), device=x.device), start_x + torch.arange(int(count_x), device=x.device)
    )
    across, down = weights(x, scale_x, int(count_x), kind), weights(y, scale_y, int(count_y), kind)
    resized = down @ (pixels @ across.T)
    # One NaN makes the whole product NaN, because 0 · NaN is NaN. On a GPU, the host would wait for the check.
    return resized if resized.device.type == "cuda" or resized.isfinite().all() else _sums(_sums(pixels, across).mT, down).mT


def _sums(pixels: Tensor, weights: Tensor) -> Tensor:
    """Return ``pixels @ weights.T`` without the pixels of weight 0."""
    return torch.stack([pixels[..., row != 0] @ row[row != 0] for row in weights], -1)


def weights(at: Tensor, scale: float, count: int, kind: Filter) -> Tensor:
    """Return the weights of ``count`` pixels in the output pixels ``at``: (len(at), count) float32, rows of sum one.

    The support of a triangle is two output pixels, of a cubic (a = -1/2) four, and of both no less than that many input pixels.

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
    # The total is 0 for output pixels outside the image, which are filled afterwards.
    total = shares.sum(1, keepdim=True)
    return shares / torch.where(total == 0, 1.0, total)
