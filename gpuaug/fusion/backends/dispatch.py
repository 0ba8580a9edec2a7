"""Which executor runs a plan: Triton on a GPU where a probe kernel ran, torch everywhere else."""

import os
import warnings
from typing import Any

import torch
from torch import Tensor

from gpuaug.core.devices import WITHOUT_TRITON
from gpuaug.core.errors import DeviceError, GpuAugWarning
from gpuaug.core.ragged import Ragged
from gpuaug.fusion.backends import torch_backend
from gpuaug.fusion.backends.readers import MaskPlaces
from gpuaug.fusion.backends.triton_failure import TritonFailure, shortened
from gpuaug.fusion.ops import boxes
from gpuaug.fusion.ops.boxes import Way
from gpuaug.fusion.ops.mix import SoftLabels
from gpuaug.fusion.pixels import converted
from gpuaug.fusion.program.plan import Canvases, GatherPass, Pass, Plan


def run(
    plan: Plan,
    images: Tensor | Ragged,
    table: Tensor,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
    canvases: Canvases = (),
) -> Tensor:
    """Run a plan on images, with whichever executor fits their device.

    Args:
        plan: For images of this size.
        images: uint8 or floating.
        table: Rows of the samples.
        dtype: Type of the result.
        memory_format: Memory format of the result.
        canvases: ``Plan.canvases``.

    Shape:
        - images: (B · T, C, H, W), of a type in ``PIXELS``, or a ragged batch of B; T frames of a clip, or 1
        - table: (V · B, at least ``plan.width``) float32, for V views
        - returns: (V · B · T, C, H', W') of ``dtype`` and ``memory_format``
    """
    data = images.data if isinstance(images, Ragged) else images
    if not data.numel() or not plan.out.height or not plan.out.width:
        shape = table.shape[0] * plan.out.each, plan.out.channels, plan.out.height, plan.out.width
        return data.new_zeros(shape, dtype=dtype).to(memory_format=memory_format)
    if data.is_cuda and (triton := _triton(images.device, (plan, images, table, dtype, memory_format, canvases))) is not None:
        return triton.run(plan, images, table, dtype, memory_format, canvases)  # type: ignore[no-any-return]
    return converted(torch_backend.run(plan, images, table, canvases), dtype).contiguous(memory_format=memory_format)


def run_mask(
    step: Pass,
    masks: Tensor,
    table: Tensor,
    places: MaskPlaces | None = None,
    canvas: tuple[int, int] | None = None,
) -> Tensor:
    """Take masks of any type through what a pass moves and erases.

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
    if not masks.numel():
        shape = masks.shape[:2] if places is None else (len(places.owners), 1)
        return masks.new_zeros((*shape, *(canvas or (step.out.height, step.out.width))))
    if isinstance(step, GatherPass) and step.moves:
        if masks.is_cuda and (triton := _triton(masks.device)) is not None:
            masks = triton.run_mask(step, masks, table, places, canvas)
        else:
            masks = torch_backend.gather_mask(step, masks, table, places, canvas)
    return torch_backend.erased(step, masks, table, places)


def run_labels(soft: SoftLabels, labels: Tensor, rows: Tensor | None) -> Tensor:
    """Make labels shares of the classes, and mix them where there are rows of a mix."""
    if labels.is_cuda and labels.numel() and _triton(labels.device) is not None:
        from gpuaug.fusion.backends.triton.mix import soft_labels

        return soft_labels(soft, labels, rows)
    return soft.of(labels, rows)


def follow(values: Tensor, valid: Tensor | None, way: Way, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Take boxes or points their way: see ``gpuaug.fusion.ops.boxes.follow``."""
    if values.is_cuda and _triton(values.device) is not None:
        from gpuaug.fusion.backends.triton import boxes as box_kernel

        return box_kernel.follow(values, valid, way, dtype)
    return boxes.follow(values, valid, way, dtype)


def name(device: torch.device) -> str:
    """The executor for a device: ``"torch"`` or ``"triton"``."""
    return "triton" if device.type == "cuda" and device not in WITHOUT_TRITON and _triton(device) is not None else "torch"


_KNOWN: dict[torch.device, Any] = {}
"""The module that runs plans by Triton, for every device probed so far; ``None`` where it cannot."""


def _triton(device: torch.device, first: tuple[Any, ...] | None = None) -> Any:
    """The module that runs plans by Triton on a device, or ``None``. ``first``: arguments of its ``run`` that follows."""
    if device not in _KNOWN:
        _KNOWN[device] = _probed(device, first)
    return _KNOWN[device]


def _probed(device: torch.device, first: tuple[Any, ...] | None) -> Any:
    # That Triton can be imported does not mean that it can compile: it needs a C compiler, and a driver that it knows.
    try:
        from gpuaug.fusion.backends.triton import backend

        backend.probe(device, first)
    except Exception as error:
        failure, said = TritonFailure.of(error), shortened(error)
        if os.environ.get("GPUAUG_REQUIRE_TRITON", "0") not in ("", "0"):
            raised = DeviceError(
                f"gpuaug.fuse cannot run on {device} with GPUAUG_REQUIRE_TRITON set, because Triton {failure.value} ({said}). "
                f"{failure.advice()}"
            )
            WITHOUT_TRITON[device] = str(raised)
            raise raised from error
        reason = (
            f"gpuaug.fuse runs in plain torch on {device}, about 50 times slower, because Triton {failure.value} ({said}). "
            f"{failure.advice()}"
        )
        WITHOUT_TRITON[device] = reason
        warnings.warn(reason, GpuAugWarning, stacklevel=3)
        return None
    WITHOUT_TRITON.pop(device, None)
    return backend
