"""Warnings about *fallback modules*: modules of a fused pipeline that are not lowered to ops, but run by their library.

They need more kernel launches than users of ``gpuaug.fuse`` may expect.
"""

import warnings
from collections.abc import Sequence

from gpuaug.core.errors import DOCUMENTATION, GpuAugWarning
from gpuaug.fusion.lower.kornia import untested_version, warn_of_untested_version
from gpuaug.fusion.ops.base import Op
from gpuaug.fusion.ops.fallback import EagerOp

# Parts of the text of each warning.
_COST = "on the training thread, and splits the passes there: see print(augment.explain())"
_SILENCE = "or ignore gpuaug.GpuAugWarning if this is intended"


def warn_when_fused(ops: Sequence[Op | EagerOp], warned: set[str]) -> None:
    """Warn, when a pipeline is fused, about modules without an op for any image size, or an untested version of Kornia.

    Args:
        ops: Ops and fallback modules of the pipeline.
        warned: See ``warn_once``.
    """
    untested = untested_version()
    if untested is not None and any(op.package == "Kornia" for op in ops):
        warn_of_untested_version(untested)
        warned |= {op.name for op in ops if op.package == "Kornia"}
    for op in ops:
        if isinstance(op, EagerOp):
            warn_once(op, warned)


def warn_once(op: EagerOp, warned: set[str]) -> None:
    """Warn about a fallback module.

    Also called when the module runs, because some modules are fallback modules only for images of some sizes.

    Args:
        op: The fallback module.
        warned: Names of the modules about which no more warnings are issued. The name of ``op`` is added.
    """
    if op.name in warned:
        return
    warned.add(op.name)
    page = "torchvision" if op.package == "torchvision" else "fuse"
    if op.package == "torchvision":
        how = "It runs image by image, with separate launches for every image"
    elif op.is_user_defined:
        how = "It runs once for the whole batch, so one draw applies to all images (v2.Compose([module]) calls it per image)"
    else:
        how = "Kornia runs it, with tens of launches per batch"
    warnings.warn(
        f"{op.name} is not fused, because gpuaug.fuse does not lower it: {op.reason}. {how}, {_COST}. Replace the module "
        f"or its setting by one listed at {DOCUMENTATION}{page}/, {_SILENCE}.",
        GpuAugWarning,
        stacklevel=4,  # the caller of gpuaug.fuse, for a warning of ``warn_when_fused``
    )
