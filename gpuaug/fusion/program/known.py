"""What calls on images alone have found out, for later calls on images of the same kind.

In a training loop a call comes after milliseconds of other code, which leave nothing of it in the processor's caches. Each line
then takes several times as long as in a loop of its own, so what does not change from batch to batch is worked out once.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpuaug.fusion.ops.base import Op, Size
from gpuaug.fusion.program.plan import Plan

Kind = tuple[torch.Size, torch.dtype, torch.device]

MOST_KINDS = 64
"""Largest number of kinds known at once. Most programs have two: whole batches, and the last of an epoch."""


class Known(NamedTuple):
    """The plan that is the whole pipeline for images of one kind, which have been checked."""

    plan: Plan
    seen: tuple[Size, torch.device, torch.dtype]
    """Size, device and type of the images."""
    ops: tuple[Op, ...]
    """All ops of the plan."""
    dtype: torch.dtype
    """Type of the images that come out."""


class KnownKinds(dict[Kind | None, Known]):
    """What is known, by the images' kind."""

    def add(
        self, kind: Kind, plan: Plan, seen: tuple[Size, torch.device, torch.dtype], ops: tuple[Op, ...], dtype: torch.dtype
    ) -> None:
        """Keep what a first call has found out. Forgets all others where there are too many."""
        if len(self) >= MOST_KINDS:
            self.clear()
        self[kind] = Known(plan, seen, ops, dtype)


def kind_of(images: Any) -> Kind | None:
    """All that a plan and the checks of a call depend on; ``None`` for what is no plain tensor of a batch."""
    if type(images) is not Tensor or images.ndim != 4 or images.requires_grad:
        return None
    return images.shape, images.dtype, images.device
