"""The plan in Triton kernels: one launch a pass, one more where a contrast needs a mean."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from gpuaug.fuse.filters import BlurOp
from gpuaug.fuse.gather import Columns, Gather, Part
from gpuaug.fuse.jitter import CLEAN, ColorJiggle, ColorJitter
from gpuaug.fuse.kernels_filters import blur, sharpen
from gpuaug.fuse.kernels_gather import gather_kernel, mask_kernel
from gpuaug.fuse.kernels_mixes import mix
from gpuaug.fuse.launching import Launch, on_device, prepared
from gpuaug.fuse.mixes import MixOp
from gpuaug.fuse.ops import Size
from gpuaug.fuse.plan import Pass, Plan, needs_mean
from gpuaug.fuse.points import ChannelShuffle, Grayscale
from gpuaug.fuse.run_torch import mask_fill

_KINDS = {"": 0, "resample": 1, "affine": 2, "perspective": 3}
_MAPS = {"": 1, "constant": 2, "reflect": 3, "replicate": 4}

TILES = {"": (4, 256), "resample": (4, 256), "affine": (4, 64), "perspective": (4, 64)}
"""Height and width of a block's tile by what a gather interpolates: a warp makes a row of it."""

COLOUR_TILE = (32, 32)
"""The same where a mean is needed: fewer blocks, and so fewer sums to add up."""


