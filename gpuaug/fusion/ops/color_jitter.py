"""Kornia's ``ColorJitter`` and ``ColorJiggle``: four adjustments, in a random order per batch.

The adjustments, by index: 0 brightness, 1 contrast, 2 saturation, 3 hue. A factor is *neutral* if it leaves images unchanged.
An adjustment is *active* if its bounds allow other factors. Triton kernels get a bit field of flags as a compile-time constant:
bits 0 to 3 are 1 for the active adjustments, and the constants below describe the other bits.

A *row* holds the parameters of one *sample*, an image or a clip: the apply mask (1 to apply the op), four factors, and the
order of the adjustments. Class attributes without a comment are explained in ``base.py``.
"""

from typing import Any, ClassVar

import numpy as np
import torch
from kornia import augmentation as K
from torch import Tensor

from gpuaug.fusion.ops.base import Array, OpDraws, PointOp, Size, column
from gpuaug.fusion.ops.channel import GREY, grayscale
from gpuaug.fusion.ops.color import rotate_hue, scale_saturation
from gpuaug.fusion.ops.kornia_private import bounds, generator_of, jitter_order
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.pixels import TRUNCATED, TRUNCATED_256, on_rgb, to_bytes

FACTORS = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
"""Kornia's names of the factors, by index of the adjustment."""

_NEUTRAL = np.array([[1.0], [1.0], [1.0], [0.0]], dtype=np.float32)
"""Factors that leave images unchanged, (4, 1)."""

OMITTED = 4
"""Index in an order that stands for an omitted adjustment."""

CONTRAST = 2
"""Flag: contrast is active."""

HUE = 8
"""Flag: hue is active."""

SATURATION_AND_HUE = 4 | HUE
"""Flags: saturation and hue are active."""

NO_NAN = 16
"""Flag: all values of the input are in [0, 1], so that none is NaN."""

TORCHVISION_GREY = 32
"""Flag: grey values use torchvision's weights of the channels."""

PERMUTES = 64
"""Flag: three more columns of the row hold a permutation of the channels, applied after all adjustments."""

BEFORE_CONTRAST = 128
"""Flag: only the adjustments before contrast run, or all if contrast is omitted. Channels are not permuted.

A kernel with this flag computes the mean grey value that contrast needs.
"""

FROM_CONTRAST = 256
"""Flag: only contrast and the adjustments after contrast run."""

IN_BYTES = 512
"""Flag: grey values, and the result of every adjustment, are converted to bytes."""

BYTE_RULES = (TRUNCATED, TRUNCATED, TRUNCATED, TRUNCATED_256)
"""torchvision's conversion to bytes after each adjustment."""


