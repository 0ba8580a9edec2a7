"""``Feed``: source of a loader's batches. They come through the ring, are staged in page-locked slots, or come unchanged.

The ring needs a ``DataLoader`` with worker processes. A copy of the loader is iterated whose collate function writes into
slots; the user's object is not changed. A loader that stores its state in itself cannot be copied: it has that collate function
only while its workers start. While workers of any loader start, it has a ``worker_init_fn`` that makes workers send an error
in place of a batch that they cannot send. Other sources are read on a background thread, which copies their batches into
slots, so that the training thread does not wait for the driver to stage them.
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
from gpuaug.feed.prefetch import FeedIterator, Receive, close_iterations, open_feed_iterator
from gpuaug.feed.resumable import ResumableLoader, Resume, is_resumable
from gpuaug.feed.ring import Ring, default_budget_bytes, why_not_here
from gpuaug.feed.ring_collate import SlotCollate, described_or_not
from gpuaug.feed.ring_memory import MAX_GENERATIONS, Described, Slot, can_be_placed
from gpuaug.feed.stateful import StatefulLoader, begin_graph, is_graph
from gpuaug.feed.unsent import sending_errors
from gpuaug.feed.wrapped_loader import Begin, IteratorAndReader, begin_after, end_workers, has_persistent_workers, iterated_as

FeedMode = Literal["auto", "ring", "plain"]
"""Values of the argument ``feed``."""


class Feed:
    """Source of one loader's batches.

    Args:
        loader: The wrapped loader.
        feed: The user's argument.
        feed_bytes: Limit of the bytes of all slots, or ``None`` for the default.
        device: Device that batches are copied to.
        begin_with: Function called as ``begin_with(begin, loader)`` instead of ``begin(loader)`` to begin an iteration.

    Raises:
        ArgumentError: If ``feed`` has another value, or is ``"ring"`` and the source cannot fill slots.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        feed: FeedMode,
        feed_bytes: int | None,
        device: torch.device,
        begin_with: Callable[[Begin, Any], IteratorAndReader] | None = None,
    ) -> None:
        feed = one_of("feed", feed, ("auto", "ring", "plain"), "Leave it out to have what fits.")
        self._loader = loader
        self._device = device
        self._page_locks = device.type == "cuda"
        self._forced = feed == "ring"
        self._budget = default_budget_bytes() if feed_bytes is None else feed_bytes
        self._begin_with = begin_with
        self.workers = _workers_of(loader)
        self.reason = "as asked" if feed == "plain" else _reason_without_slots(loader, device, forced=feed == "ring")
        """Why batches travel without slots; an empty string if they use slots."""
        if feed == "ring" and self.reason:
            raise ArgumentError(
                f"feed='ring' must be for a source that can fill slots, got one that cannot: {self.reason}. Leave feed out."
            )
        self.resumable = ResumableLoader(loader) if is_resumable(loader) else None
        self.stateful = StatefulLoader(loader) if _keeps_state(loader) else None
        self._process = os.getpid()
        self._parents: Any = None
        """Objects of the parent process, kept alive in a forked process."""
        self._ring: Ring | None = None
        # A list, because every next() iterates over it, and iterating over a WeakSet is slow.
        self._rings: list[weakref.ref[Ring]] = []
        self._loader_copy: Any = None
        """Copy of the wrapped loader that collates into the ring."""
        self._last: weakref.ref[FeedIterator] | None = None
        """The last iteration that used the ring."""
        self._last_ended: threading.Event | None = None
        """Set when the thread and the workers of ``_last`` have ended."""
        # Whether a source without workers page-locks its batches is known only from a batch, by a CUDA call.
        self._staging = _Staging(on=not self._page_locks)
        self._checked_pinning = False

    def __repr__(self) -> str:
        if self.reason:
            return f"plain ({self.reason})"
        return "ring" if self.workers else "staged"

    @property
    def size(self) -> str:
        """Text about the slots and their limit, for the loader's ``repr``. Empty if batches travel without slots."""
        if self.reason:
            return ""
        slots = self._ring.size if self._ring is not None else "no slots yet"
        return f"{slots}, at most {self._budget / 1e6:.1f} MB"

    @property
    def pinned_bytes(self) -> int:
        """Bytes of page-locked memory in slots."""
        rings = [reference() for reference in self._rings]
        return sum(ring.pinned_bytes for ring in rings if ring is not None)

    def open(self, current_stream: Callable[[], Any], depth: int, resume: Resume | None = None) -> FeedIterator:
        """Begin an iteration over the wrapped loader.

        Args:
            current_stream: Function that returns the handle of the calling thread's current stream.
            depth: Largest number of batches to work on ahead. The ring has slots for at least that many.
            resume: Position at which the iteration begins; ``None``: the first batch.

        Raises:
            Exception: Any error of ``iter(loader)``.
            GpuAugError: If ``feed`` is ``"ring"`` and the memory of the ring cannot be allocated.
        """
        open_on = partial(self._open_on, resume, current_stream)
        workers = _workers_of(self._loader)
        if self._process != os.getpid():
            # In a forked process, ring and workers belong to the parent. If the copy of the loader were garbage-collected here,
            # it would end these workers.
            self._parents = (self._parents, self._loader_copy)
            self._process = os.getpid()
            self._loader_copy = self._ring = None
        if workers != self.workers:  # the user has changed it
            self._loader_copy = self._ring = None
            self.workers = workers
        if self.reason:
            return open_on(self._loader)
        last = self._last() if self._last is not None else None
        persistent = has_persistent_workers(self._loader)
        if not persistent and last is not None and last.is_open:
            # The last iteration uses the slots. A second ring would take as much memory again.
            return open_on(self._loader)
        if not persistent and self._last_ended is not None and not self._last_ended.is_set():
            # The last iteration's thread is still inside the loader's next(), and its workers may write into the ring's slots.
            self._ring = None
        slots_per_worker = self._slots_per_worker(depth)
        if self._ring is not None and self._ring.each < slots_per_worker:  # the depth has become larger
            if persistent:
                self._ring.widen(slots_per_worker)  # running workers have mapped the ring's memory
            else:
                self._ring = None
        if self._ring is None:
            self._ring = self._new_ring(slots_per_worker)
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
            keeps_copy = persistent and self._loader_copy is not None
            loader_copy: Any = self._loader_copy if keeps_copy else self._copy_of_loader(self._ring)
            if not persistent or loader_copy._iterator is None:
                self._ring.new_workers()
            self._loader_copy = loader_copy
            feed = open_on(loader_copy, self._ring)
            if persistent:
                # Persistent workers finish their batches before a new epoch, so they no longer write into older slots.
                self._ring.drop_old()
        self._last = weakref.ref(feed)
        self._last_ended = getattr(feed, "gone", None)
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
                begin = partial(begin_graph if is_graph(loader) else begin_after, skip=skip)
            if self._begin_with is not None:
                begin = partial(self._begin_with, begin)
            return open_feed_iterator(loader, current_stream, receive, begin)

    @property
    def has_running_workers(self) -> bool:
        """Whether persistent workers are running."""
        return any(getattr(loader, "_iterator", None) is not None for loader in (self._loader, self._loader_copy))

    def prepare(self, pulled: Pulled) -> None:
        """Page-lock the slot of a batch if it is used for the first time. Call before the copy, on the training thread."""
        if not self._page_locks:
            return
        if pulled.slot is not None:
            pulled.slot.ring.register(pulled.slot)
        elif not self._staging.on and not self._checked_pinning and not self.workers:
            self._checked_pinning = True
            self._staging.on = any(can_be_placed(leaf) and not leaf.is_pinned() for leaf in batches.tensors(pulled.batch))

    def read_until(self, pulled: Pulled, event: Event) -> None:
        """Free the slot of a batch once ``event``, recorded after its copy, has passed."""
        if pulled.slot is not None:
            pulled.slot.ring.read_until(pulled.slot, event)
            pulled.slot = None

    def free_read_slots(self) -> None:
        """Free slots whose copies have ended. Does not wait."""
        for reference in self._rings:
            ring = reference()
            if ring is not None:
                ring.free_read_slots()

    def close(self) -> None:
        """End persistent workers and drop the ring. The next iteration creates new ones."""
        loaders: tuple[Any, ...] = (self._loader, self._loader_copy)
        for loader in loaders:
            if has_persistent_workers(loader):
                close_iterations(loader)
                iterator = loader._iterator
                loader._iterator = None
                end_workers(iterator)
        self._loader_copy = None
        for reference in self._rings:
            ring = reference()
            if ring is not None:
                ring.close()
        self._ring = None

    def _slots_per_worker(self, depth: int) -> int:
        prefetched = (getattr(self._loader, "prefetch_factor", None) or 2) if self.workers else 0
        # In addition to prefetched batches: batches that wait for the training thread or are being copied.
        ahead = QUEUED + depth + 3 + (self._begin_with is not None)
        return int(prefetched + 1 + math.ceil(ahead / max(self.workers, 1)))

    def _new_ring(self, slots_per_worker: int) -> Ring | None:
        try:
            ring = Ring(max(self.workers, 1), slots_per_worker, self._budget)
        except OSError as error:
            self._use_no_ring(error)
            return None
        self._rings = [*(reference for reference in self._rings if reference() is not None), weakref.ref(ring)]
        return ring

    def _use_no_ring(self, error: OSError) -> None:
        """Let batches travel without slots from now on, with a warning.

        Raises:
            GpuAugError: Instead of the warning, if ``feed`` is ``"ring"``.
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
        loader_copy = copy.copy(self._loader)
        assert isinstance(loader_copy, DataLoader)
        loader_copy._iterator = None
        loader_copy.pin_memory = False
        loader_copy.collate_fn = SlotCollate(loader_copy.collate_fn, ring.memory)
        return loader_copy


class _Staging:
    """Flag whether batches of a source without workers are copied into slots. An object, shared with the feed's thread."""

    def __init__(self, *, on: bool) -> None:
        self.on = on


