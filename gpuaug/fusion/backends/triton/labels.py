"""The kernel that makes labels shares of the classes, and mixes them, in one launch."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.launch import Launch, on_device
from gpuaug.fusion.ops.mix import SoftLabels

MOST_CLASSES = 1024
"""Classes of a block."""


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
