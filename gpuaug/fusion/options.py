"""What a user asks of a fused pipeline, checked once."""

from dataclasses import dataclass
from typing import Literal

import torch

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.policies.choice import Pick

BoxForm = Literal["xyxy", "xywh", "cxcywh", "cxcywh_share"]
"""What the boxes of target dicts are: corners, a corner and sides, a centre and sides, or these as shares of the image."""

_OUTPUT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_FORMATS = (torch.contiguous_format, torch.channels_last)


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of :func:`gpuaug.fuse`.

    Raises:
        ArgumentError: If one of them is none of its values.
    """

    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format
    pick: Pick = "batch"
    ragged: bool = False
    antialias: bool = False
    views: int = 1
    boxes: BoxForm = "xyxy"
    num_classes: int | None = None
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.dtype not in _OUTPUT_TYPES:
            raise ArgumentError(
                f"dtype must be torch.float32, torch.bfloat16 or torch.float16, got {self.dtype}. "
                "Leave it out for float32 and convert the result."
            )
        if self.memory_format not in _FORMATS:
            raise ArgumentError(
                f"memory_format must be torch.contiguous_format or torch.channels_last, got {self.memory_format}. Leave it out."
            )
        if self.pick not in ("batch", "sample"):
            raise ArgumentError(f"pick must be 'batch' or 'sample', got {self.pick!r}. Leave it out to pick as Kornia does.")
        if not isinstance(self.views, int) or isinstance(self.views, bool) or self.views < 1:
            raise ArgumentError(f"views must be a whole number of 1 or more, got {self.views!r}. Leave it out for one.")
        if self.boxes not in ("xyxy", "xywh", "cxcywh", "cxcywh_share"):
            raise ArgumentError(
                f"boxes must be 'xyxy', 'xywh', 'cxcywh' or 'cxcywh_share', got {self.boxes!r}. Leave it out for torchvision's."
            )
        if self.num_classes is not None and (not isinstance(self.num_classes, int) or self.num_classes < 1):
            raise ArgumentError(f"num_classes must be a whole number of 1 or more, got {self.num_classes!r}. Leave it out.")
        if not 0 <= self.label_smoothing < 1:
            raise ArgumentError(f"label_smoothing must be in [0, 1), got {self.label_smoothing!r}. Leave it out for none.")
        if self.label_smoothing and self.num_classes is None:
            raise ArgumentError(
                f"label_smoothing must come with num_classes, got {self.label_smoothing!r} without. "
                "Pass how many classes there are: num_classes=1000."
            )