# The following functions run on the feed's thread, which makes no CUDA calls. They keep the ring of their iteration, even if
# the loader creates another ring.


def _received(ring: Ring, device: torch.device, batch: Batch) -> tuple[Batch, Slot | None]:
    """(batch, slot) of a batch that arrived from a worker. The slot is ``None`` if the batch came without one."""
    if type(batch) is not Described:
        ring.make_room(batch)
        return batch, None
    complete = not any(can_be_placed(leaf) for leaf in batches.leaves(batch.batch))
    received, slot = ring.received(batch)
    if not complete:
        ring.make_room(received)
    return _for_device(device, received, slot)


def _staged(staging: _Staging, ring: Ring, device: torch.device, batch: Batch) -> tuple[Batch, Slot | None]:
    """(batch, slot) of a batch of a source without workers, copied into a slot if one is free."""
    writer = ring.memory.take(0) if staging.on and ring.make_room(batch) else None
    if writer is None:
        return batch, None
    try:
        described = described_or_not(batch, writer)
    except BaseException:
        writer.free()
        raise
    return _for_device(device, *ring.received(described)) if type(described) is Described else (batch, None)


def _for_device(device: torch.device, batch: Batch, slot: Slot) -> tuple[Batch, Slot | None]:
    if device.type == "cuda":
        return batch, slot
    # On a CPU there is no copy lane, so tensors are cloned: those handed over must not be in the slot.
    return batches.map_leaves(batches.cached_by_id(_cloned), batch), slot


