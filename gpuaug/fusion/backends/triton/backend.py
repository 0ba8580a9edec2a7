"""Backend that runs a plan in Triton kernels: one launch per pass, or two for some filters and for contrasts around a mean.

A pass is one reading and writing of all images. It begins with its *front*: a gather, which moves or interpolates pixels, or a
filter, or a mix. Then it runs pointwise ops. A plan is the passes of a pipeline for images of one size. The parameter table has
a float32 row with the parameters of all ops per *sample*, an image or a clip. *Views* are random augmentations of one image.

A *warp* is an interpolation by an affine or perspective matrix. CUDA's groups of 32 threads are called *CUDA warps* here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from gpuaug.core.errors import ArgumentError
from gpuaug.core.ragged import Ragged
from gpuaug.fusion.backends import torch_backend
from gpuaug.fusion.backends.readers import MaskLayout, as_bits, dtype_of, mask_fills, repeat_per_view
from gpuaug.fusion.backends.triton.cache import use_writable_cache
from gpuaug.fusion.backends.triton.contrast import contrast_kernel
from gpuaug.fusion.backends.triton.filters.blur import blur_launches
from gpuaug.fusion.backends.triton.filters.levels import levels_launches
from gpuaug.fusion.backends.triton.filters.neighbours import median_launch, motion_blur_launch, sharpness_launch
from gpuaug.fusion.backends.triton.gather import gather_kernel
from gpuaug.fusion.backends.triton.launch import Launch, cached_launch, compile_and_run, compile_in_parallel, on_device
from gpuaug.fusion.backends.triton.mask import mask_kernel
from gpuaug.fusion.backends.triton.mix import channels_launch, mix_launch
from gpuaug.fusion.backends.triton.patches import write_patches as write_patches
from gpuaug.fusion.backends.triton.tiles import paste_objects as paste_objects
from gpuaug.fusion.backends.triton.tiles import write_tiles as write_tiles
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.ops.color_jitter import BEFORE_CONTRAST, CONTRAST, FROM_CONTRAST
from gpuaug.fusion.pixels import converted, unit_range
from gpuaug.fusion.program.gather import Gather, IndexMaps
from gpuaug.fusion.program.intermediates import (
    UINT16_UNIT,
    gives_unit_range,
    may_store_16_bits,
    point_program_with_flags,
    types_written,
)
from gpuaug.fusion.program.plan import Canvas, Canvases, ChainsPass, GatherPass, OpPass, Plan

# Values of the constants of ``gather_kernel``: ``INTERPOLATION``, ``FILTER`` (antialiasing), ``RAGGED_LAYOUT``, ``MAX_VALUE``,
# and the padding mode of ``MAP_BEFORE`` and ``MAP_AFTER``: 0 for no index maps, 1 for index maps without padding. An index map
# maps integer coordinates of pixels, as a flip, a crop or padding does. The empty string stands for none. ``UINT16_UNIT`` is
# ``torch.uint16``.
_INTERPOLATIONS = {"": 0, "resample": 1, "affine": 2, "perspective": 3}
_FILTERS = {"": 0, "triangle": 1, "cubic": 2}
_RAGGED_LAYOUTS = {"": 0, "chw": 1, "hwc": 2, "windows": 3}
_MAX_VALUES = {torch.uint8: 255, UINT16_UNIT: 65535}
_PADDING_MODES = {"": 1, "constant": 2, "reflect": 3, "replicate": 4}

TILES = {"": (4, 256), "resample": (4, 256), "affine": (4, 64), "perspective": (4, 64)}
"""(height, width) of the tile, the output pixels of a thread block, by type of interpolation. CUDA warps lie along x."""

MEAN_TILE = (32, 32)
"""(height, width) of a tile in a pass with a contrast, which needs the mean grey of the image.

Larger tiles have fewer blocks, and thereby fewer sums to add.
"""

ANTIALIASED_TILE = (8, 64)
"""(height, width) of a tile in an antialiased resize. A block is one CUDA warp, and computes line after line."""

MOST_SAMPLES = 65535
"""Maximum number of images or frames of all views, or of masks, per launch: CUDA limits the second axis of a grid."""

OP_KERNELS: dict[str, Callable[[OpPass[Any], Tensor, Tensor, Tensor], Any]] = {
    "blur": blur_launches,
    "channels": channels_launch,
    "levels": levels_launches,
    "median": median_launch,
    "mix": mix_launch,
    "motion_blur": motion_blur_launch,
    "sharpness": sharpness_launch,
}
"""Function that prepares the launches of a pass whose front is an op, by ``FrontOp.kernel``.

