"""torchvision's flips, crops and padding."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torchvision.transforms import v2

from gpuaug.fusion.ops import crop
from gpuaug.fusion.ops.base import ANY_SIDES, Array, OpDraws, Size
from gpuaug.fusion.ops.geometry import Axis, Edge, FrameOp, IndexMap, IndexOp, changes_size_by_chance
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.ops.torchvision.base import LEAST_AND_LARGEST, Call, TorchvisionOp, Units, image_fill, mask_fill, whole_sides

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


class UniformTemporalSubsample(TorchvisionOp, FrameOp):
    """UniformTemporalSubsample: frames at equal distances, the first and the last among them."""

    words = "choose frames"

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        TorchvisionOp.__init__(self, name, transform, units)
        self.count = transform.num_samples

    def frames(self, count: int) -> Array:
        """As torchvision counts them, in float32."""
        chosen: Array = torch.linspace(0, count - 1, self.count, dtype=torch.float32, device="cpu").long().numpy()
        return chosen

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The choice."""
        return [("uniform_temporal_subsample", {"num_samples": self.count})]


class CenterCrop(TorchvisionOp, crop.CenterCrop):
    """CenterCrop: margins are rounded to the nearest, and half to even; shorter sides than the crop's are padded with 0."""

    edge = "constant"

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        TorchvisionOp.__init__(self, name, transform, units)
        self._height, self._width = transform.size

    def unsupported_size(self, size: Size) -> str | None:
        """A skipped sample keeps the size that it came with."""
        return changes_size_by_chance(self, size=size)

    def start(self, size: Size) -> tuple[Any, Any]:
        """The first column and row, below 0 where padding is in front of the image."""
        return _margin(size.width, self._width), _margin(size.height, self._height)

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The crop."""
        return [("center_crop", {"output_size": list(self.module.size)})]  # type: ignore[arg-type]


class _Padded(TorchvisionOp, IndexOp):
    """An op that pads as a transform with ``fill`` and ``padding_mode``, or with ``mode`` where it has none."""

    def __init__(self, name: str, transform: Any, units: Units, mode: str = "") -> None:
        TorchvisionOp.__init__(self, name, transform, units)
        self._pads = True
        self._mode = mode or transform.padding_mode
        self.fill = self.fill_share(transform.fill, whole=True) if self._mode == "constant" else 0.0

    def unsupported(self) -> str | None:
        """Why the transform is left to torchvision, or ``None``."""
        mode = self._mode
        if self._pads and mode != "constant" and isinstance(image_fill(self.module.fill), list):
            return f"fill has a value per channel with padding_mode={mode!r}"
        return None if mode in _EDGES or not self._pads else f"padding_mode={mode!r}"

    @property
    def mask_fill(self) -> float:
        """What padding holds in masks, in their own values."""
        return mask_fill(self.module.fill)

    @property
    def edge(self) -> Edge:  # type: ignore[override]
        """What padding holds; nothing where there is none."""
        return _EDGES.get(self._mode, "constant") if self._pads else ""

    def _padding(self, size: Size) -> Sequence[Any]:
        """Left, right, above and below: numbers, or arrays of them where images differ in size."""
        raise NotImplementedError

    def _cannot_pad(self, size: Size) -> str | None:
        return crop.why_not_padded(self._padding(size), self.edge, size)

    def pad_call(self, size: Size, sample: int) -> Call:
        """The padding of one sample."""
        left, right, top, bottom = (int(side) for side in self._padding(size.of(sample)))
        transform: Any = self.module
        arguments = {"fill": image_fill(transform.fill), "padding_mode": self._mode}
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
        return IndexMap(Axis(offset=-float(left)), Axis(offset=-float(top)))

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


class ZoomOut(TorchvisionOp, IndexOp):
    """RandomZoomOut: onto a canvas of a drawn size, in float32, as torchvision computes it."""

    draws_size = True
    edge = "constant"

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        TorchvisionOp.__init__(self, name, transform, units)
        self.fill = self.fill_share(transform.fill, whole=True)
        self._least, self._most = transform.side_range

    @property
    def mask_fill(self) -> float:
        """What padding holds in masks, in their own values."""
        return mask_fill(self.module.fill)

    def _scale(self, uniform: Any) -> Any:
        return uniform * np.float32(self._most - self._least) + np.float32(self._least)

    def out(self, size: Size) -> Size:
        """One of each sample's own."""
        return size.to(*ANY_SIDES)

    def out_drawn(self, drawn: OpDraws, size: Size) -> Size:
        """The canvas that each sample drew, or its own size where it is skipped."""
        return _scaled(size, np.where(drawn["apply_mask"], drawn["scale"], np.float32(1)))

    def out_bounds(self, size: Size) -> tuple[Size, ...]:
        """The image, and the largest canvas."""
        return size, _scaled(size, np.asarray(self._scale(LEAST_AND_LARGEST[1])))

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """How much larger the canvas is, and where the image lies on it."""
        uniform, across, down = sampler.uniform(3)
        scale = self._scale(uniform)
        canvas = _scaled(size, scale)
        return {
            "scale": scale,
            "x": np.floor((canvas.width - size.width).astype(np.float32) * across),
            "y": np.floor((canvas.height - size.height).astype(np.float32) * down),
        }

    def _start(self, drawn: OpDraws) -> tuple[Array, Array]:
        return np.where(drawn["apply_mask"], drawn["x"], 0.0), np.where(drawn["apply_mask"], drawn["y"], 0.0)

    def map(self, drawn: OpDraws, size: Size) -> IndexMap:
        """Shifted to where the image lies."""
        x, y = self._start(drawn)
        return IndexMap(Axis(offset=-x), Axis(offset=-y))

    def matrix(self, drawn: OpDraws, size: Size) -> Array:
        """The shift."""
        matrix = np.tile(np.eye(3), (size.batch, 1, 1))
        matrix[:, 0, 2], matrix[:, 1, 2] = self._start(drawn)
        return matrix

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The padding."""
        own = size.of(sample)
        canvas = self.out_drawn(self.of_sample(drawn, sample), own).of(0)
        left, top = int(drawn["x"][sample]), int(drawn["y"][sample])
        padding = [left, top, canvas.width - own.width - left, canvas.height - own.height - top]
        return [("pad", {"padding": padding, "fill": image_fill(self.module.fill)})]

    def describe(self) -> str:
        """In a few words."""
        return f"zoom out by {self._least} to {self._most}"


def _margin(length: Any, cropped: int) -> Any:
    """Pixels in front of a centred crop of ``cropped`` pixels."""
    return np.where(length < cropped, -((cropped - length) // 2), np.rint((length - cropped) / 2))[()]


def _scaled(size: Size, scale: Array) -> Size:
    return whole_sides(size, np.float32(size.height) * scale, np.float32(size.width) * scale)


LOWERED: dict[type[nn.Module], type[TorchvisionOp]] = {
    v2.UniformTemporalSubsample: UniformTemporalSubsample,
    v2.RandomHorizontalFlip: HorizontalFlip,
    v2.RandomVerticalFlip: VerticalFlip,
    v2.CenterCrop: CenterCrop,
    v2.Pad: Pad,
    v2.RandomCrop: RandomCrop,
    v2.RandomZoomOut: ZoomOut,
}
