"""``StreamedLoader``: batches that are on the device, transformed and encoded, when the training loop asks for them."""

import warnings
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from operator import length_hint
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, Subset

from gpuaug.core import rng, streams
from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, GpuAugWarning, whole_number
from gpuaug.core.rng import Position
from gpuaug.core.streams import Lanes
from gpuaug.feed.feed import Feed, Kind
from gpuaug.feed.prefetch import FeedIterator
from gpuaug.loader import depth as depths
from gpuaug.loader.checkpoint import MOST_COUNT, MOST_SEED, Progress
from gpuaug.loader.iterator import PipelinedIterator
from gpuaug.loader.state import LoaderState, OneThreadIterator
from gpuaug.loader.stats import Stats
from gpuaug.stages import base as stages
from gpuaug.stages.base import BoundStage
from gpuaug.stages.copy import Copier


class StreamedLoader:
    """Iterates over a loader's batches on the device, each ready on the stream that is current when it is handed over.

    Copies run on a copy lane and every stage on a lane of its own, up to ``depth`` batches ahead of the training loop. What
    comes out is bit for bit what ``depth=0`` gives, which runs the same work with an immediate wait.

    Around a ``DataLoader`` of a map-style dataset, a list, or a loader with ``state_dict`` and ``load_state_dict``, such as
    torchdata's ``StatefulDataLoader``, it has these two methods as well, of ``gpuaug.loader.checkpoint.Progress``.

    Args:
        loader: Any iterable of batches: a ``DataLoader``, a list, a generator function's result. Batches may be any nesting of
            tensors in tuples, lists, mappings, named tuples and dataclasses. An iterator that can be read once (a generator)
            has been read ahead when a loop is left early.
        stages: What is done to a batch after its copy, in order: ``TransformStage``, ``FeatureStage``, or any
            callable on the images. May be replaced between epochs.
        device: Where batches go. Left out: this machine's accelerator, or the CPU without one.
        depth: How many batches are worked on ahead of the one that is handed over. ``"auto"`` times the first hundred batches
            both in line and two ahead, in turns, and goes on with the faster; ``repr`` says which, and why.
        seed: What the draws of stages depend on. Left out: ``torch.initial_seed()``, which consumes nothing, or that of the
            state that is loaded.
        rank: The data-parallel rank, which makes ranks draw differently. Left out: ``torch.distributed``'s, or 0, and the first
            iterator warns if every rank reads the whole dataset.
        feed: How batches come from the loader. ``"auto"``: where the device is a GPU, a ``DataLoader``'s workers collate into
            page-locked slots, and batches of other sources are copied into such in the background. ``"ring"`` insists on slots,
            ``"plain"`` has none. ``repr`` says which it is, and why.
        feed_bytes: How much memory the slots may take. Left out: an eighth of what this process may use, divided by the number
            of ranks on this machine (``LOCAL_WORLD_SIZE``).

    Raises:
        ArgumentError, ArgumentTypeError, DeviceError: At once, for arguments that cannot work.

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
        depth: depths.Setting = 2,
        seed: int | None = None,
        rank: int | None = None,
        feed: Kind = "auto",
        feed_bytes: int | None = None,
    ) -> None:
        iterable = callable(getattr(type(loader), "__iter__", None)) or hasattr(type(loader), "__getitem__")
        if not iterable or isinstance(loader, str | bytes | Mapping) or getattr(loader, "ndim", 1) == 0:
            raise ArgumentTypeError(
                f"loader must be an iterable of batches, got {type(loader).__name__}. Pass a DataLoader, a list or a generator."
            )
        self._loader = loader
        self.depth = depth
        seed = None if seed is None else _seed(seed)
        way_out = "Leave it out for torch.distributed's."
        self._rank = None if rank is None else whole_number("rank", rank, way_out, most=MOST_COUNT)
        self._warned_of_ranks = False
        lanes = Lanes(streams.resolve(device))
        budget = (
            None if feed_bytes is None else whole_number("feed_bytes", feed_bytes, "Leave it out for an eighth of the memory.")
        )
        own_feed = Feed(loader, feed, budget, lanes.device)
        self._feed_iterators: weakref.WeakSet[FeedIterator] = weakref.WeakSet()
        self._iterators: weakref.WeakSet[PipelinedIterator] = weakref.WeakSet()
        end_passes = partial(_close_all, self._feed_iterators)
        progress = Progress(loader, seed, own_feed.resumable, end_passes)
        self._shared = LoaderState(lanes, Copier(lanes.device, warns=bool(own_feed.reason)), own_feed, progress)
        if progress.can_resume:
            # Here, not on the class: frameworks look for these two names, and save in a checkpoint what they find.
            self.state_dict, self.load_state_dict = progress.state_dict, progress.load_state_dict
        self.stages = stages

    def __iter__(self) -> Iterator[Batch]:
        return OneThreadIterator(self._batches())

    def _batches(self) -> Generator[Batch, None, None]:
        # A generator: nothing starts before the first next(), and frameworks call iter() more often than they iterate.
        with closing(self._begin()) as pipelined:
            while True:
                pipelined.check_process()
                consumer = self._shared.lanes.consumer()  # the stream that is current now, on this thread
                pipelined.fill(consumer)
                if not pipelined.waiting:
                    pipelined.end()
                    return
                yield pipelined.pop(consumer)

    def __len__(self) -> int:
        return len(self.loader)

    def __repr__(self) -> str:
        names = ", ".join(f"{bound.name}={stage!r}" for bound, stage in zip(self._bound, self._stages, strict=True))
        settings = f"device={self.device}, depth={self._depth!r}, feed={self._shared.feed!r}"
        return f"StreamedLoader({type(self.loader).__name__}, stages=[{names}], {settings})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def loader(self) -> Any:
        """The wrapped loader. It stays: what reads it, its slots and its state are made for it."""
        return self._loader

    @loader.setter
    def loader(self, value: object) -> None:
        """It cannot be exchanged.

        Raises:
            ArgumentError: In any case.
        """
        raise ArgumentError(
            f"loader must stay the {type(self._loader).__name__} that was wrapped, got another {type(value).__name__}. "
            "Wrap it by itself: gpuaug.StreamedLoader(other, loader.stages)."
        )

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        return self._shared.lanes.device

    @property
    def depth(self) -> depths.Setting:
        """How many batches are worked on ahead.

        Assign between epochs to change it: the next iterator has that depth, and as many slots in the ring as that needs.
        ``"auto"`` then measures anew.
        """
        return "auto" if isinstance(self._depth, depths.DepthTuner) else self._depth.now

    @depth.setter
    def depth(self, value: depths.Setting) -> None:
        way_out = "Use 0 for the in-line reference, 2 to overlap, 'auto' to have the faster."
        self._depth: depths.Depth = (
            depths.DepthTuner()
            if isinstance(value, str) and value == "auto"
            else depths.FixedDepth(whole_number("depth", value, way_out))
        )

    @property
    def seed(self) -> int:
        """What the draws of stages depend on, with the epoch, the rank and the batch."""
        return self._shared.progress.seed

    @seed.setter
    def seed(self, value: int) -> None:
        self._shared.progress.seed = _seed(value)

    @property
    def stages(self) -> tuple[stages.Stage, ...]:
        """What is done to a batch after its copy. Assign a new sequence between epochs to change it."""
        return self._stages

    @stages.setter
    def stages(self, value: Sequence[Any]) -> None:
        new = tuple(stages.as_stages(value))
        self._bound = stages.bind_all(new, self._shared.lanes)
        self._stages = new
        self._shared.progress.stages = tuple(zip(self._bound, new, strict=True))
        if isinstance(self._depth, depths.DepthTuner):
            self._depth = depths.DepthTuner()  # what was faster with other stages says nothing about these

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
        sampler and its dataset, those that have one. Without a call each iterator takes the next epoch.

        Args:
            epoch: Counted from 0.

        Raises:
            ArgumentError, ArgumentTypeError: If ``epoch`` is no whole number, negative, or 2**63 or more.
        """
        self._shared.progress.choose(whole_number("epoch", epoch, "Count epochs from 0.", most=MOST_COUNT))

    def stats(self) -> Stats:
        """The counters so far. The object is live: copy what is to be kept."""
        return self._shared.stats

    def close(self) -> None:
        """End iterators that are still open, and a wrapped ``DataLoader``'s persistent workers.

        The loader can be iterated again: workers are then started anew. Also called on leaving a ``with`` block.
        """
        _close_all(self._feed_iterators)
        for pipelined in list(self._iterators):
            pipelined.release()  # before the ring, which threads may be reading from
        self._shared.feed.close()
        self._shared.reclaim()

    def _begin(self, depth: depths.Depth | None = None, bound: Sequence[BoundStage] | None = None) -> PipelinedIterator:
        self._warn_if_ranks_read_the_same()
        shared = self._shared
        bound = self._bound if bound is None else bound
        ahead = max((stage.ahead for stage in bound), default=0)
        # One thread at a time, because passes share a ring, workers and the count of epochs; and none while another is in a
        # stage, because a DataLoader draws its workers' seed from the user's generator.
        with rng.generator_lock:
            rank = rng.default_rank() if self._rank is None else self._rank
            resume = shared.progress.resume(rank)
            feed_iterator = shared.feed.open(shared.lanes.current_stream, self._depth.most + ahead, resume)
            self._feed_iterators.add(feed_iterator)
            begun = shared.progress.begin(feed_iterator.state_at_start)
            first = Position(self.seed, begun.epoch, rank, begun.batch)
            if isinstance(self._depth, depths.DepthTuner):
                self._depth.consider(shared.lanes, self._stages)
            pipelined = PipelinedIterator(shared, feed_iterator, bound, begun, first, depth or self._depth)
            self._iterators.add(pipelined)
        return pipelined

    def _warn_if_ranks_read_the_same(self) -> None:
        ranks = depths.ranks()
        if self._warned_of_ranks or self._rank is not None or ranks == 1 or not _reads_whole_dataset(self.loader, ranks):
            return
        self._warned_of_ranks = True
        warnings.warn(
            f"A DataLoader must have a DistributedSampler where {ranks} ranks train together, got a "
            f"{type(self.sampler).__name__}: every rank reads all {len(self.dataset)} samples. Give the DataLoader "
            "sampler=DistributedSampler(dataset) in place of shuffle. If each rank has a dataset of its own, or is meant to "
            "read all of it, give the StreamedLoader rank=torch.distributed.get_rank(), or its data-parallel rank.",
            GpuAugWarning,
            stacklevel=5,  # the user's loop, beyond next() of the iterator and of its generator, and _begin()
        )


