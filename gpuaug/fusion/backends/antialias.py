"""Antialiased resizing in torch, image by image, as two matrix products."""

from collections.abc import Callable

import torch
from torch import Tensor

from gpuaug.fusion.ops.geometry import Filter
from gpuaug.fusion.pixels import fixed_point, round_half_up

MOST_WEIGHTS = 2**24
"""Maximum number of weights that are in memory at once. More would be needed to enlarge an image of 20,000 pixels 16 times."""

PixelReader = Callable[[Tensor, Tensor], Tensor]
"""Function that returns the pixels of one image at the lines (h,) and columns (w,), integers, as (C, h, w) float32."""


def resize_antialiased(
    read: PixelReader,
    resampling: tuple[float, ...],
    x: Tensor,
    y: Tensor,
    filter_name: Filter,
    *,
    rounds_axes: bool = False,
) -> Tensor:
    """Resize one image: return (C, H', W').

    Args:
        read: Function that reads the image.
        resampling: Scale in input pixels per output pixel, first input pixel and number of input pixels along x, then along y.
        x: Indices of the output columns to compute, (W',). They may lie outside the resized image.
        y: Indices of the output rows to compute, (H',). They may lie outside the resized image.
        filter_name: Antialiasing filter.
        rounds_axes: Whether to round values in [0, 255] to integers after each axis.
    """
    scale_x, start_x, count_x, scale_y, start_y, count_y = resampling
    if scale_x == scale_y == 1:  # copied, so that all pixels are equal bit for bit, also negative zeros
        return read(start_y + y.clamp(0, count_y - 1), start_x + x.clamp(0, count_x - 1))
    pixels = read(start_y + torch.arange(int(count_y), device=x.device), start_x + torch.arange(int(count_x), device=x.device))
    resized = _resize_columns(pixels, x, scale_x, filter_name, rounds_axes)
    return _resize_columns(resized.mT, y, scale_y, filter_name, rounds_axes).mT


def _resize_columns(pixels: Tensor, outputs: Tensor, scale: float, filter_name: Filter, rounds: bool) -> Tensor:
    """Resize (C, h, w) to (C, h, len(outputs)). See ``resize_antialiased``."""
    count = pixels.shape[-1]
    results = []
    pieces = outputs.split(max(MOST_WEIGHTS // count, 1))
    for piece in pieces:
        first, last = (0, count) if len(pieces) == 1 else _columns_read(piece, scale, count)
        weights = filter_weights(piece, scale, first, last, filter_name)
        source = pixels[..., first:last]
        if rounds:
            results.append(round_half_up(source @ fixed_point(weights, weights.new_tensor(scale)).T))
            continue
        result = source @ weights.T
        # Not checked on a GPU, because the host would wait for the result of the check.
        is_finite = result.device.type == "cuda" or bool(result.isfinite().all())
        # One NaN makes the whole product NaN, because 0 · NaN is NaN.
        results.append(result if is_finite else _weighted_sums(source, weights))
    return torch.cat(results, -1)


def _columns_read(outputs: Tensor, scale: float, count: int) -> tuple[int, int]:
    """Return (first, last + 1) of a range of columns that contains all columns with a weight in one of ``outputs``."""
    reach = 2 * max(scale, 1.0) + 1
    first = int((int(outputs.min()) + 0.5) * scale - reach)
    last = int((int(outputs.max()) + 0.5) * scale + reach)
    first = min(max(first, 0), count - 1)
    return first, max(min(last + 1, count), first + 1)


def _weighted_sums(pixels: Tensor, weights: Tensor) -> Tensor:
    """Return ``pixels @ weights.T``, leaving out pixels with weight 0."""
    return torch.stack([pixels[..., row != 0] @ row[row != 0] for row in weights], -1)


def filter_weights(outputs: Tensor, scale: float, first: int, last: int, filter_name: Filter) -> Tensor:
    """Return the weights of the input pixels ``first`` … ``last - 1`` in each output pixel, (len(outputs), count) float32.

    The weights of an output pixel sum to 1; to 0 for an output pixel that lies too far outside the image.

    The triangle filter is two pixels wide, and the cubic filter (a = -1/2) four, in pixels of the smaller image.

    Source:
        ``_upsample_bilinear2d_aa`` and ``_upsample_bicubic2d_aa`` of PyTorch.
    """
    centre = ((outputs.float() + 0.5) * scale)[:, None]
    pixel = torch.arange(first, last, dtype=torch.float32, device=outputs.device)
    distance = ((pixel + 0.5 - centre) * min(1 / scale, 1.0)).abs()
    if filter_name == "triangle":
        pixel_weights = (1 - distance).clamp(min=0)
    else:
        near = (1.5 * distance - 2.5) * distance * distance + 1
        far = -0.5 * (((distance - 5) * distance + 8) * distance - 4)
        pixel_weights = torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))
    # The total is 0 for output pixels outside the image, which the caller fills.
    total = pixel_weights.sum(1, keepdim=True)
    return pixel_weights / torch.where(total == 0, 1.0, total)
