"""Tiles: images that are resized and written to a region of a canvas each, in torch. The reference for the kernel."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.ragged import Ragged

LAYOUT_WIDTH = 11
"""Number of columns of ``Pixels.layouts``."""


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
    layouts = [_layouts(member) for member in members]
    for tensor, layout in enumerate(layouts):
        layout[:, -1] = tensor
    first = members[0]
    channels = first.shapes.channels if isinstance(first, Ragged) else first.shape[1]
    tensors = [member.data if isinstance(member, Ragged) else member for member in members]
    return Pixels(tensors, np.stack(layouts, 1).reshape(-1, LAYOUT_WIDTH), channels)


def _layouts(images: Tensor | Ragged) -> NDArray[np.int64]:
    """Return ``Pixels.layouts`` of one member, with 0 as the index of the tensor."""
    layouts = np.zeros((len(images), LAYOUT_WIDTH), np.int64)
    if isinstance(images, Tensor):
        _, _, height, width = images.shape
        batch, channel, row, pixel = images.stride()
        layouts[:, 0] = np.arange(len(images)) * batch
        layouts[:, 1:10] = height, width, row, pixel, channel, 0, 0, height, width
        return layouts
    shapes = images.shapes
    layouts[:, 1:3] = layouts[:, 8:10] = shapes.sizes
    if shapes.windows is not None:
        layouts[:, 6:10] = shapes.windows
    heights, widths = layouts[:, 8], layouts[:, 9]
    planar = shapes.layout == "chw"
    layouts[:, 4] = 1 if planar else shapes.channels
    layouts[:, 3] = widths * layouts[:, 4]
    layouts[:, 5] = heights * widths if planar else 1
    lengths = heights * widths * shapes.channels
    layouts[:, 0] = lengths.cumsum() - lengths - (layouts[:, 6:8] * layouts[:, 3:5]).sum(1)
    return layouts


@dataclass(frozen=True, eq=False)
class Tiles:
    """T tiles, on the host."""

    images: NDArray[np.int64]
    """(T,) index of each tile's image in ``Pixels``."""
    places: NDArray[np.int64]
    """(T, 4) top, left, height and width of the resized image on its canvas. The image may exceed the canvas."""
    regions: NDArray[np.int64]
    """(T, 4) top, left, height and width of the region of the canvas."""
    offsets: NDArray[np.int64]
    """(T,) offset of the canvas in the output, in elements."""
    canvases: NDArray[np.int64]
    """(T, 2) height and width of the canvas."""


