"""``v2.MixUp`` and ``v2.CutMix``: one weight or rectangle per batch. The partner of a sample is the sample before it."""

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
    """Mix whose labels are class probabilities, (B, K).

    Draws have the names of the parameters that the transform's ``make_params`` returns and its ``transform`` takes.
    """

    package = "torchvision"

    def _read(self, module: Any) -> None:
        """Do nothing: the transform has no settings of Kornia's modules."""

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Return ``"partner"``, the index of the preceding sample (the last for the first), and draw the shared parameters."""
        return {"partner": np.roll(np.arange(size.batch), 1), **self.draw_lam(sampler.same(), size)}

    def labels(self, labels: Tensor, rows: Tensor) -> Tensor:
        """Mix labels that are class probabilities, (B, K).

        Raises:
            ArgumentError: If labels are class indices, which need ``num_classes``.
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
    """Op of one transform.

    Args:
        name: Name of the transform in its container.
        transform: Transform of the user. It is read, never changed, moved or called.
    """

    def __init__(self, name: str, transform: Any) -> None:
        super().__init__(name, transform)
        self._alpha = float(transform.alpha)
        self.num_classes = transform.num_classes


class MixUp(_Mix):
    """``v2.MixUp``: weighted mean of a sample and its partner."""

    def draw_lam(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw ``"lam"``, the weight of the sample."""
        return {"lam": sampler.beta(self._alpha)}

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """Write the partner's weight, for the image and for the label."""
        out[:, mix.LAM] = out[:, mix.WEIGHT] = 1 - drawn["lam"]

    def describe(self) -> str:
        """Short description for ``explain()``."""
        return "mixup"


class CutMix(_Mix):
    """``v2.CutMix``: replaces a rectangle, clipped to the image, by that of the partner."""

    counts_pixels = True

    def draw_lam(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw a rectangle around a random pixel.

        Returns:
            ``"box"``, (left, top, right, bottom) in pixels, and ``"lam_adjusted"``, the fraction of the image outside it.
        """
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
        """Write the rectangle, and its fraction of the image."""
        out[:, mix.LAM] = 1.0 - drawn["lam_adjusted"]
        out[:, mix.RECTANGLE] = drawn["box"]

    def describe(self) -> str:
        """Short description for ``explain()``."""
        return "cutmix"


LOWERED: dict[type[nn.Module], type[_Mix]] = {v2.MixUp: MixUp, v2.CutMix: CutMix}
