"""Lowers the user's pipeline to a tree of ops, each module by its library."""

from collections.abc import Sequence
from typing import Any

from kornia import augmentation as K
from kornia.constants import Resample
from torch import nn

from gpuaug.core.errors import ArgumentError, ArgumentTypeError
from gpuaug.core.torchvision_transforms import torchvision_class
from gpuaug.fusion.lower.kornia import lower_container, lower_module
from gpuaug.fusion.lower.refusals import refuse_held
from gpuaug.fusion.lower.tree import Group, Tree, leaves
from gpuaug.fusion.ops.base import FrontOp, Op
from gpuaug.fusion.ops.color import Posterize
from gpuaug.fusion.ops.fallback import EagerOp
from gpuaug.fusion.ops.filters import LevelsOp
from gpuaug.fusion.ops.geometry import ResampleOp, WarpOp
from gpuaug.fusion.policies.choice import Choice, Pick


def lower(pipeline: Any, pick: Pick = "batch", *, antialias: bool = False) -> Tree:
    """What a pipeline consists of.

    Args:
        pipeline: The user's.
        pick: Whether Kornia's policies pick for the batch, as in Kornia, or for each sample.
        antialias: Whether Kornia's modules that shrink weigh all pixels that fall on one. torchvision's say so themselves.

    Raises:
        ArgumentTypeError: If it is nothing that has augmentations in it, or has a transform in it that cannot run here.
        ArgumentError: If it is empty, or the images are not what a transform of torchvision takes.
    """
    if isinstance(pipeline, type):
        raise ArgumentTypeError(
            f"pipeline must be an instance, got the class {pipeline.__name__}. Call it first: {pipeline.__name__}(…)."
        )
    tree = _Lowering(pipeline, pick).tree("", pipeline)
    if not list(leaves(tree)):
        raise ArgumentError(
            f"pipeline must hold at least one augmentation, got an empty {type(pipeline).__name__}. "
            "Add one, such as K.RandomHorizontalFlip()."
        )
    for leaf in leaves(tree) if antialias else ():
        for op in leaf.op.ops if isinstance(leaf.op, Choice) else (leaf.op,):
            if isinstance(op, ResampleOp) and op.package == "Kornia":
                op.set_antialias(cubic=op.settings["resample"] == Resample.BICUBIC)
    _expect_rounding([leaf.op for leaf in leaves(tree)])
    return tree


def _expect_rounding(ops: Sequence[Op | EagerOp]) -> None:
    """Tell Kornia's ops that count levels if they stand behind one that makes a pixel of several others.

    Alone they have Kornia's levels bit for bit.
    """
    rounded = False
    for op in ops:
        for each in op.ops if isinstance(op, Choice) else (op,):
            if rounded and isinstance(each, LevelsOp | Posterize) and each.package == "Kornia":
                each.expect_rounding()
        rounded |= any(map(_rounds, op.ops if isinstance(op, Choice) else (op,)))


def _rounds(op: Op | EagerOp) -> bool:
    """True if an op may make pixels of equal ones that are a rounding error apart."""
    if isinstance(op, WarpOp | ResampleOp):
        return not op.nearest
    return isinstance(op, EagerOp) or (isinstance(op, FrontOp) and not isinstance(op, LevelsOp))


class _Lowering:
    """One pipeline being lowered.

    Args:
        pipeline: The user's.
        pick: As for ``lower``.
    """

    def __init__(self, pipeline: Any, pick: Pick) -> None:
        self._pipeline, self._pick = pipeline, pick
        self._torchvision: Any = None

    def tree(self, name: str, module: Any) -> Tree:
        """What one module, container or sequence consists of."""
        if type(module) is nn.Sequential:
            module = list(module)
        if isinstance(module, Sequence) and not isinstance(module, str):
            named = [(f"{type(child).__name__}_{index}", child) for index, child in enumerate(module)]
            return Group(name, tuple(self.tree(child_name, child) for child_name, child in named), is_container=False)
        if torchvision_class(module) is not None:
            if self._torchvision is None:
                # Imported where a pipeline has a transform of torchvision's, and not with gpuaug.
                from gpuaug.fusion.lower.torchvision import TorchvisionLowering

                self._torchvision = TorchvisionLowering(self._pipeline, self.tree)
            made: Tree = self._torchvision.tree(name, module)
            return made
        if not isinstance(module, nn.Module):
            raise ArgumentTypeError(
                "pipeline must be a Kornia augmentation, a Kornia container, a torchvision transform or a sequence of them, "
                f"got {type(module).__name__}. Wrap a function in an nn.Module to have it run in its place."
            )
        refuse_held(module)
        if type(module) in (K.AugmentationSequential, K.ImageSequential):
            return lower_container(name, module, self._pick, self.tree)
        return lower_module(name, module, self._pick)