def _workers_of(loader: Any) -> int:
    return loader.num_workers if isinstance(loader, DataLoader) else 0


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if can_be_placed(leaf) else leaf


def _reason_without_slots(loader: Any, device: torch.device, *, forced: bool) -> str:
    """Why batches cannot travel in slots, or an empty string."""
    unsupported = why_not_here()
    if unsupported is not None:
        return unsupported
    if device.type != "cuda" and not forced:
        return f"the device is {device.type}"
    if device.type not in ("cuda", "cpu"):
        return f"the device is {device.type}"
    if type(loader) in {list, tuple}:
        return "a list's batches are in memory already"
    if not isinstance(loader, DataLoader):
        return ""
    if not (iterated_as(loader, DataLoader) or _keeps_state(loader)):
        return f"{type(loader).__name__} overrides how a DataLoader is iterated"
    if not loader.num_workers and loader.pin_memory:
        return "the loader page-locks its batches itself"
    if _keeps_state(loader):
        return "its persistent workers hold its state" if loader.persistent_workers else ""
    if loader.num_workers and loader._iterator is not None:
        return "the loader's workers are running already"
    return ""


def _keeps_state(loader: Any) -> bool:
    """Whether ``loader`` is torchdata's ``StatefulDataLoader``, which stores its iterator, and thereby its state, in itself."""
    cls = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", None)
    return cls is not None and isinstance(loader, cls) and iterated_as(loader, cls)


@contextmanager
def _collating_into(ring: Ring, loader: Any) -> Iterator[None]:
    """Context manager in which workers that ``loader`` starts collate into the ring. Restores the loader at its end."""
    user_attributes = {name: getattr(loader, name) for name in ("collate_fn", "pin_memory")}
    try:
        loader.collate_fn = SlotCollate(loader.collate_fn, ring.memory)
        loader.pin_memory = False
        yield
    finally:
        for name, value in user_attributes.items():
            setattr(loader, name, value)
