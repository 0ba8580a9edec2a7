"""LeRobot's transforms of images, told by their names and their methods: gpuaug does not import lerobot."""

from collections.abc import Sequence
from itertools import combinations, permutations
from math import comb
from types import FunctionType
from typing import Any

import torch
from torchvision.transforms import v2

from gpuaug.core.torchvision_types import NOT_APPLIED, code_names, difference
from gpuaug.fusion.ops.torchvision import filters
from gpuaug.fusion.ops.torchvision.base import TorchvisionOp

METHODS: dict[str, dict[str, frozenset[str]]] = {
    "ImageTransforms": {"forward": frozenset({"tf"})},
    "RandomSubsetApply": {
        "forward": frozenset(
            {
                *("len", "torch", "multinomial", "tensor", "p", "n_subset"),
                *("random_order", "sort", "values", "transforms"),
            }
        )
    },
    "SharpnessJitter": {
        "make_params": frozenset({"torch", "empty", "uniform_", "sharpness", "item"}),
        "transform": frozenset({"_call_kernel", "F", "adjust_sharpness"}),
    },
}
"""The methods by which torchvision applies each class, and the names in their code, in the versions compared with."""

_NOT_READ = frozenset({"selected_transforms"})
"""Attributes that some versions set, and do not read."""

LOWERED: dict[str, type[TorchvisionOp]] = {"SharpnessJitter": filters.SharpnessJitter}

MOST_PLACED = 24
"""Largest product of picks and transforms of a ``RandomSubsetApply`` in random order: a transform has an op for each place."""

MOST_SUBSETS = 10_000
"""Largest number of subsets of a ``RandomSubsetApply``. Their shares are computed when the pipeline is fused."""


def lerobot_class(transform: Any) -> type | None:
    """The class of ``transform``, or the nearest base class, that is one of these of LeRobot's; ``None`` without one."""
    return next((kind for kind in type(transform).__mro__ if is_lerobots(kind)), None)


def is_lerobots(kind: type) -> bool:
    """Whether a class is one of these of LeRobot's."""
    return kind.__name__ in METHODS and kind.__module__.startswith("lerobot.")


def is_a(transform: Any, name: str) -> bool:
    """Whether ``transform`` does what LeRobot's class ``name`` does, with other settings."""
    kind = lerobot_class(transform)
    return kind is not None and kind.__name__ == name and unlike(transform, kind) is None


def unlike(transform: Any, kind: type) -> str | None:
    """What ``transform``, of LeRobot's class ``kind``, may do otherwise than that class in the versions compared with."""
    known = METHODS[kind.__name__]
    methods = {name: value for name, value in vars(kind).items() if hasattr(v2.Transform, name) and name not in NOT_APPLIED}
    for name in {**known, **methods}:
        method = methods.get(name)
        if not isinstance(method, FunctionType) or code_names([method]) - _NOT_READ != known.get(name):
            return f"{name} of {kind.__name__} is not that of the versions of LeRobot compared with"
    return difference(transform, kind)


def unsupported_subset(container: Any) -> str | None:
    """Why a ``RandomSubsetApply`` is left to torchvision, or ``None``."""
    count = len(container.transforms)
    picks = container.n_subset
    shares = torch.tensor(container.p)
    if not bool(torch.isfinite(shares).all()) or bool((shares < 0).any()) or int((shares > 0).sum()) < picks:
        return "its weights are not what torch.multinomial takes"
    if container.random_order:
        return f"more than {MOST_PLACED} transforms in all places of its order" if count * picks > MOST_PLACED else None
    return f"more than {MOST_SUBSETS} subsets" if comb(count, picks) > MOST_SUBSETS else None


def subsets(container: Any) -> tuple[list[tuple[int, ...]], list[float]]:
    """What a ``RandomSubsetApply`` may pick: indices of transforms in the order in which they run, and the share of each.

    ``torch.multinomial`` without replacement draws one after the other, each by its share of what is left.
    """
    shares: list[float] = torch.tensor(container.p).double().tolist()
    members = [index for index, share in enumerate(shares) if share > 0]
    if container.random_order:
        picked = list(permutations(members, container.n_subset))
        return picked, [_in_turn(each, shares) for each in picked]
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for size in range(1, container.n_subset + 1):
        found = {each: sum(_with_last(each, last, found, shares) for last in each) for each in combinations(members, size)}
    return list(found), list(found.values())


def _in_turn(order: Sequence[int], shares: Sequence[float]) -> float:
    """The probability of an order of picks."""
    left = sum(shares)
    probability = 1.0
    for member in order:
        probability *= shares[member] / left
        left -= shares[member]
    return probability


def _with_last(picked: tuple[int, ...], last: int, before: dict[tuple[int, ...], float], shares: Sequence[float]) -> float:
    """The probability of a set of picks of which ``last`` was the last."""
    others = tuple(member for member in picked if member != last)
    left = sum(shares) - sum(shares[member] for member in others)
    return before[others] * shares[last] / left
