"""Lowering of random containers, such as ``v2.RandomChoice``, to ops that run for some samples only.

A random container makes one *draw* per sample, a random choice. Its result, the *outcome*, is the transforms that run. Each op
of the container has a *gate*, the set of outcomes for which the op runs. Transforms of a container that change the image size
need preparation (``prepare_sizes``), because samples then differ in size.

A *fallback module* is run by its library, not by an op. A *leaf* is a module of the pipeline with its op or fallback module.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from torchvision.transforms import v2

from gpuaug.core.errors import ArgumentError
from gpuaug.core.torchvision_types import class_of
from gpuaug.fusion.lower.tree import Leaf
from gpuaug.fusion.ops.base import ANY_SIDES, Op, Size
from gpuaug.fusion.ops.fallback import EagerOp
from gpuaug.fusion.ops.geometry import BoxCropOp, GatherOp, moves_pixels, only_moves_and_recolours

PROBE_SIZE = Size(1, 3, 4093, 4099)
"""Input size, (B, C, H, W), to test whether an op changes sizes. No op is likely to resize or crop to this size."""

_PROBE_SIZES = PROBE_SIZE, Size(1, 3, 2, 1)
"""``PROBE_SIZE`` and a small size. Ops that change sizes change one of them; ops that pad to a least size, the second."""

MOST_OPS = 24
"""Maximum number of ops of a container in random order, which needs one op per transform and position in the order."""

MOST_SUBSETS = 10_000
"""Maximum number of subsets of transforms from which a container draws. The probability of each is computed on the host."""


def sizing_op(op: Op | EagerOp | None) -> Op | None:
    """Return the op that computes the output size of ``op``, if ``op`` changes the image size; else ``None``.

    This is ``op`` itself, or for a fallback module its attribute ``lowered``, an op of the same module.
    """
    lowered = op.lowered if isinstance(op, EagerOp) else op
    return lowered if lowered is not None and any(lowered.out(size) != size for size in _PROBE_SIZES) else None


def moves_nothing(op: Op | EagerOp) -> bool:
    """Return whether an op or fallback module is certain to leave masks, boxes and keypoints unchanged."""
    if isinstance(op, EagerOp):
        return op.moves_nothing
    return not any(isinstance(part, GatherOp) or moves_pixels(part) for part in op.ops)


def named_transforms(transforms: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, transform) of the members of a container. Names are such as ``"Resize_0"``."""
    for index, transform in enumerate(transforms):
        yield f"{getattr(transform, '__name__', type(transform).__name__)}_{index}", transform


def common_resize(container: Any) -> tuple[str, Any] | None:
    """Return (name, transform) of the resize to (height, width) that ends all transforms of a ``RandomChoice``, or ``None``.

    A transform ends in a resize if it is a ``Compose`` with a resize at its end, or a resize itself.
    """
    if not isinstance(container, v2.RandomChoice):
        return None
    last_transforms = [list(named_transforms(_branch(transform)))[-1] for transform in container.transforms]
    resizes = [
        (tuple(last.size), str(last.interpolation), last.antialias)
        for _, last in last_transforms
        if class_of(last, (v2.Resize,)) and isinstance(last.size, Sequence) and len(last.size) == 2
    ]
    return last_transforms[-1] if len(resizes) == len(last_transforms) and len(set(resizes)) == 1 else None


def probabilities(name: str, choice: Any) -> list[float]:
    """Return the probability per transform of a ``RandomChoice``: ``p`` divided by its sum, as ``torch.multinomial`` does.

    Raises:
        ArgumentError: If ``torch.multinomial`` does not accept ``p``, or ``p`` has more weights than there are transforms.
    """
    weights = [float(weight) for weight in choice.p]
    total = sum(weights)
    if not (0 < total < math.inf) or min(weights) < 0 or len(weights) > len(choice.transforms):
        raise ArgumentError(
            f"p of {name} must hold a finite weight of at least 0 per transform, and one above 0, got {weights}. Set p to "
            f"[1.0] * {len(choice.transforms)} for equal weights."
        )
    return [weight / total for weight in weights]


def _weights(container: Any) -> tuple[Sequence[float], int, bool]:
    """Return (weight per transform, number of transforms that run, whether their order is random) of a random container.

    ``container`` is not a ``RandomApply``, which runs all or none of its transforms.
    """
    count = len(container.transforms)
    if isinstance(container, v2.RandomChoice):
        return container.p, 1, False
    if isinstance(container, v2.RandomOrder):
        return [1.0] * count, count, True
    return container.p, container.n_subset, container.random_order  # LeRobot's RandomSubsetApply


def unsupported_draw(container: Any) -> str | None:
    """Return the reason why a container cannot be lowered to ops with gates, or ``None``."""
    if isinstance(container, v2.RandomApply | v2.RandomChoice):  # invalid weights raise an error in ``probabilities``
        return None
    weights, run_count, in_random_order = _weights(container)
    if not all(0 <= weight < math.inf for weight in weights) or sum(weight > 0 for weight in weights) < run_count:
        return "torch.multinomial does not accept its weights"
    op_count = len(weights) * run_count
    if in_random_order:
        return f"its random order needs {op_count} ops, more than {MOST_OPS}" if op_count > MOST_OPS else None
    # ``outcomes`` computes the probabilities of the subsets of each size up to ``run_count``.
    subset_count = max(math.comb(len(weights), size) for size in range(run_count + 1))
    return f"more than {MOST_SUBSETS} subsets" if subset_count > MOST_SUBSETS else None


