"""Choice of the backend that runs a plan: Triton on a GPU on which a probe kernel ran, torch everywhere else.

A plan is the passes of a pipeline. Each pass reads and writes all images once. The parameter table has one float32 row per
sample, with the parameters of all ops.
"""

import os
import textwrap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.devices import TRITON_FAILURES
from gpuaug.core.errors import DOCUMENTATION, DeviceError, warn
from gpuaug.core.ragged import Ragged
from gpuaug.fusion.backends import patches, torch_backend
from gpuaug.fusion.backends import tiles as torch_tiles
from gpuaug.fusion.backends.patches import Arrangement, Resampling
from gpuaug.fusion.backends.readers import MaskLayout
from gpuaug.fusion.backends.tiles import Pixels
from gpuaug.fusion.ops import boxes
from gpuaug.fusion.ops.boxes import BoxMapping
from gpuaug.fusion.ops.geometry import BoxCropOp, FieldOp
from gpuaug.fusion.ops.mix import SoftLabels
from gpuaug.fusion.pixels import converted
from gpuaug.fusion.program.plan import Canvas, Canvases, GatherPass, Pass, Plan


def run(
    plan: Plan,
    images: Tensor | Ragged,
    table: Tensor,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
    canvases: Canvases = (),
) -> Tensor:
    """Run a plan on images, with the backend for their device.

    Args:
        plan: Plan for the size of the images.
        images: Images of a dtype in ``IMAGE_DTYPES`` (``fusion/pixels.py``).
        table: Parameter table.
        dtype: Dtype of the result.
        memory_format: Memory format of the result.
        canvases: ``Plan.canvases``, (height, width) of the buffers between passes, if images differ in size there.

    Shape:
        - images: (B · T, C, H, W), with T frames per clip, or 1; or a ragged batch of B
        - table: (V · B, at least ``plan.width``) float32, for V views
        - returns: (V · B · T, C, H', W') of ``dtype`` and ``memory_format``
    """
    data = images.data if isinstance(images, Ragged) else images
    if not data.numel() or not plan.out.height or not plan.out.width:
        shape = table.shape[0] * plan.out.images_per_sample, plan.out.channels, plan.out.height, plan.out.width
        return data.new_zeros(shape, dtype=dtype).to(memory_format=memory_format)
    if (
        data.is_cuda
        and (backend := _triton_backend(images.device, (plan, images, table, dtype, memory_format, canvases))) is not None
    ):
        return backend.run(plan, images, table, dtype, memory_format, canvases)  # type: ignore[no-any-return]
    return converted(torch_backend.run(plan, images, table, canvases), dtype).contiguous(memory_format=memory_format)


def run_mask(
    pass_: Pass, masks: Tensor, table: Tensor, mask_layout: MaskLayout | None = None, canvas: Canvas | None = None
) -> Tensor:
    """Run a pass on masks: move their pixels, and erase pixels, as in the images.

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
    if not masks.numel():
        shape = masks.shape[:2] if mask_layout is None else (len(mask_layout.owners), 1)
        return masks.new_zeros((*shape, *(canvas or (pass_.out.height, pass_.out.width))))
    if isinstance(pass_, GatherPass) and pass_.gather_ops:
        if masks.is_cuda and (backend := _triton_backend(masks.device)) is not None:
            masks = backend.run_mask(pass_, masks, table, mask_layout, canvas)
        else:
            masks = torch_backend.gather_mask(pass_, masks, table, mask_layout, canvas)
    if isinstance(pass_.front, FieldOp):
        rows = pass_.columns_of(table)
        masks = pass_.front.apply_to_masks(masks, rows.repeat_interleave(len(masks) // len(rows), 0))
    return torch_backend.erase_masks(pass_, masks, table, mask_layout)


def run_labels(soft: SoftLabels, labels: Tensor, rows: Tensor | None) -> Tensor:
    """Convert labels to class probabilities. Also mix them, if ``rows``, the parameters of a mix, (B, K), is not ``None``."""
    if labels.is_cuda and labels.numel() and _triton_backend(labels.device) is not None:
        from gpuaug.fusion.backends.triton.mix import soft_labels

        return soft_labels(soft, labels, rows)
    return soft.convert(labels, rows)


def map_boxes(values: Tensor, valid: Tensor | None, mapping: BoxMapping, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Map boxes or points. See ``gpuaug.fusion.ops.boxes.map_boxes``."""
    if values.is_cuda and _triton_backend(values.device) is not None:
        from gpuaug.fusion.backends.triton import boxes as box_kernel

        return box_kernel.map_boxes(values, valid, mapping, dtype)
    return boxes.map_boxes(values, valid, mapping, dtype)


