"""Executor of plans in Triton kernels: one launch per pass, plus one if a contrast needs a mean."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from gpuaug.core.errors import ArgumentError
from gpuaug.core.ragged import Ragged
from gpuaug.fusion.backends.readers import MaskLayout, dtype_of, repeated_per_view
from gpuaug.fusion.backends.torch_backend import as_bits, mask_fill
from gpuaug.fusion.backends.triton.cache import use_writable_cache
from gpuaug.fusion.backends.triton.channels import combine_channels
from gpuaug.fusion.backends.triton.filters.blur import blur
from gpuaug.fusion.backends.triton.filters.levels import level
from gpuaug.fusion.backends.triton.filters.sharpness import sharpen
from gpuaug.fusion.backends.triton.gather import gather_kernel
from gpuaug.fusion.backends.triton.launch import Launch, compile_and_run, compiled_together, is_current, on_device, prepared
from gpuaug.fusion.backends.triton.mask import mask_kernel
from gpuaug.fusion.backends.triton.mix import mix
from gpuaug.fusion.backends.triton.second_pass import rest_kernel
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.ops.color_jitter import BEFORE_CONTRAST, CONTRAST, FROM_CONTRAST
from gpuaug.fusion.program.gather import Gather, Part
from gpuaug.fusion.program.intermediates import UINT16_UNIT, is_clean, marked_program, may_round, types_written
from gpuaug.fusion.program.plan import Canvases, GatherPass, OpPass, Plan

# Numbers of options in the constants of kernels: type of the interpolation, antialiasing filter, layout of ragged images,
# largest value of integer images, padding mode of permutations.
_KINDS = {"": 0, "resample": 1, "affine": 2, "perspective": 3}
_FILTERS = {"": 0, "triangle": 1, "cubic": 2}
_LAYOUTS = {"": 0, "chw": 1, "hwc": 2, "windows": 3}
_GREATEST_VALUES = {torch.uint8: 255, UINT16_UNIT: 65535}
_MAPS = {"": 1, "constant": 2, "reflect": 3, "replicate": 4}

TILES = {"": (4, 256), "resample": (4, 256), "affine": (4, 64), "perspective": (4, 64)}
"""(height, width) of a block's tile, by type of the interpolation. The threads of a warp lie along x (``tile_pixels``)."""

COLOUR_TILE = (32, 32)
"""Tile of a pass that needs a mean: fewer blocks, and so fewer sums to add."""

ANTIALIASED_TILE = (8, 64)
"""Tile of an antialiased resize. A block is one warp, which computes one line after another."""

MOST_SAMPLES = 65535
"""Maximum number of samples, or masks, per launch: CUDA limits the second axis of a grid."""

OP_KERNELS: dict[str, Callable[[OpPass[Any], Tensor, Tensor, Tensor], object]] = {
    "blur": blur,
    "channels": combine_channels,
    "levels": level,
    "mix": mix,
    "sharpness": sharpen,
}
"""Function that launches a pass whose front is an op, by ``FrontOp.kernel``."""

