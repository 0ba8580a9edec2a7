"""Lists of instance masks: any number per image, concatenated to one tensor for the passes."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.core.columns import are_plain, are_tensors, devices, dtypes, joined, plainly, shapes, split
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, DeviceError
from gpuaug.core.packed_targets import PackedColumn, shared_attributes
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.backends.readers import MaskLayout
from gpuaug.fusion.ops.base import Array, Size
from gpuaug.fusion.ops.torchvision.ending import AS_THEY_CAME, Ending
from gpuaug.fusion.program.plan import Canvases, Plan

_NO_NUMBERS: Array = np.empty(0, np.int64)


class MaskList:
    """Instance masks of a batch, any number per image, run through the passes as one tensor.

    Args:
        masks: Tensors (n, H, W) or (H, W), all of one dtype.
        samples: Sample index of each tensor in ``masks``.
        size: Size of the images.
        device: Device of the images.
        sides: ``sides_of(size)``, if the caller has it already.
        frames: Number of images per row of the parameter table: the frames of a clip, or 1.

    Raises:
        ArgumentTypeError: If one of ``masks`` is not a tensor, or has another dtype than the first.
        ArgumentError: If a mask does not have the size of its image.
        DeviceError: If a mask is not on ``device``.
    """

    def __init__(
        self,
        masks: Sequence[Any],
        samples: Sequence[int],
        size: Size,
        device: torch.device,
        sides: Sequence[tuple[int, int]] | None = None,
        frames: int = 1,
    ) -> None:
        sides = sides_of(size) if sides is None else sides
        planes, self.counts = _checked(masks, samples, sides, device)
        self.samples = samples
        self._masks = masks
        self._are_stacks = planes is masks
        self._owners: Tensor | None = None
        self._places: MaskLayout | None = None
        self.spans = _NO_NUMBERS
        """(3 · B,) flat (start, height, width) per image or clip, for ``MaskLayout``. Empty if all images have one size."""
        if not size.ragged:
            self._values = joined(planes)[:, None]
            return
        counts = self.counts
        with plainly():
            if frames > 1:
                planes, samples, counts = _per_clip(planes, samples, frames)
                sides = sides[::frames]
            if dispatch.backend_name(device) == "triton":
                # The kernel reads the masks from the tensors that the user passed, without a copy.
                self._planes = [plane.contiguous() for plane in planes]
                self._values, firsts = _with_offsets(self._planes)
            else:
                self._values = torch.cat([plane.flatten() for plane in planes])
                firsts = [0, *accumulate(plane.numel() for plane in planes[:-1])]
        self.spans = _spans(firsts, samples, counts, sides)

    def take(self, owners: Tensor, spans: Tensor) -> None:
        """Set the device copies of ``owners_of(…)``, (masks,), and of ``spans``. Called before ``run``."""
        self._owners = owners
        self._places = MaskLayout(owners, spans.view(-1, 3)) if len(spans) else None

    def run(self, plan: Plan, table: Tensor, canvases: Canvases = ()) -> None:
        """Run all masks through the passes of a plan. ``canvases``: ``Plan.canvases``.

        Cost:
            One launch per pass, and some for erasing. One more gathers the row of the parameter table for each mask, unless
            the plan has a single pass and images differ in size.
        """
        assert self._owners is not None
        rows: Tensor | None = None
        for index, step in enumerate(plan.passes):
            canvas = canvases[index] if step.out.ragged else None
            if self._places is not None:
                if canvas is None or step.gather_ops:
                    self._values = dispatch.run_mask(step, self._values, table, self._places, canvas)
                    self._places = None  # the output of a pass has one size for all masks
                continue
            rows = table.index_select(0, self._owners) if rows is None else rows
            self._values = dispatch.run_mask(step, self._values, rows, canvas=canvas)

    def results(self, ending: Ending = AS_THEY_CAME) -> Sequence[Tensor]:
        """Return the masks, in the shapes and types of ``masks``, or as ``ending`` requires."""
        values = self._values[:, 0]
        stacks = split(values if ending.masks is None else values.to(ending.masks), self.counts)
        if self._are_stacks and (ending.is_pure or are_plain(self._masks)):
            return stacks
        shaped = (part if mask.ndim == 3 else part[0] for part, mask in zip(stacks, self._masks, strict=True))
        return [part if ending.is_pure else like(part, mask) for part, mask in zip(shaped, self._masks, strict=True)]

    def packed(self, ending: Ending = AS_THEY_CAME) -> tuple[PackedColumn, Tensor]:
        """Return ``results`` as a packed column."""
        values = self._values[:, 0]
        values = values if ending.masks is None else values.to(ending.masks)
        mask = self._masks[0]
        is_typed = type(mask) is not Tensor and not ending.is_pure
        attributes = shared_attributes(list(map(vars, self._masks))) if is_typed else [{}]
        return PackedColumn("masks", self.samples, self.counts, None, type(mask) if is_typed else Tensor, attributes), values


def owners_of(samples: Sequence[int], counts: Sequence[int]) -> Array:
    """Sample index of every mask, given the number of masks per sample."""
    return np.repeat(np.asarray(samples, np.int64), counts) if samples else _NO_NUMBERS


def sides_of(size: Size) -> list[tuple[int, int]]:
    """Return (height, width) of each image as Python integers, which are faster to compare than NumPy's."""
    columns = (side.tolist() if isinstance(side, np.ndarray) else [side] * size.batch for side in (size.height, size.width))
    return list(zip(*columns, strict=True))


