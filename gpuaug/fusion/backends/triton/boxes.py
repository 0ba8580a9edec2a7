"""Triton kernel that maps boxes and points, and converts their format, in one launch."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.launch import Launch, on_device
from gpuaug.fusion.ops.boxes import BoxMapping

BLOCK = 128

_LAYOUTS = {"vertices": 0, "corners": 1, "sides": 2, "centre": 3, "points": 4}
_WIDTHS = {"vertices": 8, "corners": 4, "sides": 4, "centre": 4}


@triton.jit
def minimum(a, b):
    """Return the minimum, or NaN if one is NaN, as in torch."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum(a, b):
    """Return the maximum, or NaN if one is NaN, as in torch."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_number(pointer, in_bounds, DOUBLE: tl.constexpr):
    """Load a number as float32, or, with ``DOUBLE``, as float64."""
    value = tl.load(pointer, mask=in_bounds, other=0)
    return value.to(tl.float64) if DOUBLE else value.to(tl.float32)


@triton.jit
def quotient(a, b, DOUBLE: tl.constexpr):
    """Return a correctly rounded quotient."""
    return a / b if DOUBLE else tl.div_rn(a, b)


@triton.jit
def map_point(x, y, matrix, in_bounds, DOUBLE: tl.constexpr):
    """Map a point by the matrix of its sample."""
    at_x = (load_number(matrix + 2, in_bounds, DOUBLE) + load_number(matrix, in_bounds, DOUBLE) * x) + load_number(
        matrix + 1, in_bounds, DOUBLE
    ) * y
    at_y = (load_number(matrix + 5, in_bounds, DOUBLE) + load_number(matrix + 3, in_bounds, DOUBLE) * x) + load_number(
        matrix + 4, in_bounds, DOUBLE
    ) * y
    depth = (load_number(matrix + 8, in_bounds, DOUBLE) + load_number(matrix + 6, in_bounds, DOUBLE) * x) + load_number(
        matrix + 7, in_bounds, DOUBLE
    ) * y
    return quotient(at_x, depth, DOUBLE), quotient(at_y, depth, DOUBLE)


@triton.jit
def is_visible(first, last, length, EDGES: tl.constexpr):
    """Return whether an extent overlaps a frame of this length by at least one pixel."""
    end = last if EDGES else last + 1
    return minimum(maximum(end, 0.0), length) - minimum(maximum(first, 0.0), length) >= 1


@triton.jit(
    do_not_specialize=["count", "per_sample", "stride", "source_height", "source_width", "out_height", "out_width"],
    do_not_specialize_on_alignment=["values", "valid", "owners", "matrices", "places", "results", "kept"],
)
def box_kernel(
    values, valid, owners, matrices, places, results, kept,
    count, per_sample, stride, source_height, source_width, out_height, out_width,
    LAYOUT: tl.constexpr, WIDTH: tl.constexpr, TO: tl.constexpr, TO_WIDTH: tl.constexpr, EDGES: tl.constexpr,
    SHARE: tl.constexpr, TO_SHARE: tl.constexpr, CLIP: tl.constexpr, GIVEN: tl.constexpr, OWNED: tl.constexpr,
    RAGGED: tl.constexpr, DOUBLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute what ``gpuaug.fusion.ops.boxes.map_boxes`` returns: ``results``, and the mask ``kept`` of valid boxes.

    ``per_sample``: number of boxes per sample, if there are no ``owners``.

    Constants:
        LAYOUT, WIDTH, TO, TO_WIDTH: Layout (``_LAYOUTS``) and numbers per box, of the input and of the output.
        EDGES: Whether coordinates refer to pixel edges, not to pixel centres.
        SHARE, TO_SHARE: Whether coordinates are fractions of the image size, in the input and in the output.
        CLIP: Whether boxes are clipped, and ``kept`` is written.
        GIVEN: Whether ``valid`` is an input mask.
        OWNED: Whether ``owners`` holds the sample of each box.
        RAGGED: Numbers per row of ``places``; 0 if all images have one size.

    Grid: (blocks of boxes, 1, 1).
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = index < count
    owner = index // per_sample
    if OWNED:
        owner = tl.load(owners + index, mask=in_bounds, other=0).to(tl.int32)
    matrix = matrices + owner * stride
    box = values + index * WIDTH
    result = results + index * TO_WIDTH
    shift = 0.5 if EDGES else 0.0
    zeros = tl.full((BLOCK,), 0, tl.float64 if DOUBLE else tl.float32)
    frame_width = zeros + out_width
    frame_height = zeros + out_height
    x1 = load_number(box, in_bounds, DOUBLE)
    y1 = load_number(box + 1, in_bounds, DOUBLE)
    if LAYOUT == 4:
        x1, y1 = map_point(x1 - shift, y1 - shift, matrix, in_bounds, DOUBLE)
        tl.store(result, (x1 + shift).to(results.dtype.element_ty), mask=in_bounds)
        tl.store(result + 1, (y1 + shift).to(results.dtype.element_ty), mask=in_bounds)
        if WIDTH == 3:
            tl.store(result + 2, load_number(box + 2, in_bounds, DOUBLE).to(results.dtype.element_ty), mask=in_bounds)
        return
    x2 = load_number(box + 2, in_bounds, DOUBLE)
    y2 = load_number(box + 3, in_bounds, DOUBLE)
    has_extent = in_bounds
    if LAYOUT == 0:
        ax, ay = map_point(x1, y1, matrix, in_bounds, DOUBLE)
        bx, by = map_point(x2, y2, matrix, in_bounds, DOUBLE)
        cx, cy = map_point(
            load_number(box + 4, in_bounds, DOUBLE), load_number(box + 5, in_bounds, DOUBLE), matrix, in_bounds, DOUBLE
        )
        dx, dy = map_point(
            load_number(box + 6, in_bounds, DOUBLE), load_number(box + 7, in_bounds, DOUBLE), matrix, in_bounds, DOUBLE
        )
    else:
        has_extent = (x2 > 0) & (y2 > 0)
        if LAYOUT == 1:
            has_extent = (x2 - x1 > (0 if EDGES else -1)) & (y2 - y1 > (0 if EDGES else -1))
        if SHARE:
            height = zeros + source_height
            width = zeros + source_width
            if RAGGED:
                height = load_number(places + owner * RAGGED + 1, in_bounds, DOUBLE)
                width = load_number(places + owner * RAGGED + 2, in_bounds, DOUBLE)
            x1, y1, x2, y2 = x1 * width, y1 * height, x2 * width, y2 * height
        if LAYOUT == 3:
            x1 = x1 - x2 / 2
            y1 = y1 - y2 / 2
        if LAYOUT > 1:
            x2 = x1 + x2 if EDGES else x1 + x2 - 1
            y2 = y1 + y2 if EDGES else y1 + y2 - 1
        x1, y1, x2, y2 = x1 - shift, y1 - shift, x2 - shift, y2 - shift
        ax, ay = map_point(x1, y1, matrix, in_bounds, DOUBLE)
        bx, by = map_point(x2, y1, matrix, in_bounds, DOUBLE)
        cx, cy = map_point(x2, y2, matrix, in_bounds, DOUBLE)
        dx, dy = map_point(x1, y2, matrix, in_bounds, DOUBLE)
    x1 = minimum(minimum(ax, bx), minimum(cx, dx)) + shift
    y1 = minimum(minimum(ay, by), minimum(cy, dy)) + shift
    x2 = maximum(maximum(ax, bx), maximum(cx, dx)) + shift
    y2 = maximum(maximum(ay, by), maximum(cy, dy)) + shift
    if CLIP:
        is_valid = has_extent & is_visible(x1, x2, frame_width, EDGES) & is_visible(y1, y2, frame_height, EDGES)
        if GIVEN:
            is_valid &= tl.load(valid + index, mask=in_bounds, other=0) != 0
        tl.store(kept + index, is_valid.to(tl.uint8), mask=in_bounds)
        end_x = frame_width if EDGES else frame_width - 1
        end_y = frame_height if EDGES else frame_height - 1
        x1 = minimum(maximum(x1, 0.0), end_x)
        y1 = minimum(maximum(y1, 0.0), end_y)
        x2 = minimum(maximum(x2, 0.0), end_x)
        y2 = minimum(maximum(y2, 0.0), end_y)
    if TO == 0:
        tl.store(result + 4, x2.to(results.dtype.element_ty), mask=in_bounds)
        tl.store(result + 5, y2.to(results.dtype.element_ty), mask=in_bounds)
        tl.store(result + 6, x1.to(results.dtype.element_ty), mask=in_bounds)
        tl.store(result + 7, y2.to(results.dtype.element_ty), mask=in_bounds)
        y2 = y1
    elif TO > 1:
        across = x2 - x1 if EDGES else x2 - x1 + 1
        down = y2 - y1 if EDGES else y2 - y1 + 1
        if TO == 3:
            x1 = (x1 + x2) / 2
            y1 = (y1 + y2) / 2
        x2 = across
        y2 = down
    if TO_SHARE:
        x1, y1 = quotient(x1, frame_width, DOUBLE), quotient(y1, frame_height, DOUBLE)
        x2, y2 = quotient(x2, frame_width, DOUBLE), quotient(y2, frame_height, DOUBLE)
    tl.store(result, x1.to(results.dtype.element_ty), mask=in_bounds)
    tl.store(result + 1, y1.to(results.dtype.element_ty), mask=in_bounds)
    tl.store(result + 2, x2.to(results.dtype.element_ty), mask=in_bounds)
    tl.store(result + 3, y2.to(results.dtype.element_ty), mask=in_bounds)


_launches: dict[Any, Launch] = {}
"""Launches, keyed by the constants of the kernel and the dtypes."""


def map_boxes(values: Tensor, valid: Tensor | None, mapping: BoxMapping, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Compute what ``gpuaug.fusion.ops.boxes.map_boxes`` returns, on the current stream.

    Cost:
        One launch, and a copy of each input that is not contiguous.
    """
    values = values.contiguous()
    points = mapping.source_format.layout == "points"
    width = values.shape[-1] if points else _WIDTHS[mapping.source_format.layout]
    to_width = width if points else _WIDTHS[mapping.target_format.layout]
    axes = values.ndim - (2 if mapping.source_format.layout == "vertices" else 1)
    shape = values.shape[:axes]
    trailing = (4, 2) if mapping.target_format.layout == "vertices" else (to_width,)
    results = torch.empty((*shape, *trailing), dtype=dtype, device=values.device)
    kept = torch.empty(shape, dtype=torch.bool, device=values.device) if mapping.clip else None
    ragged = mapping.source.stride(0) if isinstance(mapping.source, Tensor) else 0
    owned = mapping.owners is not None
    key = (values.dtype, dtype, mapping.source_format, width, mapping.target_format, mapping.clip, valid is None, owned, ragged)
    launch = _launches.get(key)
    if launch is None:
        launch = _launches[key] = Launch(
            box_kernel,
            (1, 1, 1),
            (),
            {
                "LAYOUT": _LAYOUTS[mapping.source_format.layout],
                "WIDTH": width,
                "TO": _LAYOUTS[mapping.target_format.layout],
                "TO_WIDTH": to_width,
                "EDGES": mapping.target_format.edges,
                "SHARE": mapping.source_format.share,
                "TO_SHARE": mapping.target_format.share,
                "CLIP": mapping.clip,
                "GIVEN": valid is not None,
                "OWNED": owned,
                "RAGGED": ragged,
                "DOUBLE": values.dtype == torch.float64,
                "BLOCK": BLOCK,
            },
        )
    count = shape.numel()
    if not count:
        return results, kept
    matrix = mapping.matrix
    tensors = (
        values,
        matrix if valid is None else valid.contiguous().view(torch.uint8),
        matrix if mapping.owners is None else mapping.owners,
        matrix,
        matrix if not ragged else mapping.source,
        results,
        matrix if kept is None else kept.view(torch.uint8),
    )
    source = (1, 1) if ragged else mapping.source
    per_sample = 1 if owned else shape[1]
    with on_device(values.device):
        launch(tensors, (triton.cdiv(count, BLOCK), 1, 1), (count, per_sample, matrix.stride(0), *source, *mapping.out))
    return results, kept
