"""Lowering of Kornia's modules to ops. A module that is not lowered is a *fallback module*, which Kornia runs.

A subclass that overrides no method of its base is lowered as its base. A container becomes a tree with the names of its
modules, which are needed to convert draws, that is, random parameters, to Kornia's ``params=``.

A *mix* (MixUp, CutMix) blends images of a batch. A *policy* (such as RandAugment) picks some of its augmentations at random.

The functions at the end warn about fallback modules of both libraries, which need more kernel launches than users of
``gpuaug.fuse`` may expect.
"""

import functools
import re
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch
from kornia import augmentation as K
from kornia.constants import DataKey, Resample
from torch import nn

from gpuaug.core.errors import DOCUMENTATION, GpuAugError, warn
from gpuaug.core.torchvision_types import difference, nearest_class
from gpuaug.fusion.lower.refusals import ATTRIBUTE_ERRORS, attributes_reason
from gpuaug.fusion.lower.tree import Group, Leaf, Tree, lowered
from gpuaug.fusion.ops import channel, color, color_jitter, crop, filters, mix, positional, resize, warp
from gpuaug.fusion.ops.base import Op
from gpuaug.fusion.ops.fallback import EagerKornia, EagerOp
from gpuaug.fusion.ops.kornia_private import foreign_generator
from gpuaug.fusion.policies.auto_augment import POLICIES, lower_policy
from gpuaug.fusion.policies.one_mix import OneMix
from gpuaug.fusion.policies.picking import Pick

LOWERED = lowered(crop, resize, warp, color, channel, positional, color_jitter, filters, mix)
"""Class of Kornia → class of its op, for all classes that are lowered."""

CONTAINERS: tuple[type[nn.Module], ...] = (K.AugmentationSequential, K.ImageSequential, K.VideoSequential)
"""Containers that are lowered module by module."""

version = functools.cache(metadata.version)
"""Function: name of an installed package → its version. Cached, because a look-up takes longer than lowering a module."""

TESTED_VERSIONS = ((0, 9), (0, 10))
"""Kornia versions that the ops are tested with: at least the first, and below the second."""

REQUIREMENT = "kornia>={}.{},<{}.{}".format(*TESTED_VERSIONS[0], *TESTED_VERSIONS[1])
"""``TESTED_VERSIONS`` as a requirement for pip."""

Lower = Callable[[str, Any], Tree]
"""Function of (name in the container, module) that lowers a module."""


def lower_container(name: str, container: Any, pick: Pick, lower: Lower) -> Tree:
    """Lower a container.

    With ``random_apply``, a container runs a random selection of its modules. It becomes one op if all modules are mixes, and a
    fallback module otherwise. Without ``random_apply``, it becomes a tree of its lowered modules.

    Args:
        name: Name of the container in its container; empty for the pipeline itself.
        container: Container of the user, of a class in ``CONTAINERS``.
        pick: Whether mixes are picked per batch or per sample.
        lower: Function that lowers a module of the container.
    """
    lowered_children = tuple(lower(child_name, child) for child_name, child in container.named_children())
    if container.random_apply is False:  # otherwise a range, see ``_unsupported_choice``
        return Group(name, lowered_children, is_container=True)
    name = name or type(container).__name__
    reason = untested_version() or _unsupported_choice(container, lowered_children)
    if reason is not None:
        return Leaf(name, EagerKornia(name, container, reason))
    mixes = [item.op for item in lowered_children if isinstance(item, Leaf) and isinstance(item.op, mix.MixUp | mix.CutMix)]
    return Leaf(name, OneMix(name, container, mixes, pick, container.random_apply_weights.tolist()))


def _unsupported_choice(container: Any, items: Sequence[Tree]) -> str | None:
    """Return the reason why a container with ``random_apply`` is not lowered, or ``None``. ``items``: its lowered modules."""
    ops = [item.op if isinstance(item, Leaf) else None for item in items]
    if not ops or not all(isinstance(op, mix.MixUp | mix.CutMix) for op in ops):
        return "random_apply is fused for containers of MixUp and CutMix alone"
    # ``random_apply`` is the range [low, high) of the number of modules to run. Kornia runs exactly one mix, also if the number
    # is larger. If it may be 0, Kornia may run no mix, which the op cannot do.
    if container.random_apply[0] == 0:
        return "random_apply of zero or more mixes"
    weights = container.random_apply_weights
    is_valid = bool(torch.isfinite(weights).all() and (weights >= 0).all() and weights.any())
    return None if is_valid else "random_apply_weights are not finite, negative or all 0"