Arguments: the pass; its input, (B, C, H, W) of a dtype in ``IMAGE_DTYPES``, any strides; the parameter table from the first
column of the pass on, (B, K) float32; the output of the pass, like the input.
"""

CONTRAST_BLOCK = 1024
"""Pixels per block of ``contrast_kernel``."""


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
        images: Images of a dtype in ``IMAGE_DTYPES`` (``fusion/pixels.py``).
        table: Parameter table.
        dtype: Dtype of the result.
        memory_format: Memory format of the result.
        canvases: Result of ``Plan.canvases``: (height, width) of the buffers between passes, if images differ in size there.

    Shape:
        - images: (B · T, C, H, W), any strides, with T frames per clip, or 1; or a ragged batch of B
        - table: (V · B, K) float32, for V views
        - returns: (V · B · T, C, H', W') of ``dtype`` and ``memory_format``

    Raises:
        ArgumentError: If there are more samples than a launch supports.

    Cost:
        The launches of the passes, some 10 µs of host time each, and memory for the images between passes (``types_written``).
    """
    image_count = table.shape[0] * max(plan.source.images_per_sample, plan.out.images_per_sample)  # with the frames of clips
    if image_count > MOST_SAMPLES:
        raise ArgumentError(
            f"A batch must have at most {MOST_SAMPLES} samples in all its views on a GPU, got {image_count}. "
            "Lower batch_size or views."
        )
    if isinstance(images, Tensor) and images.dtype == torch.float64:
        images = images.float()  # the kernels compute in float32
    key = types_written, dtype_of(images), dtype  # with the function, because the cache also holds launches
    dtypes = plan.passes[-1].launch_cache.get(key)
    with on_device(images.device):
        if dtypes is None:
            dtypes = types_written(plan.passes, dtype_of(images), dtype)
            with compile_in_parallel():  # compiles the kernels of all passes, and launches none
                _run_passes(plan, images, table, dtypes, memory_format, canvases)
            plan.passes[-1].launch_cache[key] = dtypes
        return _run_passes(plan, images, table, dtypes, memory_format, canvases)


def _run_passes(
    plan: Plan,
    images: Tensor | Ragged,
    table: Tensor,
    dtypes: tuple[torch.dtype, ...],
    memory_format: torch.memory_format,
    canvases: Canvases,
) -> Tensor:
    """Launch all passes. ``dtypes``: dtype of the images that each pass writes. Other arguments as in ``run``."""
    source = images
    last_index = len(plan.passes) - 1
    buffers: Tensor | None = None
    for index, pass_ in enumerate(plan.passes):
        out_sides = canvases[index] if pass_.out.ragged else (pass_.out.height, pass_.out.width)
        out_shape = table.shape[0] * pass_.out.images_per_sample, pass_.out.channels, *out_sides
        if index == last_index:
            out = torch.empty(out_shape, dtype=dtypes[index], device=images.device, memory_format=memory_format)
        elif plan.passes[-1].route_column < 0:  # no sample may skip a pass: all passes but the first have the column, or none
            out = torch.empty(out_shape, dtype=dtypes[index], device=images.device)
        else:
            # A sample skips a pass if none of its ops applies to the sample, and stays in its buffer. The parameter table tells
            # the kernels the buffer that each sample is read from, and the buffer that it is written to (``select_buffers``).
            # All passes but the last then write images of one size and one type.
            if buffers is None:
                buffers = torch.empty((2, *out_shape), dtype=dtypes[index], device=images.device)
            out = buffers[0]
        pass_table = pass_.columns_of(table)
        if isinstance(pass_, GatherPass):
            gather(pass_, source, pass_table, out)
        else:
            assert isinstance(source, Tensor), "ragged batches begin with a gather"
            front_source = repeat_per_view(source, len(out))
            if pass_.front.kernel == "torch":
                pass_table = pass_.columns_of(torch_backend.rows_of_frames(plan, table, pass_.out.images_per_sample))
                if isinstance(pass_, ChainsPass):
                    run_plan = partial(run, dtype=torch.uint8, memory_format=torch.contiguous_format)
                    values = torch_backend.run_chains(pass_, front_source, pass_table, run_plan)
                else:  # as_on_gpu, because the tensors of Triton's interpreter are on the CPU
                    values = torch_backend.apply_to_samples(pass_.front, unit_range(front_source), pass_table, as_on_gpu=True)
                out.copy_(converted(values, out.dtype))
                source = out
                continue
            cached_launch(pass_, front_source, pass_table, out, OP_KERNELS[pass_.front.kernel])((front_source, out, pass_table))
        source = out
    return out