def to_device(arrays: Sequence[Array], device: torch.device) -> tuple[Tensor, ...]:
    """Copy flat integer arrays to ``device``, in one asynchronous copy from pinned memory."""
    lengths = [len(array) for array in arrays]
    pinned = torch.empty(sum(lengths), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    np.concatenate(arrays, out=pinned.numpy())
    return torch.split_with_sizes(pinned.to(device, non_blocking=True), lengths)


def like(result: Tensor, source: Tensor, **changes: Any) -> Tensor:
    """Return ``result`` as an instance of the tensor subclass of ``source``, with the attributes of ``source``.

    ``changes`` replace attributes that ``source`` has.
    """
    if type(source) is Tensor:
        return result
    typed = result.as_subclass(type(source))
    attributes = vars(source)
    vars(typed).update(attributes, **{name: value for name, value in changes.items() if name in attributes})
    return typed


def _with_offsets(planes: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Return the first plane that is not empty, flat, and the offset of each plane from it in memory, in elements."""
    base = next((plane for plane in planes if plane.numel()), planes[0])
    start = base.data_ptr()
    size = base.itemsize
    return base.view(-1), [(plane.data_ptr() - start) // size for plane in planes]


def _per_clip(planes: Sequence[Tensor], samples: Sequence[int], frames: int) -> tuple[list[Tensor], list[int], list[int]]:
    """Concatenate the masks of all frames of a clip. Return the stack of each clip, its index, and its number of masks."""
    stacks: dict[int, list[Tensor]] = {}
    for plane, sample in zip(planes, samples, strict=True):
        stacks.setdefault(sample // frames, []).append(plane)
    per_clip = [torch.cat(stack) for stack in stacks.values()]
    return per_clip, list(stacks), [len(stack) for stack in per_clip]


def _spans(firsts: Sequence[int], samples: Sequence[int], counts: Sequence[int], sides: Sequence[tuple[int, int]]) -> Array:
    """Return (3 · B,) flat (start, height, width) per image for ``MaskLayout``. ``firsts``: offset of each stack of masks."""
    spans = [(0, 0, 0)] * len(sides)
    preceding = 0
    for first, sample, count in zip(firsts, samples, counts, strict=True):
        height, width = sides[sample]
        # The kernel adds (index of the mask in the batch) · area, so the start is moved back by the masks of earlier images.
        spans[sample] = first - preceding * height * width, height, width
        preceding += count
    return np.array(spans, np.int64).ravel()


def _checked(
    masks: Sequence[Any], samples: Sequence[int], sides: Sequence[tuple[int, int]], device: torch.device
) -> tuple[Sequence[Tensor], list[int]]:
    """Return masks as tensors (n, H, W), and n of each. Returns ``masks`` itself if all have this shape already."""
    if are_tensors(masks) and len(dtypes(masks)) < 2 and devices(masks) <= {device}:
        mask_shapes = shapes(masks)
        if all(len(shape) == 3 and shape[1:] == sides[sample] for shape, sample in zip(mask_shapes, samples, strict=True)):
            return masks, [shape[0] for shape in mask_shapes]
    planes: list[Tensor] = []
    counts: list[int] = []
    dtype: torch.dtype | None = None
    for mask, sample in zip(masks, samples, strict=True):
        if not isinstance(mask, Tensor):
            raise ArgumentTypeError(
                f"masks of sample {sample} must be a tensor, got {type(mask).__name__}. "
                "Stack those of one image: torch.stack(…)."
            )
        plane = mask if type(mask) is Tensor else mask.as_subclass(Tensor)
        shape = plane.shape
        if len(shape) == 2:
            plane = plane[None]
            shape = plane.shape
        if len(shape) != 3:
            raise ArgumentError(
                f"masks of sample {sample} must be (n, H, W) or (H, W), got {tuple(shape)}. "
                "Where an image has none: torch.zeros(0, H, W)."
            )
        count, height, width = shape
        if (height, width) != sides[sample]:
            height, width = sides[sample]
            raise ArgumentError(
                f"masks of sample {sample} must be of its image's size, {height}x{width}, got {tuple(mask.shape)}. "
                "Resize them to it first."
            )
        if plane.device != device:
            raise DeviceError(
                f"masks of sample {sample} must be on {device}, where the images are, got {plane.device}. "
                "Move them there first."
            )
        if plane.dtype is not dtype:
            if planes:
                raise ArgumentTypeError(
                    f"masks of sample {sample} must be of {dtype}, as those of sample {samples[0]}, got {plane.dtype}. "
                    "Give all masks of a batch one type."
                )
            dtype = plane.dtype
        planes.append(plane)
        counts.append(count)
    return planes, counts
