"""From the wrapped loader to the copy lane: through the ring, staged in page-locked slots, or as the loader gives them.

The ring takes a ``DataLoader`` with worker processes. It is iterated through a copy of the loader whose collate function writes
into slots; the user's object is not changed. A loader that keeps its state in itself has to be iterated itself: it is given
that function while its workers start. While those of any loader start it has a ``worker_init_fn`` that has them send the error
of what they cannot send. Other sources are read in the background, and their batches copied into slots there, so that the
training thread does not wait for the driver to stage them.
"""

import copy
import errno
import math
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentError, GpuAugError, GpuAugWarning, one_of
from gpuaug.core.streams import Event
from gpuaug.feed.mailbox import QUEUED, Pulled
from gpuaug.feed.prefetch import FeedIterator, Receive, close_passes, open_feed_iterator
from gpuaug.feed.resumable import ResumableLoader, Resume, is_resumable
from gpuaug.feed.ring import Ring, default_budget_bytes, why_not_here
from gpuaug.feed.ring_collate import SlotCollate, described_or_not
from gpuaug.feed.ring_memory import MAX_GENERATIONS, Described, Slot, can_be_placed
from gpuaug.feed.stateful import StatefulLoader, begin_graph, is_graph
from gpuaug.feed.unsent import sending_errors
from gpuaug.feed.wrapped_loader import Begin, Begun, begin_later, end_workers, has_persistent_workers, iterated_as

Kind = Literal["auto", "ring", "plain"]


