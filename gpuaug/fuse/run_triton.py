"""The plan in Triton kernels: one launch a pass, one more where a contrast needs a mean."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from gpuaug.fuse.filters import BlurOp
from gpuaug.fuse.gather import Columns, Gather, Part
from gpuaug.fuse.kernels_filters import blur, sharpen
from gpuaug.fuse.kernels_gather import gather_kernel, mask_kernel
from gpuaug.fuse.ops import Size
from gpuaug.fuse.plan import Pass, Plan, needs_mean
from gpuaug.fuse.run_torch import mask_fill

_KINDS = {"": 0, "resample": 1, "affine": 2, "perspective": 3}
_MAPS = {"": 1, "constant": 2, "reflect": 3, "replicate": 4}

TILE = (8, 128)
"""Height and width of a block's tile: wide, so that neighbours in a row are read and stored together."""

MEAN_TILE = (32, 64)


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
    # Triton launches on the current device, whatever the tensors are on.
    with torch.cuda.device(images.device) if images.is_cuda else nullcontext():
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
        else:
            launch = blur if isinstance(step.front, BlurOp) else sharpen
            launch(step, images, table, out)
        images = out
    return images


def gather(step: Pass, images: Tensor, table: Tensor, out: Tensor) -> None:
    """Launch a gather pass into ``out``, and before it the sums that a contrast needs."""
    front, columns = step.front, step.columns
    assert isinstance(front, Gather)
    assert isinstance(columns, Columns)
    batch, channels, height, width = images.shape
    rgb = channels == 3
    program: tuple[Any, ...] = step.program
    constants = {
        "SOURCE_W": images.stride(3),
        "PROGRAM": program,
        "COUNT": len(program),
        "CHANNELS": channels,
        "RGB": rgb,
        "SCALE": images.dtype == torch.uint8,
        "KIND": _KINDS[front.kind],
        "HALF": front.half,
        "NEAREST": front.nearest,
        "ZEROS": front.zeros,
        **_part("AFTER", front.after, columns.after, columns.after_fill),
        "WARP_AT": max(columns.warp, 0),
        **_part("BEFORE", front.before, columns.before, columns.before_fill),
    }
    source = (height, width, step.out.height, step.out.width)
    strides = (images.stride(0), images.stride(1), images.stride(2))
    partial, blocks, partials = table, 0, 1
    if step.mean:
        gate = next(column for op, (_, column) in zip(step.points, step.program, strict=True) if needs_mean(op))
        across, down = _tiles(step.out, MEAN_TILE)
        blocks = across * down
        partial = torch.empty((batch, blocks), dtype=torch.float32, device=images.device)
        partials = next_power_of_2(blocks)
        gather_kernel[(blocks, batch, 1)](
            images, out, table, partial, *source, across, table.stride(0), blocks, blocks, *strides, 0, 0, 0,
            OUT_W=1, REDUCE=True, GATE_AT=gate, MEAN=False, PARTIALS=1, TILE_H=MEAN_TILE[0], TILE_W=MEAN_TILE[1], num_warps=8, **constants,
        )  # fmt: skip
    across, down = _tiles(step.out, TILE)
    gather_kernel[(across * down, batch, 1 if rgb else channels)](
        images, out, table, partial, *source, across, table.stride(0), across * down, blocks, *strides,
        out.stride(0), out.stride(1), out.stride(2),
        OUT_W=out.stride(3), REDUCE=False, GATE_AT=0, MEAN=step.mean, PARTIALS=partials, TILE_H=TILE[0], TILE_W=TILE[1], **constants,
    )  # fmt: skip


def run_mask(front: Gather, columns: Columns, masks: Tensor, table: Tensor, out: Size) -> Tensor:
    """Take masks of any type, (B, C, H, W), to the nearest pixel."""
    made = torch.empty((*masks.shape[:2], out.height, out.width), dtype=masks.dtype, device=masks.device)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[masks.dtype.itemsize]
    across, down = _tiles(out, TILE)
    before, after = (int(torch.tensor(mask_fill(part)).to(masks.dtype).view(bits).item()) for part in (front.before, front.after))
    constants = {
        **_part("AFTER", front.after, columns.after, 0),
        **_part("BEFORE", front.before, columns.before, 0),
    }
    del constants["AFTER_FILL"], constants["BEFORE_FILL"]
    mask_kernel[(across * down, masks.shape[0], masks.shape[1])](
        masks.view(bits), made.view(bits), table, before, after, masks.shape[2], masks.shape[3], out.height, out.width, across,
        table.stride(0), masks.stride(0), masks.stride(1), masks.stride(2), made.stride(0), made.stride(1), made.stride(2),
        SOURCE_W=masks.stride(3), KIND=_KINDS[front.kind], ZEROS=front.zeros, WARP_AT=max(columns.mask_warp, 0),
        TILE_H=TILE[0], TILE_W=TILE[1], **constants,
    )  # fmt: skip
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


def _part(name: str, part: Part, column: int, fill: int) -> dict[str, int]:
    return {
        name: _MAPS[part.edge] if part.ops else 0,
        f"{name}_AT": max(column, 0),
        f"{name}_FILL": max(fill, 0),
    }


def _tiles(size: Size, tile: tuple[int, int]) -> tuple[int, int]:
    return -(-size.width // tile[1]), -(-size.height // tile[0])
