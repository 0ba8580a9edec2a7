"""Types of pixels, and conversions between them, in which a byte stands for its share of 255."""

import torch
from torch import Tensor

PIXELS = frozenset([torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64])
"""Types of images that a pipeline accepts."""


def byte_share(values: Tensor) -> Tensor:
    """Values of bytes, float32, as shares of 255."""
    # By a tensor: by a number, torch multiplies with its inverse on a GPU, which is not the same for half of all bytes.
    return values / torch.full((), 255.0, dtype=torch.float32, device=values.device)


def unit_range(images: Tensor) -> Tensor:
    """Float32 images; uint8 is scaled to [0, 1]."""
    return byte_share(images.float()) if images.dtype == torch.uint8 else images.float()


def converted(images: Tensor, dtype: torch.dtype, *, copy: bool = False) -> Tensor:
    """Images in another type, rounded once, to the nearest.

    Args:
        images: uint8 or floating.
        dtype: uint8, for which values are clamped to [0, 1], or a floating type.
        copy: Whether to copy images that have the type already.
    """
    if images.dtype == dtype:
        return images.clone() if copy else images
    if dtype == torch.uint8:
        return (images.float() * 255).round_().clamp_(0, 255).to(dtype)
    return (unit_range(images) if images.dtype == torch.uint8 else images).to(dtype)
