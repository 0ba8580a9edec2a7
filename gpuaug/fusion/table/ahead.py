"""The rows of the batches that are expected next, made together.

The cost of drawing is the number of calls into NumPy, which is the same for one batch as for several. The seed of a call can be
predicted: within a stage it follows from the next batch's position, elsewhere from the next number of torch's generator. So
the rows of several batches are made at once, each for the call that will draw from its seed. Rows whose call does not come are
dropped.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpuaug.core.rng import following_seeds, next_seed, seeds_of_views
from gpuaug.core.streams import current_stream
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.ops.base import ANY_SIDES, Op, Size
from gpuaug.fusion.program.plan import Plan
from gpuaug.fusion.table.on_device import DeviceCropTables, device_crop
from gpuaug.fusion.table.on_host import HostTables, size_dependent_ops
from gpuaug.fusion.table.upcoming import UpcomingBatches

MOST_BATCHES = 64
"""Largest number of batches made at once. Beyond it, time is proportional to the count of numbers."""

MOST_SAMPLES = 8192
"""Largest number of samples made at once, over all batches and views. Drawing them takes 1 ms, a policy 2 to 4 ms."""

_MOST_BLOCKS = 4
"""Largest number of kept sets, for a pipeline that is called several times per batch, or by several loaders."""


class _Block(NamedTuple):
    planned: Plan
    key: tuple[Any, ...]
    tables: HostTables | DeviceCropTables
    order: dict[int, int]
    """Index of the batch of each seed."""
    next: int
    """The seed expected after those of the batches."""


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
        layout: Tensor | None = None,
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
            layout: ``Ragged.places`` of a ragged batch, on the device.
            points: Whether boxes or keypoints follow.
            views: Of each image.

        Cost:
            One call draws for many to come, and sends their rows. Where images differ in size, every call fits them to its own,
            by one launch or on the host; or it draws alone, where that cannot be. No synchronisation.
        """
        seed = next_seed()
        # Rows are on their way on the stream that was current, so a call on another one has to make its own.
        stream = current_stream(device.index if device.type == "cuda" else -1)
        # Windows have been drawn on the host, which then fits their crops, too.
        windows = layout is not None and layout.shape[1] == 4
        key = (size.batch, points, windows, device, stream, *(op.read_at_draw for op in planned.rereading))
        past = None
        for block in self._blocks:
            if block.planned is planned and block.key == key:
                if seed in block.order:
                    return block.tables.table(block.order[seed], size, layout)
                past = block if past is None and block.next == seed else past
        most = max(MOST_SAMPLES // max(views * size.batch, 1), 1)
        count = min(2 * len(past.order), MOST_BATCHES, most) if past is not None else 1
        *seeds, following = seed, *following_seeds(count)
        seeds_of_all = [one for call in seeds for one in seeds_of_views(call, views)]
        coming = UpcomingBatches(
            planned, ops, size.to(*ANY_SIDES) if size.ragged else size, seeds_of_all, views, device, points
        )
        tables: HostTables | DeviceCropTables
        if not size.ragged:
            tables = HostTables(coming)
        elif (crop := device_crop(planned)) is not None and dispatch.name(device) == "triton" and not windows:
            tables = DeviceCropTables(coming, crop)
        elif size_dependent := size_dependent_ops(planned, ops):
            tables = HostTables(coming, size_dependent)
        else:
            return HostTables(replace(coming, size=size, seeds=seeds_of_all[:views])).table(0, size)
        made = _Block(planned, key, tables, {own: index for index, own in enumerate(seeds)}, following)
        self._blocks = (made, *(block for block in self._blocks if block is not past))[:_MOST_BLOCKS]
        return tables.table(0, size, layout)
