"""The plan in Triton kernels: one launch a pass, one more where a contrast needs a mean."""

from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from gpuaug.fuse.filters import BlurOp
from gpuaug.fuse.gather import Columns, Gather, Part
from gpuaug.fuse.kernels_filters import blur, sharpen
from gpuaug.fuse.kernels_gather import gather_kernel, mask_kernel
from gpuaug.fuse.kernels_mixes import mix
from gpuaug.fuse.launching import launch, on_device
from gpuaug.fuse.mixes import MixOp
from gpuaug.fuse.ops import Size
from gpuaug.fuse.plan import Pass, Plan, needs_mean
from gpuaug.fuse.run_torch import mask_fill

_KINDS = {"": 0, "resample": 1, "affine": 2, "perspective": 3}
_MAPS = {"": 1, "constant": 2, "reflect": 3, "replicate": 4}

TILE = (32, 32)
"""Height and width of a block's tile: a warp makes a row of it, and the rows below are near in the source, too."""

MEAN_TILE = (32, 32)


def run(plan: Plan, images: Tensor, table: Tensor, dtype: torch.dtype, memory_format: torch.memory_format) -> Tensor:
    """Run all passes on the current stream.

    Shape:
        - images: (B, C, H, W), uint8 or floating, any strides
        - table: (B, K) float32
        - returns: (B, C, H', W') of ``dtype`` and ``memory_format``

    Cost:
        The launches of the passes, some 20 µs of host time each, and float32 images between passes.
    """
    if images.dtype == torch.float64:
        images = images.float()
    with on_device(images.device):
        return _run(plan, images, table, dtype, memory_format)


def _run(plan: Plan, images: Tensor, table: Tensor, dtype: torch.dtype, memory_format: torch.memory_format) -> Tensor:
    for index, step in enumerate(plan.passes):
        last = index == len(plan.passes) - 1
        shape = images.shape[0], images.shape[1], step.out.height, step.out.width
        out = torch.empty(
            shape,
            dtype=dtype if last else torch.float32,
            device=images.device,
            memory_format=memory_format if last else torch.contiguous_format,
        )
        if isinstance(step.front, Gather):
            gather(step, images, table, out)
        elif isinstance(step.front, MixOp):
            mix(step, images, table, out)
        elif isinstance(step.front, BlurOp):
            blur(step, images, table, out)
        else:
            sharpen(step, images, table, out)
        images = out
    return images


def gather(step: Pass, images: Tensor, table: Tensor, out: Tensor) -> None:
    """Launch a gather pass into ``out``, and before it the sums that a contrast needs."""
    front, columns = step.front, step.columns
    assert isinstance(front, Gather)
    assert isinstance(columns, Columns)
    batch, channels, height, width = images.shape
    rgb = channels == 3
    constants = {
        "SOURCE_W": images.stride(3),
        "PROGRAM": step.program,
        "COUNT": len(step.program),
        "CHANNELS": channels,
        "RGB": rgb,
        "SCALE": images.dtype == torch.uint8,
        **_constants(front, columns),
    }
    source = (height, width, step.out.height, step.out.width)
    strides = images.stride()[:3]
    partial, blocks, partials = table, 0, 1
    if step.mean:
        gate = next(column for op, (_, column, _) in zip(step.points, step.program, strict=True) if needs_mean(op))
        across, down = _tiles(step.out, MEAN_TILE)
        blocks = across * down
        partial = torch.empty((batch, blocks), dtype=torch.float32, device=images.device)
        partials = next_power_of_2(blocks)
        launch(
            gather_kernel,
            (blocks, batch, 1),
            (images, out, table, partial, *source, across, table.stride(0), blocks, blocks, *strides, 0, 0, 0),
            {**constants, "OUT_W": 1, "REDUCE": True, "GATE_AT": gate, "MEAN": False, "PARTIALS": 1, **_tile(MEAN_TILE)},
        )
    across, down = _tiles(step.out, TILE)
    launch(
        gather_kernel,
        (across * down, batch, 1 if rgb else channels),
        (images, out, table, partial, *source, across, table.stride(0), across * down, blocks, *strides, *out.stride()[:3]),
        {
            **constants,
            "OUT_W": out.stride(3),
            "REDUCE": False,
            "GATE_AT": 0,
            "MEAN": step.mean,
            "PARTIALS": partials,
            **_tile(TILE),
        },
    )


def run_mask(front: Gather, columns: Columns, masks: Tensor, table: Tensor, out: Size) -> Tensor:
    """Take masks of any type, (B, C, H, W), to the nearest pixel."""
    made = torch.empty((*masks.shape[:2], out.height, out.width), dtype=masks.dtype, device=masks.device)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[masks.dtype.itemsize]
    across, down = _tiles(out, TILE)
    before, after = (
        int(torch.tensor(mask_fill(part)).to(masks.dtype).view(bits).item()) for part in (front.before, front.after)
    )
    constants = {**_constants(front, columns), "WARP_AT": max(columns.mask_warp, 0), "SOURCE_W": masks.stride(3), **_tile(TILE)}
    for name in ("HALF", "NEAREST", "AFTER_FILL", "BEFORE_FILL"):
        del constants[name]
    source = (masks.shape[2], masks.shape[3], out.height, out.width)
    strides = (*masks.stride()[:3], *made.stride()[:3])
    with on_device(masks.device):
        launch(
            mask_kernel,
            (across * down, masks.shape[0], masks.shape[1]),
            (masks.view(bits), made.view(bits), table, before, after, *source, across, table.stride(0), *strides),
            constants,
        )
    return made


def probe(device: torch.device) -> None:
    """Compile and run a kernel.

    Raises:
        Exception: Whatever keeps Triton from working here.
    """
    front = Gather()
    size = Size(1, 1, 1, 1)
    step = Pass(front, (), size, size, front.columns(0, 1, masks=False), ())
    images = torch.zeros((1, 1, 1, 1), device=device)
    gather(step, images, images.view(1, 1), torch.empty_like(images))


def _constants(front: Gather, columns: Columns) -> dict[str, Any]:
    """What of a gather is compiled into its kernels."""
    return {
        "KIND": _KINDS[front.kind],
        "HALF": front.half,
        "NEAREST": front.nearest,
        "ZEROS": front.zeros,
        "AFTER": _map(front.after),
        "AFTER_AT": max(columns.after, 0),
        "AFTER_FILL": max(columns.after_fill, 0),
        "WARP_AT": max(columns.warp, 0),
        "BEFORE": _map(front.before),
        "BEFORE_AT": max(columns.before, 0),
        "BEFORE_FILL": max(columns.before_fill, 0),
    }


def _map(part: Part) -> int:
    return _MAPS[part.edge] if part.ops else 0


def _tile(tile: tuple[int, int]) -> dict[str, int]:
    return {"TILE_H": tile[0], "TILE_W": tile[1]}


def _tiles(size: Size, tile: tuple[int, int]) -> tuple[int, int]:
    return -(-size.width // tile[1]), -(-size.height // tile[0])
