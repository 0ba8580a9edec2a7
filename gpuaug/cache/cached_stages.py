"""``CachedStages``: the stages of a loader up to an encoder whose results a feature cache stores.

For each batch, ``take`` separates the rows that workers read from the images. If all rows were read, the stages are skipped.
Otherwise they run on the whole batch, ``finish`` records the missing rows and puts the others into the batch.
"""

import logging
import shutil
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from gpuaug.cache.dataset import view_folder, wrapped_datasets
from gpuaug.cache.feature_cache import FeatureCache
from gpuaug.cache.index import shard_numbers
from gpuaug.cache.key import difference, key_of, key_parts, keys_in, write_key
from gpuaug.cache.members import batch_of, columns_of, without, written_members
from gpuaug.cache.recorder import Recorder
from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.encoded import Rows
from gpuaug.core.errors import ArgumentError, GpuAugWarning
from gpuaug.core.packed_targets import unpack_targets
from gpuaug.core.rng import Position
from gpuaug.core.streams import Lane, Lanes
from gpuaug.stages.base import BoundStage, Stage
from gpuaug.stages.feature import FeatureStage

_log = logging.getLogger("gpuaug")


@dataclass(slots=True)
class Taken:
    """Rows of one batch, and the names of its members that hold images; ``None`` if the batch is the images."""

    rows: Rows
    image_names: list[Any] | None
    own: Any = None
    """(B,) index of the sample that is at each place: another one if an image could not be decoded."""

    @property
    def is_whole(self) -> bool:
        """Whether all rows of the batch were read."""
        return self.rows.encoded is None

    def with_order(self, batch: Batch) -> tuple[Batch, Any]:
        """Return the batch and the order of its samples, which changes with them if images cannot be decoded."""
        return batch, np.arange(len(self.rows.missing))

    def with_values(self, batch: tuple[Batch, Any]) -> tuple[Batch, Any]:
        """Return the batch to copy: the batch of ``with_order``, and the columns of the rows in its order."""
        batch, self.own = batch
        if (self.own != np.arange(len(self.own))).any():
            self.rows = self.rows.select(self.own)
        return batch, self.rows.columns


class CachedStages:
    """Stages up to a ``FeatureStage`` with ``cache=``.

    Args:
        stages: (``BoundStage``, ``Stage``) of these stages, in order.
        lanes: Lanes of the loader.
    """

    def __init__(self, stages: Sequence[tuple[BoundStage, Stage]], lanes: Lanes) -> None:
        self._stages = stages
        self._lanes = lanes
        encoder = stages[-1][1]
        assert isinstance(encoder, FeatureStage)
        self._cache: FeatureCache = encoder.cache
        self._recorder = Recorder(lanes.lane("cache"))
        self.read = 0
        """Number of rows that were read."""
        self.encoded = 0
        """Number of samples that were encoded because they had no row."""
        self._is_used = False
        self._view = Path()
        self._samples: int | None = None
        """Number of samples of the data set, until the size of the cache was estimated."""

    @property
    def encoder(self) -> BoundStage:
        """The stage whose results are stored, after the results of the stages before it."""
        return self._stages[-1][0]

    @property
    def count(self) -> int:
        """Number of stages that are skipped if all rows of a batch were read."""
        return len(self._stages)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Numbers of rows that were read, encoded, written, and dropped because too many batches were waiting."""
        return self.read, self.encoded, self._recorder.written, self._recorder.dropped

    def begin(self, loader: Any, position: Position, *, is_used: bool) -> None:
        """Begin an epoch: compute the key, and set the view that workers read.

        Args:
            loader: The wrapped loader.
            position: Position of the first batch.
            is_used: Whether to read and record rows. Otherwise, as for a measurement of single stages, all samples are encoded.

        Raises:
            ArgumentError: If the data set of ``loader`` is not wrapped.
            GpuAugError: If rows of the last epoch could not be written.
        """
        cache = self._cache
        datasets = [dataset for dataset in wrapped_datasets(loader) if dataset.folder == cache.folder]
        if not datasets:
            raise ArgumentError(
                f"The data set of a loader with a feature cache must be wrapped, got {type(loader).__name__} without it. "
                "Make the DataLoader of cache.wrap(dataset)."
            )
        self._recorder.close()
        self._is_used = is_used
        if not is_used:
            for dataset in datasets:
                dataset.view.set("0" * 16, -1, -1)
            return
        parts = key_parts(self._stages, position.seed, self._lanes.device)
        key = key_of(parts)
        if key != cache.key:
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
        view = position.epoch % cache.views
        self._view = view_folder(cache.folder, key, view)
        shards = shard_numbers(self._view)
        for dataset in datasets:
            dataset.view.set(key, view, shards[-1][0] if shards else -1)
            if not shards:
                with suppress(TypeError, NotImplementedError):  # an iterable data set need not have a length
                    self._samples = len(dataset)

    def take(self, batch: Batch) -> tuple[Batch, Taken | None]:
        """Separate a host batch into the batch with the encoded images that have to be decoded, and the rows, if they are used.

        Raises:
            ArgumentError: If the batch was not collated by ``collate_encoded`` from samples of ``FeatureCache.wrap``.
        """
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
        if not self._is_used:
            return rest, None
        taken = Taken(found[0], names)
        missing = int(np.count_nonzero(taken.rows.missing))
        self.encoded += missing
        self.read += len(taken.rows.missing) - missing
        return (without(rest, names) if taken.is_whole else rest), taken

    def finish(self, before: Batch, after: Batch, read: Sequence[Any], taken: Taken, columns: Any, lane: Lane) -> Batch:
        """Record the missing rows of a batch, and put the rows that were read into it. The lane of the encoder is current.

        Args:
            before: The batch on the device before the stages.
            after: The batch after the stages; ``before`` if they were skipped.
            read: Values that the stages have read.
            taken: Result of ``take``.
            columns: Columns of the rows, on the device.
            lane: Lane of the encoder, or of the copy if the stages were skipped.
        """
        rows = taken.rows
        if taken.is_whole:
            return batch_of(unpack_targets(before), None, columns, rows)
        stored = columns_of(written_members(before, after, frozenset(map(id, read))), len(rows.ids))
        result = after
        if columns:
            result = batch_of(unpack_targets(without(before, taken.image_names)), unpack_targets(after), columns, rows)
        self._record(taken, stored, lane)
        return result

    def _record(self, taken: Taken, stored: dict[str, list[Tensor]], lane: Lane) -> None:
        rows = taken.rows
        is_own = taken.own == np.arange(len(rows.ids))
        indices = np.flatnonzero(rows.missing & is_own).tolist()
        if not len(indices):
            return
        columns = {name: [parts[index] for index in indices] for name, parts in stored.items()}
        if self._samples is not None:
            row_bytes = sum(part.nbytes for parts in columns.values() for part in parts) // len(indices)
            needed = row_bytes * self._samples * self._cache.views
            free = shutil.disk_usage(self._cache.folder).free
            _log.log(
                logging.WARNING if needed > free else logging.INFO,
                "The feature cache in %s will take about %.3g GB. The disk has %.3g GB free.",
                *(self._cache.folder, needed / 1e9, free / 1e9),
            )
            self._samples = None
        all_names = rows.names.split("\0")
        names = [all_names[index] for index in indices]
        event = self._recorder.record(self._view, rows.ids[indices], names, columns, lane.record_event())
        lane.make_current()
        if event is not None:
            self._lanes.retire(columns, event)

    def end(self) -> None:
        """Write all rows of the epoch.

        Raises:
            GpuAugError: If rows could not be written.
        """
        self._recorder.close()
