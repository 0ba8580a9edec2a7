"""Operations of torchvision's ``RandAugment``, ``TrivialAugmentWide``, ``AutoAugment`` and ``AugMix``, as ops.

A *sample* is an image or a clip. The strength of an operation is its *magnitude*. The ops do not draw: the policy
(``policies/torchvision.py``) draws ``"magnitude"``, (B,) float64, for its operations, and adds ``"adjustment"`` for an
``Adjustment``. The *units* of an op are the dtype of its input images, whose value range thresholds and fill values refer to.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torchvision.transforms import v2

from gpuaug.fusion.ops.base import Array, OpDraws, Size
from gpuaug.fusion.ops.color_jitter import OMITTED
from gpuaug.fusion.ops.torchvision import color, filters, warp
from gpuaug.fusion.ops.torchvision.base import Call, TorchvisionOp, Units, fill_setting
from gpuaug.fusion.pixels import LARGEST


class AffineOperation(warp.Affine):
    """ShearX, ShearY, TranslateX and TranslateY. Shears keep the upper left corner of the image fixed.

    The magnitude of a shear is the tangent of its angle; the magnitude of a translation is the shift in pixels.
    """

    def __init__(self, name: str, policy: Any, units: Units) -> None:
        centre = [0, 0] if name.startswith("Shear") else None
        transform = v2.RandomAffine(0, interpolation=policy.interpolation, fill=fill_setting(policy), center=centre)
        super().__init__(name, transform, units)

    def _affine_draws(self, draws: OpDraws) -> OpDraws:
        """Draws under the names of ``warp.Affine``: shears in degrees, shifts in whole pixels, rounded towards zero.

        Parameters that the operation does not use are scalars, so that no sines and cosines of arrays are computed.
        """
        magnitude = draws["magnitude"]
        affine_draws: OpDraws = dict.fromkeys(("angle", "shift_x", "shift_y", "shear_x", "shear_y"), np.float64(0))
        affine_draws["scale"] = np.float64(1)
        axis = self.name[-1].lower()
        if self.name.startswith("Shear"):
            affine_draws[f"shear_{axis}"] = np.degrees(np.arctan(magnitude))
        else:
            affine_draws[f"shift_{axis}"] = np.trunc(magnitude)
        return affine_draws

    def _forward_matrices(self, draws: OpDraws, size: Size) -> Array:
        return super()._forward_matrices(self._affine_draws(draws), size)

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """``affine`` with ``shear`` in degrees, or with ``translate`` in pixels."""
        affine_draws = self._affine_draws(draws)
        return super().calls({name: np.broadcast_to(affine_draws[name], size.batch) for name in affine_draws}, sample, size)


class Rotate(warp.Rotation):
    """Rotate. The magnitude is the angle in degrees, counterclockwise."""

    def __init__(self, name: str, policy: Any, units: Units) -> None:
        super().__init__(name, v2.RandomRotation(0, interpolation=policy.interpolation, fill=fill_setting(policy)), units)

    def _forward_matrices(self, draws: OpDraws, size: Size) -> Array:
        return super()._forward_matrices({"angle": draws["magnitude"]}, size)

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """``rotate`` with ``angle`` in degrees."""
        return super().calls({"angle": draws["magnitude"]}, sample, size)


ADJUSTMENT_INDEX = {"Brightness": 0, "Contrast": 1, "Color": 2}
"""Index of the adjustment in ``v2.ColorJitter``, by the name of the operation."""


class Adjustment(color.ColorJitter):
    """Brightness, Contrast and Color: ``v2.ColorJitter`` with a single adjustment, by the factor 1 + magnitude.

    One op of a pass can run all three operations, so ``draws["adjustment"]`` is an index, or one index per sample.
    """

    # All three, because ``explain()`` describes the op of a pass.
    description = ", ".join(ADJUSTMENT_INDEX).lower()

    def __init__(self, name: str, policy: nn.Module, units: Units) -> None:
        super().__init__(name, v2.ColorJitter((0, 2), (0, 2), (0, 2)), units)

    @property
    def adjustment(self) -> int:
        """Index of the adjustment in ``v2.ColorJitter``: 0 brightness, 1 contrast, 2 saturation."""
        return ADJUSTMENT_INDEX[self.name]

    def numbers(self, draws: OpDraws, sample: int) -> dict[str, float]:
        """Magnitude of one sample."""
        return {"magnitude": float(draws["magnitude"][sample])}

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write one factor for brightness, contrast and saturation, a hue of 0, and an order with only the drawn adjustment."""
        factor = 1 + draws["magnitude"]
        for column, values in enumerate((factor, factor, factor, 0, draws["adjustment"], OMITTED, OMITTED, OMITTED), 1):
            out[:, column] = values

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """``adjust_brightness``, ``adjust_contrast`` or ``adjust_saturation`` with its factor."""
        name = ("brightness", "contrast", "saturation")[self.adjustment]
        return [(f"adjust_{name}", {f"{name}_factor": 1 + float(draws["magnitude"][sample])})]


class Sharpness(filters.Sharpness):
    """Sharpness, with the factor 1 + magnitude."""

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the sharpness factor."""
        out[:, 1] = 1 + draws["magnitude"]

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """``adjust_sharpness`` with ``sharpness_factor``."""
        return [("adjust_sharpness", {"sharpness_factor": 1 + float(draws["magnitude"][sample])})]


class Posterize(color.Posterize):
    """Posterize. The magnitude is the number of bits per value that are not set to 0."""

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the step between two output levels, and 0.5, the offset that rounds values to the nearest byte."""
        out[:, 1] = np.exp2(8 - draws["magnitude"])
        out[:, 2] = 0.5

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """``posterize`` with ``bits``."""
        return [("posterize", {"bits": int(draws["magnitude"][sample])})]


class Solarize(color.Solarize):
    """Solarize. The magnitude is the threshold as a fraction of the largest value."""

    def _read(self, policy: Any) -> None:
        """Do nothing, because the policy has no threshold."""

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the threshold in [0, 1], and 0 for the number that only Kornia's transform adds to the pixels."""
        # For bytes, the threshold is between two levels, so that rounding errors of pixels do not matter.
        magnitude = draws["magnitude"]
        out[:, 1] = color.float_threshold(255 * magnitude) / 255 if self.units == torch.uint8 else magnitude
        out[:, 2] = 0

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """``solarize`` with ``threshold`` in the units of the input images."""
        return [("solarize", {"threshold": LARGEST.get(self.units, 1.0) * float(draws["magnitude"][sample])})]


OPERATIONS: dict[str, Callable[[str, Any, Units], TorchvisionOp]] = {
    **dict.fromkeys(("ShearX", "ShearY", "TranslateX", "TranslateY"), AffineOperation),
    "Rotate": Rotate,
    **dict.fromkeys(ADJUSTMENT_INDEX, Adjustment),
    "Sharpness": Sharpness,
    "Posterize": Posterize,
    "Solarize": Solarize,
    "AutoContrast": filters.Autocontrast,
    "Equalize": filters.Equalize,
    "Invert": color.Invert,
}
"""Op for each operation name of torchvision's policies. Names not listed do nothing."""
