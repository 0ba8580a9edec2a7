"""Checks of image sizes through a pipeline: transformation to one size, equal sizes of views, and limits of ops.

*Ragged* images differ in size. A *view* is one of several random augmentations of an image. A *pass* is one reading and writing
of all images; it begins with its *front* op. A *fallback module* has no op: its library runs it. A container with a random
choice, such as ``RandomChoice``, makes one draw per sample. A *gate* of an op in the container holds the outcomes of the draw
for which the op runs.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gpuaug.core.errors import ArgumentError, ArgumentTypeError
from gpuaug.core.ragged import ELEMENTS_LIMIT, MAX_WARPED_SIDE, SIDE_LIMIT
from gpuaug.fusion.lower.kornia import REQUIREMENT, untested_version
from gpuaug.fusion.ops.base import ANY_SIDES, ChannelOp, Op, PointOp, Size
from gpuaug.fusion.ops.crop import HorizontalFlip, VerticalFlip
from gpuaug.fusion.ops.fallback import EagerOp
from gpuaug.fusion.ops.geometry import BoxCropOp, IdentityOp, IndexOp, WarpOp, only_moves_and_recolours
from gpuaug.fusion.ops.resize import Resize
from gpuaug.fusion.ops.sampler import Draw

CANVAS_FILL = 1 / 16
"""Smallest share of large canvases that images must cover. See ``check_canvases``."""

_PAD_ADVICE = "Pad or resize before it"
"""Advice for images that do not fit an op."""

_SHRINK_ADVICE = "Split or downsample them in the dataset."
"""Advice for images that are too large."""


def sizing_ops(ops: Sequence[Op | EagerOp], *, ragged: bool) -> tuple[Op, ...]:
    """Return the ops up to and with the first whose output images have one size, for ragged batches; none if not ``ragged``.

    Raises:
        ArgumentError: If no op transforms the images to one size, from the start or after an op that draws a size per image; if
            an op before it is not fused, or depends on neighbouring pixels or on pixel coordinates; if there are several crops
            by boxes; or if Kornia's version is not tested.
    """
    untested = untested_version()
    if ragged and untested is not None and any(op.package == "Kornia" for op in ops):
        raise ArgumentError(
            f'kornia must be a tested version for ragged=True, got another: {untested}. Run pip install "{REQUIREMENT}".'
        )
    ops_to_one_size = _to_one_size(ops) if ragged else ()
    crops = [op.name for op in ops if isinstance(op, BoxCropOp)]
    if len(crops) > 1:
        raise ArgumentError(f"pipeline must hold at most one crop by boxes, got {' and '.join(crops)}. Leave the others out.")
    # Check that images have one size again after each op that draws sizes.
    start = len(ops_to_one_size)
    while start < len(ops):
        op = ops[start]
        start += len(_to_one_size(ops[start:])) if isinstance(op, Op) and op.draws_size else 1
    return ops_to_one_size


def _to_one_size(ops: Sequence[Op | EagerOp]) -> tuple[Op, ...]:
    """Return the ops up to and with the first whose output images have one size, for ragged input images.

    Raises:
        ArgumentError: As for ``sizing_ops``.
    """
    size = Size(1, 3, *ANY_SIDES)
    ops_so_far: list[Op] = []
    for op in ops:
        crop_name = _name_of_preceding_crop(ops_so_far)
        if isinstance(op, EagerOp):
            reason: str | None = op.reason
        elif not only_moves_and_recolours(op):
            reason = "it reads other pixels of an image, or their coordinates"
        elif crop_name and not (isinstance(op, HorizontalFlip | VerticalFlip) or _stretches(op)):
            reason = "only flips and a v2.Resize to two sides may follow a crop by boxes"
        else:  # ops that draw sizes, and pointwise ops, are checked for the images of a batch
            reason = None if op.draws_size or isinstance(op, PointOp) else op.unsupported_size(size)
        if reason is not None:
            context, advice = _context_and_advice(ops_so_far)
            raise ArgumentError(
                f"pipeline must only move and recolour pixels until images have one size {context}, got {op.name}: {reason}. "
                f"{advice}."
            )
        assert isinstance(op, Op)
        size = op.out(size)
        ops_so_far.append(op)
        if not size.ragged:
            return tuple(ops_so_far)
    context, advice = _context_and_advice(ops_so_far)
    raise ArgumentError(f"pipeline must give images one size {context}, got {ops_so_far[-1].name} at the end. {advice}.")


def _name_of_preceding_crop(ops: Sequence[Op]) -> str:
    """Return the name of the last op that is no flip, if it is a crop by boxes; else an empty string."""
    crop = next((op for op in reversed(ops) if not isinstance(op, HorizontalFlip | VerticalFlip)), None)
    return crop.name if isinstance(crop, BoxCropOp) else ""


def _stretches(op: Op | EagerOp) -> bool:
    """Return whether an op is torchvision's ``Resize`` to a height and a width."""
    return isinstance(op, Resize) and op.package == "torchvision" and not op.out(Size(1, 3, *ANY_SIDES)).ragged


