"""torchvision's MixUp and CutMix: one share or one rectangle for the batch, and the sample before each as its partner."""

from typing import Any

import numpy as np
from torch import Tensor, nn
from torchvision.transforms import v2

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.ops import mix
from gpuaug.fusion.ops.base import Array, OpDraws, Size
from gpuaug.fusion.ops.mix import MixOp, SoftLabels
from gpuaug.fusion.ops.sampler import Sampler


class TorchvisionMix(MixOp):
    """A mix whose labels are shares of the classes.

    What it draws is named as in the parameters of ``make_params``, which the transform's own ``transform`` takes.
    """

    package = "torchvision"

    def _read(self, module: Any) -> None:
        """None of the settings of Kornia's modules."""

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """The sample before each, and before the first the last; and what the batch shares."""
        return {"partner": np.roll(np.arange(size.batch), 1), **self.draw_lam(sampler.same(), size)}

    def labels(self, labels: Tensor, rows: Tensor) -> Tensor:
        """Shares, mixed, for labels that are shares already.

        Raises:
            ArgumentError: If they are class indices, of which torchvision has to know how many there are.
        """
        if labels.ndim != 2 or len(labels) != len(rows):
            way_out = "Pass the class index or the shares of each image."
            if labels.shape == rows.shape[:1]:
                way_out = f"For class indices pass num_classes to {self.name}, or to gpuaug.fuse."
            raise ArgumentError(
                f"class must be shares of the classes, ({len(rows)}, K), where {self.name} has no num_classes, got "
                f"{tuple(labels.shape)}. {way_out}"
            )
        return SoftLabels(labels.shape[1]).of(labels, rows)


class _Mix(TorchvisionMix):
    """One transform.

    Args:
        name: Its name in its container.
        transform: The user's. It is read, never changed, moved or called.
    """

    def __init__(self, name: str, transform: Any) -> None:
        super().__init__(name, transform)
        self._alpha = float(transform.alpha)
        self.num_classes = transform.num_classes


class MixUp(_Mix):
    """MixUp: a weighted mean with the partner."""

    def draw_lam(self, sampler: Sampler, size: Size) -> OpDraws:
        """The share of the sample itself."""
        return {"lam": sampler.beta(self._alpha)}

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The partner's weight, which is its share."""
        out[:, mix.LAM] = out[:, mix.WEIGHT] = 1 - drawn["lam"]

    def describe(self) -> str:
        """In a word."""
        return "mixup"


class CutMix(_Mix):
    """CutMix: a rectangle of the partner, which ends at the frame."""

    counts_pixels = True

    def draw_lam(self, sampler: Sampler, size: Size) -> OpDraws:
        """The corners of a rectangle about any pixel, and the share of the sample itself, which is that of the rest."""
        reach = 0.5 * np.sqrt(1.0 - sampler.beta(self._alpha).astype(np.float64))
        corners = []
        for side in (size.width, size.height):
            centre = min(int(sampler.uniform()[0] * side), side - 1) if size.batch else 0
            half = (reach * side).astype(np.int64)
            corners.append((np.maximum(centre - half, 0), np.minimum(centre + half, side)))
        (left, right), (top, bottom) = corners
        lam = 1.0 - (right - left) * (bottom - top) / (size.width * size.height)
        return {"box": np.stack((left, top, right, bottom), -1), "lam_adjusted": lam}

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The rectangle, and its share of the image."""
        out[:, mix.LAM] = 1.0 - drawn["lam_adjusted"]
        out[:, mix.RECTANGLE] = drawn["box"]

    def describe(self) -> str:
        """In a word."""
        return "cutmix"


LOWERED: dict[type[nn.Module], type[_Mix]] = {v2.MixUp: MixUp, v2.CutMix: CutMix}
