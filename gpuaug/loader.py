"""``StreamedLoader``: batches that are on the device, transformed and encoded, when the training loop asks for them."""

import operator
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Self

import torch

from gpuaug import batch as batches
from gpuaug import seeding, stages, streams
from gpuaug.batch import Batch
from gpuaug.copying import Copier
from gpuaug.counters import Stats
from gpuaug.errors import ArgumentError, ArgumentTypeError
from gpuaug.feed import Feed, Pulled
from gpuaug.progress import Progress, is_stateful
from gpuaug.seeding import Position
from gpuaug.streams import Lane, Lanes, Mark, Pace, span
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
        self._lanes = Lanes(streams.resolve(device))
        self._copier = Copier(self._lanes.device)
        self._progress = Progress(loader)
        self._stats = Stats()
        self._pace = Pace()
        self._launching = threading.Lock()
        self._feeds: weakref.WeakSet[Feed] = weakref.WeakSet()
        budget = None if feed_bytes is None else _whole("feed_bytes", feed_bytes, "Leave it out for an eighth of the memory.")
        self._supply = Supply(loader, feed, budget, self._lanes.device, self.depth)
        self._copier.warns = bool(self._supply.reason)
        self.stages = stages

    def __iter__(self) -> Iterator[Batch]:
        # A generator: nothing starts before the first next(), and frameworks call iter() more often than they iterate.
        with closing(_Flight(self, self._open_feed(), *self._progress.begin())) as flight:
            while True:
                consumer = self._lanes.consumer()  # the stream that is current now, on this thread
                flight.catch_up(consumer)
                if not flight.waiting:
                    flight.end()
                    return
                yield flight.hand_over(consumer)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        names = ", ".join(f"{bound.name}={stage!r}" for bound, stage in zip(self._bound, self._stages, strict=True))
        settings = f"device={self.device}, depth={self.depth}, feed={self._supply!r}"
        return f"StreamedLoader({type(self.loader).__name__}, stages=[{names}], {settings})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        return self._lanes.device

    @property
    def stages(self) -> tuple[stages.Stage, ...]:
        """What is done to a batch after its copy. Assign a new sequence between epochs to change it."""
        return self._stages

    @stages.setter
    def stages(self, value: Sequence[Any]) -> None:
        new = tuple(stages.as_stages(value))
        self._bound = stages.bind_all(new, self._lanes)
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
        self._progress.choose(_whole("epoch", epoch, "Count epochs from 0."))
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
        return lambda: self._progress.state(self.seed)

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
        return self._stats

    def close(self) -> None:
        """End iterators that are still open, and a wrapped ``DataLoader``'s persistent workers.

        The loader can be iterated again: workers are then started anew. Also called on leaving a ``with`` block.
        """
        for feed in list(self._feeds):
            feed.close()
        self._supply.close()
        self._reclaim()

    def _reclaim(self) -> None:
        """Drop intermediates of batches that nobody waits for any more."""
        # An abandoned iterator is closed wherever the garbage collector runs, in the middle of a launch too. The lane that is
        # being launched on has not waited for what would be dropped here; the next launch does it in its place.
        if self._launching.acquire(blocking=False):
            try:
                self._lanes.reclaim(keep=0)
            finally:
                self._launching.release()

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
        self.seed = self._progress.load(state)

    def _open_feed(self) -> Feed:
        feed = self._supply.open(self._lanes.current_stream)
        self._feeds.add(feed)
        return feed


@dataclass(slots=True)
class _Launched:
    """A batch whose work has been queued, or the error that stands in its place."""

    batch: Batch = None
    ready: Mark | None = None
    resident: Sequence[torch.Tensor] = ()
    source: Lane | None = None
    """Where objects were made that came to us on the device, and whose tensors cannot be seen."""
    error: BaseException | None = None
    state: Any = None
    """The wrapped loader's, after this batch."""


