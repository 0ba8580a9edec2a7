"""Image processors of transformers, one class per family: target sizes, order of the output, names of the outputs.

A *grid* is what a processor returns about the size of an image, such as a row of ``image_grid_thw``.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.backends.patches import Arrangement, PatchOrder

Sizes = NDArray[np.int64]
"""(N, 2) heights and widths of images in pixels."""


class Images(NamedTuple):
    """Output of processors with one output size: SigLIP, CLIP, ViT, DINOv3."""

    pixel_values: Tensor
    """(N, 3, H, W)"""


class PaddedImages(NamedTuple):
    """Output of Pixtral's processor."""

    pixel_values: Tensor
    """(N, 3, H, W), with zeros to the right of and below smaller images."""
    image_sizes: Tensor
    """(N, 2) int64: heights and widths of the resized images."""


class Patches(NamedTuple):
    """Output of Qwen2-VL's processor."""

    pixel_values: Tensor
    """(patches of all images, values per patch)"""
    image_grid_thw: Tensor
    """(N, 3) int64: patches along time, height and width."""


class PaddedPatches(NamedTuple):
    """Output of SigLIP2's processor."""

    pixel_values: Tensor
    """(N, maximum number of patches, values per patch), with zeros after the patches of an image."""
    pixel_attention_mask: Tensor
    """(N, maximum number of patches) int32: 1 for the patches of the image."""
    spatial_shapes: Tensor
    """(N, 2) int64: patches along height and width."""


@dataclass(frozen=True)
class Family:
    """Rules of a processor."""

    Output: ClassVar[type[Images | PaddedImages | Patches | PaddedPatches]]
    """Type of the result."""

    def targets(self, sizes: Sizes) -> Sizes:
        """Return the sizes to which images are resized.

        Raises:
            ArgumentError: If the processor does not accept an image of one of the sizes.
        """
        resized = self.resized(np.maximum(sizes, 1))  # for images without pixels, whose ratios would divide by 0
        is_refused = np.minimum(sizes, resized) < 1
        if is_refused.any():
            index = int(is_refused.any(1).argmax())
            height, width = sizes[index].tolist()
            raise ArgumentError(
                "Images must have a pixel before and after the resize, and for Qwen2-VL an aspect ratio of at most 200, got "
                f"height {height} and width {width} of image {index}. Crop it, or leave it out."
            )
        return resized

    @abstractmethod
    def resized(self, sizes: Sizes) -> Sizes:
        """Return the sizes to which images are resized, with a 0 if the processor refuses the image. ``sizes``: at least 1."""

    def grids(self, resized: Sizes) -> Sizes:
        """Return the grid of each resized image, (N, k); by default its height and width."""
        return resized

    @abstractmethod
    def arrange(self, grids: Sizes) -> tuple[tuple[int, ...], PatchOrder, NDArray[np.int64], bool]:
        """Return the shape of the output, its order, the offset of each image in it, (N,), and whether it is padded."""

    def results(self, grids: Sizes) -> Sequence[NDArray[Any]]:
        """Return the arrays of the result after ``pixel_values``: by default the grids, if the result has them."""
        return (grids,)[: len(self.Output._fields) - 1]

    def regions(self, resized: Sizes) -> tuple[NDArray[np.int64], Sizes]:
        """Return (top and left, height and width) of the part of each resized image that is written, (N, 2) each."""
        return np.zeros_like(resized), resized

    def arrangement(self, sizes: Sizes) -> Arrangement:
        """Return the arrangement of images, which are one after the other in the source."""
        resized = self.targets(sizes)
        grids = self.grids(resized)
        shape, order, offsets, padded = self.arrange(grids)
        lengths = sizes[:, 0] * sizes[:, 1] * 3
        regions = np.column_stack([lengths.cumsum() - lengths, sizes, offsets, resized, *self.regions(resized)])
        return Arrangement(shape, order, regions, padded, self.results(grids))