def outcomes(name: str, container: Any) -> tuple[dict[tuple[int, ...], float], list[slice]]:
    """Return the outcomes of a container's draw, with their probabilities, and the turns in which its ops are arranged.

    Returns:
        (outcome → probability, turns). An outcome is a tuple of indices of transforms, in the order in which they run. A turn
        is a slice of this tuple. If the order is random, there is one turn per position, and in each turn one op per transform,
        because each transform may be at each position. Otherwise, one turn contains all positions.

    Raises:
        ArgumentError: If the weights of a ``RandomChoice`` are not valid.
    """
    if isinstance(container, v2.RandomApply):
        p = float(container.p)
        return {tuple(range(len(container.transforms))): p, (): 1 - p}, [slice(None)]
    weights, run_count, in_random_order = _weights(container)
    if isinstance(container, v2.RandomChoice):
        weights = probabilities(name, container)
    # ``torch.multinomial`` without replacement draws one transform after another, by the weights of the remaining transforms.
    probability_of_order: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(run_count):
        probability_of_longer: dict[tuple[int, ...], float] = defaultdict(float)
        for order, probability in probability_of_order.items():
            remaining = {index: weight for index, weight in enumerate(weights) if weight > 0 and index not in order}
            for index, weight in remaining.items():
                extended = (*order, index)
                outcome = extended if in_random_order else tuple(sorted(extended))
                probability_of_longer[outcome] += probability * weight / sum(remaining.values())
        probability_of_order = probability_of_longer
    turns = [slice(turn, turn + 1) for turn in range(run_count)] if in_random_order else [slice(None)]
    return probability_of_order, turns


def _branch(transform: Any) -> Sequence[Any]:
    """Return the transforms in a member of a ``RandomChoice``: the members of a ``Compose``, or ``transform`` alone."""
    branch: Sequence[Any] = transform.transforms if class_of(transform, (v2.Compose,)) else [transform]
    return branch


def without_last_transform(member: tuple[str, Any]) -> tuple[str, Any]:
    """Return (name, transform) of a member without its last transform; (name, ``None``) if it has only one."""
    name, transform = member
    branch = _branch(transform)[:-1]
    return name, v2.Compose(branch) if branch else None


def prepare_sizes(container_leaves: Sequence[Leaf], final_resize: Leaf | None, sized_by_choice: set[Op]) -> str | None:
    """Prepare the ops of a random container that changes the size of some samples only, so that samples differ in size.

    Args:
        container_leaves: Modules of the container, in order. At least one changes the image size.
        final_resize: Resize to one size that follows the container; ``None`` if there is none.
        sized_by_choice: Ops whose ``draws_size`` is set only because a container runs them for some samples, not because the op
            draws a size. Ops of this container are added.

    Returns:
        ``None`` if the ops can be fused. Then ``draws_size`` is True for the ops after which samples differ in size, and
        ``choice_end`` is the output size of an op after which they do not. Otherwise the reason why the ops cannot be fused; an
        empty string if the only reason is that samples differ in size after the container.
    """
    sizing_leaves = [leaf for leaf in container_leaves if sizing_op(leaf.op) is not None]
    # Index after the last module that may run on images of different sizes: the last that changes sizes, or with a final
    # resize, the last of the container.
    stop = len(container_leaves) if final_resize is not None else container_leaves.index(sizing_leaves[-1]) + 1
    for leaf in (*container_leaves[:stop], *([] if final_resize is None else [final_resize])):
        if isinstance(leaf.op, EagerOp):
            return f"{leaf.name}: {leaf.op.reason}"
        if not only_moves_and_recolours(leaf.op) or leaf.op.out(PROBE_SIZE).channels != PROBE_SIZE.channels:
            return f"{leaf.name}: it reads other pixels of an image, or their coordinates"
    ops = [leaf.op for leaf in sizing_leaves if isinstance(leaf.op, Op)]
    if final_resize is None:
        crop_by_boxes = next((op.name for op in ops if isinstance(op, BoxCropOp)), None)
        if crop_by_boxes is not None:
            return f"{crop_by_boxes} without the same v2.Resize((height, width)) at the end of each transform of the choice"
        sizes = _end_sizes(ops)
        if all(not size.ragged and size == sizes[0] for size in sizes):
            # For every outcome, samples end with the same size. So the last op that changes sizes gets this output size, and is
            # removed from ``ops``: the output sizes of the remaining ops differ between samples.
            ops.pop().choice_end = sizes[0].height, sizes[0].width
        elif not any(op.draws_size and op not in sized_by_choice for op in ops):
            # No op draws a size itself, so the container can be a fallback module. It raises no error if all its output images
            # of a batch have one size.
            return ""
    for op in ops:
        if not op.draws_size:
            sized_by_choice.add(op)
        op.draws_size, op.choice_end = True, None
    return None


def _end_sizes(ops: Sequence[Op]) -> list[Size]:
    """Return the output size of a container for each subset of ``ops`` that some outcome runs, for input images of any size."""
    sizes = []
    # The first gate of an op belongs to this container, later gates to containers inside it. ``gates_open``: per op, whether
    # it runs for an outcome.
    for gates_open in set(zip(*(op.gates[0].outcomes.tolist() for op in ops), strict=True)):
        size = Size(1, 3, *ANY_SIDES)
        for op, gate_open in zip(ops, gates_open, strict=True):
            size = op.out(size) if gate_open else size
        sizes.append(size)
    return sizes