def gather(pass_: GatherPass, images: Tensor | Ragged, table: Tensor, out: Tensor) -> None:
    """Launch a gather pass. If an op is a contrast, which needs the mean grey, a launch that sums grey values precedes.

    Args:
        pass_: The pass.
        images: Images that the pass reads.
        table: Parameter table from the first column of the pass on, (V · B, K) float32.
        out: Images that the pass writes, (V · B · T, C, H', W').
    """
    launches = cached_launch(pass_, images, table, out, _gather_launches)
    # The table stands in for tensors that the kernel does not read.
    source, image_layouts = (images.data, images.places) if isinstance(images, Ragged) else (images, table)
    if launches.sums_launch is None:
        launches.pixels_launch((source, image_layouts, out, table, table, table))
        return
    grey_sums = torch.empty(launches.grey_sums_shape, dtype=torch.float32, device=images.device)
    saved_pixels = torch.empty(out.shape, dtype=UINT16_UNIT, device=images.device) if launches.saves_pixels else table
    launches.sums_launch((source, image_layouts, out, table, grey_sums, saved_pixels))
    if launches.saves_pixels:  # a launch of ``contrast_kernel``, otherwise of ``gather_kernel``
        launches.pixels_launch((saved_pixels, out, table, grey_sums))
    else:
        launches.pixels_launch((source, image_layouts, out, table, grey_sums, table))


@dataclass(frozen=True, slots=True)
class _GatherLaunches:
    """Launches of a gather pass, for sources of one dtype, size and layout."""

    sums_launch: Launch | None
    """Launch of the sums of grey for the mean of a contrast; ``None`` if no op needs a mean."""
    grey_sums_shape: tuple[int, int]
    """(images, blocks per image) of the sums."""
    saves_pixels: bool
    """Whether ``sums_launch`` also stores the pixels before the contrast, 16 bits per value, for ``pixels_launch`` to read."""
    pixels_launch: Launch
    """Launch that stores the output pixels."""


