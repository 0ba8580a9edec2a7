"""Kornia's modules whose output pixel depends on other pixels: blurs, sharpness, equalize, CLAHE, auto contrast and JPEG.

Each module is *lowered* to an op, or run by Kornia. A *sample* is an image or a clip. A *row* holds an op's parameters for one
sample, in float32. Its first column is the apply mask: 1 to apply the op, 0 to skip it. A *level* is one of the 256 values of
uint8. *Taps* of a motion blur are the pixels with a weight. Class attributes without a comment are explained in ``base.py``.
"""

from typing import Any, Literal

import numpy as np
import torch
from kornia import augmentation as K
from torch import Tensor, nn
from torch.nn import functional

from gpuaug.fusion.ops.base import Array, FrontOp, OpDraws, Size, column, host_tensor
from gpuaug.fusion.ops.kornia_private import coded_as_jpeg, median_of_square
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.pixels import ROUNDED, divided_by_largest, to_bytes

Border = Literal["constant", "reflect", "replicate", "circular"]

ONE_LAUNCH_SIDE = 9
"""Largest side of a blur kernel, in pixels, for which one launch blurs along both axes."""

TAPS_PER_SIDE = 3
"""Largest number of taps of a motion blur per pixel of its side: a resampled line covers less than 2√2 pixels of a row."""

LEVELS = 256
"""Number of bins of a histogram, one per level."""

CONSTANT_RANGE = 2.0**-18
"""Largest difference between maximum and minimum of a channel that counts as constant, for values in [0, 1].

Four times the rounding error of interpolating a constant, and a thousandth of the distance between two levels. Stretching a
smaller range would amplify rounding errors.
"""

LEVEL_TOLERANCE = 255 * CONSTANT_RANGE / 2
"""Offset in levels that is added before rounding down to a level, so that rounding errors do not change the level."""

EQUALIZE, CONTRAST = 1, 2
"""Codes of the picked op, in column 0 of the row of ``EqualizeOrContrast``. A sample that picked neither has 0."""


