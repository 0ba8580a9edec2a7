"""Flips, crops, resizes and padding."""

import math
from typing import Any

import numpy as np
import torch
from kornia import augmentation as K
from kornia.constants import Resample
from torch import Tensor, nn

from gpuaug.fuse.draws import Source
from gpuaug.fuse.geometry import (
    Axis,
    Edge,
    GatherOp,
    IndexMap,
    IndexOp,
    ResampleOp,
    Resampling,
    changes_size_by_chance,
    scale_of,
)
from gpuaug.fuse.ops import Array, Drawn, Size


class _Flip(IndexOp):
    axis: str

    def map(self, drawn: Drawn, size: Size) -> IndexMap:
        """Backwards along one axis where the gate is open."""
        gate = drawn["gate"]
        length = size.width if self.axis == "x" else size.height
        flipped = Axis(np.where(gate, -1.0, 1.0), np.where(gate, length - 1.0, 0.0), 0.0, float(length))
        if self.axis == "x":
            return IndexMap(flipped, whole(size.height))
        return IndexMap(whole(size.width), flipped)

    def matrix(self, drawn: Drawn, size: Size) -> Array:
        """X → W - 1 - x, or the same for y, where the gate is open."""
        k, length = (0, size.width) if self.axis == "x" else (1, size.height)
        matrix = np.tile(np.eye(3), (size.batch, 1, 1))
        matrix[drawn["gate"], k, k] = -1.0
        matrix[drawn["gate"], k, 2] = length - 1.0
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

    def _padding(self, size: Size) -> list[int]:
        shape = (size.batch, size.channels, size.height, size.width)
        return self.module.compute_padding(shape)  # type: ignore[operator, no-any-return]

    def _canvas(self, size: Size) -> Size:
        left, right, top, bottom = self._padding(size)
        return size.to(size.height + top + bottom, size.width + left + right)

    def refuses(self, size: Size) -> str | None:
        """A crop larger than its canvas resizes, in Kornia; and reflection reaches no further than the image."""
        canvas = self._canvas(size)
        if self._height > canvas.height or self._width > canvas.width:
            return f"crops {self._height}x{self._width} out of {canvas.height}x{canvas.width}, which Kornia resizes"
        left, right, top, bottom = self._padding(size)
        if min(left, right, top, bottom) < 0:
            return "negative padding"
        if self.edge == "reflect" and (max(left, right) >= size.width or max(top, bottom) >= size.height):
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
            Axis(1.0, np.where(gate, drawn["x"] - left, 0.0), 0.0, float(size.width)),
            Axis(1.0, np.where(gate, drawn["y"] - top, 0.0), 0.0, float(size.height)),
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
        if self._height > size.height or self._width > size.width:
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
        return IndexMap(Axis(1.0, float(left), 0.0, float(size.width)), Axis(1.0, float(top), 0.0, float(size.height)))

    def matrix(self, drawn: Drawn, size: Size) -> Array:
        """The shift."""
        matrix = np.eye(3)
        matrix[0, 2], matrix[1, 2] = -((size.width - self._width) // 2), -((size.height - self._height) // 2)
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
            height, width = max(height, size.height), max(width, size.width)
        return size.to(height, width)

    def refuses(self, size: Size) -> str | None:
        """Reflection reaches no further than the image; Kornia says so."""
        out = self.out(size)
        if self.edge == "reflect" and (out.width >= 2 * size.width or out.height >= 2 * size.height):
            return "reflects further than the image is wide"
        if self.edge != "constant" and (out.width < size.width or out.height < size.height):
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


class ResizedCrop(ResampleOp):
    """RandomResizedCrop by slices."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self._height, self._width = (int(side) for side in self.settings["size"])
        self.nearest = self.settings["resample"] == Resample.NEAREST
        self.half = not self.settings["align_corners"]
        generator: Any = module._param_generator
        self._scale = tuple(float(bound) for bound in generator.scale)
        self._ratio = tuple(float(bound) for bound in generator.ratio)
        self._log_ratio = math.log(self._ratio[0]), math.log(self._ratio[1])

    @classmethod
    def cannot(cls, module: nn.Module) -> str | None:
        """Why this module is left to Kornia, or ``None``."""
        flags: dict[str, Any] = module.flags  # type: ignore[assignment]
        if flags["cropping_mode"] != "slice":
            return f"cropping_mode={flags['cropping_mode']!r}"
        if flags["resample"] == Resample.BICUBIC:
            return "resample='bicubic'"
        return None

    def refuses(self, size: Size) -> str | None:
        """Skipped by chance, the output would have another size."""
        return changes_size_by_chance(self, size=size)

    def out(self, size: Size) -> Size:
        """The size resized to."""
        return size.to(self._height, self._width)

    def draw_parameters(self, source: Source, size: Size) -> Drawn:
        """The first of ten candidates that fits the image, else as much of the image as the ratios allow."""
        height, width = size.height, size.width
        share, shape, x, y = source.uniform(4)
        across, down = self._sides(share, shape, size)
        # Most fit at once, so the other nine are drawn for those that do not.
        misses = np.flatnonzero((across > width) | (down > height) | (np.minimum(across, down) < 1))
        if misses.size:
            numbers = source.several(18, misses)
            wide, high = self._sides(numbers[:9], numbers[9:], size)
            fits = (wide > 0) & (wide <= width) & (high > 0) & (high <= height)
            choice, sample = fits.argmax(0), np.arange(misses.size)
            found = fits[choice, sample]
            most_across, most_down = self._fallback(size)
            across[misses] = np.where(found, wide[choice, sample], min(max(most_across, 1), width))
            down[misses] = np.where(found, high[choice, sample], min(max(most_down, 1), height))
        return {
            "x": np.floor(x * (width + 1 - across)),
            "y": np.floor(y * (height + 1 - down)),
            "width": across,
            "height": down,
        }

    def _sides(self, share: Array, shape: Array, size: Size) -> tuple[Array, Array]:
        """Whole sides of crops, from numbers in [0, 1) for their areas and for their ratios."""
        low, high = self._scale
        pixels = size.height * size.width
        side = np.sqrt(share * np.float32((high - low) * pixels) + np.float32(low * pixels))
        first, last = self._log_ratio
        root = np.exp(shape * np.float32((last - first) / 2) + np.float32(first / 2))
        return np.rint(side * root), np.rint(side / root)

    def _fallback(self, size: Size) -> tuple[int, int]:
        narrowest, widest = min(self._ratio), max(self._ratio)
        ratio = size.width / size.height
        if ratio < narrowest:
            return size.width, round(size.width / narrowest)
        if ratio > widest:
            return round(size.height * widest), size.height
        return size.width, size.height

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
        if flags["antialias"]:
            return "antialias=True"
        if flags["resample"] == Resample.BICUBIC:
            return "resample='bicubic'"
        return None

    def refuses(self, size: Size) -> str | None:
        """Skipped by chance, the output would have another size; and one without pixels is Kornia's to complain about."""
        if not self.out(size).height or not self.out(size).width:
            return "comes out without pixels"
        return changes_size_by_chance(self, size=size)

    def out(self, size: Size) -> Size:
        """The size given, or one side of it with the other in proportion."""
        wanted, side = self.settings["size"], self.settings["side"]
        if not isinstance(wanted, int):
            return size.to(int(wanted[0]), int(wanted[1]))
        ratio = size.width / size.height
        if side not in ("vert", "horz"):
            side = "vert" if (side == "short") ^ (ratio < 1.0) else "horz"
        return size.to(wanted, int(wanted * ratio)) if side == "vert" else size.to(int(wanted / ratio), wanted)

    def kornia_parameters(self, drawn: Drawn, size: Size) -> dict[str, Tensor]:
        """Corners of the image, and of the output."""
        out, zeros = self.out(size), np.zeros(size.batch, dtype=np.float32)
        return corners(zeros, zeros, np.float32(size.width), np.float32(size.height), out.width, out.height, size)

    def resampling(self, drawn: Drawn, size: Size, half: bool) -> Resampling:
        """The whole image, onto the whole output."""
        out = self.out(size)
        width, height = float(size.width), float(size.height)
        return Resampling(scale_of(width, out.width, half), 0.0, width, scale_of(height, out.height, half), 0.0, height)

    def matrix(self, drawn: Drawn, size: Size) -> Array:
        """Onto the output's corners, or its edges, as the module is set."""
        out, half, matrix = self.out(size), self.half or self.nearest, np.eye(3)[None]
        set_resize(matrix, 0, np.zeros(1), np.array([size.width]), out.width, half)
        set_resize(matrix, 1, np.zeros(1), np.array([size.height]), out.height, half)
        return matrix

    def describe(self) -> str:
        """In a few words."""
        return f"resize to {self.settings['size']}"


def whole(length: int) -> Axis:
    """An axis left as it is."""
    return Axis(1.0, 0.0, 0.0, float(length))


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


def set_resize(matrix: Array, k: int, start: Array, count: Array, target: int, half: bool) -> None:
    """Write the scale and shift of axis ``k`` that take a window onto ``target`` pixels."""
    if half:
        scale = target / count
        matrix[:, k, k], matrix[:, k, 2] = scale, (0.5 - start) * scale - 0.5
    else:
        # One pixel has no extent to scale: it is shifted.
        scale = np.where((count > 1) & (target > 1), (target - 1) / np.maximum(count - 1, 1), 1.0)
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
