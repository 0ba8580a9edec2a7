"""Sizes of images on their way through a pipeline: where they become one size, whether views agree, and limits of ops."""

from collections.abc import Sequence

import numpy as np

from gpuaug.core.errors import ArgumentError
from gpuaug.core.limits import MOST_ELEMENTS, MOST_SIDE, MOST_WARPED
from gpuaug.fusion.lower.kornia import REQUIREMENT, untested_version
from gpuaug.fusion.ops.base import ANY_SIDES, ChannelOp, Op, PointOp, Size
from gpuaug.fusion.ops.crop import HorizontalFlip, VerticalFlip
from gpuaug.fusion.ops.fallback import EagerOp
from gpuaug.fusion.ops.geometry import BoxCropOp, GatherOp, WarpOp
from gpuaug.fusion.ops.resize import Resize
from gpuaug.fusion.policies.random_apply import RandomApply

_PAD = "Pad or resize before it"
_CUT_UP = "Cut them up, or shrink them, in the dataset."


def sizing_ops(ops: Sequence[Op | EagerOp], *, ragged: bool) -> tuple[Op, ...]:
    """The ops up to the one that gives a ragged batch one size; none where batches are not ``ragged``.

    Raises:
        ArgumentError: If none does, or if an op draws a size for each image, and none behind it gives them one again; or if an
            op before that one reads more than a pixel.
    """
    untested = untested_version()
    if ragged and untested is not None and any(op.package == "Kornia" for op in ops):
        raise ArgumentError(
            f"kornia must be of a version that gpuaug.fuse was compared with where ragged=True, got another: {untested}. "
            f'Run pip install "{REQUIREMENT}".'
        )
    first = _to_one_size(ops) if ragged else ()
    crops = [op.name for op in ops if isinstance(op, BoxCropOp)]
    if len(crops) > 1:
        raise ArgumentError(f"pipeline must hold one crop by boxes at most, got {' and '.join(crops)}. Leave the others out.")
    start = len(first)
    while start < len(ops):
        op = ops[start]
        start += len(_to_one_size(ops[start:])) if isinstance(op, Op) and op.draws_size else 1
    return first


def _to_one_size(ops: Sequence[Op | EagerOp]) -> tuple[Op, ...]:
    """The first ops, up to the one that gives images of different sizes one."""
    size = Size(1, 3, *ANY_SIDES)
    taken: list[Op] = []
    for op in ops:
        cropped = _cropped_by_boxes(taken)
        if isinstance(op, EagerOp):
            reason: str | None = op.reason
        elif not all(isinstance(part, GatherOp) or _is_pointwise(part) for part in op.parts):
            reason = "it reads other pixels of an image, or their coordinates"
        elif cropped and not (isinstance(op, HorizontalFlip | VerticalFlip) or _stretches(op)):
            reason = "only flips and a v2.Resize to two sides may follow a crop by boxes"
        else:  # with the images alone is known what is drawn by their sizes, and whether their channels fit
            reason = None if op.draws_size or isinstance(op, PointOp) else op.unsupported_size(size)
        if reason is not None:
            where, way_out = _advice(taken)
            raise ArgumentError(
                f"pipeline must only move and recolour pixels until images have one size {where}, got {op.name}: {reason}. "
                f"{way_out}."
            )
        assert isinstance(op, Op)
        size = op.out(size)
        taken.append(op)
        if not size.ragged:
            return tuple(taken)
    where, way_out = _advice(taken)
    raise ArgumentError(f"pipeline must give images one size {where}, got {taken[-1].name} as its end. {way_out}.")


def _is_pointwise(op: Op) -> bool:
    """Whether an output pixel depends on that pixel alone, wherever it lies, and on the mean of its image."""
    return isinstance(op, PointOp) and not op.positional


def _cropped_by_boxes(taken: Sequence[Op]) -> str:
    """Name of the crop by boxes that no resize has followed yet; empty without one."""
    crop = next((op for op in reversed(taken) if not isinstance(op, HorizontalFlip | VerticalFlip)), None)
    return crop.name if isinstance(crop, BoxCropOp) else ""


def _stretches(op: Op | EagerOp) -> bool:
    """True for a Resize of torchvision's to two sides."""
    return isinstance(op, Resize) and op.package == "torchvision" and not op.out(Size(1, 3, *ANY_SIDES)).ragged


def _advice(taken: Sequence[Op]) -> tuple[str, str]:
    """From where on images differ in size, by the ops before the one that is refused, and what to do about it."""
    if name := _cropped_by_boxes(taken):
        return f"behind {name}", f"Put v2.Resize((300, 300)) directly behind it, or keep {name} in the dataset"
    drawn = next((op.name for op in taken if op.draws_size), None)
    if drawn is not None:
        crop = "v2.RandomCrop((224, 224), pad_if_needed=True)"
        way_out = f"Put what gives them one size behind it, such as {crop}, or keep {drawn} in the dataset"
        return f"behind {drawn}", way_out
    such_as = "RandomResizedCrop((224, 224)), Resize((224, 224)) or CenterCrop((224, 224))"
    return "where ragged=True", f"Put what gives them one size in front of it, such as {such_as}"


