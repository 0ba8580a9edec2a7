"""``CachedStages``: the stages of a loader up to an encoder whose results a feature cache stores.

For each batch, ``CachedEpoch.take`` separates the rows that workers read from the images. If all rows were read, the stages are
skipped. Otherwise they run on the whole batch, ``Taken.finish`` records the missing rows and puts the others into the batch.
"""

import logging
import shutil
import warnings
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from gpuaug.cache.dataset import ViewToRead, view_folder, wrapped_datasets
from gpuaug.cache.feature_cache import FeatureCache
from gpuaug.cache.index import shard_numbers
from gpuaug.cache.key import difference, key_of, key_parts, keys_in, write_key
from gpuaug.cache.members import MemberLeaves, batch_of, columns_of, member_leaves, without, written_members
from gpuaug.cache.recorder import Recorder
from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.encoded import Rows
from gpuaug.core.errors import ArgumentError, GpuAugWarning, IteratorEndedError
from gpuaug.core.packed_targets import unpack_targets
from gpuaug.core.rng import Position
from gpuaug.core.streams import Lane, Lanes
from gpuaug.decode.stage import DecodeStage
from gpuaug.stages.base import BoundStage, Stage
from gpuaug.stages.feature import FeatureStage

_log = logging.getLogger("gpuaug")


@dataclass(slots=True)
class BatchAndRows:
    """A batch, and what is decoded or copied with it: the order of its samples, or columns of its rows.

    Not a tuple: a tuple of two mappings could be taken for target dicts.
    """

    batch: Batch
    rows: Any


