"""Antialiased resizing in torch, image by image, as two matrix products."""

from collections.abc import Callable

import torch
from torch import Tensor

from gpuaug.fusion.ops.geometry import Filter
from gpuaug.fusion.pixels import fixed_point, round_half_up

MOST_WEIGHTS = 2**24
"""Maximum number of weights in memory at once: as many as enlarge a side of 1,024 pixels to 16,384.

A resize along one axis has a matrix of (output side · input side) weights. Larger matrices are computed in pieces.
"""

PixelReader = Callable[[Tensor, Tensor], Tensor]
"""Function that returns the pixels of one image at the rows (h,) and columns (w,), whole numbers, as (C, h, w) float32."""


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
        x: Indices in the resized image of the columns to return, (W',). Columns outside the image are allowed; the caller
            replaces them.
        y: Indices in the resized image of the rows to return, (H',). Rows outside the image are allowed, too.
        filter_name: Antialiasing filter.
        rounds_axes: Whether to round values in [0, 255] to integers after each axis.
    """
    scale_x, start_x, count_x, scale_y, start_y, count_y = resampling
    if scale_x == scale_y == 1:  # copied, so that all pixels are equal bit for bit, also negative zeros
        return read(start_y + y.clamp(0, count_y - 1), start_x + x.clamp(0, count_x - 1))
    pixels = read(start_y + torch.arange(int(count_y), device=x.device), start_x + torch.arange(int(count_x), device=x.device))
    resized = _resize_columns(pixels, x, scale_x, filter_name, rounds_axes)
    return _resize_columns(resized.mT, y, scale_y, filter_name, rounds_axes).mT


def _resize_columns(pixels: Tensor, output_columns: Tensor, scale: float, filter_name: Filter, rounds: bool) -> Tensor:
    """Resize (C, h, w) to (C, h, len(output_columns)). See ``resize_antialiased``."""
    count = pixels.shape[-1]
    results = []
    pieces = output_columns.split(max(MOST_WEIGHTS // count, 1))
    for piece in pieces:
        start, stop = (0, count) if len(pieces) == 1 else _columns_read(piece, scale, count)
        weights = filter_weights(piece, scale, start, stop, filter_name)
        source = pixels[..., start:stop]
        if rounds:
            results.append(round_half_up(source @ fixed_point(weights, weights.new_tensor(scale)).T))
            continue
        result = source @ weights.T
        # A NaN or an infinite pixel makes all outputs of its row NaN, because 0 · NaN is NaN. Not checked on a GPU, because the
        # host would wait for the result of the check.
        is_accepted = result.device.type == "cuda" or bool(result.isfinite().all())
        results.append(result if is_accepted else _weighted_sums(source, weights))
    return torch.cat(results, -1)


def _columns_read(output_columns: Tensor, scale: float, count: int) -> tuple[int, int]:
    """Return (start, stop) of a range of the ``count`` input columns with all columns from which the outputs are computed."""
    reach = 2 * max(scale, 1.0) + 1  # half of the cubic filter, in input pixels, and one pixel for roundings
    first = int((int(output_columns.min()) + 0.5) * scale - reach)
    last = int((int(output_columns.max()) + 0.5) * scale + reach)
    start = min(max(first, 0), count - 1)
    return start, max(min(last + 1, count), start + 1)


def _weighted_sums(pixels: Tensor, weights: Tensor) -> Tensor:
    """Return ``pixels @ weights.T``, leaving out pixels with weight 0."""
    return torch.stack([pixels[..., of_output != 0] @ of_output[of_output != 0] for of_output in weights], -1)


def filter_weights(outputs: Tensor, scale: float, start: int, stop: int, filter_name: Filter) -> Tensor:
    """Return the weights of the input pixels ``start`` … ``stop - 1`` in each output pixel.

    The weights of an output pixel sum to 1; to 0 for an output pixel that lies too far outside the image.

    The triangle filter is two pixels wide, and the cubic filter (a = -1/2) four: pixels of the input or the output, whichever
    has fewer.

    Shape:
        - outputs: (n,), indices of output pixels
        - returns: (n, stop - start) float32

    Source:
        ``_upsample_bilinear2d_aa`` and ``_upsample_bicubic2d_aa`` of PyTorch.
    """
    centre = ((outputs.float() + 0.5) * scale)[:, None]
    pixel = torch.arange(start, stop, dtype=torch.float32, device=outputs.device)
    distance = ((pixel + 0.5 - centre) * min(1 / scale, 1.0)).abs()
    if filter_name == "triangle":
        pixel_weights = (1 - distance).clamp(min=0)
    else:
        near = (1.5 * distance - 2.5) * distance * distance + 1
        far = -0.5 * (((distance - 5) * distance + 8) * distance - 4)
        pixel_weights = torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))
    # The total is 0 for output pixels outside the image. The torch executor replaces these pixels by the fill.
    total = pixel_weights.sum(1, keepdim=True)
    return pixel_weights / torch.where(total == 0, 1.0, total)