def check_views(ops: Sequence[Op | EagerOp], size: Size | None = None) -> None:
    """Refuse pipelines of which one view may have another size than the next.

    Args:
        ops: The pipeline's.
        size: Of the images. Left out: not known before the first op that gives them one.

    Raises:
        ArgumentError: If an op that may be skipped changes the size, which is drawn for each view.
    """
    at = size
    for op in ops:
        sizing = op.lowered if isinstance(op, EagerOp) else op
        if sizing is None or isinstance(sizing, RandomApply):
            at = at if isinstance(op, EagerOp) and op.moves_nothing else None
            continue
        chance = sizing.p * sizing.p_batch
        if not chance:
            continue
        out = sizing.out(at or Size(1, 3, *ANY_SIDES))
        if at is not None and chance < 1 and out != at and not sizing.draws_size:
            raise ArgumentError(
                f"pipeline must give all views one size, got {op.name} with p={chance}, which makes images of "
                f"{at.height}x{at.width} {out.height}x{out.width} or leaves them. Give it p=1.0, or resize before it: "
                f"{'K' if sizing.package == 'Kornia' else 'v2'}.Resize(({out.height}, {out.width}))."
            )
        at = out if at is not None or (chance == 1 and not out.ragged) else None


def check_counted(op: Op, size: Size) -> None:
    """Refuse images that are larger than ``op`` can count, before it or after, and those without a pixel for it to read.

    Raises:
        ArgumentError: If there are any.
    """
    for each in (size, *op.out_bounds(size)):
        if each.ragged:  # which is looked at batch by batch
            continue
        if each.height * each.width > size.height * size.width == 0:
            raise ArgumentError(
                f"images must have pixels for {op.name}, got {size.height}x{size.width}. Leave them out of the dataset."
            )
        if op.counts_pixels:
            check_sides(op, each)
        if each.channels * each.height * each.width >= MOST_ELEMENTS:
            raise ArgumentError(
                f"An image must have fewer than 2**31 values, got {each.channels * each.height * each.width} at {op.name}. "
                f"{_CUT_UP}"
            )


def check_sizes(ops: Sequence[Op], size: Size, given: Size | None = None) -> None:
    """Refuse images that ops could not take to their one size, whatever is drawn.

    Args:
        ops: The first take images of different sizes, or draw them; a later one gives them one.
        size: Of the images that the first one sees.
        given: Of the images themselves, where ``size`` has been drawn for them.

    Raises:
        ArgumentError: If there is one, named by its place in the batch where images differ in size.
    """
    at = size
    given = size if given is None else given
    for index, op in enumerate(ops):
        if op.unsupported_size(at):
            place, reason = next((place, why) for place in range(at.batch) if (why := op.unsupported_size(at.of(place))))
            where = f" at {place} of the batch" if given.ragged else ""
            raise ArgumentError(
                f"images must fit {op.name}, got {given.of(place).height}x{given.of(place).width}{where}, "
                f"which {reason}. {'Put it behind what gives images one size' if isinstance(op, PointOp) else _PAD}."
            )
        if isinstance(op, WarpOp) and max(np.max(at.height, initial=0), np.max(at.width, initial=0)) > MOST_WARPED:
            longest = int(np.argmax(np.maximum(at.height, at.width)))
            check_sides(op, at.of(longest), f" at {longest} of the batch" if given.ragged else "")
        if op.draws_size:
            for end in op.out_bounds(at):
                check_sizes(ops[index + 1 :], end, given)
            return
        at = op.out(at)


def check_mixed_channels(op: Op, size: Size) -> None:
    """Refuse an op that mixes channels, and so begins a pass, where images differ in size: its pass reads images of one size.

    Raises:
        ArgumentError: If ``op`` is one for images of this number of channels.
    """
    if size.ragged and any(ChannelOp.begins_pass(part, size.channels) for part in op.parts):
        raise ArgumentError(
            f"images must have 3 channels for {op.name} where they differ in size, got {size.channels}. Put {op.name} behind "
            "the transform that gives images one size."
        )


def check_sides(op: Op, size: Size, where: str = "") -> None:
    """Refuse images with sides that float32 cannot count, or as far as a warp counts them.

    Args:
        op: What counts their pixels.
        size: Of one image, or of all.
        where: Which image it is, for the text.

    Raises:
        ArgumentError: If a side is longer.
    """
    most, words = (MOST_WARPED, "2**20") if isinstance(op, WarpOp) else (MOST_SIDE - 1, "2**24 - 1")
    if max(size.height, size.width) > most:
        raise ArgumentError(
            f"images must have sides of at most {words} pixels for {op.name}, got {size.height}x{size.width}{where}. {_CUT_UP}"
        )
