"""Kornia's ``ColorJitter`` and ``ColorJiggle``: four adjustments, in a random order per batch."""

from typing import Any, ClassVar

import numpy as np
import torch
from kornia import augmentation as K
from torch import Tensor, nn

from gpuaug.fusion.ops.base import Array, OpDraws, PointOp, Size, bounds, column
from gpuaug.fusion.ops.channel import GREY, grey_of
from gpuaug.fusion.ops.color import hue_turned, saturated
from gpuaug.fusion.ops.sampler import Sampler

FACTORS = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
_NEUTRAL = np.array([[1.0], [1.0], [1.0], [0.0]], dtype=np.float32)
NONE = 4
"""Placeholder in the order, for an omitted adjustment."""

CONTRAST = 2
"""Flag: the contrast is not always neutral."""

HUE = 8
"""Flag: the hue is not always neutral."""

OF_COLOURS = 4 | HUE
"""Flags: saturation and hue are not always neutral."""

CLEAN = 16
"""Flag: no pixel is NaN."""

TORCHVISION_GREY = 32
"""Flag: greys use torchvision's weights."""

PERMUTES = 64
"""Flag: three more columns of the row hold a permutation of the channels, applied after all adjustments."""

BEFORE_CONTRAST = 128
"""Flag: only adjustments before contrast run (all if the order has no contrast); channels are not permuted."""

FROM_CONTRAST = 256
"""Flag: only contrast and the adjustments after contrast run."""


