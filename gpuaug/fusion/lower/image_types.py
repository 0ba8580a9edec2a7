"""Type and range of the images before each transform of a pipeline, tracked while the pipeline is lowered.

A *fallback module* is not lowered to ops, but run by its library. A conversion of integers to floats scales them to [0, 1], or
keeps their values, such as [0, 255]. A fused pipeline computes in [0, 1], and multiplies by 255 before the first op whose
result is not proportional to its input.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from gpuaug.core.errors import ArgumentError, ArgumentTypeError
from gpuaug.core.torchvision_types import UNCHANGED_TYPE, TypeChange
from gpuaug.fusion.ops.channel import Normalize
from gpuaug.fusion.pixels import LARGEST

_MOST_DEVIATION = 10.0
"""Largest ``std`` of a normalization that may be meant for images in [0, 1]. For bytes, users set about 60, or 255 to scale."""


class Refusal(NamedTuple):
    """Error for images of one type."""

    error: ArgumentError | ArgumentTypeError
    before_any_fallback: bool
    """True to raise the error at the first batch; otherwise after the fallback modules have run, which may change the type."""


@dataclass(slots=True)
class ImageTypes:
    """Type and range of the images before the next transform.

    Args:
        dtype: Type of the input images of the pipeline.
        returned_types: Output type of each fallback module that changes the type, by index among the fallback modules.
        is_video: Whether settings by type use the entry of ``tv_tensors.Video``.
    """

    dtype: torch.dtype
    returned_types: Mapping[int, torch.dtype] = field(default_factory=dict)
    is_video: bool = False
    remaining_conversions: int = field(default=0, init=False)
    """Number of conversions of integers to floats in the rest of the pipeline."""
    has_conversion: bool = field(default=False, init=False)
    """Whether the pipeline has a conversion of integers to floats."""
    fallbacks: int = field(default=0, init=False)
    """Number of torchvision's fallback modules before the next transform."""
    type_change: TypeChange = field(default=UNCHANGED_TYPE, init=False)
    """Change of the images' torchvision type since the last fallback module."""
    float_largest: int = field(default=1, init=False)
    """Value of floating images that represents 1. More than 1 after a conversion that does not scale integers."""
    delayed_factor: int = field(default=1, init=False)
    """Factor by which the images of torchvision exceed the images of the fused pipeline."""
    largest: int = field(init=False)
    """Value of the pipeline's input images that represents 1."""
    at_most_one: bool = field(init=False)
    """True while values are certain to be at most 1, with integers divided by the largest value of their type."""
    refusal: Refusal | None = field(default=None, init=False)
    """Error for input images of this type; ``None`` if they are accepted."""
    _is_signed: bool = field(init=False)
    """Whether input images may have negative values."""

    def __post_init__(self) -> None:
        self.largest = LARGEST.get(self.dtype, 1)
        self.at_most_one = self.dtype in LARGEST
        self._is_signed = self.dtype == torch.int16

    @property
    def are_integers(self) -> bool:
        """Whether the input of the next transform of torchvision is integers."""
        return self.dtype in LARGEST

    @property
    def in_unit_range(self) -> bool:
        """True while values are certain to lie in [0, 1]."""
        return self.at_most_one and not self._is_signed

    def enter_kornia(self) -> None:
        """Set the type to float32 for a module of Kornia, unless a conversion to floats follows in the pipeline."""
        if not self.remaining_conversions:
            self.dtype = torch.float32

    def to_floats(self, *, scale: bool) -> None:
        """Update the type and range for a conversion to float32."""
        self.remaining_conversions = max(self.remaining_conversions - 1, 0)
        if self.are_integers and not scale:
            self.float_largest = self.delayed_factor = LARGEST[self.dtype]
            self.at_most_one = False
        self.dtype = torch.float32

    def fall_back(self, *, keeps_range: bool) -> int:
        """Update the type for a module that torchvision runs, and return the index of the module among the fallback modules."""
        index = self.fallbacks
        self.fallbacks += 1
        self.dtype = self.returned_types.get(index, self.dtype)
        if self.are_integers:
            self.float_largest = 1
        self.at_most_one = self.at_most_one and keeps_range
        self.type_change = UNCHANGED_TYPE
        return index

    def require_floats(self, name: str) -> None:
        """Set ``refusal`` if the input of a transform is integers, and torchvision runs the transform on floats only."""
        if self.are_integers:
            self._refuse(
                ArgumentTypeError(
                    f"images must be floating for {name}, got {self.dtype}. Put v2.ToDtype(torch.float32, scale=True) before "
                    "it."
                )
            )

    def require_unit_range(self, name: str) -> None:
        """Set ``refusal`` if the input of a module is floats outside of [0, 1]. The library of the module expects [0, 1]."""
        if not self.are_integers and self.float_largest > 1:
            self._refuse(
                ArgumentError(
                    f"images must be in [0, 1] for {name}, which clamps floats or reflects them at 1, got floats in "
                    f"[0, {self.float_largest}] from a ToDtype without scale. Put it before the ToDtype, or pass scale=True, "
                    "and settings for images in [0, 1] to the transforms after it."
                )
            )

    def check_fill(self, name: str, fill: Any, setting: str = "fill") -> None:
        """Set ``refusal`` if the input of a transform is integers, and its fill is out of their range.

        Args:
            name: Name of the transform.
            fill: Fill of the transform, divided by the largest value of the integers.
            setting: Name of the setting.
        """
        if not self.are_integers:
            return
        limits = torch.iinfo(self.dtype)
        values = (float(value) * LARGEST[self.dtype] for value in np.atleast_1d(fill))
        outside = next((value for value in values if not limits.min <= value <= limits.max), None)
        if outside is not None:
            type_name = str(self.dtype).removeprefix("torch.")
            self._refuse(
                ArgumentError(
                    f"{setting} of {name} must be in [{limits.min}, {limits.max}] for {type_name} images, got {outside:g}. "
                    "Give it a value of these images."
                )
            )

    def _refuse(self, error: ArgumentError | ArgumentTypeError) -> None:
        """Set ``refusal`` to the first error."""
        self.refusal = self.refusal or Refusal(error, before_any_fallback=not self.fallbacks)

    def normalize(self, op: Normalize) -> None:
        """Check a normalization against the range of its input images, and update the range.

        Raises:
            ArgumentError: If the conversions of the pipeline imply another type or range of the images.
        """
        if op.package == "torchvision":
            self.require_floats(op.name)
        mean, std = float(op.mean.max(initial=0)), float(op.std.max(initial=0))
        if self.at_most_one and (mean > 1 or std > _MOST_DEVIATION):
            # A conversion that scales shows that images are integers, but not which integer type.
            types = ", by 65535 for uint16 images or by 32767 for int16 ones" if self.has_conversion else ""
            error = ArgumentError(
                f"mean and std of {op.name} must be for images in [0, 1], got a mean of {mean:g} and a std of {std:g}. "
                f"Divide both by {self.largest}{types}."
            )
            if self.has_conversion:
                raise error
            self._refuse(error)
        self.at_most_one = False
        self.float_largest = 1
