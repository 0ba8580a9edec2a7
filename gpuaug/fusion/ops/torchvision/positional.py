"""torchvision's pointwise transforms that depend on pixel coordinates: erasing and Gaussian noise.

A transform is *lowered* to an op, or run by torchvision. A *sample* is an image or a clip.
"""

from typing import Any

import numpy as np
import torch
from torchvision.transforms import v2

from gpuaug.fusion.ops import positional
from gpuaug.fusion.ops.base import Array, OpDraws, Size, host_tensor
from gpuaug.fusion.ops.sampler import Sampler, extra_uniforms
from gpuaug.fusion.ops.torchvision.base import Call, TorchvisionOp, log_ratios
from gpuaug.fusion.pixels import LARGEST, ROUNDED

CANDIDATES = 10
"""Number of candidate rectangles per sample. The first that is smaller than the image is erased; without one, none."""


class Erasing(TorchvisionOp, positional.Erasing):
    """``v2.RandomErasing``: fills a rectangle with a value per channel, or with noise. Masks are not modified.

    Support: fused; `value="random"` with noise that the seed decides instead of PyTorch's generator.
    """

    lowers = (v2.RandomErasing,)
    erases_masks = False

    def _read(self, transform: Any) -> None:
        values = [0] if transform.value is None else transform.value
        self.value = [self.to_unit_range(int(value) if self.units in LARGEST else value) for value in values]
        if transform.value is None:
            self.flags = positional.ERASES_WITH_NOISE | (0 if self.to_bytes is None else positional.IN_BYTES)
        self._min_area, max_area = (float(bound) for bound in transform.scale)
        self._area_range = max_area - self._min_area
        self._min_log_ratio, max_log_ratio = log_ratios(self.name, transform)
        self._log_ratio_range = max_log_ratio - self._min_log_ratio

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        # torchvision converts noise to these types differently on each device.
        of_16_bits = self.units in LARGEST and self.to_bytes is None
        return f"value='random' for {self.units}" if self.module.value is None and of_16_bits else None

    def per_channel(self, channels: int) -> dict[str, Any]:
        """``value``, unless it is random."""
        return {} if self.module.value is None else {"value": self.module.value}

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw a rectangle per sample in pixels: ``"xs"``, ``"ys"``, ``"widths"`` and ``"heights"``, (B,) float32 each.

        Width and height are 0 for a sample if no candidate is smaller than the image. With ``value="random"``, also draw
        ``"field"``, (B, 2): seed and index of the noise field.
        """
        numbers = sampler.uniform(4)
        heights, widths = self._sides(numbers[0], numbers[1], size)
        # Indices of the samples whose first candidate is too large.
        open_samples = np.flatnonzero((heights >= size.height) | (widths >= size.width))
        if open_samples.size:
            open_size = size.select(open_samples)
            areas, aspects = extra_uniforms(numbers[:, open_samples], CANDIDATES - 1)
            other_heights, other_widths = self._sides(areas, aspects, open_size)
            fits = (other_heights < open_size.height) & (other_widths < open_size.width)
            first = fits.argmax(0)[None]
            any_fits = fits.any(0)
            for sides, candidates in ((heights, other_heights), (widths, other_widths)):
                sides[open_samples] = np.where(any_fits, np.take_along_axis(candidates, first, 0)[0], 0)
        draws = {
            "widths": widths,
            "heights": heights,
            "xs": np.floor(numbers[2] * (np.float32(size.width + 1) - widths)),
            "ys": np.floor(numbers[3] * (np.float32(size.height + 1) - heights)),
        }
        if self.flags & positional.ERASES_WITH_NOISE:
            draws["field"] = np.floor(sampler.uniform(2).T * np.float32(positional.NOISE_FIELDS))
        return draws

    def _sides(self, area: Array, aspect: Array, size: Size) -> tuple[Array, Array]:
        """(heights, widths) of candidate rectangles in pixels, from uniform numbers in [0, 1) for area and aspect ratio."""
        pixels = (area * np.float32(self._area_range) + np.float32(self._min_area)) * np.float32(size.height * size.width)
        ratio = np.exp(
            (aspect * np.float32(self._log_ratio_range) + np.float32(self._min_log_ratio)).astype(np.float64)
        ).astype(np.float32)
        return np.rint(np.sqrt(pixels * ratio)), np.rint(np.sqrt(pixels / ratio))

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """``erase`` with the rectangle in pixels and the fill value; no call if nothing is erased."""
        names = {"i": "ys", "j": "xs", "h": "heights", "w": "widths"}
        rectangle = {argument: int(draws[name][sample]) for argument, name in names.items()}
        if not rectangle["h"] or not rectangle["w"]:
            return []
        if self.module.value is not None:
            return [("erase", {**rectangle, "v": host_tensor(self.module.value, np.float32)[:, None, None]})]
        seed, field = torch.from_numpy(draws["field"][sample : sample + 1].T)
        noise = positional.normal(seed, field, size.channels, size.sample(sample).height, size.sample(sample).width)[0]
        lines, columns = (slice(rectangle[start], rectangle[start] + rectangle[side]) for start, side in ("ih", "jw"))
        return [("erase", {**rectangle, "v": noise[:, lines, columns]})]


class GaussianNoise(TorchvisionOp, positional.GaussianNoise):
    """``v2.GaussianNoise``: adds a noise field. The noise of bytes is truncated to integers.

    Support: fused, with noise that the seed decides instead of PyTorch's generator; the noise of uint8 images that may
    exceed 16 bits, such as with `sigma=25.5`, is not fused.
    """

    lowers = (v2.GaussianNoise,)
    byte_rule = ROUNDED
    unfused_dtypes = (torch.uint16, torch.int16)

    def _read(self, transform: Any) -> None:
        is_bytes = self.to_bytes is not None
        self.keeps_unit_range = bool(transform.clip) or is_bytes
        self.takes_any_range = not transform.clip
        self.flags = (positional.CLAMPS if transform.clip else 0) | (positional.IN_BYTES if is_bytes else 0)

    @property
    def mean_and_std(self) -> tuple[float, float]:
        """Mean and standard deviation of the noise; for integer images in units of pixel values."""
        transform: Any = self.module
        unit = LARGEST.get(self.units, 1)
        return float(transform.mean) * unit, float(transform.sigma) * unit

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        mean, std = self.mean_and_std
        if std < 0:
            return "sigma is negative"
        # torchvision adds bytes in int16. No number of a noise field is above 6.
        if self.to_bytes is not None and not abs(mean) + 6 * std < torch.iinfo(torch.int16).max - 255:
            return "the noise of bytes may overflow int16"
        return super().unsupported()

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """``gaussian_noise`` with the noise as its mean, (C, H, W) or (T, C, H, W), and without noise of its own."""
        noise = self.kornia_parameters(self.sample_draws(draws, sample), size.sample(sample))["gaussian_noise"]
        # In float64, because torchvision multiplies by 255 and truncates.
        noise = noise.to(self.image_dtype) if self.to_bytes is None else noise.double() / LARGEST[self.units]
        return [("gaussian_noise", {"mean": noise if size.frames else noise[0], "sigma": 0.0, "clip": self.module.clip})]