class CachedStages:
    """Stages up to a ``FeatureStage`` with ``cache=``.

    Args:
        stages: These stages, in order. A schedule before the encoder stands for its stage in the epoch.
        lanes: Lanes of the loader.
    """

    def __init__(self, stages: Sequence[Stage], lanes: Lanes) -> None:
        self.count = len(stages)
        """Number of these stages."""
        self.lanes = lanes
        encoder = stages[-1]
        assert isinstance(encoder, FeatureStage)
        self.cache: FeatureCache = encoder.cache
        self.recorder = Recorder(lanes.lane("cache"))
        self.read = 0
        """Number of rows that were read."""
        self.encoded = 0
        """Number of samples that were encoded because they had no row."""

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Numbers of rows that were read, encoded, written, and dropped because too many batches were waiting."""
        return self.read, self.encoded, self.recorder.written, self.recorder.dropped

    def begin(
        self, loader: Any, position: Position, stages: Sequence[tuple[BoundStage, Stage]], *, is_used: bool
    ) -> "CachedEpoch":
        """Begin an epoch: compute the key, and set the view that workers read.

        Args:
            loader: The wrapped loader.
            position: Position of the first batch.
            stages: (``BoundStage``, ``Stage``) of all stages that run in the epoch, in order.
            is_used: Whether to read and record rows. Otherwise, as for a measurement of single stages, all samples are encoded.

        Raises:
            ArgumentError: If the data set of ``loader`` is not wrapped.
            GpuAugError: If rows of the last epoch could not be written.
        """
        cache = self.cache
        datasets = [dataset for dataset in wrapped_datasets(loader) if dataset.folder == cache.folder]
        if not datasets:
            raise ArgumentError(
                f"The data set of a loader with a feature cache must be wrapped, got {type(loader).__name__} without it. "
                "Make the DataLoader of cache.wrap(dataset)."
            )
        self.recorder.close()
        key = "0" * 16
        view = newest = -1
        folder = samples = None
        if is_used:
            key = self._key(stages[: self.count], position)
            view = position.epoch % cache.views
            folder = view_folder(cache.folder, key, view)
            shards = shard_numbers(folder)
            newest = shards[-1][0] if shards else -1
            with suppress(TypeError, NotImplementedError):  # an iterable data set may have a __len__ that cannot be called
                samples = None if shards else sum(map(len, datasets))
        for dataset in datasets:
            dataset.view.set(key, view, newest)
        views = [(dataset.view, dataset.view.version) for dataset in datasets]
        is_named = all(dataset._key is not None for dataset in datasets)
        behind = [bound for bound, _ in stages[self.count :]]
        return CachedEpoch(self, position.epoch, folder, views, samples, stages[: self.count], behind, is_named)

    def _key(self, stages: Sequence[tuple[BoundStage, Stage]], position: Position) -> str:
        """Return the key of the stages, and warn if the cache has rows of other keys only."""
        cache = self.cache
        parts = key_parts(stages, position.seed, self.lanes.device)
        key = key_of(parts)
        if key == cache.key:
            return key
        others = keys_in(cache.folder)
        write_key(cache.folder / key, parts)
        cache.key = key
        if others and key not in others:
            newest = next(reversed(others))
            warnings.warn(
                f"The feature cache in {cache.folder} begins anew, because its rows were made with other "
                f"{difference(parts, others[newest])}. Delete the folder {newest} if these rows are not needed.",
                GpuAugWarning,
                stacklevel=2,
            )
        return key


@dataclass(slots=True)
class CachedEpoch:
    """Cached stages in one iterator."""

    cached: CachedStages
    epoch: int
    view: Path | None
    """Folder of the view that is read and recorded; ``None`` if rows are neither read nor recorded."""
    views: list[tuple[ViewToRead, int]]
    """(view that the workers of a data set read, its version when the iterator began) of each data set."""
    samples: int | None
    """Number of samples of the data set, until the size of the cache was estimated."""
    stages: Sequence[tuple[BoundStage, Stage]]
    """(``BoundStage``, ``Stage``) of the cached stages, in order."""
    behind: Sequence[BoundStage]
    """Stages that run in all epochs."""
    is_named: bool
    """Whether the user names each sample. Otherwise rows are found by their images."""
    is_checked: bool = False
    """Whether the members that stages read have been checked."""

    @property
    def encoder(self) -> BoundStage:
        """The stage whose results are stored, after the results of the stages before it."""
        return self.stages[-1][0]

    @property
    def count(self) -> int:
        """Number of stages that are skipped if all rows of a batch were read."""
        return len(self.stages)

    def take(self, batch: Batch) -> "tuple[Batch, Taken | None]":
        """Separate a host batch into the batch with the encoded images that have to be decoded, and the rows, if they are used.

        Raises:
            ArgumentError: If the batch was not collated by ``collate_encoded`` from samples of ``FeatureCache.wrap``.
            IteratorEndedError: If workers read another view, which a newer iterator has set.
        """
        if any(view.version != version for view, version in self.views):
            raise IteratorEndedError(
                "This iterator cannot continue, because a newer one reads other rows through the same wrapped data set. Call "
                "cache.wrap(dataset) once for each loader, and end an epoch before the next one begins."
            )
        names = None
        if isinstance(batch, Rows):
            found = [batch]
            rest = batch.encoded
        else:
            names = batches.member_names(batch) if batches.is_container(batch) else []
            names = [name for name in names if isinstance(batches.member(batch, name), Rows)]
            found = [batches.member(batch, name) for name in names]
            rest = batches.replace(batch, {name: batches.member(batch, name).encoded for name in names}) if names else batch
        if not found:
            raise ArgumentError(
                "Batches of a loader with a feature cache must have an image as a member, got a batch without. Pass "
                "collate_fn=gpuaug.collate_encoded to the DataLoader, and return images as members of the samples."
            )
        if self.view is None:
            return rest, None
        taken = Taken(self, found[0], names)
        missing = int(np.count_nonzero(taken.rows.headers.missing))
        self.cached.encoded += missing
        self.cached.read += len(taken.rows.headers.missing) - missing
        return (without(rest, names) if taken.is_whole else rest), taken

    def check_reads(self, before: Batch, written: Collection[str], image_names: Sequence[Any]) -> None:
        """Check that the stages read what determines the row, and that the stages behind find what they read.

        Args:
            before: A batch before the stages.
            written: Names of the members that are stored.
            image_names: Names of the members that held encoded images.

        Raises:
            ArgumentError: If a stage reads another member.
        """
        if self.is_checked:
            return
        self.is_checked = True
        members = batches.member_names(before)
        others = {name for name in members if name not in image_names and str(name) not in written}
        for bound, stage in self.stages:
            names = members if bound.selection.on is None else bound.selection.names(before)
            read = [name for name in names if name in others]
            if read and not self.is_named and not isinstance(stage, DecodeStage):
                raise ArgumentError(
                    f"Stages before the cache must read images only, or members that they write, got {read} in stage "
                    f"{bound.name!r}. Rows are found by their images: name each sample with cache.wrap(dataset, key=…), pass "
                    "on= the members that the stage needs, or put it behind the encoder."
                )
        absent = {name for name in image_names if str(name) not in written}
        for bound in self.behind:
            read = [name for name in bound.selection.names(before) if name in absent]
            if read:
                raise ArgumentError(
                    f"Stages behind the cache must not read images, which are absent when rows are read, got {read} in stage "
                    f"{bound.name!r}. Put the stage before the encoder, and pass into= another member there."
                )
            into = bound.selection.into
            absent -= set(into if isinstance(into, tuple) else [into])

    def end(self, *, is_complete: bool) -> None:
        """Write all rows of the epoch.

        Args:
            is_complete: Whether all batches were handed over. Otherwise, as after ``break``, nobody may see an error that is
                raised now: the next epoch raises it.

        Raises:
            GpuAugError: If rows could not be written.
        """
        self.cached.recorder.close(raises=is_complete)


@dataclass(slots=True)
class Taken:
    """Rows of one batch, and the names of its members that hold images; ``None`` if the batch is the images."""

    epoch: CachedEpoch
    rows: Rows
    image_names: list[Any] | None
    own: Any = None
    """(B,) index of the sample that is at each place: another one if an image could not be decoded."""
    before: Batch = None
    """The batch on the device before the stages."""
    leaves: dict[Any, MemberLeaves] = field(default_factory=dict)
    """Name of a member → its leaves before the stages."""
    columns: Any = None
    """Columns of ``rows`` on the device."""

    @property
    def is_whole(self) -> bool:
        """Whether all rows of the batch were read."""
        return self.rows.encoded is None

    @property
    def encoder(self) -> BoundStage:
        """The stage after which ``finish`` is called if the stages run."""
        return self.epoch.encoder

    def with_order(self, batch: Batch) -> BatchAndRows:
        """Return the batch and the order of its samples, which changes with them if images cannot be decoded."""
        return BatchAndRows(batch, np.arange(len(self.rows.headers.missing)))

    def with_columns(self, batch: BatchAndRows) -> BatchAndRows:
        """Return the batch to copy: the batch of ``with_order``, and the columns of the rows in its order."""
        self.own = batch.rows
        if (self.own != np.arange(len(self.own))).any():
            self.rows = self.rows.select(self.own)
        return BatchAndRows(batch.batch, self.rows.columns)

    def begin(self, copied: BatchAndRows) -> Batch:
        """Return the batch on the device before the stages; if all rows were read, the batch after the stages to skip."""
        self.before, self.columns = copied.batch, copied.rows
        if self.is_whole:
            return batch_of(unpack_targets(self.before), None, self.columns, self.rows)
        self.leaves = member_leaves(self.before)
        return self.before

    def finish(self, after: Batch, read: list[Any], lane: Lane) -> Batch:
        """Record the missing rows of a batch, and put the rows that were read into it. The lane of the encoder is current.

        Args:
            after: The batch after the stages, without pending removals of boxes.
            read: Values that the stages have read. The tensors that this method reads are appended.
            lane: Lane of the encoder.
        """
        written = written_members(self.leaves, after, self.image_names, frozenset(map(id, read)))
        if self.image_names is not None:
            self.epoch.check_reads(self.before, written.keys(), self.image_names)
        stored = columns_of(written, len(self.rows.headers.row_ids))
        result = after
        if self.columns:
            read.append((self.columns, after))
            result = batch_of(
                unpack_targets(without(self.before, self.image_names)), unpack_targets(after), self.columns, self.rows
            )
        self._record(stored, lane)
        return result

    def _record(self, stored: dict[str, list[Tensor]], lane: Lane) -> None:
        rows = self.rows.headers
        epoch = self.epoch
        is_own = self.own == np.arange(len(rows.row_ids))
        indices = np.flatnonzero(rows.missing & is_own).tolist()
        if not len(indices):
            return
        columns = {name: [parts[index] for index in indices] for name, parts in stored.items()}
        cache = epoch.cached.cache
        if epoch.samples is not None:
            row_bytes = sum(part.nbytes for parts in columns.values() for part in parts) // len(indices)
            needed = row_bytes * epoch.samples * cache.views
            free = shutil.disk_usage(cache.folder).free
            _log.log(
                logging.WARNING if needed > free else logging.INFO,
                "The feature cache in %s will take about %.3g GB. The disk has %.3g GB free.",
                *(cache.folder, needed / 1e9, free / 1e9),
            )
            epoch.samples = None
        names = [rows.names[index] for index in indices]
        assert epoch.view is not None
        epoch.cached.recorder.record(epoch.view, epoch.epoch, rows.row_ids[indices], names, columns, lane)
