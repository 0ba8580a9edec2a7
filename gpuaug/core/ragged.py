"""Images of different sizes in one flat buffer."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.devices import resolve
from gpuaug.core.errors import flag, whole_number

Layout = Literal["hwc", "chw"]


class Shapes:
    """Sizes of a batch's images, on the host. Draws depend on them.

    Args:
        sizes: (B, 2) heights and widths.
        channels: Of every image.
        layout: Whether the channels of a pixel are together (``"hwc"``) or in planes (``"chw"``).
        windows: (B, 4) top, left, height and width of the part of each image that the batch holds, in the layout ``"hwc"``.
            ``None``: the batch holds whole images.
        frames: Number of images that are the frames of a clip, one clip behind the other; those of a clip have one size. 0: the
            images belong to no clips.
    """

    __slots__ = ("channels", "frames", "held", "layout", "least", "sizes", "windows")

    def __init__(
        self,
        sizes: NDArray[np.int64],
        channels: int,
        layout: Layout,
        windows: NDArray[np.int64] | None = None,
        frames: int = 0,
    ) -> None:
        self.sizes, self.channels, self.layout, self.windows, self.frames = sizes, channels, layout, windows, frames
        # Computed once, in the process that packs, not on the training thread.
        self.least = int(np.min(sizes)) if sizes.size else 1
        """The shortest side."""
        self.held = int((sizes if windows is None else windows[:, 2:]).prod(1).sum()) * channels
        """Elements that the batch holds."""

    def __repr__(self) -> str:
        clips = f" in clips of {self.frames}" if self.frames else ""
        return f"Shapes({len(self.sizes)} images{clips} of {self.channels} channels, {self.layout})"


class Windows(NamedTuple):
    """The part of each image that a stage reads, known before the images are."""

    table: NDArray[np.int64]
    """(B, 4) top, left, height and width."""
    out: tuple[int, int]
    """Height and width that the stage resizes windows to."""
    alone: bool = True
    """Whether nothing follows the images that is in pixels of theirs, such as boxes."""


@dataclass(frozen=True, eq=False, repr=False)
class Ragged:
    """A batch of images of different sizes, one behind the other.

    Made by ``gpuaug.collate_ragged``; taken by ``gpuaug.fuse`` with ``ragged=True``. Its length is the number of
    images; an index gives one, (C, h, w), as a view, and iterating gives them all. To a loader it is a record of two tensors
    that move and one leaf that stays on the host.

    Where ``shapes.frames`` is T, it holds B · T frames of B clips, each clip of a size of its own.

    In a loader, a ``DecodeStage`` may decode only the window of each image that the fused stage behind it reads. That stage
    alone sees such a batch.

    Shape:
        - data: (elements,) uint8, uint16 or int16
        - places: (B, 3) int64: the first element of each image in ``data``, its height and its width; or (B, 4) where ``data``
          holds windows: the element that the image's first pixel would have, height and width of the image, width of the window
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
        """One image, a view; of a batch of windows, the window. Does not read ``places``, which might wait for the device.

        Args:
            index: Of the image, from 0; below 0 from the end.

        Shape:
            - returns: (C, h, w)

        Raises:
            ArgumentTypeError: If ``index`` is no whole number.
            IndexError: If there is no such image, as of any sequence.
        """
        index = whole_number("index", index, "Take images one by one: list(images)[…].", least=None)
        sides = self.shapes.sizes if self.shapes.windows is None else self.shapes.windows[:, 2:]
        height, width = (int(side) for side in sides[index])
        areas = sides.prod(1) * self.shapes.channels
        start = int(areas[: range(len(self))[index]].sum())
        flat = self.data[start : start + height * width * self.shapes.channels]
        if self.shapes.layout == "hwc":
            return flat.view(height, width, self.shapes.channels).permute(2, 0, 1)
        return flat.view(self.shapes.channels, height, width)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"Ragged({len(self)} images of {self.shapes.channels} channels, {self.shapes.layout}, {self.data.device})"

    @property
    def device(self) -> torch.device:
        """Device of the images."""
        return self.data.device

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> "Ragged":
        """The batch on ``device``. For use without a ``StreamedLoader``, which moves the tensors itself.

        Args:
            device: Where to.
            non_blocking: As of ``torch.Tensor.to``: whether the host goes on meanwhile, from page-locked memory.

        Returns:
            The batch on ``device``. ``shapes`` stay on the host.

        Raises:
            ArgumentError, ArgumentTypeError: If ``device`` is no device, or ``non_blocking`` no flag.
            DeviceError: If this machine does not have the device.
        """
        way_out = "True lets the host go on, from page-locked memory."
        wanted = device if isinstance(device, torch.device) else resolve(device)  # it is asked for each batch
        move = {"device": wanted, "non_blocking": flag("non_blocking", non_blocking, way_out)}
        return Ragged(self.data.to(**move), self.places.to(**move), self.shapes)  # type: ignore[call-overload]

    def pin_memory(self, *args: Any) -> "Ragged":
        """The batch in page-locked memory. Called by ``DataLoader(pin_memory=True)``.

        Args:
            args: As of ``torch.Tensor.pin_memory``.

        Returns:
            A copy of the batch in page-locked memory.
        """
        return Ragged(self.data.pin_memory(*args), self.places.pin_memory(*args), self.shapes)
