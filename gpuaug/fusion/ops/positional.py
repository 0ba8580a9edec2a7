"""Kornia's pointwise modules that depend on pixel coordinates: erasing, noise, illumination.

A *sample* is an image or a clip. A *row* holds an op's parameters for one sample, in float32. Its first column is the apply
mask: 1 to apply the op, 0 to skip it. An op runs in torch (``apply``), or in a Triton kernel that gets the row and the op's
*flags*, a bit field of settings. Class attributes without a comment are explained in ``base.py``.

A *noise field* is one standard normal number, or two uniform numbers, per pixel and channel of an image, as a function of a
seed, the index of the field, the channel and the pixel coordinates. The generator Philox 4x32-10 computes random integers,
*words* of 32 bits, and from these uniform numbers, which are equal on every device. The Box-Muller transform computes normal
numbers from the uniform numbers, with logarithms and cosines that differ between devices by a few units in the last place.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from kornia import augmentation as K
from torch import Tensor

from gpuaug.fusion.ops.base import Array, OpDraws, PointOp, Size, column, host_tensor
from gpuaug.fusion.ops.channel import shift
from gpuaug.fusion.ops.kornia_private import bounds, generator_of
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.pixels import clamp01, floor, where

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
"""Multipliers of Philox: of the first and of the third word of the counter."""

INCREMENTS = (0x9E3779B9, 0xBB67AE85)
"""Numbers that are added to the words of Philox's key in each round."""

ROUNDS = 10
"""Number of rounds of Philox."""

NOISE_FIELDS = 2**24
"""Number of noise fields per seed. A row stores the index of the field in float32, which is exact up to 2**24."""

FRAMES = 2**24 - 1
"""Mask of the number of frames per clip in the flags of noise: the lowest 24 bits."""

IN_BYTES = 2**24
"""Bit of the flags of Gaussian noise and erasing: noise is drawn in units of 1/255, and truncated to integers, as for uint8."""

CLAMPS = 2**25
"""Bit of the flags of Gaussian noise: the result is clamped to [0, 1]."""

ERASES_WITH_NOISE = 1
"""Bit of the flags of erasing: the rectangle is filled with a noise field. Without it, with fill values."""

RANGE_EPSILON = 1e-6
"""Number that Kornia adds to the range (largest minus smallest value) of an illumination before it divides by the range."""

_WORD_MASK = 0xFFFFFFFF
"""Mask of the lower 32 bits."""


