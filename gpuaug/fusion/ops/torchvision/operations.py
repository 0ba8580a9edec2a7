"""What torchvision's policies pick from: ops with the magnitude that a policy draws, ``"magnitude"``, (B,) float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import nn
from torchvision.transforms import v2

from gpuaug.fusion.ops.base import Array, OpDraws, Size
from gpuaug.fusion.ops.color_jitter import NONE
from gpuaug.fusion.ops.torchvision import color, filters, warp
from gpuaug.fusion.ops.torchvision.base import Call, TorchvisionOp, Units


class AffineOperation(warp.Affine):
    """ShearX, ShearY, TranslateX and TranslateY. Shears leave the upper left corner where it is."""

    def __init__(self, name: str, policy: Any, units: Units) -> None:
        centre = [0, 0] if name.startswith("Shear") else None
        made = v2.RandomAffine(0, interpolation=policy.interpolation, fill=policy.fill, center=centre)
        super().__init__(name, made, units)

    def _as_drawn(self, drawn: OpDraws) -> OpDraws:
        """The draws in the form of a RandomAffine: shears in degrees, shifts in whole pixels, rounded towards zero.

        Numbers that the operation does not change are scalars, since sines and cosines of them take most of the time.
        """
        magnitude = drawn["magnitude"]
        made: OpDraws = dict.fromkeys(("angle", "shift_x", "shift_y", "shear_x", "shear_y"), np.float64(0))
        made["scale"] = np.float64(1)
        axis = self.name[-1].lower()
        if self.name.startswith("Shear"):
            made[f"shear_{axis}"] = np.degrees(np.arctan(magnitude))
        else:
            made[f"shift_{axis}"] = np.trunc(magnitude)
        return made

    def _forward(self, drawn: OpDraws, size: Size) -> Array:
        return super()._forward(self._as_drawn(drawn), size)

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """Shift or shear."""
        made = self._as_drawn(drawn)
        return super().calls({name: np.broadcast_to(made[name], size.batch) for name in made}, sample, size)


class Rotate(warp.Rotation):
    """Rotate: by the magnitude, in degrees."""

    def __init__(self, name: str, policy: Any, units: Units) -> None:
        super().__init__(name, v2.RandomRotation(0, interpolation=policy.interpolation, fill=policy.fill), units)

    def _forward(self, drawn: OpDraws, size: Size) -> Array:
        return super()._forward({"angle": drawn["magnitude"]}, size)

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The angle."""
        return super().calls({"angle": drawn["magnitude"]}, sample, size)


ADJUSTED = {"Brightness": 0, "Contrast": 1, "Color": 2}
"""Operations that are one adjustment of a jitter, and its index."""


class Adjust(color.ColorJitter):
    """Brightness, Contrast and Color: a jitter of one adjustment, by 1 + the magnitude, with the same kernel for all three."""

    def __init__(self, name: str, policy: nn.Module, units: Units) -> None:
        super().__init__(name, v2.ColorJitter((0, 2), (0, 2), (0, 2)), units)

    @property
    def adjustment(self) -> int:
        """Its index among the adjustments of a jitter."""
        return ADJUSTED[self.name]

    def numbers(self, drawn: OpDraws, sample: int) -> dict[str, float]:
        """The magnitude."""
        return {"magnitude": float(drawn["magnitude"][sample])}

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The factor in the place of each, and an order with the one adjustment."""
        factor = 1 + drawn["magnitude"]
        for column, values in enumerate((factor, factor, factor, 0, drawn["adjustment"], NONE, NONE, NONE), 1):
            out[:, column] = values

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The adjustment and its factor."""
        name = ("brightness", "contrast", "saturation")[ADJUSTED[self.name]]
        return [(f"adjust_{name}", {f"{name}_factor": 1 + float(drawn["magnitude"][sample])})]

    def describe(self) -> str:
        """All three."""
        return ", ".join(ADJUSTED).lower()


class Sharpness(filters.Sharpness):
    """Sharpness: by 1 + the magnitude."""

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The factor."""
        out[:, 1] = 1 + drawn["magnitude"]

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The factor."""
        return [("adjust_sharpness", {"sharpness_factor": 1 + float(drawn["magnitude"][sample])})]


class Posterize(color.Posterize):
    """Posterize: to as many bits as the magnitude."""

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The step between the levels that are kept, and half a level, so that values are rounded to one."""
        out[:, 1] = np.exp2(8 - drawn["magnitude"])
        out[:, 2] = 0.5

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The number of bits."""
        return [("posterize", {"bits": int(drawn["magnitude"][sample])})]


class Solarize(color.Solarize):
    """Solarize: from the magnitude on, as a share of 255."""

    def __init__(self, name: str, policy: nn.Module, units: Units) -> None:
        TorchvisionOp.__init__(self, name, policy, units)

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The threshold, and nothing to add."""
        out[:, 1] = color.below_byte(255 * drawn["magnitude"]) / 255
        out[:, 2] = 0

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The threshold, of bytes."""
        return [("solarize", {"threshold": 255 * float(drawn["magnitude"][sample])})]


OPERATIONS: dict[str, Callable[[str, Any, Units], TorchvisionOp]] = {
    **dict.fromkeys(("ShearX", "ShearY", "TranslateX", "TranslateY"), AffineOperation),
    "Rotate": Rotate,
    **dict.fromkeys(ADJUSTED, Adjust),
    "Sharpness": Sharpness,
    "Posterize": Posterize,
    "Solarize": Solarize,
    "AutoContrast": filters.Autocontrast,
    "Equalize": filters.Equalize,
    "Invert": color.Invert,
}
"""By torchvision's names of them; what is left out is the identity."""