def _gather_launches(pass_: GatherPass, images: Tensor | Ragged, table: Tensor, out: Tensor) -> _GatherLaunches:
    """Prepare the launches of a gather pass. Arguments as in ``gather``."""
    front = pass_.front
    batch, channels, height, width = out.shape
    layout, strides, shortest_side = _source_layout(images)
    if pass_.source.channels != channels:  # a pass that adds channels repeats its only source channel
        strides = (strides[0], 0, *strides[2:])
        layout = "hwc" if layout == "chw" else layout  # equal for one channel; for "chw" the kernel would compute its stride
    # Whether the source is images of different sizes, each in the top left corner of a buffer of one size.
    on_canvas = pass_.source.ragged and isinstance(images, Tensor)
    # More than ``len(images)`` if one source image is read for several views.
    images_of_all_views = batch // pass_.out.images_per_sample * pass_.source.images_per_sample
    is_rgb = channels == 3
    in_unit_range = gives_unit_range(front, dtype_of(images))
    tile = ANTIALIASED_TILE if front.filter else MEAN_TILE if pass_.needs_mean else TILES[front.interpolation]
    warps = 1 if front.filter else 4  # CUDA warps per block
    tiles_across, tiles_down = _tile_counts(height, width, tile)
    tiles = tiles_across * tiles_down
    planes = 1 if is_rgb else channels  # size of the grid along the channels
    pairs_aligned = out.shape[3] % 2 == 0  # lines and samples of 16-bit values then begin at multiples of 32 bits
    constants = {
        "RAGGED_LAYOUT": _RAGGED_LAYOUTS[layout],
        "VIEWS_AND_FRAMES": (
            images_of_all_views != len(images),
            pass_.out.images_per_sample,
            pass_.columns.frames,
            pass_.source.images_per_sample,
        ),
        "SOURCE_W": strides[3],  # strides along x, in elements, are called SOURCE_W and OUT_W
        # Whether all four taps of a pixel are read next to each other, also taps with weight 0, which must then not be NaN.
        "ADJACENT_TAPS": in_unit_range
        and front.interpolation == "resample"
        and not front.nearest
        and not front.before.ops
        and shortest_side > 1,
        "RESIZE": (
            _FILTERS[front.filter],
            _MAX_VALUES.get(dtype_of(images), 1) if front.clamps else 0,
            front.rounds_axes and dtype_of(images) == torch.uint8,
        ),
        # Whether two pixels of 16-bit values, six values, are stored as three 32-bit words.
        "WORDS": out.stride(1) == 1 and is_rgb and out.dtype.is_floating_point and out.dtype.itemsize == 2 and pairs_aligned,
        "OUT_W": out.stride(3),
        "PROGRAM": point_program_with_flags(pass_, in_unit_range=in_unit_range),
        "OP_COUNT": len(pass_.point_program),
        "CHANNELS": channels,
        "MAX_VALUE": _MAX_VALUES.get(dtype_of(images), 0),
        "EXACT_DIVISION": front.exact_division,
        "HALF_PIXEL": front.half_pixel_centers,
        "NEAREST": front.nearest,
        "WARP_COLUMN": max(pass_.columns.warp, 0),
        "WARP_FILL_COLUMN": pass_.columns.warp_fill,
        "ROUTE_COLUMN": pass_.route_column,
        "CONTRAST_COLUMN": -1,
        "SAVE_PIXELS": False,
        "SUM_COUNT": 0,
        "TILE": tile,
        **_gather_constants(pass_),
    }
    if on_canvas or pass_.out.ragged:  # the size of the buffer differs in every batch
        constants |= _SIZES_AS_ARGUMENTS
    else:
        constants |= _size_constants(constants, strides, out, full_tiles=width % tile[1] == 0 and height % tile[0] == 0)
    image_sizes = (len(images), height, width)
    row_stride = table.stride(0)
    out_strides = out.stride()[:3]
    if not pass_.needs_mean:
        integers = (*image_sizes, tiles_across, row_stride, tiles, 0, *strides[:3], *out_strides)
        pixels_launch = Launch(gather_kernel, (tiles, batch, planes), integers, constants, num_warps=warps)
        return _GatherLaunches(None, (0, 0), False, pixels_launch)
    blocks = tiles * planes
    constants["SUM_COUNT"] = next_power_of_2(blocks)
    contrast_index = next(index for index, op in enumerate(pass_.point_ops) if op.needs_mean)
    program = constants["PROGRAM"]
    # The program may begin with a conversion of the gather's result to bytes.
    conversions = len(program) - len(pass_.point_ops)
    contrast_entry = conversions + contrast_index
    # The color jitter with the contrast is split: the launch of the sums ends with its adjustments before the contrast. A
    # launch on saved pixels begins with the contrast; a second gather begins with the source.
    code, op_column, flags, *byte_rule = program[contrast_entry]
    sum_program = (*program[:contrast_entry], (code, op_column, flags & ~CONTRAST | BEFORE_CONTRAST, *byte_rule))
    contrast_program = ((code, op_column, flags | FROM_CONTRAST, *byte_rule), *program[contrast_entry + 1 :])
    # Pixels are saved in 16 bits per value, so only for an output of 16 bits. They are not saved in a pass that writes to one
    # of two buffers, because ``contrast_kernel`` writes to the first buffer. The last pass writes to the result.
    in_two_buffers = pass_.route_column >= 0 and out.dtype == UINT16_UNIT
    can_save = may_store_16_bits(pass_, dtype_of(images), out.dtype) and not in_two_buffers and not pass_.out.ragged
    saves_pixels = is_rgb and in_unit_range and can_save and all(op.keeps_unit_range for op in pass_.point_ops[:contrast_index])
    sum_constants = {**constants, "OUT_W": 1, "PROGRAM": sum_program, "OP_COUNT": len(sum_program), "SUM_COUNT": 0}
    sum_constants |= {"CONTRAST_COLUMN": op_column, "SAVE_PIXELS": saves_pixels, "WORDS": saves_pixels and pairs_aligned}
    integers = (*image_sizes, tiles_across, row_stride, tiles, blocks, *strides[:3])
    grey_sums_launch = Launch(gather_kernel, (tiles, batch, planes), (*integers, 0, 0, 0), sum_constants, num_warps=warps)
    if not saves_pixels:
        pixels_launch = Launch(gather_kernel, (tiles, batch, planes), (*integers, *out_strides), constants, num_warps=warps)
        return _GatherLaunches(grey_sums_launch, (batch, blocks), saves_pixels, pixels_launch)
    pixel_count = height * width
    contrast_constants = {name: constants[name] for name in ("PIXELS", "OUT_W", "SUM_COUNT")}
    contrast_constants["FRAMES"] = pass_.out.images_per_sample
    compiled_pixels = constants["PIXELS"]
    contrast_constants |= {
        "PROGRAM": contrast_program,
        "OP_COUNT": len(contrast_program),
        "FULL_BLOCKS": compiled_pixels > 0 and compiled_pixels % CONTRAST_BLOCK == 0,
        "WORDS": compiled_pixels > 0 and compiled_pixels % 2 == 0 and out.stride(1) == 1,
        "BLOCK": CONTRAST_BLOCK,
    }
    integers = (height, width, row_stride, blocks, *out_strides[:2])
    contrast_launch = Launch(contrast_kernel, (-(-pixel_count // CONTRAST_BLOCK), batch, 1), integers, contrast_constants)
    return _GatherLaunches(grey_sums_launch, (batch, blocks), saves_pixels, contrast_launch)


_compiled_sizes: dict[tuple[Any, ...], dict[str, Any]] = {}
"""Constants for the strides and sizes of the first images, keyed by all other constants of the kernel and the output dtype."""

_SIZES_AS_ARGUMENTS: dict[str, Any] = {"SOURCE_STRIDES": (0, 0), "WIDTH": 0, "PIXELS": 0, "FULL_TILES": False}
"""Constants for strides and sizes of a kernel that takes all of them as arguments."""


def _source_layout(images: Tensor | Ragged) -> tuple[str, tuple[int, ...], int]:
    """Return (layout of a ragged batch or ``""``, strides of B, C, H and W, shortest side).

    Strides of a ragged batch that depend on the image are 0.
    """
    if isinstance(images, Tensor):
        return "", images.stride(), min(images.shape[2:])
    shapes = images.shapes
    strides = (0, 0, 0, 1) if shapes.layout == "chw" else (0, 1, 0, shapes.channels)
    return shapes.layout if shapes.windows is None else "windows", strides, shapes.shortest_side


def _size_constants(constants: dict[str, Any], strides: tuple[int, ...], out: Tensor, *, full_tiles: bool) -> dict[str, Any]:
    """Return the constants for strides and sizes.

    The first size of images is compiled into the kernel, which saves a third of the instructions. Images of all other sizes
    share a second compilation, whose constants are 0.
    """
    height, width = out.shape[2:]
    sizes = {
        "SOURCE_STRIDES": strides[1:3],
        "WIDTH": width,
        "PIXELS": height * width,
        "FULL_TILES": full_tiles,
    }
    first_sizes = _compiled_sizes.setdefault((*constants.values(), out.dtype), sizes)
    return sizes if first_sizes == sizes else _SIZES_AS_ARGUMENTS


def run_mask(
    pass_: GatherPass, masks: Tensor, table: Tensor, mask_layout: MaskLayout | None = None, canvas: Canvas | None = None
) -> Tensor:
    """Run a gather pass on masks of any dtype, with the nearest pixel.

    Args:
        pass_: The pass.
        masks: Masks of any dtype.
        table: Parameter table.
        mask_layout: Layout in memory of masks that differ in size.
        canvas: (height, width) of the output masks, if images differ in size after the pass.

    Shape:
        - masks: (B · T, C, H, W); with ``mask_layout`` of N masks, a flat tensor, from whose start the offsets count
        - table: (B, K) float32
        - returns: (B · T, C, H', W'); with ``mask_layout`` (N, 1, H', W')
    """
    is_ragged = mask_layout is not None
    table = pass_.columns_of(table)
    batch, channels = masks.shape[:2] if mask_layout is None else (len(mask_layout.owners), 1)
    height, width = canvas or (pass_.out.height, pass_.out.width)
    result = torch.empty((batch, channels, height, width), dtype=masks.dtype, device=masks.device)
    # The number of masks is not part of the key, because it differs between batches.
    frames = 1 if is_ragged else max(batch // max(len(table), 1), 1)
    key = _mask_launch, masks.dtype, masks.stride(-1), is_ragged, frames
    fills_and_launch = pass_.launch_cache.get(key)
    if fills_and_launch is None:
        fills_and_launch = pass_.launch_cache[key] = _mask_launch(pass_, masks, is_ragged=is_ragged, frames=frames)
    fills, launch = fills_and_launch
    tiles_across, tiles_down = _tile_counts(height, width, TILES[pass_.front.interpolation])
    strides = (0, 0, 0) if is_ragged else masks.stride()[:3]
    sizes = (height, width, tiles_across, table.stride(0))
    # Layouts and owners; without ``mask_layout`` the table stands in for both, which the kernel then does not read.
    tensors = (as_bits(masks), as_bits(result), table, *(mask_layout or (table, table)))
    integers = (*fills, *sizes, *strides, *result.stride()[:3])
    with on_device(masks.device):
        for first_mask in range(0, batch, MOST_SAMPLES):
            grid = tiles_across * tiles_down, min(batch - first_mask, MOST_SAMPLES), channels
            launch(tensors, grid, (first_mask, *integers))
    return result


def _mask_launch(pass_: GatherPass, masks: Tensor, *, is_ragged: bool, frames: int = 1) -> tuple[tuple[int, int, int], Launch]:
    """Return the fills of masks (``mask_fills``), and the launch of their gather.

    ``frames``: number of masks per row of the table, without ``is_ragged``.
    """
    front = pass_.front
    constants = {
        **_gather_constants(pass_),
        "HALF_PIXEL": front.mask_half_pixel_centers,
        "WARP_COLUMN": max(pass_.columns.mask_warp, 0),
        "RAGGED": is_ragged,
        "FRAMES": frames,
        "SOURCE_W": masks.stride(-1),
        "TILE": TILES[front.interpolation],
    }
    return mask_fills(front, masks.dtype), Launch(mask_kernel, (1, 1, 1), (), constants)


def probe(device: torch.device, first_call: tuple[Any, ...] | None = None) -> None:
    """Compile and run the kernel of a gather of one pixel, to find out whether Triton works.

    Args:
        device: Device to run the kernel on.
        first_call: Arguments of the next call of ``run``. Its kernels are compiled at the same time.

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
        compile_and_run(launch, None if first_call is None else partial(run, *first_call))


def _gather_constants(pass_: GatherPass) -> dict[str, Any]:
    """Return the constants that ``gather_kernel`` and ``mask_kernel`` have in common."""
    front, columns = pass_.front, pass_.columns
    return {
        "INTERPOLATION": _INTERPOLATIONS[front.interpolation],
        "ZEROS": front.zero_outside,
        "MAP_AFTER": (_padding_mode(front.after), max(columns.after, 0), max(columns.after_fill, 0)),
        "MAP_BEFORE": (_padding_mode(front.before), max(columns.before, 0), max(columns.before_fill, 0)),
        "OUT_SIZE_COLUMN": columns.out_size,
    }


def _padding_mode(maps: IndexMaps) -> int:
    """Return the constant for the padding mode of index maps; 0 without index maps."""
    return _PADDING_MODES[maps.edge] if maps.ops else 0


def _tile_counts(height: int, width: int, tile: tuple[int, int]) -> tuple[int, int]:
    """Return the number of tiles across and down."""
    return -(-width // tile[1]), -(-height // tile[0])
