"""The plan in Triton kernels: one launch a pass, one more where a contrast needs a mean."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from gpuaug.core.errors import ArgumentError
from gpuaug.core.ragged import Ragged
from gpuaug.fusion.backends.readers import MaskPlaces, dtype_of, viewed
from gpuaug.fusion.backends.torch_backend import as_bits, mask_fill
from gpuaug.fusion.backends.triton.cache import use_writable_cache
from gpuaug.fusion.backends.triton.channels import mix_channels
from gpuaug.fusion.backends.triton.filters.blur import blur
from gpuaug.fusion.backends.triton.filters.levels import level
from gpuaug.fusion.backends.triton.filters.sharpness import sharpen
from gpuaug.fusion.backends.triton.gather import gather_kernel
from gpuaug.fusion.backends.triton.launch import Launch, compiled_together, is_current, on_device, prepared, run_beside
from gpuaug.fusion.backends.triton.mask import mask_kernel
from gpuaug.fusion.backends.triton.mix import mix
from gpuaug.fusion.backends.triton.second_pass import rest_kernel
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.ops.color_jitter import BEFORE_CONTRAST, CONTRAST, FROM_CONTRAST
from gpuaug.fusion.program.gather import Gather, Part
from gpuaug.fusion.program.intermediates import KEPT, is_clean, marked_program, may_round, types_written
from gpuaug.fusion.program.plan import Canvases, GatherPass, OpPass, Plan

_KINDS = {"": 0, "resample": 1, "affine": 2, "perspective": 3}
_FILTERS = {"": 0, "triangle": 1, "cubic": 2}
_LAYOUTS = {"": 0, "chw": 1, "hwc": 2, "windows": 3}
_GREATEST_VALUES = {torch.uint8: 255, KEPT: 65535}
_MAPS = {"": 1, "constant": 2, "reflect": 3, "replicate": 4}

TILES = {"": (4, 256), "resample": (4, 256), "affine": (4, 64), "perspective": (4, 64)}
"""Height and width of a block's tile by what a gather interpolates. Warps lie along its rows (``tile_pixels``)."""

COLOUR_TILE = (32, 32)
"""The tile where a mean is needed: fewer blocks, and so fewer sums to add up."""

ANTIALIASED_TILE = (8, 64)
"""The tile of an antialiased resize. Its block is one warp, which makes one row after the other."""

MOST_SAMPLES = 65535
"""Samples, or masks, of one launch: the second axis of a grid, which CUDA limits."""

OP_KERNELS: dict[str, Callable[[OpPass[Any], Tensor, Tensor, Tensor], object]] = {
    "blur": blur,
    "channels": mix_channels,
    "levels": level,
    "mix": mix,
    "sharpness": sharpen,
}
"""What launches a pass that begins with an op, by the op's ``kernel``."""

REST_BLOCK = 1024
"""Pixels of a block where the second pass over an image reads what the first has kept."""


def run(
    plan: Plan,
    images: Tensor | Ragged,
    table: Tensor,
    dtype: torch.dtype,
    memory_format: torch.memory_format,
    canvases: Canvases = (),
) -> Tensor:
    """Run all passes on the current stream.

    Args:
        plan: For images of this size.
        images: uint8 or floating.
        table: Rows of the samples.
        dtype: Type of the result.
        memory_format: Memory format of the result.
        canvases: ``Plan.canvases``.

    Shape:
        - images: (B · T, C, H, W), of a type in ``PIXELS``, any strides; or a ragged batch of B
        - table: (V · B, K) float32, for V views
        - returns: (V · B · T, C, H', W') of ``dtype`` and ``memory_format``

    Raises:
        ArgumentError: If there are more samples than a launch can have.

    Cost:
        The launches of the passes, some 10 µs of host time each, and memory for the images between passes (``types_written``).
    """
    samples = table.shape[0] * max(plan.source.each, plan.out.each)
    if samples > MOST_SAMPLES:
        raise ArgumentError(
            f"A batch must have at most {MOST_SAMPLES} samples in all its views on a GPU, got {samples}. "
            "Lower batch_size or views."
        )
    if isinstance(images, Tensor) and images.dtype == torch.float64:
        images = images.float()
    if not is_current(images.device):
        with on_device(images.device):
            return run(plan, images, table, dtype, memory_format, canvases)
    key = types_written, dtype_of(images), dtype
    types = plan.passes[-1].prepared.get(key)
    if types is None:
        types = types_written(plan.passes, dtype_of(images), dtype)
        with compiled_together():
            _run(plan, images, table, types, memory_format, canvases)
        plan.passes[-1].prepared[key] = types
    return _run(plan, images, table, types, memory_format, canvases)