def _seed(value: int) -> int:
    return whole_number("seed", value, "Leave it out for torch's own.", most=MOST_SEED)


_OF_A_RANK = {"rank", "num_processes", "num_replicas", "num_shards", "process_index", "world_size"}
"""Attributes of a dataset that holds one rank's part."""


def _reads_whole_dataset(loader: Any, ranks: int) -> bool:
    """Whether every rank reads the whole dataset, for certain: through samplers that ``DataLoader`` itself makes.

    A sampler of the user's or of a framework's may know of ranks. So may a subclass that is iterated in a way of its own, and
    a dataset.
    """
    if not isinstance(loader, DataLoader) or not _is_torchs(type(loader).__iter__):
        return False
    sampler: Any = loader.sampler
    batch_sampler, dataset = loader.batch_sampler, loader.dataset
    if batch_sampler is not None:
        if not (_is_torchs(type(batch_sampler)) and type(batch_sampler).__name__ == "BatchSampler"):
            return False
        sampler = getattr(batch_sampler, "sampler", None)
    if not (_is_torchs(type(sampler)) and type(sampler).__name__ in ("SequentialSampler", "RandomSampler")):
        return False
    if getattr(sampler, "replacement", False) or sampler.data_source is not dataset or len(sampler) != len(dataset):
        return False
    if isinstance(dataset, Subset) and (len(dataset) - 1) * ranks < length_hint(dataset.dataset):
        return False  # no more than a rank's share
    return not any(name.lstrip("_") in _OF_A_RANK for name in getattr(dataset, "__dict__", ()))


def _is_torchs(named: Any) -> bool:
    # torchdata's loaders have samplers of their own.
    return named.__module__.split(".")[0] in ("torch", "torchdata")


def _close_all(feeds: Iterable[FeedIterator]) -> None:
    for feed in list(feeds):
        feed.close()