class Feed:
    """The source of one loader's batches.

    Args:
        loader: The wrapped loader.
        feed: The user's argument.
        feed_bytes: The budget of all slots together, or ``None`` for the default.
        device: Where batches go.
        begin_with: Begins a pass in place of ``begin(loader)``, given ``begin`` and ``loader``.

    Raises:
        ArgumentError: If ``feed`` is none of its values, or ``"ring"`` where that cannot be.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        feed: Kind,
        feed_bytes: int | None,
        device: torch.device,
        begin_with: Callable[[Begin, Any], Begun] | None = None,
    ) -> None:
        feed = one_of("feed", feed, ("auto", "ring", "plain"), "Leave it out to have what fits.")
        self._loader = loader
        self._device = device
        self._page_locks = device.type == "cuda"
        self._forced = feed == "ring"
        self._budget = default_budget_bytes() if feed_bytes is None else feed_bytes
        self._begin_with = begin_with
        self.workers = _workers_of(loader)
        self.reason = "as asked" if feed == "plain" else _why_not(loader, device, forced=feed == "ring")
        if feed == "ring" and self.reason:
            raise ArgumentError(
                f"feed='ring' must be for a source that can fill slots, got one that cannot: {self.reason}. Leave feed out."
            )
        self.resumable = ResumableLoader(loader) if is_resumable(loader) else None
        self.stateful = StatefulLoader(loader) if _keeps_state(loader) else None
        self._process = os.getpid()
        self._parents: Any = None
        self._ring: Ring | None = None
        # Not a WeakSet, which is iterated over in Python: every next() goes over these.
        self._rings: list[weakref.ref[Ring]] = []
        self._twin: Any = None
        # Of the last iteration that had the ring.
        self._feed: weakref.ref[FeedIterator] | None = None
        self._gone: threading.Event | None = None
        # Without workers, whether the source's memory is page-locked already can only be seen in a batch, by a CUDA call.
        self._staging = _Staging(on=not self._page_locks)
        self._looked = False

    def __repr__(self) -> str:
        if self.reason:
            return f"plain ({self.reason})"
        return "ring" if self.workers else "staged"

    @property
    def size(self) -> str:
        """Slots and their limit, for the loader's ``repr``. Empty where there can be none."""
        if self.reason:
            return ""
        slots = self._ring.size if self._ring is not None else "no slots yet"
        return f"{slots}, at most {self._budget / 1e6:.1f} MB"

    @property
    def pinned_bytes(self) -> int:
        """Bytes of slots that are page-locked."""
        rings = [reference() for reference in self._rings]
        return sum(ring.pinned_bytes for ring in rings if ring is not None)

    def open(self, current_stream: Callable[[], Any], depth: int, resume: Resume | None = None) -> FeedIterator:
        """Begin a pass over the loader.

        Args:
            current_stream: Says which stream is current on the thread that calls it.
            depth: How many batches are worked on ahead, at most. The ring has slots for that many, or for more.
            resume: Where the pass begins, if not at the first batch.

        Raises:
            Exception: Whatever ``iter(loader)`` raises.
            GpuAugError: If ``feed`` is ``"ring"`` and its memory cannot be had.
        """
        open_on = partial(self._open_on, resume, current_stream)
        workers = _workers_of(self._loader)
        if self._process != os.getpid():
            # In a forked process ring and workers are the parent's. Collected here, the twin would end these workers.
            self._parents = (self._parents, self._twin)
            self._process = os.getpid()
            self._twin = self._ring = None
        if workers != self.workers:  # the user has changed it
            self._twin = self._ring = None
            self.workers = workers
        if self.reason:
            return open_on(self._loader)
        last = self._feed() if self._feed is not None else None
        persistent = has_persistent_workers(self._loader)
        if not persistent and last is not None and last.is_open:
            # It owns the slots; another ring beside it would take as much memory again.
            return open_on(self._loader)
        if not persistent and self._gone is not None and not self._gone.is_set():
            # A slow loader that is still inside next() may write into its slots. They go when it returns.
            self._ring = None
        each = self._slots_of_a_worker(depth)
        if self._ring is not None and self._ring.each < each:  # the depth has become larger
            if persistent:
                self._ring.widen(each)  # workers that run have its memory
            else:
                self._ring = None
        if self._ring is None:
            self._ring = self._new_ring(each)
        if self._ring is None:
            return open_on(self._loader)
        self._ring.enlarge()
        if not workers:
            self._ring.new_workers()
            feed = open_on(self._loader, self._ring)
        elif _keeps_state(self._loader):
            self._ring.new_workers()
            with _collating_into(self._ring, self._loader):
                feed = open_on(self._loader, self._ring)
        else:
            twin: Any = self._twin if persistent and self._twin is not None else self._copy_of_loader(self._ring)
            if not persistent or twin._iterator is None:
                self._ring.new_workers()
            self._twin = twin
            feed = open_on(twin, self._ring)
            if persistent:
                # Before workers begin an epoch anew they finish their batches, so older slots are not written any more.
                self._ring.drop_old()
        self._feed = weakref.ref(feed)
        self._gone = getattr(feed, "gone", None)
        return feed

    def _open_on(
        self, resume: Resume | None, current_stream: Callable[[], Any], loader: Any, ring: Ring | None = None
    ) -> FeedIterator:
        receive: Receive | None = None
        if ring is not None:
            receive = partial(_received if self.workers else partial(_staged, self._staging), ring, self._device)
        keeps_state = _keeps_state(loader)
        starts_workers = self.workers and (keeps_state or iterated_as(loader, DataLoader))
        memory = ring.memory if ring is not None else None
        with sending_errors(loader, keeps_state, memory) if starts_workers else nullcontext():
            skip = 0 if resume is None else resume.batches
            if self.resumable is not None:
                begin: Begin = partial(self.resumable.begin, resume=resume)
            elif self.stateful is not None:
                begin = partial(self.stateful.begin, skip=skip)
            else:
                begin = partial(begin_graph if is_graph(loader) else begin_later, skip=skip)
            if self._begin_with is not None:
                begin = partial(self._begin_with, begin)
            return open_feed_iterator(loader, current_stream, receive, begin)

    @property
    def has_running_workers(self) -> bool:
        """Whether persistent workers are running."""
        return any(getattr(loader, "_iterator", None) is not None for loader in (self._loader, self._twin))

    def prepare(self, pulled: Pulled) -> None:
        """Page-lock the slot of a batch if it is used for the first time. Called before the copy, on the training thread."""
        if not self._page_locks:
            return
        if pulled.slot is not None:
            pulled.slot.ring.register(pulled.slot)
        elif not self._staging.on and not self._looked and not self.workers:
            self._looked = True
            self._staging.on = any(can_be_placed(leaf) and not leaf.is_pinned() for leaf in batches.tensors(pulled.batch))

    def read_until(self, pulled: Pulled, event: Event) -> None:
        """Free the slot of a batch once ``event``, recorded after its copy, has passed."""
        if pulled.slot is not None:
            pulled.slot.ring.read_until(pulled.slot, event)
            pulled.slot = None

    def free_read_slots(self) -> None:
        """Free the slots whose copies have ended. Does not wait."""
        for reference in self._rings:
            ring = reference()
            if ring is not None:
                ring.free_read_slots()

    def close(self) -> None:
        """End persistent workers and drop the ring. The next iteration makes them anew."""
        loaders: tuple[Any, ...] = (self._loader, self._twin)
        for loader in loaders:
            if has_persistent_workers(loader):
                close_passes(loader)
                # as DataLoader itself holds them
                iterator = loader._iterator
                loader._iterator = None
                end_workers(iterator)
        self._twin = None
        for reference in self._rings:
            ring = reference()
            if ring is not None:
                ring.close()
        self._ring = None

    def _slots_of_a_worker(self, depth: int) -> int:
        prefetched = (getattr(self._loader, "prefetch_factor", None) or 2) if self.workers else 0
        # Besides batches that a worker has ready: batches that wait for the training thread or are being copied.
        ahead = QUEUED + depth + 3 + (self._begin_with is not None)
        return int(prefetched + 1 + math.ceil(ahead / max(self.workers, 1)))

    def _new_ring(self, each: int) -> Ring | None:
        try:
            ring = Ring(max(self.workers, 1), each, self._budget)
        except OSError as error:
            self._go_on_without_ring(error)
            return None
        self._rings = [*(each for each in self._rings if each() is not None), weakref.ref(ring)]
        return ring

    def _go_on_without_ring(self, error: OSError) -> None:
        """Warn that batches travel without slots, from now on.

        Raises:
            GpuAugError: In place of the warning, if the user insists on slots.
        """
        why = f"{MAX_GENERATIONS * self._budget / 1e6:.1f} MB, {MAX_GENERATIONS} times feed_bytes, cannot be mapped ({error})"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            way_out = "Raise the limit of open files: ulimit -n."
        else:
            way_out = "Lower feed_bytes, or raise the limits of the process: ulimit -v and ulimit -f."
        if self._forced:
            raise GpuAugError(f"The ring cannot be made, because {why}. {way_out}") from error
        self.reason = f"its memory cannot be had here: {error}"
        warnings.warn(
            f"Batches travel without page-locked slots, which is slower, because {why}. {way_out}", GpuAugWarning, stacklevel=2
        )

    def _copy_of_loader(self, ring: Ring) -> Any:
        twin = copy.copy(self._loader)
        assert isinstance(twin, DataLoader)
        twin._iterator = None
        twin.pin_memory = False
        twin.collate_fn = SlotCollate(twin.collate_fn, ring.memory)
        return twin


