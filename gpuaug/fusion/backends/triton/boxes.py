"""Triton kernel that maps boxes and keypoints to the coordinates of the output images, and converts their format.

A *sample* is an image of the batch, or an augmented view of it. A *layout* of boxes is the meaning of the numbers of a box,
such as two corners. Boxes are computed in steps: input layout → two corners (x1, y1), (x2, y2) → four vertices, each mapped by
the matrix of the sample → the axis-aligned rectangle around the mapped vertices → clipped → output layout.

The torch form of the kernel is in ``gpuaug.fusion.ops.boxes``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.launch import kernel, launch_for, on_device
from gpuaug.fusion.backends.triton.pixel_math import maximum
from gpuaug.fusion.ops.boxes import TRAILING_SHAPES, BoxMapping, axes_per_box

BLOCK = 128
"""Boxes per thread block."""

_LAYOUTS = {"vertices": 0, "corners": 1, "sides": 2, "centre": 3, "points": 4}
"""Value of the constants ``LAYOUT`` and ``TO_LAYOUT`` for each ``BoxLayout``.

Four vertices; XYXY; XYWH; CXCYWH; points, whose first two numbers are x and y.
"""


@triton.jit
def minimum(a, b):
    """Return the minimum, or NaN if one is NaN, as in torch."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_number(pointer, in_bounds, DOUBLE: tl.constexpr):
    """Load a number as float32, or, with ``DOUBLE``, as float64."""
    value = tl.load(pointer, mask=in_bounds, other=0)
    return value.to(tl.float64) if DOUBLE else value.to(tl.float32)


@triton.jit
def quotient(a, b, DOUBLE: tl.constexpr):
    """Return a / b, correctly rounded."""
    return a / b if DOUBLE else tl.div_rn(a, b)


@triton.jit
def linear(x, y, coefficients, in_bounds, DOUBLE: tl.constexpr):
    """Return a · x + b · y + c for three coefficients a, b and c, at address ``coefficients``."""
    partial_sum = load_number(coefficients + 2, in_bounds, DOUBLE) + load_number(coefficients, in_bounds, DOUBLE) * x
    return partial_sum + load_number(coefficients + 1, in_bounds, DOUBLE) * y


@triton.jit
def map_point(x, y, matrix, in_bounds, DOUBLE: tl.constexpr):
    """Map a point by the 3x3 matrix at address ``matrix``, in homogeneous coordinates."""
    depth = linear(x, y, matrix + 6, in_bounds, DOUBLE)
    mapped_x = quotient(linear(x, y, matrix, in_bounds, DOUBLE), depth, DOUBLE)
    return mapped_x, quotient(linear(x, y, matrix + 3, in_bounds, DOUBLE), depth, DOUBLE)


@triton.jit
def is_visible(first, last, length, EDGES: tl.constexpr):
    """Return whether [first, last] overlaps an image side of ``length`` pixels by at least one pixel.

    ``EDGES``: whether coordinates refer to pixel edges, so that ``last`` is the end of the last pixel, not its centre.
    """
    end = last if EDGES else last + 1
    return minimum(maximum(end, 0.0), length) - minimum(maximum(first, 0.0), length) >= 1


@triton.jit
def area(x1, y1, x2, y2):
    """Return the area of a box, computed in float32."""
    return (x2.to(tl.float32) - x1.to(tl.float32)) * (y2.to(tl.float32) - y1.to(tl.float32))