class _Flight:
    """The batches of one iterator between the wrapped loader and the training loop."""

    def __init__(self, loader: StreamedLoader, feed: Feed, epoch: int, first: int) -> None:
        self._loader = loader
        self._lanes: Lanes = loader._lanes
        self._bound = loader._bound
        self._feed = feed
        self._rank = seeding.default_rank() if loader._rank is None else loader._rank
        self._epoch = epoch
        self._index = first
        self._handed_over = first
        loader._progress.handed_over(epoch, first, feed.state_at_start)
        self._ended = False
        self._state_at_end: Any = None
        self._memory: dict[str, Any] = {}
        self.waiting: deque[_Launched] = deque()
        # In line there is nothing to overlap with: launching ahead would only put off the batch that is wanted.
        self._most = 1 if self._lanes.in_line else loader.depth + 1

    def catch_up(self, consumer: Lane) -> None:
        """Queue work until ``depth`` batches follow the next one, as far as the wrapped loader has batches now.

        Blocks only when there is nothing to hand over.
        """
        stats = self._loader._stats
        self._loader._supply.collect()
        done = consumer.mark()
        waited_s = self._loader._pace.keep(done, ahead=self._loader.depth + 2)
        if waited_s is not None:
            stats.held_back += 1
            stats.held_back_ms += waited_s * 1e3
        ordered = False
        while len(self.waiting) < self._most and not self._ended:
            pulled = self._feed.get(block=False)
            if pulled is None:
                if self.waiting:
                    return
                start = time.perf_counter()
                with span("gpuaug/pull"):
                    pulled = self._feed.get(block=True)
                stats.starved += 1
                stats.starved_ms += (time.perf_counter() - start) * 1e3
            assert pulled is not None
            self._ended = pulled.ended
            self._state_at_end = pulled.state
            if pulled.error is not None:
                pulled.error.add_note(f"gpuaug: raised by the wrapped loader, at batch {self._index} of epoch {self._epoch}.")
                self.waiting.append(_Launched(error=pulled.error))
            elif not pulled.ended:
                with self._loader._launching:
                    if not ordered:
                        self._lanes.wait_for_consumers(consumer, done)
                        ordered = True
                    with self._lanes.launching(consumer):
                        self._launch(pulled)
                self._index += 1

    def hand_over(self, consumer: Lane) -> Batch:
        """The next batch, which ``consumer`` waits for on the device; or the error in its place."""
        launched = self.waiting.popleft()
        if launched.error is not None:
            self._ended = True
            try:
                raise launched.error
            finally:
                del launched  # or the error would hold itself through its traceback, and the batch with it
        assert launched.ready is not None
        with span("gpuaug/wait"):
            self._lanes.hand_over(launched.ready, consumer)
        for tensor in launched.resident:
            consumer.reads(tensor)
        if launched.source is not None:
            launched.source.wait(launched.ready)
        self._loader._stats.batches += 1
        self._handed_over += 1
        self._loader._progress.handed_over(self._epoch, self._handed_over, launched.state)
        self._feed.refill()
        return launched.batch

    def end(self) -> None:
        """All batches have been handed over, and no more is asked for."""
        self._loader._progress.ended(self._epoch, self._handed_over, self._state_at_end)

    def close(self) -> None:
        self._feed.close()
        for launched in self.waiting:  # they will not be handed over, and are dropped while lanes may still be reading them
            if launched.source is not None and launched.ready is not None:
                launched.source.wait(launched.ready)
        self.waiting.clear()
        self._loader._reclaim()

    def _launch(self, pulled: Pulled) -> None:
        position = Position(self._loader.seed, self._epoch, self._rank, self._index)
        read_by_stages: list[Any] = []
        lane, doing, source, end = self._lanes.copy, "its copy", None, None
        try:
            self._lanes.reclaim()
            lane.make_current()
            self._loader._supply.prepare(pulled)
            if pulled.slot is not None:
                self._loader._stats.slot_batches += 1
            else:
                self._loader._stats.other_batches += 1
            with span("gpuaug/copy"):
                copied = self._loader._copier.copy(pulled.batch)
            if copied.resident or copied.resident_objects:
                followed = self._lanes.follow(pulled.stream)
                source = followed if copied.resident_objects else None
            batch, ready = copied.batch, lane.mark()
            self._loader._supply.read_until(pulled, ready)
            for bound in self._bound:
                doing = f"stage {bound.name!r}"
                with span(f"gpuaug/stage/{bound.name}"):
                    values = bound.read(batch)
                    read_by_stages.extend(_parts(values))
                    bound.lane.wait(ready)
                    lane = bound.lane  # from here on its mark covers all that was done for this batch
                    for tensor in copied.resident:
                        lane.reads(tensor)
                    result = bound.run(values, ready, position, self._memory)
                    ready = lane.mark()
                    batch = bound.write(batch, result)
            self._loader._stats.copied_bytes += copied.num_bytes
            end = ready
            self.waiting.append(_Launched(batch, ready, copied.resident, source, state=pulled.state))
        except Exception as error:
            # It is raised at its own batch, after those before it have been handed over.
            error.add_note(f"gpuaug: raised in {doing}, at batch {self._index} of epoch {self._epoch}.")
            self.waiting.append(_Launched(error=error))
            self._ended = True
        finally:
            if end is None:  # an error or an interrupt, after which the lane may hold work that is not marked
                end = lane.mark()
                self._loader._supply.read_until(pulled, end)
                if source is not None:
                    source.wait(end)
            if read_by_stages:
                self._lanes.retire(read_by_stages, end)


def _parts(values: tuple[Any, ...]) -> Iterator[Any]:
    """What has to be kept while a stage reads ``values``: not containers, whose members a transform may exchange."""
    for leaf in batches.leaves(values):
        yield leaf
        if type(leaf) is not torch.Tensor and batches.moves_itself(leaf):
            yield batches.members(leaf)


def _whole(name: str, value: Any, way_out: str) -> int:
    try:
        number = operator.index(value)
    except TypeError as error:
        raise ArgumentTypeError(f"{name} must be a whole number, got {value!r}. {way_out}") from error
    if number < 0:
        raise ArgumentError(f"{name} must be 0 or more, got {value!r}. {way_out}")
    return number
