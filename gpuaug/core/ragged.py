"""Images of different sizes in one flat buffer. The images may be *windows*: the parts that a stage reads of larger images.

A *stage* is work on a batch on the device. A *fused* stage runs a pipeline of ``gpuaug.fuse``. A *clip* is a number of frames
of a video.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.devices import resolve
from gpuaug.core.errors import flag, whole_number

SIDE_LIMIT = 2**24
"""Exclusive limit of a side in pixels. Pixel indices are float32, which is exact up to here."""

MAX_WARPED_SIDE = 2**20
"""Inclusive limit of a side in pixels for warps. Larger coordinates are clamped to the limit, also in the kernels."""

ELEMENTS_LIMIT = 2**31
"""Exclusive limit of the number of values of an image, or of a ragged batch. Kernels index values in 32 bits."""

BUFFER_SIZE_RATIO = 1.125
"""Ratio of consecutive sizes of pixel buffers. Batches of similar size get buffers of one size, which the allocator reuses."""

Layout = Literal["hwc", "chw"]
"""Order of the axes of an image in the buffer: height, width, channels; or channels, height, width."""


class Leaf:
    """Base class of a dataclass that describes tensors on the host. The functions of ``batch.py`` do not visit its fields."""

    __slots__ = ()


@dataclass(eq=False, repr=False, slots=True)
class Shapes(Leaf):
    """Sizes of a batch's images. They stay on the host, which draws the random numbers that depend on the sizes.

    Args:
        sizes: (B, 2) heights and widths.
        channels: Number of channels of every image.
        layout: ``"hwc"``: the channels of a pixel are adjacent. ``"chw"``: each channel is a plane.
        windows: (B, 4) top, left, height and width of the part of each image that the batch holds, with layout ``"hwc"``.
            ``None``: the batch holds whole images.
        frames: Number of frames per clip, if the images are the frames of clips, clip by clip. The frames of a clip have one
            size. 0: the images are not frames of clips.
        full_sizes: (B, 2) heights and widths before the decoder downsampled images for a crop, which is drawn at these sizes.
            ``None``: the images are not downsampled.
    """

    sizes: NDArray[np.int64]
    channels: int
    layout: Layout
    windows: NDArray[np.int64] | None = None
    frames: int = 0
    full_sizes: NDArray[np.int64] | None = None
    shortest_side: int = field(init=False)
    """Shortest side of all images, in pixels."""
    num_elements: int = field(init=False)
    """Number of elements in the buffer."""

    def __post_init__(self) -> None:
        # Computed in the constructor, because a worker process calls it, and the training thread reads the attributes.
        self.shortest_side = int(np.min(self.sizes)) if self.sizes.size else 1
        sizes = self.sizes if self.windows is None else self.windows[:, 2:]
        self.num_elements = int(sizes.prod(1).sum()) * self.channels

    @property
    def samples(self) -> int:
        """Number of clips, or of images that are not frames of clips."""
        return len(self.sizes) // (self.frames or 1)

    def __repr__(self) -> str:
        clips = f" in clips of {self.frames}" if self.frames else ""
        return f"Shapes({len(self.sizes)} images{clips} of {self.channels} channels, {self.layout})"


class Windows(NamedTuple):
    """Part of each image that a stage will read, computed before the images are decoded."""

    table: NDArray[np.int64]
    """(B, 4) top, left, height and width in the images."""
    out: tuple[int, int]
    """Height and width to which the stage resizes the windows."""
    may_downsample: bool = True
    """Whether images may be downsampled when they are decoded.

    True if the stage returns one view, and transforms no targets in pixel coordinates, such as boxes.
    """


@dataclass(frozen=True, eq=False, repr=False)
class Ragged:
    """A batch of images of different sizes in one flat buffer.

    ``gpuaug.collate_ragged`` returns a ``Ragged``; a stage of ``gpuaug.fuse(…, ragged=True)`` accepts one. ``len()`` is the
    number of images. An index returns one image (C, h, w) as a view; iteration yields all images. A loader copies ``data`` and
    ``places`` to the device; ``shapes`` stays on the host.

    If ``shapes.frames`` is T, the batch holds B · T frames of B clips. The frames of a clip have one size; clips may differ in
    size.

    In a loader, a ``DecodeStage`` may decode only the window of each image that the next fused stage reads. Only that stage
    gets a batch of windows.

    Shape:
        - data: (elements,) uint8, uint16 or int16
        - places: (B, 3) int64, per image: offset of its first element in ``data``, height and width. With windows (B, 4)
          int64: offset in ``data`` that the first element of the whole image would have, height and width of the whole image,
          and width of the window
        - shapes: heights, widths, channels and layout of the images, on the host

    Examples:
        >>> images = collate_ragged([torch.zeros(3, 2, 4, dtype=torch.uint8), torch.ones(3, 5, 6, dtype=torch.uint8)])
        >>> len(images), images.device, [tuple(image.shape) for image in images]
        (2, device(type='cpu'), [(3, 2, 4), (3, 5, 6)])
        >>> images.to("cpu")[-1].sum().item()
        90
    """

    data: Tensor
    places: Tensor
    shapes: Shapes

    def __len__(self) -> int:
        return len(self.shapes.sizes)

    def __getitem__(self, index: int) -> Tensor:
        """Return one image as a view; in a batch of windows, the window. Does not wait for the device.

        Args:
            index: Index of the image. Negative indices count from the end.

        Shape:
            - returns: (C, h, w)

        Raises:
            ArgumentTypeError: If ``index`` is not a whole number.
            IndexError: If no image has this index.
        """
        index = whole_number("index", index, "Take images one by one: list(images)[…].", least=None)
        sides = self.shapes.sizes if self.shapes.windows is None else self.shapes.windows[:, 2:]
        height, width = (int(side) for side in sides[index])
        lengths = sides.prod(1) * self.shapes.channels
        start = int(lengths[: range(len(self))[index]].sum())  # ``range(…)[index]``: the index from the start, also if negative
        flat = self.data[start : start + height * width * self.shapes.channels]
        if self.shapes.layout == "hwc":
            return flat.view(height, width, self.shapes.channels).permute(2, 0, 1)
        return flat.view(self.shapes.channels, height, width)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        shapes = self.shapes
        images = f"{shapes.samples} clips of {shapes.frames} frames" if shapes.frames else f"{len(self)} images"
        return f"Ragged({images} of {shapes.channels} channels, {shapes.layout}, {self.data.device})"

    @property
    def device(self) -> torch.device:
        """Device of the images."""
        return self.data.device

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> "Ragged":
        """Copy the batch to ``device``. Not needed with a ``StreamedLoader``, which copies the tensors itself.

        Args:
            device: Target device.
            non_blocking: See ``torch.Tensor.to``: if ``True``, the host does not wait for a copy from page-locked memory.

        Returns:
            The batch on ``device``. ``shapes`` stays on the host.

        Raises:
            ArgumentError, ArgumentTypeError: If ``device`` is not a device, or ``non_blocking`` is not a bool.
            DeviceError: If this machine does not have the device that a str or an int names.
        """
        way_out = "Pass True if the host need not wait for the copy."
        target = device if isinstance(device, torch.device) else resolve(device)  # called per batch: resolve is slower
        arguments = {"device": target, "non_blocking": flag("non_blocking", non_blocking, way_out)}
        return Ragged(self.data.to(**arguments), self.places.to(**arguments), self.shapes)  # type: ignore[call-overload]

    def pin_memory(self, *args: Any) -> "Ragged":
        """Copy the batch to page-locked memory. ``DataLoader(pin_memory=True)`` calls this method.

        Args:
            args: Arguments of ``torch.Tensor.pin_memory``.

        Returns:
            The copy.
        """
        return Ragged(self.data.pin_memory(*args), self.places.pin_memory(*args), self.shapes)


def buffer_length(length: int) -> int:
    """Return the bytes to allocate for ``length`` bytes: the next power of ``BUFFER_SIZE_RATIO``, in pages of 4096 bytes."""
    power = max(int(BUFFER_SIZE_RATIO ** math.ceil(math.log(max(length, 1), BUFFER_SIZE_RATIO))), length)
    return -(-power // 4096) * 4096
