"""Kornia's flips, crops and padding, which move whole pixels.

Each module is *lowered* to an op, or run by Kornia. An op describes its movement as an ``IndexMap``, from output to input
pixels. Samples outside the *apply mask* skip the op. The *canvas* is the padded image. Class attributes without a comment are
explained in ``base.py``.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from kornia import augmentation as K
from torch import Tensor

from gpuaug.fusion.ops.base import OpDraws, Size, host_tensor
from gpuaug.fusion.ops.geometry import AxisMap, Edge, IndexMap, IndexOp, as_float64
from gpuaug.fusion.ops.sampler import Sampler


class _Flip(IndexOp):
    """Base class of flips."""

    axis: str
    """``"x"`` to reverse columns, ``"y"`` to reverse rows."""

    def map(self, draws: OpDraws, size: Size) -> IndexMap:
        """Map that reverses one axis of the samples in the apply mask."""
        apply_mask = draws["apply_mask"]
        length = size.width if self.axis == "x" else size.height
        reversal = AxisMap(np.where(apply_mask, -1.0, 1.0), np.where(apply_mask, length - 1.0, 0.0))
        return IndexMap(x=reversal) if self.axis == "x" else IndexMap(y=reversal)


class HorizontalFlip(_Flip):
    """``RandomHorizontalFlip``."""

    lowers = (K.RandomHorizontalFlip,)
    axis = "x"
    description = "flip left and right"


class VerticalFlip(_Flip):
    """``RandomVerticalFlip``."""

    lowers = (K.RandomVerticalFlip,)
    axis = "y"
    description = "flip up and down"


class ShiftOp(IndexOp):
    """Base class of ops that shift images by whole pixels: crops, and padding on the left and top."""

    @abstractmethod
    def start(self, draws: OpDraws, size: Size) -> tuple[Any, Any]:
        """(column, row) of the input image at which the output of the op begins; negative if the image is padded there."""

    def map(self, draws: OpDraws, size: Size) -> IndexMap:
        """Shift by the start. Samples that skip the op already have the output size."""
        x, y = self.start(draws, size)
        if self.is_random:
            x, y = (np.where(draws["apply_mask"], start, 0) for start in (x, y))
        return IndexMap(AxisMap(offset=as_float64(x)), AxisMap(offset=as_float64(y)))


class CropOp(ShiftOp):
    """Base class of crops of one size."""

    def _read(self, module: Any) -> None:
        self._height, self._width = (int(side) for side in self.settings["size"])

    def out_applied(self, size: Size) -> Size:
        """Size of the crop."""
        return size.to(self._height, self._width)

    def _unsupported_crop(self, size: Size) -> str | None:
        """Reason if the crop is larger than an image of ``size``; else ``None``."""
        is_larger = np.any(self._height > size.height) or np.any(self._width > size.width)
        return f"crops {self._height}x{self._width} out of {size.height}x{size.width}" if is_larger else None


class Crop(CropOp):
    """``RandomCrop`` with ``cropping_mode="slice"``, including padding."""

    lowers = (K.RandomCrop,)
    description = "crop {_height}x{_width}"

    def _read(self, module: Any) -> None:
        super()._read(module)
        self.fill = _fill_values(self.settings["fill"])
        pads = self.settings["padding"] is not None or self.settings["pad_if_needed"]
        self.edge = self.settings["padding_mode"] if pads else ""

    def unsupported(self) -> str | None:
        """Reason why Kornia runs the module, or ``None`` if it is lowered."""
        if self.settings["cropping_mode"] != "slice":
            return f"cropping_mode={self.settings['cropping_mode']!r}"
        return _unsupported_mode(
            "padding_mode", self.settings["padding_mode"], "fill", self.settings["fill"] if self.edge else 0
        )

    def _padding(self, size: Size) -> Sequence[Any]:
        """Padding in pixels (left, right, top, bottom): integers, or arrays (B,) if images differ in size."""
        # For an image of the size of the crop, Kornia pads by the setting ``padding`` alone.
        fixed: list[int] = self.module.compute_padding((1, 1, self._height, self._width))  # type: ignore[operator]
        if not self.settings["pad_if_needed"]:
            return fixed
        missing_columns, missing_rows = self._width - size.width, self._height - size.height
        missing = (missing_columns, missing_columns, missing_rows, missing_rows)
        return [np.where(count > 0, np.maximum(count, pad), pad)[()] for count, pad in zip(missing, fixed, strict=True)]

    def _canvas(self, size: Size) -> Size:
        """Size of the padded images."""
        left, right, top, bottom = self._padding(size)
        return size.to(size.height + top + bottom, size.width + left + right)

    def unsupported_size(self, size: Size) -> str | None:
        """Reason why images of ``size`` cannot be cropped in a fused pass, or ``None``.

        Kornia resizes padded images that are smaller than the crop. Padding by reflection cannot exceed the image.
        """
        reason = self._unsupported_crop(self._canvas(size))
        if reason is not None:
            return f"{reason}, which Kornia resizes" if self.package == "Kornia" else reason
        return unsupported_padding(self._padding(size), self.edge, size) or super().unsupported_size(size)

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw the first column ``"x"`` and the first row ``"y"`` of the crop in the padded image, (B,) each."""
        canvas = self._canvas(size)
        uniform_x, uniform_y = sampler.uniform(2)
        return {
            "x": np.floor(uniform_x * np.float32(canvas.width - self._width + 1)),
            "y": np.floor(uniform_y * np.float32(canvas.height - self._height + 1)),
        }

    def kornia_parameters(self, draws: OpDraws, size: Size) -> dict[str, Tensor]:
        """Parameters of Kornia's ``RandomCrop``: the result of ``corners``, the padding, and the shape of the padded images."""
        canvas = self._canvas(size)
        height, width = np.float32(self._height), np.float32(self._width)
        return {
            **corners(draws["x"], draws["y"], width, height, self._width, self._height, canvas),
            "padding_size": host_tensor(self._padding(size), np.int64).expand(size.batch, -1),
            "forward_input_shape": host_tensor([size.batch, size.channels, canvas.height, canvas.width], np.int64),
        }

    def start(self, draws: OpDraws, size: Size) -> tuple[Any, Any]:
        """Start of the crop in the padded image minus the padding."""
        left, _, top, _ = self._padding(size)
        return draws["x"] - left, draws["y"] - top


