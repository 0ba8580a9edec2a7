"""ColorJitter and ColorJiggle: four adjustments in an order that is drawn once for the batch."""

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
"""Placeholder in the order, for an adjustment that is left out."""

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
"""Flag: only the adjustments before the contrast are made, or all where the order has none; channels keep their order."""

FROM_CONTRAST = 256
"""Flag: only the contrast and what comes after it are made."""


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
        # Kornia leaves out an adjustment that is neutral for the whole batch. One whose bounds are neutral always is.
        self._active = [index in used and self.bounds[index] != (_NEUTRAL[index, 0],) * 2 for index in range(4)]
        self._drawn = np.flatnonzero(self._active)
        self._low, self._high = np.array(self.bounds, dtype=np.float32).T[..., None]

    @property
    def flags(self) -> int:  # type: ignore[override]
        """A bit for each adjustment that is not always neutral."""
        return sum(1 << index for index, active in enumerate(self._active) if active)

    def flags_for(self, channels: int, frames: int = 1) -> int:
        """Without saturation, hue and a permutation for other images than of three channels, which have none."""
        return self.flags if channels == 3 else self.flags & ~(OF_COLOURS | PERMUTES)

    def channels_taken(self, channels: int) -> tuple[str, str] | None:
        """Brightness and contrast are of any number of channels, saturation and hue of three."""
        return ("3", f"saturation and hue of {self.name}") if self.flags & OF_COLOURS and channels != 3 else None

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Four factors per sample, and an order of the adjustments per batch."""
        return {"factors": sampler.between(self._low, self._high), "order": sampler.permutation(4)}

    def of_sample(self, drawn: OpDraws, index: int) -> OpDraws:
        """The draws of sample ``index``, as a batch of one: its column of the factors, and the order of the batch."""
        kept = {"factors": drawn["factors"][:, index : index + 1], "order": drawn["order"]}
        return {**kept, "apply_mask": drawn["apply_mask"][index : index + 1]}

    def numbers(self, drawn: OpDraws, sample: int) -> dict[str, float]:
        """The factors of adjustments that are not always neutral."""
        return {FACTORS[index]: float(drawn["factors"][index, sample]) for index in self._drawn}

    def kornia_parameters(self, drawn: OpDraws, size: Size) -> dict[str, Tensor]:
        """The same factors and order."""
        factors = dict(zip(FACTORS, torch.from_numpy(drawn["factors"]), strict=True))
        return {**factors, "order": torch.from_numpy(drawn["order"][0])}

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The factors, then the order, with ``NONE`` for adjustments that are left out."""
        factors: Array = drawn["factors"]
        # A column at a time: NumPy's inner loop is along a row otherwise.
        for index, values in enumerate(factors):
            out[:, 1 + index] = values
        orders: Array = drawn["order"]
        each = len(out) // max(len(orders), 1)
        steps = orders if self._fixed is None else np.tile(self._fixed, (len(orders), 1))
        left_out = ~np.array(self._active)[steps]
        # Neutral for every sample by chance, too: it hardly ever is for the first.
        if each and (factors[self._drawn, ::each] == _NEUTRAL[self._drawn]).any():
            neutral = (factors == _NEUTRAL).reshape(4, -1, each).all(2).T
            left_out |= np.take_along_axis(neutral, steps, 1)
        order = np.full((len(orders), 4), NONE, dtype=np.float32)
        order[:, : steps.shape[1]] = np.where(left_out, NONE, steps)
        # A view of all rows: samples of a batch are contiguous.
        rows = out.reshape(len(orders), each, out.shape[1])
        for position in range(4):
            rows[:, :, 5 + position] = order[:, position, None]

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Clamp, the adjustments in order, clamp."""
        values = images.clamp(0, 1)
        for position in range(4):
            steps = rows[:, 5 + position]
            # A batch has one order. On a CPU it is read; on a GPU the host would have to wait for it.
            taken = set(steps.tolist()) if steps.device.type == "cpu" else {0, 1, 2, 3, NONE}
            changed = values
            flags = self.flags_for(images.shape[1])
            for index in (index for index in range(4) if flags >> index & 1 and index in taken):
                adjusted = self.adjusted(index, values, column(rows, 1 + index))
                changed = adjusted if len(taken) == 1 else torch.where(column(rows, 5 + position) == index, adjusted, changed)
            values = changed
        return values.clamp(0, 1)

    def adjusted(self, index: int, values: Tensor, factor: Tensor) -> Tensor:
        """One adjustment: 0 brightness, 1 contrast, 2 saturation, 3 hue."""
        raise NotImplementedError


class ColorJitter(_Jitter):
    """ColorJitter, as torchvision's: contrast is around the mean grey of the image after the adjustments before it."""

    code = 16
    red_share: ClassVar[float] = GREY[0]
    """Weight of red in a grey."""

    @property
    def needs_mean(self) -> bool:
        """True unless contrast is always neutral."""
        return self._active[1]

    def channels_taken(self, channels: int) -> tuple[str, str] | None:
        """Grey images have a saturation with Kornia, which is always the same."""
        return None if channels == 1 and not self.flags & HUE else super().channels_taken(channels)

    def adjusted(self, index: int, values: Tensor, factor: Tensor) -> Tensor:
        """One adjustment: 0 brightness, 1 contrast, 2 saturation, 3 hue."""
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
    """ColorJiggle: the adjustments of the single ops, contrast being a product."""

    code = 17

    def adjusted(self, index: int, values: Tensor, factor: Tensor) -> Tensor:
        """One adjustment: 0 brightness, 1 contrast, 2 saturation, 3 hue."""
        if index == 0:
            return (values + (factor - 1)).clamp(0, 1)
        if index == 1:
            return (values * factor).clamp(0, 1)
        return saturated(values, factor) if index == 2 else hue_turned(values, factor)


LOWERED: dict[type[nn.Module], type[PointOp]] = {K.ColorJitter: ColorJitter, K.ColorJiggle: ColorJiggle}
