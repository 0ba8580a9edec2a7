"""``CachedStages``: the stages of a loader up to and including an encoder whose results a feature cache stores.

A *row* is the results of these stages for one sample, and a *column* a part of it, such as ``latents``. A *view* is the rows
that were recorded in one epoch. A *member* of a batch is the value of a key of a dict, an item of a tuple, or a field. The
*key* of a cache is a hash of named values, its *parts*, on which all rows depend.

Workers read rows from the cache. ``collate_encoded`` puts the rows of a batch, and its encoded images if a row is missing, into
one member, a ``Rows``. For each batch, ``CachedEpoch.take`` separates rows and images. If all rows were read, they become
members of the batch, and the stages are skipped. Otherwise the stages run on the images of the whole batch. Then
``CachedBatch.finish`` records the missing rows, and replaces the results of the stages by the rows that were read.
"""

import logging
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.cache.dataset import ViewToRead, view_folder, wrapped_datasets
from gpuaug.cache.feature_cache import FeatureCache
from gpuaug.cache.index import last_shard_number
from gpuaug.cache.inputs import inputs_of_rows
from gpuaug.cache.key import difference, key_of, key_parts, keys_in, write_key
from gpuaug.cache.members import MemberLeaves, batch_of, columns_of, member_leaves, without, written_members
from gpuaug.cache.recorder import Recorder
from gpuaug.cache.shards import RowBlock, required_safetensors
from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch, members_of_type
from gpuaug.core.encoded import Encoded, EncodedClips, Rows, has_varying_shape
from gpuaug.core.errors import ArgumentError, IteratorEndedError, shown, warn
from gpuaug.core.packed_targets import unpack_targets
from gpuaug.core.rng import Position
from gpuaug.core.streams import Lane, Lanes
from gpuaug.decode.members import map_instances
from gpuaug.decode.stage import BoundDecode
from gpuaug.stages.base import BoundStage, Stage
from gpuaug.stages.feature import FeatureStage

_log = logging.getLogger("gpuaug")


