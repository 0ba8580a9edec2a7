"""Masks of instances: so many for each image, and taken through the passes together."""

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
        self._given = masks
        planes = []
        # As plain numbers, which are faster to compare.
        sides = np.broadcast_to(np.column_stack((size.height, size.width)), (size.batch, 2)).tolist()
        for mask, sample in zip(masks, samples, strict=True):
            _check(mask, sample, sides[sample], device)
            if mask.dtype != masks[0].dtype:
                raise ArgumentTypeError(
                    f"masks of sample {sample} must be of {masks[0].dtype}, as those of sample {samples[0]}, got {mask.dtype}. "
                    "Give all masks of a batch one type."
                )
            plain = mask if type(mask) is Tensor else mask.as_subclass(Tensor)
            planes.append(plain if plain.ndim == 3 else plain[None])
        self._counts = [plane.shape[0] for plane in planes]
        self._ragged = size.ragged
        if self._ragged:
            self._values = torch.cat([plane.flatten() for plane in planes])
        else:
            self._values = torch.cat(planes)[:, None]
        self._samples = np.repeat(np.asarray(samples, np.int64), self._counts)
        self._size = size
        self._owners: Tensor | None = None
        self._places: Tensor | None = None

    def numbers(self) -> list[Array]:
        """What has to be on the device before masks can be moved: which image each belongs to, and where it is."""
        if not self._ragged:
            return [self._samples]
        heights, widths = (np.asarray(side)[self._samples] for side in (self._size.height, self._size.width))
        ends = np.cumsum(heights * widths)
        return [self._samples, np.stack((ends - heights * widths, heights, widths), 1).ravel()]

    def take(self, numbers: Sequence[Tensor]) -> None:
        """Take :meth:`numbers`, as they are on the device."""
        self._owners = numbers[0]
        self._places = numbers[1].view(-1, 3) if self._ragged else None

    def run(self, plan: Plan, table: Tensor) -> None:
        """Take all masks through the passes of a plan.

        Cost:
            Two launches, one more for each pass after the first, and some for erasing.
        """
        assert self._owners is not None
        rows = table.index_select(0, self._owners)
        for step in plan.passes:
            self._values = executors.run_mask(step, self._values, rows, self._places)
            # What comes out of a pass has one size.
            self._places = None

    def results(self) -> list[Tensor]:
        """The masks of each, as they were given."""
        made = torch.split_with_sizes(self._values[:, 0], self._counts)
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


def _check(mask: Any, sample: int, sides: Sequence[int], device: torch.device) -> None:
    if not isinstance(mask, Tensor):
        raise ArgumentTypeError(
            f"masks of sample {sample} must be a tensor, got {type(mask).__name__}. Stack those of one image: torch.stack(…)."
        )
    shape = mask.shape
    if len(shape) not in (2, 3):
        raise ArgumentError(
            f"masks of sample {sample} must be (n, H, W) or (H, W), got {tuple(shape)}. "
            "Where an image has none: torch.zeros(0, H, W)."
        )
    height, width = sides
    if shape[-2] != height or shape[-1] != width:
        raise ArgumentError(
            f"masks of sample {sample} must be of its image's size, {height}x{width}, got {tuple(shape)}. "
            "Resize them to it first."
        )
    if mask.device != device:
        raise DeviceError(
            f"masks of sample {sample} must be on {device}, where the images are, got {mask.device}. Move them there first."
        )
