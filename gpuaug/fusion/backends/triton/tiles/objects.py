"""Triton kernels that cut pasted objects out of the masks below them."""

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.fusion.backends.readers import send
from gpuaug.fusion.backends.tiles import ABOVE, BELOW
from gpuaug.fusion.backends.triton.launch import kernel, launch_for, on_device

BLOCK = 1024
"""Pixels of a block."""

BELOW_ROLE, ABOVE_ROLE = tl.constexpr(BELOW), tl.constexpr(ABOVE)

MOST_PIXELS = tl.constexpr(2**30)
"""Number that is larger than every row and column: the start of the smallest row and column in the statistics."""


@kernel
def cover_kernel(masks, rows, canvases, cover, blocks, BLOCK: tl.constexpr):
    """Write a block of the cover of one canvas (``cover`` of ``paste_objects`` in ``backends/tiles.py``).

    ``rows``: one row per mask, (n, 5): offset in ``masks``, offset of the canvas in ``cover``, area, width, role. ``canvases``:
    one row per canvas, (M, 4): index of its first mask, index after its last mask, area, offset in ``cover``. ``blocks``:
    number of blocks of the largest canvas.

    Grid: (canvases · ``blocks``, 1, 1).
    """
    canvas_index = tl.program_id(0) // blocks
    canvas = canvases + canvas_index * 4
    index = tl.load(canvas).to(tl.int32)
    end = tl.load(canvas + 1).to(tl.int32)
    pixel = (tl.program_id(0) - canvas_index * blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = pixel < tl.load(canvas + 2)
    covered = tl.zeros((BLOCK,), tl.int32)
    while index < end:
        row = rows + index * 5
        is_above = tl.load(row + 4) == ABOVE_ROLE
        value = tl.load(masks + tl.load(row) + pixel, mask=inside & is_above, other=0)
        covered = covered | (value != 0).to(tl.int32)
        index += 1
    tl.store(cover + tl.load(canvas + 3) + pixel, covered.to(tl.uint8), mask=inside)


@kernel
def cut_kernel(masks, rows, cover, statistics, blocks, BLOCK: tl.constexpr):
    """Cut the pasted objects out of a block of one mask, and add the block to the statistics of the mask.

    ``rows``, ``blocks``: as in ``cover_kernel``. ``statistics``: second result of ``paste_objects``, (n, 6) int32.

    Grid: (masks · ``blocks``, 1, 1).
    """
    index = tl.program_id(0) // blocks
    row = rows + index * 5
    pixel = (tl.program_id(0) - index * blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = pixel < tl.load(row + 2)
    width = tl.load(row + 3).to(tl.int32)
    role = tl.load(row + 4).to(tl.int32)
    address = masks + tl.load(row) + pixel
    value = tl.load(address, mask=inside, other=0)
    before = (value != 0).to(tl.int32)
    covered = tl.load(cover + tl.load(row + 1) + pixel, mask=inside, other=0).to(tl.int32)
    after = tl.where(role == ABOVE_ROLE, before, tl.where((role == BELOW_ROLE) & (covered == 0), before, 0))
    tl.store(address, tl.where(after != 0, value, 0).to(masks.dtype.element_ty), mask=inside)
    y = pixel // width
    x = pixel - y * width
    target = statistics + index * 6
    tl.atomic_add(target, tl.sum(before.to(tl.float32), 0).to(tl.int32))
    tl.atomic_add(target + 1, tl.sum(after.to(tl.float32), 0).to(tl.int32))
    tl.atomic_min(target + 2, tl.min(tl.where(after != 0, y, MOST_PIXELS), 0))
    tl.atomic_min(target + 3, tl.min(tl.where(after != 0, x, MOST_PIXELS), 0))
    tl.atomic_max(target + 4, tl.max(tl.where(after != 0, y, -1), 0))
    tl.atomic_max(target + 5, tl.max(tl.where(after != 0, x, -1), 0))


def paste_objects(
    masks: Tensor, canvases: NDArray[np.int64], roles: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[Tensor, Tensor]:
    """Cut pasted objects out of the masks below them. See ``gpuaug.fusion.backends.tiles.paste_objects``."""
    areas = sizes.prod(1)
    starts = areas.cumsum() - areas
    lengths = areas[canvases]
    rows = np.column_stack((lengths.cumsum() - lengths, starts[canvases], lengths, sizes[canvases, 1], roles))
    limits = (np.searchsorted(canvases, np.arange(len(areas)), side) for side in ("left", "right"))
    blocks = -(-int(areas.max()) // BLOCK)
    with on_device(masks.device):
        sent_rows, sent_canvases = send((rows, np.column_stack((*limits, areas, starts))), masks.device)
        cover = torch.empty(int(areas.sum()), dtype=torch.uint8, device=masks.device)
        statistics = torch.zeros(len(roles), 6, dtype=torch.int32, device=masks.device)
        statistics[:, 2:4] = MOST_PIXELS.value
        cover_launch = launch_for(cover_kernel, (masks.dtype,), (BLOCK,))
        cover_launch((masks, sent_rows, sent_canvases, cover), (blocks * len(areas), 1, 1), (blocks,))
        cut_launch = launch_for(cut_kernel, (masks.dtype,), (BLOCK,))
        cut_launch((masks, sent_rows, cover, statistics), (blocks * len(roles), 1, 1), (blocks,))
    return cover, statistics