class CachedStages:
    """Stages of a loader up to and including a ``FeatureStage`` with ``cache=``.

    Args:
        stages: The stages, in order. A schedule counts as one stage: the stage that it selects for the epoch.
        lanes: Lanes of the loader.
    """

    def __init__(self, stages: Sequence[Stage], lanes: Lanes) -> None:
        self.count = len(stages)
        """Number of cached stages."""
        self.lanes = lanes
        encoder = stages[-1]
        assert isinstance(encoder, FeatureStage)
        self.cache: FeatureCache = encoder.cache
        self.recorder = Recorder(lanes.lane("cache"))
        self.rows_read = 0
        """Number of rows that were read."""
        self.samples_encoded = 0
        """Number of samples that were encoded because they had no row."""

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Numbers of rows that were read; encoded; written; and not recorded, because too many rows were waiting."""
        return self.rows_read, self.samples_encoded, self.recorder.written, self.recorder.dropped

    def begin(
        self, loader: Any, position: Position, stages: Sequence[tuple[BoundStage, Stage]], *, is_used: bool
    ) -> "CachedEpoch":
        """Begin an epoch: compute the key, and tell workers which view to read.

        Args:
            loader: The wrapped loader.
            position: Seed, epoch, rank and index of the first batch.
            stages: (``BoundStage``, ``Stage``) of all stages that run in the epoch, in order.
            is_used: Whether to read and record rows. If not, as for a measurement of single stages, all samples are encoded.

        Raises:
            ArgumentError: If the data set of ``loader`` is not wrapped by ``FeatureCache.wrap``.
            DeviceError: If the package safetensors is not installed.
            GpuAugError: If rows of the last epoch could not be written.
        """
        cache = self.cache
        datasets = [dataset for dataset in wrapped_datasets(loader) if dataset.folder == cache.folder]
        if not datasets:
            raise ArgumentError(
                f"The data set of a loader with {cache!r} must be wrapped by it, got {type(loader).__name__} without it. "
                "Make the DataLoader of cache.wrap(dataset)."
            )
        self.recorder.close()
        stages_to_cache = stages[: self.count]
        view = last_number = -1  # no rows are read
        folder = sample_count = None
        if is_used:
            required_safetensors()  # raises an error now, not after the first rows are encoded
            self._update_key(stages_to_cache, position)
            view = position.epoch % cache.views
            folder = view_folder(cache.folder, cache.key, view)
            last_number = last_shard_number(folder)
            # To estimate the size of the cache, if the view is empty (has no shard). An iterable data set may have no length.
            with suppress(TypeError, NotImplementedError):
                sample_count = sum(map(len, datasets)) if last_number < 0 else None
        for dataset in datasets:
            dataset.view.set(cache.key or "0" * 16, view, last_number)  # no key is known before an epoch that uses the cache
        read_views = [(dataset.view, dataset.view.version) for dataset in datasets]
        is_named = all(dataset.key is not None for dataset in datasets)
        later_stages = [bound for bound, _ in stages[self.count :]]
        return CachedEpoch(self, position.epoch, folder, read_views, sample_count, stages_to_cache, later_stages, is_named)

    def _update_key(self, stages: Sequence[tuple[BoundStage, Stage]], position: Position) -> None:
        """Set the key of the cache to the key of ``stages``, and warn if the cache has only rows of other keys."""
        cache = self.cache
        parts = key_parts(stages, position.seed, self.lanes.device)
        key = key_of(parts)
        if key == cache.key:
            return
        recorded_keys = keys_in(cache.folder)
        write_key(cache.folder / key, parts)
        cache.key = key
        if recorded_keys and key not in recorded_keys:
            newest_key = next(reversed(recorded_keys))
            warn(
                f"The feature cache in {cache.folder} begins anew, because its rows were made with other "
                f"{difference(parts, recorded_keys[newest_key])}. Delete the folder {newest_key} if these rows are not needed."
            )


@dataclass(slots=True)
class CachedEpoch:
    """Cached stages in one epoch, that is, in one iterator of the loader."""

    cached_stages: CachedStages
    epoch: int
    folder: Path | None
    """Folder of the view that is read and recorded; ``None`` if rows are neither read nor recorded."""
    read_views: list[tuple[ViewToRead, int]]
    """(``ViewToRead``, its version when the iterator began) of each data set. A newer iterator may have set another version."""
    sample_count: int | None
    """Number of samples of the data set; ``None`` if the size of the cache need not be estimated from it, or is estimated."""
    stages: Sequence[tuple[BoundStage, Stage]]
    """(``BoundStage``, ``Stage``) of the cached stages, in order."""
    later_stages: Sequence[BoundStage]
    """Stages after the encoder, which run on every batch."""
    is_named: bool
    """Whether the user names each sample, by ``FeatureCache.wrap(…, key=…)``. If not, rows are found by a sample's images."""
    is_checked: bool = False
    """Whether ``check_reads`` has checked a batch of the epoch."""

    def take(self, batch: Batch) -> "tuple[Batch, CachedBatch | None, int]":
        """Separate the rows of a collated batch on the host from its images.

        Returns:
            (batch without ``Rows``, its ``CachedBatch`` or ``None``, number of stages to skip). If all rows were read, the
            batch has the results of the cached stages in its members, and no images. It needs no ``CachedBatch``, and skips all
            cached stages. Otherwise it has the encoded images in place of the ``Rows``. The ``CachedBatch`` is also ``None`` if
            rows are neither read nor recorded.

        Raises:
            ArgumentError: If the batch was not collated by ``collate_encoded`` from samples of ``FeatureCache.wrap``, or is
                decoded by other stages than ``_check_decoders`` allows.
            IteratorEndedError: If workers read another view, which a newer iterator has set.
        """
        if any(view.version != version for view, version in self.read_views):
            raise IteratorEndedError(
                "This iterator cannot continue, because a newer one reads other rows through the same wrapped data set. Call "
                "cache.wrap(dataset) once for each loader, and end an epoch before the next one begins."
            )
        rows = members_of_type(Rows, batch)  # one ``Rows`` per member of images
        image_names = None
        if not isinstance(batch, Rows) and rows:
            image_names = [name for name in batches.member_names(batch) if isinstance(batches.member(batch, name), Rows)]
        batch_with_images = map_instances(lambda member: member.encoded, Rows, batch)
        if not rows or image_names == []:
            raise ArgumentError(
                "Batches of a loader with a feature cache must have an image as a member, from wrapped data sets only, got "
                f"{shown(batch)}. Pass collate_fn=gpuaug.collate_encoded to the DataLoader, and return images as members of "
                "the samples. If the data set consists of several, wrap all of them, or wrap the whole."
            )
        if not self.is_checked:
            self._check_decoders(batch_with_images)
        if self.folder is None:
            return batch_with_images, None, 0
        # Of a sample with several images, the first image has the row.
        columns, headers = rows[0].columns, rows[0].headers
        missing = int(np.count_nonzero(headers.missing))
        self.cached_stages.samples_encoded += missing
        self.cached_stages.rows_read += len(headers.missing) - missing
        if missing:
            return batch_with_images, CachedBatch(self, rows[0], image_names), 0
        other_members = without(batch_with_images, image_names)
        if any(map(has_varying_shape, columns)):  # tensors of target dicts
            other_members = unpack_targets(other_members)
        return batch_of(other_members, columns, headers), None, len(self.stages)

    def _check_decoders(self, batch: Batch) -> None:
        """Check that the cached stages decode all images and no clips. Later stages find no images if rows are read.

        Args:
            batch: Host batch with encoded images.

        Raises:
            ArgumentError: If a cached stage decodes clips, or a later stage decodes images.
        """
        cached_bound = [bound for bound, _ in self.stages]
        decoded: set[int] = set()  # ``id`` of each member that an earlier stage decodes
        for bound in [*cached_bound, *self.later_stages]:
            if isinstance(bound, BoundDecode):
                members = [member for member in members_of_type(Encoded, bound.selected(batch)) if id(member) not in decoded]
                decoded.update(map(id, members))
                is_cached = bound in cached_bound
                # Clips in a cached stage, or images in a later stage.
                if any(isinstance(member, EncodedClips) is is_cached for member in members):
                    raise ArgumentError(
                        "Images must be decoded before the encoder, and clips after it, got "
                        f"{'clips' if is_cached else 'images'} in stage {bound.name!r}. Pass on= the images to a DecodeStage "
                        "before the encoder, and put a DecodeStage for the clips after it."
                    )

    def check_reads(self, before: Batch, written: Collection[str], image_names: Sequence[Any]) -> None:
        """Check once per epoch which members the stages read.

        A row is found by the images of its sample, and by the members that the cached stages write. If these stages read other
        members, such as a caption, a row could be read that was computed from another caption; so this is an error, unless the
        user names the samples. Stages after the encoder must not read images, which are absent from a batch whose rows were
        read, unless a cached stage has written its result in place of the images.

        Args:
            before: The batch before the stages.
            written: Names of the members that the cached stages have written, and that are stored.
            image_names: Names of the members that held encoded images.

        Raises:
            ArgumentError: If a stage reads another member.
        """
        if self.is_checked:
            return
        self.is_checked = True
        members = batches.member_names(before)
        others = {name for name in members if name not in image_names and str(name) not in written}
        for bound, _ in self.stages:
            names = members if bound.selection.on is None else bound.selection.names(before)
            names_read = [name for name in names if name in others]
            if names_read and not self.is_named and not isinstance(bound, BoundDecode):
                raise ArgumentError(
                    f"Stages up to the encoder must read images only, or members that they write, got {names_read} in "
                    f"stage {bound.name!r}. Rows are found by their images: name each sample with cache.wrap(dataset, key=…), "
                    "pass on= the members that the stage needs, or put it after the encoder."
                )
        absent = {name for name in image_names if str(name) not in written}
        for bound in self.later_stages:
            names_read = [name for name in bound.selection.names(before) if name in absent]
            if names_read:
                raise ArgumentError(
                    f"Stages after the encoder must not read images, which are absent when rows are read, got {names_read} in "
                    f"stage {bound.name!r}. Put the stage before the encoder, and pass into= another member there."
                )
            into = bound.selection.into
            absent -= set(into if isinstance(into, tuple) else [into])  # later stages read what this stage has written

    def end(self, *, is_complete: bool) -> None:
        """Write all rows of the epoch.

        Args:
            is_complete: Whether all batches were handed over. If not, as after ``break``, an error is raised in the next
                epoch, because an error that is raised while the iterator is closed may not be seen.

        Raises:
            GpuAugError: If rows could not be written.
        """
        self.cached_stages.recorder.close(raises=is_complete)


