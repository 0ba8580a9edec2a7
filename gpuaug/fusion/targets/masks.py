"""Lists of instance masks: any number for each image, taken through the passes as one tensor."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.core.columns import are_plain, are_tensors, devices, dtypes, joined, plainly, shapes, split
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, DeviceError
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.backends.readers import MaskPlaces
from gpuaug.fusion.ops.base import Array, Size
from gpuaug.fusion.ops.torchvision.ending import AS_THEY_CAME, Ending
from gpuaug.fusion.program.plan import Canvases, Plan

_NO_NUMBERS: Array = np.empty(0, np.int64)


class MaskList:
    """Masks of any number for each image, on their way through the passes as one tensor.

    Args:
        masks: (n, H, W) or (H, W) each, of one type.
        samples: Which image each belongs to.
        size: Of the images.
        device: That of the images.
        sides: ``sides_of(size)``, where they are known.

    Raises:
        ArgumentTypeError: If one is no tensor, or of another type than the first.
        ArgumentError: If one is not of the size of its image.
        DeviceError: If one is not where the images are.
    """

    def __init__(
        self,
        masks: Sequence[Any],
        samples: Sequence[int],
        size: Size,
        device: torch.device,
        sides: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        sides = sides_of(size) if sides is None else sides
        planes, self.counts = _checked(masks, samples, sides, device)
        self.samples = samples
        self._given = masks
        self._are_stacks = planes is masks
        self._owners: Tensor | None = None
        self._places: MaskPlaces | None = None
        self.spans = _NO_NUMBERS
        """What ``MaskPlaces`` knows of each image, flat; nothing where all have one size."""
        if not size.ragged:
            self._values = joined(planes)[:, None]
            return
        with plainly():
            if dispatch.name(device) == "triton":
                # A kernel reads them where they are, without a copy.
                self._planes = [plane.contiguous() for plane in planes]
                self._values, firsts = _counted_from_one(self._planes)
            else:
                self._values = torch.cat([plane.flatten() for plane in planes])
                firsts = [0, *accumulate(plane.numel() for plane in planes[:-1])]
        self.spans = _spans(firsts, samples, self.counts, sides)

    def take(self, owners: Tensor, spans: Tensor) -> None:
        """Take what has to be on the device before masks can be moved: which image each belongs to, and ``spans``."""
        self._owners = owners
        self._places = MaskPlaces(owners, spans.view(-1, 3)) if len(spans) else None

    def run(self, plan: Plan, table: Tensor, canvases: Canvases = ()) -> None:
        """Take all masks through the passes of a plan. ``canvases``: ``Plan.canvases``.

        Cost:
            A launch for each pass, and some for erasing; and one that takes each mask's row, unless the first pass is the only
            one and masks differ in size.
        """
        assert self._owners is not None
        rows: Tensor | None = None
        for index, step in enumerate(plan.passes):
            canvas = canvases[index] if step.out.ragged else None
            if self._places is not None:
                if canvas is None or step.moves:
                    self._values = dispatch.run_mask(step, self._values, table, self._places, canvas)
                    self._places = None  # behind a pass all masks have memory of one size
                continue
            rows = table.index_select(0, self._owners) if rows is None else rows
            self._values = dispatch.run_mask(step, self._values, rows, canvas=canvas)

    def results(self, ending: Ending = AS_THEY_CAME) -> Sequence[Tensor]:
        """The masks of each, as they were given, or of the type that is wanted."""
        values = self._values[:, 0]
        made = split(values if ending.masks is None else values.to(ending.masks), self.counts)
        if self._are_stacks and (ending.is_pure or are_plain(self._given)):
            return made
        shaped = (part if mask.ndim == 3 else part[0] for part, mask in zip(made, self._given, strict=True))
        return [part if ending.is_pure else like(part, mask) for part, mask in zip(shaped, self._given, strict=True)]


def owners_of(samples: Sequence[int], counts: Sequence[int]) -> Array:
    """Sample index of every mask, given the number of masks per sample."""
    return np.repeat(np.asarray(samples, np.int64), counts) if samples else _NO_NUMBERS


def sides_of(size: Size) -> list[tuple[int, int]]:
    """Height and width of each image, as plain numbers, which are faster to compare."""
    every = (side.tolist() if isinstance(side, np.ndarray) else [side] * size.batch for side in (size.height, size.width))
    return list(zip(*every, strict=True))


def to_device(arrays: Sequence[Array], device: torch.device) -> tuple[Tensor, ...]:
    """Integer arrays, each flat, sent in one pinned, asynchronous copy."""
    lengths = [len(array) for array in arrays]
    pinned = torch.empty(sum(lengths), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    np.concatenate(arrays, out=pinned.numpy())
    return torch.split_with_sizes(pinned.to(device, non_blocking=True), lengths)


def like(made: Tensor, given: Tensor, **changes: Any) -> Tensor:
    """``made`` as the subclass of tensors that ``given`` is, with its attributes; those named in ``changes`` are new."""
    if type(given) is Tensor:
        return made
    dressed = made.as_subclass(type(given))
    known = vars(given)
    vars(dressed).update(known, **{name: value for name, value in changes.items() if name in known})
    return dressed


def _counted_from_one(planes: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """The first of them that holds anything, flat, and how many elements in memory each begins behind that one."""
    one = next((plane for plane in planes if plane.numel()), planes[0])
    start = one.data_ptr()
    size = one.itemsize
    return one.view(-1), [(plane.data_ptr() - start) // size for plane in planes]


def _spans(firsts: Sequence[int], samples: Sequence[int], counts: Sequence[int], sides: Sequence[tuple[int, int]]) -> Array:
    """What ``MaskPlaces`` knows of each image, flat: of those that have masks, whose first elements these are."""
    found = [(0, 0, 0)] * len(sides)
    before = 0
    for first, sample, count in zip(firsts, samples, counts, strict=True):
        height, width = sides[sample]
        # Its masks are counted on from those of the images before it, and begin as many areas on.
        found[sample] = first - before * height * width, height, width
        before += count
    return np.array(found, np.int64).ravel()


def _checked(
    masks: Sequence[Any], samples: Sequence[int], sides: Sequence[tuple[int, int]], device: torch.device
) -> tuple[Sequence[Tensor], list[int]]:
    """Masks as (n, H, W) each, themselves if all have this shape; and each n."""
    if are_tensors(masks) and len(dtypes(masks)) < 2 and devices(masks) <= {device}:
        known = shapes(masks)
        if all(len(shape) == 3 and shape[1:] == sides[sample] for shape, sample in zip(known, samples, strict=True)):
            return masks, [shape[0] for shape in known]
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