def lower_module(name: str, module: nn.Module, pick: Pick, extra_args: Any = None) -> Leaf:
    """Lower a module to an op, or return its fallback module, with the reason why it is not lowered.

    Args:
        name: Name in the container; empty for the pipeline itself.
        module: Module of the user: an augmentation, a policy, or a container that is not lowered module by module.
        pick: Whether policies pick per batch or per sample.
        extra_args: Result of ``extra_args_of(module)``. A container is lowered only if this is ``None``.
    """
    name = name or type(module).__name__
    base: Any = nearest_class(module, {*LOWERED, *POLICIES, *CONTAINERS})
    reason = untested_version() or ("extra_args" if extra_args is not None else _difference_reason(module, base))
    op: Op | None = None
    if reason is None and base in POLICIES:
        op_or_reason = lower_policy(name, module, LOWERED, pick)
        op, reason = (None, op_or_reason) if isinstance(op_or_reason, str) else (op_or_reason, None)
    elif reason is None:
        try:
            op = LOWERED[base](name, module)
            reason = _gpu_reason(module) or op.unsupported()
            if reason is not None and LOWERED[base].out_applied is Op.out_applied:
                op = None  # the op does not change the image size, and a fallback module needs an op only for its output size
        except GpuAugError:
            raise
        except ATTRIBUTE_ERRORS as error:
            reason = attributes_reason(module, base, error)
    if reason is not None:
        return Leaf(name, EagerKornia(name, module, reason, op, extra_args))
    assert op is not None
    return Leaf(name, op)


def extra_args_of(module: nn.Module) -> Any:
    """Return the ``extra_args`` of a container, which override settings of its modules; ``None`` for Kornia's default."""
    extra_args = module.extra_args if isinstance(module, K.AugmentationSequential) else None
    return None if extra_args == {DataKey.MASK: {"resample": Resample.NEAREST, "align_corners": None}} else extra_args


def _difference_reason(module: nn.Module, base: type | None) -> str | None:
    """Return the reason why a module may differ from ``base``, its nearest class that is lowered; ``None`` if it does not."""
    belongs_to_kornia = type(module).__module__.startswith("kornia.")
    if base is None:
        return "no lowering for this type" if belongs_to_kornia else "not one of Kornia's modules"
    reason = difference(module, base) or foreign_generator(module, base)
    # A class of Kornia that derives from ``base`` and differs from it is another augmentation.
    return "no lowering for this type" if reason is not None and belongs_to_kornia and type(module) is not base else reason


def _gpu_reason(module: nn.Module) -> str | None:
    """Return the reason why a module with tensors on a GPU is not lowered; ``None`` if it has no such tensors."""
    if any(isinstance(value, torch.Tensor) and value.is_cuda for value in vars(module).values()):
        return "its parameters are on the GPU; leave the pipeline on the CPU, where it draws"
    return None


def untested_version() -> str | None:
    """Return the reason why no module is lowered: an untested version of Kornia; ``None`` if the version is tested."""
    installed = version("kornia")
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    if numbers is not None and TESTED_VERSIONS[0] <= (int(numbers[1]), int(numbers[2])) < TESTED_VERSIONS[1]:
        return None
    return f"Kornia {installed} is not one of the tested versions ({REQUIREMENT})"


@functools.cache
def warn_of_untested_version(reason: str) -> None:
    """Warn that Kornia runs all its modules. Cached, to warn once per process. ``reason``: result of ``untested_version``."""
    warn(
        f"No module of Kornia is fused, because {reason}. Kornia runs every module, with tens of launches per batch for each. "
        f'Run pip install "{REQUIREMENT}".'
    )


# Part of the text of each warning.
_COST = "on the training thread, and splits the passes there: see print(augment.explain())"


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
    warn(
        f"{op.name} is not fused, because gpuaug.fuse does not lower it: {op.reason}. {how}, {_COST}. Replace the module "
        f"or its setting by one listed at {DOCUMENTATION}{page}/, or ignore gpuaug.GpuAugWarning if this is intended."
    )
