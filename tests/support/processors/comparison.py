"""Comparison of pixels that are rounded to bytes between a resize and a normalization."""

import torch

from gpuaug.fusion.backends.patches import Resampling, write_patches

LARGEST_SHARE = 0.001
"""Largest share of values that may differ because they are close to a rounding threshold."""
BAND = 1 / 255
"""Largest distance of such a value from the threshold, in levels."""


def unrounded(batch, arrangement, resampling):
    """Levels of the resized images before they are rounded, in the arrangement of the output."""
    levels = torch.arange(256.0).expand(3, 256).contiguous()
    return write_patches(batch, arrangement, Resampling(resampling.cubic, False, levels), torch.float32)[0]


def beyond_thresholds(got, wanted, batch, arrangement, resampling):
    """How two outputs of a batch differ, other than by one level close to a rounding threshold, or an empty string."""
    if not resampling.rounds:
        tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}[got.dtype]
        return "" if torch.allclose(got, wanted, atol=tolerance, rtol=0) else f"by {(got - wanted).abs().max().item()}"
    differs = got != wanted
    share = differs.double().mean().item()
    if share > LARGEST_SHARE:
        return f"{share:.3%} of the values"
    level = unrounded(batch, arrangement, resampling)[differs]
    distance = ((level - level.floor()) - 0.5).abs()
    if (distance > BAND).any():
        return f"a value {distance.max().item():.4f} levels from a rounding threshold"
    step = (resampling.levels[:, 1:] - resampling.levels[:, :-1]).max().item()
    apart = (got.double() - wanted.double()).abs().max().item()
    return f"by {apart / step:.2f} levels" if apart > 1.01 * step + (0 if got.dtype == torch.float32 else 0.04) else ""
