"""``StreamedLoader``: batches that are on the device, transformed and encoded, when the training loop asks for them."""

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, Self

import torch

from gpuaug import seeding, stages, streams
from gpuaug.batch import Batch
from gpuaug.copying import Copier
from gpuaug.counters import Stats
from gpuaug.errors import ArgumentError, ArgumentTypeError
from gpuaug.feed import Feed
from gpuaug.flight import Flight, Machinery
from gpuaug.progress import Progress, is_stateful
from gpuaug.seeding import Position
from gpuaug.streams import Lanes
from gpuaug.supply import Kind, Supply


class StreamedLoader:
    """Iterates over a loader's batches on the device, each ready on the stream that is current when it is handed over.

    Copies run on a copy lane and every stage on a lane of its own, up to ``depth`` batches ahead of the training loop. What
    comes out is bit for bit what ``depth=0`` gives, which runs the same work with an immediate wait.

    Args:
        loader: Any iterable of batches: a ``DataLoader``, a list, a generator function's result. Batches may be any nesting of
            tensors in tuples, lists, mappings, named tuples and dataclasses. An iterator that can be read once (a generator)
            has been read ahead when a loop is left early.
        stages: What is done to a batch after its copy, in order: :class:`TransformStage`, :class:`FeatureStage`, or any
            callable on the images. May be replaced between epochs.
        device: Where batches go. Left out: this machine's accelerator, or the CPU without one.
        depth: How many batches are worked on ahead of the one that is handed over.
        seed: What the draws of stages depend on. Left out: ``torch.initial_seed()``, which consumes nothing.
        rank: The data-parallel rank, which makes ranks draw differently. Left out: ``torch.distributed``'s, or 0.
        feed: How batches come from the loader. ``"auto"``: where the device is a GPU, a ``DataLoader``'s workers collate into
            page-locked slots, and batches of other sources are copied into such in the background. ``"ring"`` insists on slots,
            ``"plain"`` has none. ``repr`` says which it is, and why.
        feed_bytes: How much memory the slots may take. Left out: an eighth of what this process may use.

    Raises:
        ArgumentError, ArgumentTypeError, DeviceError: At once, for arguments that cannot work.

    Cost:
        A batch of two tensors and no stages costs the training thread two copies, three marks and three waits. Memory on the
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
        depth: int = 2,
        seed: int | None = None,
        rank: int | None = None,
        feed: Kind = "auto",
        feed_bytes: int | None = None,
    ) -> None:
        if not callable(getattr(type(loader), "__iter__", None)) and not hasattr(type(loader), "__getitem__"):
            raise ArgumentTypeError(
                f"loader must be an iterable of batches, got {type(loader).__name__}. Pass a DataLoader, a list or a generator."
            )
        self.loader = loader
        self.depth = _whole("depth", depth, "Use 0 for the in-line reference, 2 to overlap.")
        self.seed = seeding.default_seed() if seed is None else _whole("seed", seed, "Leave it out for torch's own.")
        self._rank = None if rank is None else _whole("rank", rank, "Leave it out for torch.distributed's.")
        lanes = Lanes(streams.resolve(device))
        budget = None if feed_bytes is None else _whole("feed_bytes", feed_bytes, "Leave it out for an eighth of the memory.")
        supply = Supply(loader, feed, budget, lanes.device, self.depth)
        self._machinery = Machinery(lanes, Copier(lanes.device, warns=bool(supply.reason)), supply, Progress(loader))
        self._feeds: weakref.WeakSet[Feed] = weakref.WeakSet()
        self.stages = stages

    def __iter__(self) -> Iterator[Batch]:
        # A generator: nothing starts before the first next(), and frameworks call iter() more often than they iterate.
        with closing(self._begin()) as flight:
            while True:
                consumer = self._machinery.lanes.consumer()  # the stream that is current now, on this thread
                flight.catch_up(consumer)
                if not flight.waiting:
                    flight.end()
                    return
                yield flight.hand_over(consumer)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        names = ", ".join(f"{bound.name}={stage!r}" for bound, stage in zip(self._bound, self._stages, strict=True))
        settings = f"device={self.device}, depth={self.depth}, feed={self._machinery.supply!r}"
        return f"StreamedLoader({type(self.loader).__name__}, stages=[{names}], {settings})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        return self._machinery.lanes.device

    @property
    def stages(self) -> tuple[stages.Stage, ...]:
        """What is done to a batch after its copy. Assign a new sequence between epochs to change it."""
        return self._stages

    @stages.setter
    def stages(self, value: Sequence[Any]) -> None:
        new = tuple(stages.as_stages(value))
        self._bound = stages.bind_all(new, self._machinery.lanes)
        self._stages = new

    @property
    def dataset(self) -> Any:
        """The wrapped loader's dataset."""
        return self.loader.dataset  # type: ignore[attr-defined]

    @property
    def batch_size(self) -> Any:
        """The wrapped loader's batch size."""
        return self.loader.batch_size  # type: ignore[attr-defined]

    @property
    def sampler(self) -> Any:
        """The wrapped loader's sampler."""
        return self.loader.sampler  # type: ignore[attr-defined]

    @property
    def batch_sampler(self) -> Any:
        """The wrapped loader's batch sampler."""
        return self.loader.batch_sampler  # type: ignore[attr-defined]

    @property
    def drop_last(self) -> Any:
        """Whether the wrapped loader drops its last partial batch."""
        return self.loader.drop_last  # type: ignore[attr-defined]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iterator, here and in the wrapped loader.

        Calls ``set_epoch`` of the loader if it has one, otherwise of its sampler, its batch sampler, the batch sampler's
        sampler and its dataset, those that have one. Without a call each iterator takes the next epoch.

        Raises:
            ArgumentError: If ``epoch`` is negative.
        """
        self._machinery.progress.choose(_whole("epoch", epoch, "Count epochs from 0."))
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(epoch)
            return
        told: list[Any] = []
        for path in ("sampler", "batch_sampler", "batch_sampler.sampler", "dataset"):
            with suppress(AttributeError):
                part = operator.attrgetter(path)(self.loader)
                if hasattr(part, "set_epoch") and not any(part is other for other in told):
                    told.append(part)
        for part in told:
            part.set_epoch(epoch)

    @property
    def state_dict(self) -> Callable[[], dict[str, Any]]:
        """A method, there if the wrapped loader has it: where the training loop is, for a checkpoint.

        The state is that of the batch which was handed over last, whatever has been read ahead: the wrapped loader's own after
        that batch, and what the draws of stages depend on, the seed, the epoch and the batch. Each rank has its own.

        Raises:
            AttributeError: If the wrapped loader has no ``state_dict`` and ``load_state_dict``.
        """
        self._require_state("state_dict")
        return lambda: self._machinery.progress.state(self.seed)

    @property
    def load_state_dict(self) -> Callable[[Mapping[str, Any]], None]:
        """A method, there if the wrapped loader has it: go on from what ``state_dict()`` returned.

        The next iterator begins with the batch after it, and stages draw what they would have drawn. Iterators that are open
        end. A :class:`FeatureStage` runs the first batch of each shape without a graph, as in every iterator.

        Raises:
            AttributeError: If the wrapped loader has no ``state_dict`` and ``load_state_dict``.
            ArgumentError, ArgumentTypeError: When it is called with anything else.
        """
        self._require_state("load_state_dict")
        return self._load_state

    def stats(self) -> Stats:
        """The counters so far. The object is live: copy what is to be kept."""
        return self._machinery.stats

    def close(self) -> None:
        """End iterators that are still open, and a wrapped ``DataLoader``'s persistent workers.

        The loader can be iterated again: workers are then started anew. Also called on leaving a ``with`` block.
        """
        for feed in list(self._feeds):
            feed.close()
        self._machinery.supply.close()
        self._machinery.reclaim()

    def _require_state(self, name: str) -> None:
        # Frameworks look for these two methods, and save in a checkpoint what they find.
        if not is_stateful(self.loader):
            raise AttributeError(
                f"{name} must belong to a loader with a state, got one around {type(self.loader).__name__}, which has none. "
                "Wrap torchdata's StatefulDataLoader."
            )

    def _load_state(self, state: Mapping[str, Any]) -> None:
        for feed in list(self._feeds):
            feed.close()  # what reads a loader must not meet a change of its state
        self.seed = self._machinery.progress.load(state)

    def _begin(self) -> Flight:
        shared = self._machinery
        feed = shared.supply.open(shared.lanes.current_stream)
        self._feeds.add(feed)
        epoch, first = shared.progress.begin()
        rank = seeding.default_rank() if self._rank is None else self._rank
        return Flight(shared, feed, self._bound, Position(self.seed, epoch, rank, first), self.depth)


def _whole(name: str, value: Any, way_out: str) -> int:
    try:
        number = operator.index(value)
    except TypeError as error:
        raise ArgumentTypeError(f"{name} must be a whole number, got {value!r}. {way_out}") from error
    if number < 0:
        raise ArgumentError(f"{name} must be 0 or more, got {value!r}. {way_out}")
    return number