def write_tiles(
    out: Tensor,
    pixels: Pixels,
    tiles: Tiles,
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
        tiles: The tiles.
        fill: Value of the pixels of a region outside of the resized image.
        nearest: Whether to take the nearest pixel in place of an interpolation.
        weights: (T,) weights of the canvas, with which it is blended with the tile. Default: tiles replace the canvas.
        cover: Mask of the pixels that tiles replace, with one plane per canvas, flat uint8. Default: all pixels.
    """
    for index, image in enumerate(tiles.images.tolist()):
        top, left, height, width = tiles.regions[index].tolist()
        canvas_height, canvas_width = tiles.canvases[index].tolist()
        start = int(tiles.offsets[index])
        canvas = out[start : start + pixels.channels * canvas_height * canvas_width].view(-1, canvas_height, canvas_width)
        region = canvas[:, top : top + height, left : left + width]
        if not region.numel():
            continue
        lines = []
        for axis in (0, 1):
            source = pixels.layouts[image, [1 + axis, 6 + axis, 8 + axis]]
            lines.append(_source_lines(tiles.regions[index, axis::2], tiles.places[index, axis::2], source, out.device))
        value = _sampled(pixels.image(image), lines, nearest=nearest)
        inside = lines[0].inside[:, None] & lines[1].inside
        value = torch.where(inside, value, torch.full((), fill, dtype=value.dtype, device=value.device))
        if weights is not None:
            weight = float(weights[index])
            value = weight * region.float() + (1 - weight) * value
        if cover is not None:
            first = start // pixels.channels
            plane = cover[first : first + canvas_height * canvas_width].view(canvas_height, canvas_width)
            value = torch.where(plane[top : top + height, left : left + width] != 0, value, region.float())
        region.copy_(value.round() if not (nearest or out.dtype.is_floating_point) else value)


@dataclass(frozen=True)
class _Lines:
    """Source lines along one axis of a region, one entry per pixel."""

    inside: Tensor
    """Mask of the pixels that are inside of the resized image."""
    nearest: Tensor
    first: Tensor
    second: Tensor
    """Indices of the nearest line, and of the two lines that are interpolated, in the window."""
    fraction: Tensor
    """Weight of the second line."""


def _source_lines(
    region: NDArray[np.int64], place: NDArray[np.int64], source: NDArray[np.int64], device: torch.device
) -> _Lines:
    """Return the source lines. ``region``, ``place``: (start, length); ``source``: (length, start and length of the window)."""
    (start, count), (first, resized), (length, window, window_length) = region.tolist(), place.tolist(), source.tolist()
    position = torch.arange(start - first, start - first + count, device=device)
    inside = (position >= 0) & (position < resized)
    position = position.clamp(0, resized - 1)
    nearest = (2 * position + 1) * length // (2 * resized)
    centre = ((position + 0.5) * (length / resized) - 0.5).clamp(0, length - 1)
    floor = centre.long()
    nearest, first, second = (
        line.sub(window).clamp(0, window_length - 1) for line in (nearest, floor, (floor + 1).clamp(max=length - 1))
    )
    return _Lines(inside, nearest, first, second, centre - floor)


def _sampled(image: Tensor, lines: Sequence[_Lines], *, nearest: bool) -> Tensor:
    """Return the pixels of a region: of the dtype of ``image`` if ``nearest``, else float32."""
    y, x = lines
    if nearest:
        return image[:, y.nearest[:, None], x.nearest]
    first, second = (
        torch.lerp(image[:, line[:, None], x.first].float(), image[:, line[:, None], x.second].float(), x.fraction)
        for line in (y.first, y.second)
    )
    return torch.lerp(first, second, y.fraction[:, None])


@dataclass(frozen=True, eq=False)
class Objects:
    """Masks of n objects on their canvases, (H, W) each, in one flat tensor, in the order of the canvases."""

    masks: Tensor
    offsets: NDArray[np.int64]
    """(n,) offset of the first pixel of each mask."""
    canvases: NDArray[np.int64]
    """(n,) index of the canvas."""
    sizes: NDArray[np.int64]
    """(M, 2) height and width of each canvas."""
    roles: NDArray[np.int64]
    """(n,) ``BELOW``, ``ABOVE`` or ``ABSENT``."""


BELOW, ABOVE, ABSENT = range(3)
"""Roles of objects: under the objects that are pasted; pasted; left out."""


def paste_objects(objects: Objects) -> tuple[Tensor, Tensor]:
    """Cut the pasted objects out of the masks below them, and clear the masks of absent objects.

    Returns:
        (cover of all canvases, flat uint8: 1 where an object is pasted; per mask, (n, 6) int32: pixels before, pixels after,
        smallest row and column, largest row and column of the pixels after). The last four are undefined without pixels.
    """
    masks = objects.masks
    areas = objects.sizes.prod(1)
    starts = areas.cumsum() - areas
    cover = torch.zeros(int(areas.sum()), dtype=torch.uint8, device=masks.device)
    statistics = torch.zeros(len(objects.roles), 6, dtype=torch.int32, device=masks.device)
    planes = []
    for offset, canvas, role in zip(*map(list, (objects.offsets, objects.canvases, objects.roles)), strict=True):
        height, width = objects.sizes[canvas].tolist()
        mask = masks[offset : offset + height * width].view(height, width)
        plane = cover[starts[canvas] : starts[canvas] + height * width].view(height, width)
        planes.append((mask, plane))
        if role == ABOVE:
            plane |= mask != 0
    for (mask, plane), role, row in zip(planes, objects.roles.tolist(), statistics, strict=True):
        row[0] = torch.count_nonzero(mask)
        if role != ABOVE:
            mask *= (plane == 0) if role == BELOW else 0
        rows, columns = torch.nonzero(mask, as_tuple=True)
        row[1] = len(rows)
        if len(rows):
            row[2:] = torch.stack((rows.min(), columns.min(), rows.max(), columns.max()))
    return cover, statistics