def _run(
    plan: Plan,
    images: Tensor | Ragged,
    table: Tensor,
    types: tuple[torch.dtype, ...],
    memory_format: torch.memory_format,
    canvases: Canvases,
) -> Tensor:
    source = images
    last = len(plan.passes) - 1
    buffers: Tensor | None = None
    for index, step in enumerate(plan.passes):
        sides = canvases[index] if step.out.ragged else (step.out.height, step.out.width)
        shape = table.shape[0] * step.out.each, step.out.channels, *sides
        if index == last:
            out = torch.empty(shape, dtype=types[index], device=images.device, memory_format=memory_format)
        elif plan.passes[-1].way < 0:
            out = torch.empty(shape, dtype=types[index], device=images.device)
        else:  # a sample is moved between these two
            if buffers is None:
                buffers = torch.empty((2, *shape), dtype=types[index], device=images.device)
            out = buffers[0]
        rows = step.rows_of(table)
        if isinstance(step, GatherPass):
            gather(step, source, rows, out)
        else:
            assert isinstance(source, Tensor), "ragged batches begin with a gather"
            OP_KERNELS[step.front.kernel](step, viewed(source, len(out)), rows, out)
        source = out
    return out


def gather(step: GatherPass, images: Tensor | Ragged, table: Tensor, out: Tensor) -> None:
    """Launch a gather pass into ``out``, and before it the sums that a contrast needs."""
    found = prepared(step, images, table, out, _gathering)
    source, places = (images.data, images.places) if isinstance(images, Ragged) else (images, table)
    if found.sums is None:
        found.pixels((source, places, out, table, table, table))
        return
    sums = torch.empty(found.partials, dtype=torch.float32, device=images.device)
    if found.keeps:
        kept = torch.empty(out.shape, dtype=KEPT, device=images.device)
        found.sums((source, places, out, table, sums, kept))
        found.pixels((kept, out, table, sums))
    else:
        found.sums((source, places, out, table, sums, table))
        found.pixels((source, places, out, table, sums, table))


@dataclass(frozen=True, slots=True)
class _Gathering:
    """The launches of a gather pass for batches of one kind."""

    sums: Launch | None
    partials: tuple[int, int]
    keeps: bool
    pixels: Launch


