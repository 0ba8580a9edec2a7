"""Input of the passes: size and dtype of images, readers of images and masks of one size or of different sizes, host arrays.

With V *views*, each image of a batch of B is augmented V times. In this file, a *sample* is one view of one image or frame.
*Ragged* images, and masks with a ``MaskLayout``, differ in size, and lie one after another in a flat tensor.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.errors import ArgumentError, ArgumentTypeError, shown, whole_number
from gpuaug.core.ragged import Ragged, Shapes
from gpuaug.fusion.clips import ClipLayout
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.ops.geometry import WarpOp
from gpuaug.fusion.pixels import LARGEST
from gpuaug.fusion.program.gather import Gather


def dtype_of(images: Tensor | Ragged) -> torch.dtype:
    """Return the dtype of the pixels."""
    return images.dtype if isinstance(images, Tensor) else images.data.dtype


def size_of(images: Tensor | Ragged) -> Size:
    """Return the size of a batch of images, read on the host.

    Raises:
        ArgumentTypeError: If the pixels of a ragged batch are not uint8, uint16 or int16.
        ArgumentError: If the tensors of a ragged batch do not have the sizes in ``shapes``, or an image has no pixels.
    """
    if isinstance(images, Tensor):
        return Size(*images.shape)
    if images.data.dtype not in LARGEST:
        raise ArgumentTypeError(
            f"images must be uint8, uint16 or int16 in a ragged batch, got {images.data.dtype}. Create it with "
            "gpuaug.collate_ragged."
        )
    shapes = images.shapes
    sizes = shapes.sizes
    if shapes.shortest_side < 1:
        index = int(np.flatnonzero((sizes < 1).any(1))[0])
        raise ArgumentError(
            f"images must have pixels, got {tuple(sizes[index].tolist())} at {index} of the batch. Leave the image out."
        )
    elements = images.data.numel()
    image_layouts = images.places
    columns = 3 if shapes.windows is None else 4  # offset, height, width; with windows also the row pitch
    if (
        elements != shapes.num_elements
        or image_layouts.shape != (len(sizes), columns)
        or image_layouts.dtype is not torch.int64
    ):
        raise ArgumentError(
            f"A ragged batch must agree with its shapes, {shapes.num_elements} elements of {len(sizes)} images, "
            f"got {elements} and places {tuple(image_layouts.shape)} of {image_layouts.dtype}. Create it with "
            "gpuaug.collate_ragged."
        )
    frames = shapes.frames
    clips = sizes.reshape(-1, frames, 2) if frames and len(sizes) % frames == 0 else None
    if frames and (clips is None or bool((clips != clips[:, :1]).any())):
        raise ArgumentError(
            f"frames of a clip in a ragged batch must have one size, got other sizes in {shapes!r}. Resize the frames of each "
            "clip in the dataset."
        )
    return size_of_shapes(shapes)


def size_of_shapes(shapes: Shapes) -> Size:
    """Return the size of ragged images, whose frames have one size per clip."""
    heights, widths = shapes.sizes[:: shapes.frames or 1].T
    full = None if shapes.full_sizes is None else (shapes.full_sizes[:, 0], shapes.full_sizes[:, 1])
    return Size(len(heights), shapes.channels, heights, widths, shapes.frames, full=full)


def size_of_shape(shape: Sequence[int] | Ragged, clip_layout: ClipLayout) -> Size:
    """Return the size for a ``shape`` that the user passed: (B, C, H, W), the shape of clips, or a ragged batch.

    Raises:
        ArgumentError, ArgumentTypeError: If ``shape`` is not such a shape, or images have no pixels.
    """
    if isinstance(shape, Ragged):
        return size_of(shape)
    advice = "Pass images.shape of a batch."
    if not isinstance(shape, tuple | list) or len(shape) not in ((5,) if clip_layout.is_required else (4, 5)):
        raise ArgumentError(f"shape must be {clip_layout.shapes}, got {shown(shape)}. {advice}")
    # Axis 0, the batch, may be empty; all other axes need an element.
    sides = [whole_number(f"shape[{axis}]", side, advice, least=min(axis, 1), most=2**31) for axis, side in enumerate(shape)]
    return clip_layout.size(sides) if len(sides) == 5 else Size(*sides)


def repeat_per_view(images: Tensor, samples: int) -> Tensor:
    """Repeat images, (B, C, H, W), once per view: (``samples``, C, H, W), view-major."""
    views = samples // max(len(images), 1)
    return images if views <= 1 else images.repeat(views, 1, 1, 1)


class MaskLayout(NamedTuple):
    """Layout in memory of N masks of different sizes."""

    owners: Tensor
    """(N,) int64: sample of each mask."""

    layouts: Tensor
    """(N, 3) int64: offset of the first element, height and width of each mask."""


_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by item size in bytes."""


def as_bits(masks: Tensor) -> Tensor:
    """Return a view of masks as integers of the same item size, because torch cannot index or fill uint16 and float8.

    Masks of other item sizes, such as complex128, are returned unchanged.
    """
    return masks.view(_INTEGER_DTYPES.get(masks.dtype.itemsize, masks.dtype))


