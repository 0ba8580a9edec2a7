"""Whether a pipeline gives images of different sizes one, whether they fit it, and whether its views have one size."""

from collections.abc import Sequence

import numpy as np

from gpuaug.core.errors import ArgumentError
from gpuaug.core.limits import MOST_WARPED
from gpuaug.fusion.gather import Gather
from gpuaug.fusion.lower.kornia import REQUIREMENT, untested_version
from gpuaug.fusion.ops.base import ANY_SIDES, Op, Size
from gpuaug.fusion.ops.fallback import EagerOp
from gpuaug.fusion.ops.geometry import GatherOp, WarpOp
from gpuaug.fusion.plan import check_sides
from gpuaug.fusion.policies.choice import Choice


def sizing_ops(ops: Sequence[Op | EagerOp]) -> tuple[GatherOp, ...]:
    """The ops that give images of different sizes one, which the first pass has to do.

    Raises:
        ArgumentError: If they do not.
    """
    untested = untested_version()
    if untested is not None and any(op.package == "Kornia" for op in ops):
        raise ArgumentError(
            f"kornia must be of a version that gpuaug.fuse was compared with where ragged=True, got another: {untested}. "
            f'Run pip install "{REQUIREMENT}".'
        )
    front, size = Gather(), Size(1, 3, *ANY_SIDES)
    taken: list[GatherOp] = []
    way_out = "Begin with what gives them one size, such as K.RandomResizedCrop((224, 224)) or K.Resize((224, 224))"
    for op in ops:
        if isinstance(op, EagerOp):
            reason: str | None = op.reason
        elif not isinstance(op, GatherOp):
            reason = "it does more than move pixels"
        else:
            reason = op.unsupported_size(size) or (
                None if front.accepts(op) else f"it needs a pass of its own after {taken[-1].name}"
            )
        if reason is not None:
            raise ArgumentError(
                f"pipeline must give images one size before anything else where ragged=True, got {op.name}: {reason}. "
                f"{way_out}."
            )
        assert isinstance(op, GatherOp)
        front, size = front.adding(op), op.out(size)
        taken.append(op)
        if not size.ragged:
            return tuple(taken)
    raise ArgumentError(
        f"pipeline must give images one size where ragged=True, got {taken[-1].name} as its end. "
        "Add what does, such as K.RandomResizedCrop((224, 224)), K.Resize((224, 224)) or K.CenterCrop(224)."
    )


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
        if sizing is None or isinstance(sizing, Choice):
            at = at if isinstance(op, EagerOp) and op.moves_nothing else None
            continue
        chance = sizing.p * sizing.p_batch
        if not chance:
            continue
        out = sizing.out(at or Size(1, 3, *ANY_SIDES))
        if at is not None and chance < 1 and out != at:
            raise ArgumentError(
                f"pipeline must give all views one size, got {op.name} with p={chance}, which makes images of "
                f"{at.height}x{at.width} {out.height}x{out.width} or leaves them. Give it p=1.0, or resize before it: "
                f"K.Resize(({out.height}, {out.width}))."
            )
        at = out if at is not None or (chance == 1 and not out.ragged) else None


def check_sizes(ops: Sequence[GatherOp], size: Size) -> None:
    """Refuse images that one of :func:`sizing_ops` could not give their one size.

    Raises:
        ArgumentError: If there is one, named by its place in the batch.
    """
    at = size
    for op in ops:
        if op.unsupported_size(at):
            index, reason = next((index, why) for index in range(at.batch) if (why := op.unsupported_size(at.of(index))))
            raise ArgumentError(
                f"images must fit {op.name}, got {size.of(index).height}x{size.of(index).width} at {index} of the batch, "
                f"which {reason}. Pad or resize before it."
            )
        if isinstance(op, WarpOp) and at.ragged and max(np.max(at.height), np.max(at.width)) > MOST_WARPED:
            longest = int(np.argmax(np.maximum(at.height, at.width)))
            check_sides(op, at.of(longest), f" at {longest} of the batch")
        at = op.out(at)
