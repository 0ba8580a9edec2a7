"""Warnings about modules that are not lowered: they work, but take launches that the user may not expect."""

import warnings
from collections.abc import Sequence

from gpuaug.core.errors import DOCUMENTATION, GpuAugWarning
from gpuaug.fusion.lower.kornia import untested_version, warn_of_version
from gpuaug.fusion.ops.base import Op
from gpuaug.fusion.ops.fallback import EagerOp
from gpuaug.fusion.policies.random_apply import RandomApply

_COST = "on the training thread, and the passes are split there: print(augment.explain()) shows it"
_SILENCE = "or ignore gpuaug.GpuAugWarning where it is meant"


class FallbackWarnings:
    """Warn once per module of a pipeline that is not lowered.

    Args:
        ops: Ops of the pipeline.
    """

    def __init__(self, ops: Sequence[Op | EagerOp]) -> None:
        self._ops = ops
        self.warned: set[str] = set()
        """Names of the modules with a warning."""

    def when_fused(self) -> None:
        """Warn about modules that are not lowered for any images, or about an untested version of Kornia."""
        untested = untested_version()
        if untested is not None and any(op.package == "Kornia" for op in self._ops):
            warn_of_version(untested)
        # A transform in a container with random order has one op per position.
        for op in {(op.name, id(op.module)): op for op in self._ops}.values():
            if isinstance(op, RandomApply):
                fallbacks = op.always_fallbacks()
                self.warned.update(fallback.name for fallback in fallbacks)
                if fallbacks:
                    _warn_of_choice(op, fallbacks)
            elif isinstance(op, EagerOp):
                self.warned.add(op.name)
                if untested is None or op.package != "Kornia":
                    _warn(op)

    def when_run(self, op: EagerOp) -> None:
        """Warn about a module that is not lowered for images of one size, at the first batch of that size."""
        if op.name not in self.warned:
            self.warned.add(op.name)
            _warn(op)


def _warn(op: EagerOp) -> None:
    page = "torchvision" if op.package == "torchvision" else "fuse"
    if op.package == "torchvision":
        runs = "runs image by image" if op.is_users else "is left to torchvision, image by image"
        cost = "It adds its own launches for every image of a batch"
    elif op.is_users:
        runs = "runs on the whole batch"
        cost = "What it draws once holds for all images; v2.Compose([module]) calls it for each. It adds its own launches"
    else:
        runs = "is left to Kornia"
        cost = "Kornia takes tens of launches a batch for it"
    warnings.warn(
        f"{op.name} {runs}, because gpuaug.fuse does not lower it: {op.reason}. {cost}, {_COST}. Replace it, or that setting "
        f"of it, by what {DOCUMENTATION}{page}/ lists, {_SILENCE}.",
        GpuAugWarning,
        stacklevel=4,
    )


def _warn_of_choice(choice: RandomApply, fallbacks: Sequence[EagerOp]) -> None:
    words = dict.fromkeys(f"{op.name} ({op.reason})" for op in fallbacks)
    warnings.warn(
        f"{choice.name} may pick modules that are left to Kornia, because gpuaug.fuse does not lower them: {', '.join(words)}. "
        f"Kornia takes tens of launches a batch for each, when it is picked, {_COST}. "
        f"Leave them out of what it picks from, {_SILENCE}.",
        GpuAugWarning,
        stacklevel=4,
    )
