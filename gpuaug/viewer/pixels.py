"""Conversion of images for drawing: normalisation is undone, values are in [0, 1], channels are one or three."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_CLAMP_MARGIN = 1 / 255
"""Images whose values are at most this far outside [0, 1] are clamped; other images are rescaled."""

_QUANTILES = (0.005, 0.995)
"""Quantiles of an image that rescaling maps to 0 and 1."""

MAX_FRAMES = 4
"""Maximum number of shown frames of a clip: the first, the last, and frames at equal distances between them."""


def shown_frames(count: int) -> list[int]:
    """Return the indices of the shown frames of a clip of ``count`` frames."""
    return sorted({round(number * (count - 1) / (MAX_FRAMES - 1)) for number in range(MAX_FRAMES)})


def to_pixels(image: Tensor, normalized_by: tuple[Tensor, Tensor] | None = None) -> tuple[NDArray[np.float32], str]:
    """Return (pixels to draw, note on changes of values or channels).

    Args:
        image: An image on the host.
        normalized_by: (mean, standard deviation) of the normalisation to undo, or ``None``.

    Shape:
        - image: (C, H, W)
        - normalized_by: (C, 1, 1) or (1, 1, 1) each
        - returns: (H, W, 3), or (H, W) for grey, in [0, 1]
    """
    values = image.float()
    channels = len(values)
    notes = []
    if image.dtype == torch.uint8:
        values = values / 255
    else:
        # Not undone if the number of channels differs: a later stage has changed the channels.
        if normalized_by is not None and all(len(parameter) in (1, channels) for parameter in normalized_by):
            mean, deviation = normalized_by
            values = values * deviation + mean
        values, is_rescaled = _rescaled_if_outside(values)
        notes += ["stretched"] if is_rescaled else []
    values = values.nan_to_num(0.0).clamp(0, 1)  # rescaling a constant image gives NaN
    if channels not in (1, 3):
        notes.insert(0, f"{'channels 1 to 3' if channels > 3 else 'channel 1'} of {channels}")
        values = values[: 3 if channels > 3 else 1]
    array: Any = (values[0] if len(values) == 1 else values.permute(1, 2, 0)).numpy()
    return array, ", ".join(notes)


def _rescaled_if_outside(values: Tensor) -> tuple[Tensor, bool]:
    """Return (values, whether they were rescaled). If any value is outside [0, 1], ``_QUANTILES`` become 0 and 1."""
    finite = values[values.isfinite()].numpy()
    if not finite.size or (finite.min() >= -_CLAMP_MARGIN and finite.max() <= 1 + _CLAMP_MARGIN):
        return values, False
    low, high = (float(quantile) for quantile in np.quantile(finite, _QUANTILES))
    return (values - low) / (high - low), True
