"""Warnings about modules that are not lowered to ops: their library runs them, with launches that users may not expect."""

import warnings
from collections.abc import Sequence

from gpuaug.core.errors import DOCUMENTATION, GpuAugWarning
from gpuaug.fusion.lower.kornia import untested_version, warn_of_untested_version
from gpuaug.fusion.ops.base import Op
from gpuaug.fusion.ops.fallback import EagerOp

_COST = "on the training thread, and splits the passes there: see print(augment.explain())"
_SILENCE = "or ignore gpuaug.GpuAugWarning if this is intended"


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
            warn_of_untested_version(untested)
            self.warned |= {op.name for op in self._ops if op.package == "Kornia"}
        for op in self._ops:
            if isinstance(op, EagerOp):
                self.when_run(op)

    def when_run(self, op: EagerOp) -> None:
        """Warn about a module that runs in its library, unless it has a warning already."""
        if op.name in self.warned:
            return
        self.warned.add(op.name)
        page = "torchvision" if op.package == "torchvision" else "fuse"
        if op.package == "torchvision":
            runs = "It runs image by image, with separate launches for every image"
        elif op.is_user_defined:
            runs = (
                "It runs once for the whole batch, so one draw applies to all images (v2.Compose([module]) calls it per image)"
            )
        else:
            runs = "Kornia runs it, with tens of launches per batch"
        warnings.warn(
            f"{op.name} is not fused, because gpuaug.fuse does not lower it: {op.reason}. {runs}, {_COST}. Replace the module "
            f"or its setting by one listed at {DOCUMENTATION}{page}/, {_SILENCE}.",
            GpuAugWarning,
            stacklevel=4,
        )
