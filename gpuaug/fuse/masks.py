"""Masks of instances: so many for each image, and taken through the passes together."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.errors import ArgumentError, ArgumentTypeError, DeviceError
from gpuaug.fuse import executors
from gpuaug.fuse.ops import Array, Size
from gpuaug.fuse.plan import Plan


class MaskList:
    """Masks of any number for each image, on their way through the passes as one tensor.

    Args:
        masks: (n, H, W) or (H, W) each, of one type.
        samples: Which image each belongs to.
        size: Of the images.
        device: That of the images.

    Raises:
        ArgumentTypeError: If one is no tensor, or of another type than the first.
        ArgumentError: If one is not of the size of its image.
        DeviceError: If one is not where the images are.
    """

    def __init__(self, masks: Sequence[Any], samples: Sequence[int], size: Size, device: torch.device) -> None:
        planes = _checked(masks, samples, size, device)
        self._given = masks
        self._counts = [plane.shape[0] for plane in planes]
        self._as_given = all(map(operator.is_, planes, masks))
        self._samples = np.asarray(samples, np.int64)
        self._size = size
        self._owners: Tensor | None = None
        self._places: Tensor | None = None
        if not size.ragged:
            self._values = torch.cat(planes)[:, None]
            return
        if executors.name(device) == "triton":
            # A kernel reads them where they lie, so nothing has to be laid together.
            self._planes = [plane.contiguous() for plane in planes]
            self._values, self._firsts = _counted_from_one(self._planes)
        else:
            self._values = torch.cat([plane.flatten() for plane in planes])
            self._firsts = np.cumsum([0, *(plane.numel() for plane in planes[:-1])])

    def numbers(self) -> Array:
        """What has to be on the device before masks can be moved, flat: which image each belongs to, and where it is."""
        if not self._size.ragged:
            return np.repeat(self._samples, self._counts)
        counts = np.asarray(self._counts)
        spans = np.empty((len(counts), 5), np.int64)
        spans[:, 1], spans[:, 2] = self._size.height[self._samples], self._size.width[self._samples]
        spans[:, 3], spans[:, 4] = self._samples, spans[:, 1] * spans[:, 2]
        # Masks of one image lie behind one another: each begins as many areas on as there were masks before it.
        spans[:, 0] = self._firsts - (counts.cumsum() - counts) * spans[:, 4]
        places = spans.repeat(counts, 0)
        places[:, 0] += np.arange(len(places)) * places[:, 4]
        return places[:, :4].ravel()

    def take(self, numbers: Tensor) -> None:
        """Take :meth:`numbers`, as they are on the device."""
        self._places = numbers.view(-1, 4) if self._size.ragged else None
        self._owners = numbers if self._places is None else self._places[:, 3]

    def run(self, plan: Plan, table: Tensor) -> None:
        """Take all masks through the passes of a plan.

        Cost:
            A launch for each pass, and some for erasing; and one that takes each mask's row, unless the first pass is the only
            one and masks differ in size.
        """
        assert self._owners is not None
        rows: Tensor | None = None
        for step in plan.passes:
            if self._places is not None:
                self._values = executors.run_mask(step, self._values, table, self._places)
                # What comes out of a pass has one size.
                self._places = None
                continue
            rows = table.index_select(0, self._owners) if rows is None else rows
            self._values = executors.run_mask(step, self._values, rows)

    def results(self) -> Sequence[Tensor]:
        """The masks of each, as they were given."""
        made = torch.split_with_sizes(self._values[:, 0], self._counts)
        if self._as_given:
            return made
        return [like(part if mask.ndim == 3 else part[0], mask) for part, mask in zip(made, self._given, strict=True)]


def to_device(arrays: Sequence[Array], device: torch.device) -> tuple[Tensor, ...]:
    """Whole numbers, each array flat, in one pinned copy that nothing waits for."""
    lengths = [len(array) for array in arrays]
    pinned = torch.empty(sum(lengths), dtype=torch.int64, pin_memory=device.type == "cuda")
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


def _counted_from_one(planes: Sequence[Tensor]) -> tuple[Tensor, Array]:
    """The first of them that holds anything, flat, and how many elements in memory each begins behind that one."""
    one = next((plane for plane in planes if plane.numel()), planes[0])
    start, size = one.data_ptr(), one.itemsize
    return one.view(-1), np.array([(plane.data_ptr() - start) // size for plane in planes], np.int64)


def _checked(masks: Sequence[Any], samples: Sequence[int], size: Size, device: torch.device) -> list[Tensor]:
    """Masks as (n, H, W) each, plain tensors."""
    planes: list[Tensor] = []
    # As plain numbers, which are faster to compare.
    every = (side.tolist() if isinstance(side, np.ndarray) else [side] * size.batch for side in (size.height, size.width))
    sides = list(zip(*every, strict=True))
    for mask, sample in zip(masks, samples, strict=True):
        if not isinstance(mask, Tensor):
            raise ArgumentTypeError(
                f"masks of sample {sample} must be a tensor, got {type(mask).__name__}. "
                "Stack those of one image: torch.stack(…)."
            )
        plane = mask if type(mask) is Tensor else mask.as_subclass(Tensor)
        shape = tuple(plane.shape)
        if len(shape) not in (2, 3):
            raise ArgumentError(
                f"masks of sample {sample} must be (n, H, W) or (H, W), got {shape}. "
                "Where an image has none: torch.zeros(0, H, W)."
            )
        if shape[-2:] != sides[sample]:
            height, width = sides[sample]
            raise ArgumentError(
                f"masks of sample {sample} must be of its image's size, {height}x{width}, got {shape}. Resize them to it first."
            )
        if plane.device != device:
            raise DeviceError(
                f"masks of sample {sample} must be on {device}, where the images are, got {plane.device}. "
                "Move them there first."
            )
        if planes and plane.dtype != planes[0].dtype:
            raise ArgumentTypeError(
                f"masks of sample {sample} must be of {planes[0].dtype}, as those of sample {samples[0]}, got {plane.dtype}. "
                "Give all masks of a batch one type."
            )
        planes.append(plane if len(shape) == 3 else plane[None])
    return planes
