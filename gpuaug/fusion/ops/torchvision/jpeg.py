"""``v2.JPEG``: the loss of a JPEG file, without a file, in the integer arithmetic of libjpeg-turbo.

A file stores its quantized coefficients without loss. Pixels therefore change only by: conversion to YCbCr, chroma of half
size, a DCT of 8x8 blocks, rounding of its coefficients to multiples of the *steps* of a quality, and the inverse of each. A
*fixed-point* number with n fractional bits is an integer that stands for itself divided by 2**n.

Source: ITU-T T.81 (1992), annexes A and K; Loeffler et al., "Practical fast 1-D DCT algorithms with 11 multiplications", ICASSP
1989. Rounding is that of libjpeg-turbo's files jccolor.c, jcsample.c, jfdctint.c, jcdctmgr.c, jidctint.c, jdsample.c and
jdcolor.c, with its default settings: the slow integer DCT, chroma of half width and height, and smooth upsampling.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from gpuaug.fusion.ops.base import FrontOp, OpDraws, Size
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.ops.torchvision.base import Call, TorchvisionOp
from gpuaug.fusion.pixels import divided_by_largest

LUMA_STEPS = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
"""Steps of the luma coefficients for quality 50, by vertical and horizontal frequency."""

CHROMA_STEPS = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *((99,) * 8,) * 4,
)
"""Steps of the chroma coefficients for quality 50."""

DCT_MATRIX = (
    (8192, 8192, 8192, 8192, 8192, 8192, 8192, 8192),
    (11363, 9633, 6437, 2260, -2260, -6437, -9633, -11363),
    (10703, 4433, -4433, -10703, -10703, -4433, 4433, 10703),
    (9633, -2259, -11362, -6436, 6436, 11362, 2259, -9633),
    (8192, -8192, -8192, 8192, 8192, -8192, -8192, 8192),
    (6437, -11362, 2261, 9633, -9633, -2261, 11362, -6437),
    (4433, -10704, 10704, -4433, -4433, 10704, -10704, 4433),
    (2260, -6436, 9633, -11363, 11363, -9633, 6436, -2260),
)
"""Matrix of a DCT of 8 numbers, (frequency, position), in fixed point with ``DCT_BITS`` fractional bits.

An element is a sum of the rounded constants of libjpeg-turbo's algorithm, so that it may differ from the rounded number.
"""

DCT_BITS = 13
"""Number of fractional bits of ``DCT_MATRIX``."""

KEPT_BITS = 2
"""Number of fractional bits that the first of the two passes of a DCT keeps."""

BLOCK = 8
"""Side of a block in pixels."""

CENTRE = 128
"""Byte that stands for 0 in chroma, and in the input of the DCT."""


class JPEG(TorchvisionOp, FrontOp):
    """``v2.JPEG``: the loss of a file of a random quality, bit for bit.

    Support: fused for uint8 images, in a pass that PyTorch computes for the whole batch; an error for images without one
    or three channels.
    """

    lowers = (v2.JPEG,)
    kernel = "torch"
    names = ("quality",)
    channel_counts = (1, 3)
    description = "JPEG of quality {low} to {high}"
    launches = 140

    def _read(self, transform: Any) -> None:
        self.low, self.high = transform.quality

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        return None if self.units == torch.uint8 else f"it takes uint8 images, not {self.units}"

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw ``"quality"``, (B,), integers from ``low`` to ``high``, both inclusive."""
        return {"quality": np.floor(sampler.uniform() * np.float32(self.high - self.low + 1)) + np.float32(self.low)}

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """``jpeg`` with ``quality``."""
        return [("jpeg", {"quality": int(draws["quality"][sample])})]

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Compress and decompress images, (B, C, H, W) in [0, 1].

        Cost:
            Some 140 launches, and about 60 bytes of memory per pixel and channel.
        """
        pixels = (images * 255).round_().int()
        quality = rows[:, 1].int()
        if images.shape[1] == 1:
            return divided_by_largest(decompressed(pixels[:, 0], quality, LUMA_STEPS)[:, None].float(), torch.uint8)
        height, width = images.shape[2:]
        luma, *chroma = to_ycc(pixels)
        luma = decompressed(luma, quality, LUMA_STEPS)
        blue, red = (upsampled(decompressed(halved(plane), quality, CHROMA_STEPS), height, width) for plane in chroma)
        return divided_by_largest(to_rgb(luma, blue, red).float(), torch.uint8)

    def apply_on_cpu(self, images: Tensor, rows: Tensor) -> Tensor:
        """Compress and decompress images by libjpeg-turbo itself, which is five times as fast on a CPU."""
        pixels = (images * 255).round_().byte()
        compressed = [functional.jpeg(image, int(quality)) for image, quality in zip(pixels, rows[:, 1], strict=True)]
        return divided_by_largest(torch.stack(compressed).float(), torch.uint8)


def fixed(number: float) -> int:
    """Return ``number`` as a fixed-point number with 16 fractional bits."""
    return int(number * 2**16 + 0.5)


def to_ycc(pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert RGB, (B, 3, H, W) int32 bytes, to Y, Cb and Cr, (B, H, W) each."""
    red, green, blue = pixels.unbind(1)
    half = fixed(0.5)
    luma = (fixed(0.299) * red + fixed(0.587) * green + fixed(0.114) * blue + half) >> 16
    offset = (CENTRE << 16) + half - 1
    chroma_blue = (half * blue - fixed(0.168735892) * red - fixed(0.331264108) * green + offset) >> 16
    chroma_red = (half * red - fixed(0.418687589) * green - fixed(0.081312411) * blue + offset) >> 16
    return luma, chroma_blue, chroma_red


