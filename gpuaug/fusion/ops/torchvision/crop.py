"""torchvision's flips, crops and padding."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torchvision.transforms import v2

from gpuaug.fusion.ops import crop
from gpuaug.fusion.ops.base import Array, OpDraws, Size
from gpuaug.fusion.ops.geometry import Axis, Edge, FrameOp, IndexMap, IndexOp, changes_size_by_chance, length_of
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.ops.torchvision.base import (
    UNIFORM_BOUNDS,
    Call,
    TorchvisionOp,
    Units,
    image_fill,
    mask_fill,
    size_rounded_down,
)

_EDGES: dict[str, Edge] = {"constant": "constant", "edge": "replicate", "reflect": "reflect"}


class HorizontalFlip(TorchvisionOp, crop.HorizontalFlip):
    """``v2.RandomHorizontalFlip``."""

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """``horizontal_flip`` without arguments."""
        return [("horizontal_flip", {})]


class VerticalFlip(TorchvisionOp, crop.VerticalFlip):
    """``v2.RandomVerticalFlip``."""

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """``vertical_flip`` without arguments."""
        return [("vertical_flip", {})]


class UniformTemporalSubsample(TorchvisionOp, FrameOp):
    """``v2.UniformTemporalSubsample``: selects equally spaced frames, including the first and the last."""

    words = "choose frames"

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        TorchvisionOp.__init__(self, name, transform, units)
        self.count = transform.num_samples

    def frames(self, count: int) -> Array:
        """Indices of the selected frames of ``count``, computed in float32 as in torchvision."""
        indices: Array = torch.linspace(0, count - 1, self.count, dtype=torch.float32, device="cpu").long().numpy()
        return indices

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """``uniform_temporal_subsample`` with ``num_samples``."""
        return [("uniform_temporal_subsample", {"num_samples": self.count})]


class CenterCrop(TorchvisionOp, crop.CenterCrop):
    """``v2.CenterCrop``: margins are rounded half to even; images smaller than the crop are padded with 0."""

    edge = "constant"

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        TorchvisionOp.__init__(self, name, transform, units)
        self._height, self._width = transform.size

    def unsupported_size(self, size: Size) -> str | None:
        """Refuse a change of size with a probability below 1, because a skipped sample keeps its size."""
        return changes_size_by_chance(self, size=size)

    def start(self, size: Size) -> tuple[Any, Any]:
        """(first column, first row) of the crop in the image; negative for padding on the left or above."""
        return _margin(size.width, self._width), _margin(size.height, self._height)

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """``center_crop`` with ``output_size``."""
        return [("center_crop", {"output_size": list(self.module.size)})]  # type: ignore[arg-type]


class _Padded(TorchvisionOp, IndexOp):
    """Op that pads by the transform's ``fill`` and ``padding_mode``. ``mode`` replaces a missing ``padding_mode``."""

    def __init__(self, name: str, transform: Any, units: Units, mode: str = "") -> None:
        TorchvisionOp.__init__(self, name, transform, units)
        self._pads = True
        self._mode = mode or transform.padding_mode
        self.fill = self.unit_fill(transform.fill, truncates=True) if self._mode == "constant" else 0.0

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        mode = self._mode
        if self._pads and mode != "constant" and isinstance(image_fill(self.module.fill), list):
            return f"fill has a value per channel with padding_mode={mode!r}"
        return None if mode in _EDGES or not self._pads else f"padding_mode={mode!r}"

    @property
    def mask_fill(self) -> float:
        """Fill of masks, in the values of the masks."""
        return mask_fill(self.module.fill)

    @property
    def edge(self) -> Edge:  # type: ignore[override]
        """Padding mode; ``""`` without padding."""
        return _EDGES.get(self._mode, "constant") if self._pads else ""

    def _padding(self, size: Size) -> Sequence[Any]:
        """Padding in pixels (left, right, above, below): integers, or arrays (B,) if images differ in size."""
        raise NotImplementedError

    def _cannot_pad(self, size: Size) -> str | None:
        return crop.why_not_padded(self._padding(size), self.edge, size)

    def pad_call(self, size: Size, sample: int) -> Call:
        """``pad`` with ``padding`` in pixels, ``fill`` and ``padding_mode``, for one sample."""
        left, right, top, bottom = (int(side) for side in self._padding(size.of(sample)))
        transform: Any = self.module
        arguments = {"fill": image_fill(transform.fill), "padding_mode": self._mode}
        return "pad", {"padding": [left, top, right, bottom], **arguments}


