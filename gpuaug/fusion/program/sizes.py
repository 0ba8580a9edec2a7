"""Whether a pipeline gives images of different sizes one, those that it draws too, and whether its views have one size."""

from collections.abc import Sequence

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.lower.kornia import REQUIREMENT, untested_version
from gpuaug.fusion.ops.base import ANY_SIDES, Op, Size
from gpuaug.fusion.ops.fallback import EagerOp
from gpuaug.fusion.ops.geometry import BoxCropOp, GatherOp
from gpuaug.fusion.ops.resize import Resize
from gpuaug.fusion.policies.choice import Choice
from gpuaug.fusion.program.gather import Gather


def sizing_ops(ops: Sequence[Op | EagerOp], *, ragged: bool) -> tuple[GatherOp, ...]:
    """The ops that give a ragged batch one size, which the first pass has to do; none where batches are not ``ragged``.

    Raises:
        ArgumentError: If they do not, or if an op draws a size for each image, and none in its pass gives them one again.
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


def _to_one_size(ops: Sequence[Op | EagerOp]) -> tuple[GatherOp, ...]:
    """The first ops, up to the one that gives images of different sizes one."""
    front, size = Gather(), Size(1, 3, *ANY_SIDES)
    taken: list[GatherOp] = []
    for op in ops:
        if isinstance(op, EagerOp):
            reason: str | None = op.reason
        elif not isinstance(op, GatherOp):
            reason = "it does more than move pixels"
        elif taken and isinstance(taken[-1], BoxCropOp) and not _stretches(op):
            reason = "only a v2.Resize to two sides may follow a crop by boxes"
        elif not front.accepts(op):
            reason = f"it needs a pass of its own after {taken[-1].name}"
        else:  # what is drawn by the images' sizes is known with these alone
            reason = None if op.draws_size else op.unsupported_size(size)
        if reason is not None:
            where, way_out = _advice(taken)
            raise ArgumentError(
                f"pipeline must give images one size before anything else {where}, got {op.name}: {reason}. {way_out}."
            )
        assert isinstance(op, GatherOp)
        front, size = front.adding(op), op.out(size)
        taken.append(op)
        if not size.ragged:
            return tuple(taken)
    where, way_out = _advice(taken)
    raise ArgumentError(f"pipeline must give images one size {where}, got {taken[-1].name} as its end. {way_out}.")


def _stretches(op: GatherOp) -> bool:
    """True for a Resize of torchvision's to two sides."""
    return isinstance(op, Resize) and op.package == "torchvision" and not op.out(Size(1, 3, *ANY_SIDES)).ragged


def _advice(taken: Sequence[GatherOp]) -> tuple[str, str]:
    """From where on images differ in size, by the ops before the one that is refused, and what to do about it."""
    if taken and isinstance(taken[-1], BoxCropOp):
        name = taken[-1].name
        return f"behind {name}", f"Put v2.Resize((300, 300)) directly behind it, or keep {name} in the dataset"
    drawn = next((op.name for op in taken if op.draws_size), None)
    if drawn is not None:
        crop = "v2.RandomCrop((224, 224), pad_if_needed=True)"
        way_out = f"Put what gives them one size directly behind it, such as {crop}, or keep {drawn} in the dataset"
        return f"behind {drawn}", way_out
    such_as = "RandomResizedCrop((224, 224)), Resize((224, 224)) or CenterCrop((224, 224))"
    return "where ragged=True", f"Begin with what gives them one size, such as {such_as}"


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
        if at is not None and chance < 1 and out != at and not sizing.draws_size:
            raise ArgumentError(
                f"pipeline must give all views one size, got {op.name} with p={chance}, which makes images of "
                f"{at.height}x{at.width} {out.height}x{out.width} or leaves them. Give it p=1.0, or resize before it: "
                f"{'K' if sizing.package == 'Kornia' else 'v2'}.Resize(({out.height}, {out.width}))."
            )
        at = out if at is not None or (chance == 1 and not out.ragged) else None
