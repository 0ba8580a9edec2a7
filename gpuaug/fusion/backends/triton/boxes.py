"""A Triton kernel for boxes and points: one launch from the form in which they came to the one that is wanted."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.launch import Launch, on_device
from gpuaug.fusion.ops.boxes import Way

BLOCK = 128

_LAYOUTS = {"vertices": 0, "corners": 1, "sides": 2, "centre": 3, "points": 4}
_WIDTHS = {"vertices": 8, "corners": 4, "sides": 4, "centre": 4}


@triton.jit
def least(a, b):
    """The smaller, and what is not a number where one is, as in torch."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def most(a, b):
    """The larger, and what is not a number where one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def number(pointer, live, DOUBLE: tl.constexpr):
    """What is computed with: float32, or float64 where that came."""
    value = tl.load(pointer, mask=live, other=0)
    return value.to(tl.float64) if DOUBLE else value.to(tl.float32)


@triton.jit
def quotient(a, b, DOUBLE: tl.constexpr):
    """A correctly rounded quotient."""
    return a / b if DOUBLE else tl.div_rn(a, b)


@triton.jit
def moved(x, y, matrix, live, DOUBLE: tl.constexpr):
    """A point through its sample's matrix."""
    at_x = (number(matrix + 2, live, DOUBLE) + number(matrix, live, DOUBLE) * x) + number(matrix + 1, live, DOUBLE) * y
    at_y = (number(matrix + 5, live, DOUBLE) + number(matrix + 3, live, DOUBLE) * x) + number(matrix + 4, live, DOUBLE) * y
    depth = (number(matrix + 8, live, DOUBLE) + number(matrix + 6, live, DOUBLE) * x) + number(matrix + 7, live, DOUBLE) * y
    return quotient(at_x, depth, DOUBLE), quotient(at_y, depth, DOUBLE)


@triton.jit
def seen(first, last, length, EDGES: tl.constexpr):
    """Whether a pixel or more of an extent is within a frame of this length."""
    end = last if EDGES else last + 1
    return least(most(end, 0.0), length) - least(most(first, 0.0), length) >= 1


