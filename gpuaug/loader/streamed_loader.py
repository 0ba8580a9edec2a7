"""``StreamedLoader``: batches that are on the device, transformed and encoded, when the training loop asks for them."""

import warnings
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Literal, Self

import torch

from gpuaug.core import devices, rng
from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentError, GpuAugWarning, whole_number
from gpuaug.core.machine import memory_share_bytes
from gpuaug.core.rng import Position
from gpuaug.feed.feed import Feed, Kind
from gpuaug.feed.prefetch import FeedIterator
from gpuaug.feed.prepared_loader import as_prepared, warn_if_never_stepped
from gpuaug.feed.wrapped_loader import checked, without_workers
from gpuaug.loader.checkpoint import MOST_COUNT, MOST_SEED, Progress
from gpuaug.loader.iterator import PipelinedIterator
from gpuaug.loader.placement import Placement
from gpuaug.loader.sharding import count_ranks, reads_whole_dataset
from gpuaug.loader.state import LoaderState, OneThreadIterator
from gpuaug.loader.stats import Stats
from gpuaug.stages.base import BoundStage, Stage

DEFAULT_DEPTH = 2


class StreamedLoader:
    """Iterates over a loader's batches on the device, each ready on the stream that is current when it is handed over.

    Copies run on a copy lane and every stage on a lane of its own, up to ``depth`` batches ahead of the training loop. What
    comes out is bit for bit what ``depth=0`` gives, which runs the same work with an immediate wait.

    Around a ``DataLoader`` of a map-style dataset, a list, or a loader with ``state_dict`` and ``load_state_dict``, such as
    torchdata's ``StatefulDataLoader``, it has these two methods as well, of ``gpuaug.loader.checkpoint.Progress``.

    It can be pickled, as for a spawned process, if the wrapped loader and the stages can. The copy goes on as this one would.

    Args:
        loader: Any iterable of batches: a ``DataLoader``, a list, a generator function's result. Batches may be any nesting of
            tensors in tuples, lists, mappings, named tuples and dataclasses. An iterator that can be read once (a generator)
            has been read ahead when a loop is left early.
        stages: What is done to a batch after its copy, in order: ``TransformStage``, ``FeatureStage``, or any
            callable on the images. May be replaced between epochs.
        device: Where batches go. Left out: Accelerate's, for a loader that it has prepared, else this machine's accelerator or
            CPU. Without an index, as ``"cuda"``: the GPU that is current when the first batch is asked for.
        depth: How many batches are worked on ahead of the one that is handed over. ``"auto"`` is deprecated and is 2.
        seed: What the draws of stages depend on. Left out: ``torch.initial_seed()``, which consumes nothing, or that of the
            state that is loaded.
        rank: The data-parallel rank, which makes ranks draw differently. Left out: ``torch.distributed``'s, or 0, and the first
            iterator warns if every rank reads the whole dataset.
        feed: How batches come from the loader. ``"auto"``: where the device is a GPU, a ``DataLoader``'s workers collate into
            page-locked slots, and batches of other sources are copied into such in the background. ``"ring"`` insists on slots,
            ``"plain"`` has none. ``repr`` says which it is, and why.
        feed_bytes: How much memory the slots may take, at most all that this process may use: the machine's or the container's,
            divided by the number of ranks on this machine (``LOCAL_WORLD_SIZE``). Left out: an eighth of it.

    Raises:
        ArgumentError, ArgumentTypeError, DeviceError: At once, for arguments that cannot work; with the first batch, where that
            follows from which GPU is then current.

    Cost:
        A batch of two tensors and no stages costs the training thread two copies, three events and three waits. Memory on the
        device: the batches on their way (``depth + 1``) and two batches' intermediates.

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
        depth: int | Literal["auto"] = DEFAULT_DEPTH,
        seed: int | None = None,
        rank: int | None = None,
        feed: Kind = "auto",
        feed_bytes: int | None = None,
    ) -> None:
        self._loader = checked(loader)
        self._settings = {"device": device, "rank": rank, "feed": feed, "feed_bytes": feed_bytes}
        self._depth = _depth(depth)
        seed = None if seed is None else _seed(seed)
        way_out = "Leave it out for torch.distributed's."
        self._rank = None if rank is None else whole_number("rank", rank, way_out, most=MOST_COUNT)
        self._warned_of_ranks = False
        prepared = as_prepared(loader)
        device = prepared.device if prepared is not None and device is None else device
        requested = devices.requested(device)
        budget = None if feed_bytes is None else _budget(feed_bytes)
        source = loader if prepared is None else prepared.dataloader
        begin_with = None if prepared is None else prepared.open
        own_feed = Feed(source, feed, budget, requested, begin_with)
        placement = Placement(device, warns=bool(own_feed.reason))
        self._feed_iterators: weakref.WeakSet[FeedIterator] = weakref.WeakSet()
        self._iterators: weakref.WeakSet[PipelinedIterator] = weakref.WeakSet()
        end_passes = partial(_close_all, self._feed_iterators)
        progress = Progress(loader, placement, seed, own_feed, end_passes, prepared)
        self._shared = LoaderState(placement, own_feed, progress)
        if progress.can_resume:
            # Here, not on the class: frameworks look for these two names, and put the state into checkpoints.
            self.state_dict = progress.state_dict
            self.load_state_dict = progress.load_state_dict
        self.stages = stages

    def __iter__(self) -> Iterator[Batch]:
        return OneThreadIterator(self._batches())

    def _batches(self) -> Generator[Batch, None, None]:
        # A generator: nothing starts before the first next(), and frameworks call iter() more often than they iterate.
        with closing(self._begin()) as pipelined:
            lanes = self._shared.lanes
            while True:
                pipelined.check_process()
                consumer = lanes.consumer()  # the stream that is current now, on this thread
                pipelined.fill(consumer)
                if not pipelined.waiting:
                    pipelined.end()
                    return
                yield pipelined.pop(consumer)

    def __len__(self) -> int:
        return len(self.loader)

    def __repr__(self) -> str:
        feed = self._shared.feed
        size = f" ({feed.size})" if feed.size else ""
        settings = f"{self._shared.placement!r}, depth={self._depth!r}, feed={feed!r}{size}"
        return f"StreamedLoader({type(self.loader).__name__}, {settings})"

    def __getstate__(self) -> tuple[Any, ...]:
        """Settings and position, with which another process gives the same batches. No threads, workers or memory."""
        settings = {**self._settings, "loader": without_workers(self._loader), "stages": self.stages, "depth": self.depth}
        return settings, self._shared.progress.place, {name: vars(self)[name] for name in vars(self).keys() - _MADE}

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        settings, place, others = state
        StreamedLoader.__init__(self, **settings)
        self._shared.progress.place = place
        vars(self).update(others)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def loader(self) -> Any:
        """The wrapped loader. It cannot be replaced: feed, slots and state are made for it."""
        return self._loader

    @loader.setter
    def loader(self, value: object) -> None:
        """Refuse another loader.

        Raises:
            ArgumentError: In any case.
        """
        raise ArgumentError(
            f"loader must stay the {type(self._loader).__name__} that was wrapped, got another {type(value).__name__}. "
            "Wrap it by itself: gpuaug.StreamedLoader(other, loader.stages)."
        )

    @property
    def device(self) -> torch.device:
        """Where batches go: until the first iterator begins, where they would go if it began now."""
        return self._shared.placement.device

    @property
    def depth(self) -> int:
        """How many batches are worked on ahead.

        Assign between epochs to change it: the next iterator has that depth, and as many slots in the ring as that needs.
        """
        return self._depth

    @depth.setter
    def depth(self, value: int | Literal["auto"]) -> None:
        self._depth = _depth(value)

    @property
    def seed(self) -> int:
        """Seed of the draws of stages, which depend on the epoch, the rank and the batch besides."""
        return self._shared.progress.seed

    @seed.setter
    def seed(self, value: int) -> None:
        self._shared.progress.seed = _seed(value)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of a batch after its copy. Assign a new sequence between epochs to change them."""
        return self._shared.placement.stages

    @stages.setter
    def stages(self, value: Sequence[Any]) -> None:
        self._shared.placement.stages = value

    @property
    def dataset(self) -> Any:
        """The wrapped loader's dataset."""
        return self.loader.dataset

    @property
    def batch_size(self) -> Any:
        """The wrapped loader's batch size."""
        return self.loader.batch_size

    @property
    def sampler(self) -> Any:
        """The wrapped loader's sampler."""
        return self.loader.sampler

    @property
    def batch_sampler(self) -> Any:
        """The wrapped loader's batch sampler."""
        return self.loader.batch_sampler

    @property
    def drop_last(self) -> Any:
        """Whether the wrapped loader drops its last partial batch."""
        return self.loader.drop_last

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iterator, here and in the wrapped loader.

        Calls ``set_epoch`` of the loader if it has one, otherwise of its sampler, its batch sampler, the batch sampler's
        sampler and its dataset, those that have one. Without a call each iterator takes the next epoch, or that of one of these
        if it was told a later one.

        Args:
            epoch: Counted from 0.

        Raises:
            ArgumentError, ArgumentTypeError: If ``epoch`` is no whole number, negative, or 2**63 or more.
        """
        self._shared.progress.choose(whole_number("epoch", epoch, "Count epochs from 0.", most=MOST_COUNT))

    def skip(self, batches: int) -> None:
        """Have the next iterator leave out its first batches, whose draws are left out too.

        Around a ``DataLoader`` of a map-style dataset they are not loaded. Other loaders give them, and they are dropped.

        Args:
            batches: How many.

        Raises:
            ArgumentError, ArgumentTypeError: If ``batches`` is no whole number, or negative.
        """
        self._shared.progress.skip(whole_number("batches", batches, "Count those that are left out.", most=MOST_COUNT))

    @property
    def multiprocessing_context(self) -> Any:
        """It has none. Frameworks that make a ``DataLoader`` again ask for it, and would make one without the stages.

        Raises:
            ArgumentError: In any case.
        """
        raise ArgumentError(
            "A StreamedLoader has no multiprocessing_context, because a framework that asks for it would make a DataLoader "
            "without the stages. In place of accelerate.skip_first_batches call "
            "gpuaug.integrations.accelerate.skip_first_batches. To resume a Trainer of transformers, set before it trains: "
            "transformers.trainer.skip_first_batches = gpuaug.integrations.accelerate.skip_first_batches."
        )

    def stats(self) -> Stats:
        """The counters so far. The object is live, numbers of bytes held apart: copy values that you keep."""
        stats = self._shared.stats
        stats.pinned_bytes = self._shared.feed.pinned_bytes + self._shared.placement.pinned_bytes
        stats.decode_bytes = self._shared.placement.decode_bytes
        stats.graph_bytes = self._shared.placement.graph_bytes
        return stats

    def close(self) -> None:
        """End iterators that are still open, and a wrapped ``DataLoader``'s persistent workers.

        The loader can be iterated again: workers are then started anew. Also called on leaving a ``with`` block.
        """
        _close_all(self._feed_iterators)
        for pipelined in list(self._iterators):
            pipelined.release()  # before the ring, which threads may be reading from
        self._shared.feed.close()
        self._shared.reclaim()

    def _begin(self, depth: int | None = None, bound: Sequence[BoundStage] | None = None) -> PipelinedIterator:
        self._warn_if_ranks_read_the_same()
        warn_if_never_stepped(self.loader)
        shared = self._shared
        # One thread at a time, because passes share lanes, a ring, workers and the count of epochs; and none while another is
        # in a stage, because a DataLoader draws its workers' seed from the user's generator.
        with rng.generator_lock:
            shared.placement.settle()
            bound = shared.placement.bound if bound is None else bound
            ahead = max((stage.ahead for stage in bound), default=0)
            rank = rng.default_rank() if self._rank is None else self._rank
            shared.progress.prepare()
            resume = shared.progress.resume(rank)
            feed_iterator = shared.feed.open(shared.lanes.current_stream, self._depth + ahead, resume)
            self._feed_iterators.add(feed_iterator)
            begun = shared.progress.begin(feed_iterator.state_at_start)
            first = Position(self.seed, begun.epoch, rank, begun.batch)
            depth = self._depth if depth is None else depth
            pipelined = PipelinedIterator(shared, feed_iterator, bound, begun, first, depth)
            self._iterators.add(pipelined)
        return pipelined

    def _warn_if_ranks_read_the_same(self) -> None:
        ranks = count_ranks()
        if self._warned_of_ranks or self._rank is not None or ranks == 1 or not reads_whole_dataset(self.loader, ranks):
            return
        self._warned_of_ranks = True
        warnings.warn(
            f"Each of {ranks} ranks reads all {len(self.dataset)} samples, because the DataLoader has a "
            f"{type(self.sampler).__name__} and no DistributedSampler. Give the DataLoader "
            "sampler=DistributedSampler(dataset) in place of shuffle. If each rank has a dataset of its own, or is meant to "
            "read all of it, give the StreamedLoader rank=torch.distributed.get_rank(), or its data-parallel rank.",
            GpuAugWarning,
            stacklevel=5,  # the user's loop, beyond next() of the iterator and of its generator, and _begin()
        )


def _depth(value: int | Literal["auto"]) -> int:
    if isinstance(value, str) and value == "auto":
        warnings.warn(
            f"depth='auto' is deprecated and works as depth={DEFAULT_DEPTH}, because timing both depths made no measured loop "
            "faster. Leave depth out: the next release refuses 'auto'.",
            GpuAugWarning,
            stacklevel=3,  # the user's call or assignment, beyond __init__ or the setter
        )
        return DEFAULT_DEPTH
    return whole_number("depth", value, "Use 0 for the in-line reference, 2 to overlap.")


def _budget(feed_bytes: int) -> int:
    most = memory_share_bytes()
    way_out = f"Leave it out for an eighth of the memory that this process may use, which is {most / 1e6:.1f} MB."
    return whole_number("feed_bytes", feed_bytes, way_out, most=most)


def _seed(value: int) -> int:
    return whole_number("seed", value, "Leave it out for torch's own.", most=MOST_SEED)


_MADE = {
    *("_loader", "_settings", "_depth", "_rank", "_warned_of_ranks", "_feed_iterators", "_iterators", "_shared"),
    *("state_dict", "load_state_dict"),
}
"""Attributes that ``StreamedLoader`` itself makes; others are the user's."""


def _close_all(feeds: Iterable[FeedIterator]) -> None:
    for feed in list(feeds):
        feed.close()
