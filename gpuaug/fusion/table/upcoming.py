"""Upcoming batches, whose parameter tables are computed together. Views are several random augmentations of the same images."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from gpuaug.fusion.ops.base import ANY_SIDES, Array, Op, Size
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.program.plan import Plan

Rows = TypeVar("Rows", Tensor, Array)


@dataclass(frozen=True, slots=True)
class UpcomingBatches:
    """Upcoming batches of one pipeline."""

    plan: Plan
    """Plan that reads the tables."""
    ops: Sequence[Op]
    """All ops of the plan."""
    size: Size
    """Size of one batch, with ``ANY_SIDES`` as placeholder for the sizes of ragged images, which are not known yet."""
    seeds: Sequence[int]
    """Seed of each view, (batches · V,): all views of the first batch, then of the second, and so on."""
    views: int
    """Number V of views per image."""
    device: torch.device
    """Device of the tables."""
    has_points: bool
    """Whether there are boxes or keypoints."""

    @property
    def total_size(self) -> Size:
        """Size of the samples of all batches and views, as one batch."""
        if self.size.height is ANY_SIDES[0]:
            return replace(self.size, batch=len(self.seeds) * self.size.batch)
        return self.size.repeat(len(self.seeds))

    def sampler(self) -> Sampler:
        """Return the sampler of all batches."""
        batches = len(self.seeds) // self.views
        return Sampler(self.seeds, self.size.batch, self.plan.uniform_count, [*range(self.views)] * batches)

    def by_batch(self, rows: Rows) -> Rows:
        """Reshape a table of all samples, (batches · V · B, K), to (batches, V · B, K)."""
        return rows.reshape(len(self.seeds) // self.views, self.views * self.size.batch, rows.shape[1])
