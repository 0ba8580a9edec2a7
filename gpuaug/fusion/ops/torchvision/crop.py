"""torchvision's flips, crops, padding, and selection of frames.

A transform is *lowered* to an op, or run by torchvision. The *canvas* is the padded image. A *sample* is an image or a clip.
Samples outside the *apply mask* skip the op. A *call* is the name and the arguments of a function in
``torchvision.transforms.v2.functional`` that repeats the op on one image.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torchvision.transforms import v2

from gpuaug.fusion import transforms
from gpuaug.fusion.ops import crop
from gpuaug.fusion.ops.base import Array, Op, OpDraws, Size
from gpuaug.fusion.ops.geometry import AxisMap, Edge, FrameOp, IdentityOp, IndexMap, as_float64
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.ops.torchvision.base import UNIFORM_BOUNDS, Call, TorchvisionOp, image_fill, mask_fill, pair

_EDGES: dict[str, Edge] = {"constant": "constant", "edge": "replicate", "reflect": "reflect"}
"""Padding mode of the op for each ``padding_mode`` of torchvision. Other modes are not lowered."""


class Identity(TorchvisionOp, IdentityOp):
    """``v2.Identity``, for pipelines that only convert images or targets."""

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """No call."""
        return []


class HorizontalFlip(TorchvisionOp, crop.HorizontalFlip):
    """``v2.RandomHorizontalFlip``.

    Support: fused, bit for bit, except that float64 is rounded to float32.
    """

    lowers = (v2.RandomHorizontalFlip,)
    call = ("horizontal_flip",)


class VerticalFlip(TorchvisionOp, crop.VerticalFlip):
    """``v2.RandomVerticalFlip``.

    Support: fused, bit for bit, except that float64 is rounded to float32.
    """

    lowers = (v2.RandomVerticalFlip,)
    call = ("vertical_flip",)


class UniformTemporalSubsample(TorchvisionOp, FrameOp):
    """``v2.UniformTemporalSubsample``: selects equally spaced frames, including the first and the last.

    Support: fused, for [clips](clips.md): the pass reads only the selected frames.
    """

    lowers = (v2.UniformTemporalSubsample,)
    call = ("uniform_temporal_subsample", "num_samples")
    description = "choose frames"

    def _read(self, transform: Any) -> None:
        self.count = transform.num_samples

    def frames(self, input_count: int) -> Array:
        """Indices of the selected frames, (``self.count``,) int64, in input clips of ``input_count`` frames."""
        indices: Array = torch.linspace(0, input_count - 1, self.count, dtype=torch.float32, device="cpu").long().numpy()
        return indices


class RGB(Identity):
    """``v2.RGB``: repeats the channel of grey images.

    Support: fused, with nothing to compute; an error for images of two channels.
    """

    lowers = (v2.RGB,)

    def out_applied(self, size: Size) -> Size:
        """Output size, with at least three channels."""
        return replace(size, channels=max(size.channels, 3))

    def unsupported_channels(self, channels: int) -> tuple[str, str] | None:
        """Require one channel, or at least three."""
        return ("1 or at least 3", self.name) if channels == 2 else None

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """``grayscale_to_rgb`` for images of one channel, else no calls."""
        return [("grayscale_to_rgb", {})] if size.channels < 3 else []


class CenterCrop(TorchvisionOp, crop.CenterCrop):
    """``v2.CenterCrop``. A margin of n + 1/2 pixels is rounded to even. Images smaller than the crop are padded with 0.

    Support: fused, bit for bit, except that float64 is rounded to float32.
    """

    lowers = (v2.CenterCrop,)
    edge = "constant"

    def _read(self, transform: Any) -> None:
        self._height, self._width = pair(transform.size)

    def unsupported_size(self, size: Size) -> str | None:
        """Reason if samples that skip the op would have another size than the others, or ``None``."""
        return Op.unsupported_size(self, size)

    def start(self, draws: OpDraws, size: Size) -> tuple[Any, Any]:
        """(first column, first row) of the crop in the image; negative if the image is padded on the left or top."""
        return _margin(size.width, self._width), _margin(size.height, self._height)

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """Call of ``center_crop`` with ``output_size``."""
        return [("center_crop", {"output_size": [self._height, self._width]})]


class FiveCrop(TorchvisionOp, crop.CropOp):
    """``v2.FiveCrop``: crops of the four corners and of the centre, one per view.

    Support: fused, bit for bit, except that float64 is rounded to float32: one [view](fuse.md#views) per crop, in torchvision's
    order, instead of a tuple.
    """

    lowers = (v2.FiveCrop,)
    description = "five crops {_height}x{_width}"
    views = 5
    flip_axis = ""
    """``"x"`` or ``"y"`` if the views from index 5 on are crops of the flipped image."""

    def _read(self, transform: Any) -> None:
        self._height, self._width = pair(transform.size)

    def unsupported_size(self, size: Size) -> str | None:
        """Reason if the crops are larger than the image, for which torchvision raises an error; else ``None``."""
        return self._unsupported_crop(size)

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Return ``"view"``, (B,): the index of the view."""
        return {"view": sampler.views}

    def start(self, draws: OpDraws, size: Size) -> tuple[Any, Any]:
        """(first columns, first rows) of the crops, (B,) each, in images that are flipped already."""
        corner = draws["view"] % 5  # top left, top right, bottom left, bottom right; 4 is the centre
        centre = _margin(size.width, self._width), _margin(size.height, self._height)
        x = np.where(corner == 4, centre[0], np.where(corner % 2 == 1, size.width - self._width, 0))
        y = np.where(corner == 4, centre[1], np.where(corner >= 2, size.height - self._height, 0))
        return x, y

    def map(self, draws: OpDraws, size: Size) -> IndexMap:
        """Shift by the start, in the flipped image for the second half of ten views."""
        is_flipped = draws["view"] >= 5
        axes = {}
        for name, start, side in zip("xy", self.start(draws, size), (size.width, size.height), strict=True):
            mirrored = is_flipped & (name == self.flip_axis)
            axes[name] = AxisMap(np.where(mirrored, -1.0, 1.0), as_float64(np.where(mirrored, side - 1 - start, start)))
        return IndexMap(**axes)

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """Flip of the second half of ten views, and ``crop``."""
        x, y = self.start(draws, size)
        flip = "horizontal_flip" if self.flip_axis == "x" else "vertical_flip"
        flips: list[Call] = [(flip, {})] if draws["view"][sample] >= 5 else []
        window = {"top": int(y[sample]), "left": int(x[sample]), "height": self._height, "width": self._width}
        return [*flips, ("crop", window)]


class TenCrop(FiveCrop):
    """``v2.TenCrop``: the crops of ``FiveCrop``, and of the flipped image.

    Support: fused, as `FiveCrop`, with ten views.
    """

    lowers = (v2.TenCrop,)
    description = "ten crops {_height}x{_width}"
    views = 10

    def _read(self, transform: Any) -> None:
        super()._read(transform)
        self.flip_axis = "y" if transform.vertical_flip else "x"


class _PaddingOp(TorchvisionOp, crop.ShiftOp):
    """Base class of ops that pad.

    Args:
        name: Name of the transform in its container.
        transform: Transform of the user.
        units: dtype of the images that the transform expects. Its value range is the range of ``fill``.
    """

    _pads: bool = True
    """Whether the transform pads, according to its settings."""

    _has_mode: bool = True
    """Whether the transform may have a setting ``padding_mode``. A subclass of the user may have an attribute of this name."""

    def _read(self, transform: Any) -> None:
        # gpuaug's transforms and a class of open_clip have no such setting.
        self._mode = getattr(transform, "padding_mode", "constant") if self._has_mode else "constant"
        # torchvision's ``pad`` truncates the fill of integer images.
        self.fill = self.unit_fill(transform, int) if self._mode == "constant" else 0.0

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        mode = self._mode
        if self._pads and mode != "constant" and isinstance(image_fill(self.module), list):
            return f"fill has a value per channel with padding_mode={mode!r}"
        return None if mode in _EDGES or not self._pads else f"padding_mode={mode!r}"

    @property
    def mask_fill(self) -> float:
        """Fill value of segmentation masks, not converted to [0, 1]."""
        return mask_fill(self.module)

    @property
    def edge(self) -> Edge:  # type: ignore[override]
        """Padding mode; ``""`` without padding."""
        return _EDGES.get(self._mode, "constant") if self._pads else ""

    def _padding(self, size: Size) -> Sequence[Any]:
        """Padding in pixels (left, right, top, bottom): integers, or arrays (B,) if images differ in size."""
        raise NotImplementedError

    def pad_call(self, size: Size, sample: int) -> Call:
        """Call of ``pad`` with ``padding`` in pixels, ``fill`` and ``padding_mode``, for one sample."""
        left, right, top, bottom = (int(side) for side in self._padding(size.sample(sample)))
        arguments = {"fill": image_fill(self.module), "padding_mode": self._mode}
        return "pad", {"padding": [left, top, right, bottom], **arguments}


class Pad(_PaddingOp):
    """``v2.Pad``.

    Support: fused, bit for bit, except that float64 is rounded to float32; `padding_mode="symmetric"` is not fused.
    """

    lowers = (v2.Pad,)
    description = "pad by {module.padding}"

    def _padding(self, size: Size) -> Sequence[Any]:
        """Padding in pixels (left, right, top, bottom)."""
        padding: Any = self.module.padding
        sides = [padding] if isinstance(padding, int) else list(padding)
        # The setting holds (all sides), (left and right, top and bottom) or (left, top, right, bottom).
        left, top, right, bottom = sides * (4 // len(sides))
        return left, right, top, bottom

    def unsupported_size(self, size: Size) -> str | None:
        """Reason why images of ``size`` cannot be padded in a fused pass, or ``None``.

        Negative padding is not fused, nor is reflection of more pixels than the image has. Samples that skip the op must have
        the size of the others.
        """
        return crop.unsupported_padding(self._padding(size), self.edge, size) or super().unsupported_size(size)

    def out_applied(self, size: Size) -> Size:
        """Size of the padded image."""
        left, right, top, bottom = self._padding(size)
        return size.to(size.height + top + bottom, size.width + left + right)

    def start(self, draws: OpDraws, size: Size) -> tuple[Any, Any]:
        """Negative padding on the left and top."""
        left, _, top, _ = self._padding(size)
        return -left, -top

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """Call of ``pad`` with its arguments."""
        return [self.pad_call(size, sample)]


class PaddingCrop(_PaddingOp, crop.Crop):
    """Base class of crops that may pad the image first."""

    def _read(self, transform: Any) -> None:
        super()._read(transform)
        self._height, self._width = transform.size

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """Call of ``pad``, unless the padding is 0, and call of ``crop`` with the window in pixels."""
        name, arguments = self.pad_call(size, sample)
        pad_calls = [(name, arguments)] if any(arguments["padding"]) else []
        window = {"top": int(draws["y"][sample]), "left": int(draws["x"][sample])}
        return [*pad_calls, ("crop", {**window, "height": self._height, "width": self._width})]


class RandomCrop(PaddingCrop):
    """``v2.RandomCrop``, with or without padding.

    Support: fused, bit for bit, except that float64 is rounded to float32; `padding_mode="symmetric"` and a crop larger
    than the image are not fused.
    """

    lowers = (v2.RandomCrop,)

    def _read(self, transform: Any) -> None:
        super()._read(transform)
        self._pads = bool(transform.padding) or transform.pad_if_needed
        if not self._pads:
            self.fill = 0.0

    def _padding(self, size: Size) -> Sequence[Any]:
        """Padding in pixels (left, right, top, bottom).

        With ``pad_if_needed``, torchvision adds the number of missing pixels on each side, not half of the number.
        """
        transform: Any = self.module
        left, right, top, bottom = transform.padding or (0, 0, 0, 0)
        if not transform.pad_if_needed:
            return left, right, top, bottom
        missing_columns = np.maximum(self._width - (size.width + left + right), 0)
        missing_rows = np.maximum(self._height - (size.height + top + bottom), 0)
        return left + missing_columns, right + missing_columns, top + missing_rows, bottom + missing_rows


class PadIfSmaller(Pad):
    """``gpuaug.PadIfSmaller``: pads right and below to sides of at least ``size`` pixels.

    Support: fused; a transform of `gpuaug`, for a [class of the reference scripts](#classes-of-the-reference-scripts).
    """

    lowers = (transforms.PadIfSmaller,)
    description = "pad to at least {module.size}x{module.size}"

    def _padding(self, size: Size) -> Sequence[Any]:
        side: Any = self.module.size
        return 0, np.maximum(side - size.width, 0), 0, np.maximum(side - size.height, 0)


class FixedSizeCrop(PaddingCrop):
    """``gpuaug.FixedSizeCrop``: per axis a random crop, or padding on the right or below. Both axes share a random number.

    Support: fused; a transform of `gpuaug`, for a [class of the reference scripts](#classes-of-the-reference-scripts).
    """

    lowers = (transforms.FixedSizeCrop,)

    def _padding(self, size: Size) -> Sequence[Any]:
        return 0, np.maximum(self._width - size.width, 0), 0, np.maximum(self._height - size.height, 0)

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw the first column ``"x"`` and row ``"y"`` of the crop, (B,) each, from one uniform number per sample."""
        fraction = sampler.uniform()
        canvas = self._canvas(size)
        return {
            "x": np.floor(fraction * np.float32(canvas.width - self._width)),
            "y": np.floor(fraction * np.float32(canvas.height - self._height)),
        }


class ZoomOut(_PaddingOp):
    """``v2.RandomZoomOut``: places the image on a larger canvas of random size, computed in float32 as in torchvision.

    Support: fused together with a following transform [to one size](#random-sizes).
    """

    lowers = (v2.RandomZoomOut,)
    description = "zoom out by {_min_scale} to {_max_scale}"
    _has_mode = False
    draws_size = True

    def _read(self, transform: Any) -> None:
        super()._read(transform)
        self._min_scale, self._max_scale = transform.side_range

    def _scale(self, uniform: Any) -> Any:
        """Side of the canvas / side of the image, from uniform numbers in [0, 1)."""
        return uniform * np.float32(self._max_scale - self._min_scale) + np.float32(self._min_scale)

    def drawn_size(self, draws: OpDraws, size: Size) -> Size:
        """Size of the drawn canvas of each sample."""
        return _scaled(size, draws["scale"])

    def out_bounds(self, size: Size) -> tuple[Size, ...]:
        """Input size, and size of the largest canvas."""
        return size, _scaled(size, np.asarray(self._scale(UNIFORM_BOUNDS[1])))

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw ``"scale"``, and the offset of the image on the canvas in pixels, ``"x"`` and ``"y"``, (B,) each."""
        uniform, uniform_x, uniform_y = sampler.uniform(3)
        scale = self._scale(uniform)
        canvas = _scaled(size, scale)
        return {
            "scale": scale,
            "x": np.floor((canvas.width - size.width).astype(np.float32) * uniform_x),
            "y": np.floor((canvas.height - size.height).astype(np.float32) * uniform_y),
        }

    def start(self, draws: OpDraws, size: Size) -> tuple[Any, Any]:
        """Negative offset of the image on the canvas."""
        return -draws["x"], -draws["y"]

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """Call of ``pad`` with ``padding`` in pixels and ``fill``."""
        image_size = size.sample(sample)
        canvas = self.out_drawn(self.sample_draws(draws, sample), image_size).sample(0)
        left, top = int(draws["x"][sample]), int(draws["y"][sample])
        padding = [left, top, canvas.width - image_size.width - left, canvas.height - image_size.height - top]
        return [("pad", {"padding": padding, "fill": image_fill(self.module)})]


def _margin(length: Any, crop_length: int) -> Any:
    """Number of pixels before a centred crop of ``crop_length`` out of ``length`` pixels. A negative number is padding."""
    return np.where(length < crop_length, -((crop_length - length) // 2), np.rint((length - crop_length) / 2))[()]


def _scaled(size: Size, scale: Array) -> Size:
    """``size`` with both sides multiplied by ``scale`` in float32, and rounded down."""
    return size.rounded_down(np.float32(size.height) * scale, np.float32(size.width) * scale)
