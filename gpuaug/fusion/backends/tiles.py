"""Tiles: images that are resized and written to a region of a canvas each, in torch. The reference for the kernel.

Tiles are an array (T, 12) on the host, with one row per tile: top, left, height and width of the resized image on its canvas,
which the image may exceed; top, left, height and width of the region of the canvas; height and width of the canvas; offset of
the canvas in the output, in pixels; index of the image.
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
    """(N, 11) per image: offset of its first element in its tensor, height, width, distances between rows, pixels and channels;
    top, left, height and width of the window that the tensor holds; index of the tensor. All distances are in elements.
    """
    channels: int

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(N, 2) heights and widths."""
        return self.layouts[:, 1:3]

    def image(self, index: int) -> Tensor:
        """Return the window of an image, (C, h, w), as a view."""
        offset, _, _, row, pixel, channel, top, left, height, width, tensor = self.layouts[index].tolist()
        data: Tensor = self.tensors[tensor]
        first = data.storage_offset() + offset + top * row + left * pixel
        return data.as_strided((self.channels, height, width), (channel, row, pixel), first)


def pixels_of(members: Sequence[Tensor | Ragged]) -> Pixels:
    """Return the images of k members of B images each: image ``n`` is image ``n // k`` of member ``n % k``."""
    first = members[0]
    layouts = np.empty((len(first), len(members), 11), np.int64)
    for index, member in enumerate(members):
        if isinstance(member, Ragged):
            layouts[:, index] = layouts_of(member.shapes)
        else:
            batch, channel, row, pixel = member.stride()
            height, width = member.shape[2:]
            layouts[:, index] = 0, height, width, row, pixel, channel, 0, 0, height, width, 0
            layouts[:, index, 0] = np.arange(len(member)) * batch
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
    areas = layouts[:, 8] * layouts[:, 9]
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
        fill: Value of the pixels of a region outside of the resized image.
        nearest: Whether to take the nearest pixel in place of an interpolation.
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
    region: NDArray[np.int64], place: NDArray[np.int64], source: NDArray[np.int64], device: torch.device, nearest: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return, for each pixel along one axis of a region, the lines of the window that it is interpolated from.

    Args:
        region: Start and length of the region.
        place: Start and length of the resized image.
        source: Length of the image, and start and length of its window.
        device: Device of the results.
        nearest: Whether the first line is the nearest one, and has the whole weight.

    Returns:
        (mask of the pixels inside of the resized image, first line, second line, weight of the second line).
    """
    (start, count), (first, resized), (length, window, window_length) = region.tolist(), place.tolist(), source.tolist()
    position = torch.arange(start - first, start - first + count, device=device)
    inside = (position >= 0) & (position < resized)
    position = position.clamp(0, resized - 1)
    centre = ((position + 0.5) * (length / resized) - 0.5).clamp(0, length - 1)
    floor = (2 * position + 1) * length // (2 * resized) if nearest else centre.long()
    lines = [line.sub(window).clamp(0, window_length - 1) for line in (floor, (floor + 1).clamp(max=length - 1))]
    return inside, lines[0], lines[1], centre - floor


def _sampled(image: Tensor, rows: Sequence[Tensor], columns: Sequence[Tensor], *, nearest: bool) -> Tensor:
    """Return the pixels of a region: of the dtype of ``image`` if ``nearest``, else float32."""
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
    """Cut the pasted objects out of the masks below them, and clear the masks of absent objects.

    Args:
        masks: Masks of n objects, (H, W) each on their canvas, in one flat tensor, in the order of the canvases.
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
    of_canvases = [plane.view(*size) for plane, size in zip(cover.split(areas.tolist()), sizes.tolist(), strict=True)]
    planes = [of_canvases[canvas] for canvas in canvases.tolist()]
    own = [mask.view_as(plane) for mask, plane in zip(masks.split(areas[canvases].tolist()), planes, strict=True)]
    for mask, plane, role in zip(own, planes, roles.tolist(), strict=True):
        if role == ABOVE:
            plane |= mask != 0
    for mask, plane, role, row in zip(own, planes, roles.tolist(), statistics, strict=True):
        row[0] = torch.count_nonzero(mask)
        if role != ABOVE:
            mask *= (plane == 0) if role == BELOW else 0
        pixels = torch.nonzero(mask)
        row[1] = len(pixels)
        if len(pixels):
            row[2:] = torch.cat((pixels.amin(0), pixels.amax(0)))
    return cover, statistics
