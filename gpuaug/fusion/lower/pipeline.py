"""Lowers the user's pipeline to a tree of ops, each module by its library."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from kornia.constants import Resample
from torch import nn

from gpuaug.core.errors import ArgumentError, ArgumentTypeError
from gpuaug.core.torchvision_types import class_of, torchvision_class
from gpuaug.fusion.lower.image_types import ImageTypes, Refusal
from gpuaug.fusion.lower.kornia import CONTAINERS, lower_container, lower_module
from gpuaug.fusion.lower.refusals import NAMED_MODULES, refuse_held, refuse_transform
from gpuaug.fusion.lower.tree import Group, Leaf, Tree, judged_crops, leaves
from gpuaug.fusion.ops.base import ChannelOp, FrontOp, Op
from gpuaug.fusion.ops.channel import Denormalize, Normalize
from gpuaug.fusion.ops.color import Posterize
from gpuaug.fusion.ops.fallback import EagerOp
from gpuaug.fusion.ops.filters import LevelsOp
from gpuaug.fusion.ops.geometry import ResampleOp, WarpOp
from gpuaug.fusion.policies.picking import Pick, Picking


class Lowered(NamedTuple):
    """A pipeline lowered for images of one type."""

    tree: Tree
    dtype: torch.dtype
    """Type of the images that the user's pipeline returns."""
    refusal: Refusal | None
    """Why images of the type that the pipeline was lowered for are refused; ``None`` if they are accepted."""


def lower(
    pipeline: Any,
    pick: Pick = "batch",
    *,
    antialias: bool = False,
    dtype: torch.dtype = torch.uint8,
    returned: Mapping[int, torch.dtype] | None = None,
) -> Lowered:
    """Lower a pipeline to a tree of ops.

    Args:
        pipeline: The user's pipeline.
        pick: Whether Kornia's policies pick for the batch, as in Kornia, or for each sample.
        antialias: Whether Kornia's modules that shrink weigh all pixels that fall on one. torchvision's say so themselves.
        dtype: Type of the images that the pipeline is called with.
        returned: Type that a fallback module returns, by its number in the pipeline, where another type than it is passed.

    Raises:
        ArgumentTypeError: If the pipeline has no augmentations in it, or a transform that cannot run here.
        ArgumentError: If the pipeline is empty, or the images are not what a transform of torchvision takes.
    """
    if isinstance(pipeline, type):
        raise ArgumentTypeError(
            f"pipeline must be an instance, got the class {pipeline.__name__}. Call it first: {pipeline.__name__}(…)."
        )
    scalings = 0
    if "torchvision.transforms" in sys.modules:  # else the pipeline holds no transform of torchvision's
        from gpuaug.fusion.lower.torchvision import count_scalings

        scalings = count_scalings(pipeline)
    types = ImageTypes(dtype, scalings, returned or {})
    tree = _Lowering(pick, types).tree("", pipeline)
    if not list(leaves(tree)):
        raise ArgumentError(
            f"pipeline must hold at least one augmentation, got an empty {type(pipeline).__name__}. "
            "Add one, such as a RandomHorizontalFlip(), or leave gpuaug.fuse out."
        )
    for op in _resamplings(tree) if antialias else ():
        if op.package == "Kornia":
            op.set_antialias(cubic=op.settings["resample"] == Resample.BICUBIC)
    _expect_rounding(tree)
    for crop, judge in judged_crops(tree):
        assert judge.ending is not None
        crop.least = judge.ending.min_size, judge.ending.min_area
    return Lowered(tree, types.dtype, types.refusal)


def _runs_of(tree: Tree) -> list[Sequence[Op | EagerOp]]:
    """The op of each module, in order, or the ops that it may pick."""
    return [leaf.op.ops if isinstance(leaf.op, Picking) else (leaf.op,) for leaf in leaves(tree)]


def _resamplings(tree: Tree) -> list[ResampleOp]:
    """All ops that resize, those that may be picked included."""
    return [op for ops in _runs_of(tree) for op in ops if isinstance(op, ResampleOp)]


def _expect_rounding(tree: Tree) -> None:
    """Tell Kornia's ops that count levels if they stand behind one that makes a pixel of several others.

    Alone they have Kornia's levels bit for bit.
    """
    rounded = False
    for ops in _runs_of(tree):
        for op in ops if rounded else ():
            if isinstance(op, LevelsOp | Posterize) and op.package == "Kornia":
                op.expect_rounding()
        rounded |= any(map(_rounds, ops))


def _rounds(op: Op | EagerOp) -> bool:
    """True if an op may make pixels of equal ones that are a rounding error apart."""
    if isinstance(op, WarpOp | ResampleOp):
        return not op.nearest
    return isinstance(op, EagerOp) or (isinstance(op, FrontOp) and not isinstance(op, LevelsOp | ChannelOp))


def _advice_for(value: Any) -> str:
    """Advice for what is no pipeline."""
    if isinstance(getattr(value, "transforms", None), nn.Module | Sequence):
        return "Pass the transforms that it calls: its attribute transforms."
    if hasattr(value, "image_mean") and hasattr(value, "do_resize"):  # an image processor of Hugging Face's
        return "Write out what it does: v2.Resize, v2.CenterCrop, v2.ToDtype and v2.Normalize(processor.image_mean, …)."
    if callable(value):
        return "Pass the transforms that it calls, or v2.Compose([function]), which calls it image by image."
    return "Pass a list of augmentations."


class _Lowering:
    """One pipeline being lowered.

    Args:
        pick: As for ``lower``.
        types: Type of the images, followed from transform to transform.
    """

    def __init__(self, pick: Pick, types: ImageTypes) -> None:
        self._pick, self._types = pick, types
        self._torchvision: Any = None

    def tree(self, name: str, module: Any) -> Tree:
        """What one module, container or sequence consists of."""
        if type(module) is nn.Sequential:
            module = list(module)
        if isinstance(module, Sequence) and not isinstance(module, str):
            named = [(f"{type(child).__name__}_{index}", child) for index, child in enumerate(module)]
            return Group(name, tuple(self.tree(child_name, child) for child_name, child in named), is_container=False)
        if torchvision_class(module) is not None or type(module).__module__ in NAMED_MODULES:
            if self._torchvision is None:
                # Imported where a pipeline has a transform of torchvision's, and not with gpuaug.
                from gpuaug.fusion.lower.torchvision import TorchvisionLowering

                self._torchvision = TorchvisionLowering(self.tree, self._types)
            made: Tree = self._torchvision.tree(name, module)
            return made
        if not isinstance(module, nn.Module):
            refuse_transform(module)
            raise ArgumentTypeError(
                "pipeline must be a Kornia augmentation, a Kornia container, a torchvision transform or a sequence of them, "
                f"got {type(module).__name__}. {_advice_for(module)}"
            )
        refuse_held(module)
        self._types.enter_kornia()
        if class_of(module, CONTAINERS) is not None:
            return lower_container(name, module, self._pick, self.tree)
        leaf = lower_module(name, module, self._pick)
        self._follow(leaf)
        return leaf

    def _follow(self, leaf: Leaf) -> None:
        """Follow the range of values through one of Kornia's modules, or through a module of the user's."""
        types, op = self._types, leaf.op
        for resampling in _resamplings(leaf):
            resampling.clamps = types.in_unit_range
        if isinstance(op, Normalize) and not isinstance(op, Denormalize):
            types.normalize(op)
        elif isinstance(op, Denormalize) or (isinstance(op, EagerOp) and not type(op.module).__module__.startswith("kornia.")):
            types.at_most_one = False
