"""``StreamedLoader``: copies, transforms and encodes batches on the device ahead of the training loop.

A *lane* is a CUDA stream of the loader. The *feed* brings batches from the wrapped loader to the copy lane. A *slot* is
page-locked memory for one batch. A batch is *handed over* when ``next`` returns it.
"""

import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from operator import attrgetter
from typing import Any, Literal, Self

import torch

from gpuaug.core import devices, rng
from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentError, warn, whole_number
from gpuaug.core.machine import memory_share_bytes
from gpuaug.core.rng import Position
from gpuaug.feed.feed import Feed
from gpuaug.feed.prefetch import FeedIterator
from gpuaug.feed.prepared_loader import as_prepared, warn_if_not_prepared
from gpuaug.feed.wrapped_loader import checked_iterable, without_iterator
from gpuaug.loader.checkpoint import MAX_COUNT, MAX_SEED, Progress
from gpuaug.loader.device_setup import DeviceSetup
from gpuaug.loader.iterator import PipelinedIterator
from gpuaug.loader.sharding import count_ranks, reads_whole_dataset
from gpuaug.loader.state import LoaderState, OneThreadIterator
from gpuaug.loader.stats import Stats
from gpuaug.stages.base import BoundStage, Stage

DEFAULT_DEPTH = 2