class Erasing(PointOp):
    """``RandomErasing``: fills a rectangle with a value per channel, or with a noise field."""

    lowers = (K.RandomErasing,)
    takes_any_range = True
    code = 13
    column_count = 5
    value: float | list[float]
    """Fill value: one number, or one number per channel."""
    positional = True
    stores_coordinates = True
    description = "erase"
    erases_masks: ClassVar[bool] = True
    """Whether segmentation masks are set to 0 in the rectangle, as in Kornia, or unchanged."""

    @property
    def keeps_unit_range(self) -> bool:  # type: ignore[override]
        """True if the fill lies in [0, 1]. Noise in units of 1/255 does, because ``noisy`` wraps it around."""
        in_range = bool(np.min(self.value) >= 0 and np.max(self.value) <= 1)
        return bool(self.flags & IN_BYTES) if self.flags & ERASES_WITH_NOISE else in_range

    def row_width(self, channels: int) -> int:
        """Number of columns of a row: the apply mask, the rectangle, and fill values, or seed and index of a noise field."""
        return self.column_count + (2 if self.flags & ERASES_WITH_NOISE else channels)

    def _read(self, module: Any) -> None:
        generator = generator_of(module)
        self._scale = bounds(generator.scale_sampler)
        """(lower, upper) bound of the rectangle's share of the image's area."""
        # If the user's range of aspect ratios contains 1, Kornia draws from its part below 1 and from its part above 1 equally
        # often, with one distribution each.
        names = ("ratio_sampler1", "ratio_sampler2") if hasattr(generator, "index_sampler") else ("ratio_sampler",)
        self._ratios = [bounds(getattr(generator, name)) for name in names]
        """(lower, upper) bound of the aspect ratio, per distribution."""
        self.value = float(generator.value)

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw a rectangle per sample in pixels: ``"xs"``, ``"ys"``, ``"widths"`` and ``"heights"``, (B,) each.

        A share of the image's area and an aspect ratio, height divided by width, are drawn, and give the sides.
        """
        area = sampler.within(*self._scale) * np.float32(size.height * size.width)
        ratio = sampler.within(*self._ratios[0])
        if len(self._ratios) > 1:
            ratio = np.where(sampler.uniform() > 0.5, ratio, sampler.within(*self._ratios[1]))
        heights = np.rint(np.sqrt(area * ratio)).clip(1, size.height)
        widths = np.rint(np.sqrt(area / ratio)).clip(1, size.width)
        uniform_x, uniform_y = sampler.uniform(2)
        return {
            "widths": widths,
            "heights": heights,
            "xs": np.floor(uniform_x * (size.width - widths + 1)),
            "ys": np.floor(uniform_y * (size.height - heights + 1)),
        }

    def kornia_parameters(self, draws: OpDraws, size: Size) -> dict[str, Tensor]:
        """Draws of the rectangles, and the fill value, (B,) each."""
        values = host_tensor(np.full(size.batch, self.value), np.float32)
        return {**super().kornia_parameters(draws, size), "values": values}

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the rectangle as (left, right, top, bottom) in pixels, with right and bottom exclusive, and the fill.

        The fill is one value per channel; with ``ERASES_WITH_NOISE``, seed and index of a noise field, ``draws["field"]``.
        """
        out[:, 1] = draws["xs"]
        out[:, 2] = draws["xs"] + draws["widths"]
        out[:, 3] = draws["ys"]
        out[:, 4] = draws["ys"] + draws["heights"]
        if self.flags & ERASES_WITH_NOISE:
            out[:, 5:] = draws["field"]
        else:
            out[:, 5:] = self.value

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return the images with a filled rectangle."""
        if self.flags & ERASES_WITH_NOISE:
            noise = normal(rows[:, 5], rows[:, 6], *images.shape[1:])
            fill = noisy(torch.zeros_like(noise), noise, self.flags & IN_BYTES, 0)
        else:
            fill = rows[:, 5 : self.row_width(images.shape[1]), None, None]
        return torch.where(self.erased_pixels(images, rows), fill, images)

    def apply_on_cpu(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return the result of ``apply``. Computes noise in the rectangle only."""
        if not self.flags & ERASES_WITH_NOISE:
            return self.apply(images, rows)
        pixel_index = torch.arange(images[0, 0].numel(), device=images.device).view(images.shape[2:])
        erased = images.clone()
        for image, row in zip(erased, rows, strict=True):
            left, right, top, bottom = (int(side) for side in row[1:5])
            noise = _normal_at(pixel_index[top:bottom, left:right], row[5:6].long(), row[6:7], len(image))[0]
            image[:, top:bottom, left:right] = noisy(torch.zeros_like(noise), noise, self.flags & IN_BYTES, 0)
        return erased

    def erased_pixels(self, images: Tensor, rows: Tensor) -> Tensor:
        """Mask of the pixels in the rectangle, (B, 1, H, W) bool, for images (B, C, H, W)."""
        left, right, top, bottom = (column(rows, index) for index in range(1, 5))
        return rectangle_mask(images, left, top, right, bottom)