class Pad(_Padded):
    """``v2.Pad``."""

    def _padding(self, size: Size) -> Sequence[Any]:
        padding: Any = self.module.padding
        sides = [padding] if isinstance(padding, int) else list(padding)
        # One number for all sides; left/right and top/bottom; or left, top, right and bottom.
        left, top, right, bottom = sides * (4 // len(sides))
        return left, right, top, bottom

    def unsupported_size(self, size: Size) -> str | None:
        """Refuse padding that torchvision refuses, and a change of size with a probability below 1."""
        return self._cannot_pad(size) or changes_size_by_chance(self, size=size)

    def out_applied(self, size: Size) -> Size:
        """Size of the padded image."""
        left, right, top, bottom = self._padding(size)
        return size.to(size.height + top + bottom, size.width + left + right)

    def _start(self, drawn: OpDraws, size: Size) -> tuple[Any, Any]:
        """(first column, first row) of the image in the padded image."""
        left, _, top, _ = self._padding(size)
        return crop.applied_shift(self, drawn, left, top)

    def map(self, drawn: OpDraws, size: Size) -> IndexMap:
        """Shift by the padding on the left and above."""
        left, top = self._start(drawn, size)
        return IndexMap(Axis(offset=-length_of(left)), Axis(offset=-length_of(top)))

    def matrix(self, drawn: OpDraws, size: Size) -> Array:
        """Translation matrix, input to output pixels."""
        return crop.translations(size, *self._start(drawn, size))

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """``pad`` with its arguments."""
        return [self.pad_call(size, sample)]

    def describe(self) -> str:
        """Short description for ``explain()``."""
        return f"pad by {self.module.padding}"


class RandomCrop(_Padded, crop.Crop):
    """``v2.RandomCrop``, with or without padding."""

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        _Padded.__init__(self, name, transform, units)
        self._height, self._width = transform.size
        self._pads = bool(transform.padding) or transform.pad_if_needed
        if not self._pads:
            self.fill = 0.0

    def _padding(self, size: Size) -> Sequence[Any]:
        """Padding in pixels (left, right, above, below). A too small image is padded by the whole difference at both ends."""
        transform: Any = self.module
        left, right, top, bottom = transform.padding or (0, 0, 0, 0)
        if not transform.pad_if_needed:
            return left, right, top, bottom
        across = np.maximum(self._width - (size.width + left + right), 0)
        down = np.maximum(self._height - (size.height + top + bottom), 0)
        return left + across, right + across, top + down, bottom + down

    def unsupported_size(self, size: Size) -> str | None:
        """Refuse a crop that is larger than the padded image, and a change of size with a probability below 1."""
        canvas = self._canvas(size)
        if np.any(self._height > canvas.height) or np.any(self._width > canvas.width):
            return f"crops {self._height}x{self._width} out of {canvas.height}x{canvas.width}"
        return self._cannot_pad(size) or changes_size_by_chance(self, size=size)

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """``pad``, unless the padding is 0, and ``crop`` with the window in pixels."""
        name, arguments = self.pad_call(size, sample)
        pad_calls = [(name, arguments)] if any(arguments["padding"]) else []
        window = {"top": int(drawn["y"][sample]), "left": int(drawn["x"][sample])}
        return [*pad_calls, ("crop", {**window, "height": self._height, "width": self._width})]


class PadIfSmaller(Pad):
    """``PadIfSmaller`` of torchvision's references: pads on the right and below, to sides of at least ``size`` pixels."""

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        _Padded.__init__(self, name, transform, units, "constant")

    def _padding(self, size: Size) -> Sequence[Any]:
        side: Any = self.module.size
        return 0, np.maximum(side - size.width, 0), 0, np.maximum(side - size.height, 0)

    def describe(self) -> str:
        """Short description for ``explain()``."""
        return f"pad to at least {self.module.size}x{self.module.size}"


class FixedSizeCrop(RandomCrop):
    """``FixedSizeCrop`` of torchvision's references: a random crop, or padding on the right and below, per axis.

    Both axes share one random number. The padding of masks is 0.
    """

    mask_fill = 0.0

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        _Padded.__init__(self, name, transform, units)
        self._height, self._width = transform.crop_height, transform.crop_width

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        return None if self._mode == "constant" else f"padding_mode={self._mode!r}, which its masks do not have"

    def _padding(self, size: Size) -> Sequence[Any]:
        return 0, np.maximum(self._width - size.width, 0), 0, np.maximum(self._height - size.height, 0)

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw the first column ``"x"`` and row ``"y"``, (B,): one random fraction of the pixels that the crop leaves out."""
        fraction = sampler.uniform()
        canvas = self._canvas(size)
        return {
            "x": np.floor(fraction * np.float32(canvas.width - self._width)),
            "y": np.floor(fraction * np.float32(canvas.height - self._height)),
        }


class ZoomOut(TorchvisionOp, IndexOp):
    """``v2.RandomZoomOut``: places the image on a larger canvas of random size, computed in float32 as in torchvision."""

    draws_size = True
    edge = "constant"

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        TorchvisionOp.__init__(self, name, transform, units)
        self.fill = self.unit_fill(transform.fill, truncates=True)
        self._min_scale, self._max_scale = transform.side_range

    @property
    def mask_fill(self) -> float:
        """Fill of masks, in the values of the masks."""
        return mask_fill(self.module.fill)

    def _scale(self, uniform: Any) -> Any:
        return uniform * np.float32(self._max_scale - self._min_scale) + np.float32(self._min_scale)

    def out_drawn(self, drawn: OpDraws, size: Size) -> Size:
        """Size of the drawn canvas per sample, or of the image if the sample is skipped."""
        return _scaled(size, np.where(drawn["apply_mask"], drawn["scale"], np.float32(1)))

    def out_bounds(self, size: Size) -> tuple[Size, ...]:
        """Size of the image, and of the largest canvas."""
        return size, _scaled(size, np.asarray(self._scale(UNIFORM_BOUNDS[1])))

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw ``"scale"``, side of the canvas / side of the image, and ``"x"`` and ``"y"``, offset of the image in pixels."""
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
        """Shift by the offset of the image on the canvas."""
        x, y = self._start(drawn)
        return IndexMap(Axis(offset=-x), Axis(offset=-y))

    def matrix(self, drawn: OpDraws, size: Size) -> Array:
        """Translation matrix, input to output pixels."""
        matrix = np.tile(np.eye(3), (size.batch, 1, 1))
        matrix[:, 0, 2], matrix[:, 1, 2] = self._start(drawn)
        return matrix

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """``pad`` with ``padding`` in pixels and ``fill``."""
        image_size = size.of(sample)
        canvas = self.out_drawn(self.of_sample(drawn, sample), image_size).of(0)
        left, top = int(drawn["x"][sample]), int(drawn["y"][sample])
        padding = [left, top, canvas.width - image_size.width - left, canvas.height - image_size.height - top]
        return [("pad", {"padding": padding, "fill": image_fill(self.module.fill)})]

    def describe(self) -> str:
        """Short description for ``explain()``."""
        return f"zoom out by {self._min_scale} to {self._max_scale}"


def _margin(length: Any, cropped: int) -> Any:
    """Number of pixels before a centred crop of ``cropped`` pixels; negative if ``length`` is shorter than the crop."""
    return np.where(length < cropped, -((cropped - length) // 2), np.rint((length - cropped) / 2))[()]


def _scaled(size: Size, scale: Array) -> Size:
    return size_rounded_down(size, np.float32(size.height) * scale, np.float32(size.width) * scale)


LOWERED: dict[type[nn.Module], type[TorchvisionOp]] = {
    v2.UniformTemporalSubsample: UniformTemporalSubsample,
    v2.RandomHorizontalFlip: HorizontalFlip,
    v2.RandomVerticalFlip: VerticalFlip,
    v2.CenterCrop: CenterCrop,
    v2.Pad: Pad,
    v2.RandomCrop: RandomCrop,
    v2.RandomZoomOut: ZoomOut,
}
