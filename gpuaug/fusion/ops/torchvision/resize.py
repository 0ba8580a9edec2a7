"""torchvision's resizes, of whole images and of windows in them."""

import math
from typing import Any, ClassVar

import numpy as np
from torch import nn
from torchvision.transforms import v2

from gpuaug.fusion.ops import resize
from gpuaug.fusion.ops.base import ANY_SIDES, OpDraws, Size
from gpuaug.fusion.ops.geometry import ResampleOp, changes_size_by_chance
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.ops.torchvision.base import LEAST_AND_LARGEST, Call, TorchvisionOp, Units, interpolation_of, whole_sides


class _Resampling(TorchvisionOp, ResampleOp):
    """What is common to a resize of the image and of a window: pixels are squares, and antialiasing is the transform's.

    Masks are resized by torch's ``"nearest"``, which takes the pixel at the first corner.
    """

    half_pixel_centers = True
    mask_half_pixel_centers = False

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        TorchvisionOp.__init__(self, name, transform, units)
        mode = interpolation_of(transform)
        self.nearest = mode == "nearest-exact"
        if transform.antialias:
            self.set_antialias(cubic=mode == "bicubic")

    def unsupported(self) -> str | None:
        """Why the transform is left to torchvision, or ``None``."""
        mode = interpolation_of(self.module)
        if mode == "bicubic" and not self.filter:
            return "interpolation='bicubic' without antialias"
        return None if mode in ("nearest-exact", "bilinear", "bicubic") else f"interpolation={mode!r}"

    def _how(self) -> dict[str, Any]:
        transform: Any = self.module
        return {"interpolation": transform.interpolation, "antialias": transform.antialias}


class ResizedCrop(_Resampling, resize.ResizedCrop):
    """RandomResizedCrop: where none of ten windows fits, as much of the image's middle as the ratios allow."""

    centred = True

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        _Resampling.__init__(self, name, transform, units)
        self._height, self._width = transform.size
        self._scale = tuple(float(bound) for bound in transform.scale)
        self.areas = self._scale[0], self._scale[1] - self._scale[0]
        ratios = [float(bound) for bound in transform.ratio]
        first, last = math.log(ratios[0]), math.log(ratios[1])
        self.log_aspect = first / 2, (last - first) / 2
        self.ratios = min(ratios), max(ratios)

    def unsupported_size(self, size: Size) -> str | None:
        """A skipped sample keeps the size that it came with."""
        return changes_size_by_chance(self, size=size)

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The window, and the size it is resized to."""
        names = {"top": "y", "left": "x", "height": "height", "width": "width"}
        window = {name: int(drawn[own][sample]) for name, own in names.items()}
        return [("resized_crop", {**window, "size": [self._height, self._width], **self._how()})]


class _WholeResize(_Resampling, resize.Resize):
    """A resize of the whole image, which masks follow by the pixel at the centre where images take it."""

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        _Resampling.__init__(self, name, transform, units)
        self.mask_half_pixel_centers = self.nearest

    def unsupported_size(self, size: Size) -> str | None:
        """A skipped sample keeps the size that it came with, and an image has pixels."""
        if any(np.any(np.less(side, 1)) for out in self.out_bounds(size) for side in (out.height, out.width)):
            return "comes out without pixels"
        return changes_size_by_chance(self, size=size)


class Resize(_WholeResize):
    """Resize: to two sides, or the shorter side to one with a bound for the longer."""

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        _WholeResize.__init__(self, name, transform, units)
        self.settings = {"size": transform.size if transform.size is not None else f"at most {transform.max_size}"}

    def out(self, size: Size) -> Size:
        """The size given, or one side of it with the other in proportion, rounded down."""
        transform: Any = self.module
        wanted = [transform.size] if isinstance(transform.size, int) else transform.size  # a subclass may set a number
        most = transform.max_size
        if wanted is not None and len(wanted) == 2:
            return size.to(int(wanted[0]), int(wanted[1]))
        if wanted is not None:
            return shorter_side_to(size, wanted[0], most)
        short, long = np.minimum(size.height, size.width), np.maximum(size.height, size.width)
        return _sides(size, most * short / long, np.full_like(long, most))

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The resize."""
        transform: Any = self.module
        return [("resize", {"size": transform.size, "max_size": transform.max_size, **self._how()})]