def to_rgb(luma: Tensor, chroma_blue: Tensor, chroma_red: Tensor) -> Tensor:
    """Convert Y, Cb and Cr, (B, H, W) int32 each, to RGB, (B, 3, H, W) int32 bytes."""
    blue = chroma_blue - CENTRE
    red = chroma_red - CENTRE
    half = fixed(0.5)
    red_part = (fixed(1.402) * red + half) >> 16
    green_part = (half - fixed(0.34414) * blue - fixed(0.71414) * red) >> 16
    blue_part = (fixed(1.772) * blue + half) >> 16
    return torch.stack((luma + red_part, luma + green_part, luma + blue_part), 1).clamp_(0, 255)


def halved(plane: Tensor) -> Tensor:
    """Halve both sides of a plane, (B, H, W) int32: means of 2x2 pixels, whose halves are rounded down in even columns.

    The sides are rounded up. Behind them, the result has columns up to a whole block, which depend on the last column only.
    """
    height, width = plane.shape[1:]
    columns = -(-width // (2 * BLOCK)) * 2 * BLOCK
    padded = repeat_edge(plane, height + height % 2, columns)
    sums = padded.unflatten(2, (-1, 2)).sum(3, dtype=torch.int32).unflatten(1, (-1, 2)).sum(2, dtype=torch.int32)
    bias = 1 + torch.arange(columns // 2, dtype=torch.int32, device=plane.device) % 2
    means: Tensor = (sums + bias) >> 2
    return means


def upsampled(plane: Tensor, height: int, width: int) -> Tensor:
    """Double both sides of a plane of chroma, and crop it to ``height`` and ``width``: (B, H, W) int32.

    The weights of the nearest pixels per axis are 3/4 and 1/4. Planes of up to two columns are repeated instead.
    """
    plane = plane[:, : -(-height // 2), : -(-width // 2)]
    if plane.shape[2] <= 2:
        return plane.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, :height, :width]
    padded = repeat_edge(plane, plane.shape[1] + 1, plane.shape[2] + 1, before=1)
    middle = 3 * padded[:, 1:-1]
    lines = torch.stack((middle + padded[:, :-2], middle + padded[:, 2:]), 2).flatten(1, 2)
    middle = 3 * lines[:, :, 1:-1]
    pixels = torch.stack(((middle + lines[:, :, :-2] + 8) >> 4, (middle + lines[:, :, 2:] + 7) >> 4), 3).flatten(2)
    return pixels[:, :height, :width]


def repeat_edge(plane: Tensor, height: int, width: int, before: int = 0) -> Tensor:
    """Repeat the last row and column of a plane, (B, H, W) int32, up to ``height`` and ``width``.

    ``before``: number of copies of the first row and column that are added before them.
    """
    if plane.shape[1:] == (height, width) and not before:
        return plane
    rows = torch.arange(-before, height, device=plane.device).clamp_(0, plane.shape[1] - 1)
    columns = torch.arange(-before, width, device=plane.device).clamp_(0, plane.shape[2] - 1)
    return plane[:, rows[:, None], columns]


def decompressed(plane: Tensor, quality: Tensor, base_steps: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return a plane after quantization of its DCT coefficients and the inverse DCT.

    Args:
        plane: Bytes.
        quality: Quality per image, from 1 to 100.
        base_steps: Steps of the coefficients for quality 50.

    Shape:
        - plane: (B, H, W) int32
        - quality: (B,) int32
        - returns: (B, H, W) int32
    """
    height, width = plane.shape[1:]
    lines, columns = -(-height // BLOCK), -(-width // BLOCK)  # numbers of blocks
    blocks = repeat_edge(plane, lines * BLOCK, columns * BLOCK).double() - CENTRE
    matrix = constant(DCT_MATRIX, plane.device)
    # Products and sums of integers below 2**53 are exact in float64, in any order. The three axes after the first are rows of
    # blocks, rows of a block, and pixels of a row.
    blocks = rounded(blocks.view(-1, BLOCK) @ matrix.T, DCT_BITS - KEPT_BITS).view(-1, lines, BLOCK, columns * BLOCK)
    coefficients = rounded(matrix @ blocks, DCT_BITS + KEPT_BITS).view(-1, lines, BLOCK, columns, BLOCK)
    steps = steps_of(quality, constant(base_steps, plane.device))[:, None, :, None, :]
    # The DCT multiplies by 8. Halves are rounded away from 0.
    levels = torch.floor(coefficients.abs().add_(4 * steps).div_(8 * steps)).copysign_(coefficients)
    blocks = rounded(matrix.T @ levels.mul_(steps).view(-1, lines, BLOCK, columns * BLOCK), DCT_BITS - KEPT_BITS)
    pixels = rounded(blocks.view(-1, BLOCK) @ matrix, DCT_BITS + KEPT_BITS + 3) + CENTRE
    return pixels.clamp_(0, 255).int().view(-1, lines * BLOCK, columns * BLOCK)[:, :height, :width]


def steps_of(quality: Tensor, base_steps: Tensor) -> Tensor:
    """Return the steps of the coefficients, (B, 8, 8) float64, for qualities (B,) int32 and the steps for quality 50."""
    percent = torch.where(quality < 50, 5000 // quality, 200 - 2 * quality)[:, None, None]
    steps: Tensor = torch.floor((base_steps * percent + 50) / 100)
    return steps.clamp_(1, 255)


def rounded(numbers: Tensor, bits: int) -> Tensor:
    """Round fixed-point numbers with ``bits`` fractional bits, float64, to integers, halves up."""
    return numbers.mul_(2.0**-bits).add_(0.5).floor_()


@cache
def constant(values: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Return a table of integers as a float64 tensor on a device."""
    return torch.tensor(values, dtype=torch.float64, device=device)
