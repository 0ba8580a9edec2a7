"""Flips, crops, resizes and padding."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from kornia import augmentation as K
from kornia.constants import Resample
from torch import Tensor, nn

from gpuaug.fuse.draws import Source, further, open_gate
from gpuaug.fuse.geometry import (
    Axis,
    Edge,
    GatherOp,
    IndexMap,
    IndexOp,
    ResampleOp,
    Resampling,
    changes_size_by_chance,
    length_of,
    scale_of,
)
from gpuaug.fuse.ops import Array, Drawn, Size


class _Flip(IndexOp):
    axis: str

    def map(self, drawn: Drawn, size: Size) -> IndexMap:
        """Backwards along one axis where the gate is open."""
        gate = drawn["gate"]
        length = size.width if self.axis == "x" else size.height
        flipped = Axis(np.where(gate, -1.0, 1.0), np.where(gate, length - 1.0, 0.0), 0.0, length_of(length))
        if self.axis == "x":
            return IndexMap(flipped, whole(size.height))
        return IndexMap(whole(size.width), flipped)

    def matrix(self, drawn: Drawn, size: Size) -> Array:
        """X → W - 1 - x, or the same for y, where the gate is open."""
        k, length = (0, size.width) if self.axis == "x" else (1, size.height)
        matrix = np.tile(np.eye(3), (size.batch, 1, 1))
        matrix[drawn["gate"], k, k] = -1.0
        matrix[:, k, 2] = np.where(drawn["gate"], length - 1.0, 0.0)
        return matrix


class HorizontalFlip(_Flip):
    """RandomHorizontalFlip."""

    axis = "x"

    def describe(self) -> str:
        """In a few words."""
        return "flip left and right"


class VerticalFlip(_Flip):
    """RandomVerticalFlip."""

    axis = "y"

    def describe(self) -> str:
        """In a few words."""
        return "flip up and down"


class Crop(IndexOp):
    """RandomCrop by slices, with whatever padding it is given."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self._height, self._width = (int(side) for side in self.settings["size"])
        self.fill = self.settings["fill"]

    @classmethod
    def cannot(cls, module: nn.Module) -> str | None:
        """Why this module is left to Kornia, or ``None``."""
        flags: dict[str, Any] = module.flags  # type: ignore[assignment]
        if flags["cropping_mode"] != "slice":
            return f"cropping_mode={flags['cropping_mode']!r}"
        padded = flags["padding"] is not None or flags["pad_if_needed"]
        return _cannot_pad("padding_mode", flags["padding_mode"], "fill", flags["fill"] if padded else 0)

    @property
    def edge(self) -> Edge:  # type: ignore[override]
        """What padding holds; nothing where there is none."""
        padded = self.settings["padding"] is not None or self.settings["pad_if_needed"]
        return self.settings["padding_mode"] if padded else ""

    def _padding(self, size: Size) -> Sequence[Any]:
        """Left, right, above and below: numbers, or arrays of them where images differ in size."""
        # Of an image that the crop fits into, so without what is padded where it does not.
        always: list[int] = self.module.compute_padding((1, 1, self._height, self._width))  # type: ignore[operator]
        if not self.settings["pad_if_needed"]:
            return always
        across, down = self._width - size.width, self._height - size.height
        lacking = (across, across, down, down)
        if size.ragged:
            return [np.where(lack > 0, np.maximum(lack, pad), pad) for lack, pad in zip(lacking, always, strict=True)]
        return [max(lack, pad) if lack > 0 else pad for lack, pad in zip(lacking, always, strict=True)]

    def _canvas(self, size: Size) -> Size:
        left, right, top, bottom = self._padding(size)
        return size.to(size.height + top + bottom, size.width + left + right)

    def refuses(self, size: Size) -> str | None:
        """A crop larger than its canvas resizes, in Kornia; and reflection reaches no further than the image."""
        canvas = self._canvas(size)
        if np.any(self._height > canvas.height) or np.any(self._width > canvas.width):
            return f"crops {self._height}x{self._width} out of {canvas.height}x{canvas.width}, which Kornia resizes"
        left, right, top, bottom = self._padding(size)
        if any(np.any(np.less(side, 0)) for side in (left, right, top, bottom)):
            return "negative padding"
        across, down = np.maximum(left, right), np.maximum(top, bottom)
        if self.edge == "reflect" and (np.any(across >= size.width) or np.any(down >= size.height)):
            return "reflects further than the image is wide"
        return changes_size_by_chance(self, size=size)

    def out(self, size: Size) -> Size:
        """The crop's."""
        return size.to(self._height, self._width)

    def draw_parameters(self, source: Source, size: Size) -> Drawn:
        """Whole starts, evenly among those that fit."""
        canvas = self._canvas(size)
        across, down = source.uniform(2)
        return {
            "x": np.floor(across * np.float32(canvas.width - self._width + 1)),
            "y": np.floor(down * np.float32(canvas.height - self._height + 1)),
        }

    def kornia_parameters(self, drawn: Drawn, size: Size) -> dict[str, Tensor]:
        """Corners in the padded image, and in the crop."""
        canvas = self._canvas(size)
        height, width = np.float32(self._height), np.float32(self._width)
        return {
            **corners(drawn["x"], drawn["y"], width, height, self._width, self._height, canvas),
            "padding_size": torch.tensor(self._padding(size)).expand(size.batch, -1),
            "forward_input_shape": torch.tensor([size.batch, size.channels, canvas.height, canvas.width]),
        }

    def params(self, drawn: Drawn, size: Size) -> dict[str, Tensor]:
        """As Kornia records them: ``forward_input_shape`` is the padded image's."""
        if size.batch == 0:
            return super().params(drawn, size)
        return {**super().params(drawn, size), **self.kornia_parameters(drawn, size)}

    def map(self, drawn: Drawn, size: Size) -> IndexMap:
        """Shifted by the start of the crop, less the padding; a batch that is skipped has the crop's size already."""
        left, _, top, _ = self._padding(size)
        gate = drawn["gate"]
        return IndexMap(
            Axis(1.0, np.where(gate, drawn["x"] - left, 0.0), 0.0, length_of(size.width)),
            Axis(1.0, np.where(gate, drawn["y"] - top, 0.0), 0.0, length_of(size.height)),
        )

    def matrix(self, drawn: Drawn, size: Size) -> Array:
        """The shift."""
        shifts = self.map(drawn, size)
        matrix = np.tile(np.eye(3), (size.batch, 1, 1))
        matrix[:, 0, 2] = -shifts.x.offset
        matrix[:, 1, 2] = -shifts.y.offset
        return matrix

    def describe(self) -> str:
        """In a few words."""
        return f"crop {self._height}x{self._width}"


