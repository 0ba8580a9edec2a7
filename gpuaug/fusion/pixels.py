"""Types of pixels, and conversions between them, in which a whole number stands for its share of its type's largest value."""

import torch
from torch import Tensor

LARGEST = {torch.uint8: 255, torch.uint16: 65535, torch.int16: 32767}
"""Types of images of whole numbers, and the largest value of each, which stands for 1."""

PIXELS = frozenset([*LARGEST, torch.float16, torch.bfloat16, torch.float32, torch.float64])
"""Types of images that a pipeline accepts."""


def share_of(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Whole numbers of a type, float32, as shares of the largest value of that type."""
    # By a tensor: by a number, torch multiplies with its inverse on a GPU, which is not the same for half of all bytes.
    return values / torch.full((), LARGEST[dtype], dtype=torch.float32, device=values.device)


def unit_range(images: Tensor) -> Tensor:
    """Float32 images; whole numbers are divided by the largest value of their type."""
    return share_of(images.float(), images.dtype) if images.dtype in LARGEST else images.float()


def converted(images: Tensor, dtype: torch.dtype, *, copy: bool = False) -> Tensor:
    """Images in another type, rounded once, to the nearest.

    Args:
        images: Of a type in ``PIXELS``.
        dtype: A type in ``PIXELS``. Values are clamped to those that a type of whole numbers has.
        copy: Whether to copy images that have the type already.
    """
    if images.dtype == dtype:
        return images.clone() if copy else images
    if dtype in LARGEST:
        limits = torch.iinfo(dtype)
        return (unit_range(images) * LARGEST[dtype]).round_().clamp_(limits.min, limits.max).to(dtype)
    return (unit_range(images) if images.dtype in LARGEST else images).to(dtype)