class _DrawnResize(_WholeResize):
    """A resize of each image to a size that it draws: those of a batch differ, until an op gives them one."""

    draws_size = True
    drawn_as: ClassVar[str] = "size"
    """The name of the number that is drawn."""

    def _number(self, uniform: Any) -> Any:
        """What is drawn, from numbers in [0, 1), and larger for larger ones."""
        raise NotImplementedError

    def _out(self, number: Any, size: Size) -> Size:
        """The size for what was drawn."""
        raise NotImplementedError

    def out(self, size: Size) -> Size:
        """One of each sample's own."""
        return size.to(*ANY_SIDES)

    def out_drawn(self, drawn: OpDraws, size: Size) -> Size:
        """The size that each sample drew, or its own size where it is skipped."""
        out = self._out(drawn[self.drawn_as], size)
        applies = drawn["apply_mask"]
        return size.to(np.where(applies, out.height, size.height), np.where(applies, out.width, size.width))

    def out_bounds(self, size: Size) -> tuple[Size, ...]:
        """Those of the least and of the largest number, and the images where samples may be skipped."""
        drawn = tuple(self._out(self._number(uniform), size) for uniform in LEAST_AND_LARGEST)
        return (*drawn, size) if self.is_random else drawn

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """One number a sample."""
        return {self.drawn_as: self._number(sampler.uniform())}

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The resize."""
        out = self.out_drawn(self.of_sample(drawn, sample), size.of(sample)).of(0)
        return [("resize", {"size": [out.height, out.width], **self._how()})]


class RandomResize(_DrawnResize):
    """RandomResize: the shorter side to a whole number below ``max_size``."""

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        _DrawnResize.__init__(self, name, transform, units)
        self._least = int(transform.min_size)
        self._count = int(transform.max_size) - int(transform.min_size)
        self.settings = {"size": f"between {self._least} and {transform.max_size - 1} at the shorter side"}

    def unsupported(self) -> str | None:
        """Why the transform is left to torchvision, or ``None``."""
        return super().unsupported() if self._count > 0 else "max_size is not larger than min_size, and is never drawn itself"

    def _number(self, uniform: Any) -> Any:
        return np.floor(uniform * np.float32(self._count)).astype(np.int64) + self._least

    def _out(self, number: Any, size: Size) -> Size:
        return shorter_side_to(size, number)


class RandomShortestSize(_DrawnResize):
    """RandomShortestSize: the shorter side to one of some, or the longer to ``max_size`` where that is smaller."""

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        _DrawnResize.__init__(self, name, transform, units)
        self._choices = np.sort(transform.min_size)
        self._most = transform.max_size
        self.settings = {"size": f"one of {transform.min_size} at the shorter side"}

    def unsupported(self) -> str | None:
        """Why the transform is left to torchvision, or ``None``."""
        return super().unsupported() if len(self._choices) else "min_size is empty"

    def _number(self, uniform: Any) -> Any:
        return self._choices[np.floor(uniform * np.float32(len(self._choices))).astype(np.int64)]

    def _out(self, number: Any, size: Size) -> Size:
        scale = number / np.minimum(size.height, size.width)
        if self._most is not None:
            scale = np.minimum(scale, self._most / np.maximum(size.height, size.width))
        return whole_sides(size, size.height * scale, size.width * scale)


class ScaleJitter(_DrawnResize):
    """ScaleJitter: into ``target_size``, times a number; in float32, as torchvision computes it."""

    drawn_as = "scale"

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        _DrawnResize.__init__(self, name, transform, units)
        self._target, (self._least, most) = transform.target_size, transform.scale_range
        self._range = np.float32(most - self._least)
        self.settings = {"size": f"between {self._least} and {most} of {tuple(self._target)}"}

    def _number(self, uniform: Any) -> Any:
        return uniform * self._range + np.float32(self._least)

    def _out(self, number: Any, size: Size) -> Size:
        # As torchvision has it: the first of the two goes with the width.
        fitting = np.minimum(self._target[1] / size.height, self._target[0] / size.width)
        scale = np.float32(fitting) * number
        return whole_sides(size, np.float32(size.height) * scale, np.float32(size.width) * scale)


def shorter_side_to(size: Size, shorter: Any, most: int | None = None) -> Size:
    """Images whose shorter side is ``shorter``, one number or one each, and whose longer side is at most ``most``."""
    short, long = np.minimum(size.height, size.width), np.maximum(size.height, size.width)
    longer = (shorter * long / short).astype(np.int64)
    shorter = np.broadcast_to(shorter, longer.shape)
    if most is not None:
        over = longer > most
        shorter = np.where(over, (most * shorter / np.maximum(longer, 1)).astype(np.int64), shorter)
        longer = np.minimum(longer, most)
    return _sides(size, shorter, longer)


def _sides(size: Size, shorter: Any, longer: Any) -> Size:
    """Images whose sides are these, upright where they were."""
    upright = np.less_equal(size.width, size.height)
    return whole_sides(size, np.where(upright, longer, shorter), np.where(upright, shorter, longer))


LOWERED: dict[type[nn.Module], type[TorchvisionOp]] = {
    v2.RandomResizedCrop: ResizedCrop,
    v2.Resize: Resize,
    v2.RandomResize: RandomResize,
    v2.RandomShortestSize: RandomShortestSize,
    v2.ScaleJitter: ScaleJitter,
}
