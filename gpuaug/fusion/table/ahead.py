"""Prefetch of parameter tables: the tables of several upcoming batches are computed together.

A table has one row per sample, with the random parameters of all ops. Drawing for several batches takes as many NumPy calls as
drawing for one batch. All draws of a call follow from its seed, and the seeds of later calls can be predicted: in a stage of a
loader, from the position of the next batch; elsewhere, from the next number of torch's generator. So a call computes a *block*:
its table, and the tables of the calls that are expected next. If other calls come, these tables are discarded.

A *plan* is a list of passes, each one reading and writing of all images. *Ragged* images differ in size. *Views* are several
random augmentations of the same images.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpuaug.core.rng import following_seeds, next_seed, seeds_of_views
from gpuaug.core.streams import current_stream
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.ops.base import ANY_SIDES, Size
from gpuaug.fusion.program.plan import Plan
from gpuaug.fusion.table.on_device import DeviceCropTables, device_crop
from gpuaug.fusion.table.on_host import HostTables, size_dependent_ops
from gpuaug.fusion.table.rows import UpcomingBatches

MOST_BATCHES = 64
"""Maximum number of batches per block. With more batches, the time per batch falls no further."""

MOST_SAMPLES = 8192
"""Maximum number of samples per block, over all views. Their tables take 1 ms; with a RandAugment, 2 to 4 ms."""

_MOST_BLOCKS = 4
"""Maximum number of cached blocks. Several are needed if a pipeline is called twice per batch, or by several loaders."""


class _Block(NamedTuple):
    """Tables of several batches, computed together."""

    plan: Plan
    key: tuple[Any, ...]
    """Properties of a call on which its table depends, except the plan, the seed, and the number of views, which is fixed."""
    tables: HostTables | DeviceCropTables
    index_by_seed: dict[int, int]
    """Seed of a call → index of its batch in ``tables``."""
    next_seed: int
    """Predicted seed of the first call after these batches."""


class TablePrefetch:
    """Prefetched parameter tables of one pipeline.

    The first block has one batch. If the next call has the predicted seed, the next block has twice as many batches.
    """

    def __init__(self) -> None:
        # Replaced, never modified, so that two threads can call one pipeline. The newest block is first.
        self._blocks: tuple[_Block, ...] = ()

    def tables(
        self,
        plan: Plan,
        size: Size,
        device: torch.device,
        image_layouts: Tensor | None = None,
        *,
        has_points: bool,
        views: int = 1,
        seed: int | None = None,
    ) -> tuple[HostTables | DeviceCropTables, int]:
        """Return parameter tables of several batches (``rows.py``), and the index in them of the batch of the current call.

        The draws equal those without prefetching, bit for bit. The last digits of matrices may differ.

        Args:
            plan: Plan that reads the tables. Its ``draws_one_batch_at_a_time`` must be false.
            size: Size of the batch.
            device: Device of the tables.
            image_layouts: ``Ragged.places`` of a ragged batch, on the device: offset, height and width of each image, (B, 3);
                with a row pitch, (B, 4), if only a window of each image was decoded.
            has_points: Whether there are boxes or keypoints.
            views: Number V of views per image.
            seed: Seed of the call. Default: ``next_seed()``.

        Cost:
            One call draws for many later calls, and copies their tables to the device. If images differ in size, every call
            completes its table with the sizes of its images, in one launch or on the host; if neither is possible, every call
            computes only its own table. No synchronization.
        """
        seed = next_seed() if seed is None else seed
        # If only windows were decoded, the host has already drawn the crops, to choose the windows. So it also computes their
        # columns.
        has_windows = image_layouts is not None and image_layouts.shape[1] == 4
        # Tables are copied on the current stream of the call that computes them. Only calls on this stream may read them.
        stream = current_stream(device.index if device.type == "cuda" else -1)
        key = (size.batch, has_points, has_windows, device, stream, *(op.settings_of_draw for op in plan.ops))
        preceding_block = None  # block after whose last batch a call with this seed was expected
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
            # Only the table of this call, computed from the sizes of its images. It is not cached.
            return HostTables(replace(upcoming, size=size, seeds=view_seeds[:views])), 0
        new_block = _Block(plan, key, tables, {call_seed: index for index, call_seed in enumerate(seeds)}, following_seed)
        self._blocks = (new_block, *(block for block in self._blocks if block is not preceding_block))[:_MOST_BLOCKS]
        return tables, 0