def _context_and_advice(ops: Sequence[Op]) -> tuple[str, str]:
    """Return (context, advice) for an error about an op: where the op is, and what to change. ``ops``: the ops before it."""
    if name := _name_of_preceding_crop(ops):
        return f"after {name}", f"Put v2.Resize((300, 300)) directly after it, or keep {name} in the dataset"
    size_drawing_op = next((op.name for op in ops if op.draws_size), None)
    if size_drawing_op is not None:
        crop = "v2.RandomCrop((224, 224), pad_if_needed=True)"
        advice = f"Put a transform to one size after it, such as {crop}, or keep {size_drawing_op} in the dataset"
        return f"after {size_drawing_op}", advice
    examples = "RandomResizedCrop((224, 224)), Resize((224, 224)) or CenterCrop((224, 224))"
    return "with ragged=True", f"Put a transform to one size before it, such as {examples}"


def number_of_views(ops: Sequence[Op | EagerOp], views: int) -> int:
    """Return the number of views per image: the number of crops of an op such as ``FiveCrop``; without one, ``views``.

    ``views``: number of views that the user set, 1 by default.

    Raises:
        ArgumentError: If the ops and the user require different numbers.
        ArgumentTypeError: If two ops make several images of one.
    """
    crops = [op for op in ops if isinstance(op, IndexOp) and op.views > 1]
    if len(crops) > 1:
        raise ArgumentTypeError(
            f"pipeline must have at most one transform that makes several images of one, got {crops[0].name} and "
            f"{crops[1].name}. Fuse one of them only."
        )
    if crops and views not in (1, crops[0].views):
        raise ArgumentError(f"views must be {crops[0].views} with {crops[0].name}, got {views}. Leave it out.")
    return crops[0].views if crops else views


def check_views(ops: Sequence[Op | EagerOp], size: Size | None = None) -> None:
    """Raise an error if the views of an image may differ in size.

    Args:
        ops: Ops of the pipeline.
        size: Size of the images. ``None`` if it is not known.

    Raises:
        ArgumentError: If an op changes the size, and may be skipped in one view and not in another.
    """
    current_size = size  # ``None`` while the size is not known
    for op in ops:
        lowered = op.lowered if isinstance(op, EagerOp) else op  # op of the module, which computes the output size
        if lowered is None:
            current_size = current_size if isinstance(op, EagerOp) and op.moves_nothing else None
            continue
        probability = lowered.p * lowered.p_batch if lowered.is_random else 1.0
        if not probability:
            continue
        out = lowered.out(current_size or Size(1, 3, *ANY_SIDES))
        if current_size is not None and probability < 1 and out != current_size and not lowered.draws_size:
            raise ArgumentError(
                f"pipeline must give all views one size, got {op.name} with p={probability}, which changes only some images "
                f"from {current_size.height}x{current_size.width} to {out.height}x{out.width}. Give it p=1.0, or resize "
                f"before it: {'K' if lowered.package == 'Kornia' else 'v2'}.Resize(({out.height}, {out.width}))."
            )
        current_size = out if current_size is not None or (probability == 1 and not out.ragged) else None