class StreamedLoader:
    """Iterate over a loader's batches on the device, copied, transformed and encoded ahead of the training loop.

    The copy and each stage run on separate lanes (CUDA streams), up to ``depth`` batches ahead of the training loop. A batch is
    ready on the stream that is current when ``next`` returns it. With ``depth=0`` the same work runs within ``next``, on the
    current stream, and the batches are equal, bit for bit.

    The ``StreamedLoader`` has ``state_dict`` and ``load_state_dict`` if ``loader`` has them, such as torchdata's
    ``StatefulDataLoader``, or is a list or a ``DataLoader`` of a map-style dataset. Both methods are documented at
    ``gpuaug.loader.checkpoint.Progress``.

    A ``StreamedLoader`` can be pickled, for instance for a spawned process, if the wrapped loader and the stages can. The next
    iterator of the unpickled loader begins where the next iterator of the original would: with the next epoch, or with the
    batch of a loaded state. To continue within an epoch, load ``state_dict()``.

    Args:
        loader: Any iterable of batches: a ``DataLoader``, a list, a generator. A batch is any nesting of tuples, lists,
            mappings, named tuples and dataclasses with tensors. If the loop over a generator is left early, the batches that
            were read ahead are lost.
        stages: Stages that run after the copy, in order: ``TransformStage``, ``FeatureStage``, or any callable on the images.
            May be replaced between epochs.
        device: Device to copy batches to. Default: the device of a loader that Accelerate has prepared; for other loaders the
            machine's accelerator, or the CPU. ``"cuda"`` without an index is the GPU that is current at the first ``next``.
        depth: Number of batches to work on ahead of the batch that is handed over.
        seed: Seed of the stages' random numbers. Default: the seed of a loaded state, else ``torch.initial_seed()``, which
            advances no generator. Loaders with equal seeds draw equal numbers at each batch index: give loaders that are read
            together separate seeds.
        rank: Data-parallel rank. Ranks draw different random numbers. Default: the rank in ``torch.distributed``, or 0; the
            first iterator then warns if every rank reads the whole dataset.
        feed: Transfer of batches to the GPU. ``"auto"``: for a GPU, workers of a ``DataLoader`` collate into page-locked
            slots, and batches of other sources are copied into slots in the background. ``"ring"``: an error if slots cannot
            be used. ``"plain"``: no slots. ``repr(loader)`` shows the choice and its reason.
        feed_bytes: Limit of the bytes of all slots. Maximum: the memory of the machine or the container, divided by the number
            of ranks on this machine (``LOCAL_WORLD_SIZE``). Default: an eighth of the maximum.

    Raises:
        ArgumentError, ArgumentTypeError, DeviceError: If an argument cannot be used. Raised at the first batch if the reason
            depends on the GPU that is current at the first batch.

    Cost:
        A batch of two tensors without stages costs the training thread two copies, three events and three waits. Device memory:
        ``depth + 1`` batches, and the intermediate tensors of two batches.

    Examples:
        >>> loader = StreamedLoader([torch.ones(2), torch.zeros(1)], [lambda x: x * 3], device="cpu")
        >>> len(loader), [batch.tolist() for batch in loader]
        (2, [[3.0, 3.0], [0.0]])
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        stages: Sequence[Any] = (),
        *,
        device: torch.device | str | int | None = None,
        depth: int = DEFAULT_DEPTH,
        seed: int | None = None,
        rank: int | None = None,
        feed: Literal["auto", "ring", "plain"] = "auto",
        feed_bytes: int | None = None,
    ) -> None:
        self._loader = checked_iterable(loader)
        self._settings = {"device": device, "rank": rank, "feed": feed, "feed_bytes": feed_bytes}
        self._depth = _checked_depth(depth)
        seed = None if seed is None else _checked_seed(seed)
        way_out = "Leave it out to use the rank in torch.distributed."
        self._rank = None if rank is None else whole_number("rank", rank, way_out, most=MAX_COUNT)
        self._warned_of_ranks = False
        prepared = as_prepared(loader)  # None, unless Accelerate has prepared the loader
        device = prepared.device if prepared is not None and device is None else device
        if feed_bytes is not None:
            most = memory_share_bytes()
            way_out = f"Leave it out for an eighth of the memory that this process may use, which is {most / 1e6:.1f} MB."
            feed_bytes = whole_number("feed_bytes", feed_bytes, way_out, most=most)
        source = loader if prepared is None else prepared.dataloader
        open_prepared = None if prepared is None else prepared.open
        batch_feed = Feed(source, feed, feed_bytes, devices.as_device(device), open_prepared)
        # ``reason``: why batches do not travel in page-locked slots; empty if they do.
        device_setup = DeviceSetup(device, warn_pageable=bool(batch_feed.reason))
        self._feed_iterators: weakref.WeakSet[FeedIterator] = weakref.WeakSet()
        self._iterators: weakref.WeakSet[PipelinedIterator] = weakref.WeakSet()
        end_iterations = partial(_close_all, self._feed_iterators)
        progress = Progress(loader, device_setup, seed, batch_feed, end_iterations, prepared)
        self._shared = LoaderState(device_setup, batch_feed, progress)
        if batch_feed.source.has_state:
            # On the instance, not on the class: frameworks save the state of every object that has these two methods.
            self.state_dict = progress.state_dict
            self.load_state_dict = progress.load_state_dict
        self.stages = stages
        self._constructor_attributes = {*vars(self), "_constructor_attributes"}

    def __iter__(self) -> Iterator[Batch]:
        return OneThreadIterator(self._batches())

    def _batches(self) -> Generator[Batch, None, None]:
        # A generator, so that nothing starts before the first next(): frameworks call iter() more often than they iterate.
        with closing(self._begin()) as iterator:
            lanes = self._shared.lanes
            while True:
                iterator.check_process()
                consumer = lanes.consumer()  # read at every next(): the current stream may have changed
                iterator.fill(consumer)
                if not iterator.launched_batches:
                    iterator.end()
                    return
                yield iterator.pop(consumer)

    def __len__(self) -> int:
        return len(self.loader)

    def __repr__(self) -> str:
        feed = self._shared.feed
        size = f" ({feed.size_text})" if feed.size_text else ""
        settings = f"{self._shared.device_setup!r}, depth={self._depth!r}, feed={feed!r}{size}"
        return f"StreamedLoader({type(self.loader).__name__}, {settings})"

    def __getstate__(self) -> tuple[Any, ...]:
        """Return the settings and the position. An unpickled loader creates new threads, workers and memory."""
        settings = {**self._settings, "loader": without_iterator(self._loader), "stages": self.stages, "depth": self.depth}
        # Attributes that the user or a framework has added.
        user_attributes = {name: vars(self)[name] for name in vars(self).keys() - self._constructor_attributes}
        return settings, self._shared.progress.position_state_of_copy, user_attributes

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        settings, position_state, user_attributes = state
        StreamedLoader.__init__(self, **settings)
        self._shared.progress.position_state = position_state
        vars(self).update(user_attributes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def loader(self) -> Any:
        """The wrapped loader. It cannot be replaced."""
        return self._loader

    @property
    def device(self) -> torch.device:
        """Device that batches are copied to. Before the first iterator: the device that an iterator would now use."""
        return self._shared.device_setup.device

    @property
    def depth(self) -> int:
        """Number of batches to work on ahead.

        Assign a number between epochs: the next iterator uses the new depth, and memory for more batches is page-locked.
        """
        return self._depth

    @depth.setter
    def depth(self, value: int) -> None:
        self._depth = _checked_depth(value)

    @property
    def seed(self) -> int:
        """Seed of the stages' random numbers, which also depend on the epoch, the rank and the batch index."""
        return self._shared.progress.seed

    @seed.setter
    def seed(self, value: int) -> None:
        self._shared.progress.set_seed(_checked_seed(value))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stages that run after the copy, in order. Assign a new sequence between epochs to change them."""
        return self._shared.device_setup.stages

    @stages.setter
    def stages(self, value: Sequence[Any]) -> None:
        self._shared.device_setup.set_stages(value)

    dataset = property(attrgetter("loader.dataset"), doc="Dataset of the wrapped loader.")
    batch_size = property(attrgetter("loader.batch_size"), doc="Batch size of the wrapped loader.")
    sampler = property(attrgetter("loader.sampler"), doc="Sampler of the wrapped loader.")
    batch_sampler = property(attrgetter("loader.batch_sampler"), doc="Batch sampler of the wrapped loader.")
    drop_last = property(attrgetter("loader.drop_last"), doc="Whether the wrapped loader drops its last partial batch.")

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iterator, here and in the wrapped loader.

        Calls ``set_epoch`` of the wrapped loader if it has this method; otherwise of its sampler, its batch sampler, the
        samplers that they wrap as ``sampler`` or ``batch_sampler``, and its dataset, if they have the method. Without a call of
        ``set_epoch``, an iterator's epoch is one more than the epoch of the last iterator, or the epoch that the sampler or
        the dataset reports, whichever is larger.

        Args:
            epoch: Epoch, from 0.

        Raises:
            ArgumentError, ArgumentTypeError: If ``epoch`` is not a whole number, negative, or 2**63 or more.
        """
        self._shared.progress.set_epoch(whole_number("epoch", epoch, "Count epochs from 0.", most=MAX_COUNT))

    def skip(self, batches: int) -> None:
        """Skip the first batches of the next iterator, with their random numbers.

        A ``DataLoader`` of a map-style dataset does not load the skipped batches. Other loaders load and drop them.

        Args:
            batches: Number of batches to skip.

        Raises:
            ArgumentError, ArgumentTypeError: If ``batches`` is not a whole number, or negative.
        """
        self._shared.progress.skip(whole_number("batches", batches, "Pass the number of batches to leave out.", most=MAX_COUNT))

    @property
    def multiprocessing_context(self) -> Any:
        """Raise an error: frameworks that read this attribute would create a ``DataLoader`` without the stages.

        Raises:
            ArgumentError: Always.
        """
        raise ArgumentError(
            "A StreamedLoader has no multiprocessing_context, because a framework that asks for it would make a DataLoader "
            "without the stages. In place of accelerate.skip_first_batches call "
            "gpuaug.integrations.accelerate.skip_first_batches. To resume a Trainer of transformers, set before it trains: "
            "transformers.trainer.skip_first_batches = gpuaug.integrations.accelerate.skip_first_batches."
        )

    def stats(self) -> Stats:
        """Return the counters.

        Later batches change the counters of the returned object. Bytes, rows of a feature cache, and replaced files change only
        at the next ``stats()``.
        """
        stats = self._shared.stats
        held = self._shared.device_setup.held_bytes()
        stats.pinned_bytes = self._shared.feed.pinned_bytes + held.pinned
        stats.decode_bytes, stats.graph_bytes = held.decode, held.graph
        stats.rows_read, stats.rows_encoded, stats.rows_written, stats.rows_dropped = self._shared.device_setup.row_counts()
        stats.replaced_files = dict(self._shared.progress.replaced.files)
        return stats

    def close(self) -> None:
        """End open iterators, and the persistent workers of a wrapped ``DataLoader``.

        The loader can be iterated again, which starts new workers. Also called at the end of a ``with`` block.
        """
        _close_all(self._feed_iterators)
        for iterator in list(self._iterators):
            iterator.abandon_submitted()  # before the feed is closed: decoding threads may be reading its slots
        self._shared.feed.close()
        self._shared.reclaim()

    def _begin(self, depth: int | None = None, bound_stages: Sequence[BoundStage] | None = None) -> PipelinedIterator:
        """Begin an iterator.

        Args:
            depth: Depth of an iterator that measures or shows the stages (``Inspection``), for which a feature cache is not
                used; ``None``: the depth of the loader.
            bound_stages: Stages to run; ``None``: the stages of the loader in the epoch of the iterator.
        """
        self._warn_if_ranks_read_the_same()
        warn_if_not_prepared(self.loader)
        shared = self._shared
        # One thread at a time, because iterators share lanes, slots, workers and the epoch counter. A DataLoader draws the seed
        # of its workers from the global generators, which hold a stage's seed while another thread is in the stage.
        with rng.generator_lock:
            shared.device_setup.fix_device_index()
            rank = rng.default_rank() if self._rank is None else self._rank
            shared.progress.prepare()  # takes the epoch of a loader that Accelerate has prepared
            epoch = shared.progress.next_epoch
            stages = shared.device_setup.stages_at(epoch)
            bound_stages = [bound for bound, _ in stages] if bound_stages is None else bound_stages
            max_submitted = max((stage.max_submitted for stage in bound_stages), default=0)
            cached_stages = shared.device_setup.cached_stages
            cached = None
            if cached_stages is not None:
                position = Position(self.seed, epoch, rank, 0)
                cached = cached_stages.begin(self.loader, position, stages, is_used=depth is None)
            # Host batches in use at once: launched batches, and batches on which decoding threads or a feature cache work.
            max_ahead = self._depth + max(max_submitted, int(cached is not None))
            feed_iterator = shared.feed.open(shared.lanes.current_stream, max_ahead, shared.progress.start(rank))
            self._feed_iterators.add(feed_iterator)
            first_state = shared.progress.begin(feed_iterator.state_at_start)
            first_position = Position(self.seed, first_state.epoch, rank, first_state.batch)
            depth = self._depth if depth is None else depth
            iterator = PipelinedIterator(shared, feed_iterator, bound_stages, first_state, first_position, depth, cached)
            self._iterators.add(iterator)
        return iterator

    def _warn_if_ranks_read_the_same(self) -> None:
        ranks = count_ranks()
        if self._warned_of_ranks or self._rank is not None or ranks == 1 or not reads_whole_dataset(self.loader, ranks):
            return
        self._warned_of_ranks = True
        warn(
            f"Each of {ranks} ranks reads all {len(self.dataset)} samples, because the DataLoader has a "
            f"{type(self.sampler).__name__} and no DistributedSampler. Give the DataLoader "
            "sampler=DistributedSampler(dataset) instead of shuffle. If each rank has a separate dataset, or is meant to "
            "read all samples, give the StreamedLoader rank=torch.distributed.get_rank(), or its data-parallel rank."
        )


def _checked_depth(value: int) -> int:
    return whole_number("depth", value, "Use 0 to run without overlap, 2 to overlap.")


def _checked_seed(value: int) -> int:
    return whole_number("seed", value, "Leave it out for the initial seed of torch.", most=MAX_SEED)


def _close_all(feed_iterators: Iterable[FeedIterator]) -> None:
    for feed_iterator in list(feed_iterators):
        feed_iterator.close()