def box_windows(op: BoxCropOp, numbers: Tensor, sides: Tensor, boxes: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the crop windows of images by their boxes. See ``BoxCropOp.windows``."""
    if sides.is_cuda and sides.numel() and _triton_backend(sides.device) is not None:
        from gpuaug.fusion.backends.triton import box_windows as windows_kernel

        return windows_kernel.box_windows(op, numbers, sides, boxes, owners)
    return op.windows(numbers, sides, boxes, owners)


def write_patches(images: Ragged, arrangement: Arrangement, resampling: Resampling, dtype: torch.dtype) -> list[Tensor]:
    """Resize images and write them as patches. See ``gpuaug.fusion.backends.patches.write_patches``."""
    if images.data.is_cuda and len(images) and (backend := _triton_backend(images.device)) is not None:
        return backend.write_patches(images, arrangement, resampling, dtype)  # type: ignore[no-any-return]
    return patches.write_patches(images, arrangement, resampling, dtype)


def write_tiles(out: Tensor, pixels: Pixels, tiles: NDArray[np.int64], fill: float, **options: Any) -> None:
    """Write tiles to canvases. See ``gpuaug.fusion.backends.tiles.write_tiles``."""
    if len(tiles) and out.numel():
        _tiles_backend(out.device).write_tiles(out, pixels, tiles, fill, **options)


def paste_objects(masks: Tensor, *arrays: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Cut pasted objects out of the masks below them. See ``gpuaug.fusion.backends.tiles.paste_objects``."""
    backend = _tiles_backend(masks.device) if masks.numel() else torch_tiles
    return backend.paste_objects(masks, *arrays)  # type: ignore[no-any-return]


def _tiles_backend(device: torch.device) -> Any:
    return (_triton_backend(device) if device.type == "cuda" else None) or torch_tiles


def backend_name(device: torch.device) -> str:
    """Return the name of the backend for a device: ``"torch"`` or ``"triton"``."""
    # A device with a recorded failure is not probed again, because with GPUAUG_REQUIRE_TRITON every probe raises an error.
    is_candidate = device.type == "cuda" and device not in TRITON_FAILURES
    return "triton" if is_candidate and _triton_backend(device) is not None else "torch"


_MAX_QUOTED = 300
"""Maximum number of characters of Triton's error that a message quotes."""
_BACKENDS: dict[torch.device, Any] = {}
"""Module ``triton.backend`` per device that was probed; ``None`` if Triton cannot run on it."""


def _triton_backend(device: torch.device, first_call: tuple[Any, ...] | None = None) -> Any:
    """Return the module ``triton.backend`` if Triton can run on a device, else ``None``.

    ``first_call``: arguments of ``backend.run``, whose kernels are compiled at the same time as the probe kernel.
    """
    if device not in _BACKENDS:
        _BACKENDS[device] = _probe(device, first_call)
    return _BACKENDS[device]


def _probe(device: torch.device, first_call: tuple[Any, ...] | None) -> Any:
    """Run a kernel on a device. Return the module ``triton.backend``, or warn and return ``None`` if Triton fails."""
    # To import Triton is not enough: Triton also needs a C compiler, and a driver that it supports.
    try:
        from gpuaug.fusion.backends.triton import backend

        backend.probe(device, first_call)
    except Exception as error:
        # Shortened, because the error of ptxas contains a long command.
        text = textwrap.shorten(f"{type(error).__name__}: {error}", _MAX_QUOTED, placeholder=" …")
        advice = f"See what Triton needs, such as a C compiler: {DOCUMENTATION}containers/#what-triton-needs."
        if os.environ.get("GPUAUG_REQUIRE_TRITON", "0") not in ("", "0"):
            reason = (
                f"gpuaug.fuse cannot run on {device} with GPUAUG_REQUIRE_TRITON set, because Triton cannot run a kernel there "
                f"({text}). {advice}"
            )
            TRITON_FAILURES[device] = reason
            raise DeviceError(reason) from error
        reason = (
            f"gpuaug.fuse runs in plain torch on {device}, about 50 times slower, because Triton cannot run a kernel there "
            f"({text}). {advice}"
        )
        TRITON_FAILURES[device] = reason
        warn(reason)
        return None
    TRITON_FAILURES.pop(device, None)
    return backend
