"""Conversions of targets, which are applied once, at the end of a fused pipeline.

*Targets* are annotations that are transformed together with the images: masks, boxes, keypoints, labels. Only transforms of
torchvision have such conversions. This module does not import torchvision, because pipelines of Kornia run without torchvision.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TargetConversions:
    """Conversions of targets at the end of a pipeline, collected from transforms at any position."""

    boxes: str | None = None
    """Output format of boxes, a value of ``fuse(…, boxes=…)``; ``None`` for the input format."""
    masks: torch.dtype | None = None
    """Output dtype of masks; ``None`` for the input dtype."""
    is_pure: bool = False
    """True if torchvision's tensors, such as ``tv_tensors.Mask``, are returned as plain tensors."""
    min_size: float = 1.0
    """Smallest width and height of a valid box, in pixels."""
    min_area: float = 1.0
    """Smallest area of a valid box, in pixels."""

    def then(self, other: "TargetConversions") -> "TargetConversions":
        """Return the combination of these conversions with the conversions ``other`` of a later transform."""
        return TargetConversions(
            other.boxes or self.boxes,
            other.masks or self.masks,
            self.is_pure or other.is_pure,
            max(self.min_size, other.min_size),
            max(self.min_area, other.min_area),
        )


NO_CONVERSIONS = TargetConversions()
