"""The rows of the batches that are expected next, made together.

The cost of drawing is the number of calls into NumPy, which is the same for one batch as for several. The seed of a call can be
predicted: within a stage it follows from the next batch's position, elsewhere from the next number of torch's generator. So
the rows of several batches are made at once, each for the call that will draw from its seed. Rows whose call does not come are
dropped.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpuaug.core.rng import following_seeds, next_seed, seeds_of_views
from gpuaug.core.streams import current_stream
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.ops.base import Op, OpDraws, Size
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.program.plan import Plan
from gpuaug.fusion.table.on_device import DeviceCropTables, device_crop
from gpuaug.fusion.table.partial import PartialTables, size_dependent_ops
from gpuaug.fusion.table.rows import make_table
from gpuaug.fusion.table.upcoming import UpcomingBatches

MOST_BATCHES = 64
"""Largest number of batches made at once. Beyond it, time is proportional to the count of numbers."""

MOST_SAMPLES = 8192
"""Largest number of samples made at once, over all batches and views. Drawing them takes 1 ms, a RandAugment 2 to 3 ms."""

_MOST_BLOCKS = 4
"""Largest number of kept sets, for a pipeline that is called several times per batch, or by several loaders."""


class _Block(NamedTuple):
    planned: Plan
    kind: tuple[Any, ...]
    rows: Sequence[Tensor] | DeviceCropTables | PartialTables
    order: dict[int, int]
    """Index of the batch of each seed."""
    next: int
    """The seed expected after those of the batches."""

    def table(self, seed: int, size: Size, places: Tensor | None) -> Tensor:
        """The rows of one batch."""
        rows, index = self.rows, self.order[seed]
        if isinstance(rows, PartialTables):
            return rows.table(index, size)
        if isinstance(rows, DeviceCropTables):
            assert places is not None
            return rows.table(index, places)
        return rows[index]


class TablePrefetch:
    """Rows made ahead for one pipeline, for as many batches as its calls have shown to be foreseeable."""

    def __init__(self) -> None:
        # Replaced whole, so that two threads may draw from one pipeline.
        self._blocks: tuple[_Block, ...] = ()

    def table(
        self,
        planned: Plan,
        ops: Sequence[Op],
        size: Size,
        device: torch.device,
        places: Tensor | None = None,
        *,
        points: bool,
        views: int = 1,
    ) -> Tensor:
        """The rows for a call that is being made now, as ``gpuaug.fusion.table.rows.make_table`` gives them.

        What is drawn is what a call by itself would draw, bit for bit; of matrices, the last digits may differ.

        Args:
            planned: What reads the rows.
            ops: All of the plan's.
            size: Of the batch.
            device: Where the rows go.
            places: Where a ragged batch has its images, (B, 3) int64 on the device.
            points: Whether boxes or keypoints follow.
            views: Of each image.

        Cost:
            One call draws for many to come, and sends their rows. Where images differ in size, every call fits them to its own,
            by one launch or on the host; or it draws alone, where that cannot be. No synchronisation.
        """
        seed = next_seed()
        # Rows are on their way on the stream that was current, so a call on another one has to make its own.
        kind = (size.batch, points, device, current_stream(device.index if device.type == "cuda" else -1))
        past = None
        for block in self._blocks:
            if block.planned is planned and block.kind == kind:
                if seed in block.order:
                    return block.table(seed, size, places)
                past = block if past is None and block.next == seed else past
        most = max(MOST_SAMPLES // max(views * size.batch, 1), 1)
        count = min(2 * len(past.order), MOST_BATCHES, most) if past is not None else 1
        *seeds, following = seed, *following_seeds(count)
        each = [one for call in seeds for one in seeds_of_views(call, views)]
        rows: Sequence[Tensor] | DeviceCropTables | PartialTables
        if not size.ragged:
            table = draw_tables(planned, ops, size, each, device, points=points)
            rows = table.view(count, views * size.batch, table.shape[2]).unbind()
        else:
            upcoming = UpcomingBatches(planned, ops, size.batch, size.channels, each, views, device, points)
            if (crop := device_crop(planned)) is not None and dispatch.name(device) == "triton":
                rows = DeviceCropTables(upcoming, crop)
            elif size_dependent := size_dependent_ops(planned, ops):
                rows = PartialTables(upcoming, size_dependent)
            else:
                return draw_tables(planned, ops, size, each[:views], device, points=points).flatten(0, 1)
        made = _Block(planned, kind, rows, {each: index for index, each in enumerate(seeds)}, following)
        self._blocks = (made, *(block for block in self._blocks if block is not past))[:_MOST_BLOCKS]
        return made.table(seed, size, places)


def draw_tables(
    planned: Plan, ops: Sequence[Op], size: Size, seeds: Sequence[int], device: torch.device, *, points: bool
) -> Tensor:
    """Draw for one batch per seed, and make their rows, (batches, B, K)."""
    sampler = Sampler(seeds, size.batch, planned.numbers)
    at = whole = size.times(len(seeds))
    drawn: dict[Op, OpDraws] = {}
    for op in ops:
        own = op.draw(sampler, at)
        drawn |= op.of_parts(own)
        at = op.out_drawn(own, at)
    table = make_table(planned, whole, drawn, device, points=points)
    return table.view(len(seeds), size.batch, table.shape[1])
