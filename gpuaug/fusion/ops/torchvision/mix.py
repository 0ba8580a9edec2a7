"""torchvision's ``v2.MixUp`` and ``v2.CutMix``, which mix each sample with its *partner*, the preceding sample of the batch.

A *sample* is an image or a clip. One weight, or one rectangle, is drawn per batch. A *row* holds the parameters of one sample;
``ops/mix.py`` describes its columns. torchvision's *lam* is the weight of the sample, so the partner's weight is 1 - lam. Class
attributes without a comment are explained in ``ops/base.py``.
"""

from typing import Any

import numpy as np
from torch import Tensor
from torchvision.transforms import v2

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.ops import mix
from gpuaug.fusion.ops.base import Array, OpDraws, Size
from gpuaug.fusion.ops.mix import MixOp, SoftLabels
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.ops.torchvision.base import beta_concentration


class TorchvisionMix(MixOp):
    """Base class of mixes whose labels become class probabilities, (B, K).

    Draws have the names of the parameters that the transform's method ``make_params`` returns.
    """

    package = "torchvision"

    def _read_common(self, module: Any) -> None:
        """Do nothing: transforms lack the settings, such as ``p``, that all modules of Kornia have."""

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw ``"partner"``, the preceding sample, or the last for the first sample; and one weight or rectangle per batch."""
        return {"partner": np.roll(np.arange(size.batch), 1), **self.draw_weights(sampler.shared_by_samples(), size)}

    def labels(self, labels: Tensor, rows: Tensor) -> Tensor:
        """Mix labels that are class probabilities, (B, K). Called if neither the transform nor ``fuse`` has ``num_classes``.

        Raises:
            ArgumentError: If labels are no class probabilities. Class indices need ``num_classes``.
        """
        if labels.ndim != 2 or len(labels) != len(rows):
            way_out = "Pass the class index or the class probabilities of each image."
            if labels.shape == rows.shape[:1]:
                way_out = f"For class indices pass num_classes to {self.name}, or to gpuaug.fuse."
            raise ArgumentError(
                f"class must be class probabilities, ({len(rows)}, K), where {self.name} has no num_classes, got "
                f"{tuple(labels.shape)}. {way_out}"
            )
        return SoftLabels(labels.shape[1]).convert(labels, rows)


class _Mix(TorchvisionMix):
    """Base class of the ops of ``v2.MixUp`` and ``v2.CutMix``.

    Args:
        name: Name of the transform in its container.
        transform: Transform of the user. It is read, never changed, moved or called.

    Support: fused, also in a `RandomChoice` of mixes; the weight or rectangle is [drawn per batch](fuse.md#mixing), each image
    is mixed with the preceding image, and labels are returned as class probabilities.
    """

    def _read(self, transform: Any) -> None:
        self._alpha = beta_concentration(transform)
        self.num_classes = transform.num_classes


class MixUp(_Mix):
    """``v2.MixUp``: weighted mean of a sample and its partner."""

    lowers = (v2.MixUp,)
    description = "mixup"

    def draw_weights(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw ``"lam"``, the weight of the sample."""
        return {"lam": sampler.beta(self._alpha)}

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the partner's weight, which is the same for pixels and label."""
        out[:, mix.LABEL_WEIGHT] = out[:, mix.PIXEL_WEIGHT] = 1 - draws["lam"]


class CutMix(_Mix):
    """``v2.CutMix``: replaces a rectangle, clipped to the image, by the same rectangle of the partner."""

    lowers = (v2.CutMix,)
    stores_coordinates = True
    description = "cutmix"

    def draw_weights(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw a rectangle around a random pixel.

        Returns:
            ``"box"``, the rectangle (left, top, right, bottom) in pixels; and ``"lam_adjusted"``, the fraction of the image
            outside the rectangle.
        """
        half_fraction = 0.5 * np.sqrt(1.0 - sampler.beta(self._alpha).astype(np.float64))
        intervals = []  # along x, then along y
        for side in (size.width, size.height):
            centre = min(int(sampler.uniform()[0] * side), side - 1) if size.batch else 0
            half = (half_fraction * side).astype(np.int64)
            intervals.append((np.maximum(centre - half, 0), np.minimum(centre + half, side)))
        (left, right), (top, bottom) = intervals
        outside_fraction = 1.0 - (right - left) * (bottom - top) / (size.width * size.height)
        return {"box": np.stack((left, top, right, bottom), -1), "lam_adjusted": outside_fraction}

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the rectangle, and the label weight: the fraction of the image inside the rectangle."""
        out[:, mix.LABEL_WEIGHT] = 1.0 - draws["lam_adjusted"]
        out[:, mix.RECTANGLE] = draws["box"]
