"""Tree of a *lowered* pipeline, whose modules are translated to ops. Its groups are the user's containers and sequences.

A *fallback module* is not lowered, but run by its library, Kornia or torchvision.

*Targets* are annotations that are transformed together with the images: masks, boxes, keypoints, labels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.ops.base import Op
from gpuaug.fusion.ops.crop import HorizontalFlip, VerticalFlip
from gpuaug.fusion.ops.fallback import EagerOp
from gpuaug.fusion.ops.geometry import BoxCropOp, GatherOp
from gpuaug.fusion.ops.torchvision.target_conversions import NO_CONVERSIONS, TargetConversions


@dataclass(frozen=True, slots=True)
class Leaf:
    """Module of the pipeline: its name, and its op or fallback module."""

    name: str
    op: Op | EagerOp


@dataclass(frozen=True, slots=True)
class ImplicitTransform:
    """Transform of torchvision without an op.

    It is a conversion of images to another dtype, which needs no op because *passes*, the kernels that read and write all
    images, convert when they read; a transform of targets only; or a transform that does nothing to tensors.
    """

    name: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    """(name, keyword arguments) of the functions of ``v2.functional`` that do the same to one image."""
    target_conversions: TargetConversions | None = None
    """Conversions of targets, applied at the end of the pipeline; ``None`` without conversions."""
    follows_moves: bool = False
    """True if the transform must follow all ops that move pixels, because it removes boxes."""
    processes_boxes: bool = False
    """True if the transform changes or removes boxes."""

    @property
    def converts(self) -> bool:
        """True if the transform changes the images or the targets."""
        return bool(self.calls) or self.target_conversions is not None or self.processes_boxes


@dataclass(frozen=True, slots=True)
class Group:
    """Container or sequence of modules. Its name is empty for the pipeline itself, and for groups that gpuaug adds."""

    name: str
    items: tuple["Tree", ...]
    is_container: bool = False
    """True for a container of Kornia, for which random parameters in Kornia's format have a nested list."""


Tree = Leaf | ImplicitTransform | Group


def leaves(tree: Tree) -> Iterator[Leaf]:
    """Yield all leaves of the tree, in the order of execution."""
    return (item for item in nodes_in_order(tree) if isinstance(item, Leaf))


def filtered_crops(tree: Tree) -> Iterator[tuple[BoxCropOp, ImplicitTransform]]:
    """Yield (crop, transform) for each crop chosen by boxes and each later transform that removes boxes.

    Between the crop and the transform there are no other ops than flips.
    """
    crop: BoxCropOp | None = None
    for item in nodes_in_order(tree):
        if isinstance(item, ImplicitTransform):
            if crop is not None and item.follows_moves:
                yield crop, item
        elif not isinstance(item.op, HorizontalFlip | VerticalFlip):
            crop = item.op if isinstance(item.op, BoxCropOp) else None


def target_conversions_of(tree: Tree) -> TargetConversions:
    """Return the conversions of targets of all transforms without ops, combined into one.

    Transforms that ``filtered_crops`` yields are left out, because the crop itself applies their minima.

    Raises:
        ArgumentError: If one of these transforms removes boxes before an op that moves pixels.
    """
    target_conversions = NO_CONVERSIONS
    box_filter = ""
    filters_of_crops = [crop_filter for _, crop_filter in filtered_crops(tree)]
    for item in nodes_in_order(tree):
        if any(item is crop_filter for crop_filter in filters_of_crops):
            continue
        if isinstance(item, ImplicitTransform):
            if item.target_conversions is not None:
                target_conversions = target_conversions.then(item.target_conversions)
            box_filter = box_filter or (item.name if item.follows_moves else "")
        elif box_filter and (isinstance(item.op, GatherOp) or (isinstance(item.op, EagerOp) and not item.op.moves_nothing)):
            raise ArgumentError(
                f"{box_filter} must follow all transforms that move pixels, got {item.name} after it. Put it at the end "
                "of the pipeline."
            )
    return target_conversions


def nodes_in_order(tree: Tree) -> Iterator[Leaf | ImplicitTransform]:
    """Yield all transforms, with and without ops, in the order of execution."""
    if isinstance(tree, Group):
        for item in tree.items:
            yield from nodes_in_order(item)
    else:
        yield tree


def implicit_transforms(tree: Tree) -> Iterator[tuple[str, bool]]:
    """Yield (name, ``processes_boxes``) of each transform without an op, unless a leaf has its name and stands for it."""
    names = {leaf.name for leaf in leaves(tree)}
    for item in nodes_in_order(tree):
        if isinstance(item, ImplicitTransform) and item.name not in names:
            yield item.name, item.processes_boxes


def lowered(*families: ModuleType) -> dict[type[nn.Module], Any]:
    """Return {class of a library: class of its op} for the ops defined in the Python modules ``families``, by ``Op.lowers``."""
    ops = [op for family in families for op in vars(family).values() if getattr(op, "__module__", "") == family.__name__]
    return {class_: op for op in ops if isinstance(op, type) for class_ in vars(op).get("lowers", ())}