@kernel
def box_kernel(
    values, valid, owners, matrices, image_layouts, results, valid_result,
    box_count, boxes_per_sample, matrix_stride, source_height, source_width, out_height, out_width,
    LAYOUT: tl.constexpr, NUMBERS: tl.constexpr, TO_LAYOUT: tl.constexpr, TO_NUMBERS: tl.constexpr, EDGES: tl.constexpr,
    FRACTIONS: tl.constexpr, TO_FRACTIONS: tl.constexpr, CLIP: tl.constexpr, HAS_VALID: tl.constexpr, HAS_OWNERS: tl.constexpr,
    IMAGE_LAYOUT_COLUMNS: tl.constexpr, DOUBLE: tl.constexpr, MIN_VISIBLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Map boxes or points to the output images.

    Tensors, by their address, with N = ``box_count``:
        values: Boxes or points, (N, ``NUMBERS``), contiguous.
        valid: With ``HAS_VALID``, mask of the valid boxes of the input, (N,) uint8.
        owners: With ``HAS_OWNERS``, index of the sample of each box, (N,).
        matrices: One 3x3 matrix per sample, from input to output coordinates in pixels, ``matrix_stride`` elements apart.
        image_layouts: With ``IMAGE_LAYOUT_COLUMNS``, (offset, height, width, …) of each ragged image; not a layout of boxes.
        results: Output, (N, ``TO_NUMBERS``).
        valid_result: With ``CLIP``, mask of the valid boxes of the output, (N,) uint8.

    Integers:
        boxes_per_sample: Number of boxes per sample, without ``owners``.
        source_height, source_width, out_height, out_width: Size of the input images, if all have one size, and of the output.

    Constants:
        LAYOUT, NUMBERS, TO_LAYOUT, TO_NUMBERS: Layout (``_LAYOUTS``) and numbers per box, of the input and of the output.
        EDGES: Whether the coordinate 0 is the outer edge of the first pixel, not its centre, and coordinates of last corners
            are after the last pixel.
        DOUBLE: Whether to compute in float64.
        FRACTIONS, TO_FRACTIONS: Whether coordinates are fractions of the image size, in the input and in the output.
        CLIP: Whether boxes are clipped, and ``valid_result`` is written.
        MIN_VISIBLE: ``BoxMapping.min_visible``.
        HAS_VALID: Whether ``valid`` is an input mask.
        HAS_OWNERS: Whether ``owners`` holds the sample of each box.
        IMAGE_LAYOUT_COLUMNS: Numbers per row of ``image_layouts``; 0 if all images have one size.

    Grid: (blocks of boxes, 1, 1).
    """
    box_index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = box_index < box_count
    owner = box_index // boxes_per_sample
    if HAS_OWNERS:
        owner = tl.load(owners + box_index, mask=in_bounds, other=0).to(tl.int32)
    matrix = matrices + owner * matrix_stride
    box = values + box_index * NUMBERS
    result = results + box_index * TO_NUMBERS
    # Matrices map pixel centres. Coordinates of edges are greater by half a pixel.
    pixel_shift = 0.5 if EDGES else 0.0
    zeros = tl.full((BLOCK,), 0, tl.float64 if DOUBLE else tl.float32)
    right_limit = zeros + out_width
    lower_limit = zeros + out_height
    x1 = load_number(box, in_bounds, DOUBLE)
    y1 = load_number(box + 1, in_bounds, DOUBLE)
    if LAYOUT == 4:  # points
        x1, y1 = map_point(x1 - pixel_shift, y1 - pixel_shift, matrix, in_bounds, DOUBLE)
        tl.store(result, (x1 + pixel_shift).to(results.dtype.element_ty), mask=in_bounds)
        tl.store(result + 1, (y1 + pixel_shift).to(results.dtype.element_ty), mask=in_bounds)
        if NUMBERS == 3:  # a number that is no coordinate, such as the visibility of a keypoint
            tl.store(result + 2, load_number(box + 2, in_bounds, DOUBLE).to(results.dtype.element_ty), mask=in_bounds)
        return
    x2 = load_number(box + 2, in_bounds, DOUBLE)
    y2 = load_number(box + 3, in_bounds, DOUBLE)
    has_extent = in_bounds
    if LAYOUT > 0:  # the extent of four vertices is not checked
        has_extent = (x2 > 0) & (y2 > 0)  # width and height; replaced below for XYXY
        if LAYOUT == 1:  # XYXY
            has_extent = (x2 - x1 > (0 if EDGES else -1)) & (y2 - y1 > (0 if EDGES else -1))
        if FRACTIONS:
            height = zeros + source_height
            width = zeros + source_width
            if IMAGE_LAYOUT_COLUMNS:
                height = load_number(image_layouts + owner * IMAGE_LAYOUT_COLUMNS + 1, in_bounds, DOUBLE)
                width = load_number(image_layouts + owner * IMAGE_LAYOUT_COLUMNS + 2, in_bounds, DOUBLE)
            x1, y1, x2, y2 = x1 * width, y1 * height, x2 * width, y2 * height
        if LAYOUT == 3:  # from the centre to the first corner
            x1 = x1 - x2 / 2
            y1 = y1 - y2 / 2
        if LAYOUT > 1:  # from width and height to the last corner
            x2 = x1 + x2 if EDGES else x1 + x2 - 1
            y2 = y1 + y2 if EDGES else y1 + y2 - 1
        x1, y1, x2, y2 = x1 - pixel_shift, y1 - pixel_shift, x2 - pixel_shift, y2 - pixel_shift
    # Smallest rectangle around the four mapped vertices, beginning with the first.
    left, top = map_point(x1, y1, matrix, in_bounds, DOUBLE)
    right = left
    bottom = top
    for vertex in tl.static_range(1, 4):
        if LAYOUT == 0:
            x = load_number(box + 2 * vertex, in_bounds, DOUBLE)
            y = load_number(box + 2 * vertex + 1, in_bounds, DOUBLE)
        else:  # (x2, y1), (x2, y2), (x1, y2): clockwise from the top left
            x = x1 if vertex == 3 else x2
            y = y1 if vertex == 1 else y2
        x, y = map_point(x, y, matrix, in_bounds, DOUBLE)
        left, top, right, bottom = minimum(left, x), minimum(top, y), maximum(right, x), maximum(bottom, y)
    x1, y1, x2, y2 = left + pixel_shift, top + pixel_shift, right + pixel_shift, bottom + pixel_shift
    if CLIP:
        is_valid = has_extent & is_visible(x1, x2, right_limit, EDGES) & is_visible(y1, y2, lower_limit, EDGES)
        if HAS_VALID:
            is_valid &= tl.load(valid + box_index, mask=in_bounds, other=0) != 0
        least_area = MIN_VISIBLE * area(x1, y1, x2, y2)
        end_x = right_limit if EDGES else right_limit - 1
        end_y = lower_limit if EDGES else lower_limit - 1
        x1 = minimum(maximum(x1, 0.0), end_x)
        y1 = minimum(maximum(y1, 0.0), end_y)
        x2 = minimum(maximum(x2, 0.0), end_x)
        y2 = minimum(maximum(y2, 0.0), end_y)
        if MIN_VISIBLE > 0:
            is_valid &= area(x1, y1, x2, y2) >= least_area
        tl.store(valid_result + box_index, is_valid.to(tl.uint8), mask=in_bounds)
    if TO_LAYOUT == 0:
        # The vertices are (x1, y1), (x2, y1), (x2, y2), (x1, y2). The last two are stored here, and the first two by the stores
        # at the end, which store (x1, y1, x2, y2): y2 is therefore replaced by y1.
        tl.store(result + 4, x2.to(results.dtype.element_ty), mask=in_bounds)
        tl.store(result + 5, y2.to(results.dtype.element_ty), mask=in_bounds)
        tl.store(result + 6, x1.to(results.dtype.element_ty), mask=in_bounds)
        tl.store(result + 7, y2.to(results.dtype.element_ty), mask=in_bounds)
        y2 = y1
    elif TO_LAYOUT > 1:  # XYWH or CXCYWH
        box_width = x2 - x1 if EDGES else x2 - x1 + 1
        box_height = y2 - y1 if EDGES else y2 - y1 + 1
        if TO_LAYOUT == 3:
            x1 = (x1 + x2) / 2
            y1 = (y1 + y2) / 2
        x2 = box_width
        y2 = box_height
    if TO_FRACTIONS:
        x1, y1 = quotient(x1, right_limit, DOUBLE), quotient(y1, lower_limit, DOUBLE)
        x2, y2 = quotient(x2, right_limit, DOUBLE), quotient(y2, lower_limit, DOUBLE)
    tl.store(result, x1.to(results.dtype.element_ty), mask=in_bounds)
    tl.store(result + 1, y1.to(results.dtype.element_ty), mask=in_bounds)
    tl.store(result + 2, x2.to(results.dtype.element_ty), mask=in_bounds)
    tl.store(result + 3, y2.to(results.dtype.element_ty), mask=in_bounds)


def map_boxes(values: Tensor, valid: Tensor | None, mapping: BoxMapping, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Map boxes or points, as ``gpuaug.fusion.ops.boxes.map_boxes`` does, on the current stream.

    Args:
        values: Boxes or points, (…, numbers of one box) or (…, 4, 2) vertices.
        valid: Mask of the valid boxes, or ``None``.
        mapping: Matrices, sizes and formats.
        dtype: Dtype of the result.

    Returns:
        (boxes or points in the output format, mask of the boxes that are valid after the mapping; ``None`` without clipping).

    Cost:
        One launch, and a copy of each input that is not contiguous.
    """
    values = values.contiguous()
    axes = values.ndim - axes_per_box(mapping.source_format)
    shape, trailing = values.shape[:axes], values.shape[axes:]
    # A point may have further numbers after (x, y), which are copied.
    are_points = mapping.target_format.layout == "points"
    to_trailing = trailing if are_points else torch.Size(TRAILING_SHAPES[mapping.target_format.layout])
    results = torch.empty((*shape, *to_trailing), dtype=dtype, device=values.device)
    valid_result = torch.empty(shape, dtype=torch.bool, device=values.device) if mapping.clip else None
    layout_columns = mapping.source.stride(0) if isinstance(mapping.source, Tensor) else 0
    has_owners = mapping.owners is not None
    constants = (
        _LAYOUTS[mapping.source_format.layout],
        trailing.numel(),
        _LAYOUTS[mapping.target_format.layout],
        to_trailing.numel(),
        mapping.target_format.edges,  # equal to the ``edges`` of the input format
        mapping.source_format.share,
        mapping.target_format.share,
        mapping.clip,
        valid is not None,
        has_owners,
        layout_columns,
        values.dtype == torch.float64,
        mapping.min_visible,
        BLOCK,
    )
    launch = launch_for(box_kernel, (values.dtype, dtype), constants)
    box_count = shape.numel()
    if not box_count:
        return results, valid_result
    matrix = mapping.matrix
    # The matrix stands in for absent tensors, which the kernel does not read.
    tensors = (
        values,
        matrix if valid is None else valid.contiguous().view(torch.uint8),
        matrix if mapping.owners is None else mapping.owners,
        matrix,
        matrix if not layout_columns else mapping.source,
        results,
        matrix if valid_result is None else valid_result.view(torch.uint8),
    )
    source = (1, 1) if layout_columns else mapping.source  # not read if images differ in size
    boxes_per_sample = 1 if has_owners else shape[1]
    with on_device(values.device):
        integers = (box_count, boxes_per_sample, matrix.stride(0), *source, *mapping.out)
        launch(tensors, (triton.cdiv(box_count, BLOCK), 1, 1), integers)
    return results, valid_result
