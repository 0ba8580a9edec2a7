"""Writing of tiles to canvases, and pasting of objects, in torch: the reference for the kernels in ``triton/tiles``.

A *tile* places one resized image on a canvas. The *region* of the tile is the rectangle of the canvas that the image is written
to. Tiles are an array (T, 12) on the host, with one row per tile: top, left, height and width of the resized image on its
canvas, which the image may exceed; top, left, height and width of the region; height and width of the canvas; offset of the
canvas in the output, in pixels; index of the image.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.ragged import Ragged, Shapes


@dataclass(frozen=True, eq=False)
class Pixels:
    """N images in one or several tensors of one dtype."""

    tensors: Sequence[Tensor]
    layouts: NDArray[np.int64]
    """(N, 11) per image: offset of its first element in its tensor, height, width, strides of rows, pixels and channels;
    top, left, height and width of the window of the image that is in memory; index of the tensor.

    Offsets and strides are in elements. If only a window is in memory, the offset is that of the missing first element.
    """
    channels: int

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(N, 2) heights and widths."""
        return self.layouts[:, 1:3]

    def image(self, index: int) -> Tensor:
        """Return the window of an image that is in memory, (C, h, w), as a view."""
        offset, _, _, row_stride, pixel_stride, channel_stride, top, left, height, width, tensor = self.layouts[index].tolist()
        data: Tensor = self.tensors[tensor]
        first = data.storage_offset() + offset + top * row_stride + left * pixel_stride
        return data.as_strided((self.channels, height, width), (channel_stride, row_stride, pixel_stride), first)


def pixels_of(members: Sequence[Tensor | Ragged]) -> Pixels:
    """Return the images of k members of B images each: image ``n`` is image ``n // k`` of member ``n % k``."""
    first = members[0]
    layouts = np.empty((len(first), len(members), 11), np.int64)
    for index, member in enumerate(members):
        if isinstance(member, Ragged):
            layouts[:, index] = layouts_of(member.shapes)
        else:
            batch_stride, channel_stride, *strides = member.stride()
            sides = member.shape[2:]
            layouts[:, index] = 0, *sides, *strides, channel_stride, 0, 0, *sides, 0
            layouts[:, index, 0] = np.arange(len(member)) * batch_stride
        layouts[:, index, -1] = index
    channels = first.shapes.channels if isinstance(first, Ragged) else first.shape[1]
    tensors = [member.data if isinstance(member, Ragged) else member for member in members]
    return Pixels(tensors, layouts.reshape(-1, 11), channels)


def layouts_of(shapes: Shapes) -> NDArray[np.int64]:
    """Return ``Pixels.layouts`` of a ragged batch, with 0 as the index of the tensor."""
    layouts = np.zeros((len(shapes.sizes), 11), np.int64)
    layouts[:, 1:3] = layouts[:, 8:10] = shapes.sizes
    if shapes.windows is not None:
        layouts[:, 6:10] = shapes.windows
    areas = layouts[:, 8] * layouts[:, 9]  # of the windows
    planar = shapes.layout == "chw"
    layouts[:, 4] = 1 if planar else shapes.channels
    layouts[:, 3] = layouts[:, 9] * layouts[:, 4]
    layouts[:, 5] = areas if planar else 1
    layouts[:, 0] = (areas.cumsum() - areas) * shapes.channels
    if shapes.windows is not None:
        layouts[:, 0] -= layouts[:, 6] * layouts[:, 3] + layouts[:, 7] * layouts[:, 4]
    return layouts


def write_tiles(
    out: Tensor,
    pixels: Pixels,
    tiles: NDArray[np.int64],
    fill: float,
    *,
    nearest: bool = False,
    weights: NDArray[np.float32] | None = None,
    cover: Tensor | None = None,
) -> None:
    """Write tiles to canvases, (C, H, W) each, in one flat tensor.

    Pixels are interpolated linearly between the centres of source pixels, without antialiasing, as OpenCV's ``INTER_LINEAR``.

    Args:
        out: Canvases, of the dtype of ``pixels``.
        pixels: The images.
        tiles: The tiles, (T, 12).
        fill: Value of the pixels of a region that lie outside of the resized image.
        nearest: Whether to read the nearest pixel instead of interpolating.
        weights: (T,) weights of the canvas, with which it is blended with the tile. Default: tiles replace the canvas.
        cover: Mask of the pixels that tiles replace, with one plane per canvas, flat uint8. Default: all pixels.

    Cost:
        With Triton, one launch on the current stream, and one asynchronous copy from pinned memory.
    """
    for index, tile in enumerate(tiles):
        *_, top, left, height, width, canvas_height, canvas_width, start, image = tile.tolist()
        area = canvas_height * canvas_width
        channels = pixels.channels
        canvas = out[start * channels : (start + area) * channels].view(channels, canvas_height, canvas_width)
        region = canvas[:, top : top + height, left : left + width]
        layout = pixels.layouts[image]
        (inside_y, *rows), (inside_x, *columns) = (
            _source_lines(tile[4 + axis : 8 : 2], tile[axis:4:2], layout[[1 + axis, 6 + axis, 8 + axis]], out.device, nearest)
            for axis in (0, 1)
        )
        value = _sampled(pixels.image(image), rows, columns, nearest=nearest)
        value = torch.where(inside_y[:, None] & inside_x, value, torch.full((), fill, dtype=value.dtype, device=out.device))
        if weights is not None:
            weight = float(weights[index])
            value = weight * region.float() + (1 - weight) * value
        if cover is not None:
            plane = cover[start : start + area].view(canvas_height, canvas_width)
            value = torch.where(plane[top : top + height, left : left + width] != 0, value, region.float())
        region.copy_(value.round() if not (nearest or out.dtype.is_floating_point) else value)