REST_BLOCK = 1024
"""Pixels per block of ``rest_kernel``, which reads the pixels that the first pass over an image kept."""


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
        plan: Plan for the size of the images.
        images: Images of a type in ``PIXELS``.
        table: Parameter table.
        dtype: Dtype of the result.
        memory_format: Memory format of the result.
        canvases: ``Plan.canvases``.

    Shape:
        - images: (B · T, C, H, W), any strides; or a ragged batch of B
        - table: (V · B, K) float32, for V views
        - returns: (V · B · T, C, H', W') of ``dtype`` and ``memory_format``

    Raises:
        ArgumentError: If there are more samples than a launch supports.

    Cost:
        The launches of the passes, some 10 µs of host time each, and memory for the images between passes (``types_written``).
    """
    samples = table.shape[0] * max(plan.source.images_per_sample, plan.out.images_per_sample)
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
        with compiled_together():  # the first call compiles the kernels of all passes in parallel, and launches none
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
    for index, pass_ in enumerate(plan.passes):
        sides = canvases[index] if pass_.out.ragged else (pass_.out.height, pass_.out.width)
        shape = table.shape[0] * pass_.out.images_per_sample, pass_.out.channels, *sides
        if index == last:
            out = torch.empty(shape, dtype=types[index], device=images.device, memory_format=memory_format)
        elif plan.passes[-1].route_column < 0:
            out = torch.empty(shape, dtype=types[index], device=images.device)
        else:  # a pass reads a sample from one of the two, and writes it to the other
            if buffers is None:
                buffers = torch.empty((2, *shape), dtype=types[index], device=images.device)
            out = buffers[0]
        rows = pass_.rows_of(table)
        if isinstance(pass_, GatherPass):
            gather(pass_, source, rows, out)
        else:
            assert isinstance(source, Tensor), "ragged batches begin with a gather"
            OP_KERNELS[pass_.front.kernel](pass_, repeated_per_view(source, len(out)), rows, out)
        source = out
    return out


def gather(pass_: GatherPass, images: Tensor | Ragged, table: Tensor, out: Tensor) -> None:
    """Launch a gather pass into ``out``, and before it the sums that a contrast needs."""
    launches = prepared(pass_, images, table, out, _gather_launches)
    source, places = (images.data, images.places) if isinstance(images, Ragged) else (images, table)
    if launches.sums is None:
        launches.pixels((source, places, out, table, table, table))
        return
    sums = torch.empty(launches.partials, dtype=torch.float32, device=images.device)
    if launches.keeps:
        kept = torch.empty(out.shape, dtype=UINT16_UNIT, device=images.device)
        launches.sums((source, places, out, table, sums, kept))
        launches.pixels((kept, out, table, sums))
    else:
        launches.sums((source, places, out, table, sums, table))
        launches.pixels((source, places, out, table, sums, table))


@dataclass(frozen=True, slots=True)
class _GatherLaunches:
    """Launches of a gather pass, for sources with one ``source_key``."""

    sums: Launch | None
    """Launch of the sums of grey for the mean of a contrast; ``None`` if no op needs a mean."""
    partials: tuple[int, int]
    """Shape of the sums: (samples, blocks)."""
    keeps: bool
    """Whether ``sums`` also stores the pixels before the contrast, in 16 bits per value, which ``pixels`` then reads."""
    pixels: Launch
    """Launch that stores the output pixels."""


def _gather_launches(pass_: GatherPass, images: Tensor | Ragged, table: Tensor, out: Tensor) -> _GatherLaunches:
    front = pass_.front
    batch, channels, height, width = out.shape
    layout, strides, shortest_side = _source_layout(images)
    on_canvas = pass_.source.ragged and isinstance(images, Tensor)
    """Whether the source has images of different sizes, each in the top left corner of its memory."""
    images_per_view = batch // pass_.out.images_per_sample * pass_.source.images_per_sample
    rgb = channels == 3
    clean = is_clean(front, dtype_of(images))
    tile = ANTIALIASED_TILE if front.filter else COLOUR_TILE if pass_.mean else TILES[front.kind]
    warps = 1 if front.filter else 4
    tiles_across, tiles_down = _tiles(height, width, tile)
    pairs_aligned = out.shape[3] % 2 == 0  # lines and samples then begin at multiples of 32 bits
    constants = {
        "RAGGED": _LAYOUTS[layout],
        "REPEATS": (
            images_per_view != len(images),
            pass_.out.images_per_sample,
            pass_.columns.frames,
            pass_.source.images_per_sample,
        ),
        "SOURCE_W": strides[3],
        "PAIRS": clean and front.kind == "resample" and not front.nearest and not front.before.ops and shortest_side > 1,
        "ANTIALIAS": (_FILTERS[front.filter], _GREATEST_VALUES.get(dtype_of(images), 1) if front.clamps else 0),
        "WORDS": out.stride(1) == 1 and rgb and out.dtype.is_floating_point and out.dtype.itemsize == 2 and pairs_aligned,
        "OUT_W": out.stride(3),
        "PROGRAM": marked_program(pass_, clean=clean),
        "COUNT": len(pass_.program),
        "CHANNELS": channels,
        "SCALE": _GREATEST_VALUES.get(dtype_of(images), 0),
        "EXACT": front.exact,
        "WAY": pass_.route_column,
        "REDUCE": -1,
        "KEEP": False,
        "PARTIALS": 0,
        "TILE": tile,
        **_constants(pass_),
    }
    if on_canvas or pass_.out.ragged:  # the sides of its memory differ in every batch
        constants |= _NOT_COMPILED_IN
    else:
        constants |= _compiled_in(constants, strides, out, whole=width % tile[1] == 0 and height % tile[0] == 0)
    sizes = (len(images), height, width)
    row_stride = table.stride(0)
    out_strides = out.stride()[:3]
    if not pass_.mean:
        numbers = (*sizes, tiles_across, row_stride, tiles_across * tiles_down, 0, *strides[:3], *out_strides)
        grid = (tiles_across * tiles_down, batch, 1 if rgb else channels)
        return _GatherLaunches(None, (0, 0), False, Launch(gather_kernel, grid, numbers, constants, warps=warps))
    tiles = tiles_across * tiles_down
    planes = 1 if rgb else channels
    blocks = tiles * planes
    constants["PARTIALS"] = next_power_of_2(blocks)
    contrast_index = next(index for index, op in enumerate(pass_.points) if op.needs_mean)
    code, mask_column, flags = constants["PROGRAM"][contrast_index]
    sum_program = (*constants["PROGRAM"][:contrast_index], (code, mask_column, flags & ~CONTRAST | BEFORE_CONTRAST))
    rest_program = ((code, mask_column, flags | FROM_CONTRAST), *constants["PROGRAM"][contrast_index + 1 :])
    # Kept pixels are rounded to 16 bits per value, so only results with 16 bits allow it. In a pass between two buffers, the
    # second kernel would not know which samples the pass skips.
    in_two_buffers = pass_.route_column >= 0 and out.dtype == UINT16_UNIT
    rounds = may_round(pass_, dtype_of(images), out.dtype) and not in_two_buffers and not pass_.out.ragged
    keeps = rgb and clean and rounds and all(op.keeps_unit_range for op in pass_.points[:contrast_index])
    sum_constants = {**constants, "OUT_W": 1, "PROGRAM": sum_program, "COUNT": len(sum_program), "PARTIALS": 0}
    sum_constants |= {"REDUCE": mask_column, "KEEP": keeps, "WORDS": keeps and pairs_aligned}
    numbers = (*sizes, tiles_across, row_stride, tiles, blocks, *strides[:3])
    sums = Launch(gather_kernel, (tiles, batch, planes), (*numbers, 0, 0, 0), sum_constants, warps=warps)
    if not keeps:
        pixels = Launch(gather_kernel, (tiles, batch, planes), (*numbers, *out_strides), constants, warps=warps)
        return _GatherLaunches(sums, (batch, blocks), keeps, pixels)
    area = height * width
    rest_constants = {name: constants[name] for name in ("PIXELS", "OUT_W", "PARTIALS")}
    rest_constants["FRAMES"] = pass_.out.images_per_sample
    compiled_pixels = constants["PIXELS"]
    rest_constants |= {
        "PROGRAM": rest_program,
        "COUNT": len(rest_program),
        "WHOLE": compiled_pixels > 0 and compiled_pixels % REST_BLOCK == 0,
        "WORDS": compiled_pixels > 0 and compiled_pixels % 2 == 0 and out.stride(1) == 1,
        "BLOCK": REST_BLOCK,
    }
    numbers = (height, width, row_stride, blocks, *out_strides[:2])
    return _GatherLaunches(
        sums, (batch, blocks), keeps, Launch(rest_kernel, (-(-area // REST_BLOCK), batch, 1), numbers, rest_constants)
    )


_compiled_sizes: dict[tuple[Any, ...], dict[str, Any]] = {}
"""Strides and sizes that are compiled in, keyed by all other constants."""

_NOT_COMPILED_IN: dict[str, Any] = {"SOURCE": (0, 0), "WIDTH": 0, "PIXELS": 0, "WHOLE": False}
"""Constants of kernels that take all strides and sizes as arguments."""


def _source_layout(images: Tensor | Ragged) -> tuple[str, tuple[int, ...], int]:
    """Return the layout of a ragged batch or ``""``, the strides (B, C, H, W), 0 where images differ, and the shortest side."""
    if isinstance(images, Tensor):
        return "", images.stride(), min(images.shape[2:])
    shapes = images.shapes
    strides = (0, 0, 0, 1) if shapes.layout == "chw" else (0, 1, 0, shapes.channels)
    return shapes.layout if shapes.windows is None else "windows", strides, shapes.least


def _compiled_in(constants: dict[str, Any], strides: tuple[int, ...], out: Tensor, *, whole: bool) -> dict[str, Any]:
    """Return strides and sizes to compile in, if they equal those of the first images that such a pass read; else zeros.

    They save a third of the instructions. Images of all other sizes share one more compilation.
    """
    height, width = out.shape[2:]
    sizes = {
        "SOURCE": strides[1:3],
        "WIDTH": width,
        "PIXELS": height * width,
        "WHOLE": whole,
    }
    first_sizes = _compiled_sizes.setdefault((*constants.values(), out.dtype), sizes)
    return sizes if first_sizes == sizes else _NOT_COMPILED_IN


def run_mask(
    pass_: GatherPass,
    masks: Tensor,
    table: Tensor,
    places: MaskLayout | None = None,
    canvas: tuple[int, int] | None = None,
) -> Tensor:
    """Run a gather pass on masks of any dtype, with the nearest pixel.

    Args:
        pass_: The pass.
        masks: Masks of any dtype.
        table: Parameter table.
        places: Layout of masks that differ in size.
        canvas: Entry of ``Plan.canvases`` for the pass, if images differ in size after it.

    Shape:
        - masks: (B · T, C, H, W); with ``places`` of N masks, the tensor from whose first element their offsets count
        - table: (B, K) float32
        - returns: (B · T, C, H', W'); with ``places`` (N, 1, H', W')
    """
    flat = places is not None
    table = pass_.rows_of(table)
    batch, channels = masks.shape[:2] if places is None else (len(places.owners), 1)
    height, width = canvas or (pass_.out.height, pass_.out.width)
    result = torch.empty((batch, channels, height, width), dtype=masks.dtype, device=masks.device)
    # The number of masks is not part of the key, because it differs between batches.
    frames = 1 if flat else max(batch // max(len(table), 1), 1)
    key = _mask_launch, masks.dtype, masks.stride(-1), flat, frames
    mask_launch = pass_.prepared.get(key)
    if mask_launch is None:
        mask_launch = pass_.prepared[key] = _mask_launch(pass_, masks, flat=flat, frames=frames)
    tiles_across, tiles_down = _tiles(height, width, mask_launch.tile)
    strides = (0, 0, 0) if flat else masks.stride()[:3]
    sizes = (height, width, tiles_across, table.stride(0))
    owners, samples = (table, table) if places is None else places
    tensors = (as_bits(masks), as_bits(result), table, owners, samples)
    numbers = (*mask_launch.fills, *sizes, *strides, *result.stride()[:3])
    with on_device(masks.device):
        for first in range(0, batch, MOST_SAMPLES):
            mask_launch.launch(
                tensors, (tiles_across * tiles_down, min(batch - first, MOST_SAMPLES), channels), (first, *numbers)
            )
    return result


@dataclass(frozen=True, slots=True)
class _MaskLaunch:
    """Launch of a gather of masks, and the bits of both fills (before and after the interpolation)."""

    fills: tuple[int, int]
    tile: tuple[int, int]
    launch: Launch


def _mask_launch(pass_: GatherPass, masks: Tensor, *, flat: bool, frames: int = 1) -> _MaskLaunch:
    front = pass_.front
    before, after = (mask_fill(part, masks.dtype) for part in (front.before, front.after))
    tile = TILES[front.kind]
    constants = {
        **_constants(pass_),
        "HALF_PIXEL": front.mask_half_pixel_centers,
        "WARP_AT": max(pass_.columns.mask_warp, 0),
        "FLAT": flat,
        "FRAMES": frames,
        "SOURCE_W": masks.stride(-1),
        "TILE": tile,
    }
    for name in ("NEAREST", "WARP_FILL"):
        del constants[name]
    return _MaskLaunch((before, after), tile, Launch(mask_kernel, (1, 1, 1), (), constants))


def probe(device: torch.device, first: tuple[Any, ...] | None = None) -> None:
    """Compile and run a kernel.

    Args:
        device: Device to run it on.
        first: Arguments of the call of ``run`` that follows. Its kernels are compiled at the same time.

    Raises:
        Exception: Error of Triton, of any type.
    """
    use_writable_cache()
    front = Gather()
    size = Size(1, 1, 1, 1)
    pass_ = GatherPass(front, (), size, size, (), columns=front.columns(1, masks=False))
    images = torch.zeros((1, 1, 1, 1), dtype=torch.float32, device=device)
    with on_device(device):
        launch = partial(gather, pass_, images, images.view(1, 1), torch.empty_like(images))
        compile_and_run(launch, None if first is None else partial(run, *first))


def _constants(pass_: GatherPass) -> dict[str, Any]:
    """Return the constants of a gather that image and mask kernels share."""
    front, columns = pass_.front, pass_.columns
    return {
        "KIND": _KINDS[front.kind],
        "HALF_PIXEL": front.half_pixel_centers,
        "NEAREST": front.nearest,
        "ZEROS": front.zeros,
        "AFTER": (_padding_mode(front.after), max(columns.after, 0), max(columns.after_fill, 0)),
        "WARP_AT": max(columns.warp, 0),
        "WARP_FILL": columns.warp_fill,
        "BEFORE": (_padding_mode(front.before), max(columns.before, 0), max(columns.before_fill, 0)),
        "SIDES": columns.sides,
    }


def _padding_mode(part: Part) -> int:
    return _MAPS[part.edge] if part.ops else 0


def _tiles(height: int, width: int, tile: tuple[int, int]) -> tuple[int, int]:
    """Return the number of tiles across and down."""
    return -(-width // tile[1]), -(-height // tile[0])
