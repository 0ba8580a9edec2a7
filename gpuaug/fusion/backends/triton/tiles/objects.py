"""Triton kernels of copy-paste: they cut pasted objects out of the masks below them.

A *canvas* is an image that objects are pasted on. Each object has a mask, a plane of the size of its canvas, and a role: below
the pasted objects, pasted (above), or absent. The first kernel computes the *cover* of each canvas: 1 where an object is
pasted. The second sets masks of objects below to 0 under the cover, sets masks of absent objects to 0, and computes statistics
of the masks. ``paste_objects`` in ``backends/tiles.py`` is the torch form.
"""

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.fusion.backends.readers import send
from gpuaug.fusion.backends.tiles import ABOVE, BELOW
from gpuaug.fusion.backends.triton.launch import kernel, launch_for, on_device

BLOCK = 1024
"""Pixels per thread block."""

BELOW_ROLE, ABOVE_ROLE = tl.constexpr(BELOW), tl.constexpr(ABOVE)

MOST_PIXELS = tl.constexpr(2**30)
"""Initial value of the smallest row and column in the statistics, greater than every row and column."""


@kernel
def cover_kernel(masks, mask_table, canvas_table, cover, blocks, BLOCK: tl.constexpr):
    """Write ``BLOCK`` pixels of the cover of one canvas.

    ``masks``: masks of all objects, one after another. ``mask_table``: one row per mask, (n, 5) int64: offset in ``masks``,
    offset of its canvas in ``cover``, number of pixels, width, role. ``canvas_table``: one row per canvas, (M, 4) int64: index
    of its first mask, index after its last mask, number of pixels, offset in ``cover``. ``cover``: covers of all canvases, flat
    uint8. ``blocks``: number of thread blocks of the largest canvas.

    Grid: (canvases · ``blocks``, 1, 1).
    """
    canvas_index = tl.program_id(0) // blocks
    canvas_row = canvas_table + canvas_index * 4
    mask_index = tl.load(canvas_row).to(tl.int32)
    end_mask = tl.load(canvas_row + 1).to(tl.int32)
    pixel_index = (tl.program_id(0) - canvas_index * blocks) * BLOCK + tl.arange(0, BLOCK)
    in_canvas = pixel_index < tl.load(canvas_row + 2)
    covered = tl.zeros((BLOCK,), tl.int32)
    while mask_index < end_mask:
        mask_row = mask_table + mask_index * 5
        is_above = tl.load(mask_row + 4) == ABOVE_ROLE
        pixels = tl.load(masks + tl.load(mask_row) + pixel_index, mask=in_canvas & is_above, other=0)
        covered = covered | (pixels != 0).to(tl.int32)
        mask_index += 1
    tl.store(cover + tl.load(canvas_row + 3) + pixel_index, covered.to(tl.uint8), mask=in_canvas)


@kernel
def cut_kernel(masks, mask_table, cover, statistics, blocks, BLOCK: tl.constexpr):
    """Cut the pasted objects out of ``BLOCK`` pixels of one mask, and add these pixels to the statistics of the mask.

    ``masks``, ``mask_table``, ``cover``, ``blocks``: as in ``cover_kernel``. ``statistics``: (n, 6) int32: per mask the pixels
    before the cut, the pixels after it, their smallest row and column, and their largest row and column.

    Grid: (masks · ``blocks``, 1, 1).
    """
    mask_index = tl.program_id(0) // blocks
    mask_row = mask_table + mask_index * 5
    pixel_index = (tl.program_id(0) - mask_index * blocks) * BLOCK + tl.arange(0, BLOCK)
    in_mask = pixel_index < tl.load(mask_row + 2)
    width = tl.load(mask_row + 3).to(tl.int32)
    role = tl.load(mask_row + 4).to(tl.int32)
    address = masks + tl.load(mask_row) + pixel_index
    pixels = tl.load(address, mask=in_mask, other=0)
    before = (pixels != 0).to(tl.int32)
    covered = tl.load(cover + tl.load(mask_row + 1) + pixel_index, mask=in_mask, other=0).to(tl.int32)
    after = tl.where(role == ABOVE_ROLE, before, tl.where((role == BELOW_ROLE) & (covered == 0), before, 0))
    tl.store(address, tl.where(after != 0, pixels, 0).to(masks.dtype.element_ty), mask=in_mask)
    y = pixel_index // width
    x = pixel_index - y * width
    mask_statistics = statistics + mask_index * 6
    tl.atomic_add(mask_statistics, tl.sum(before.to(tl.float32), 0).to(tl.int32))
    tl.atomic_add(mask_statistics + 1, tl.sum(after.to(tl.float32), 0).to(tl.int32))
    tl.atomic_min(mask_statistics + 2, tl.min(tl.where(after != 0, y, MOST_PIXELS), 0))
    tl.atomic_min(mask_statistics + 3, tl.min(tl.where(after != 0, x, MOST_PIXELS), 0))
    tl.atomic_max(mask_statistics + 4, tl.max(tl.where(after != 0, y, -1), 0))
    tl.atomic_max(mask_statistics + 5, tl.max(tl.where(after != 0, x, -1), 0))


def paste_objects(
    masks: Tensor, canvases: NDArray[np.int64], roles: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[Tensor, Tensor]:
    """Cut pasted objects out of the masks below them, as ``gpuaug.fusion.backends.tiles.paste_objects`` does."""
    areas = sizes.prod(1)
    offsets = areas.cumsum() - areas
    mask_areas = areas[canvases]
    mask_table = np.column_stack((mask_areas.cumsum() - mask_areas, offsets[canvases], mask_areas, sizes[canvases, 1], roles))
    mask_ranges = (np.searchsorted(canvases, np.arange(len(areas)), side) for side in ("left", "right"))
    most_blocks = -(-int(areas.max()) // BLOCK)
    with on_device(masks.device):
        mask_rows, canvas_rows = send((mask_table, np.column_stack((*mask_ranges, areas, offsets))), masks.device)
        cover = torch.empty(int(areas.sum()), dtype=torch.uint8, device=masks.device)
        statistics = torch.zeros(len(roles), 6, dtype=torch.int32, device=masks.device)
        statistics[:, 2:4] = MOST_PIXELS.value
        cover_launch = launch_for(cover_kernel, (masks.dtype,), (BLOCK,))
        cover_launch((masks, mask_rows, canvas_rows, cover), (most_blocks * len(areas), 1, 1), (most_blocks,))
        cut_launch = launch_for(cut_kernel, (masks.dtype,), (BLOCK,))
        cut_launch((masks, mask_rows, cover, statistics), (most_blocks * len(roles), 1, 1), (most_blocks,))
    return cover, statistics
