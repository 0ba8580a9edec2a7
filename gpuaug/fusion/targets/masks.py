"""Lists of instance masks, any number per image, which the passes transform as one tensor.

A *pass* is one kernel that reads and writes all images or masks; a *plan* is a list of passes. The *parameter table* holds one
row of numbers per sample, from which the passes read the parameters of the ops. The *owner* of a mask is the index of its
sample. A *stack* is a tensor (n, H, W) with all masks of one image. A *span* is (start, height, width) of the masks of one
sample in a flat tensor.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.core.columns import TensorColumn, are_plain, are_tensors, as_plain_tensors, joined, split
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, DeviceError
from gpuaug.core.packed_targets import PackedColumn, shared_attributes
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.backends.readers import MaskLayout
from gpuaug.fusion.ops.base import Array, Size
from gpuaug.fusion.ops.torchvision.target_conversions import NO_CONVERSIONS, TargetConversions
from gpuaug.fusion.program.plan import Canvases, Plan

_EMPTY: Array = np.empty(0, np.int64)
"""Array of no indices."""


class MaskList:
    """Instance masks of a batch, any number per image.

    Call ``set_device_arrays``, then ``run`` for each plan, then ``results`` or ``packed``.

    Args:
        masks: Tensors (n, H, W) or (H, W), all of one dtype: at most one tensor per image, with all its masks. Tensors without
            masks may have another dtype, and are returned in that of the others.
        samples: Index of the image of each tensor in ``masks``.
        size: Size of the images.
        device: Device of the images.
        sides: Result of ``sides_of(size)``, to save the call; ``None`` to compute it.
        frames: Number of consecutive images that are transformed equally: the frames of a clip, or 1.

    Raises:
        ArgumentTypeError: If one of ``masks`` is not a tensor, or has another dtype than the others.
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
        stacks, self.counts = _checked_masks(masks, samples, sides, device)
        self.samples = samples
        self._masks = masks
        self._are_stacks = stacks is masks
        """True if all tensors in ``masks`` are (n, H, W)."""
        self._owners: Tensor | None = None
        """Owner of each mask, on the device."""
        self._layout: MaskLayout | None = None
        """Owners and spans of masks that differ in size; ``None`` if all masks have one size."""
        self.spans = _EMPTY
        """Span of each sample in ``_values``, in one array (3 · B,). Empty if images have one size."""
        self._values: Tensor
        """Masks in their current state: (number of masks, 1, H, W), or flat if they differ in size."""
        if not size.ragged:
            self._values = joined(stacks)[:, None]
            return
        counts = self.counts
        with as_plain_tensors():
            if frames > 1:
                stacks, samples, counts = _per_clip(stacks, samples, frames)
                sides = sides[::frames]
            if dispatch.backend_name(device) == "triton":
                # The kernel reads the masks from the tensors that the user passed, without a copy.
                self._stacks = [stack.contiguous() for stack in stacks]
                self._values, firsts = _with_offsets(self._stacks)
            else:
                self._values = torch.cat([stack.flatten() for stack in stacks])
                firsts = [0, *accumulate(stack.numel() for stack in stacks[:-1])]
        self.spans = _spans(firsts, samples, counts, sides)

    def set_device_arrays(self, owners: Tensor, spans: Tensor) -> None:
        """Set the device copies of ``owners_of(samples, counts)``, (number of masks,), and of ``spans``.

        The caller copies these arrays together with others.
        """
        self._owners = owners
        self._layout = MaskLayout(owners, spans.view(-1, 3)) if len(spans) else None

    def run(self, plan: Plan, table: Tensor, canvases: Canvases = ()) -> None:
        """Run all masks through the passes of a plan.

        Args:
            plan: Plan for the images.
            table: Parameter table of the plan, (B, columns).
            canvases: Result of ``Plan.canvases``: size of the output of each pass but the last, if images differ in size.

        Cost:
            One launch per pass, some launches for erasing, and one that copies the row of the parameter table for each mask.
            Without the last one if the plan has a single pass and images differ in size.
        """
        assert self._owners is not None
        rows: Tensor | None = None
        for index, pass_ in enumerate(plan.passes):
            canvas = canvases[index] if pass_.out.ragged else None
            if self._layout is not None:
                if canvas is None or pass_.gather_ops:
                    self._values = dispatch.run_mask(pass_, self._values, table, self._layout, canvas)
                    self._layout = None  # the output of a pass has one size for all masks
                continue
            rows = table.index_select(0, self._owners) if rows is None else rows
            self._values = dispatch.run_mask(pass_, self._values, rows, canvas=canvas)

    def results(self, conversions: TargetConversions = NO_CONVERSIONS) -> Sequence[Tensor]:
        """Return the transformed masks, with the axes, class and dtype of the inputs unless ``conversions`` change them."""
        values = self._values[:, 0]
        stacks = split(values if conversions.masks is None else values.to(conversions.masks), self.counts)
        if self._are_stacks and (conversions.is_pure or are_plain(self._masks)):
            return stacks
        shaped = (part if mask.ndim == 3 else part[0] for part, mask in zip(stacks, self._masks, strict=True))
        return [
            part if conversions.is_pure else with_class_of(part, mask) for part, mask in zip(shaped, self._masks, strict=True)
        ]

    def packed(self, conversions: TargetConversions = NO_CONVERSIONS) -> tuple[PackedColumn, Tensor]:
        """Return (packed column that describes the results, results in one tensor), for packed target dicts."""
        values = self._values[:, 0]
        values = values if conversions.masks is None else values.to(conversions.masks)
        mask = self._masks[0]
        is_typed = type(mask) is not Tensor and not conversions.is_pure
        attributes = shared_attributes(list(map(vars, self._masks))) if is_typed else [{}]
        return PackedColumn("masks", self.samples, self.counts, None, type(mask) if is_typed else Tensor, attributes), values