class _Jitter(PointOp):
    """Base class of both ops. Subclasses implement the adjustments in ``adjust``."""

    column_count = 9
    rgb_only = True
    description = "jitter"
    keeps_unit_range = True

    def _read(self, module: Any) -> None:
        generator = generator_of(module)
        limits = [bounds(getattr(generator, factor.replace("_factor", "_sampler"))) for factor in FACTORS]
        order = jitter_order(module)
        candidates = range(4) if order is None else order
        # Kornia omits an adjustment whose factors are neutral for the whole batch, so one with neutral bounds never runs.
        active = [index in candidates and limits[index] != (_NEUTRAL[index, 0],) * 2 for index in range(4)]
        self._set_up(limits, active, order)

    def _set_up(self, limits: list[Any], active: list[bool], order: tuple[int, ...] | None) -> None:
        """Set the bounds of the factors, which adjustments are active, and the order, which is random if it is ``None``."""
        self._low, self._high = np.array(limits, dtype=np.float32).T[..., None]
        self._active = active
        self._active_indices = np.flatnonzero(active)
        self._order_setting = order

    @property
    def flags(self) -> int:  # type: ignore[override]
        """Bits 0 to 3: 1 for each active adjustment."""
        return sum(1 << index for index, active in enumerate(self._active) if active)

    def flags_for(self, channels: int, frames: int = 1) -> int:
        """``flags``, without saturation, hue and permutation if images do not have three channels."""
        return self.flags if channels == 3 else self.flags & ~(SATURATION_AND_HUE | PERMUTES)

    def unsupported_channels(self, channels: int) -> tuple[str, str] | None:
        """Require three channels if saturation or hue is active."""
        return ("3", f"saturation and hue of {self.name}") if self.flags & SATURATION_AND_HUE and channels != 3 else None

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw ``"factors"``, (4, B), and ``"order"``, indices of adjustments: (batches, 4), for the batches drawn together."""
        return {"factors": sampler.within_bounds(self._low, self._high), "order": sampler.permutation(4)}

    def numbers(self, draws: OpDraws, sample: int) -> dict[str, float]:
        """Factors of the active adjustments."""
        return {FACTORS[index]: float(draws["factors"][index, sample]) for index in self._active_indices}

    def kornia_parameters(self, draws: OpDraws, size: Size) -> dict[str, Tensor]:
        """Factors and order under Kornia's names."""
        factors = dict(zip(FACTORS, torch.from_numpy(draws["factors"]), strict=True))
        return {**factors, "order": torch.from_numpy(draws["order"][0])}

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the four factors, then the order, with ``OMITTED`` for omitted adjustments."""
        factors: Array = draws["factors"]
        # Column by column, because NumPy's inner loop would otherwise run along the short rows, which is slower.
        for index, values in enumerate(factors):
            out[:, 1 + index] = values
        orders: Array = draws["order"]
        batch_size = len(out) // max(len(orders), 1)
        adjustments = orders
        if self._order_setting is not None:
            adjustments = np.tile(np.array(self._order_setting, dtype=np.int64), (len(orders), 1))
        omitted = ~np.array(self._active)[adjustments]
        # An adjustment is also omitted if all samples of a batch draw a neutral factor. To save time, the first sample of each
        # batch is checked before the others.
        if batch_size and (factors[self._active_indices, ::batch_size] == _NEUTRAL[self._active_indices]).any():
            neutral = (factors == _NEUTRAL).reshape(4, -1, batch_size).all(2).T
            omitted |= np.take_along_axis(neutral, adjustments, 1)
        order = np.full((len(orders), 4), OMITTED, dtype=np.float32)
        order[:, : adjustments.shape[1]] = np.where(omitted, OMITTED, adjustments)
        # A view of ``out``, because the rows of a batch are contiguous.
        rows = out.reshape(len(orders), batch_size, out.shape[1])
        for position in range(4):
            rows[:, :, 5 + position] = order[:, position, None]

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp, run the adjustments in order, clamp."""
        values = images.clamp(0, 1)
        for position in range(4):
            adjustments = rows[:, 5 + position]
            # On a GPU all adjustments run, because to read the order the host would wait for the device.
            candidates = set(adjustments.tolist()) if adjustments.device.type == "cpu" else {0, 1, 2, 3, OMITTED}
            output = values
            flags = self.flags_for(images.shape[1])
            for index in (index for index in range(4) if flags >> index & 1 and index in candidates):
                result = self.adjust(index, values, column(rows, 1 + index))
                result = to_bytes(result, BYTE_RULES[index]) if self.to_bytes is not None else result
                is_selected = column(rows, 5 + position) == index
                output = result if len(candidates) == 1 else torch.where(is_selected, result, output)
            values = output
        return values.clamp(0, 1)

    def adjust(self, index: int, values: Tensor, factor: Tensor) -> Tensor:
        """Apply adjustment ``index`` with ``factor``, (B, 1, 1, 1), to the images ``values``."""
        raise NotImplementedError


class ColorJitter(_Jitter):
    """``ColorJitter``: contrast blends with the mean grey value of the image, after the preceding adjustments.

    Pass type: pointwise; contrast needs one more launch, for the mean of the image.
    """

    lowers = (K.ColorJitter,)
    code = 16
    red_weight: ClassVar[float] = GREY[0]
    """Weight of red in grey values."""

    @property
    def needs_mean(self) -> bool:  # type: ignore[override]
        """True if contrast is active."""
        return self._active[1]

    def unsupported_channels(self, channels: int) -> tuple[str, str] | None:
        """Require one or three channels, three if hue is active: saturation does not change images of one channel."""
        return None if channels == 1 and not self.flags & HUE else super().unsupported_channels(channels)

    def adjust(self, index: int, values: Tensor, factor: Tensor) -> Tensor:
        """Apply adjustment ``index`` with ``factor``, (B, 1, 1, 1), to the images ``values``."""
        if index == 0:
            return (values * factor).clamp(0, 1)
        if index == 1:
            grey = self._grey(values) if values.shape[1] == 3 else values
            mean = grey.mean((1, 2, 3), keepdim=True)
            return (values * factor + mean * (1 - factor)).clamp(0, 1)
        if index == 2:
            return ((1 - factor) * self._grey(values) + factor * values).clamp(0, 1)
        return on_rgb(rotate_hue, values, factor)

    def _grey(self, images: Tensor) -> Tensor:
        """Grey values, (B, 1, H, W), of RGB images, (B, 3, H, W)."""
        grey = grayscale(images, self.red_weight)
        return to_bytes(grey, TRUNCATED) if self.to_bytes is not None else grey


class ColorJiggle(_Jitter):
    """``ColorJiggle``: the adjustments of ``RandomBrightness``, ``RandomContrast``, ``RandomSaturation`` and ``RandomHue``."""

    lowers = (K.ColorJiggle,)
    code = 17

    def adjust(self, index: int, values: Tensor, factor: Tensor) -> Tensor:
        """Apply adjustment ``index`` with ``factor``, (B, 1, 1, 1), to the images ``values``."""
        if index == 0:
            return (values + (factor - 1)).clamp(0, 1)
        if index == 1:
            return (values * factor).clamp(0, 1)
        return on_rgb(scale_saturation if index == 2 else rotate_hue, values, factor)
