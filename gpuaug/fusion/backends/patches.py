"""Images of different sizes, resized and written as patches: their arrangement in the output, and the writer in torch.

A *region* is the part of a resized image that is written. The parts of a region outside of the resized image are black.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from gpuaug.core.ragged import Ragged, buffer_length
from gpuaug.fusion.backends.readers import send


class PatchOrder(NamedTuple):
    """Position of a value in the output of its image. Distances are in values.

    Patches are in row-major order of square groups of patches, and within a group in row-major order. With ``merge`` = 2, the
    order of the patches of a region with 2 x 4 patches is:

        0 1 | 4 5
        2 3 | 6 7
    """

    height: int
    """Height of a patch in pixels."""
    width: int
    """Width of a patch in pixels."""
    merge: int
    """Patches per side of a group."""
    patch: int
    """Distance between consecutive patches."""
    y: int
    """Distance between rows of a patch."""
    x: int
    """Distance between columns of a patch."""
    channel: int
    """Distance between channels of a patch."""
    repeat: int = 0
    """Distance between copies of a channel."""
    repeats: int = 1
    """Number of copies of each channel."""

    def view(self, out: Tensor, first_value: int, height: int, width: int) -> Tensor:
        """Return a view of the values of a region.

        Args:
            out: The output.
            first_value: Offset in ``out`` of the first value of the image.
            height: Height of the region in pixels.
            width: Width of the region in pixels.

        Shape:
            - returns: (3, copies, rows of groups, patches per column of a group, rows of a patch, columns of groups, patches
              per row of a group, columns of a patch)
        """
        patch_height = min(self.height, height)
        patch_width = min(self.width, width)
        groups_y = height // (self.merge * patch_height)
        groups_x = width // (self.merge * patch_width)
        group_row = width // patch_width * self.merge * self.patch  # values of a row of groups
        size = (3, self.repeats, groups_y, self.merge, patch_height, groups_x, self.merge, patch_width)
        patch_row = self.merge * self.patch  # values of a row of patches in a group
        strides = (self.channel, self.repeat, group_row, patch_row, self.y, self.merge * patch_row, self.patch, self.x)
        return out.as_strided(size, strides, out.storage_offset() + first_value)


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Arrangement of a batch of N images in the output."""

    shape: tuple[int, ...]
    """Shape of the output."""
    order: PatchOrder
    regions: NDArray[np.int64]
    """(N, 10), one row per image. Columns: offset of the image in the source; its height and width; offset of its first value
    in the output; height and width of the resized image; top, left, height and width of the region in the resized image.
    """
    padded: bool
    """Whether the output has values that belong to no image. They are 0."""
    others: Sequence[NDArray[Any]] = ()
    """Arrays that are returned beside the output, copied to its device together with ``regions``."""

    def allocate(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor for the output. Outputs of similar size have storages of one size, which the allocator reuses."""
        length = math.prod(self.shape)
        out = torch.empty(buffer_length(length * dtype.itemsize) // dtype.itemsize, dtype=dtype, device=device)
        out.resize_(self.shape)  # keeps the storage, and takes less host time than a slice and a view
        return out.zero_() if self.padded else out


@dataclass(frozen=True, eq=False)
class Resampling:
    """Arithmetic of a resize and of the conversion of levels, 0 to 255, to values."""

    cubic: bool
    """Whether the interpolation is bicubic; otherwise it is bilinear. Both antialias."""
    rounds: bool
    """Whether resized images are rounded to levels. Otherwise values between levels are interpolated."""
    levels: Tensor
    """(3, 256) float32: value of each level of each channel."""

    def resized(self, image: Tensor, height: int, width: int) -> Tensor:
        """Return the levels of a resized image, (3, height, width) float32. ``image``: (3, H, W) float32."""
        if image.shape[1:] == (height, width):
            return image
        mode = "bicubic" if self.cubic else "bilinear"
        image = functional.interpolate(image[None], (height, width), mode=mode, align_corners=False, antialias=True)[0]
        return image.clamp_(0, 255).round_() if self.rounds else image

    @functools.cache  # noqa: B019  # keeps 3 KiB per device and dtype
    def levels_on(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``levels`` on a device, of ``dtype`` if levels are rounded, so that values are read from it as they are."""
        return self.levels.to(device, dtype if self.rounds else torch.float32)

    def values(self, levels: Tensor) -> Tensor:
        """Return the values of levels, (3, H, W) float32."""
        table = self.levels_on(levels.device)
        if self.rounds:
            return table.gather(1, levels.flatten(1).long()).view(levels.shape)
        first = table[:, :1, None]
        return first + levels * ((table[:, -1:, None] - first) / 255)


def write_patches(images: Ragged, arrangement: Arrangement, resampling: Resampling, dtype: torch.dtype) -> list[Tensor]:
    """Resize images of 3 channels of bytes, and write them as patches. The reference for the kernel.

    Returns:
        Output of ``dtype``, and ``Arrangement.others`` on its device.
    """
    out = arrangement.allocate(dtype, images.device)
    for image, row in zip(images, arrangement.regions.tolist(), strict=True):
        _, _, _, first_value, resized_height, resized_width, top, left, height, width = row
        resized = resampling.resized(image.float(), resized_height, resized_width)
        # Distances of the region's edges from the resized image: negative numbers crop, positive numbers pad.
        edges = (-left, left + width - resized_width, -top, top + height - resized_height)
        values = resampling.values(functional.pad(resized, edges))
        target = arrangement.order.view(out, first_value, height, width)
        target.copy_(values.view(target.shape[0], 1, *target.shape[2:]))
    return [out, *send(arrangement.others, images.device)]
