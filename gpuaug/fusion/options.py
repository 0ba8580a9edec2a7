"""Validation of the arguments of ``gpuaug.fuse``."""

from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args

import torch

from gpuaug.core.errors import ArgumentError, flag, one_of, shown, whole_number
from gpuaug.core.ragged import ELEMENTS_LIMIT
from gpuaug.fusion.policies.picking import Pick

BoxFormatName = Literal["xyxy", "xywh", "cxcywh", "cxcywh_share"]
"""Format of boxes in target dicts, (N, 4), in pixels.

``"xyxy"``: left, top, right, bottom. ``"xywh"``: left, top, width, height. ``"cxcywh"``: centre (x, y), width, height.
``"cxcywh_share"``: as ``"cxcywh"``, with x and width divided by the width of the image, y and height by its height.
"""

# Valid values of ``dtype``, ``boxes`` and ``memory_format``.
_OUTPUT_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
_BOXES = get_args(BoxFormatName)
_FORMATS = (torch.contiguous_format, torch.channels_last)


@dataclass(frozen=True, slots=True)
class Options:
    """Arguments of ``gpuaug.fuse``, which documents them. The constructor validates them.

    Raises:
        ArgumentError, ArgumentTypeError: If an argument has an invalid value.
    """

    dtype: torch.dtype | None = None
    memory_format: torch.memory_format = torch.contiguous_format
    pick: Pick = "batch"
    ragged: bool = False
    antialias: bool = False
    views: int = 1
    boxes: BoxFormatName = "xyxy"
    num_classes: int | None = None
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        classes = self.num_classes
        largest = ELEMENTS_LIMIT - 1  # kernels index values in 32 bits
        valid_options = {
            "dtype": None
            if self.dtype is None
            else one_of("dtype", self.dtype, _OUTPUT_TYPES, "Leave it out, and convert the result."),
            "memory_format": one_of("memory_format", self.memory_format, _FORMATS, "Leave it out."),
            "pick": one_of("pick", self.pick, ("batch", "sample"), "Leave it out to pick as Kornia does."),
            "ragged": flag("ragged", self.ragged, "Leave it out for images of one size."),
            "antialias": flag("antialias", self.antialias, "Leave it out for Kornia's pixels."),
            "views": whole_number("views", self.views, "Leave it out for one.", least=1, most=largest),
            "boxes": one_of("boxes", self.boxes, _BOXES, "Leave it out for torchvision's."),
            "num_classes": None
            if classes is None
            else whole_number("num_classes", classes, "Leave it out.", least=1, most=largest),
        }
        for name, value in valid_options.items():
            object.__setattr__(self, name, value)
        smoothing = self.label_smoothing
        if not isinstance(smoothing, Real) or isinstance(smoothing, bool) or not 0 <= smoothing < 1:
            raise ArgumentError(f"label_smoothing must be in [0, 1), got {shown(smoothing)}. Leave it out for none.")
        if self.label_smoothing and self.num_classes is None:
            raise ArgumentError(
                f"label_smoothing must come with num_classes, got {self.label_smoothing!r} without. "
                "Pass how many classes there are: num_classes=1000."
            )
