"""torchvision's transforms that resize whole images or random crops.

A transform is either *fused*, as an op that runs in gpuaug's kernels, or torchvision runs it. A *sample* is an image or a clip.
The *apply mask* of an op, (B,) bool, says which samples the op is applied to. The other samples skip the op.
"""

from typing import Any, ClassVar

import numpy as np
from torchvision.transforms import v2

from gpuaug.fusion.ops import resize
from gpuaug.fusion.ops.base import OpDraws, Size
from gpuaug.fusion.ops.geometry import ResampleOp
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.ops.torchvision.base import UNIFORM_BOUNDS, Call, TorchvisionOp, interpolation_of, log_ratios
from gpuaug.fusion.pixels import ROUNDED


class _Resampling(TorchvisionOp, ResampleOp):
    """Base class of resizes. Images are resized with ``align_corners=False``, as in torchvision.

    Segmentation masks are resized by the mode ``"nearest"`` of ``torch.nn.functional.interpolate``, unless a subclass sets
    ``mask_half_pixel_centers``.
    """

    half_pixel_centers = True
    mask_half_pixel_centers = False

    def _read(self, transform: Any) -> None:
        mode = interpolation_of(transform)
        self.nearest = mode == "nearest-exact"  # the mode "nearest" is not fused
        if transform.antialias:
            self.set_antialias(cubic=mode == "bicubic")
        # ``lower/conversions.py`` sets ``rounds_once`` of the resize in a preset, which rounds bytes once, not after each axis.
        if self.to_bytes is not None and getattr(transform, "rounds_once", False):
            self.to_bytes = ROUNDED

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        mode = interpolation_of(self.module)
        if mode == "bicubic" and not self.filter:
            return "interpolation='bicubic' without antialias"
        return None if mode in ("nearest-exact", "bilinear", "bicubic") else f"interpolation={mode!r}"

    def _options(self) -> dict[str, Any]:
        """Settings of the transform that are keyword arguments of each functional call (``calls``)."""
        transform: Any = self.module
        return {"interpolation": transform.interpolation, "antialias": transform.antialias}


class ResizedCrop(_Resampling, resize.ResizedCrop):
    """``v2.RandomResizedCrop``. If none of ten random windows fits into the image, the largest centred crop is used.

    Support: fused, with the transform's `antialias`; `interpolation="nearest"`, and `"bicubic"` without antialiasing, are
    not fused.
    """

    lowers = (v2.RandomResizedCrop,)
    centred = True  # see the base class

    def _read(self, transform: Any) -> None:
        super()._read(transform)
        self._height, self._width = transform.size
        self._set_bounds(transform.scale, transform.ratio, log_ratios(self.name, transform))

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """Functional call that repeats the op on one image: ``resized_crop`` with the drawn window and the output size."""
        names = {"top": "y", "left": "x", "height": "height", "width": "width"}
        window = {argument: int(draws[name][sample]) for argument, name in names.items()}
        return [("resized_crop", {**window, "size": [self._height, self._width], **self._options()})]


class WholeResize(_Resampling, resize.Resize):
    """Base class of resizes of the whole image. Masks use ``"nearest-exact"`` if images do, else ``"nearest"``."""

    def _read(self, transform: Any) -> None:
        super()._read(transform)
        self.mask_half_pixel_centers = self.nearest

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """Functional call that repeats the op on one image: ``resize`` to the output size."""
        out = self.out_drawn(self.sample_draws(draws, sample), size.sample(sample)).sample(0)
        return [("resize", {"size": [out.height, out.width], **self._options()})]


class Resize(WholeResize):
    """``v2.Resize`` to (height, width), to a length of the shorter side, or to a length ``max_size`` of the longer side.

    Support: fused, with the transform's `antialias`; `interpolation="nearest"`, and `"bicubic"` without antialiasing, are
    not fused.
    """

    lowers = (v2.Resize,)

    def _read(self, transform: Any) -> None:
        super()._read(transform)
        self.settings = {"size": transform.size if transform.size is not None else f"at most {transform.max_size}"}

    def out_applied(self, size: Size) -> Size:
        """Output size: (height, width) if they are set; otherwise with the input's aspect ratio, rounded down to pixels."""
        transform: Any = self.module
        target = [transform.size] if isinstance(transform.size, int) else transform.size  # a subclass may set a number
        max_size = transform.max_size
        if target is not None and len(target) == 2:
            return size.to(int(target[0]), int(target[1]))
        if target is not None:
            return with_shorter_side(size, target[0], max_size)
        input_shorter, input_longer = np.minimum(size.height, size.width), np.maximum(size.height, size.width)
        return _sides(size, max_size * input_shorter / np.maximum(input_longer, 1), np.full_like(input_longer, max_size))