def owners_of(samples: Sequence[int], counts: Sequence[int]) -> Array:
    """Return the owner of each mask or box. ``counts``: number of masks or boxes of each sample in ``samples``."""
    return np.repeat(np.asarray(samples, np.int64), counts) if samples else _EMPTY


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


def with_class_of(result: Tensor, source: Tensor, **changes: Any) -> Tensor:
    """Return ``result`` as an instance of the class of ``source``, with the attributes of ``source``.

    ``changes``: other values for attributes. Attributes that ``source`` does not have are ignored.
    """
    if type(source) is Tensor:
        return result
    typed = result.as_subclass(type(source))
    attributes = vars(source)
    vars(typed).update(attributes, **{name: value for name, value in changes.items() if name in attributes})
    return typed


def _with_offsets(stacks: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Return (flat view of the first stack that is not empty, offset of each stack in memory from it, in elements)."""
    base = next((stack for stack in stacks if stack.numel()), stacks[0])
    start = base.data_ptr()
    size = base.itemsize
    return base.view(-1), [(stack.data_ptr() - start) // size for stack in stacks]


def _per_clip(stacks: Sequence[Tensor], samples: Sequence[int], frames: int) -> tuple[list[Tensor], list[int], list[int]]:
    """Concatenate the masks of all frames of each clip.

    Returns:
        (masks of each clip that has any, (n, H, W); indices of the clips; numbers of masks).
    """
    stacks_by_clip: dict[int, list[Tensor]] = {}
    for stack, sample in zip(stacks, samples, strict=True):
        stacks_by_clip.setdefault(sample // frames, []).append(stack)
    per_clip = [torch.cat(stacks_of_clip) for stacks_of_clip in stacks_by_clip.values()]
    return per_clip, list(stacks_by_clip), [len(stack) for stack in per_clip]


def _spans(firsts: Sequence[int], samples: Sequence[int], counts: Sequence[int], sides: Sequence[tuple[int, int]]) -> Array:
    """Return the span of each image, as ``MaskLayout`` takes it, in one array (3 · B,).

    Args:
        firsts: Offset of the first mask of each tensor, in elements.
        samples: Index of the image of each tensor.
        counts: Number of masks in each tensor.
        sides: (height, width) of each image.
    """
    spans = [(0, 0, 0)] * len(sides)
    preceding = 0
    for first, sample, count in zip(firsts, samples, counts, strict=True):
        height, width = sides[sample]
        # The kernel adds (index of the mask in the batch) · height · width, also for the masks of earlier images.
        spans[sample] = first - preceding * height * width, height, width
        preceding += count
    return np.array(spans, np.int64).ravel()


def _way_to_tensor(masks: Any) -> str:
    """Return the advice for masks of one image that are no tensor."""
    first = masks[0] if isinstance(masks, list | tuple) and masks else masks
    if isinstance(first, Tensor):
        return "Stack the masks of one image: torch.stack(masks)."
    if isinstance(first, np.ndarray):
        code = "masks" if first is masks else "np.stack(masks)"
        return f"Convert the masks in the dataset: torch.from_numpy({code})."
    if isinstance(first, Mapping | list | tuple):  # COCO's run lengths or polygons
        code = "[masks]" if first is masks else "masks"
        if not isinstance(first, Mapping) or not isinstance(first.get("counts"), str | bytes):
            code = f"mask.frPyObjects({code}, height, width)"
        return (
            "Decode run lengths and polygons in the dataset, with pycocotools.mask as mask: "
            f"torch.from_numpy(mask.decode({code})).movedim(2, 0)."
        )
    return "Return a tensor (n, H, W) from the dataset."


def _checked_masks(
    masks: Sequence[Any], samples: Sequence[int], sides: Sequence[tuple[int, int]], device: torch.device
) -> tuple[Sequence[Tensor], list[int]]:
    """Check masks, and return (stacks, n of each stack). The stacks are ``masks`` itself if all masks are (n, H, W)."""
    if are_tensors(masks) and len((column := TensorColumn(masks)).dtypes) < 2 and column.devices <= {device}:
        shapes = column.shapes
        if all(len(shape) == 3 and shape[1:] == sides[sample] for shape, sample in zip(shapes, samples, strict=True)):
            return masks, [shape[0] for shape in shapes]
    stacks: list[Tensor] = []
    counts: list[int] = []
    first = next((index for index, mask in enumerate(masks) if isinstance(mask, Tensor) and mask.numel()), 0)
    dtype = getattr(masks[first], "dtype", None)
    for mask, sample in zip(masks, samples, strict=True):
        if not isinstance(mask, Tensor):
            raise ArgumentTypeError(
                f"masks of sample {sample} must be a tensor, got {type(mask).__name__}. {_way_to_tensor(mask)}"
            )
        stack = mask if type(mask) is Tensor else mask.as_subclass(Tensor)
        shape = stack.shape
        if len(shape) == 2:
            stack = stack[None]
            shape = stack.shape
        if len(shape) != 3:
            raise ArgumentError(
                f"masks of sample {sample} must be (n, H, W) or (H, W), got {tuple(shape)}. "
                "For an image without masks, pass torch.zeros(0, H, W)."
            )
        count, height, width = shape
        if (height, width) != sides[sample]:
            height, width = sides[sample]
            raise ArgumentError(
                f"masks of sample {sample} must have the size of their image, {height}x{width}, got {tuple(mask.shape)}. "
                "Resize the masks to that size."
            )
        if stack.device != device:
            raise DeviceError(
                f"masks of sample {sample} must be on {device}, where the images are, got {stack.device}. "
                "Move the masks to that device."
            )
        if stack.dtype is not dtype:
            if stack.numel():
                raise ArgumentTypeError(
                    f"masks of sample {sample} must be {dtype}, as in sample {samples[first]}, got {stack.dtype}. "
                    "Convert all masks of a batch to one dtype."
                )
            stack = stack.to(dtype)
        stacks.append(stack)
        counts.append(count)
    return stacks, counts
