"""Kornia modules → ops, by exact type; everything unknown stays what it is.

A subclass may override ``apply_transform``, so it is never taken for its base. What a container holds becomes a tree, whose
leaves keep their names: the tree gives Kornia's own form of a batch's draws back.
"""

import functools
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from kornia import augmentation as K
from kornia.constants import Resample
from torch import nn

from gpuaug.core.errors import ArgumentError, ArgumentTypeError, GpuAugWarning
from gpuaug.fusion.lower.refusals import refuse_torchvision
from gpuaug.fusion.ops import channel, color, color_jitter, crop, erasing, filters, mix, noise, resize, warp
from gpuaug.fusion.ops.base import Op
from gpuaug.fusion.ops.fallback import EagerOp
from gpuaug.fusion.ops.geometry import ResampleOp
from gpuaug.fusion.policies.auto_augment import POLICIES, lower_policy
from gpuaug.fusion.policies.choice import Child, Choice, Member, Pick
from gpuaug.fusion.policies.random_apply import lower_random_apply

LOWERED: dict[type[nn.Module], type[Op]] = {
    **crop.LOWERED,
    **resize.LOWERED,
    **warp.LOWERED,
    **color.LOWERED,
    **channel.LOWERED,
    **noise.LOWERED,
    **erasing.LOWERED,
    **color_jitter.LOWERED,
    **filters.LOWERED,
    **mix.LOWERED,
}

TESTED = ((0, 9), (0, 10))
"""Kornia versions from the first up to, and without, the second: those whose modules the ops were compared with."""

REQUIREMENT = "kornia>={}.{},<{}.{}".format(*TESTED[0], *TESTED[1])
"""The same as pip takes it."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One module."""

    name: str
    op: Op | EagerOp


@dataclass(frozen=True, slots=True)
class Group:
    """A container; its own name is empty where the user passed it, or a plain sequence."""

    name: str
    items: tuple["Leaf | Group", ...]
    is_container: bool


Tree = Leaf | Group


def lower(pipeline: Any, pick: Pick = "batch", *, antialias: bool = False) -> Tree:
    """What a pipeline consists of.

    Args:
        pipeline: The user's.
        pick: Whether policies pick for the batch, as Kornia does, or for each sample.
        antialias: Whether what shrinks weighs all pixels that fall on one.

    Raises:
        ArgumentTypeError: If it is nothing that has augmentations in it, or has transforms of torchvision in it.
        ArgumentError: If it is empty.
    """
    if isinstance(pipeline, type):
        raise ArgumentTypeError(
            f"pipeline must be an instance, got the class {pipeline.__name__}. Call it first: {pipeline.__name__}(…)."
        )
    tree = _tree("", pipeline, pick, untested_version())
    if not list(leaves(tree)):
        raise ArgumentError(
            f"pipeline must hold at least one augmentation, got an empty {type(pipeline).__name__}. "
            "Add one, such as K.RandomHorizontalFlip()."
        )
    for leaf in leaves(tree) if antialias else ():
        for op in leaf.op.ops if isinstance(leaf.op, Choice) else (leaf.op,):
            if isinstance(op, ResampleOp):
                op.set_antialias(cubic=op.settings["resample"] == Resample.BICUBIC)
    return tree


def leaves(tree: Tree) -> Iterator[Leaf]:
    """All modules, in the order in which they run."""
    if isinstance(tree, Leaf):
        yield tree
    else:
        for item in tree.items:
            yield from leaves(item)


def _tree(name: str, module: Any, pick: Pick, unknown: str | None) -> Tree:
    refuse_torchvision(module)
    if type(module) in (K.AugmentationSequential, K.ImageSequential):
        items = tuple(_tree(child_name, child, pick, unknown) for child_name, child in module.named_children())
        if module.random_apply is False:
            return Group(name, items, is_container=True)
        name = name or type(module).__name__
        children = _children(items)
        if children is None:
            choice: Any = "random_apply over containers in containers"
        else:
            choice = unknown or lower_random_apply(name, module, children, pick)
        return Leaf(name, EagerOp(name, module, choice) if isinstance(choice, str) else choice)
    if type(module) is nn.Sequential:
        module = list(module)
    if isinstance(module, Sequence) and not isinstance(module, str):
        named = [(f"{type(child).__name__}_{index}", child) for index, child in enumerate(module)]
        return Group(name, tuple(_tree(child_name, child, pick, unknown) for child_name, child in named), is_container=False)
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(
            "pipeline must be a Kornia augmentation, a Kornia container or a sequence of augmentations, "
            f"got {type(module).__name__}. Wrap a function in an nn.Module to have it run in its place."
        )
    name = name or type(module).__name__
    if type(module) in POLICIES and unknown is None:
        policy = lower_policy(name, module, LOWERED, pick)
        return Leaf(name, EagerOp(name, module, policy) if isinstance(policy, str) else policy)
    reason, kind = unknown or _why_not(module), LOWERED.get(type(module))
    if reason is None:
        return Leaf(name, LOWERED[type(module)](name, module))
    resizes = unknown is None and kind is not None and kind.out is not Op.out
    return Leaf(name, EagerOp(name, module, reason, kind(name, module) if kind is not None and resizes else None))


def _children(items: Sequence[Tree]) -> list[Child] | None:
    """What a container picks from; ``None`` if containers stand in the containers in it."""
    children = []
    for item in items:
        inner = (item,) if isinstance(item, Leaf) else item.items
        if any(isinstance(each, Group) for each in inner):
            return None
        members = tuple(Member(each.name, each.op) for each in inner if isinstance(each, Leaf))
        children.append(Child(item.name, members, is_container=isinstance(item, Group)))
    return children


def _why_not(module: nn.Module) -> str | None:
    kind = LOWERED.get(type(module))
    if kind is None:
        base = next((base for base in type(module).__mro__ if base in LOWERED or base in POLICIES), None)
        if base is not None:
            return f"a subclass of {base.__name__}, which may do anything"
        return "no lowering for this type" if type(module).__module__.startswith("kornia.") else "not one of Kornia's modules"
    if any(isinstance(value, torch.Tensor) and value.is_cuda for value in vars(module).values()):
        return "its parameters are on the GPU; leave the pipeline on the CPU, where it draws"
    unsupported = getattr(kind, "unsupported_module", None)
    reason: str | None = unsupported(module) if unsupported is not None else None
    return reason


def untested_version() -> str | None:
    """Why every module is left to Kornia, if the ops were not compared with the version that is installed."""
    found = version("kornia")
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is not None and TESTED[0] <= (int(numbers[1]), int(numbers[2])) < TESTED[1]:
        return None
    return f"Kornia {found} is not one of the versions compared with ({REQUIREMENT})"


@functools.cache
def warn_of_version(reason: str) -> None:
    """Warn once in a process that :func:`untested_version` leaves every module to Kornia."""
    warnings.warn(
        f"kornia must be of a version that gpuaug.fuse was compared with, got another: {reason}. Every module of every "
        f'pipeline is left to Kornia, which takes tens of launches a batch for each. Run pip install "{REQUIREMENT}".',
        GpuAugWarning,
        stacklevel=4,
    )