class CenterCrop(IndexOp):
    """CenterCrop by slices."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self._height, self._width = (int(side) for side in self.settings["size"])

    @classmethod
    def cannot(cls, module: nn.Module) -> str | None:
        """Why this module is left to Kornia, or ``None``."""
        mode = module.flags["cropping_mode"]  # type: ignore[index]
        return None if mode == "slice" else f"cropping_mode={mode!r}"

    def refuses(self, size: Size) -> str | None:
        """A crop larger than the image is Kornia's to complain about."""
        if np.any(self._height > size.height) or np.any(self._width > size.width):
            return f"crops {self._height}x{self._width} out of {size.height}x{size.width}"
        return changes_size_by_chance(self, size=size)

    def out(self, size: Size) -> Size:
        """The crop's."""
        return size.to(self._height, self._width)

    def kornia_parameters(self, drawn: Drawn, size: Size) -> dict[str, Tensor]:
        """Corners, as whole numbers."""
        start = np.full(size.batch, (size.width - self._width) // 2), np.full(size.batch, (size.height - self._height) // 2)
        made = corners(*start, self._width, self._height, self._width, self._height, size)
        return {name: value.long() for name, value in made.items()}

    def map(self, drawn: Drawn, size: Size) -> IndexMap:
        """Shifted to the centre."""
        left, top = (size.width - self._width) // 2, (size.height - self._height) // 2
        return IndexMap(
            Axis(1.0, length_of(left), 0.0, length_of(size.width)), Axis(1.0, length_of(top), 0.0, length_of(size.height))
        )

    def matrix(self, drawn: Drawn, size: Size) -> Array:
        """The shift."""
        matrix = np.tile(np.eye(3), (_own(size), 1, 1))
        matrix[:, 0, 2], matrix[:, 1, 2] = -((size.width - self._width) // 2), -((size.height - self._height) // 2)
        return matrix

    def describe(self) -> str:
        """In a few words."""
        return f"centre crop {self._height}x{self._width}"


class PadTo(IndexOp):
    """PadTo: padding on the right and below, or a crop there."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self.edge = self.settings["pad_mode"]
        self.fill = self.settings["pad_value"]

    @classmethod
    def cannot(cls, module: nn.Module) -> str | None:
        """Why this module is left to Kornia, or ``None``."""
        flags: dict[str, Any] = module.flags  # type: ignore[assignment]
        return _cannot_pad("pad_mode", flags["pad_mode"], "pad_value", flags["pad_value"])

    def out(self, size: Size) -> Size:
        """The size padded to; without ``crop_if_exceeds`` at least that of the image."""
        height, width = self.settings["size"]
        if not self.settings.get("crop_if_exceeds", True):
            larger = np.maximum if size.ragged else max
            height, width = larger(height, size.height), larger(width, size.width)
        return size.to(height, width)

    def refuses(self, size: Size) -> str | None:
        """Reflection reaches no further than the image; Kornia says so."""
        out = self.out(size)
        if self.edge == "reflect" and (np.any(out.width >= 2 * size.width) or np.any(out.height >= 2 * size.height)):
            return "reflects further than the image is wide"
        if self.edge != "constant" and (np.any(out.width < size.width) or np.any(out.height < size.height)):
            return f"pad_mode={self.edge!r} while cropping"
        return None

    def map(self, drawn: Drawn, size: Size) -> IndexMap:
        """Every pixel stays where it is."""
        return IndexMap(whole(size.width), whole(size.height))

    def describe(self) -> str:
        """In a few words."""
        return "pad to {}x{}".format(*self.settings["size"])


def _cannot_pad(mode_name: str, mode: str, value_name: str, value: Any) -> str | None:
    if mode not in ("constant", "replicate", "reflect"):
        return f"{mode_name}={mode!r}"
    if mode != "constant" and value != 0:  # which Kornia refuses, and says so
        return f"{value_name}={value!r} with {mode_name}={mode!r}"
    return None


WINDOWS = 10
"""Windows that are drawn for a resized crop, of which the first that fits the image is taken."""


class ResizedCrop(ResampleOp):
    """RandomResizedCrop by slices."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self._height, self._width = (int(side) for side in self.settings["size"])
        self.nearest = self.settings["resample"] == Resample.NEAREST
        self.half = not self.settings["align_corners"]
        generator: Any = module._param_generator
        self._scale = tuple(float(bound) for bound in generator.scale)
        ratios = [float(bound) for bound in generator.ratio]
        self.areas = self._scale[0], self._scale[1] - self._scale[0]
        """The least share of an image's area, and what may be added to it."""
        first, last = math.log(ratios[0]), math.log(ratios[1])
        self.shapes = first / 2, (last - first) / 2
        """The logarithm of the root of the first bound of the ratio, and what may be added to it."""
        self.ratios = min(ratios), max(ratios)
        """The least and the largest of width by height."""

    @classmethod
    def cannot(cls, module: nn.Module) -> str | None:
        """Why this module is left to Kornia, or ``None``."""
        flags: dict[str, Any] = module.flags  # type: ignore[assignment]
        return None if flags["cropping_mode"] == "slice" else f"cropping_mode={flags['cropping_mode']!r}"

    def refuses(self, size: Size) -> str | None:
        """Skipped by chance, the output would have another size."""
        return _plain_cubic(self) or changes_size_by_chance(self, size=size)

    def shrinks(self, size: Size) -> float:
        """The largest crop that may be drawn, by the output."""
        area, (narrowest, widest) = self._scale[1] * size.height * size.width, self.ratios
        across = np.minimum(np.sqrt(area * widest), size.width) / self._width
        down = np.minimum(np.sqrt(area / narrowest), size.height) / self._height
        return float(np.max(np.maximum(across, down)))

    def out(self, size: Size) -> Size:
        """The size resized to."""
        return size.to(self._height, self._width)

    def draw_parameters(self, source: Source, size: Size) -> Drawn:
        """The first of ten windows that fits the image, else as much of the image as the ratios allow."""
        numbers = source.uniform(4)
        share, shape, x, y = numbers
        # Most fit at once, so the other nine are drawn for those that do not.
        across, down = self._sides(*self._window(share, shape), size)
        misses = np.flatnonzero((across > size.width) | (down > size.height) | (np.minimum(across, down) < 1))
        if misses.size:
            missed = size.to(size.height[misses], size.width[misses]) if size.ragged else size
            others = self._window(*further(numbers[:, misses], WINDOWS - 1))
            across[misses], down[misses] = self._fitting(*others, missed)
        return {
            "x": np.floor(x * (np.float32(size.width + 1) - across)),
            "y": np.floor(y * (np.float32(size.height + 1) - down)),
            "width": across,
            "height": down,
        }

    def _window(self, share: Array, shape: Array) -> tuple[Array, Array]:
        """By how much of an image's own side a window is long, and by how much it is wider, from numbers in [0, 1)."""
        (least, by), (first, upto) = self.areas, self.shapes
        length = np.sqrt(share * np.float32(by) + np.float32(least))
        # In float64, whose last digits are not the same everywhere, but do not reach those of float32.
        return length, np.exp((shape * np.float32(upto) + np.float32(first)).astype(np.float64)).astype(np.float32)

    def _sides(self, length: Array, root: Array, size: Size) -> tuple[Array, Array]:
        """Whole sides of windows."""
        side = length * np.sqrt(np.float32(size.height * size.width))
        return np.rint(side * root), np.rint(side / root)

    def _fitting(self, lengths: Array, roots: Array, size: Size) -> tuple[Array, Array]:
        """Sides of each sample's first window that fits, of some, (K, B)."""
        wide, high = self._sides(lengths, roots, size)
        fits = (wide > 0) & (wide <= size.width) & (high > 0) & (high <= size.height)
        first = fits.argmax(0)
        across, down = (np.take_along_axis(sides, first[None], 0)[0] for sides in (wide, high))
        lost = np.flatnonzero(~fits.any(0))
        if lost.size:
            rest = size.to(size.height[lost], size.width[lost]) if size.ragged else size
            across[lost], down[lost] = self._fallback(rest)
        return across, down

    def _fallback(self, size: Size) -> tuple[Array, Array]:
        """As much of the image as the ratios allow."""
        height, width = np.float32(size.height), np.float32(size.width)
        narrowest, widest = np.float32(self.ratios[0]), np.float32(self.ratios[1])
        ratio = width / height
        across = np.where(ratio > widest, np.rint(height * widest), width)
        down = np.where(ratio < narrowest, np.rint(width / narrowest), height)
        return np.maximum(across, 1), np.maximum(down, 1)

    def unmoved(self, batch: int) -> Drawn:
        """Draws that leave images of the output's size as they are."""
        zeros, ones = np.zeros(batch, dtype=np.float32), np.ones(batch, dtype=np.float32)
        return {"x": zeros, "y": zeros, "width": self._width * ones, "height": self._height * ones, "gate": open_gate(batch)}

    def kornia_parameters(self, drawn: Drawn, size: Size) -> dict[str, Tensor]:
        """Corners in the image, and in the output."""
        return corners(drawn["x"], drawn["y"], drawn["width"], drawn["height"], self._width, self._height, size)

    def resampling(self, drawn: Drawn, size: Size, half: bool) -> Resampling:
        """The crop, onto the whole output."""
        return Resampling(
            scale_of(drawn["width"], self._width, half),
            drawn["x"],
            drawn["width"],
            scale_of(drawn["height"], self._height, half),
            drawn["y"],
            drawn["height"],
        )

    def matrix(self, drawn: Drawn, size: Size) -> Array:
        """Onto the output's corners, or its edges, as the module is set."""
        matrix = np.tile(np.eye(3), (size.batch, 1, 1))
        half = self.half or self.nearest
        for k, start, count, target in ((0, "x", "width", self._width), (1, "y", "height", self._height)):
            set_resize(matrix, k, drawn[start].astype(np.float64), drawn[count].astype(np.float64), target, half)
        return matrix

    def describe(self) -> str:
        """In a few words."""
        return f"crop and resize to {self._height}x{self._width}"


class Resize(ResampleOp):
    """Resize without antialiasing."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self.nearest = self.settings["resample"] == Resample.NEAREST
        self.half = not self.settings["align_corners"]

    @classmethod
    def cannot(cls, module: nn.Module) -> str | None:
        """Why this module is left to Kornia, or ``None``."""
        flags: dict[str, Any] = module.flags  # type: ignore[assignment]
        return "antialias=True, which in Kornia is a blur" if flags["antialias"] else None

    def refuses(self, size: Size) -> str | None:
        """Skipped by chance, the output would have another size; and one without pixels is Kornia's to complain about."""
        out = self.out(size)
        if np.any(np.equal(out.height, 0)) or np.any(np.equal(out.width, 0)):
            return "comes out without pixels"
        return _plain_cubic(self) or changes_size_by_chance(self, size=size)

    def shrinks(self, size: Size) -> float:
        """The image, by the output."""
        out = self.out(size)
        return float(np.max(np.maximum(size.width / out.width, size.height / out.height)))

    def out(self, size: Size) -> Size:
        """The size given, or one side of it with the other in proportion."""
        wanted, side = self.settings["size"], self.settings["side"]
        if not isinstance(wanted, int):
            return size.to(int(wanted[0]), int(wanted[1]))
        ratio = size.width / size.height
        # One side is as wanted: the height, or the width.
        high = np.logical_xor(side == "short", ratio < 1.0) if side not in ("vert", "horz") else side == "vert"
        if size.ragged:
            inverse = (wanted / ratio).astype(np.int64)
            return size.to(np.where(high, wanted, inverse), np.where(high, (wanted * ratio).astype(np.int64), wanted))
        return size.to(wanted, int(wanted * ratio)) if high else size.to(int(wanted / ratio), wanted)

    def kornia_parameters(self, drawn: Drawn, size: Size) -> dict[str, Tensor]:
        """Corners of the image, and of the output."""
        out, zeros = self.out(size), np.zeros(size.batch, dtype=np.float32)
        return corners(zeros, zeros, np.float32(size.width), np.float32(size.height), out.width, out.height, size)

    def resampling(self, drawn: Drawn, size: Size, half: bool) -> Resampling:
        """The whole image, onto the whole output."""
        out = self.out(size)
        width, height = length_of(size.width), length_of(size.height)
        return Resampling(scale_of(width, out.width, half), 0.0, width, scale_of(height, out.height, half), 0.0, height)

    def matrix(self, drawn: Drawn, size: Size) -> Array:
        """Onto the output's corners, or its edges, as the module is set."""
        out, half, matrix = self.out(size), self.half or self.nearest, np.tile(np.eye(3), (_own(size), 1, 1))
        set_resize(matrix, 0, np.zeros(1), np.atleast_1d(size.width), out.width, half)
        set_resize(matrix, 1, np.zeros(1), np.atleast_1d(size.height), out.height, half)
        return matrix

    def describe(self) -> str:
        """In a few words."""
        return f"resize to {self.settings['size']}"


def _plain_cubic(op: ResampleOp) -> str | None:
    """Why a crop or resize is left to Kornia that is to be bicubic without antialiasing."""
    return "resample='bicubic'" if op.settings["resample"] == Resample.BICUBIC and not op.filter else None


def whole(length: Any) -> Axis:
    """An axis left as it is."""
    return Axis(1.0, 0.0, 0.0, length_of(length))


def _own(size: Size) -> int:
    """How many matrices a batch has whose images are all treated alike: one, unless they differ in size."""
    return size.batch if size.ragged else 1


def corners(x: Any, y: Any, width: Any, height: Any, out_width: int, out_height: int, size: Size) -> dict[str, Tensor]:
    """The four corners of a window and of the output, clockwise from the top left, as Kornia's crops record them."""
    if size.batch == 0:
        return {"src": torch.zeros(0, 4, 2), "dst": torch.zeros(0, 4, 2)}
    right, bottom = x + width - 1, y + height - 1
    source = np.stack([np.stack(pair, -1) for pair in ((x, y), (right, y), (right, bottom), (x, bottom))], 1)
    right, bottom = out_width - 1, out_height - 1
    target = torch.tensor([[0.0, 0.0], [right, 0.0], [right, bottom], [0.0, bottom]])
    return {
        "src": torch.from_numpy(source.astype(np.float32)),
        "dst": target.repeat(size.batch, 1, 1),
        "input_size": torch.tensor([size.height, size.width]).expand(size.batch, -1),
        "output_size": torch.tensor([out_height, out_width]).expand(size.batch, -1),
    }


def set_resize(matrix: Array, k: int, start: Array, count: Array, target: Any, half: bool) -> None:
    """Write the scale and shift of axis ``k`` that take a window onto ``target`` pixels."""
    if half:
        scale = target / count
        matrix[:, k, k], matrix[:, k, 2] = scale, (0.5 - start) * scale - 0.5
    else:
        # One pixel has no extent to scale: it is shifted.
        scale = np.where((count > 1) & np.greater(target, 1), (target - 1) / np.maximum(count - 1, 1), 1.0)
        matrix[:, k, k], matrix[:, k, 2] = scale, -start * scale


LOWERED: dict[type[nn.Module], type[GatherOp]] = {
    K.RandomHorizontalFlip: HorizontalFlip,
    K.RandomVerticalFlip: VerticalFlip,
    K.RandomCrop: Crop,
    K.CenterCrop: CenterCrop,
    K.PadTo: PadTo,
    K.RandomResizedCrop: ResizedCrop,
    K.Resize: Resize,
}