class _RandomSizeResize(WholeResize):
    """Base class of resizes to a random size per image, after which the images of a batch differ in size.

    Support: fused together with a following transform [to one size](#random-sizes).
    """

    draws_size = True
    draw_name: ClassVar[str] = "size"
    """Name in ``OpDraws`` of the number that is drawn per sample: a length in pixels, or a scale."""

    def _drawn_number(self, uniform: Any) -> Any:
        """Map uniform numbers in [0, 1) to numbers of the distribution of the transform.

        The map must be monotonically increasing, because ``out_bounds`` maps the smallest and the largest uniform number.
        """
        raise NotImplementedError

    def _out(self, number: Any, size: Size) -> Size:
        """Output size for input images of ``size``. ``number``: drawn number per sample, (B,), or one for all samples."""
        raise NotImplementedError

    def drawn_size(self, draws: OpDraws, size: Size) -> Size:
        """Output size for the drawn number of each sample."""
        return self._out(draws[self.draw_name], size)

    def out_bounds(self, size: Size) -> tuple[Size, ...]:
        """Output sizes for the smallest and the largest number that can be drawn."""
        return tuple(self._out(self._drawn_number(uniform), size) for uniform in UNIFORM_BOUNDS)

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw one number per sample, (B,)."""
        return {self.draw_name: self._drawn_number(sampler.uniform())}


class RandomResize(_RandomSizeResize):
    """``v2.RandomResize``: resizes the shorter side to a random integer in [``min_size``, ``max_size``)."""

    lowers = (v2.RandomResize,)

    def _read(self, transform: Any) -> None:
        super()._read(transform)
        self._min_size = int(transform.min_size)
        self._size_count = int(transform.max_size) - int(transform.min_size)
        self.settings = {"size": f"between {self._min_size} and {transform.max_size - 1} at the shorter side"}

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        return super().unsupported() if self._size_count > 0 else "max_size is not larger than min_size"

    def _drawn_number(self, uniform: Any) -> Any:
        return np.floor(uniform * np.float32(self._size_count)).astype(np.int64) + self._min_size

    def _out(self, number: Any, size: Size) -> Size:
        return with_shorter_side(size, number)


class RandomShortestSize(_RandomSizeResize):
    """``v2.RandomShortestSize``: resizes the shorter side to an element of ``min_size``, the longer to at most ``max_size``."""

    lowers = (v2.RandomShortestSize,)

    def _read(self, transform: Any) -> None:
        super()._read(transform)
        self._choices = np.sort(transform.min_size)
        self._max_size = transform.max_size
        self.settings = {"size": f"one of {transform.min_size} at the shorter side"}

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        return super().unsupported() if len(self._choices) else "min_size is empty"

    def _drawn_number(self, uniform: Any) -> Any:
        return self._choices[np.floor(uniform * np.float32(len(self._choices))).astype(np.int64)]

    def _out(self, number: Any, size: Size) -> Size:
        scale = number / np.maximum(np.minimum(size.height, size.width), 1)
        if self._max_size is not None:
            scale = np.minimum(scale, self._max_size / np.maximum(np.maximum(size.height, size.width), 1))
        return size.rounded_down(size.height * scale, size.width * scale)


class ScaleJitter(_RandomSizeResize):
    """``v2.ScaleJitter``: fits the image into ``target_size`` times a random scale."""

    lowers = (v2.ScaleJitter,)
    draw_name = "scale"

    def _read(self, transform: Any) -> None:
        super()._read(transform)
        self._target, (self._min_scale, max_scale) = transform.target_size, transform.scale_range
        self._range = np.float32(max_scale - self._min_scale)
        self.settings = {"size": f"between {self._min_scale} and {max_scale} of {tuple(self._target)}"}

    def _drawn_number(self, uniform: Any) -> Any:
        return uniform * self._range + np.float32(self._min_scale)

    def _out(self, number: Any, size: Size) -> Size:
        # As in torchvision: in float32, and with target_size[0] compared with the width.
        fit_scale = np.minimum(self._target[1] / np.maximum(size.height, 1), self._target[0] / np.maximum(size.width, 1))
        scale = np.float32(fit_scale) * number
        return size.rounded_down(np.float32(size.height) * scale, np.float32(size.width) * scale)


def with_shorter_side(size: Size, shorter: Any, max_size: int | None = None) -> Size:
    """Output size with another length of the shorter side, and the aspect ratio of the input.

    Args:
        size: Size of the input images.
        shorter: Length of the shorter side of the output in pixels, a number or an array (B,).
        max_size: Maximum length of the longer side of the output in pixels; ``None`` for no limit. If the longer side would
            exceed it, both sides are reduced.
    """
    input_shorter, input_longer = np.minimum(size.height, size.width), np.maximum(size.height, size.width)
    longer = (shorter * input_longer / np.maximum(input_shorter, 1)).astype(np.int64)
    shorter = np.broadcast_to(shorter, longer.shape)
    if max_size is not None:
        is_over = longer > max_size
        shorter = np.where(is_over, (max_size * shorter / np.maximum(longer, 1)).astype(np.int64), shorter)
        longer = np.minimum(longer, max_size)
    return _sides(size, shorter, longer)


def _sides(size: Size, shorter: Any, longer: Any) -> Size:
    """Output size with these lengths of the shorter and the longer side. Portrait stays portrait, landscape stays landscape."""
    is_portrait = np.less_equal(size.width, size.height)
    return size.rounded_down(np.where(is_portrait, longer, shorter), np.where(is_portrait, shorter, longer))
