"""Types of images, conversions between them, and the functions with which formulas of pointwise ops are written.

An integer represents its value divided by the largest value of its type. A *formula* is a function of pixels and of parameters
of an op in ``ops``. The torch executor calls it with tensors, and then ``floor``, ``power``, ``quotient`` and so on are the
functions at the end of this file. For kernels, ``backends/triton/pixel_math.py`` compiles the source code of the formula, in
which these names are the functions of ``pixel_math.py``.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

LARGEST = {torch.uint8: 255, torch.uint16: 65535, torch.int16: 32767}
"""Largest value of each integer type of images, which represents 1."""

IMAGE_DTYPES = frozenset([*LARGEST, torch.float16, torch.bfloat16, torch.float32, torch.float64])
"""Types of images that a pipeline accepts."""


def divided_by_largest(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide float32 values by the largest value of ``dtype``."""
    # The divisor is a tensor: for a Python number, torch on a GPU multiplies by the inverse, which gives a different float32
    # for half of the 256 bytes.
    return values / torch.full((), LARGEST[dtype], dtype=torch.float32, device=values.device)


def unit_range(images: Tensor) -> Tensor:
    """Convert images to float32. Integers are divided by the largest value of their type."""
    return divided_by_largest(images.float(), images.dtype) if images.dtype in LARGEST else images.float()


def converted(images: Tensor, dtype: torch.dtype, *, copy: bool = False) -> Tensor:
    """Convert images to another type. Computed in float32 if one of the types is an integer.

    Integer results are rounded to the nearest integer, halves to even.

    Args:
        images: Images of a dtype in ``IMAGE_DTYPES``.
        dtype: Type in ``IMAGE_DTYPES``. For an integer type, values are clamped to its range.
        copy: Whether to copy images that already have the type.
    """
    if images.dtype == dtype:
        return images.clone() if copy else images
    if dtype in LARGEST:
        limits = torch.iinfo(dtype)
        return (unit_range(images) * LARGEST[dtype]).round_().clamp_(limits.min, limits.max).to(dtype)
    return (unit_range(images) if images.dtype in LARGEST else images).to(dtype)


ByteRule = tuple[float, float]
"""Conversion of values in [0, 1] to bytes, (scale, offset): value · scale + offset, rounded to an integer, halves to even."""

UNCHANGED: ByteRule = (0.0, 0.0)
"""No conversion, which a scale of 0 marks: values are multiples of 1/255 already."""

ROUNDED: ByteRule = (255.0, 0.0)
"""Rounding to the nearest byte, halves to even."""

TRUNCATED: ByteRule = (255.0 * (1 + 2.0**-20), -0.5 + 2.0**-15)
"""Rounding down to a byte: an offset of -0.5 turns rounding to nearest into rounding down.

A value that lies a few units in the last place of float32 below a byte, by rounding errors, becomes that byte: 2**-15 is two
units for numbers near 255, and the scale adds up to 255 · 2**-20.
"""

TRUNCATED_256: ByteRule = (255.999, -0.5 + 2.0**-15)
"""Conversion of floats to bytes by ``torchvision.transforms.v2.functional.to_dtype``: value · 255.999, rounded down."""


def to_bytes(value: Tensor, rule: ByteRule | None) -> Tensor:
    """Round values in [0, 1] to multiples of 1/255: bytes, as floats. ``None`` and ``UNCHANGED`` return ``value``."""
    if rule is None or rule == UNCHANGED:
        return value
    scale, offset = rule
    return divided_by_largest(value.mul(scale).add_(offset).round_(), torch.uint8)


def fixed_point(weights: Tensor, scale: Tensor) -> Tensor:
    """Round the weights of a resize of bytes along one axis. The weights of PyTorch's resize are integers of 16 bits.

    ``scale``: number of input pixels per output pixel.

    Source:
        ``_compute_indices_int16_weights_aa`` of PyTorch chooses the number of bits after the binary point so that the largest
        weight fits 16 bits. Here the number follows from ``scale``; it differs for some scales next to a power of two.
    """
    # For a scale in [2**(e - 1), 2**e) the largest weight is at most 2**(1 - e), so that 14 + e bits fit. In an enlargement it
    # is at most 1: e = 0.
    units_per_one = torch.ldexp(torch.full_like(scale, 2.0**14), torch.frexp(scale.clamp(min=0.5)).exponent)
    return (weights * units_per_one).round_() / units_per_one


def round_half_up(bytes_: Tensor) -> Tensor:
    """Round values in [0, 255] to integers, halves up, and clamp them, as a resize of uint8 images in PyTorch does."""
    return bytes_.add(0.5).floor_().clamp_(0, 255)


# From here on: the functions of formulas. ``pixel_math.py`` has functions of the same names for kernels.

RGB = tuple[Tensor, Tensor, Tensor]
"""Red, green and blue channel of images."""

floor, maximum, minimum, where = torch.floor, torch.maximum, torch.minimum, torch.where


def clamp01(value: Tensor) -> Tensor:
    """Clamp to [0, 1]. NaN stays NaN."""
    return value.clamp(0, 1)


def power(value: Tensor, exponent: Tensor) -> Tensor:
    """Return value ** exponent, for values in [0, 1]."""
    return value.pow(exponent)


def quotient(value: Tensor, divisor: Tensor) -> Tensor:
    """Return value / divisor. ``quotient`` of ``pixel_math.py`` multiplies by 1 / divisor; the last bit may differ."""
    return value / divisor


def exact_quotient(value: Tensor, divisor: Tensor | float) -> Tensor:
    """Return value / divisor, correctly rounded on every device."""
    return value / (divisor if isinstance(divisor, Tensor) else value.new_full((), divisor))


def turned(sector: Tensor, turns: Tensor) -> Tensor:
    """Rotate a hue by ``turns``, a fraction of a circle. The hue and the result are sixths of a circle, in [0, 6).

    Computed in radians, as in Kornia, for equal rounding.
    """
    circle = 2 * math.pi
    angle = circle * torch.remainder(sector / 6.0, 1.0)
    angle = torch.where(angle >= circle, 0.0, angle)  # a rounded remainder may equal the divisor
    angle = torch.remainder(angle + turns * 2 * math.pi, circle)
    angle = torch.where(angle >= circle, 0.0, angle)
    return angle / circle * 6 % 6


def on_rgb(formula: Callable[..., RGB], images: Tensor, *parameters: Tensor) -> Tensor:
    """Apply a formula of the channels r, g and b to images (B, 3, H, W)."""
    return torch.cat(formula(*images.split(1, 1), *parameters), 1)