class NeighbourhoodOp(FrontOp):
    """Base class of blurs: an output pixel depends on the pixels of a rectangle around it, the *blur kernel*.

    Subclasses set ``kernel_size`` in ``_read``.
    """

    takes_any_range = True

    kernel_size: tuple[int, int]
    """(height, width) of the blur kernel in pixels; the largest that can be drawn, if the size is drawn."""

    border: Border
    """Padding mode of the image beyond its border."""

    def _read(self, module: Any) -> None:
        super()._read(module)
        self.border = self.settings["border_type"].name.lower()

    def unsupported_size(self, size: Size) -> str | None:
        """Reason if images are too small to be padded for the blur kernel, so that Kornia raises an error; else ``None``."""
        top, left = (side // 2 for side in self.kernel_size)  # padding on each side of the image
        cannot_reflect = self.border == "reflect" and (size.height <= top or size.width <= left)
        cannot_repeat = self.border == "circular" and (size.height < top or size.width < left)
        return f"kernel_size={self.kernel_size} reaches further than the image" if cannot_reflect or cannot_repeat else None


class BlurOp(NeighbourhoodOp):
    """``RandomGaussianBlur``: separable Gaussian blur.

    Pass type: filter with two launches for a large kernel; with one launch up to 33 x 33 from bytes into bfloat16.
    """

    lowers = (K.RandomGaussianBlur,)
    kernel = "blur"
    column_count = 3
    names = ("sigma",)
    description = "blur {kernel_size[0]}x{kernel_size[1]}"

    def _read(self, module: Any) -> None:
        super()._read(module)
        self.kernel_size = sides_of(self.settings["kernel_size"])

    def unsupported(self) -> str | None:
        """Reason why Kornia runs the module, or ``None`` if it is lowered."""
        if any(side % 2 == 0 or side < 1 for side in self.kernel_size):
            return f"kernel_size={self.settings['kernel_size']} has an even side"
        return "sigma may be 0" if any(lower <= 0 for lower, _ in self.bounds.values()) else None

    @property
    def launches(self) -> int:  # type: ignore[override]
        """Number of kernel launches: 2, one per axis, if a side of the blur kernel exceeds ``ONE_LAUNCH_SIDE``, else 1."""
        return 1 if max(self.kernel_size) <= ONE_LAUNCH_SIDE else 2

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the standard deviations of the Gaussian along y and along x, in pixels. They are equal."""
        out[:, 1] = out[:, 2] = draws["sigma"]

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return blurred images. Sums weighted copies, shifted along x, then y: a GPU may compute convolutions in TF32."""
        mode = self.border
        kernel_height, kernel_width = self.kernel_size
        for side, axis in ((kernel_width, 3), (kernel_height, 2)):
            reach = side // 2
            padding = (reach, reach, 0, 0) if axis == 3 else (0, 0, reach, reach)
            padded = functional.pad(images, padding, mode=mode)
            weights = gaussian(side, rows[:, 1])  # column 1 for both axes, because the columns are equal
            length = images.shape[axis]
            images = sum(  # type: ignore[assignment]
                (padded.narrow(axis, shift, length) * column(weights, shift) for shift in range(1, side)),
                padded.narrow(axis, 0, length) * column(weights, 0),  # the start of the sum
            )
        return images


class BoxBlur(BlurOp):
    """``RandomBoxBlur``: mean of a rectangle of pixels, which is a Gaussian blur whose standard deviation is infinite."""

    lowers = (K.RandomBoxBlur,)
    names = ()  # type: ignore[assignment]
    description = "box blur {kernel_size[0]}x{kernel_size[1]}"

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write infinite standard deviations."""
        out[:, 1:] = np.inf


class MedianBlur(NeighbourhoodOp):
    """``RandomMedianBlur``: median of a square of pixels, per channel. NaN if one of the pixels is not finite."""

    lowers = (K.RandomMedianBlur,)
    kernel = "median"
    description = "median {kernel_size[0]}x{kernel_size[1]}"
    border = "reflect"

    def _read(self, module: Any) -> None:
        self.kernel_size = sides_of(self.settings["kernel_size"])

    def unsupported(self) -> str | None:
        """Reason why Kornia runs the module, or ``None`` if it is lowered."""
        supported = self.kernel_size in ((3, 3), (5, 5))
        return None if supported else f"kernel_size={self.settings['kernel_size']} is neither 3x3 nor 5x5"

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return images whose pixels are the medians of the squares around them."""
        return median_of_square(images, self.kernel_size[0])


class MotionBlurOp(NeighbourhoodOp):
    """``RandomMotionBlur``: weighted mean of the pixels along a line.

    The row lists the taps, the pixels of the blur kernel whose weight is not 0. Unlike in Kornia, a NaN does not spread to
    outputs for which its weight is 0.
    """

    lowers = (K.RandomMotionBlur,)
    kernel = "motion_blur"
    names = ("ksize", "angle", "direction")
    description = "motion blur"

    def _read(self, module: Any) -> None:
        super()._read(module)
        # Kornia draws half the side, rounded down, from [lower, upper), and rounds it down.
        self.reach = int(max(self.bounds["ksize"][0], self.bounds["ksize"][1] - 1))
        """Largest distance in pixels, along an axis, of a tap from the output pixel: half the largest side, rounded down."""
        self.kernel_size = (2 * self.reach + 1, 2 * self.reach + 1)

    def row_width(self, channels: int) -> int:
        """Number of columns: apply mask; number of taps; and per tap, y and x relative to the output pixel, and weight."""
        return 2 + 3 * TAPS_PER_SIDE * self.kernel_size[0]

    def unsupported(self) -> str | None:
        """Reason why Kornia runs the module, or ``None`` if it is lowered."""
        if self.bounds["ksize"][0] < 1:  # the bound of half the side
            return "a drawn kernel_size may be below 3"
        return 'resample="bicubic"' if self.settings["resample"].name == "BICUBIC" else None

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw the side of the blur kernel, equal in a batch, and angle and direction of each sample, see ``line_weights``."""
        reach = np.floor(sampler.shared_by_samples().within(*self.bounds["ksize"])).clip(max=self.reach)
        return {
            "ksize_factor": 2 * reach.astype(np.int32) + 1,
            "angle_factor": sampler.within(*self.bounds["angle"]),
            "direction_factor": sampler.within(*self.bounds["direction"]),
        }

    def kornia_parameters(self, draws: OpDraws, size: Size) -> dict[str, Tensor]:
        """Draws, and ``"idx"``, the index of a sample whose kernel size Kornia uses for all samples."""
        return {**super().kornia_parameters(draws, size), "idx": host_tensor([0], np.int64)}

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the number of taps, and (y, x, weight) of each tap."""
        out[:, 1:] = 0
        for side in np.unique(draws["ksize_factor"]):
            samples = np.flatnonzero(draws["ksize_factor"] == side)
            angle, direction = draws["angle_factor"][samples], draws["direction_factor"][samples]
            weights = line_weights(side // 2, angle, direction, nearest=self.settings["resample"].name == "NEAREST")
            counts = np.count_nonzero(weights, axis=(1, 2))
            # Per weight that is not 0: index in ``samples``, position in the blur kernel, and index among the sample's taps.
            sample, y, x = np.nonzero(weights)
            tap = np.arange(len(sample)) - np.repeat(counts.cumsum() - counts, counts)
            out[samples, 1] = counts
            for index, values in enumerate((y - side // 2, x - side // 2, weights[sample, y, x]), 2):
                out[samples[sample], index + 3 * tap] = values

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return the sum of the weighted taps per output pixel."""
        padded = functional.pad(images, [self.reach] * 4, mode=self.border)
        channels, height, width = images.shape[1:]
        y = torch.arange(self.reach, self.reach + height, device=images.device)[:, None]
        x = torch.arange(self.reach, self.reach + width, device=images.device)
        pixel_index = (y * padded.shape[3] + x).flatten()  # of each output pixel in its padded channel
        total = torch.zeros_like(images)
        for tap_column in range(2, self.row_width(channels), 3):
            offset = rows[:, tap_column].long() * padded.shape[3] + rows[:, tap_column + 1].long()
            index = (pixel_index + offset[:, None])[:, None].expand(-1, channels, -1)
            values = padded.flatten(2).gather(2, index).view_as(images)
            # Columns after the last tap are 0, so the weight is 0, too, and 0 · infinity would be NaN.
            total += (values * column(rows, tap_column + 2)).masked_fill(column(rows, tap_column + 2) == 0, 0)
        return total


class SharpnessOp(FrontOp):
    """``RandomSharpness``: blends each pixel with a weighted mean of the 3x3 pixels around it. Border pixels are unchanged."""

    lowers = (K.RandomSharpness,)
    kernel = "sharpness"
    names = ("sharpness",)
    description = "sharpen"

    def unsupported_size(self, size: Size) -> str | None:
        """Reason if images are smaller than 3x3 pixels, for which Kornia raises an error; else ``None``."""
        return "the image has no 3x3 pixels" if size.height < 3 or size.width < 3 else None

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return sharpened images. The mean has the weight 5/13 for the pixel, and 1/13 for each of its 8 neighbours.

        As in Kornia, images, means and results are clamped to [0, 1]. As in torchvision, means of bytes are rounded to bytes.
        """
        images = images.clamp(0, 1)
        height, width = images.shape[2] - 2, images.shape[3] - 2
        total = 4 * images[:, :, 1:-1, 1:-1]
        for y in range(3):
            for x in range(3):
                total = total + images[:, :, y : y + height, x : x + width]
        smooth = images.clone()
        smooth[:, :, 1:-1, 1:-1] = (total / 13).clamp(0, 1)
        smooth = to_bytes(smooth, ROUNDED) if self.to_bytes is not None else smooth
        return (smooth + (images - smooth) * column(rows, 1)).clamp(0, 1)


class LevelsOp(FrontOp):
    """Base class of ops that map the values of a channel by a lookup table, or by one table per *tile*, a cell of a grid.

    Cost: two launches, one that computes the tables from the images, and one that applies the tables.
    """

    kernel = "levels"
    launches = 2

    entries: int = LEVELS
    """Number of entries in one table."""

    to_levels: tuple[float, float] = (255.0, 0.0)
    """(scale, offset): the level of a value in [0, 1] is floor(value · scale + offset)."""

    def expect_rounding(self) -> None:
        """Allow for rounding errors in the input, by a tolerance in ``to_levels``. Called if a preceding op may cause them."""
        self.to_levels = (self.to_levels[0], LEVEL_TOLERANCE)


class Equalize(LevelsOp):
    """``RandomEqualize``: histogram equalization with 256 levels.

    Pass type: filter with two launches: the first computes a histogram.
    """

    lowers = (K.RandomEqualize,)
    description = "equalize"

    keeps_values: bool = True
    """Whether a channel that cannot be equalized, because ``step`` in ``apply`` is 0, is unchanged, not rounded to levels."""

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return equalized images. Clamps to [0, 1]. Maps a level to (number of pixels at lower levels + step / 2) / step.

        ``step`` is the number of pixels below the highest level, divided by 255. Quotients are rounded down. NaN stays NaN.
        """
        clamped = images.clamp(0, 1)
        factor, offset = self.to_levels
        levels = clamped.nan_to_num(0).mul(factor).add(offset).long().flatten(2)
        counts = levels.new_zeros(*levels.shape[:2], LEVELS).scatter_add_(2, levels, torch.ones_like(levels))
        highest = (counts > 0).mul(torch.arange(LEVELS, device=images.device)).amax(2, keepdim=True)
        step = (levels.shape[2] - counts.gather(2, highest)) // 255
        table = ((counts.cumsum(2) - counts + step // 2) // step.clamp(min=1)).clamp(max=255)
        unequalized = clamped.mul(255).flatten(2) if self.keeps_values else levels.float()
        equalized = torch.where(step == 0, unequalized, table.gather(2, levels).float())
        return torch.where(images.isnan(), images, divided_by_largest(equalized, torch.uint8).view_as(images))


class Clahe(LevelsOp):
    """``RandomClahe``: one table per tile, from a clipped histogram; bilinear mean of the results of the four nearest tables.

    Cost: two launches, and 256 bytes of tables per tile and channel.

    Pass type: filter with two launches: the first computes histograms, and 256 bytes per tile and channel.
    """

    lowers = (K.RandomClahe,)
    names = ("clip_limit_factor",)
    description = "equalize {grid[0]}x{grid[1]} tiles"

    def _read(self, module: Any) -> None:
        super()._read(module)
        self.grid: tuple[int, int] = self.settings["grid_size"]

    def unsupported(self) -> str | None:
        """Reason why Kornia runs the module, or ``None`` if it is lowered."""
        grid = self.grid
        if self.settings["slow_and_differentiable"]:
            return "slow_and_differentiable=True"
        is_valid = type(grid) is tuple and len(grid) == 2 and all(type(side) is int and side > 0 for side in grid)
        return None if is_valid else f"grid_size={grid!r} is no pair of counts"

    def unsupported_size(self, size: Size) -> str | None:
        """Reason if there are not more pixels than tiles along an axis, for which Kornia raises an error; else ``None``."""
        is_small = size.height <= self.grid[0] or size.width <= self.grid[1]
        return f"grid_size={self.grid} needs more pixels than tiles on both axes" if is_small else None

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the clip limit in pixels per level of a tile; all pixels of the tile if the drawn limit is not positive."""
        pixels = tile_side(size.height, self.grid[0]) * tile_side(size.width, self.grid[1])
        limits = draws["clip_limit_factor"].astype(np.float64)
        clip_limits = np.floor(limits * pixels / LEVELS).clip(1, pixels)
        out[:, 1] = np.where(limits > 0, clip_limits, pixels)

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return equalized images. Clamps to [0, 1]. NaN stays NaN."""
        height, width = images.shape[2:]
        tile_height, tile_width = (tile_side(length, count) for length, count in zip((height, width), self.grid, strict=True))
        clamped = images.clamp(0, 1)
        padding = (0, tile_width * self.grid[1] - width, 0, tile_height * self.grid[0] - height)
        factor, offset = self.to_levels
        levels = functional.pad(clamped.nan_to_num(0), padding, mode="reflect").mul(factor).add(offset).long()
        tables = self._tables(
            levels.unfold(2, tile_height, tile_height).unfold(3, tile_width, tile_width).flatten(4).flatten(2, 3), rows
        )
        levels = levels[:, :, :height, :width]
        top, bottom, upper_weight = (values[:, None] for values in nearest_tiles(height, self.grid[0], images.device))
        left, right, left_weight = nearest_tiles(width, self.grid[1], images.device)
        tiles = [tile_row * self.grid[1] + tile_column for tile_row in (top, bottom) for tile_column in (left, right)]
        upper_left, upper_right, lower_left, lower_right = (
            tables.gather(2, (tile * LEVELS + levels).flatten(2)).view_as(images) for tile in tiles
        )
        upper = upper_right + (upper_left - upper_right) * left_weight
        lower = lower_right + (lower_left - lower_right) * left_weight
        equalized = lower + (upper - lower) * upper_weight
        return torch.where(images.isnan(), images, divided_by_largest(equalized, torch.uint8))

    def _tables(self, levels: Tensor, rows: Tensor) -> Tensor:
        """Lookup tables, (B, C, tiles · 256) float32, from the levels of the pixels of every tile, (B, C, tiles, pixels)."""
        pixels = levels.shape[3]
        counts = levels.new_zeros(*levels.shape[:3], LEVELS).scatter_add_(3, levels, torch.ones_like(levels))
        counts = counts.minimum(column(rows, 1).long())
        # Pixels above the limit are distributed equally over all levels. The remainder is distributed to evenly spaced levels.
        excess = pixels - counts.sum(3, keepdim=True)
        remainder = excess % LEVELS
        level = torch.arange(LEVELS, device=levels.device)
        spacing = LEVELS // remainder.clamp(min=1)
        counts += excess // LEVELS + ((level % spacing == 0) & (level // spacing < remainder))
        return counts.cumsum(3).float().mul((LEVELS - 1) / pixels).round().clamp(max=LEVELS - 1).flatten(2)


class AutoContrast(LevelsOp):
    """``RandomAutoContrast``: maps every channel linearly to [0, 1].

    Pass type: filter with two launches: the first computes minimum and maximum.
    """

    lowers = (K.RandomAutoContrast,)
    entries = 2
    description = "auto contrast"

    epsilon: float = 1e-6
    """Number that is added to max - min before the division. If it is 0, a constant channel is unchanged; else it becomes 0."""

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return (value - min) / (max - min + epsilon) per channel. A NaN makes the whole channel NaN.

        Quotients lie in [0, 1] or are NaN, so that Kornia's setting ``clip_output`` has no effect. A constant channel that does
        not become 0 is clamped, as in torchvision.
        """
        minimum, maximum = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
        is_constant = (maximum == minimum) | (maximum - minimum <= CONSTANT_RANGE)
        if not self.epsilon:
            minimum, maximum = minimum.masked_fill(is_constant, 0), maximum.masked_fill(is_constant, 1)
        stretched = (images - minimum) / (maximum - minimum + self.epsilon)
        return stretched.masked_fill(is_constant, 0) if self.epsilon else stretched.clamp(0, 1)


class EqualizeOrContrast(LevelsOp):
    """Equalize or auto contrast, picked per sample, in as many launches as one of them.

    Args:
        name: Name of the module that picks.
        picks: Ops that can be picked.
    """

    description = "equalize or auto contrast"

    def __init__(self, name: str, picks: tuple[Equalize, AutoContrast]) -> None:
        super().__init__(name, nn.Identity())
        self.picks = picks
        self.to_levels = picks[0].to_levels
        self.to_bytes = picks[1].to_bytes  # the conversion does not change equalized bytes

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the code of the picked op in place of the apply mask. ``"parts"``: (op, its draws) of both ops."""
        for op, op_draws in draws["parts"]:
            out[op_draws["apply_mask"], 0] = EQUALIZE if isinstance(op, Equalize) else CONTRAST

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return per sample the result of the picked op. Both ops are computed for all samples."""
        equalize, contrast = (op.apply(images, rows) for op in self.picks)
        return torch.where(column(rows, 0) == EQUALIZE, equalize, contrast)


class JPEG(FrontOp):
    """``RandomJPEG``: the loss of a JPEG file of a random quality, in the arithmetic of Kornia's differentiable codec.

    Pass type: a pass of its own, which PyTorch computes for the whole batch.
    """

    lowers = (K.RandomJPEG,)
    kernel = "torch"
    names = ("jpeg_quality",)
    channel_counts = (3,)
    description = "JPEG of quality {bounds[jpeg_quality][0]:g} to {bounds[jpeg_quality][1]:g}"
    launches = 330

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return images, clamped to [0, 1], after compression and decompression."""
        return coded_as_jpeg(images.clamp(0, 1), rows[:, 1])


def sides_of(size: Any) -> tuple[int, int]:
    """(height, width) of a blur kernel, from a setting that is one side, or both."""
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


def gaussian(side: int, sigma: Tensor) -> Tensor:
    """Gaussian weights with sum 1, (B, side), for standard deviations ``sigma``, (B,), in pixels."""
    distance = torch.arange(side, device=sigma.device, dtype=sigma.dtype) - side // 2
    weights = torch.exp(-(distance**2) / (2 * sigma[:, None] ** 2))
    return weights / weights.sum(1, keepdim=True)


def line_weights(reach: int, angle: Array, direction: Array, *, nearest: bool) -> Array:
    """Weights of motion blurs, (B, side, side), with sum 1 per sample: a line of weights, rotated and resampled.

    Args:
        reach: Half the length of the line in pixels, rounded down. ``side`` is 2 · reach + 1.
        angle: Angles in degrees, (B,), counterclockwise.
        direction: Slopes of the weights along the line, (B,): 0 for equal weights; with 1, the last is 0; with -1, the first.
        nearest: Whether to resample to the nearest weight, rounded as in Kornia, and not bilinearly.
    """
    radians = np.deg2rad(angle.astype(np.float64) % 360)[:, None, None]
    offset = np.arange(-reach, reach + 1)
    # Coordinates of the pixels of the blur kernel along and across the line, (B, side, side).
    along = np.cos(radians) * offset - np.sin(radians) * offset[:, None]
    across = np.sin(radians) * offset + np.cos(radians) * offset[:, None]
    if nearest:
        # First to multiples of 2**-20, so that ties do not depend on rounding errors of the sine. Ties go to the even index.
        along, across = (np.rint(np.rint(offsets * 2**20) / 2**20 + reach) - reach for offsets in (along, across))
    on_line = along.clip(-reach, reach)  # nearest point of the line
    overlap = (1 - abs(along - on_line)).clip(0) * (1 - abs(across)).clip(0)  # bilinear weight of this point
    weights: Array = overlap * (1 - direction[:, None, None] * on_line / reach)
    weights /= weights.sum((1, 2), keepdims=True)
    return weights


def tile_side(length: int, count: int) -> int:
    """Side of a tile in pixels, for ``count`` tiles over ``length`` pixels. The last tiles may extend beyond the image."""
    return (length + count - 1) // count


def nearest_tiles(length: int, count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two nearest of ``count`` tiles per pixel of an axis: (first, second, weight of the first), (length,) each."""
    double_side = 2 * tile_side(length, count)
    # In half pixels, from the centre of an imaginary tile before the first tile.
    position = 2 * torch.arange(length, device=device) + 1 + double_side // 2
    second = position // double_side
    divisor = torch.full((), double_side, dtype=torch.float32, device=device)  # a tensor, so that a GPU divides
    weight = (double_side - position % double_side).float() / divisor
    return (second - 1).clamp(min=0), second.clamp(max=count - 1), weight
