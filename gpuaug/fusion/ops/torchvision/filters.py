"""torchvision's transforms whose output pixel depends on other pixels: blur, sharpness, equalize, autocontrast, and matrices.

A transform is *lowered* to an op, or run by torchvision. The ops inherit their arithmetic from the ops of Kornia's modules. A
*level* is one of the 256 values of uint8.
"""

from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2

from gpuaug.fusion.ops import filters
from gpuaug.fusion.ops.base import Array, FrontOp, OpDraws, Size
from gpuaug.fusion.ops.torchvision.base import Call, TorchvisionOp, pair
from gpuaug.fusion.pixels import ROUNDED, TRUNCATED


class Blur(TorchvisionOp, filters.BlurOp):
    """``v2.GaussianBlur``, with one standard deviation per sample for both axes.

    Support: fused, begins a pass.
    """

    lowers = (v2.GaussianBlur,)
    byte_rule = ROUNDED
    border = "reflect"

    def _read(self, transform: Any) -> None:
        width, height = pair(transform.kernel_size)
        self.kernel_size = int(height), int(width)
        self.bounds = {"sigma": (float(transform.sigma[0]), float(transform.sigma[1]))}

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """``gaussian_blur`` with ``kernel_size`` and ``sigma``."""
        sigma = float(draws["sigma"][sample])
        return [("gaussian_blur", {"kernel_size": list(self.kernel_size[::-1]), "sigma": [sigma, sigma]})]


class Sharpness(TorchvisionOp, filters.SharpnessOp):
    """``v2.RandomAdjustSharpness``.

    Support: fused, begins a pass; an error for images without one or three channels.
    """

    lowers = (v2.RandomAdjustSharpness,)
    call = ("adjust_sharpness", "sharpness_factor")
    byte_rule = TRUNCATED
    channel_counts = (1, 3)
    unfused_dtypes = (torch.int16,)

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the sharpness factor."""
        out[:, 1] = self.module.sharpness_factor  # type: ignore[assignment]


class SharpnessJitter(Sharpness):
    """LeRobot's ``SharpnessJitter``: adjusts sharpness by a random factor per sample."""

    def _read(self, transform: Any) -> None:
        self.bounds = {"sharpness_factor": (float(transform.sharpness[0]), float(transform.sharpness[1]))}

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the sharpness factor."""
        out[:, 1] = draws["sharpness_factor"]


class Equalize(TorchvisionOp, filters.Equalize):
    """``v2.RandomEqualize``. uint8 images are rounded to the nearest level, float images are converted as in torchvision.

    Support: fused, begins a pass, with an additional launch for the histogram.
    """

    lowers = (v2.RandomEqualize,)
    call = ("equalize",)
    keeps_values = False
    unfused_dtypes = (torch.uint16, torch.int16)

    def _read(self, transform: Any) -> None:
        self.to_levels = (255.0, 0.5 + filters.LEVEL_TOLERANCE) if self.units == torch.uint8 else (255.999, 0.0)


class Autocontrast(TorchvisionOp, filters.AutoContrast):
    """``v2.RandomAutocontrast``. A constant channel is unchanged.

    Support: fused, begins a pass, with an additional launch for minimum and maximum; an error for images without one or
    three channels.
    """

    lowers = (v2.RandomAutocontrast,)
    call = ("autocontrast",)
    byte_rule = TRUNCATED
    channel_counts = (1, 3)
    epsilon = 0.0


class LinearTransformation(TorchvisionOp, FrontOp):
    """``v2.LinearTransformation``: subtracts a vector from all pixels of an image, and multiplies by a matrix.

    The matrix and the vector of the transform are read at every call, and copied to the device of the images if they are on
    another.

    Support: fused for float32 and float64 images, with a float32 matrix, in a pass that PyTorch computes for the whole batch.
    """

    lowers = (v2.LinearTransformation,)
    kernel = "torch"
    column_count = 1
    keeps_unit_range = False
    takes_any_range = True
    launches = 2
    description = "linear transformation"
    calls = None  # type: ignore[assignment]  # torchvision has no function of it

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        dtype = self.module.mean_vector.dtype
        if self.image_dtype not in (torch.float32, torch.float64):
            return f"it returns float32 for {self.image_dtype}"
        return None if dtype == torch.float32 else f"its matrix is {dtype}"

    def unsupported_size(self, size: Size) -> str | None:
        """Reason if the matrix is for another number of values, for which torchvision raises an error; else ``None``."""
        count = size.channels * size.height * size.width
        expected = len(self.module.mean_vector)  # type: ignore[arg-type]
        return None if count == expected else f"its matrix is for {expected} values per image, not {count}"

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Subtract the vector and multiply by the matrix."""
        vector, matrix = (getattr(self.module, name).to(images.device) for name in ("mean_vector", "transformation_matrix"))
        product: Tensor = (images.flatten(1) - vector) @ matrix
        return product.view(images.shape)
