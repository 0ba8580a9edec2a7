"""Conversions of targets by torchvision's transforms, which a fused pipeline runs at its end. Does not import torchvision."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Ending:
    """Conversions of targets at the end of a pipeline, collected from its transforms at any position."""

    boxes: str | None = None
    """Output format of boxes, by its name in ``fuse(…, boxes=…)``; ``None`` to keep the format."""
    masks: torch.dtype | None = None
    """Output dtype of masks; ``None`` to keep the dtype."""
    is_pure: bool = False
    """True if tv_tensors are returned as plain tensors."""
    min_size: float = 1.0
    """Smallest width and height of a valid box, in pixels."""
    min_area: float = 1.0
    """Smallest area of a valid box, in pixels."""

    def then(self, other: "Ending") -> "Ending":
        """Combine this ending with ``other``, which comes later in the pipeline."""
        return Ending(
            other.boxes or self.boxes,
            other.masks or self.masks,
            self.is_pure or other.is_pure,
            max(self.min_size, other.min_size),
            max(self.min_area, other.min_area),
        )


AS_THEY_CAME = Ending()
