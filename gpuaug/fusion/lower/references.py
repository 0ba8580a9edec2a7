"""Transforms of torchvision's reference scripts, which are in no package: projects copy them.

A copy is recognized by its class name, by the names in its code and by its results, because a project may have edited it.
"""

from collections.abc import Iterator
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from gpuaug.core.torchvision_types import NOT_APPLIED, code_names
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.ops.sampler import ArraySampler
from gpuaug.fusion.ops.torchvision import crop
from gpuaug.fusion.ops.torchvision.base import TorchvisionOp

LOWERED: dict[str, type[TorchvisionOp]] = {"FixedSizeCrop": crop.FixedSizeCrop, "PadIfSmaller": crop.PadIfSmaller}

_BASES: dict[str, type[nn.Module]] = {"FixedSizeCrop": nn.Module, "PadIfSmaller": v2.Transform}

_NAMES = frozenset(
    {
        *("F", "T", "v2", "v2_transforms", "functional", "_utils", "crop", "pad", "get_dimensions", "get_size", "query_chw"),
        *("query_size", "_call_kernel", "_get_fill", "_convert_fill_arg", "size", "fill", "crop_height", "crop_width"),
        *("padding_mode", "_crop", "_pad", "clamp_", "min", "max", "any", "len", "int", "dict", "type", "isinstance"),
        *("torch", "rand"),
    }
)
"""Names that the code of a copy may use. Of these functions, only ``torch.rand`` depends on more than its arguments."""

_HEIGHT, _WIDTH = 11, 13
"""Output size that is set for the transforms whose results are compared."""

_SIDES = (5, 11, 13, 23)
"""Heights and widths of the input images: smaller than, equal to and larger than the output size."""


@cache
def is_copy(class_: type) -> bool:
    """Return whether a class is a copy of the class of the same name in torchvision's reference scripts."""
    if class_.__bases__ != (_BASES.get(class_.__name__),):
        return False
    methods = [value for name, value in vars(class_).items() if name not in NOT_APPLIED]
    if not all(isinstance(method, FunctionType) for method in methods) or not code_names(methods) <= _NAMES:
        return False
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        try:
            return all(
                torch.equal(result, expected)
                for height in _SIDES
                for width in _SIDES
                for result, expected in _results(class_, height, width)
            )
        except Exception:  # a copy that was edited may raise any error
            return False


def _results(class_: type, height: int, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (result of ``class_``, expected result) for an image, and boxes with their masks and labels.

    The expected result is computed by the functions of torchvision that are equivalent to the op (``TorchvisionOp.calls``).
    """
    image = torch.arange(height * width, dtype=torch.uint8).reshape(1, height, width)
    boxes = torch.tensor([[0.0, 0.0, 4.0, 3.0], [width - 4.0, height - 3.0, width, height]])
    transform: Any = object.__new__(class_)
    nn.Module.__init__(transform)
    if class_.__name__ == "PadIfSmaller":
        vars(transform).update(size=_HEIGHT, fill={tv_tensors.Mask: 9, "others": 7})
        results = transform(tv_tensors.Image(image), tv_tensors.Mask(image), _boxes(boxes, height, width))
    else:
        vars(transform).update(crop_height=_HEIGHT, crop_width=_WIDTH, fill=7, padding_mode="constant")
        torch.default_generator.manual_seed(width)
        target = {"boxes": boxes.clone(), "labels": torch.tensor([1, 2]), "masks": image.repeat(2, 1, 1)}
        image_result, target = transform(image, target)
        results = image_result, target["masks"], target["boxes"], target["labels"]
    op: Any = LOWERED[class_.__name__]("", transform, torch.uint8)
    torch.default_generator.manual_seed(width)
    size = Size(1, 1, height, width)
    calls = op.calls(op.draw_parameters(ArraySampler(torch.rand(1, 1).numpy()), size), 0, size)
    expected: list[Any] = [image, image, _boxes(boxes, height, width)]
    for name, arguments in calls:
        for index, value in enumerate(expected):
            fill = {"fill": op.mask_fill if index == 1 else 7} if name == "pad" else {}
            expected[index] = getattr(functional, name)(value, **{**arguments, **fill})
    if len(results) == 4:
        valid = (expected[2][:, :2] < expected[2][:, 2:]).all(1)
        expected = [expected[0], expected[1].expand(int(valid.sum()), -1, -1), expected[2][valid], torch.tensor([1, 2])[valid]]
    yield from zip(results, expected, strict=True)


def _boxes(boxes: Tensor, height: int, width: int) -> tv_tensors.BoundingBoxes:
    """Convert boxes (n, 4) XYXY to torchvision's class."""
    return tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(height, width))  # type: ignore[call-arg]
