"""The kernels of mixes: of images, in front of the pointwise ops of a pass; and of labels, made shares of the classes."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.launch import Launch, on_device, prepared, storing
from gpuaug.fusion.backends.triton.pixel_math import as_float, byte_share, stored_as
from gpuaug.fusion.backends.triton.points import points
from gpuaug.fusion.ops.mix import MixOp, SoftLabels
from gpuaug.fusion.program.plan import OpPass

TILE = 1024
"""Pixels of a block, which lie one after another."""

MOST_CLASSES = 1024
"""Classes of a block."""

SIZES = ("height", "width", "row_stride")
STRIDES = ("source_b", "source_c", "source_h", "out_b", "out_c", "out_h")


@triton.jit
def unit_pixel(pointer, live, SCALE: tl.constexpr):
    """A pixel in [0, 1], as torch divides bytes, bit for bit."""
    value = as_float(tl.load(pointer, mask=live, other=0), SCALE)
    return byte_share(value) if SCALE else value


@triton.jit
def mixed(own, pointer, live, inside, weight, SCALE: tl.constexpr):
    """One channel of a pixel, and of its partner's at ``pointer``: the partner's inside, elsewhere a mean."""
    partner = unit_pixel(pointer, tl.where(weight != 0, live, inside), SCALE)
    # A weight of nothing leaves every bit.
    return tl.where(inside, partner, tl.where(weight != 0, own * (1 - weight) + partner * weight, own))


@triton.jit(do_not_specialize=[*SIZES, *STRIDES], do_not_specialize_on_alignment=["source", "out", "rows"])
def mix_kernel(
    source, out, rows, height, width, row_stride, source_b, source_c, source_h, out_b, out_c, out_h,
    SOURCE_W: tl.constexpr, FRAMES: tl.constexpr, SCALE: tl.constexpr, OUT_W: tl.constexpr,
    PROGRAM: tl.constexpr, COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Mix each image with its partner; of clips, each frame with the frame of the same index.

    Grid: (tiles of an image, samples, planes; one plane where a block makes all three).
    """
    sample = tl.program_id(1)
    plane = tl.program_id(2)
    row = rows + sample // FRAMES * row_stride
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = place < height * width
    x = place % width
    y = place // width
    first = source + plane * source_c + y * source_h + x * SOURCE_W
    pixel = first + sample.to(tl.int64) * source_b
    r = unit_pixel(pixel, live, SCALE)
    g = unit_pixel(pixel + source_c, live, SCALE) if RGB else r
    b = unit_pixel(pixel + 2 * source_c, live, SCALE) if RGB else r
    if tl.load(row) != 0:
        other = first + (tl.load(row + 1).to(tl.int64) * FRAMES + sample % FRAMES) * source_b
        weight = tl.load(row + 3)
        inside = live & (x >= tl.load(row + 4)) & (x < tl.load(row + 6)) & (y >= tl.load(row + 5)) & (y < tl.load(row + 7))
        r = mixed(r, other, live, inside, weight, SCALE)
        if RGB:
            g = mixed(g, other + source_c, live, inside, weight, SCALE)
            b = mixed(b, other + 2 * source_c, live, inside, weight, SCALE)
    r, g, b = points(r, g, b, x, y, sample, plane, height, width, row, 0.0, PROGRAM, COUNT, CHANNELS, RGB)
    target = out + sample.to(tl.int64) * out_b + plane * out_c + y * out_h + x * OUT_W
    tl.store(target, stored_as(r, out.dtype.element_ty), mask=live)
    if RGB:
        tl.store(target + out_c, stored_as(g, out.dtype.element_ty), mask=live)
        tl.store(target + 2 * out_c, stored_as(b, out.dtype.element_ty), mask=live)


