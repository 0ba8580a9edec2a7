"""Transforms of torchvision's reference scripts for detection and segmentation, which torchvision's package lacks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from gpuaug.core.errors import ArgumentTypeError, shown, whole_number


class PadIfSmaller(v2.Transform):  # type: ignore[misc]
    """Pad images on the right and below to sides of at least ``size`` pixels, with their masks, boxes and keypoints.

    A transform of torchvision v2, which ``gpuaug.fuse`` fuses and which also runs in a dataset.

    Args:
        size: Smallest height and width.
        fill: Value of the padding, as in ``v2.Pad``: a number, a sequence of one number per channel of images, or a dict of
            these by type, such as ``{tv_tensors.Mask: 255, "others": 0}``.

    Shape:
        - inputs: images (…, C, H, W), and masks, boxes and keypoints of torchvision's tensor classes
        - returns: the same structure; images (…, C, max(H, size), max(W, size))

    Raises:
        ArgumentTypeError: If ``size`` is not a whole number, or ``fill`` holds other values than numbers.
        ArgumentError: If ``size`` is less than 1.

    Cost:
        Fused, none of its own: a pass pads when it reads the images. Otherwise a copy of each input.

    Source:
        ``PadIfSmaller`` of torchvision's scripts, references/segmentation.

    Examples:
        >>> PadIfSmaller(8)(torch.ones(3, 4, 10)).shape
        torch.Size([3, 8, 10])
    """

    def __init__(self, size: int, fill: Any = 0) -> None:
        super().__init__()
        self.size = whole_number("size", size, "Pass the smallest side in pixels, such as size=480.", least=1)
        self.fill = _checked_fill(fill)

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Return the padding of a sample. torchvision calls this method.

        Args:
            flat_inputs: Images and targets of the sample.

        Returns:
            ``"padding"``: pixels (left, top, right, bottom).
        """
        height, width = v2.query_size(flat_inputs)
        return {"padding": [0, 0, max(self.size - width, 0), max(self.size - height, 0)]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Return an image or target with padding. torchvision calls this method.

        Args:
            inpt: Image or target.
            params: Result of ``make_params``.

        Returns:
            A value of the same type.
        """
        return _padded(inpt, params["padding"], self.fill)


class FixedSizeCrop(v2.Transform):  # type: ignore[misc]
    """Crop images at random to ``size``, and pad sides that are too short on the right or below.

    A transform of torchvision v2, which ``gpuaug.fuse`` fuses and which also runs in a dataset. Masks, boxes and keypoints are
    cropped and padded too. Both axes share one random number. A box outside of the crop gets an area of 0:
    ``v2.SanitizeBoundingBoxes`` removes it. ``v2.RandomCrop(size, pad_if_needed=True)`` pads on all sides instead.

    Args:
        size: (height, width) of the output, or one number for both.
        fill: Value of the padding of images: a number, a sequence of one number per channel, or a dict of these by type, as in
            ``v2.Pad``. Masks are padded with 0, unless a dict has another value for them.

    Shape:
        - inputs: images (…, C, H, W), and masks, boxes and keypoints of torchvision's tensor classes
        - returns: the same structure; images (…, C, *size)

    Raises:
        ArgumentTypeError: If ``size`` is not one or two whole numbers, or ``fill`` holds other values than numbers.
        ArgumentError: If a number of ``size`` is less than 1.

    Cost:
        Fused, none of its own: a pass crops and pads when it reads the images. Otherwise up to two copies of each input.

    Source:
        ``FixedSizeCrop`` of torchvision's scripts, references/detection.

    Examples:
        >>> FixedSizeCrop((8, 6))(torch.ones(3, 4, 10)).shape
        torch.Size([3, 8, 6])
    """

    def __init__(self, size: int | Sequence[int], fill: Any = 0) -> None:
        super().__init__()
        sides = size if isinstance(size, list | tuple) and len(size) == 2 else (size, size)
        height, width = (
            whole_number("size", side, "Pass (height, width), such as size=(640, 640).", least=1) for side in sides
        )
        self.size = height, width
        fill = _checked_fill(fill)
        self.fill = fill if isinstance(fill, Mapping) else {tv_tensors.Mask: 0, "others": fill}

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw the crop of a sample. torchvision calls this method.

        Args:
            flat_inputs: Images and targets of the sample.

        Returns:
            Arguments of ``torchvision.transforms.v2.functional.crop``.
        """
        lengths = v2.query_size(flat_inputs)
        position = torch.rand((), device="cpu").item()
        top, left = (int(max(length - side, 0) * position) for length, side in zip(lengths, self.size, strict=True))
        height, width = map(min, lengths, self.size)
        return {"top": top, "left": left, "height": height, "width": width}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Return an image or target, cropped and padded. torchvision calls this method.

        Args:
            inpt: Image or target.
            params: Result of ``make_params``.

        Returns:
            A value of the same type.
        """
        padding = [0, 0, self.size[1] - params["width"], self.size[0] - params["height"]]
        return _padded(functional.crop(inpt, **params), padding, self.fill)


def _checked_fill(fill: Any) -> Any:
    """Return a fill value.

    Raises:
        ArgumentTypeError: If it holds other values than numbers.
    """
    for value in fill.values() if isinstance(fill, Mapping) else (fill,):
        numbers = value if isinstance(value, list | tuple) and value else (value,)
        if not all(type(number) in (int, float) for number in numbers):
            raise ArgumentTypeError(
                f"fill must be a number, a sequence of one number per channel, or a dict of these by type, got {shown(fill)}. "
                "Pass fill=0 for black."
            )
    return fill


def _padded(value: Any, padding: list[int], fill: Any) -> Any:
    """Return an image or target with ``padding``, pixels (left, top, right, bottom)."""
    if isinstance(fill, Mapping):
        fill = fill.get(type(value), fill.get("others", 0))
    return functional.pad(value, padding, fill=fill)
