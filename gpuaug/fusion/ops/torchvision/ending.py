"""What torchvision's transforms of targets do, which a fused pipeline does in its end. Imports nothing of torchvision's."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Ending:
    """What torchvision's transforms of targets make of them where a pipeline ends, whatever their place in it."""

    boxes: str | None = None
    """The form that boxes are converted to, by its name in ``fuse(…, boxes=…)``."""
    masks: torch.dtype | None = None
    """The type that masks are converted to."""
    is_pure: bool = False
    """Whether torchvision's tensors leave as plain ones."""
    min_size: float = 1.0
    min_area: float = 1.0
    """How many pixels wide and high a valid box has to be, and of what area."""

    def then(self, other: "Ending") -> "Ending":
        """This ending, and another one after it."""
        return Ending(
            other.boxes or self.boxes,
            other.masks or self.masks,
            self.is_pure or other.is_pure,
            max(self.min_size, other.min_size),
            max(self.min_area, other.min_area),
        )


AS_THEY_CAME = Ending()