def mix(step: OpPass[MixOp], source: Tensor, rows: Tensor, out: Tensor) -> None:
    """Launch a pass with a mix in front on the current stream, in one launch.

    Arguments and shapes are those of ``gpuaug.fusion.backends.triton.filters.blur.blur``.
    """
    prepared(step, source, rows, out, _mixing)((source, out, rows))


def _mixing(step: OpPass[MixOp], source: Tensor, rows: Tensor, out: Tensor) -> Launch:
    batch, _, height, width = source.shape
    constants, planes = storing(step, source, out)
    numbers = (height, width, rows.stride(0), *source.stride()[:3], *out.stride()[:3])
    return Launch(mix_kernel, (triton.cdiv(height * width, TILE), batch, planes), numbers, {**constants, "TILE": TILE})


@triton.jit
def class_shares(label, column, live, label_k, DENSE: tl.constexpr, KEPT: tl.constexpr, ON: tl.constexpr, OFF: tl.constexpr):
    """A sample's shares of some classes; ``label`` points to its index or to its first share."""
    if DENSE:
        return tl.load(label + column * label_k, mask=live, other=0).to(tl.float32) * KEPT + OFF
    value = tl.load(label)
    # Half precision does not count far enough.
    own = (value.to(tl.float32) == column.to(tl.float32)) if value.dtype.is_floating() else (value.to(tl.int64) == column)
    return tl.where(own, ON, OFF)


@triton.jit(do_not_specialize=["row_stride", "label_b", "label_k"], do_not_specialize_on_alignment=["labels", "rows", "out"])
def labels_kernel(
    labels, rows, out, row_stride, label_b, label_k,
    CLASSES: tl.constexpr, DENSE: tl.constexpr, MIXED: tl.constexpr, KEPT: tl.constexpr, ON: tl.constexpr, OFF: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Make labels shares, and mix each sample's with its partner's.

    Grid: (blocks of classes, samples).
    """
    sample = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = column < CLASSES
    made = class_shares(labels + sample * label_b, column, live, label_k, DENSE, KEPT, ON, OFF)
    if MIXED:
        row = rows + sample * row_stride
        lam = tl.load(row + 2)
        if lam != 0:
            other = labels + tl.load(row + 1).to(tl.int64) * label_b
            made = made * (1 - lam) + class_shares(other, column, live, label_k, DENSE, KEPT, ON, OFF) * lam
    tl.store(out + sample * CLASSES + column, made.to(out.dtype.element_ty), mask=live)


def soft_labels(soft: SoftLabels, labels: Tensor, rows: Tensor | None) -> Tensor:
    """The shares, as ``gpuaug.fusion.ops.mix.SoftLabels.of`` has them, in one launch on the current stream.

    Shape:
        - labels: (B,) or (B, K), any strides
        - rows: (B, a mix's width), float32
        - returns: (B, K)
    """
    batch = labels.shape[0]
    out = torch.empty((batch, soft.classes), dtype=soft.type_of(labels), device=labels.device)
    if labels.dtype == torch.bool:
        labels = labels.view(torch.uint8)
    launch = _launch(soft, labels.dtype, batch, labels.stride(), None if rows is None else rows.stride(0))
    with on_device(labels.device):
        launch((labels, labels if rows is None else rows, out))
    return out


@functools.lru_cache(maxsize=64)
def _launch(soft: SoftLabels, dtype: torch.dtype, batch: int, strides: tuple[int, ...], row_stride: int | None) -> Launch:
    dense = len(strides) == 2
    block = min(triton.next_power_of_2(soft.classes), MOST_CLASSES)
    constants: dict[str, Any] = {
        "CLASSES": soft.classes,
        "DENSE": dense,
        "MIXED": row_stride is not None,
        "KEPT": soft.kept,
        "ON": soft.on,
        "OFF": soft.off,
        "BLOCK": block,
    }
    grid = (triton.cdiv(soft.classes, block), batch, 1)
    return Launch(labels_kernel, grid, (row_stride or 0, strides[0], strides[1] if dense else 0), constants)
