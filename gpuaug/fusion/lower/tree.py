"""Tree of a lowered pipeline, with the names of modules in the user's containers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.ops.base import Op
from gpuaug.fusion.ops.crop import HorizontalFlip, VerticalFlip
from gpuaug.fusion.ops.fallback import EagerOp
from gpuaug.fusion.ops.geometry import BoxCropOp, GatherOp
from gpuaug.fusion.ops.torchvision.ending import NO_CONVERSIONS, Ending


@dataclass(frozen=True, slots=True)
class Leaf:
    """Module with an op."""

    name: str
    op: Op | EagerOp


@dataclass(frozen=True, slots=True)
class Done:
    """Transform of torchvision without an op: it is part of the reading of images, or does nothing."""

    name: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    """(name, arguments) of the equivalent functions of torchvision for one image."""
    ending: Ending | None = None
    """Effect of the transform on targets."""
    is_last: bool = False
    """True if all ops that move pixels must precede the transform."""
    of_boxes: bool = False
    """True if boxes are processed at the end of the pipeline."""


@dataclass(frozen=True, slots=True)
class Group:
    """Container or sequence. Its name is empty for the pipeline itself, and for a plain sequence."""

    name: str
    items: tuple["Tree", ...]
    is_container: bool
    """True if draws in Kornia's form have a nested entry for the container."""


Tree = Leaf | Done | Group


def leaves(tree: Tree) -> Iterator[Leaf]:
    """Yield all modules with ops, in running order."""
    if isinstance(tree, Leaf):
        yield tree
    elif isinstance(tree, Group):
        for item in tree.items:
            yield from leaves(item)


def filtered_crops(tree: Tree) -> Iterator[tuple[BoxCropOp, Done]]:
    """Yield each crop by boxes that is followed, flips aside, by a transform that removes boxes; and this transform."""
    crop: BoxCropOp | None = None
    for item in _in_order(tree):
        if isinstance(item, Done):
            if crop is not None and item.is_last:
                yield crop, item
        elif not isinstance(item.op, HorizontalFlip | VerticalFlip):
            crop = item.op if isinstance(item.op, BoxCropOp) else None


def ending_of(tree: Tree) -> Ending:
    """Return the combined effect on targets of all transforms without ops.

    Raises:
        ArgumentError: If boxes are removed before an op that moves pixels, except directly after a crop by boxes.
    """
    ending = NO_CONVERSIONS
    box_filter = ""
    filters_of_crops = [done for _, done in filtered_crops(tree)]
    for item in _in_order(tree):
        if any(item is done for done in filters_of_crops):
            continue
        if isinstance(item, Done):
            ending = ending.then(item.ending) if item.ending is not None else ending
            box_filter = box_filter or (item.name if item.is_last else "")
        elif box_filter and (isinstance(item.op, GatherOp) or (isinstance(item.op, EagerOp) and not item.op.moves_nothing)):
            raise ArgumentError(
                f"{box_filter} must follow all transforms that move pixels, got {item.name} after it. Put it at the end "
                "of the pipeline."
            )
    return ending


def _in_order(tree: Tree) -> Iterator[Leaf | Done]:
    if isinstance(tree, Group):
        for item in tree.items:
            yield from _in_order(item)
    else:
        yield tree


def transforms_done(tree: Tree) -> Iterator[tuple[str, bool]]:
    """Yield (name, whether it processes boxes at the end of the pipeline) of the transforms without an op."""
    if isinstance(tree, Done):
        yield tree.name, tree.of_boxes
    elif isinstance(tree, Group):
        for item in tree.items:
            yield from transforms_done(item)
