"""Writing of tiles to canvases, and pasting of objects, in torch: the reference for the kernels in ``triton/tiles.py``.

A *tile* places one resized image on a *canvas*, an image that consists of tiles. The *region* of the tile is the rectangle of
the canvas that the image is written to. Tiles are an array (T, 12) on the host, with one row per tile:

    0 to 3   resized image on its canvas, which it may exceed: top, left, height, width
    4 to 7   region on the canvas: top, left, height, width
    8, 9     canvas: height, width
    10       offset of the canvas in the output, in pixels
    11       index of the image
"""

import functools
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
    """(N, 11), one row per image, with offsets and strides in elements.

        0          offset of its first element in its tensor; the element may be missing if only a window is in memory
        1, 2       height, width
        3, 4, 5    strides of rows, pixels and channels
        6 to 9     window of the image that is in memory: top, left, height, width
        10         index of the tensor
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
    first_member = members[0]
    layouts = np.empty((len(first_member), len(members), 11), np.int64)
    for index, member in enumerate(members):
        if isinstance(member, Ragged):
            layouts[:, index] = layouts_of(member.shapes)
        else:
            layouts[:, index] = _dense_layouts(member.shape, member.stride())
        layouts[:, index, -1] = index
    channels = first_member.shapes.channels if isinstance(first_member, Ragged) else first_member.shape[1]
    tensors = [member.data if isinstance(member, Ragged) else member for member in members]
    return Pixels(tensors, layouts.reshape(-1, 11), channels)


@functools.lru_cache(maxsize=64)
def _dense_layouts(shape: torch.Size, strides: tuple[int, ...]) -> NDArray[np.int64]:
    """Return ``Pixels.layouts`` of a tensor (B, C, H, W), with 0 as the index of the tensor. The array is cached."""
    batch_stride, channel_stride, *pixel_strides = strides
    layouts = np.empty((shape[0], 11), np.int64)
    layouts[:] = 0, *shape[2:], *pixel_strides, channel_stride, 0, 0, *shape[2:], 0
    layouts[:, 0] = np.arange(shape[0]) * batch_stride
    return layouts


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
        *_, top, left, height, width, canvas_height, canvas_width, canvas_start, image = tile.tolist()
        area = canvas_height * canvas_width
        channels = pixels.channels
        canvas = out[canvas_start * channels : (canvas_start + area) * channels].view(channels, canvas_height, canvas_width)
        region = canvas[:, top : top + height, left : left + width]
        layout = pixels.layouts[image]
        (inside_y, *lines_y), (inside_x, *lines_x) = (
            _source_lines(tile[4 + axis : 8 : 2], tile[axis:4:2], layout[[1 + axis, 6 + axis, 8 + axis]], out.device, nearest)
            for axis in (0, 1)
        )
        values = _sampled(pixels.image(image), lines_y, lines_x, nearest=nearest)
        values = torch.where(inside_y[:, None] & inside_x, values, torch.full((), fill, dtype=values.dtype, device=out.device))
        if weights is not None:
            weight = float(weights[index])
            values = weight * region.float() + (1 - weight) * values
        if cover is not None:
            canvas_cover = cover[canvas_start : canvas_start + area].view(canvas_height, canvas_width)
            values = torch.where(canvas_cover[top : top + height, left : left + width] != 0, values, region.float())
        region.copy_(values.round() if not (nearest or out.dtype.is_floating_point) else values)


def _source_lines(
    region: NDArray[np.int64], resized: NDArray[np.int64], source: NDArray[np.int64], device: torch.device, nearest: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the source lines (rows, or columns) that each pixel along one axis of a region is interpolated from.

    Args:
        region: Start and length of the region on the canvas.
        resized: Start and length of the resized image on the canvas.
        source: Length of the source image, and start and length of its window that is in memory.
        device: Device of the results.
        nearest: Whether the first line is the nearest one, and has the whole weight.

    Returns:
        (mask of the pixels inside of the resized image, first line, second line, weight of the second line). Lines are indices
        in the window.
    """
    (region_start, region_length), (resized_start, resized_length) = region.tolist(), resized.tolist()
    source_length, window_start, window_length = source.tolist()
    pixel = torch.arange(region_start - resized_start, region_start - resized_start + region_length, device=device)
    in_resized = (pixel >= 0) & (pixel < resized_length)
    pixel = pixel.clamp(0, resized_length - 1)
    centre = ((pixel + 0.5) * (source_length / resized_length) - 0.5).clamp(0, source_length - 1)
    first = (2 * pixel + 1) * source_length // (2 * resized_length) if nearest else centre.long()
    second = (first + 1).clamp(max=source_length - 1)
    first_in_window, second_in_window = (line.sub(window_start).clamp(0, window_length - 1) for line in (first, second))
    return in_resized, first_in_window, second_in_window, centre - first


def _sampled(image: Tensor, lines_y: Sequence[Tensor], lines_x: Sequence[Tensor], *, nearest: bool) -> Tensor:
    """Return the pixels of a region, (C, h, w): of the dtype of ``image`` if ``nearest``, else float32.

    ``lines_y``, ``lines_x``: (first line, second line, weight of the second line) along y and x, from ``_source_lines``.
    """
    (top, bottom, weight_y), (left, right, weight_x) = lines_y, lines_x
    if nearest:
        return image[:, top[:, None], left]
    upper, lower = (
        torch.lerp(image[:, line[:, None], left].float(), image[:, line[:, None], right].float(), weight_x)
        for line in (top, bottom)
    )
    return torch.lerp(upper, lower, weight_y[:, None])


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
        With Triton, two launches, two fills of ``statistics``, and one asynchronous copy from pinned memory.
    """
    areas = sizes.prod(1)
    cover = torch.zeros(int(areas.sum()), dtype=torch.uint8, device=masks.device)
    statistics = torch.zeros(len(roles), 6, dtype=torch.int32, device=masks.device)
    covers = [flat.view(*size) for flat, size in zip(cover.split(areas.tolist()), sizes.tolist(), strict=True)]
    # Cover of the canvas that each mask belongs to, as a view.
    planes = [covers[canvas] for canvas in canvases.tolist()]
    planar_masks = [mask.view_as(plane) for mask, plane in zip(masks.split(areas[canvases].tolist()), planes, strict=True)]
    for mask, plane, role in zip(planar_masks, planes, roles.tolist(), strict=True):
        if role == ABOVE:
            plane |= mask != 0
    for mask, plane, role, numbers in zip(planar_masks, planes, roles.tolist(), statistics, strict=True):
        numbers[0] = torch.count_nonzero(mask)
        if role != ABOVE:
            mask *= (plane == 0) if role == BELOW else 0
        pixels = torch.nonzero(mask)
        numbers[1] = len(pixels)
        if len(pixels):
            numbers[2:] = torch.cat((pixels.amin(0), pixels.amax(0)))
    return cover, statistics
