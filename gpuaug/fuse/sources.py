"""The images that a plan reads: a batch of one size, or a ragged one, each once or once a view."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.errors import ArgumentError, ArgumentTypeError
from gpuaug.fuse.ops import Size
from gpuaug.ragged import Ragged


def dtype_of(images: Tensor | Ragged) -> torch.dtype:
    """The type of the pixels."""
    return images.dtype if isinstance(images, Tensor) else images.data.dtype


def size_of(images: Tensor | Ragged) -> Size:
    """The size of a batch of images, read on the host.

    Raises:
        ArgumentTypeError: If a ragged batch is not of bytes.
        ArgumentError: If a ragged batch is not what its shapes say.
    """
    if isinstance(images, Tensor):
        return Size(*images.shape)
    if images.data.dtype is not torch.uint8:
        raise ArgumentTypeError(
            f"images must be uint8 in a ragged batch, got {images.data.dtype}. Have gpuaug.collate_ragged make it."
        )
    shapes = images.shapes
    sizes, channels = shapes.sizes, shapes.channels
    if shapes.least < 1:
        empty = int(np.flatnonzero((sizes < 1).any(1))[0])
        raise ArgumentError(
            f"images must have pixels, got {tuple(sizes[empty].tolist())} at {empty} of the batch. Leave it out."
        )
    if len(images.places) != len(sizes) or images.data.numel() != shapes.held:
        raise ArgumentError(
            f"A ragged batch must hold what its shapes say, {shapes.held} elements of {len(sizes)} images, got "
            f"{images.data.numel()} of {len(images.places)}. Have gpuaug.collate_ragged make it."
        )
    return Size(len(sizes), channels, sizes[:, 0], sizes[:, 1])


def viewed(images: Tensor, table: Tensor) -> Tensor:
    """(B, C, H, W) as often as there are rows for each image: views lie behind one another."""
    views = len(table) // max(len(images), 1)
    return images if views <= 1 else images.repeat(views, 1, 1, 1)


class Reader:
    """Reads pixels by their places.

    Args:
        images: (B, C, H, W), or ragged.
        samples: V · B: how many read from them.
    """

    def __init__(self, images: Tensor | Ragged, samples: int) -> None:
        self.channels = images.shape[1] if isinstance(images, Tensor) else images.shapes.channels
        self.dtype = dtype_of(images)
        views = samples // max(len(images), 1)
        self._start: Tensor | None = None
        if isinstance(images, Tensor):
            planes = images.flatten(2)
            self._flat = planes if views <= 1 else planes.repeat(views, 1, 1)
            self._row: Any = images.shape[3]
            return
        starts, heights, widths = images.places.repeat(views, 1).unbind(1)
        self._flat, self._start = images.data, starts[:, None, None]
        packed = images.shapes.layout == "hwc"
        self._pixel = self.channels if packed else 1
        self._plane: Any = 1 if packed else (heights * widths)[:, None, None, None]
        self._row = (widths * self._pixel)[:, None, None]

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """(V · B, C, h, w) at whole pixels (V · B or 1, h or 1, w or 1)."""
        if self._start is None:
            index = (y * self._row + x).expand(self._flat.shape[0], -1, -1)
            every = index[:, None].expand(-1, self.channels, -1, -1)
            return self._flat.gather(2, every.reshape(*self._flat.shape[:2], -1)).view(*self._flat.shape[:2], *index.shape[1:])
        plane = torch.arange(self.channels, device=x.device)[:, None, None] * self._plane
        return self._flat.take((self._start + y * self._row + x * self._pixel)[:, None] + plane)
