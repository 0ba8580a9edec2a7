"""Random containers, such as ``v2.RandomChoice``, whose transforms change the image size of some samples only.

Such a container makes one draw per sample. A *gate* of an op in the container is the set of outcomes of the draw for which the
op runs.
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
"""Arbitrary input size that is unlikely to be the output size of a transform."""

_PROBE_SIZES = PROBE_SIZE, Size(1, 3, 2, 1)
"""``PROBE_SIZE`` and a small size. An op that changes sizes changes one of them: padding of small images changes the second."""

MOST_OPS = 24
"""Maximum number of ops of a container in random order: one op per transform and turn (``outcomes``)."""

MOST_SUBSETS = 10_000
"""Maximum number of subsets from which a container draws, because the probability of each is computed on the host."""


def sizing_op(op: Op | EagerOp | None) -> Op | None:
    """Return the op that computes the output size of ``op``, if ``op`` changes the image size; else ``None``.

    For a fallback module, which a library runs, this is the op to which the module is lowered for other image sizes.
    """
    lowered = op.lowered if isinstance(op, EagerOp) else op
    return lowered if lowered is not None and any(lowered.out(size) != size for size in _PROBE_SIZES) else None


def moves_nothing(op: Op | EagerOp) -> bool:
    """Return whether an op or fallback module is certain to leave masks, boxes and keypoints unchanged."""
    if isinstance(op, EagerOp):
        return op.moves_nothing
    return not any(isinstance(part, GatherOp) or moves_pixels(part) for part in op.ops)


def named_transforms(transforms: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, transform) of the members of a container."""
    for index, transform in enumerate(transforms):
        yield f"{getattr(transform, '__name__', type(transform).__name__)}_{index}", transform


def common_resize(container: Any) -> tuple[str, Any] | None:
    """Return (name, transform) of the resize in which all transforms of a ``RandomChoice`` end; ``None`` if there is none."""
    if not isinstance(container, v2.RandomChoice):
        return None
    last_transforms = [list(named_transforms(_branch(transform)))[-1] for transform in container.transforms]
    settings = [
        (tuple(end.size), str(end.interpolation), end.antialias)
        for _, end in last_transforms
        if class_of(end, (v2.Resize,)) and isinstance(end.size, Sequence) and len(end.size) == 2
    ]
    return last_transforms[-1] if len(settings) == len(last_transforms) and len(set(settings)) == 1 else None


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
    """Return (weight per transform, number of transforms that run, whether their order is random) of a container's draw."""
    count = len(container.transforms)
    if isinstance(container, v2.RandomChoice):
        return container.p, 1, False
    if isinstance(container, v2.RandomOrder):
        return [1.0] * count, count, True
    return container.p, container.n_subset, container.random_order  # LeRobot's RandomSubsetApply


def unsupported_draw(container: Any) -> str | None:
    """Return the reason why a container cannot be lowered to ops with gates, or ``None``."""
    if isinstance(container, v2.RandomApply | v2.RandomChoice):  # ``probabilities`` raises an error for weights
        return None
    weights, runs, in_random_order = _weights(container)
    if not all(0 <= weight < math.inf for weight in weights) or sum(weight > 0 for weight in weights) < runs:
        return "torch.multinomial does not accept its weights"
    ops = len(weights) * runs
    if in_random_order:
        return f"its random order needs {ops} ops, more than {MOST_OPS}" if ops > MOST_OPS else None
    most = max(math.comb(len(weights), number) for number in range(runs + 1))
    return f"more than {MOST_SUBSETS} subsets" if most > MOST_SUBSETS else None


def outcomes(name: str, container: Any) -> tuple[dict[tuple[int, ...], float], list[slice]]:
    """Return the outcomes of a container's draw.

    Returns:
        (outcome → probability, turns). An outcome is the indices of the transforms that run, in order. A turn is a slice of the
        outcome whose transforms become ops together: one position per turn if the order is random, or else all positions.

    Raises:
        ArgumentError: If the weights of a ``RandomChoice`` are not valid.
    """
    if isinstance(container, v2.RandomApply):
        p = float(container.p)
        return {tuple(range(len(container.transforms))): p, (): 1 - p}, [slice(None)]
    weights, runs, in_random_order = _weights(container)
    if isinstance(container, v2.RandomChoice):
        weights = probabilities(name, container)
    # As ``torch.multinomial`` without replacement: one transform after another, by the weights of the remaining transforms.
    probability_of_order: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(runs):
        probability_of_longer: dict[tuple[int, ...], float] = defaultdict(float)
        for order, probability in probability_of_order.items():
            remaining = {index: weight for index, weight in enumerate(weights) if weight > 0 and index not in order}
            for index, weight in remaining.items():
                extended = (*order, index)
                outcome = extended if in_random_order else tuple(sorted(extended))
                probability_of_longer[outcome] += probability * weight / sum(remaining.values())
        probability_of_order = probability_of_longer
    turns = [slice(turn, turn + 1) for turn in range(runs)] if in_random_order else [slice(None)]
    return probability_of_order, turns


def _branch(transform: Any) -> Sequence[Any]:
    """Return the transforms that a choice runs: the members of a ``Compose``, or ``transform`` alone."""
    branch: Sequence[Any] = transform.transforms if class_of(transform, (v2.Compose,)) else [transform]
    return branch


def without_last_transform(member: tuple[str, Any]) -> tuple[str, Any]:
    """Return (name, transform) of a member without its last transform; (name, ``None``) if it has only one."""
    name, transform = member
    branch = _branch(transform)[:-1]
    return name, v2.Compose(branch) if branch else None


def prepare_sizes(container_leaves: Sequence[Leaf], final_resize: Leaf | None, sized_by_choice: set[Op]) -> str | None:
    """Prepare the ops of a random container that changes the size of some samples only.

    Args:
        container_leaves: Modules of the container, in order. At least one changes the image size.
        final_resize: Resize to one size that follows the container; ``None`` if there is none.
        sized_by_choice: Ops with ``draws_size`` that draw no size themselves, but that a container runs for some samples only.
            Ops of this container are added.

    Returns:
        ``None`` if the ops can be fused. Their attributes ``draws_size`` and ``choice_end`` (see ``Op``) are then set.
        Otherwise the reason, or an empty string if the only reason is that samples differ in size after the container.
    """
    sizing_leaves = [leaf for leaf in container_leaves if sizing_op(leaf.op) is not None]
    # Modules up to the last change of size may run on images of different sizes.
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
            # Removed from ``ops``: the last op to change sizes gives all samples one size, so it does not draw a size.
            ops.pop().choice_end = sizes[0].height, sizes[0].width
        elif not any(op.draws_size and op not in sized_by_choice for op in ops):
            # No op draws a size itself. torchvision runs the container, without an error if all output images have one size.
            return ""
    for op in ops:
        if not op.draws_size:
            sized_by_choice.add(op)
        op.draws_size, op.choice_end = True, None
    return None


def _end_sizes(ops: Sequence[Op]) -> list[Size]:
    """Return the output size of a container for each subset of its ``ops`` that a draw can select, for images of any size."""
    sizes = []
    for gates_open in set(zip(*(op.gates[0].outcomes.tolist() for op in ops), strict=True)):
        size = Size(1, 3, *ANY_SIDES)
        for op, gate_open in zip(ops, gates_open, strict=True):
            size = op.out(size) if gate_open else size
        sizes.append(size)
    return sizes