def _gathering(step: GatherPass, images: Tensor | Ragged, table: Tensor, out: Tensor) -> _Gathering:
    front = step.front
    batch, channels, height, width = out.shape
    layout, strides, narrowest = _laid_out(images)
    on_canvas = step.source.ragged and isinstance(images, Tensor)
    """Whether images of different sizes are read, each at the top left of its memory."""
    sources = batch // step.out.each * step.source.each
    rgb = channels == 3
    clean = is_clean(front, dtype_of(images))
    tile = ANTIALIASED_TILE if front.filter else COLOUR_TILE if step.mean else TILES[front.kind]
    warps = 1 if front.filter else 4
    across, down = _tiles(height, width, tile)
    even = out.shape[3] % 2 == 0  # rows and samples then begin at addresses of 32 bits
    constants = {
        "RAGGED": _LAYOUTS[layout],
        "REPEATS": (sources != len(images), step.out.each, step.columns.frames, step.source.each),
        "SOURCE_W": strides[3],
        "PAIRS": clean and front.kind == "resample" and not front.nearest and not front.before.ops and narrowest > 1,
        "ANTIALIAS": (_FILTERS[front.filter], _GREATEST_VALUES.get(dtype_of(images), 1) if front.clamps else 0),
        "WORDS": out.stride(1) == 1 and rgb and out.dtype.is_floating_point and out.dtype.itemsize == 2 and even,
        "OUT_W": out.stride(3),
        "PROGRAM": marked_program(step, clean=clean),
        "COUNT": len(step.program),
        "CHANNELS": channels,
        "SCALE": _GREATEST_VALUES.get(dtype_of(images), 0),
        "EXACT": front.exact,
        "WAY": step.way,
        "REDUCE": -1,
        "KEEP": False,
        "PARTIALS": 0,
        "TILE": tile,
        **_constants(step),
    }
    if on_canvas or step.out.ragged:  # whose memory has other sides in every batch
        constants |= _NOT_COMPILED_IN
    else:
        constants |= _compiled_in(constants, strides, out, whole=width % tile[1] == 0 and height % tile[0] == 0)
    source = (len(images), height, width)
    row_stride = table.stride(0)
    out_strides = out.stride()[:3]
    if not step.mean:
        numbers = (*source, across, row_stride, across * down, 0, *strides[:3], *out_strides)
        grid = (across * down, batch, 1 if rgb else channels)
        return _Gathering(None, (0, 0), False, Launch(gather_kernel, grid, numbers, constants, warps=warps))
    tiles = across * down
    planes = 1 if rgb else channels
    blocks = tiles * planes
    constants["PARTIALS"] = next_power_of_2(blocks)
    at = next(index for index, op in enumerate(step.points) if op.needs_mean)
    code, apply_mask, flags = constants["PROGRAM"][at]
    summed = (*constants["PROGRAM"][:at], (code, apply_mask, flags & ~CONTRAST | BEFORE_CONTRAST))
    rest = ((code, apply_mask, flags | FROM_CONTRAST), *constants["PROGRAM"][at + 1 :])
    # With 16 bits a value, pixels are rounded: only for results that have no more. Of a pass between two buffers, the second
    # kernel would not know which samples are left where they are.
    between = step.way >= 0 and out.dtype == KEPT
    rounds = may_round(step, dtype_of(images), out.dtype) and not between and not step.out.ragged
    keep = rgb and clean and rounds and all(op.keeps_unit_range for op in step.points[:at])
    summing = {**constants, "OUT_W": 1, "PROGRAM": summed, "COUNT": len(summed), "PARTIALS": 0}
    summing |= {"REDUCE": apply_mask, "KEEP": keep, "WORDS": keep and even}
    numbers = (*source, across, row_stride, tiles, blocks, *strides[:3])
    sums = Launch(gather_kernel, (tiles, batch, planes), (*numbers, 0, 0, 0), summing, warps=warps)
    if not keep:
        pixels = Launch(gather_kernel, (tiles, batch, planes), (*numbers, *out_strides), constants, warps=warps)
        return _Gathering(sums, (batch, blocks), keep, pixels)
    area = height * width
    resting = {name: constants[name] for name in ("PIXELS", "OUT_W", "PARTIALS")}
    resting["FRAMES"] = step.out.each
    known = constants["PIXELS"]
    resting |= {
        "PROGRAM": rest,
        "COUNT": len(rest),
        "WHOLE": known > 0 and known % REST_BLOCK == 0,
        "WORDS": known > 0 and known % 2 == 0 and out.stride(1) == 1,
        "BLOCK": REST_BLOCK,
    }
    numbers = (height, width, row_stride, blocks, *out_strides[:2])
    return _Gathering(sums, (batch, blocks), keep, Launch(rest_kernel, (-(-area // REST_BLOCK), batch, 1), numbers, resting))


_first_sizes: dict[tuple[Any, ...], dict[str, Any]] = {}

_NOT_COMPILED_IN: dict[str, Any] = {"SOURCE": (0, 0), "WIDTH": 0, "PIXELS": 0, "WHOLE": False}
"""Constants of kernels that take all strides and sizes as arguments."""


def _laid_out(images: Tensor | Ragged) -> tuple[str, tuple[int, ...], int]:
    """The layout of a ragged batch, the strides (B, C, H, W) of images, 0 where each has its own, and the shortest side."""
    if isinstance(images, Tensor):
        return "", images.stride(), min(images.shape[2:])
    shapes = images.shapes
    strides = (0, 0, 0, 1) if shapes.layout == "chw" else (0, 1, 0, shapes.channels)
    return shapes.layout if shapes.windows is None else "windows", strides, shapes.least


def _compiled_in(constants: dict[str, Any], strides: tuple[int, ...], out: Tensor, *, whole: bool) -> dict[str, Any]:
    """The strides and sizes that are compiled in: those of the first images that such a pass has seen, else zeros.

    They save a third of the instructions. Images of all other sizes share one more compilation.
    """
    height, width = out.shape[2:]
    sizes = {
        "SOURCE": strides[1:3],
        "WIDTH": width,
        "PIXELS": height * width,
        "WHOLE": whole,
    }
    first = _first_sizes.setdefault((*constants.values(), out.dtype), sizes)
    return sizes if first == sizes else _NOT_COMPILED_IN


def run_mask(
    step: GatherPass,
    masks: Tensor,
    table: Tensor,
    places: MaskPlaces | None = None,
    canvas: tuple[int, int] | None = None,
) -> Tensor:
    """Take masks of any type to the nearest pixel of a gather pass.

    Args:
        step: The pass.
        masks: Of any type.
        table: Rows of the samples.
        places: Places of masks that differ in size.
        canvas: The pass's of ``Plan.canvases``, if images differ in size behind the pass.

    Shape:
        - masks: (B · T, C, H, W), or where there are ``places`` of N of them what their elements are counted from
        - table: (B, K) float32
        - returns: (B · T, C, H', W'); with places (N, 1, H', W')
    """
    flat = places is not None
    table = step.rows_of(table)
    batch, channels = masks.shape[:2] if places is None else (len(places.owners), 1)
    height, width = canvas or (step.out.height, step.out.width)
    made = torch.empty((batch, channels, height, width), dtype=masks.dtype, device=masks.device)
    # How many masks there are differs from batch to batch, and so is no part of what is prepared.
    frames = 1 if flat else max(batch // max(len(table), 1), 1)
    key = _masking, masks.dtype, masks.stride(-1), flat, frames
    found = step.prepared.get(key)
    if found is None:
        found = step.prepared[key] = _masking(step, masks, flat=flat, frames=frames)
    across, down = _tiles(height, width, found.tile)
    strides = (0, 0, 0) if flat else masks.stride()[:3]
    sizes = (height, width, across, table.stride(0))
    owners, samples = (table, table) if places is None else places
    tensors = (as_bits(masks), as_bits(made), table, owners, samples)
    numbers = (*found.fills, *sizes, *strides, *made.stride()[:3])
    with on_device(masks.device):
        for first in range(0, batch, MOST_SAMPLES):
            found.launch(tensors, (across * down, min(batch - first, MOST_SAMPLES), channels), (first, *numbers))
    return made


@dataclass(frozen=True, slots=True)
class _Masking:
    """The launch for masks of one kind, and the bits of what padding holds in them."""

    fills: tuple[int, int]
    tile: tuple[int, int]
    launch: Launch


def _masking(step: GatherPass, masks: Tensor, *, flat: bool, frames: int = 1) -> _Masking:
    front = step.front
    before, after = (mask_fill(part, masks.dtype) for part in (front.before, front.after))
    tile = TILES[front.kind]
    constants = {
        **_constants(step),
        "HALF_PIXEL": front.mask_half_pixel_centers,
        "WARP_AT": max(step.columns.mask_warp, 0),
        "FLAT": flat,
        "FRAMES": frames,
        "SOURCE_W": masks.stride(-1),
        "TILE": tile,
    }
    for name in ("NEAREST", "WARP_FILL"):
        del constants[name]
    return _Masking((before, after), tile, Launch(mask_kernel, (1, 1, 1), (), constants))


def probe(device: torch.device, first: tuple[Any, ...] | None = None) -> None:
    """Compile and run a kernel.

    Args:
        device: Where to run it.
        first: Arguments of the ``run`` that follows. Its kernels are compiled at the same time.

    Raises:
        Exception: Whatever keeps Triton from working here.
    """
    use_writable_cache()
    front = Gather()
    size = Size(1, 1, 1, 1)
    step = GatherPass(front, (), size, size, (), columns=front.columns(1, masks=False))
    images = torch.zeros((1, 1, 1, 1), dtype=torch.float32, device=device)
    with on_device(device):
        launch = partial(gather, step, images, images.view(1, 1), torch.empty_like(images))
        run_beside(launch, None if first is None else partial(run, *first))


def _constants(step: GatherPass) -> dict[str, Any]:
    """What of a gather is compiled into its kernels."""
    front, columns = step.front, step.columns
    return {
        "KIND": _KINDS[front.kind],
        "HALF_PIXEL": front.half_pixel_centers,
        "NEAREST": front.nearest,
        "ZEROS": front.zeros,
        "AFTER": (_map(front.after), max(columns.after, 0), max(columns.after_fill, 0)),
        "WARP_AT": max(columns.warp, 0),
        "WARP_FILL": columns.warp_fill,
        "BEFORE": (_map(front.before), max(columns.before, 0), max(columns.before_fill, 0)),
        "SIDES": columns.sides,
    }


def _map(part: Part) -> int:
    return _MAPS[part.edge] if part.ops else 0


def _tiles(height: int, width: int, tile: tuple[int, int]) -> tuple[int, int]:
    """Number of tiles across and down."""
    return -(-width // tile[1]), -(-height // tile[0])