class _Staging:
    """Whether batches of a source without workers are copied into slots."""

    def __init__(self, *, on: bool) -> None:
        self.on = on


# These run on the feed's thread, which makes no CUDA calls. Each keeps the ring of its pass, also if the loader makes another.


def _received(ring: Ring, device: torch.device, batch: Batch) -> tuple[Batch, Slot | None]:
    """A worker's batch, and its slot if it has one."""
    if type(batch) is not Described:
        ring.make_room(batch)
        return batch, None
    whole = not any(can_be_placed(leaf) for leaf in batches.leaves(batch.batch))
    found, slot = ring.received(batch)
    if not whole:
        ring.make_room(found)
    return _for_device(device, found, slot)


def _staged(staging: _Staging, ring: Ring, device: torch.device, batch: Batch) -> tuple[Batch, Slot | None]:
    """A batch of a source without workers, in a slot if there is a free one."""
    writer = ring.memory.take(0) if staging.on and ring.make_room(batch) else None
    if writer is None:
        return batch, None
    try:
        described = described_or_not(batch, writer)
    except BaseException:
        writer.give_back()
        raise
    return _for_device(device, *ring.received(described)) if type(described) is Described else (batch, None)


def _for_device(device: torch.device, batch: Batch, slot: Slot) -> tuple[Batch, Slot | None]:
    if device.type == "cuda":
        return batch, slot
    # On a CPU there is no copy, so the tensors that are handed over must not lie in the slot.
    return batches.map_leaves(batches.cached_by_id(_cloned), batch), slot


def _workers_of(loader: Any) -> int:
    return loader.num_workers if isinstance(loader, DataLoader) else 0


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if can_be_placed(leaf) else leaf


def _why_not(loader: Any, device: torch.device, *, forced: bool) -> str:
    """Why batches travel as they are, or an empty string."""
    here = why_not_here()
    if here is not None:
        return here
    if device.type != "cuda" and not forced:
        return f"the device is {device.type}"
    if device.type not in ("cuda", "cpu"):
        return f"the device is {device.type}"
    if type(loader) in {list, tuple}:
        return "a list's batches are all there"
    if not isinstance(loader, DataLoader):
        return ""
    if not (iterated_as(loader, DataLoader) or _keeps_state(loader)):
        return f"{type(loader).__name__} is iterated in a way of its own"
    if not loader.num_workers and loader.pin_memory:
        return "the loader page-locks its batches itself"
    if _keeps_state(loader):
        return "its workers persist, and so does its state in them" if loader.persistent_workers else ""
    if loader.num_workers and loader._iterator is not None:
        return "the loader's workers are running already"
    return ""


def _keeps_state(loader: Any) -> bool:
    """Whether it is torchdata's ``StatefulDataLoader``, which keeps its state in its iterator, and the iterator in itself."""
    kind = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", None)
    return kind is not None and isinstance(loader, kind) and iterated_as(loader, kind)


@contextmanager
def _collating_into(ring: Ring, loader: Any) -> Iterator[None]:
    """Have the workers that ``loader`` starts meanwhile collate into the ring. Afterwards it is as it was."""
    own = {name: getattr(loader, name) for name in ("collate_fn", "pin_memory")}
    try:
        loader.collate_fn = SlotCollate(loader.collate_fn, ring.memory)
        loader.pin_memory = False
        yield
    finally:
        for name, value in own.items():
            setattr(loader, name, value)
