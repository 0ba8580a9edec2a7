"""``v2.ElasticTransform``: moves pixels by a smooth random field.

The field is two numbers per pixel, which Philox computes from a seed on the device of the images. A blur is a product with one
matrix per axis in float64, so that fields are equal on CPUs and GPUs, except for the last bits.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample
from torchvision.transforms import v2

from gpuaug.fusion.ops.base import Array, OpDraws, Size
from gpuaug.fusion.ops.geometry import FieldOp
from gpuaug.fusion.ops.positional import NOISE_FIELDS, philox
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.ops.torchvision.base import Call, TorchvisionOp, image_fill, interpolation_of, mask_fill
from gpuaug.fusion.pixels import ROUNDED


class Elastic(TorchvisionOp, FieldOp):
    """``v2.ElasticTransform``, with one field per sample.

    Support: fused, in a pass that PyTorch computes for the whole batch, with a field that the seed decides instead of
    PyTorch's generator, and with masks, boxes and keypoints.
    """

    lowers = (v2.ElasticTransform,)
    kernel = "torch"
    column_count = 3
    byte_rule = ROUNDED
    takes_any_range = True
    launches = 300
    description = "elastic"

    def _read(self, transform: Any) -> None:
        self.fill = None if image_fill(transform) is None else np.atleast_1d(self.unit_fill(transform)).tolist()
        self.keeps_unit_range = self.fill is None or 0 <= min(self.fill) <= max(self.fill) <= 1
        self._alphas = tuple(map(float, transform.alpha))
        self._sigmas = tuple(map(float, transform.sigma))

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        mode = interpolation_of(self.module)
        if mode not in ("nearest", "bilinear"):
            return f"interpolation={mode!r}"
        return None if all(self._sigmas) or not any(self._sigmas) else "one sigma is 0"

    def unsupported_size(self, size: Size) -> str | None:
        """Reason if the blur reaches beyond the reflected image, for which torchvision raises an error; else ``None``."""
        reach = max(kernel_size(sigma) // 2 for sigma in self._sigmas)
        return f"blurs over {reach} pixels" if reach >= min(size.height, size.width) else None

    def per_channel(self, channels: int) -> dict[str, Any]:
        """``fill``, if there is one."""
        return {} if self.fill is None else {"fill": self.fill}

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw ``"field"``, (B, 2): seed and index of the field."""
        return {"field": np.floor(sampler.uniform(2).T * np.float32(NOISE_FIELDS))}

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write seed and index of the field."""
        out[:, 1:] = draws["field"]

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """``elastic`` with the ``displacement``."""
        field = torch.from_numpy(draws["field"][sample : sample + 1])
        image = size.sample(sample)
        displacement = self._displacements(field, image.height, image.width)
        fill = image_fill(self.module)
        return [("elastic", {"displacement": displacement, "interpolation": self.module.interpolation, "fill": fill})]

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Move the pixels of images, (B, C, H, W)."""
        return self._moved(images, rows, interpolation_of(self.module), self.fill)

    def apply_to_masks(self, masks: Tensor, rows: Tensor) -> Tensor:
        """Move the pixels of masks, (B, C, H, W) of any dtype, with the nearest pixel."""
        moved = self._moved(masks.float(), rows, "nearest", [mask_fill(self.module)]).to(masks.dtype)
        return torch.where(rows[:, 0, None, None, None] != 0, moved, masks)

    def apply_to_points(self, points: Tensor, owners: Tensor, rows: Tensor, size: Size, *, edges: bool) -> Tensor:
        """Move points against the displacement of their pixel, as torchvision does instead of an inversion of the field.

        As in torchvision, coordinates that refer to pixel edges are rounded: down for a keypoint, up for a corner of a box.
        """
        are_corners = points.ndim - owners.ndim == 2
        owners = owners[..., None] if are_corners else owners
        shift = 0.5 if edges else 0.0
        pixels = (points + shift).ceil() if edges and are_corners else (points + 0.5).floor()
        sides = (int(size.width), int(size.height))
        x, y = (pixels[..., axis].long().clamp(0, sides[axis] - 1) for axis in (0, 1))
        offsets = self._displacements(rows[:, 1:3], sides[1], sides[0])[owners, y, x]
        offsets = torch.stack([offsets[..., axis] * (sides[axis] / 2) for axis in (0, 1)], -1)
        moved = (torch.stack((x, y), -1) - shift if edges else points) - offsets
        return torch.where(rows[owners, :1] != 0, moved, points)

    def _moved(self, images: Tensor, rows: Tensor, mode: str, fill: list[float] | None) -> Tensor:
        """Move the pixels of float32 images, (B, C, H, W).

        Args:
            images: Images, or masks as float32.
            rows: Rows of the samples, (B, row_width).
            mode: ``"nearest"`` or ``"bilinear"``.
            fill: Value outside the image, one or one per channel. With ``None``, 0 is interpolated there.
        """
        height, width = images.shape[2:]
        columns, lines = (
            torch.linspace((1 - side) / side, (side - 1) / side, side, dtype=images.dtype, device=images.device)
            for side in (width, height)
        )
        grid = torch.stack(torch.meshgrid(columns, lines, indexing="xy"), 2) + self._displacements(rows[:, 1:3], height, width)
        if fill is None:
            return grid_sample(images, grid, mode, align_corners=False)
        # The last channel is the weight of the pixels inside of the image.
        sampled = grid_sample(torch.cat((images, torch.ones_like(images[:, :1])), 1), grid, mode, align_corners=False)
        moved, inside = sampled[:, :-1], sampled[:, -1:]
        fills = torch.stack([images.new_full((), value) for value in fill])[:, None, None]
        return torch.where(inside < 0.5, fills, moved) if mode == "nearest" else inside * (moved - fills) + fills

    def _displacements(self, field: Tensor, height: int, width: int) -> Tensor:
        """Compute the displacements of pixels along x and y, in units in which a side of the image is 2.

        Shape:
            - field: (B, 2), seed and index of the field
            - returns: (B, H, W, 2) float32
        """
        seed, index = field.long()[:, :, None, None].unbind(1)
        pixel_index = torch.arange(height * width, device=field.device).view(height, width)
        zero = torch.zeros_like(pixel_index)
        words = philox((pixel_index, zero, index, zero), (seed, torch.zeros_like(seed)))
        displacements = []
        for word, alpha, sigma, side in zip(words[:2], self._alphas, self._sigmas, (width, height), strict=True):
            offsets = (word >> 8).double() * 2.0**-23 - 1
            if sigma > 0:
                size = kernel_size(sigma)
                blur_x, blur_y = (
                    blur_matrix(length, size, axis_sigma, field.device)
                    for length, axis_sigma in zip((width, height), self._sigmas, strict=True)
                )
                offsets = blur_y @ offsets @ blur_x.T
            displacements.append(offsets.float() * alpha / side)
        return torch.stack(displacements, 3)


def kernel_size(sigma: float) -> int:
    """Return the size in pixels of the blur of a field: the next odd number from 8 · sigma + 1 on."""
    return int(8 * sigma + 1) | 1 if sigma > 0 else 1


@lru_cache(64)
def blur_matrix(side: int, size: int, sigma: float, device: torch.device) -> Tensor:
    """Return the matrix of a Gaussian blur of ``side`` pixels, reflected at the border, (side, side) float64."""
    taps = np.arange(size) - size // 2
    weights = np.exp(-0.5 * (taps / sigma) ** 2)
    positions = np.abs(np.arange(side)[:, None] + taps)
    positions = side - 1 - np.abs(side - 1 - positions)
    matrix = np.zeros((side, side))
    np.add.at(matrix, (np.arange(side)[:, None], positions), weights / weights.sum())
    return torch.from_numpy(matrix).to(device)