@triton.jit(
    do_not_specialize=["count", "each", "stride", "source_height", "source_width", "out_height", "out_width"],
    do_not_specialize_on_alignment=["values", "valid", "owners", "matrices", "places", "made", "kept"],
)
def box_kernel(
    values, valid, owners, matrices, places, made, kept,
    count, each, stride, source_height, source_width, out_height, out_width,
    LAYOUT: tl.constexpr, WIDTH: tl.constexpr, TO: tl.constexpr, TO_WIDTH: tl.constexpr, EDGES: tl.constexpr,
    SHARE: tl.constexpr, TO_SHARE: tl.constexpr, CLIP: tl.constexpr, GIVEN: tl.constexpr, OWNED: tl.constexpr,
    RAGGED: tl.constexpr, DOUBLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What ``gpuaug.fusion.ops.boxes.follow`` computes. Grid: (blocks of boxes, 1, 1).

    ``RAGGED``: numbers from row to row of ``places``, or 0 where all images have one size.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    owner = at // each
    if OWNED:
        owner = tl.load(owners + at, mask=live, other=0).to(tl.int32)
    matrix = matrices + owner * stride
    item = values + at * WIDTH
    target = made + at * TO_WIDTH
    shift = 0.5 if EDGES else 0.0
    none = tl.full((BLOCK,), 0, tl.float64 if DOUBLE else tl.float32)
    frame_width = none + out_width
    frame_height = none + out_height
    x1 = number(item, live, DOUBLE)
    y1 = number(item + 1, live, DOUBLE)
    if LAYOUT == 4:
        x1, y1 = moved(x1 - shift, y1 - shift, matrix, live, DOUBLE)
        tl.store(target, (x1 + shift).to(made.dtype.element_ty), mask=live)
        tl.store(target + 1, (y1 + shift).to(made.dtype.element_ty), mask=live)
        if WIDTH == 3:
            tl.store(target + 2, number(item + 2, live, DOUBLE).to(made.dtype.element_ty), mask=live)
        return
    x2 = number(item + 2, live, DOUBLE)
    y2 = number(item + 3, live, DOUBLE)
    extends = live
    if LAYOUT == 0:
        ax, ay = moved(x1, y1, matrix, live, DOUBLE)
        bx, by = moved(x2, y2, matrix, live, DOUBLE)
        cx, cy = moved(number(item + 4, live, DOUBLE), number(item + 5, live, DOUBLE), matrix, live, DOUBLE)
        dx, dy = moved(number(item + 6, live, DOUBLE), number(item + 7, live, DOUBLE), matrix, live, DOUBLE)
    else:
        extends = (x2 > 0) & (y2 > 0)
        if LAYOUT == 1:
            extends = (x2 - x1 > (0 if EDGES else -1)) & (y2 - y1 > (0 if EDGES else -1))
        if SHARE:
            height = none + source_height
            width = none + source_width
            if RAGGED:
                height = number(places + owner * RAGGED + 1, live, DOUBLE)
                width = number(places + owner * RAGGED + 2, live, DOUBLE)
            x1, y1, x2, y2 = x1 * width, y1 * height, x2 * width, y2 * height
        if LAYOUT == 3:
            x1 = x1 - x2 / 2
            y1 = y1 - y2 / 2
        if LAYOUT > 1:
            x2 = x1 + x2 if EDGES else x1 + x2 - 1
            y2 = y1 + y2 if EDGES else y1 + y2 - 1
        x1, y1, x2, y2 = x1 - shift, y1 - shift, x2 - shift, y2 - shift
        ax, ay = moved(x1, y1, matrix, live, DOUBLE)
        bx, by = moved(x2, y1, matrix, live, DOUBLE)
        cx, cy = moved(x2, y2, matrix, live, DOUBLE)
        dx, dy = moved(x1, y2, matrix, live, DOUBLE)
    x1 = least(least(ax, bx), least(cx, dx)) + shift
    y1 = least(least(ay, by), least(cy, dy)) + shift
    x2 = most(most(ax, bx), most(cx, dx)) + shift
    y2 = most(most(ay, by), most(cy, dy)) + shift
    if CLIP:
        keeps = extends & seen(x1, x2, frame_width, EDGES) & seen(y1, y2, frame_height, EDGES)
        if GIVEN:
            keeps &= tl.load(valid + at, mask=live, other=0) != 0
        tl.store(kept + at, keeps.to(tl.uint8), mask=live)
        end_x = frame_width if EDGES else frame_width - 1
        end_y = frame_height if EDGES else frame_height - 1
        x1 = least(most(x1, 0.0), end_x)
        y1 = least(most(y1, 0.0), end_y)
        x2 = least(most(x2, 0.0), end_x)
        y2 = least(most(y2, 0.0), end_y)
    if TO == 0:
        tl.store(target + 4, x2.to(made.dtype.element_ty), mask=live)
        tl.store(target + 5, y2.to(made.dtype.element_ty), mask=live)
        tl.store(target + 6, x1.to(made.dtype.element_ty), mask=live)
        tl.store(target + 7, y2.to(made.dtype.element_ty), mask=live)
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
    tl.store(target, x1.to(made.dtype.element_ty), mask=live)
    tl.store(target + 1, y1.to(made.dtype.element_ty), mask=live)
    tl.store(target + 2, x2.to(made.dtype.element_ty), mask=live)
    tl.store(target + 3, y2.to(made.dtype.element_ty), mask=live)


_launches: dict[Any, Launch] = {}
"""By what is compiled in, which is the same for all batches of a kind."""


def follow(values: Tensor, valid: Tensor | None, way: Way, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """What ``gpuaug.fusion.ops.boxes.follow`` computes, on the current stream.

    Cost:
        One launch, and a copy of what is not contiguous.
    """
    values = values.contiguous()
    points = way.form.layout == "points"
    width = values.shape[-1] if points else _WIDTHS[way.form.layout]
    to_width = width if points else _WIDTHS[way.to.layout]
    axes = values.ndim - (2 if way.form.layout == "vertices" else 1)
    shape = values.shape[:axes]
    tail = (4, 2) if way.to.layout == "vertices" else (to_width,)
    made = torch.empty((*shape, *tail), dtype=dtype, device=values.device)
    kept = torch.empty(shape, dtype=torch.bool, device=values.device) if way.clip else None
    ragged = way.source.stride(0) if isinstance(way.source, Tensor) else 0
    owned = way.owners is not None
    key = (values.dtype, dtype, way.form, width, way.to, way.clip, valid is None, owned, ragged)
    launch = _launches.get(key)
    if launch is None:
        launch = _launches[key] = Launch(
            box_kernel,
            (1, 1, 1),
            (),
            {
                "LAYOUT": _LAYOUTS[way.form.layout],
                "WIDTH": width,
                "TO": _LAYOUTS[way.to.layout],
                "TO_WIDTH": to_width,
                "EDGES": way.to.edges,
                "SHARE": way.form.share,
                "TO_SHARE": way.to.share,
                "CLIP": way.clip,
                "GIVEN": valid is not None,
                "OWNED": owned,
                "RAGGED": ragged,
                "DOUBLE": values.dtype == torch.float64,
                "BLOCK": BLOCK,
            },
        )
    count = shape.numel()
    if not count:
        return made, kept
    matrix = way.matrix
    tensors = (
        values,
        matrix if valid is None else valid.contiguous().view(torch.uint8),
        matrix if way.owners is None else way.owners,
        matrix,
        matrix if not ragged else way.source,
        made,
        matrix if kept is None else kept.view(torch.uint8),
    )
    source = (1, 1) if ragged else way.source
    each = 1 if owned else shape[1]
    with on_device(values.device):
        launch(tensors, (triton.cdiv(count, BLOCK), 1, 1), (count, each, matrix.stride(0), *source, *way.out))
    return made, kept