def _source_lines(
    region: NDArray[np.int64], resized: NDArray[np.int64], source: NDArray[np.int64], device: torch.device, nearest: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return, for each pixel along one axis of a region, the lines of the source that it is interpolated from.

    Args:
        region: Start and length of the region on the canvas.
        resized: Start and length of the resized image on the canvas.
        source: Length of the source image, and start and length of its window that is in memory.
        device: Device of the results.
        nearest: Whether the first line is the nearest one, and has the whole weight.

    Returns:
        (mask of the pixels inside of the resized image, first line, second line, weight of the second line), with lines as
        indices in the window.
    """
    (start, count), (resized_start, side) = region.tolist(), resized.tolist()
    length, window_start, window_length = source.tolist()
    position = torch.arange(start - resized_start, start - resized_start + count, device=device)
    inside = (position >= 0) & (position < side)
    position = position.clamp(0, side - 1)
    centre = ((position + 0.5) * (length / side) - 0.5).clamp(0, length - 1)
    first = (2 * position + 1) * length // (2 * side) if nearest else centre.long()
    second = (first + 1).clamp(max=length - 1)
    first_in_window, second_in_window = (line.sub(window_start).clamp(0, window_length - 1) for line in (first, second))
    return inside, first_in_window, second_in_window, centre - first


def _sampled(image: Tensor, rows: Sequence[Tensor], columns: Sequence[Tensor], *, nearest: bool) -> Tensor:
    """Return the pixels of a region, (C, h, w): of the dtype of ``image`` if ``nearest``, else float32.

    ``rows``, ``columns``: (first line, second line, weight of the second line) along y and x, from ``_source_lines``.
    """
    (top, bottom, weight_y), (left, right, weight_x) = rows, columns
    if nearest:
        return image[:, top[:, None], left]
    first, second = (
        torch.lerp(image[:, line[:, None], left].float(), image[:, line[:, None], right].float(), weight_x)
        for line in (top, bottom)
    )
    return torch.lerp(first, second, weight_y[:, None])


BELOW, ABOVE, ABSENT = range(3)
"""Roles of objects: under the objects that are pasted; pasted; left out."""


def paste_objects(
    masks: Tensor, canvases: NDArray[np.int64], roles: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[Tensor, Tensor]:
    """Cut the pasted objects out of the masks below them, and clear the masks of absent objects, in place.

    Args:
        masks: Masks of n objects, (H, W) of their canvas each, in one flat tensor, in the order of the canvases.
        canvases: (n,) index of the canvas of each object.
        roles: (n,) ``BELOW``, ``ABOVE`` or ``ABSENT``.
        sizes: (M, 2) height and width of each canvas.

    Returns:
        (cover of all canvases, flat uint8: 1 where an object is pasted; per mask, (n, 6) int32: pixels before, pixels after,
        smallest row and column, largest row and column of the pixels after). The last four are undefined without pixels.

    Cost:
        With Triton, two launches, three small ones, and one asynchronous copy from pinned memory.
    """
    areas = sizes.prod(1)
    cover = torch.zeros(int(areas.sum()), dtype=torch.uint8, device=masks.device)
    statistics = torch.zeros(len(roles), 6, dtype=torch.int32, device=masks.device)
    covers = [flat.view(*size) for flat, size in zip(cover.split(areas.tolist()), sizes.tolist(), strict=True)]
    # Cover of the canvas of each mask.
    planes = [covers[canvas] for canvas in canvases.tolist()]
    planar_masks = [mask.view_as(plane) for mask, plane in zip(masks.split(areas[canvases].tolist()), planes, strict=True)]
    for mask, plane, role in zip(planar_masks, planes, roles.tolist(), strict=True):
        if role == ABOVE:
            plane |= mask != 0
    for mask, plane, role, row in zip(planar_masks, planes, roles.tolist(), statistics, strict=True):
        row[0] = torch.count_nonzero(mask)
        if role != ABOVE:
            mask *= (plane == 0) if role == BELOW else 0
        pixels = torch.nonzero(mask)
        row[1] = len(pixels)
        if len(pixels):
            row[2:] = torch.cat((pixels.amin(0), pixels.amax(0)))
    return cover, statistics
