"""Prefetch of parameter tables: the tables of several upcoming batches are computed together.

The cost of drawing is the number of NumPy calls, which is equal for one batch and for several. The seed of a call can be
predicted: in a stage it follows from the position of the next batch, elsewhere from the next number of torch's generator. So
the tables of several batches are computed at once, each for the call with its seed. Tables whose call does not come are
discarded.
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
"""Maximum number of batches computed at once. For more, the time is proportional to the number of values."""

MOST_SAMPLES = 8192
"""Maximum number of samples computed at once, over all batches and views. Drawing them takes 1 ms, for a policy 2 to 4 ms."""

_MOST_BLOCKS = 4
"""Maximum number of cached blocks, for a pipeline that is called several times per batch, or by several loaders."""


class _Block(NamedTuple):
    """Tables of several batches."""

    planned: Plan
    key: tuple[Any, ...]
    tables: HostTables | DeviceCropTables
    order: dict[int, int]
    """Index of the batch, by seed of its call."""
    next: int
    """Predicted seed of the call after the last batch."""


class TablePrefetch:
    """Prefetched parameter tables of one pipeline. The number of batches doubles while seeds are predicted correctly."""

    def __init__(self) -> None:
        # A tuple that is replaced as a whole, so that two threads can draw from one pipeline.
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
        """Return the parameter table of the current call, as ``gpuaug.fusion.table.rows.make_table`` computes it.

        The draws equal the draws of a call without prefetching, bit for bit. The last digits of matrices may differ.

        Args:
            planned: Plan that reads the table.
            ops: All ops of the plan.
            size: Size of the batch.
            device: Device of the table.
            layout: ``Ragged.places`` of a ragged batch, on the device.
            points: Whether there are boxes or keypoints.
            views: Number of views per image.

        Cost:
            One call draws for many later calls, and sends their tables. If images differ in size, every call adapts its table
            to their sizes, in one launch or on the host; if neither is possible, every call draws alone. No synchronization.
        """
        seed = next_seed()
        # Copies of tables are queued on the stream of the call that drew, so the stream is part of the key.
        stream = current_stream(device.index if device.type == "cuda" else -1)
        # The windows were drawn on the host, so the host computes the crops, too.
        windows = layout is not None and layout.shape[1] == 4
        key = (size.batch, points, windows, device, stream, *(op.settings_of_draw for op in planned.rereading))
        last_block = None
        for block in self._blocks:
            if block.planned is planned and block.key == key:
                if seed in block.order:
                    return block.tables.table(block.order[seed], size, layout)
                last_block = block if last_block is None and block.next == seed else last_block
        limit = max(MOST_SAMPLES // max(views * size.batch, 1), 1)
        count = min(2 * len(last_block.order), MOST_BATCHES, limit) if last_block is not None else 1
        *seeds, following = seed, *following_seeds(count)
        seeds_of_all = [view_seed for call_seed in seeds for view_seed in seeds_of_views(call_seed, views)]
        upcoming = UpcomingBatches(
            planned, ops, size.to(*ANY_SIDES) if size.ragged else size, seeds_of_all, views, device, points
        )
        tables: HostTables | DeviceCropTables
        if not size.ragged:
            tables = HostTables(upcoming)
        elif (crop := device_crop(planned)) is not None and dispatch.name(device) == "triton" and not windows:
            tables = DeviceCropTables(upcoming, crop)
        elif size_dependent := size_dependent_ops(planned, ops):
            tables = HostTables(upcoming, size_dependent)
        else:
            return HostTables(replace(upcoming, size=size, seeds=seeds_of_all[:views])).table(0, size)
        new_block = _Block(planned, key, tables, {call_seed: index for index, call_seed in enumerate(seeds)}, following)
        self._blocks = (new_block, *(block for block in self._blocks if block is not last_block))[:_MOST_BLOCKS]
        return tables.table(0, size, layout)
