"""Prefetch of parameter tables: the tables of several upcoming batches are computed together.

A table has one row per sample, with the random parameters of all ops. To draw for several batches takes as many NumPy calls as
to draw for one batch. The seed of a later call can be predicted: in a stage of a loader, the seed follows from the position of
the next batch; elsewhere, from the next number of torch's generator. So the tables of several batches are computed at once,
each for the seed of one call. Tables for predicted calls that do not come are discarded.

A *plan* has the passes of a pipeline, each one reading and one writing of all images. *Ragged* images differ in size. *Views*
are several random augmentations of the same images.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpuaug.core.rng import following_seeds, next_seed, seeds_of_views
from gpuaug.core.streams import current_stream
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.ops.base import ANY_SIDES, Op, OpDraws, Size
from gpuaug.fusion.program.plan import Plan
from gpuaug.fusion.table.on_device import DeviceCropTables, device_crop
from gpuaug.fusion.table.on_host import HostTables, size_dependent_ops
from gpuaug.fusion.table.rows import UpcomingBatches

MOST_BATCHES = 64
"""Maximum number of batches whose tables are computed at once. With more batches, the time per batch falls no further."""

MOST_SAMPLES = 8192
"""Maximum number of samples whose tables are computed at once, over all views. This takes 1 ms; 2 to 4 with a RandAugment."""

_MOST_BLOCKS = 4
"""Maximum number of cached ``_Block``. Several are needed if a pipeline is called twice per batch, or by several loaders."""


class _Block(NamedTuple):
    """Tables of several batches, computed together."""

    plan: Plan
    key: tuple[Any, ...]
    """Properties of a call on which its table depends, except plan and seed.

    Without the number of views, which is the same for all calls of a pipeline.
    """
    tables: HostTables | DeviceCropTables
    index_by_seed: dict[int, int]
    """Index of the batch, by seed of its call."""
    next_seed: int
    """Predicted seed of the first call after these batches."""


class TablePrefetch:
    """Prefetched parameter tables of one pipeline. The number of batches per block doubles while seeds are as predicted."""

    def __init__(self) -> None:
        # A new tuple replaces the old one, which is never modified, so that two threads can draw from one pipeline.
        self._blocks: tuple[_Block, ...] = ()

    def table(
        self,
        plan: Plan,
        size: Size,
        device: torch.device,
        image_layouts: Tensor | None = None,
        *,
        has_points: bool,
        views: int = 1,
        seed: int | None = None,
    ) -> Tensor:
        """Return the parameter table of the current call, as ``gpuaug.fusion.table.rows.make_table`` computes it.

        The draws equal the draws of a call without prefetching, bit for bit. The last digits of matrices may differ.

        Args:
            plan: Plan that reads the table, without ``draws_one_batch_at_a_time``.
            size: Size of the batch.
            device: Device of the table.
            image_layouts: ``Ragged.places`` of a ragged batch, on the device: offset and size of each image, (B, 3), or
                (B, 4) if only a window of each image was decoded.
            has_points: Whether there are boxes or keypoints.
            views: Number of views per image.
            seed: Seed of the call. Default: ``next_seed()``.

        Cost:
            One call draws for many later calls, and copies their tables to the device. If images differ in size, every call
            completes its table with the sizes of its images, in one launch or on the host; if neither is possible, every call
            draws for itself only. No synchronization.
        """
        seed = next_seed() if seed is None else seed
        # If only windows were decoded, the host has drawn the crops to choose them, so the device does not compute the crops.
        has_windows = image_layouts is not None and image_layouts.shape[1] == 4
        tables, index = self._tables(plan, size, device, seed, has_points, has_windows, views)
        return tables.table(index, size, image_layouts)

    def draws(
        self,
        first_ops: Sequence[Op],
        plan: Plan,
        size: Size,
        device: torch.device,
        seed: int,
        has_points: bool,
    ) -> tuple[OpDraws, ...]:
        """Return the draws of the first ops of a plan, which combine images before the passes. All images have one size.

        See ``table`` for the other arguments.
        """
        tables, index = self._tables(plan, size, device, seed, has_points)
        assert isinstance(tables, HostTables)
        return tables.draws(index, first_ops)

    def _tables(
        self,
        plan: Plan,
        size: Size,
        device: torch.device,
        seed: int,
        has_points: bool,
        has_windows: bool = False,
        views: int = 1,
    ) -> tuple[HostTables | DeviceCropTables, int]:
        """Return tables of several batches, and the index of the batch of the call with ``seed``."""
        # Copies of tables are queued on the stream of the call that drew, so the stream is part of the key.
        stream = current_stream(device.index if device.type == "cuda" else -1)
        key = (size.batch, has_points, has_windows, device, stream, *(op.settings_of_draw for op in plan.ops))
        preceding_block = None  # block that has predicted the seed of this call, as the first call after its batches
        for block in self._blocks:
            if block.plan is plan and block.key == key:
                if seed in block.index_by_seed:
                    return block.tables, block.index_by_seed[seed]
                if preceding_block is None and block.next_seed == seed:
                    preceding_block = block
        most_batches = max(MOST_SAMPLES // max(views * size.batch, 1), 1)
        batches = min(2 * len(preceding_block.index_by_seed), MOST_BATCHES, most_batches) if preceding_block is not None else 1
        # ``seeds`` are the seeds of ``batches`` calls, the current call first.
        *seeds, following_seed = seed, *following_seeds(batches)
        view_seeds = [view_seed for call_seed in seeds for view_seed in seeds_of_views(call_seed, views)]
        upcoming = UpcomingBatches(plan, size.to(*ANY_SIDES) if size.ragged else size, view_seeds, views, device, has_points)
        tables: HostTables | DeviceCropTables
        if not size.ragged:
            tables = HostTables(upcoming)
        elif (crop := device_crop(plan)) is not None and dispatch.backend_name(device) == "triton" and not has_windows:
            tables = DeviceCropTables(upcoming, crop)
        elif size_dependent := size_dependent_ops(plan):
            tables = HostTables(upcoming, size_dependent)
        else:
            # The table of this call only, with the sizes of its images. It is not cached.
            return HostTables(replace(upcoming, size=size, seeds=view_seeds[:views])), 0
        new_block = _Block(plan, key, tables, {call_seed: index for index, call_seed in enumerate(seeds)}, following_seed)
        self._blocks = (new_block, *(block for block in self._blocks if block is not preceding_block))[:_MOST_BLOCKS]
        return tables, 0