@dataclass(slots=True)
class CachedBatch:
    """A batch on which the cached stages run, because rows are missing. Call ``begin``, the stages, then ``finish``."""

    epoch: CachedEpoch
    rows: Rows
    """Rows that workers read from the cache, and which rows are missing."""
    image_names: list[Any] | None
    """Names of the members that hold images; ``None`` if the batch has no members, but is the images."""
    replaced_samples: list[int] = field(default_factory=list)
    """Indices of the samples that the decoding stage has replaced by other samples, because an image cannot be decoded."""
    before: Batch = None
    """The batch on the device before the stages."""
    leaves: dict[Any, MemberLeaves] = field(default_factory=dict)
    """Name of a member → its leaves before the stages, to find the members that stages have written."""
    columns: Any = None
    """Columns of ``rows``, copied to the device."""

    @property
    def encoder(self) -> BoundStage:
        """The last cached stage, after which ``finish`` is called."""
        return self.epoch.stages[-1][0]

    def with_columns(self, batch: Batch) -> Batch:
        """Return ``batch``, to be copied to the device, together with the columns of its rows.

        In a dict, because a tuple of two dicts could be mistaken for a batch of two target dicts.
        """
        return {"batch": batch, "columns": self.rows.columns}

    def begin(self, copied: Batch) -> Batch:
        """Keep the copied columns, and the batch as it is before the stages. Return the batch."""
        self.before, self.columns = copied["batch"], copied["columns"]
        self.leaves = member_leaves(self.before)
        return self.before

    def finish(self, after: Batch, read: list[Any], lane: Lane) -> Batch:
        """Record the missing rows of a batch, and return the batch with the rows that were read in it.

        The lane (CUDA stream) of the encoder must be current.

        Args:
            after: The batch after the stages, without pending removals of boxes.
            read: List of the values that the stages have read. Their memory is not reused until the stages have ended on the
                device. This method appends the values that it reads itself.
            lane: Lane of the encoder.
        """
        written = written_members(self.leaves, after, self.image_names, frozenset(map(id, read)))
        if self.image_names is not None:
            self.epoch.check_reads(self.before, written.keys(), self.image_names)
        headers = self.rows.headers
        stored = columns_of(written, len(headers.missing))
        result = after
        if self.columns:  # rows of some samples were read
            read.append((self.columns, after))
            before = unpack_targets(without(self.before, self.image_names))
            is_computed = headers.missing.copy()
            is_computed[self.replaced_samples] = True  # a row belongs to the original sample, not to its replacement
            result = batch_of(before, self.columns, replace(headers, missing=is_computed), unpack_targets(after))
        self._record(stored, lane)
        return result

    def _record(self, stored: dict[str, list[Tensor]], lane: Lane) -> None:
        """Record the missing rows. ``stored``: name of a column → list of its part of each of the B rows."""
        row_headers = self.rows.headers
        epoch = self.epoch
        indices = np.setdiff1d(np.flatnonzero(row_headers.missing), self.replaced_samples).tolist()
        if not indices:
            return
        inputs, hashes = inputs_of_rows(stored, [row_headers.inputs[index] for index in indices])
        ids = np.column_stack([row_headers.row_ids[indices], hashes])
        names = [row_headers.names[index] for index in indices]
        assert epoch.folder is not None
        rows = RowBlock(epoch.folder, epoch.epoch, ids, names, inputs, {}, {})
        for name, parts in stored.items():
            # Concatenated here, because later work on ``lane``, or of the user, may change the parts in place.
            recorded = [parts[index] for index in indices]
            if has_varying_shape(name):
                rows.shapes[name] = np.array([part.shape for part in recorded], np.int64).reshape(len(recorded), -1)
                rows.columns[name] = torch.cat([part.reshape(-1) for part in recorded])
            else:
                rows.columns[name] = torch.stack(recorded)
        cache = epoch.cached_stages.cache
        if epoch.sample_count is not None:
            needed = rows.nbytes // len(indices) * epoch.sample_count * cache.views
            free = shutil.disk_usage(cache.folder).free
            _log.log(
                logging.WARNING if needed > free else logging.INFO,
                "The feature cache in %s will take about %.3g GB. The disk has %.3g GB free.",
                *(cache.folder, needed / 1e9, free / 1e9),
            )
            epoch.sample_count = None
        epoch.cached_stages.recorder.record(rows, lane)