class CenterCrop(CropOp):
    """``CenterCrop`` with ``cropping_mode="slice"``."""

    lowers = (K.CenterCrop,)
    description = "centre crop {_height}x{_width}"

    def unsupported(self) -> str | None:
        """Reason why Kornia runs the module, or ``None`` if it is lowered."""
        mode = self.settings["cropping_mode"]
        return None if mode == "slice" else f"cropping_mode={mode!r}"

    def unsupported_size(self, size: Size) -> str | None:
        """Reason if the crop is larger than the image, or samples that skip the op would have another size; else ``None``."""
        return self._unsupported_crop(size) or super().unsupported_size(size)

    def start(self, draws: OpDraws, size: Size) -> tuple[Any, Any]:
        """(first column, first row) of the crop, rounded down."""
        return (size.width - self._width) // 2, (size.height - self._height) // 2

    def kornia_parameters(self, draws: OpDraws, size: Size) -> dict[str, Tensor]:
        """Parameters of Kornia's ``CenterCrop``: the result of ``corners``, as int64."""
        left, top = (np.full(size.batch, first) for first in self.start(draws, size))
        parameters = corners(left, top, self._width, self._height, self._width, self._height, size)
        return {name: value.long() for name, value in parameters.items()}


class PadTo(IndexOp):
    """``PadTo``: pads on the right and bottom; larger images are cropped on the right and bottom."""

    lowers = (K.PadTo,)
    description = "pad to {settings[size][0]}x{settings[size][1]}"

    def _read(self, module: Any) -> None:
        self.edge = self.settings["pad_mode"]
        self.fill = _fill_values(self.settings["pad_value"])

    def unsupported(self) -> str | None:
        """Reason why Kornia runs the module, or ``None`` if it is lowered."""
        return _unsupported_mode("pad_mode", self.settings["pad_mode"], "pad_value", self.settings["pad_value"])

    def per_channel(self, channels: int) -> dict[str, Any]:
        """Settings that may have one value per channel: the fill value, by the name of Kornia's argument."""
        return {"pad_value": self.fill}

    def out_applied(self, size: Size) -> Size:
        """Output size: the setting ``size``; without ``crop_if_exceeds`` at least the size of the image."""
        height, width = self.settings["size"]
        if not self.settings.get("crop_if_exceeds", True):
            height, width = np.maximum(height, size.height), np.maximum(width, size.width)
        return size.rounded_down(height, width)

    def unsupported_size(self, size: Size) -> str | None:
        """Reason why images of ``size`` cannot be padded in a fused pass, or ``None``.

        Kornia raises an error for reflection beyond the image. Cropping is lowered only with constant padding.
        """
        out = self.out(size)
        if self.edge == "reflect" and (np.any(out.width >= 2 * size.width) or np.any(out.height >= 2 * size.height)):
            return "pads by reflection by a whole side or more"
        if self.edge != "constant" and (np.any(out.width < size.width) or np.any(out.height < size.height)):
            return f"pad_mode={self.edge!r} while cropping"
        return super().unsupported_size(size)