def rectangle_mask(images: Tensor, left: Tensor, top: Tensor, right: Tensor, bottom: Tensor) -> Tensor:
    """Mask of the pixels in a rectangle, (B, 1, H, W) bool, for images (B, C, H, W) and sides (B, 1, 1, 1) in pixels."""
    x = torch.arange(images.shape[3], device=images.device)
    y = torch.arange(images.shape[2], device=images.device)[:, None]
    return (x >= left) & (x < right) & (y >= top) & (y < bottom)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random 32-bit words per counter and key, by Philox 4x32-10, as int64 tensors of the broadcast shape.

    Args:
        counter: Four 32-bit words, int64 tensors whose shapes broadcast.
        key: Two 32-bit words, int64 tensors whose shapes broadcast with the shapes of the tensors in ``counter``.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product(MULTIPLIERS[0], c0)
        high1, low1 = _product(MULTIPLIERS[1], c2)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0, k1 = (k0 + INCREMENTS[0]) & _WORD_MASK, (k1 + INCREMENTS[1]) & _WORD_MASK
    return c0, c1, c2, c3


def normal(seed: int | Tensor, fields: Tensor, channels: int, height: int, width: int) -> Tensor:
    """Return noise fields of standard normal numbers, (B, C, H, W) float32. Arguments as in ``_field``."""
    return _field(_normal_at, seed, fields, channels, height, width)


def _field(at: Callable[..., Tensor], seed: int | Tensor, fields: Tensor, channels: int, height: int, width: int) -> Tensor:
    """Return the noise field of each sample.

    Args:
        at: Function that computes the numbers: ``_normal_at``, or ``_uniform_pair_at``, whose result has 2 · C channels.
        seed: Seed of 31 bits, one number or one per sample.
        fields: Index of the noise field of each sample.
        channels: Number of channels, C.
        height: Height of the images, H.
        width: Width of the images, W.

    Shape:
        - fields: (B,)
        - returns: (B, C, H, W) float32

    Cost:
        About 150 launches on a GPU. On a CPU one sample at a time is computed, so that intermediate results stay in the caches.
    """
    seeds = torch.as_tensor(seed, device=fields.device).long().expand(len(fields))
    pixel_index = torch.arange(height * width, device=fields.device).view(height, width)
    count = 1 if fields.device.type == "cpu" else max(len(fields), 1)  # samples that are computed at once
    seeds_and_fields = zip(seeds.split(count), fields.split(count), strict=True)
    return torch.cat([at(pixel_index, *piece, channels) for piece in seeds_and_fields])


def _normal_at(pixel_index: Tensor, seeds: Tensor, fields: Tensor, channels: int) -> Tensor:
    """Return normal numbers, (B, C, h, w), of the noise fields with indices ``fields``, (B,), and seeds ``seeds``, (B,).

    ``pixel_index``: index ``y * width + x`` of each pixel in its image, (h, w).
    """
    first, second = _uniform_pair_at(pixel_index, seeds, fields, channels).chunk(2, 1)
    # The smallest positive uniform number, 2**-24, is added to avoid the logarithm of 0.
    return torch.sqrt(-2.0 * torch.log(first + 2.0**-24)) * torch.cos(2.0 * math.pi * second)


def _uniform_pair_at(pixel_index: Tensor, seeds: Tensor, fields: Tensor, channels: int) -> Tensor:
    """Return two uniform numbers in [0, 1) of 24 bits per pixel and channel, (B, 2 · C, h, w). Arguments as in ``_normal_at``.

    The first C channels are the first number of every pair.
    """
    device = fields.device
    seeds = seeds[:, None, None, None]
    field = fields.long()[:, None, None, None]
    channel = torch.arange(channels, device=device)[None, :, None, None]
    zero = torch.zeros_like(pixel_index)
    first, second, _, _ = philox((pixel_index, channel, field, zero), (seeds, torch.zeros_like(seeds)))
    return (torch.cat((first, second), 1) >> 8).float() * 2.0**-24


