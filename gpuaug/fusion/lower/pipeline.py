"""Lowering of the user's pipeline to a tree of ops: one op per module of Kornia or transform of torchvision.

A *fallback module* is not lowered, but run by its library. A *policy*, such as RandAugment, picks some of its augmentations at
random. A *conversion* changes the dtype of images, as ``v2.ToDtype`` does.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from kornia import augmentation as K
from kornia.constants import Resample
from torch import nn

from gpuaug.core.errors import ArgumentError, ArgumentTypeError
from gpuaug.core.torchvision_types import class_of, has_forward, is_sequence, is_unmodified_sequential, torchvision_class
from gpuaug.fusion.lower.image_types import ImageTypes
from gpuaug.fusion.lower.kornia import CONTAINERS, extra_args_of, lower_container, lower_module
from gpuaug.fusion.lower.refusals import (
    NAMED_MODULES,
    refuse_inside_kornia,
    refuse_own_forward,
    refuse_transform,
    refuse_volumes,
)
from gpuaug.fusion.lower.tree import Group, ImplicitTransform, Leaf, Tree, filtered_crops, leaves, nodes_in_order
from gpuaug.fusion.ops.base import ChannelOp, FrontOp, Op
from gpuaug.fusion.ops.channel import Denormalize, Normalize
from gpuaug.fusion.ops.color import Posterize
from gpuaug.fusion.ops.fallback import EagerOp
from gpuaug.fusion.ops.filters import LevelsOp
from gpuaug.fusion.ops.geometry import ResampleOp, WarpOp
from gpuaug.fusion.policies.picking import Pick


def lower(pipeline: Any, types: ImageTypes, pick: Pick = "batch", *, antialias: bool = False) -> Tree:
    """Lower a pipeline to a tree of ops.

    Args:
        pipeline: Pipeline of the user.
        types: Dtype and range of the input images. Updated in place to dtype and range of the images that the pipeline returns.
        pick: Whether Kornia's policies pick per batch, as in Kornia, or per sample.
        antialias: Whether Kornia's modules antialias when they downsample. torchvision's modules have their own setting.

    Raises:
        ArgumentTypeError: If ``pipeline`` is not a pipeline, or has a transform that cannot run on batches.
        ArgumentError: If the pipeline is empty, or has a transform with unsupported settings or at an unsupported position.
    """
    if isinstance(pipeline, type):
        raise ArgumentTypeError(
            f"pipeline must be an instance, got the class {pipeline.__name__}. Call it first: {pipeline.__name__}(…)."
        )
    if "torchvision.transforms" in sys.modules:  # otherwise the pipeline has no transform of torchvision
        from gpuaug.fusion.lower.conversions import converts_to_floats, expanded

        types.remaining_conversions = sum(map(converts_to_floats, expanded(pipeline)))
        types.has_conversion = types.remaining_conversions > 0
    lowering = _Lowering(pick, types)
    tree = lowering.tree("", pipeline)
    # A conversion without scaling, such as v2.ToDtype(torch.float32), keeps values in [0, 255]. Fused passes read the images as
    # values in [0, 1]. The multiplication by 255 is delayed to the first op that is not linear, or to the end.
    if types.delayed_factor != 1:
        tree = Group("", (tree, *lowering.multiplication()))
    if not list(leaves(tree)):
        tree = _with_identity(tree, pipeline)
    for op in _resamplings(tree) if antialias else ():
        if op.package == "Kornia":
            op.set_antialias(cubic=op.settings["resample"] == Resample.BICUBIC)
    _expect_rounding(tree)
    for crop, box_filter in filtered_crops(tree):
        assert box_filter.target_conversions is not None  # every transform that removes boxes has them
        # The crop itself applies the minima of the transform (``min_size``, ``min_area`` of SanitizeBoundingBoxes) to the part
        # of a box inside the crop, before images are resized.
        # If several transforms remove boxes after the crop, a box must fulfil the minima of all.
        side, area = crop.min_side_and_area
        conversions = box_filter.target_conversions
        crop.min_side_and_area = max(side, conversions.min_size), max(area, conversions.min_area)
    return tree


def _with_identity(tree: Tree, pipeline: Any) -> Tree:
    """Return ``tree``, which has no ops, with an identity op before it: a conversion needs a pass, and a pass needs an op.

    Raises:
        ArgumentError: If the tree has no conversion of images or targets, so that the pipeline does nothing.
    """
    names = [item.name for item in nodes_in_order(tree) if isinstance(item, ImplicitTransform) and item.converts]
    if not names:
        raise ArgumentError(
            f"pipeline must hold at least one augmentation or conversion, got none in {type(pipeline).__name__}. Add one, such "
            "as a RandomHorizontalFlip(), or leave out gpuaug.fuse and its stage."
        )
    from torchvision.transforms import v2

    from gpuaug.fusion.ops.torchvision.crop import Identity

    # At the start, because no geometric op may follow a SanitizeBoundingBoxes.
    return Group("", (Leaf(names[0], Identity(names[0], v2.Identity(), torch.float32)), tree))


def _ops_per_module(tree: Tree) -> list[Sequence[Op | EagerOp]]:
    """Return a sequence of ops per module, in order: a single op or fallback module, or all ops that a policy may pick."""
    return [leaf.op.ops if isinstance(leaf.op, Op) else (leaf.op,) for leaf in leaves(tree)]


def _resamplings(tree: Tree) -> list[ResampleOp]:
    """Return all ops that resize, including ops that a policy may pick."""
    return [op for ops in _ops_per_module(tree) for op in ops if isinstance(op, ResampleOp)]


def _expect_rounding(tree: Tree) -> None:
    """Call ``expect_rounding`` of Kornia's ops that round values down to integers, if an op before them causes rounding errors.

    The ops then round down with a tolerance. If no op before them does, values equal Kornia's bit for bit, and a
    tolerance would change levels.
    """
    has_rounding_errors = False
    for ops in _ops_per_module(tree):
        for op in ops if has_rounding_errors else ():
            if isinstance(op, LevelsOp | Posterize) and op.package == "Kornia":
                op.expect_rounding()
        has_rounding_errors |= any(map(_causes_rounding, ops))


def _causes_rounding(op: Op | EagerOp) -> bool:
    """Return whether the result of an op may differ from the result of its library by rounding errors."""
    if isinstance(op, WarpOp | ResampleOp):
        return not op.nearest
    return isinstance(op, EagerOp) or (isinstance(op, FrontOp) and not isinstance(op, LevelsOp | ChannelOp))


def _advice_for(value: Any) -> str:
    """Return the advice in the error for a value that is neither a module, a transform nor a sequence of them."""
    if isinstance(getattr(value, "transforms", None), nn.Module | Sequence):
        return "Pass the transforms that it calls: its attribute transforms."
    if callable(value):
        return "Pass the transforms that it calls, or v2.Compose([function]), which calls it image by image."
    return "Pass a list of augmentations."


class _Lowering:
    """Lower the modules of one pipeline, in order.

    Args:
        pick: Whether Kornia's policies pick per batch or per sample.
        types: Dtype and range of the images before the next module, updated by each module.
    """

    def __init__(self, pick: Pick, types: ImageTypes) -> None:
        self._pick, self._types = pick, types
        self._torchvision: Any = None

    def tree(self, name: str, module: Any, *, inside_kornia: bool = False) -> Tree:
        """Lower a module, container or sequence. ``inside_kornia``: whether it is inside a container of Kornia."""
        if is_unmodified_sequential(module) or type(module) is nn.ModuleList:
            module = list(module)
        if is_sequence(module):
            named_children = [(f"{type(child).__name__}_{index}", child) for index, child in enumerate(module)]
            return Group(name, tuple(self.tree(child_name, child) for child_name, child in named_children))
        # The transforms of timm and open_clip in NAMED_MODULES are lowered like torchvision's.
        if torchvision_class(module) is not None or type(module).__module__ in NAMED_MODULES:
            if self._torchvision is None:
                # Imported only for a pipeline with a transform of torchvision.
                from gpuaug.fusion.lower.torchvision import TorchvisionLowering

                self._torchvision = TorchvisionLowering(self.tree, self._types)
            tree: Tree = self._torchvision.tree(name, module)
            return tree
        if not isinstance(module, nn.Module):
            refuse_transform(module)
            raise ArgumentTypeError(
                "pipeline must be a Kornia augmentation, a Kornia container, a torchvision transform or a sequence of them, "
                f"got {type(module).__name__}. {_advice_for(module)}"
            )
        if not has_forward(module):
            raise ArgumentTypeError(
                f"pipeline must hold modules that can be called, got {type(module).__name__}, which has no forward. Pass the "
                "modules that it contains in a list: [*module.children()]."
            )
        # Kornia ignores ``extra_args`` of a container inside another container.
        extra_args = None if inside_kornia else extra_args_of(module)
        sequential = None if extra_args is not None else class_of(module, (K.AugmentationSequential, K.ImageSequential))
        if sequential is None or module.random_apply:
            refuse_inside_kornia(module)
        refuse_volumes(module)
        if not inside_kornia:
            refuse_own_forward(module)
        delayed_multiplication = self.multiplication()
        self._types.enter_kornia()
        if extra_args is None and class_of(module, CONTAINERS) is not None:
            tree = lower_container(name, module, self._pick, partial(self.tree, inside_kornia=True))
        else:
            tree = leaf = lower_module(name, module, self._pick, extra_args)
            if isinstance(leaf.op, EagerOp):
                leaf.op.type_change = self._types.type_change
            self._update_range(leaf)
        return Group("", (*delayed_multiplication, tree)) if delayed_multiplication else tree

    def multiplication(self) -> tuple[Tree, ...]:
        """Return (op that multiplies images by ``types.delayed_factor``,), and set the factor to 1; () if the factor is 1."""
        return self._torchvision.multiplication() if self._types.delayed_factor != 1 else ()

    def _update_range(self, leaf: Leaf) -> None:
        """Update the range of the images in ``types`` for a module of Kornia or of the user.

        If the module requires images in [0, 1], an error for images of another range is recorded in ``types``.
        """
        types, op = self._types, leaf.op
        # Of Kornia's modules, these require [0, 1]: ops without ``takes_any_range``, and fallback modules that move no pixels.
        if not op.takes_any_range if isinstance(op, Op) else op.moves_nothing and not op.is_user_defined:
            types.require_unit_range(leaf.name)
        for resampling in _resamplings(leaf):
            resampling.clamps = types.in_unit_range
        if isinstance(op, Normalize) and not isinstance(op, Denormalize):
            types.normalize(op)
        # Modules of the user may return any values.
        elif isinstance(op, Denormalize) or (isinstance(op, EagerOp) and not type(op.module).__module__.startswith("kornia.")):
            types.at_most_one = False
