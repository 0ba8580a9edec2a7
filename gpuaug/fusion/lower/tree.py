"""What a pipeline consists of: a tree, whose leaves keep their names in the user's containers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpuaug.fusion.ops.base import Op
from gpuaug.fusion.ops.fallback import EagerOp


@dataclass(frozen=True, slots=True)
class Leaf:
    """One module."""

    name: str
    op: Op | EagerOp


@dataclass(frozen=True, slots=True)
class Done:
    """A transform of torchvision's whose work a fused pipeline does in reading its images, or that has none to do."""

    name: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    """What does the same on one image: functions of torchvision's, and their arguments."""


@dataclass(frozen=True, slots=True)
class Group:
    """A container; its own name is empty where the user passed it, or a plain sequence."""

    name: str
    items: tuple["Tree", ...]
    is_container: bool
    """Whether Kornia takes draws of it as a container's."""


Tree = Leaf | Done | Group


def leaves(tree: Tree) -> Iterator[Leaf]:
    """All modules, in the order in which they run."""
    if isinstance(tree, Leaf):
        yield tree
    elif isinstance(tree, Group):
        for item in tree.items:
            yield from leaves(item)


def transforms_done(tree: Tree) -> Iterator[str]:
    """Names of the transforms that are no op."""
    if isinstance(tree, Done):
        yield tree.name
    elif isinstance(tree, Group):
        for item in tree.items:
            yield from transforms_done(item)