def _fill_values(fill: Any) -> float | list[float]:
    """Convert a fill value to a float; a sequence or tensor of fill values to a list of floats."""
    return float(fill) if isinstance(fill, int | float) else np.asarray(fill, dtype=np.float64).reshape(-1).tolist()


def _unsupported_mode(mode_name: str, mode: str, value_name: str, value: Any) -> str | None:
    """Reason why a padding mode is not lowered with this fill value, or ``None``."""
    if mode not in ("constant", "replicate", "reflect"):
        return f"{mode_name}={mode!r}"
    if mode != "constant" and not (isinstance(value, int | float) and value == 0):  # Kornia raises an error
        return f"{value_name}={value!r} with {mode_name}={mode!r}"
    return None


def unsupported_padding(padding: Sequence[Any], edge: Edge, size: Size) -> str | None:
    """Reason why images of ``size`` cannot be padded by ``padding`` pixels (left, right, top, bottom), or ``None``."""
    left, right, top, bottom = padding
    if any(np.any(np.less(pixels, 0)) for pixels in padding):
        return "negative padding"
    columns, rows = np.maximum(left, right), np.maximum(top, bottom)
    if edge == "reflect" and (np.any(columns >= size.width) or np.any(rows >= size.height)):
        return "pads by reflection by a whole side or more"
    return None


def corners(x: Any, y: Any, width: Any, height: Any, out_width: int, out_height: int, size: Size) -> dict[str, Tensor]:
    """Return parameters that all crops of Kornia have.

    They are ``src`` and ``dst``, (B, 4, 2): the corners of the window and of the output, clockwise from the top left; and
    ``input_size`` and ``output_size``, (B, 2): (height, width). Without samples, only ``src`` and ``dst``.

    Args:
        x: First column of the window, (B,).
        y: First row of the window, (B,).
        width: Width of the window in pixels, (B,), or one number for all samples.
        height: Height of the window in pixels, (B,), or one number for all samples.
        out_width: Width of the output in pixels.
        out_height: Height of the output in pixels.
        size: Size of the input images.
    """
    right, bottom = x + width - 1, y + height - 1
    source = np.stack([np.stack(pair, -1) for pair in ((x, y), (right, y), (right, bottom), (x, bottom))], 1)
    right, bottom = out_width - 1, out_height - 1
    target = host_tensor([[0.0, 0.0], [right, 0.0], [right, bottom], [0.0, bottom]], np.float32)
    return {
        "src": torch.from_numpy(source.astype(np.float32)),
        "dst": target.repeat(size.batch, 1, 1),
        "input_size": host_tensor([size.height, size.width], np.int64).expand(size.batch, -1),
        "output_size": host_tensor([out_height, out_width], np.int64).expand(size.batch, -1),
    }
