"""Dtype (*type*) and range of the images before each transform of a pipeline, tracked while the pipeline is lowered to ops.

They are the dtype and range that the images would have without gpuaug. A conversion of integers to floats scales them to
[0, 1], or keeps their values, such as [0, 255]. A fused pipeline computes in [0, 1] in both cases. If the values are kept, it
multiplies by 255 (for uint8) later: directly before the first op whose result is not proportional to its input.

A *fallback module* is not lowered to ops, but run by its library.
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
"""Largest ``std`` of a normalization that may be meant for images in [0, 1].

For images in [0, 255], ``std`` is usually about 60, or 255 to scale them to [0, 1].
"""


class Refusal(NamedTuple):
    """Error for calls with images of a type that a transform of the pipeline does not accept."""

    error: ArgumentError | ArgumentTypeError
    before_any_fallback: bool
    """True if no fallback module runs before the transform.

    The error is then raised before the pipeline runs. Otherwise it is raised after the pipeline has run, because a fallback
    module may return another type than assumed, for which the pipeline is lowered again.
    """


@dataclass(slots=True)
class ImageTypes:
    """Type and range of the images before the next transform.

    Args:
        dtype: Type of the input images of the pipeline. The attribute is the type before the next transform.
        returned_types: Output type of each fallback module that changes the type, by index among torchvision's fallback
            modules.
        is_video: Whether the input has the class ``tv_tensors.Video``, for which transforms may have separate settings.
    """

    dtype: torch.dtype
    returned_types: Mapping[int, torch.dtype] = field(default_factory=dict)
    is_video: bool = False
    remaining_conversions: int = field(default=0, init=False)
    """Number of conversions of integers to floats from the next transform on."""
    has_conversion: bool = field(default=False, init=False)
    """Whether the pipeline has a conversion of integers to floats."""
    fallbacks: int = field(default=0, init=False)
    """Number of torchvision's fallback modules before the next transform."""
    type_change: TypeChange = field(default=UNCHANGED_TYPE, init=False)
    """Change of the class of images, such as ``tv_tensors.Image``, by transforms since the last fallback module."""
    float_largest: int = field(default=1, init=False)
    """Value that represents 1 if the images are floats. Above 1, such as 255, after a conversion that keeps integer values."""
    delayed_factor: int = field(default=1, init=False)
    """Ratio of torchvision's values to the values of the fused pipeline, which multiplies by this factor later."""
    largest: int = field(init=False)
    """Value that represents 1 in the input images of the pipeline, such as 255 for uint8."""
    at_most_one: bool = field(init=False)
    """True while values are certain to be at most 1. Integers count as divided by the largest value of their type."""
    refusal: Refusal | None = field(default=None, init=False)
    """Error for input images of this type; ``None`` if all transforms accept them."""
    _is_signed: bool = field(init=False)
    """Whether input images may have negative values."""

    def __post_init__(self) -> None:
        self.largest = LARGEST.get(self.dtype, 1)
        self.at_most_one = self.dtype in LARGEST
        self._is_signed = self.dtype == torch.int16

    @property
    def are_integers(self) -> bool:
        """Whether the images are integers before the next transform, if it belongs to torchvision."""
        return self.dtype in LARGEST

    @property
    def in_unit_range(self) -> bool:
        """True while values are certain to lie in [0, 1]."""
        return self.at_most_one and not self._is_signed

    def enter_kornia(self) -> None:
        """Set the type to float32, in which Kornia computes, before a module of Kornia.

        If a conversion to floats follows, the type is kept: torchvision's transforms before the conversion expect integers.
        """
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
        """Update the type for a module that torchvision runs, and return the index of the module among such modules.

        ``keeps_range``: whether the module is certain to keep values in [0, 1].
        """
        index = self.fallbacks
        self.fallbacks += 1
        self.dtype = self.returned_types.get(index, self.dtype)
        if self.are_integers:
            self.float_largest = 1
        self.at_most_one = self.at_most_one and keeps_range
        self.type_change = UNCHANGED_TYPE
        return index

    def require_floats(self, name: str) -> None:
        """Set ``refusal`` if images are integers. Called for transform ``name``, which torchvision runs on floats only."""
        if self.are_integers:
            self._refuse(
                ArgumentTypeError(
                    f"images must be floating for {name}, got {self.dtype}. Put v2.ToDtype(torch.float32, scale=True) before "
                    "it."
                )
            )

    def require_unit_range(self, name: str) -> None:
        """Set ``refusal`` if images may be floats above 1. Called for module ``name``, whose library requires [0, 1]."""
        if not self.are_integers and self.float_largest > 1:
            self._refuse(
                ArgumentError(
                    f"images must be in [0, 1] for {name}, which clamps floats or reflects them at 1, got floats in "
                    f"[0, {self.float_largest}] from a ToDtype without scale. Put it before the ToDtype, or pass scale=True, "
                    "and settings for images in [0, 1] to the transforms after it."
                )
            )

    def check_fill(self, name: str, fill: Any, setting: str = "fill") -> None:
        """Set ``refusal`` if images are integers, and the fill of a transform, as an integer, exceeds the range of their type.

        Args:
            name: Name of the transform.
            fill: Fill of the transform, divided by the largest value of the integers.
            setting: Name of the fill among the settings of the transform, for the error.
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
        """Set ``refusal``, unless it is already set: the error of the first transform is kept."""
        self.refusal = self.refusal or Refusal(error, before_any_fallback=not self.fallbacks)

    def normalize(self, op: Normalize) -> None:
        """Check a normalization against the type and range of its input images, and update the range.

        Raises:
            ArgumentError: If ``mean`` or ``std`` is for values above 1, but a conversion in the pipeline has scaled to [0, 1].
        """
        if op.package == "torchvision":
            self.require_floats(op.name)
        mean, std = float(op.mean.max(initial=0)), float(op.std.max(initial=0))
        if self.at_most_one and (mean > 1 or std > _MOST_DEVIATION):
            # With a conversion, the input of the pipeline is integers of any type, so the error names the divisor of each type.
            types = ", by 65535 for uint16 images or by 32767 for int16 ones" if self.has_conversion else ""
            reason = (
                f"mean and std of {op.name} must be for images in [0, 1], got a mean of {mean:g} and a std of {std:g}. "
                f"Divide both by {self.largest}{types}."
            )
            if self.has_conversion:
                raise ArgumentError(reason)
            self._refuse(ArgumentError(reason))
        self.at_most_one = False
        self.float_largest = 1
