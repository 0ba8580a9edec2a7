"""Batches that are expected next, whose rows are made together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from gpuaug.fusion.ops.base import ANY_SIDES, Array, Op, Size
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.program.plan import Plan

Rows = TypeVar("Rows", Tensor, Array)


@dataclass(frozen=True, slots=True)
class UpcomingBatches:
    """The next ragged batches, whose images have sizes not known yet."""

    planned: Plan
    """What reads the rows."""
    ops: Sequence[Op]
    """All of the plan's."""
    each: int
    """How many images a batch has."""
    channels: int
    seeds: Sequence[int]
    """One for each view of each batch."""
    views: int
    device: torch.device
    """Where the rows go."""
    points: bool
    """Whether boxes or keypoints follow."""

    @property
    def size(self) -> Size:
        """The size of all samples of all batches, with placeholder sides."""
        return Size(len(self.seeds) * self.each, self.channels, *ANY_SIDES)

    def sampler(self) -> Sampler:
        """The sampler of all batches."""
        return Sampler(self.seeds, self.each, self.planned.numbers)

    def by_batch(self, rows: Rows) -> Rows:
        """Rows of all samples, (batches · V · B, K), as (batches, V · B, K)."""
        return rows.reshape(len(self.seeds) // self.views, self.views * self.each, rows.shape[1])
