"""torchvision's flips, crops and padding."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn
from torchvision.transforms import v2

from gpuaug.fusion.ops import crop
from gpuaug.fusion.ops.base import Array, OpDraws, Size
from gpuaug.fusion.ops.geometry import Axis, Edge, IndexMap, IndexOp, changes_size_by_chance, length_of
from gpuaug.fusion.ops.torchvision.base import Call, TorchvisionOp, Units, image_fill, mask_fill

_EDGES: dict[str, Edge] = {"constant": "constant", "edge": "replicate", "reflect": "reflect"}


class HorizontalFlip(TorchvisionOp, crop.HorizontalFlip):
    """RandomHorizontalFlip."""

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The flip."""
        return [("horizontal_flip", {})]


class VerticalFlip(TorchvisionOp, crop.VerticalFlip):
    """RandomVerticalFlip."""

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The flip."""
        return [("vertical_flip", {})]


class CenterCrop(TorchvisionOp, crop.CenterCrop):
    """CenterCrop, with margins rounded to the nearest, and half to even."""

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        TorchvisionOp.__init__(self, name, transform, units)
        self._height, self._width = transform.size

    def unsupported_size(self, size: Size) -> str | None:
        """Images that are smaller than the crop are padded by torchvision."""
        if np.any(self._height > size.height) or np.any(self._width > size.width):
            return f"crops {self._height}x{self._width} out of {size.height}x{size.width}, which torchvision pads"
        return None

    def start(self, size: Size) -> tuple[Any, Any]:
        """The first column and row."""
        return np.rint((size.width - self._width) / 2), np.rint((size.height - self._height) / 2)

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The crop."""
        return [("center_crop", {"output_size": list(self.module.size)})]  # type: ignore[arg-type]


class _Padded(TorchvisionOp, IndexOp):
    """An op that pads as a transform with ``fill`` and ``padding_mode``."""

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        TorchvisionOp.__init__(self, name, transform, units)
        self._pads = True
        self.fill = self.fill_share(transform.fill) if transform.padding_mode == "constant" else 0.0

    def unsupported(self) -> str | None:
        """Why the transform is left to torchvision, or ``None``."""
        mode: Any = self.module.padding_mode
        return None if mode in _EDGES or not self._pads else f"padding_mode={mode!r}"

    @property
    def mask_fill(self) -> float:
        """What padding holds in masks, in their own values."""
        return mask_fill(self.module.fill)

    @property
    def edge(self) -> Edge:  # type: ignore[override]
        """What padding holds; nothing where there is none."""
        return _EDGES.get(self.module.padding_mode, "constant") if self._pads else ""  # type: ignore[call-overload]

    def _padding(self, size: Size) -> Sequence[Any]:
        """Left, right, above and below: numbers, or arrays of them where images differ in size."""
        raise NotImplementedError

    def _cannot_pad(self, size: Size) -> str | None:
        return crop.why_not_padded(self._padding(size), self.edge, size)

    def pad_call(self, size: Size, sample: int) -> Call:
        """The padding of one sample."""
        left, right, top, bottom = (int(side) for side in self._padding(size.of(sample)))
        transform: Any = self.module
        arguments = {"fill": image_fill(transform.fill), "padding_mode": transform.padding_mode}
        return "pad", {"padding": [left, top, right, bottom], **arguments}


class Pad(_Padded):
    """Pad."""

    def _padding(self, size: Size) -> Sequence[Any]:
        given: Any = self.module.padding
        sides = [given] if isinstance(given, int) else list(given)
        # One for all, or across and down, or left, top, right and bottom.
        left, top, right, bottom = sides * (4 // len(sides))
        return left, right, top, bottom

    def unsupported_size(self, size: Size) -> str | None:
        """Padding is of the image, and no less than none."""
        return self._cannot_pad(size) or changes_size_by_chance(self, size=size)

    def out(self, size: Size) -> Size:
        """The image with its padding."""
        left, right, top, bottom = self._padding(size)
        return size.to(size.height + top + bottom, size.width + left + right)

    def map(self, drawn: OpDraws, size: Size) -> IndexMap:
        """Shifted by what is padded before the image."""
        left, _, top, _ = self._padding(size)
        return IndexMap(
            Axis(1.0, -float(left), 0.0, length_of(size.width)), Axis(1.0, -float(top), 0.0, length_of(size.height))
        )

    def matrix(self, drawn: OpDraws, size: Size) -> Array:
        """The shift."""
        matrix, (left, _, top, _) = crop.identities(size), self._padding(size)
        matrix[:, 0, 2], matrix[:, 1, 2] = left, top
        return matrix

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The padding."""
        return [self.pad_call(size, sample)]

    def describe(self) -> str:
        """In a word."""
        return f"pad by {self.module.padding}"


class RandomCrop(_Padded, crop.Crop):
    """RandomCrop, with whatever padding it is given."""

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        _Padded.__init__(self, name, transform, units)
        self._height, self._width = transform.size
        self._pads = bool(transform.padding) or transform.pad_if_needed
        if not self._pads:
            self.fill = 0.0

    def _padding(self, size: Size) -> Sequence[Any]:
        """Of an image that is too small, torchvision pads both ends with all that it lacks."""
        transform: Any = self.module
        left, right, top, bottom = transform.padding or (0, 0, 0, 0)
        if not transform.pad_if_needed:
            return left, right, top, bottom
        across = np.maximum(self._width - (size.width + left + right), 0)
        down = np.maximum(self._height - (size.height + top + bottom), 0)
        return left + across, right + across, top + down, bottom + down

    def unsupported_size(self, size: Size) -> str | None:
        """A crop is no larger than its canvas."""
        canvas = self._canvas(size)
        if np.any(self._height > canvas.height) or np.any(self._width > canvas.width):
            return f"crops {self._height}x{self._width} out of {canvas.height}x{canvas.width}"
        return self._cannot_pad(size) or changes_size_by_chance(self, size=size)

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The padding, where there is any, and the crop."""
        name, arguments = self.pad_call(size, sample)
        padded = [(name, arguments)] if any(arguments["padding"]) else []
        window = {"top": int(drawn["y"][sample]), "left": int(drawn["x"][sample])}
        return [*padded, ("crop", {**window, "height": self._height, "width": self._width})]


LOWERED: dict[type[nn.Module], type[TorchvisionOp]] = {
    v2.RandomHorizontalFlip: HorizontalFlip,
    v2.RandomVerticalFlip: VerticalFlip,
    v2.CenterCrop: CenterCrop,
    v2.Pad: Pad,
    v2.RandomCrop: RandomCrop,
}
