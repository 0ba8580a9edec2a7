"""Type of the images at each place of a pipeline, followed in order while the pipeline is lowered."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from gpuaug.core.errors import ArgumentError, ArgumentTypeError
from gpuaug.fusion.ops.channel import Normalize
from gpuaug.fusion.pixels import LARGEST

_MOST_DEVIATION = 10.0
"""Largest standard deviation taken for one of images in [0, 1]. Those of bytes are about 60, and 255 where they only scale."""


class Refusal(NamedTuple):
    """The error for images of one type."""

    error: ArgumentError | ArgumentTypeError
    is_certain: bool
    """False if a fallback module stands before the transform that refuses them, and may return another type."""


@dataclass(slots=True)
class ImageTypes:
    """The type that images have where the next transform stands.

    Args:
        dtype: Type of the images that the pipeline is called with.
        scalings: Number of conversions from whole numbers to floats in [0, 1] that the pipeline declares.
        returned: Type that a fallback module returns, by its number in the pipeline, where another type than it is passed.
    """

    dtype: torch.dtype
    scalings: int = 0
    returned: Mapping[int, torch.dtype] = field(default_factory=dict)
    fallbacks: int = 0
    """Number of torchvision's fallback modules so far."""
    largest: int = field(init=False)
    """Value of the images that the pipeline is called with that stands for 1."""
    at_most_one: bool = field(init=False)
    """True while values are certain to be at most 1. Whole numbers stand for such values until a transform may change them."""
    refusal: Refusal | None = field(default=None, init=False)
    """Why images of the type that the pipeline is called with are refused. Images of another type may be accepted."""
    _declared: bool = field(init=False)
    _signed: bool = field(init=False)

    def __post_init__(self) -> None:
        self.largest = LARGEST.get(self.dtype, 1)
        self.at_most_one = self.dtype in LARGEST
        self._signed = self.dtype == torch.int16
        self._declared = self.scalings > 0

    @property
    def are_whole(self) -> bool:
        """Whether the next transform of torchvision is given whole numbers."""
        return self.dtype in LARGEST

    @property
    def in_unit_range(self) -> bool:
        """True while values are certain to lie in [0, 1]."""
        return self.at_most_one and not self._signed

    def enter_kornia(self) -> None:
        """Kornia's modules take floats. Where no conversion follows that says when, images become floats in front of them."""
        if not self.scalings:
            self.dtype = torch.float32

    def fall_back(self, *, keeps_range: bool) -> int:
        """Pass a module that torchvision runs, and return its number."""
        number = self.fallbacks
        self.fallbacks += 1
        self.dtype = self.returned.get(number, self.dtype)
        self.at_most_one = self.at_most_one and keeps_range
        return number

    def require_floats(self, name: str) -> None:
        """Refuse whole numbers for a transform that torchvision runs on floats alone."""
        if self.are_whole:
            self._refuse(
                ArgumentTypeError(
                    f"images must be floating for {name}, got {self.dtype}. Put v2.ToDtype(torch.float32, scale=True) before "
                    "it."
                )
            )

    def check_fill(self, name: str, fill: Any) -> None:
        """Refuse whole numbers for a transform whose fill, a share or one per channel, is no value of their type."""
        if not self.are_whole:
            return
        limits = torch.iinfo(self.dtype)
        values = (float(value) * LARGEST[self.dtype] for value in np.atleast_1d(fill))
        outside = next((value for value in values if not limits.min <= value <= limits.max), None)
        if outside is not None:
            type_name = str(self.dtype).removeprefix("torch.")
            self._refuse(
                ArgumentError(
                    f"fill of {name} must be in [{limits.min}, {limits.max}] for {type_name} images, got {outside:g}. Give it "
                    "a value of these images."
                )
            )

    def _refuse(self, error: ArgumentError | ArgumentTypeError) -> None:
        self.refusal = self.refusal or Refusal(error, is_certain=not self.fallbacks)

    def normalize(self, op: Normalize) -> None:
        """Check a normalisation against the images that it is given, and pass it.

        Raises:
            ArgumentError: If the conversions of the pipeline say that images have another type or range.
        """
        if op.package == "torchvision":
            self.require_floats(op.name)
        mean, std = float(op.mean.max(initial=0)), float(op.std.max(initial=0))
        if self.at_most_one and (mean > 1 or std > _MOST_DEVIATION):
            # A conversion says that images are whole numbers, and not of which type.
            types = ", by 65535 for uint16 images or by 32767 for int16 ones" if self._declared else ""
            error = ArgumentError(
                f"mean and std of {op.name} must be those of images in [0, 1], got a mean of {mean:g} and a std of {std:g}. "
                f"Divide both by {self.largest}{types}."
            )
            if self._declared:
                raise error
            self._refuse(error)
        self.at_most_one = False