def run(plan: Plan, images: Tensor, table: Tensor, dtype: torch.dtype, memory_format: torch.memory_format) -> Tensor:
    """Run all passes on the current stream.

    Shape:
        - images: (B, C, H, W), uint8 or floating, any strides
        - table: (B, K) float32
        - returns: (B, C, H', W') of ``dtype`` and ``memory_format``

    Cost:
        The launches of the passes, some 10 µs of host time each, and float32 images between passes.
    """
    if images.dtype == torch.float64:
        images = images.float()
    with on_device(images.device):
        last = len(plan.passes) - 1
        for index, step in enumerate(plan.passes):
            shape = images.shape[0], images.shape[1], step.out.height, step.out.width
            out = torch.empty(
                shape,
                dtype=dtype if index == last else torch.float32,
                device=images.device,
                memory_format=memory_format if index == last else torch.contiguous_format,
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
    found = prepared(step, images, table, out, _gathering)
    partial = kept = table
    if found.sums is not None:
        partial = torch.empty(found.partials, dtype=torch.float32, device=images.device)
        if found.keeps:
            kept = torch.empty(out.shape, dtype=torch.uint16, device=images.device)
        found.sums((images, out, table, partial, kept))
    found.pixels((images, out, table, partial, kept))


@dataclass(frozen=True, slots=True)
class _Gathering:
    """The launches of a gather pass for batches of one kind."""

    sums: Launch | None
    partials: tuple[int, int]
    keeps: bool
    pixels: Launch


def _gathering(step: Pass, images: Tensor, table: Tensor, out: Tensor) -> _Gathering:
    front, columns = step.front, step.columns
    assert isinstance(front, Gather)
    assert isinstance(columns, Columns)
    batch, channels, height, width = images.shape
    rgb = channels == 3
    constants = {
        "SOURCE_W": images.stride(3),
        "PROGRAM": _program(step, images),
        "COUNT": len(step.program),
        "CHANNELS": channels,
        "RGB": rgb,
        "SCALE": images.dtype == torch.uint8,
        **_constants(front, columns),
    }
    constants["SOURCE_C"] = _plane_stride(constants, images)
    source = (height, width, step.out.height, step.out.width)
    strides = images.stride()[:3]
    row_stride = table.stride(0)
    sums, blocks, partials, gate, keep = None, 0, 1, 0, 0
    if step.mean:
        op, gate = next((op, column) for op, (_, column, _) in zip(step.points, step.program, strict=True) if needs_mean(op))
        if _clean(step, images) and out.dtype.itemsize == 2:
            keep = 1 if op.gated else 2
        across, down = _tiles(step.out, COLOUR_TILE)
        blocks = across * down
        partials = next_power_of_2(blocks)
        sums = Launch(
            gather_kernel,
            (blocks, batch, 1),
            (*source, across, row_stride, blocks, blocks, *strides, 0, 0, 0),
            {
                **constants,
                "OUT_W": 1,
                "REDUCE": True,
                "GATE_AT": gate,
                "KEEP": keep,
                "MEAN": False,
                "PARTIALS": 1,
                **_tile(COLOUR_TILE),
            },
        )
    tile = COLOUR_TILE if step.mean else TILES[front.kind]
    across, down = _tiles(step.out, tile)
    pixels = Launch(
        gather_kernel,
        (across * down, batch, 1 if rgb else channels),
        (*source, across, row_stride, across * down, blocks, *strides, *out.stride()[:3]),
        {
            **constants,
            "OUT_W": out.stride(3),
            "REDUCE": False,
            "GATE_AT": gate,
            "KEEP": keep,
            "MEAN": step.mean,
            "PARTIALS": partials,
            **_tile(tile),
        },
    )
    return _Gathering(sums, (batch, blocks), keep > 0, pixels)


_planes: dict[tuple[Any, ...], int] = {}


def _plane_stride(constants: dict[str, Any], images: Tensor) -> int:
    """The distance between planes if it is compiled in: that of the first images that such a pass has seen, else 0.

    It saves a seventh of the instructions. Images of any other size share one more compilation.
    """
    stride = images.stride(1)
    return stride if _planes.setdefault(tuple(constants.values()), stride) == stride else 0


def run_mask(step: Pass, masks: Tensor, table: Tensor) -> Tensor:
    """Take masks of any type, (B, C, H, W), to the nearest pixel of a gather pass."""
    made = torch.empty((*masks.shape[:2], step.out.height, step.out.width), dtype=masks.dtype, device=masks.device)
    with on_device(masks.device):
        found = prepared(step, masks, table, made, _masking)
        found.launch((masks.view(found.bits), made.view(found.bits), table))
    return made


@dataclass(frozen=True, slots=True)
class _Masking:
    """The launch for masks of one kind, and the type that their bits are read as."""

    bits: torch.dtype
    launch: Launch


def _masking(step: Pass, masks: Tensor, table: Tensor, made: Tensor) -> _Masking:
    front, columns = step.front, step.columns
    assert isinstance(front, Gather)
    assert isinstance(columns, Columns)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[masks.dtype.itemsize]
    before, after = (
        int(torch.tensor(mask_fill(part)).to(masks.dtype).view(bits).item()) for part in (front.before, front.after)
    )
    tile = TILES[front.kind]
    across, down = _tiles(step.out, tile)
    constants = {**_constants(front, columns), "WARP_AT": max(columns.mask_warp, 0), "SOURCE_W": masks.stride(3), **_tile(tile)}
    for name in ("HALF", "NEAREST", "AFTER_FILL", "BEFORE_FILL"):
        del constants[name]
    source = (masks.shape[2], masks.shape[3], step.out.height, step.out.width)
    numbers = (before, after, *source, across, table.stride(0), *masks.stride()[:3], *made.stride()[:3])
    return _Masking(bits, Launch(mask_kernel, (across * down, masks.shape[0], masks.shape[1]), numbers, constants))


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


def _clean(step: Pass, images: Tensor) -> bool:
    """Whether what a pass gathers is certain to lie in [0, 1]: bytes do, and a fill may be anything."""
    assert isinstance(step.front, Gather)
    return images.dtype == torch.uint8 and "constant" not in (step.front.before.edge, step.front.after.edge)


def _program(step: Pass, images: Tensor) -> tuple[tuple[int, int, int], ...]:
    """The program, with the jitters marked that see nothing but numbers, which cost less to clamp."""
    # What a normalisation or an unclamped op makes may be anything.
    clean = _clean(step, images)
    marked = []
    for op, (code, column, flags) in zip(step.points, step.program, strict=True):
        jitter = isinstance(op, ColorJitter | ColorJiggle)
        marked.append((code, column, flags | CLEAN if jitter and clean else flags))
        clean = clean and (jitter or isinstance(op, Grayscale | ChannelShuffle))
    return tuple(marked)


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