def _product(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """(high, low) 32-bit words of the 64-bit product of two 32-bit words."""
    product = multiplier * word  # if int64 overflows, its 64 bits still equal the bits of the unsigned product
    return (product >> 32) & _WORD_MASK, product & _WORD_MASK


def noisy(value: Tensor, noise: Tensor, in_bytes: int, clamps: int) -> Tensor:
    """Add ``noise`` to ``value``, in which 1 is the largest pixel value.

    ``in_bytes``: not 0 to compute as in uint8: noise, in units of 1/255, is truncated to integers and divided by 255, and
    without clamping sums wrap around. ``clamps``: not 0 to clamp the result to [0, 1].
    """
    if in_bytes:
        noise = where(noise < 0, -floor(-noise), floor(noise)) / 255.0
    value = value + noise
    if clamps:
        value = clamp01(value)
    elif in_bytes:
        value = value - floor((value * 255.0 + 0.5) / 256.0) * (256.0 / 255.0)
    return value


def _rows_of_images(op: PointOp, draws: OpDraws, size: Size) -> Tensor:
    """Return the rows of images, or of the frames of clips, on the CPU. The column of the apply mask is 0."""
    rows = np.zeros((size.batch, op.column_count), np.float32)
    op.write(draws, size, rows)
    repeated = torch.from_numpy(rows).repeat_interleave(size.images_per_sample, 0)
    op.rows_to_frames(repeated, torch.arange(size.images, device="cpu") % size.images_per_sample, size.frames)
    return repeated


class _NoiseOp(PointOp):
    """Base class of ops with a noise field, which the device computes from a seed and an index.

    Columns of a row: the apply mask; two numbers of the op; the upper and the lower half of the seed; the index of the field.
    """

    column_count = 6
    positional = True
    draws_one_batch_at_a_time = True

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw the numbers of ``bounds``, ``"seed"`` for the batch, and ``"field"``, the index of each sample's noise field.

        The index of the first field is random. Samples have consecutive fields, or one field with ``same_on_batch``. The seed
        has 31 random bits and the index 24. With a random seed alone, two batches of a long run could have equal noise.
        """
        # The upper 55 of the 63 random bits of the sampler's key: 31 for the seed, 24 for the index.
        seed, first_field = divmod(sampler.key() >> 8, NOISE_FIELDS)
        # Frame t of a clip uses the field t after the field of the clip, so that noise differs between frames.
        sample_index = np.zeros(size.batch, np.int64) if self.same_on_batch else np.arange(size.batch)
        fields = (first_field + size.images_per_sample * sample_index) % NOISE_FIELDS
        return {**super().draw_parameters(sampler, size), "seed": seed, "field": fields.astype(np.float32)}

    def flags_for(self, channels: int, frames: int = 1) -> int:
        """``flags``, and the number of frames per clip, from which the kernel computes the noise field of each frame."""
        return self.flags | frames

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write ``names``, the seed in halves of 16 bits, which float32 represents exactly, and the index of the field."""
        super().write(draws, size, out)
        out[:, 3], out[:, 4] = draws["seed"] >> 16, draws["seed"] & 0xFFFF
        out[:, 5] = draws["field"]

    def rows_to_frames(self, rows: Tensor, frame: Tensor, frames: int) -> None:
        """Add the index of each frame in its clip to the index of the clip's noise field, in place.

        Shape:
            - rows: (B · T, row_width), the row of each clip repeated for its T frames
            - frame: (B · T,), index of each frame in its clip
        """
        rows[:, 5] = (rows[:, 5] + frame) % NOISE_FIELDS

    def _noise(self, at: Callable[..., Tensor], rows: Tensor, channels: int, height: int, width: int) -> Tensor:
        """Return the noise fields of samples with rows ``rows``. Other arguments and shape: see ``_field``."""
        return _field(at, (rows[:, 3].long() << 16) + rows[:, 4].long(), rows[:, 5], channels, height, width)


class GaussianNoise(_NoiseOp):
    """``RandomGaussianNoise``: adds std times a noise field, plus mean."""

    lowers = (K.RandomGaussianNoise,)
    code = 12
    description = "noise"
    formula = staticmethod(noisy)

    @property
    def mean_and_std(self) -> tuple[Any, Any]:
        """Mean and standard deviation of the noise."""
        generator = generator_of(self.module)
        return generator.mean, generator.std

    def kornia_parameters(self, draws: OpDraws, size: Size) -> dict[str, Tensor]:
        """Noise field times std, plus mean, (B, C, H, W), or (B · T, C, H, W) for clips."""
        mean, std = self.mean_and_std
        rows = _rows_of_images(self, draws, size)
        rows = rows[:1] if self.same_on_batch and not size.frames else rows
        return {"gaussian_noise": mean + self._noise(_normal_at, rows, size.channels, size.height, size.width) * std}

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write mean and std, then seed and index of the noise field."""
        out[:, 1], out[:, 2] = self.mean_and_std
        super().write(draws, size, out)

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return the images, (B, C, H, W), plus noise."""
        noise = column(rows, 1) + self._noise(_normal_at, rows, *images.shape[1:]) * column(rows, 2)
        return self.formula(images, noise, self.flags & IN_BYTES, self.flags & CLAMPS)  # type: ignore[no-any-return]


class SaltAndPepperNoise(_NoiseOp):
    """``RandomSaltAndPepperNoise``: sets random pixels to 0 (pepper) or 1 (salt) in all channels.

    The draws are two shares: ``"amount"``, of the pixels that are set, and ``"salt_and_pepper"``, of salt among these.
    """

    lowers = (K.RandomSaltAndPepperNoise,)
    code = 21
    names = ("amount", "salt_and_pepper")
    channel_counts = (1, 3)
    description = "salt and pepper"
    keeps_unit_range = True

    def kornia_parameters(self, draws: OpDraws, size: Size) -> dict[str, Tensor]:
        """Both shares, and the masks of salt and pepper, (B, C, H, W), or (B · T, C, H, W) for clips."""
        # Applied to grey images, so that the pixels with the value 1 are salt, and the pixels with the value 0 are pepper.
        grey = host_tensor(np.full((size.images, size.channels, size.height, size.width), 0.5), np.float32)
        pixels = self.apply(grey, _rows_of_images(self, draws, size))
        shares = {f"{name}_factor": torch.from_numpy(draws[name]) for name in self.names}
        return {**shares, "mask_salt": pixels == 1, "mask_pepper": pixels == 0}

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return the images with pixels set to 0 or 1. The pair of uniform numbers of channel 0 decides for all channels."""
        noise, salt = self._noise(_uniform_pair_at, rows, 1, *images.shape[2:]).chunk(2, 1)
        return torch.where(noise < column(rows, 1), (salt < column(rows, 2)).to(images.dtype), images)


def falloff(x: Tensor, nearest: Tensor, remainder: Tensor, decay: Tensor) -> Tensor:
    """Return the exponent of a Gaussian at coordinates ``x`` along an axis, minus the exponent at the pixel ``nearest``.

    ``nearest``: coordinate of the pixel nearest to the centre of the Gaussian. ``remainder``: 2 · (nearest - centre).
    ``decay``: -1 / (2 sigma²). The result is never above 0, and, for a centre halfway between two pixels, exactly 0 at both,
    also if sigma is almost 0.
    """
    distance = x - nearest
    return distance * (distance + remainder) * decay


class _Illumination(PointOp):
    """Base class of ops that add light to all channels: a linear function of the pixel's coordinates, plus a Gaussian.

    Columns of a row: the apply mask; slopes along x and y; offset; scale of the Gaussian; and ``nearest``, ``remainder`` and
    ``decay`` of ``falloff``, each along x and along y.
    """

    code = 22
    column_count = 11
    positional = True
    stores_coordinates = True
    keeps_unit_range = True

    def kornia_parameters(self, draws: OpDraws, size: Size) -> dict[str, Tensor]:
        """Light that is added, (B, C, H, W), or (B · T, C, H, W) for clips."""
        light = self._light(_rows_of_images(self, draws, size), size.height, size.width)
        return {"gradient": light.repeat(1, size.channels, 1, 1)}

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return the images plus the light, clamped to [0, 1] before and after."""
        return shift(images, self._light(rows, *images.shape[2:]))

    def _light(self, rows: Tensor, height: int, width: int) -> Tensor:
        """Light, (B, 1, H, W), from the rows of the samples."""
        x = torch.arange(width, device=rows.device)
        y = torch.arange(height, device=rows.device)[:, None]
        slope_x, slope_y, offset, scale, *axes = (column(rows, index) for index in range(1, self.column_count))
        gaussian = torch.exp(falloff(x, *axes[::2]) + falloff(y, *axes[1::2]))
        return gaussian * scale + x * slope_x + y * slope_y + offset


class LinearIllumination(_Illumination):
    """``RandomLinearIllumination``: adds light that grows from one side of the image to the opposite side."""

    lowers = (K.RandomLinearIllumination,)
    names = ("gain", "sign", "directions")
    description = "linear light"
    ramps = ((0, 1), (0, -1), (1, 0), (-1, 0))
    """For each value of the draw ``"directions"``, (x, y): 1 if the light grows along the axis, -1 if it falls, else 0."""

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write slopes and offset. The Gaussian has scale 0."""
        sides = size.sides
        ramps = np.array(self.ramps)[draws["directions"].astype(np.int64)]
        light = np.copysign(draws["gain"], draws["sign"])[:, None] * self._shares(sides)
        out[:, 1:3] = light * ramps / np.maximum(sides - 1, 1)
        out[:, 3] = -(light * np.minimum(ramps, 0)).sum(1)
        out[:, 4:] = 0

    def _shares(self, sides: Array) -> Any:
        """Shares of the gain by which light changes along x and y, or one number for both. ``sides``: ``Size.sides``."""
        return 1


class LinearCornerIllumination(LinearIllumination):
    """``RandomLinearCornerIllumination``: adds light that grows from one corner of the image to the opposite corner."""

    lowers = (K.RandomLinearCornerIllumination,)
    description = "light from a corner"
    ramps = ((1, 1), (-1, 1), (1, -1), (-1, -1))

    def _shares(self, sides: Array) -> Any:
        """Equal shares, because Kornia divides the sum of both axes by its range. An axis of one pixel has no share."""
        return (sides > 1) / ((sides > 1).sum(-1, keepdims=True) + RANGE_EPSILON)


class GaussianIllumination(_Illumination):
    """``RandomGaussianIllumination``: adds light around a point."""

    lowers = (K.RandomGaussianIllumination,)
    names = ("gain", "sign", "center", "sigma")
    description = "Gaussian light"

    def _read(self, module: Any) -> None:
        super()._read(module)
        for name in ("center", "sigma"):
            self.bounds[f"{name}_y"] = self.bounds[f"{name}_x"] = self.bounds.pop(name)

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write offset, scale, and the parameters of ``falloff``. Draws of centre and sigma are fractions of the sides.

        As in Kornia, the Gaussian is divided by its sum, and then mapped to [0, gain] by its smallest and largest value.
        """
        sides = size.sides
        centre = np.stack((draws["center_x"], draws["center_y"]), 1) * sides - np.float32(0.5)
        sigma = np.stack((draws["sigma_x"], draws["sigma_y"]), 1) * sides
        nearest = np.rint(centre).clip(0, sides - 1)
        out[:, 5:7] = nearest
        out[:, 7:9] = 2 * (nearest - centre)
        # Because of the lower bound, a sigma of 0 gives light at the nearest pixel only, as in Kornia.
        out[:, 9:] = -1 / np.maximum(2 * sigma * sigma, np.float32(1e-30))
        position = np.arange(sides.max(initial=0), dtype=np.float32)
        weights = np.exp(falloff(position, *(out[:, first : first + 2, None] for first in (5, 7, 9))))  # type: ignore[arg-type]
        is_inside = position < sides[..., None]
        # Sum and smallest value of the Gaussian, products of both axes. Its largest value is 1, at ``nearest``.
        total = weights.sum(2, where=is_inside).prod(1)
        smallest = weights.min(2, where=is_inside, initial=1).prod(1)
        out[:, 1:3] = 0
        out[:, 4] = np.copysign(draws["gain"], draws["sign"]) / (1 - smallest + RANGE_EPSILON * total)
        out[:, 3] = -smallest * out[:, 4]
