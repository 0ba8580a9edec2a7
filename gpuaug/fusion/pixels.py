"""Types of images, and conversions between them. An integer represents its value divided by the largest value of its type."""

import torch
from torch import Tensor

LARGEST = {torch.uint8: 255, torch.uint16: 65535, torch.int16: 32767}
"""Largest value of each integer type of images, which represents 1."""

IMAGE_DTYPES = frozenset([*LARGEST, torch.float16, torch.bfloat16, torch.float32, torch.float64])
"""Types of images that a pipeline accepts."""


def divided_by_largest(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide float32 values by the largest value of ``dtype``."""
    # By a tensor, because for a Python number torch on a GPU multiplies by the inverse, which rounds half of all bytes
    # differently.
    return values / torch.full((), LARGEST[dtype], dtype=torch.float32, device=values.device)


def unit_range(images: Tensor) -> Tensor:
    """Convert images to float32. Integers are divided by the largest value of their type."""
    return divided_by_largest(images.float(), images.dtype) if images.dtype in LARGEST else images.float()


def converted(images: Tensor, dtype: torch.dtype, *, copy: bool = False) -> Tensor:
    """Convert images to another type, with a single rounding to the nearest value.

    Args:
        images: Images of a dtype in ``IMAGE_DTYPES`` (``fusion/pixels.py``).
        dtype: Type in ``IMAGE_DTYPES``. For an integer type, values are clamped to its range.
        copy: Whether to copy images that already have the type.
    """
    if images.dtype == dtype:
        return images.clone() if copy else images
    if dtype in LARGEST:
        limits = torch.iinfo(dtype)
        return (unit_range(images) * LARGEST[dtype]).round_().clamp_(limits.min, limits.max).to(dtype)
    return (unit_range(images) if images.dtype in LARGEST else images).to(dtype)