@dataclass(frozen=True)
class OneSize(Family):
    """Images of one size: resized to a size, or to a shorter side and cropped around the centre."""

    Output = Images
    size: tuple[int, ...]
    """Height and width, or the shorter side."""
    crop: tuple[int, ...] | None
    """Height and width of the centre crop."""

    def resized(self, sizes: Sizes) -> Sizes:
        """Return the sizes to which images are resized."""
        if len(self.size) == 2:
            return np.broadcast_to(self.size, sizes.shape)
        longer = self.size[0] * sizes.max(1) / sizes.min(1)
        return np.where(sizes == sizes.min(1, keepdims=True), self.size[0], longer.astype(np.int64)[:, None])

    def grids(self, resized: Sizes) -> Sizes:
        """Return the grid of each resized image, (N, k)."""
        return np.broadcast_to(self._out, resized.shape)

    @property
    def _out(self) -> tuple[int, ...]:
        return self.size if self.crop is None else self.crop

    def regions(self, resized: Sizes) -> tuple[NDArray[np.int64], Sizes]:
        """Return the part of each resized image that is written."""
        margins = resized - self._out
        # Half of the margin is rounded down, also where the crop is larger than the image.
        return np.sign(margins) * (np.abs(margins) // 2), self.grids(resized)

    def arrange(self, grids: Sizes) -> tuple[tuple[int, ...], PatchOrder, NDArray[np.int64], bool]:
        """Return shape, order, offsets and padding of the output."""
        return *_planes(len(grids), *self._out), False


def _planes(count: int, height: int, width: int) -> tuple[tuple[int, ...], PatchOrder, NDArray[np.int64]]:
    """Return shape, order and offsets of images (3, height, width), which are one patch each."""
    area = height * width
    return (count, 3, height, width), PatchOrder(height, width, 1, 0, width, 1, area), np.arange(count) * 3 * area


@dataclass(frozen=True)
class PixtralFamily(Family):
    """Images up to a size, rounded up to whole patches, and padded to the largest of the batch."""

    Output = PaddedImages
    size: tuple[int, int]
    """Largest height and width."""
    patch: tuple[int, ...]
    """Height and width of a patch."""

    def resized(self, sizes: Sizes) -> Sizes:
        """Return the sizes to which images are resized."""
        ratios = (sizes / self.size).max(1, keepdims=True)
        sizes = np.where(ratios > 1, np.floor(sizes / ratios), sizes).astype(np.int64)
        return -(-sizes // self.patch) * self.patch

    def arrange(self, grids: Sizes) -> tuple[tuple[int, ...], PatchOrder, NDArray[np.int64], bool]:
        """Return shape, order, offsets and padding of the output."""
        return *_planes(len(grids), *grids.max(0, initial=1).tolist()), True


@dataclass(frozen=True)
class QwenFamily(Family):
    """Patches of images whose number of pixels is in a range, packed, in groups that the model merges."""

    Output = Patches
    patch: int
    """Side of a patch in pixels."""
    merge: int
    """Patches per side of a group."""
    temporal: int
    """Copies of an image, which is a clip of equal frames."""
    min_pixels: int
    max_pixels: int

    def resized(self, sizes: Sizes) -> Sizes:
        """Return the sizes to which images are resized, with a 0 for aspect ratios above 200."""
        # Sides are multiples of the side of a group of patches, rounded to the nearest, or so that the number of pixels is in
        # range.
        factor = self.patch * self.merge
        counts = np.rint(sizes / factor)
        area = counts[:, :1] * counts[:, 1:] * factor**2
        if (area > self.max_pixels).any() or (area < self.min_pixels).any():
            pixels = sizes[:, :1] * sizes[:, 1:]
            shrink = np.sqrt(pixels / self.max_pixels)
            smaller = np.maximum(1, np.floor(sizes / shrink / factor))
            larger = np.ceil(sizes * np.sqrt(self.min_pixels / pixels) / factor)
            counts = np.where(area > self.max_pixels, smaller, np.where(area < self.min_pixels, larger, counts))
        return np.where(sizes > 200 * sizes[:, ::-1], 0, counts).astype(np.int64) * factor

    def grids(self, resized: Sizes) -> Sizes:
        """Return the grid of each resized image, (N, k)."""
        return np.column_stack([np.ones(len(resized), np.int64), resized // self.patch])

    def arrange(self, grids: Sizes) -> tuple[tuple[int, ...], PatchOrder, NDArray[np.int64], bool]:
        """Return shape, order, offsets and padding of the output."""
        area = self.patch**2
        length = 3 * self.temporal * area
        counts = grids[:, 1] * grids[:, 2]
        order = PatchOrder(
            *(self.patch, self.patch, self.merge, length, self.patch, 1, self.temporal * area, area, self.temporal)
        )
        return (int(counts.sum()), length), order, (counts.cumsum() - counts) * length, False


@dataclass(frozen=True)
class Siglip2Family(Family):
    """Patches of images that are resized to a number of patches close to a maximum, and padded to the maximum."""

    Output = PaddedPatches
    patch: int
    """Side of a patch in pixels."""
    most: int
    """Maximum number of patches."""

    def resized(self, sizes: Sizes) -> Sizes:
        """Return the sizes to which images are resized."""
        # transformers bisects scales from eps / 10 to 100, and ends at most eps below the largest scale that fits. Mostly all
        # scales in between give the same numbers of patches. The largest scale follows from the largest grids.
        eps = 1e-5
        sides = sizes.T.astype(np.float64)
        largest = self.patch * np.minimum(*(self._largest_grids / sides[:, None])).max(0)
        # 1e-14 is more than the rounding error of ``largest``.
        upper = np.maximum(np.minimum(largest * (1 - 1e-14), 100), eps / 10)
        lower = np.maximum(upper - 1.1 * eps, eps / 10)
        grids = self._patches(sides, lower)
        if (grids != self._patches(sides, upper)).any():
            # The bisection, with the same roundings, for all images at once.
            lower, upper = np.full((2, len(sizes)), [[eps / 10], [100]])
            while (upper - lower >= eps).any():
                scale = (lower + upper) / 2
                fits = self._patches(sides, scale).prod(0) <= self.most
                lower, upper = np.where(fits, (scale, upper), (lower, scale))
            grids = self._patches(sides, lower)
        return (grids.T * self.patch).astype(np.int64)

    @cached_property
    def _largest_grids(self) -> NDArray[np.float64]:
        """Grids of at most ``most`` patches that have more with a further row or column: rows and columns, (2, K, 1)."""
        short = np.arange(1.0, math.isqrt(self.most) + 1)
        long = self.most // short
        return np.array(((*short, *long), (*long, *short)))[..., None]

    def _patches(self, sides: NDArray[np.float64], scale: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the numbers of patches along the sides, (2, N), of scaled images."""
        return np.maximum(np.ceil(sides * scale / self.patch), 1)

    def results(self, grids: Sizes) -> Sequence[NDArray[Any]]:
        """Return the grids, and before them the mask of the patches."""
        counts = (grids[:, :1] * grids[:, 1:]).astype(np.int32)
        return (np.arange(self.most, dtype=np.int32) < counts).astype(np.int32), grids

    def grids(self, resized: Sizes) -> Sizes:
        """Return the grid of each resized image, (N, k)."""
        return resized // self.patch

    def arrange(self, grids: Sizes) -> tuple[tuple[int, ...], PatchOrder, NDArray[np.int64], bool]:
        """Return shape, order, offsets and padding of the output."""
        length = 3 * self.patch**2
        order = PatchOrder(self.patch, self.patch, 1, length, 3 * self.patch, 3, 1)
        return (len(grids), self.most, length), order, np.arange(len(grids)) * self.most * length, True