def check_limits(op: Op, size: Size) -> None:
    """Raise an error if images are too large for the pixel indices of ``op``, or have no pixels although the output has pixels.

    Raises:
        ArgumentError: If input images of ``size`` are not supported.
    """
    for bound in (size, *op.out_bounds(size)):
        if bound.ragged:  # ``check_sizes`` checks the sizes of ragged images, per batch
            continue
        if bound.height * bound.width > size.height * size.width == 0:
            raise ArgumentError(
                f"images must have pixels for {op.name}, got {size.height}x{size.width}. Leave them out of the dataset."
            )
        if op.stores_coordinates:
            check_sides(op, bound)
        if bound.channels * bound.height * bound.width >= ELEMENTS_LIMIT:
            raise ArgumentError(
                f"An image must have fewer than 2**31 values, got {bound.channels * bound.height * bound.width} at {op.name}. "
                f"{_SHRINK_ADVICE}"
            )


def check_output(op: Op, size: Size) -> None:
    """Check that the output images of an op, of ``size``, do not have a negative height or width.

    Raises:
        ArgumentError: If they have, because of a negative size in the settings of the op, or a padding that crops too much.
    """
    if not size.ragged and min(size.height, size.width) < 0:
        raise ArgumentError(
            f"output of {op.name} must have a height and a width of at least 0, got {size.height}x{size.width}. Change the "
            "size, or the padding, in its settings."
        )


def check_channels(op: Op, channels: int) -> None:
    """Check that an op supports images of ``channels`` channels.

    Raises:
        ArgumentError: If the op does not support this number of channels, or a setting has neither one value nor one value per
            channel.
    """
    for part in op.ops:
        requirement = part.unsupported_channels(channels)
        if requirement is not None:
            counts, operation = requirement
            policy = "" if part is op else f", from which {op.name} picks"
            raise ArgumentError(
                f"images must have {counts} channels for {operation}{policy}, got {channels}. Leave the transform out, or give "
                "the images three channels: images[:, :3], or for grey images images.expand(-1, 3, -1, -1)."
            )
    for part in op.plan_ops:
        for name, values in part.per_channel(channels).items():
            count = np.size(np.asarray(values))
            if count not in (1, channels):
                raise ArgumentError(
                    f"{name} of {part.name} must have one value, or one per channel of the images, got {count} for {channels} "
                    "channels. Pass one value."
                )


def check_sizes(
    ops: Sequence[Op], size: Size, user_size: Size | None = None, outcomes: Mapping[Draw, int] | None = None
) -> None:
    """Raise an error if an op up to the transformation to one size may get images of a size that the op does not support.

    Follows the size of the images op by op. Calls itself, for the rest of the ops, with each outcome of a container's draw
    before the first op whose output size depends on the draw; and with each bound of the sizes after an op that draws a size.

    Args:
        ops: Consecutive ops, of which the last transforms images to one size.
        size: Size of the input images of the first op.
        user_size: Size of the user's images, for the message, in recursive calls; ``None`` if it is ``size``.
        outcomes: Assumed outcome per draw of a container. All outcomes of other draws are checked.

    Raises:
        ArgumentError: If an op does not support an image. For a ragged batch, the message contains the index of the image. Also
            if an op does not support the number of channels (``check_channels``).
    """
    current_size = size
    user_size = size if user_size is None else user_size
    outcomes = outcomes or {}
    for index, op in enumerate(ops):
        check_channels(op, current_size.channels)
        if op.draws_size or op.choice_end is not None:
            draw = next((gate.draw for gate in op.gates if gate.draw not in outcomes), None)
            if draw is not None:
                for outcome in _outcomes(draw, ops):
                    check_sizes(ops[index:], current_size, user_size, {**outcomes, draw: outcome})
                return
        if any(gate.draw in outcomes and not gate.outcomes[outcomes[gate.draw]] for gate in op.gates):
            continue
        if op.unsupported_size(current_size):
            sample, reason = next(
                (sample, text)
                for sample in range(current_size.batch)
                if (text := op.unsupported_size(current_size.sample(sample)))
            )
            context = f" at {sample} of the batch" if user_size.ragged else ""
            advice = "Put it after the transform to one size" if isinstance(op, PointOp | IdentityOp) else _PAD_ADVICE
            raise ArgumentError(
                f"images must fit {op.name}, got {user_size.sample(sample).height}x{user_size.sample(sample).width}{context}, "
                f"which {reason}. {advice}."
            )
        if isinstance(op, WarpOp) and current_size.batch:
            longest = int(np.argmax(np.maximum(current_size.height, current_size.width)))
            check_sides(op, current_size.sample(longest), f" at {longest} of the batch" if user_size.ragged else "")
        if op.draws_size:
            unchanged_size = (current_size,) if op.p * op.p_batch < 1 else ()
            for bound in (*op.out_bounds(current_size), *unchanged_size):
                check_sizes(ops[index + 1 :], bound, user_size, outcomes)
            return
        current_size = op.out(current_size)