def mask_fills(front: Gather, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return the fills of masks of ``dtype``: in padding before a warp, outside the image in a warp, in padding after the warp.

    Each fill is the integer with the same bits as the fill in ``dtype`` (``as_bits``); 0 where the gather has no such op.

    Raises:
        ArgumentError: If a fill is out of the range of ``dtype``, as in torchvision. For bool every fill is valid.
    """
    warp = front.warp if isinstance(front.warp, WarpOp) else None
    before, outside, after = (_mask_fill(op, dtype) for op in (front.before.padding, warp, front.after.padding))
    return before, outside, after


def _mask_fill(op: Any, dtype: torch.dtype) -> int:
    """Return the bits of the fill of ``op`` for masks of ``dtype``; 0 if ``op`` is ``None``."""
    if op is None:
        return 0
    fill = op.mask_fill
    is_floating = dtype.is_floating_point or dtype.is_complex
    if dtype != torch.bool and (math.isfinite(fill) or not is_floating):
        limits = torch.finfo(dtype) if is_floating else torch.iinfo(dtype)
        if not limits.min <= fill <= limits.max:  # also if the fill is NaN
            raise ArgumentError(
                f"fill of {op.name} must be in [{limits.min}, {limits.max}] for masks of {dtype}, got {fill}. Convert "
                "the masks before the call to a type that holds the fill."
            )
        fill = fill if is_floating else int(fill)
    return int(as_bits(torch.tensor(fill, dtype=dtype, device="cpu")).item())


class DenseReader:
    """Reader of images of one size.

    Args:
        images: (B, C, H, W).
        samples: Number of samples, V · B for V views.
    """

    def __init__(self, images: Tensor, samples: int) -> None:
        self.channels = images.shape[1]
        self.dtype = images.dtype
        self._flat = repeat_per_view(images, samples).flatten(2)
        self._width = images.shape[3]

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Return (V · B, C, h, w) pixels at integer coordinates (V · B or 1, h or 1, w or 1)."""
        index = (y * self._width + x).expand(self._flat.shape[0], -1, -1)
        index = index[:, None].expand(-1, self.channels, -1, -1)
        return self._flat.gather(2, index.flatten(2)).view(index.shape)


class RaggedReader:
    """Reader of images of different sizes in one flat buffer.

    Args:
        data: Flat buffer, of any dtype.
        image_layouts: (V · B, 3 or 4) int64: offset, height, width and, if only windows are in memory, row pitch in pixels of
            each image (``Ragged.places``), repeated once per view.
        channels: Number of channels of all images.
        repeats: Number of times that a single channel is repeated.
        channels_last: Whether the channels of a pixel are adjacent; otherwise they are planes.
    """

    def __init__(
        self, data: Tensor, image_layouts: Tensor, channels: int = 1, *, repeats: int = 1, channels_last: bool = False
    ) -> None:
        self.channels = channels * repeats
        self.dtype, self._data = data.dtype, data
        self._offset, height, width, *pitch = image_layouts[:, :, None, None].unbind(1)
        self._pixel_stride = channels if channels_last else 1
        self._holds_windows = bool(pitch)
        self._line_stride = (pitch[0] if pitch else width) * self._pixel_stride
        self._channel_stride: Tensor | int = 0 if repeats > 1 else 1 if channels_last else (height * width)[:, None]

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Return (V · B, C, h, w) pixels at integer coordinates (V · B or 1, h or 1, w or 1)."""
        channel_offset = torch.arange(self.channels, device=x.device)[:, None, None] * self._channel_stride
        elements = (self._offset + y * self._line_stride + x * self._pixel_stride)[:, None] + channel_offset
        if self._holds_windows:
            # For output pixels in padding, the caller reads pixel (0, 0) of the image, which may be outside the window.
            elements = elements.clamp_(0, self._data.numel() - 1)
        return self._data.take(elements)


Reader = DenseReader | RaggedReader


def reader(images: Tensor | Ragged, samples: int, channels: int) -> Reader:
    """Return a reader of a batch.

    Args:
        images: Images, B.
        samples: Number of samples to read, V · B for V views.
        channels: Number of channels to read. If it is not the number of the images, their single channel is repeated.
    """
    if isinstance(images, Tensor):
        return DenseReader(images.expand(-1, channels, -1, -1), samples)
    shapes = images.shapes
    views = samples // max(len(images), 1)
    image_layouts = images.places.repeat(views, 1)
    is_hwc = shapes.layout == "hwc"
    return RaggedReader(images.data, image_layouts, shapes.channels, repeats=channels // shapes.channels, channels_last=is_hwc)


def image_of(images: Tensor | Ragged, index: int) -> Tensor | Ragged:
    """Return one image of a batch, as a batch of one."""
    if isinstance(images, Tensor):
        return images[index : index + 1]
    shapes = images.shapes
    image_slice = slice(index, index + 1)
    windows = None if shapes.windows is None else shapes.windows[image_slice]
    return Ragged(
        images.data, images.places[image_slice], Shapes(shapes.sizes[image_slice], shapes.channels, shapes.layout, windows)
    )


_DTYPES = {np.dtype(str(dtype).removeprefix("torch.")): dtype for dtype in (torch.int64, torch.int32, torch.float32)}
"""Dtype in torch of each dtype of ``send``."""


def send(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return copies of arrays of int64, int32 or float32 on a device: one asynchronous copy from pinned memory."""
    starts = [0, *accumulate(-(-array.nbytes // 8) * 8 for array in arrays)]  # aligned for every dtype
    host = torch.empty(starts.pop() // 8, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    buffer = host.numpy()
    views: list[tuple[np.dtype[Any], Sequence[int], Sequence[int], int]] = []
    for array, start in zip(arrays, starts, strict=True):
        part: NDArray[Any] = np.ndarray(array.shape, array.dtype, buffer, start)
        part[...] = array
        strides = [stride // part.itemsize for stride in part.strides]
        views.append((part.dtype, part.shape, strides, start // part.itemsize))
    sent = host.to(device, non_blocking=True)
    # One view in place of a slice and a reshape, because a call of torch takes 2 to 7 µs.
    typed = {dtype: sent if dtype == np.int64 else sent.view(_DTYPES[dtype]) for dtype, *_ in views}
    return [typed[dtype].as_strided(shape, strides, start) for dtype, shape, strides, start in views]