class _Jitter(PointOp):
    width = 9
    rgb_only = True
    words = "jitter"
    keeps_unit_range = True

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        generator: Any = module._param_generator
        self.bounds = [bounds(getattr(generator, factor.replace("_factor", "_sampler"))) for factor in FACTORS]
        self._fixed: tuple[int, ...] | None = module._fixed_order  # type: ignore[assignment]
        used = range(4) if self._fixed is None else self._fixed
        # Kornia omits an adjustment that is neutral for the whole batch, so one with neutral bounds never runs.
        self._active = [index in used and self.bounds[index] != (_NEUTRAL[index, 0],) * 2 for index in range(4)]
        self._drawn = np.flatnonzero(self._active)
        self._low, self._high = np.array(self.bounds, dtype=np.float32).T[..., None]

    @property
    def flags(self) -> int:  # type: ignore[override]
        """One bit per adjustment that is not always neutral."""
        return sum(1 << index for index, active in enumerate(self._active) if active)

    def flags_for(self, channels: int, frames: int = 1) -> int:
        """``flags``, without saturation, hue and permutation unless images have three channels."""
        return self.flags if channels == 3 else self.flags & ~(OF_COLOURS | PERMUTES)

    def channels_taken(self, channels: int) -> tuple[str, str] | None:
        """Require three channels for saturation and hue."""
        return ("3", f"saturation and hue of {self.name}") if self.flags & OF_COLOURS and channels != 3 else None

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw ``"factors"``, (4, B), and ``"order"``, (batches, 4) indices of adjustments."""
        return {"factors": sampler.between(self._low, self._high), "order": sampler.permutation(4)}

    def of_sample(self, drawn: OpDraws, index: int) -> OpDraws:
        """Draws of sample ``index`` as a batch of one: its column of the factors, and the order of the batch."""
        sample = {"factors": drawn["factors"][:, index : index + 1], "order": drawn["order"]}
        return {**sample, "apply_mask": drawn["apply_mask"][index : index + 1]}

    def numbers(self, drawn: OpDraws, sample: int) -> dict[str, float]:
        """Factors of the adjustments that are not always neutral."""
        return {FACTORS[index]: float(drawn["factors"][index, sample]) for index in self._drawn}

    def kornia_parameters(self, drawn: OpDraws, size: Size) -> dict[str, Tensor]:
        """Factors and order under Kornia's names."""
        factors = dict(zip(FACTORS, torch.from_numpy(drawn["factors"]), strict=True))
        return {**factors, "order": torch.from_numpy(drawn["order"][0])}

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """Write the four factors, then the order, with ``NONE`` for omitted adjustments."""
        factors: Array = drawn["factors"]
        # One column at a time is faster: otherwise NumPy's inner loop runs along the short rows.
        for index, values in enumerate(factors):
            out[:, 1 + index] = values
        orders: Array = drawn["order"]
        batch = len(out) // max(len(orders), 1)
        adjustments = orders if self._fixed is None else np.tile(self._fixed, (len(orders), 1))
        omitted = ~np.array(self._active)[adjustments]
        # An adjustment may also be drawn neutral for a whole batch. The check of the first samples is almost always False.
        if batch and (factors[self._drawn, ::batch] == _NEUTRAL[self._drawn]).any():
            neutral = (factors == _NEUTRAL).reshape(4, -1, batch).all(2).T
            omitted |= np.take_along_axis(neutral, adjustments, 1)
        order = np.full((len(orders), 4), NONE, dtype=np.float32)
        order[:, : adjustments.shape[1]] = np.where(omitted, NONE, adjustments)
        # A view: the rows of a batch are contiguous.
        rows = out.reshape(len(orders), batch, out.shape[1])
        for position in range(4):
            rows[:, :, 5 + position] = order[:, position, None]

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp, run the adjustments in order, clamp."""
        values = images.clamp(0, 1)
        for position in range(4):
            adjustments = rows[:, 5 + position]
            # A batch has one order. Reading it from a GPU would synchronise, so all adjustments run there.
            taken = set(adjustments.tolist()) if adjustments.device.type == "cpu" else {0, 1, 2, 3, NONE}
            changed = values
            flags = self.flags_for(images.shape[1])
            for index in (index for index in range(4) if flags >> index & 1 and index in taken):
                adjusted = self.adjusted(index, values, column(rows, 1 + index))
                changed = adjusted if len(taken) == 1 else torch.where(column(rows, 5 + position) == index, adjusted, changed)
            values = changed
        return values.clamp(0, 1)

    def adjusted(self, index: int, values: Tensor, factor: Tensor) -> Tensor:
        """Apply adjustment ``index``: 0 brightness, 1 contrast, 2 saturation, 3 hue."""
        raise NotImplementedError


class ColorJitter(_Jitter):
    """``ColorJitter``: contrast blends with the mean grey value of the image, after the preceding adjustments."""

    code = 16
    red_share: ClassVar[float] = GREY[0]
    """Weight of red in grey values."""

    @property
    def needs_mean(self) -> bool:
        """True if contrast may run."""
        return self._active[1]

    def channels_taken(self, channels: int) -> tuple[str, str] | None:
        """Accept one channel unless hue may run: Kornia's saturation has no effect on images of one channel."""
        return None if channels == 1 and not self.flags & HUE else super().channels_taken(channels)

    def adjusted(self, index: int, values: Tensor, factor: Tensor) -> Tensor:
        """Apply adjustment ``index``: 0 brightness, 1 contrast, 2 saturation, 3 hue."""
        if index == 0:
            return (values * factor).clamp(0, 1)
        if index == 1:
            grey = grey_of(values, self.red_share) if values.shape[1] == 3 else values
            mean = grey.mean((1, 2, 3), keepdim=True)
            return (values * factor + mean * (1 - factor)).clamp(0, 1)
        if index == 2:
            return ((1 - factor) * grey_of(values, self.red_share) + factor * values).clamp(0, 1)
        return hue_turned(values, factor)


class ColorJiggle(_Jitter):
    """``ColorJiggle``: adjustments of Kornia's single modules; contrast is a multiplication."""

    code = 17

    def adjusted(self, index: int, values: Tensor, factor: Tensor) -> Tensor:
        """Apply adjustment ``index``: 0 brightness, 1 contrast, 2 saturation, 3 hue."""
        if index == 0:
            return (values + (factor - 1)).clamp(0, 1)
        if index == 1:
            return (values * factor).clamp(0, 1)
        return saturated(values, factor) if index == 2 else hue_turned(values, factor)


LOWERED: dict[type[nn.Module], type[PointOp]] = {K.ColorJitter: ColorJitter, K.ColorJiggle: ColorJiggle}