def _outcomes(draw: Draw, ops: Iterable[Op]) -> Iterable[int]:
    """Return outcomes of ``draw``, as indices: one outcome for each distinct set of ops that run."""
    gates = [gate.outcomes for op in ops for gate in op.gates if gate.draw is draw]
    return {tuple(outcomes): index for index, outcomes in enumerate(np.stack(gates, 1).tolist())}.values()


def check_mixed_channels(op: Op, size: Size) -> None:
    """Raise an error for an op that mixes channels and must be the front of a pass, if images differ in size.

    Raises:
        ArgumentError: If images differ in size, and ``op`` must be the front of a pass for this number of channels.
    """
    if size.ragged and any(ChannelOp.begins_pass(part, size) for part in op.plan_ops):
        raise ArgumentError(
            f"images must have one size for {op.name} of {size.channels} channels, got different sizes. Put {op.name} after "
            "the transform to one size, outside of a RandomChoice or RandomOrder."
        )


def check_sides(op: Op, size: Size, context: str = "") -> None:
    """Raise an error for images whose sides exceed the range of exact integers of float32, or the smaller limit of a warp.

    Args:
        op: Op that computes coordinates of pixels in float32.
        size: Size of one image, or of images of one size.
        context: Position of the image in the batch, for the message.

    Raises:
        ArgumentError: If a side is too long.
    """
    limit, limit_text = (MAX_WARPED_SIDE, "2**20") if isinstance(op, WarpOp) else (SIDE_LIMIT - 1, "2**24 - 1")
    if max(size.height, size.width) > limit:
        raise ArgumentError(
            f"images must have sides of at most {limit_text} pixels for {op.name}, got {size.height}x{size.width}{context}. "
            f"{_SHRINK_ADVICE}"
        )


def check_canvases(sides: NDArray[np.int64], channels: int) -> None:
    """Raise an error for images of different sizes whose canvases would be too large.

    Between passes, each image is stored in the top left corner of a *canvas*, a buffer of the largest height and the largest
    width. Kernels index the values of a canvas in 32 bits. Canvases of 2**31 values or more in all, 8 GiB in float32, are
    accepted only if images cover more than ``CANVAS_FILL`` of them: otherwise a tall and a wide image could need all memory.

    Args:
        sides: Height and width per image, in all views, (N, 2). Every frame of a clip is an image.
        channels: Number of channels.

    Raises:
        ArgumentError: If the canvases would be too large.
    """
    height, width = sides.max(0, initial=0).tolist()
    values = height * width * channels
    filled = int(sides.prod(1).sum()) * channels
    if values >= ELEMENTS_LIMIT or len(sides) * values >= max(ELEMENTS_LIMIT, filled / CANVAS_FILL):
        tallest, widest = (f"{tall}x{wide}" for tall, wide in sides[sides.argmax(0)].tolist())
        raise ArgumentError(
            f"canvases of images between two passes must have fewer than 2**31 values, got {len(sides)} canvases of "
            f"{height}x{width} for images of {tallest} and {widest}. Put the transform to one size first, or leave such images "
            "out of the dataset."
        )
