"""Random erasing."""

from typing import Any, ClassVar

import numpy as np
import torch
from kornia import augmentation as K
from torch import Tensor, nn

from gpuaug.fusion.ops.base import Array, OpDraws, PointOp, Size, bounds, column, host_tensor
from gpuaug.fusion.ops.sampler import Sampler


class Erasing(PointOp):
    """RandomErasing: a value in a rectangle."""

    code, width, positional, counts_pixels = 13, 6, True, True
    words = "erase"
    erases_masks: ClassVar[bool] = True
    """Whether masks become 0 in the rectangle, as in Kornia."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        generator: Any = module._param_generator
        self._scale = bounds(generator.scale_sampler)
        self._around_one = hasattr(generator, "index_sampler")
        if self._around_one:
            self._ratios = [bounds(generator.ratio_sampler1), bounds(generator.ratio_sampler2)]
        else:
            self._ratios = [bounds(generator.ratio_sampler)]
        self._value = float(generator.value)

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Whole sides of an area and ratio, and a start where the rectangle fits."""
        area = sampler.within(*self._scale) * np.float32(size.height * size.width)
        ratio = sampler.within(*self._ratios[0])
        if self._around_one:
            ratio = np.where(sampler.uniform() > 0.5, ratio, sampler.within(*self._ratios[1]))
        heights = np.rint(np.sqrt(area * ratio)).clip(1, size.height)
        widths = np.rint(np.sqrt(area / ratio)).clip(1, size.width)
        across, down = sampler.uniform(2)
        return {
            "widths": widths,
            "heights": heights,
            "xs": np.floor(across * (size.width - widths + 1)),
            "ys": np.floor(down * (size.height - heights + 1)),
        }

    def kornia_parameters(self, drawn: OpDraws, size: Size) -> dict[str, Tensor]:
        """The same rectangles, and the value."""
        made = {name: torch.from_numpy(drawn[name]) for name in ("widths", "heights", "xs", "ys")}
        return {**made, "values": host_tensor(np.full(size.batch, self._value), np.float32)}

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The rectangle, first pixel in and first pixel out, and the value."""
        out[:, 1], out[:, 2] = drawn["xs"], drawn["xs"] + drawn["widths"]
        out[:, 3], out[:, 4] = drawn["ys"], drawn["ys"] + drawn["heights"]
        out[:, 5] = self._value

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Put the value into the rectangle."""
        return torch.where(self.covers(images, rows), column(rows, 5), images)

    def covers(self, images: Tensor, rows: Tensor) -> Tensor:
        """(B, 1, H, W): which pixels of (B, C, H, W) lie in the rectangle."""
        x = torch.arange(images.shape[3], device=images.device)
        y = torch.arange(images.shape[2], device=images.device)[:, None]
        left, right, top, bottom = (column(rows, index) for index in range(1, 5))
        return (x >= left) & (x < right) & (y >= top) & (y < bottom)


LOWERED: dict[type[nn.Module], type[PointOp]] = {K.RandomErasing: Erasing}
