"""``Feed``: source of a loader's batches, which arrive in *slots* of a *ring*, or as the wrapped loader returns them.

The ring is shared, page-locked memory, divided into slots for one batch each. Slots that were added together are a
*generation*. A worker process of a ``DataLoader`` writes a batch into a slot, and sends a *description* of the batch: the slot,
and the positions of the tensors in it. The training process unpickles the description to a batch whose tensors share the memory
of the slot. The slot is in use until all these tensors have been deleted, so a loader that overrides the iteration may keep
batches. In place of a batch that cannot be sent, a worker sends an error (``gpuaug.feed.worker``).

To start workers that collate into slots and send errors, the feed iterates a *proxy* of the user's loader. The proxy shares
the attributes of the loader, except those from which workers are started, such as ``collate_fn``. Persistent workers that write
into slots belong to the feed: their iterator is an attribute of the proxy.

A source without workers is read on a background thread. If the first batch is not page-locked, this thread copies the later
batches into slots (*staging*): without staging, the training thread would wait for the driver to copy from pageable memory.
"""

import errno
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentError, GpuAugError, one_of, warn
from gpuaug.core.streams import Event, spare_forked_children
from gpuaug.feed.mailbox import QUEUED, Pulled
from gpuaug.feed.prefetch import FeedIterator, Receive, iterations_of, open_feed_iterator
from gpuaug.feed.ring import Ring, Slots, default_budget_bytes, unsupported_reason
from gpuaug.feed.ring_memory import MAX_GENERATIONS, can_be_stored, cloned, reads_for_feed
from gpuaug.feed.shared_storage import sending_memfd
from gpuaug.feed.stateful import keeps_state, sends_states, source_of
from gpuaug.feed.worker import SendsErrors, SlotCollate, opened_files
from gpuaug.feed.wrapped_loader import (
    FIRST_BATCH,
    BeginFunction,
    IteratorAndReader,
    Start,
    end_workers,
    has_persistent_workers,
    has_running_workers,
    proxy_of,
    runs_workers,
    uses_iteration_of,
    worker_context,
)

FeedMode = Literal["auto", "ring", "plain"]
"""Values of the argument ``feed``."""


class Feed:
    """Source of one loader's batches.

    Args:
        loader: The wrapped loader.
        feed: The user's argument ``feed`` of ``StreamedLoader``.
        feed_bytes: Limit of the bytes of all slots, or ``None`` for the default.
        device: Device that batches are copied to.
        begin_with: Function that is called as ``begin_with(begin, loader)`` in place of ``begin(loader)``, where ``begin``
            begins an iteration; ``None`` to call ``begin(loader)``.

    Raises:
        ArgumentError: If ``feed`` has an invalid value, or is ``"ring"`` and batches of the source cannot be written into
        slots.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        feed: FeedMode,
        feed_bytes: int | None,
        device: torch.device,
        begin_with: Callable[[BeginFunction, Any], IteratorAndReader] | None = None,
    ) -> None:
        feed = one_of("feed", feed, ("auto", "ring", "plain"), "Leave it out to use the ring where possible.")
        self.loader: Any = loader
        """The wrapped loader."""
        self._uses_cuda = device.type == "cuda"
        self._requires_ring = feed == "ring"
        self._budget_bytes = default_budget_bytes() if feed_bytes is None else feed_bytes
        self._begin_with = begin_with
        self.workers = _workers_of(loader)
        """Number of worker processes of the wrapped loader; 0 without workers."""
        self.reason = "as asked" if feed == "plain" else _reason_without_slots(loader, device, requires_ring=feed == "ring")
        """Reason why batches travel without slots; an empty string if they use slots."""
        if feed == "ring" and self.reason:
            raise ArgumentError(f"feed must be 'auto' or 'plain' here, got 'ring', but {self.reason}. Leave feed out.")
        self.source = source_of(loader)
        """Adapter of the wrapped loader, which begins and resumes its epochs."""
        self._process = os.getpid()
        self._objects_of_parent: Any = None
        """Objects of the parent process, kept alive in a forked process."""
        self._ring: Ring | None = None
        # Rings that have not been deleted. A list, because every next() iterates over it, and iterating over a WeakSet is slow.
        self._rings: list[weakref.ref[Ring]] = []
        self._proxy: Any = None
        """Proxy of the wrapped loader, which is iterated if the wrapped loader has workers; ``None`` before the first epoch."""
        self._last_iteration: weakref.ref[FeedIterator] | None = None
        """The last iteration that used the ring."""
        self._last_thread: threading.Thread | None = None
        """Thread of the last iteration that used the ring."""
        self._staging = threading.Event()
        """Event that is set if batches of a source without workers are copied into slots. The background thread reads it."""
        if not self._uses_cuda:
            self._staging.set()  # on CUDA, ``prepare`` sets the event if the first batch is not page-locked
        self._checked_pinning = False
        """Whether ``prepare`` has checked if the first batch of a source without workers is page-locked."""

    def __repr__(self) -> str:
        if self.reason:
            return f"plain ({self.reason})"
        return "ring" if self.workers else "staged"

    @property
    def size_text(self) -> str:
        """Text for the loader's ``repr``: number, size and limit of the slots; empty if batches use no slots."""
        if self.reason:
            return ""
        slots = self._ring.size_text if self._ring is not None else "no slots yet"
        return f"{slots}, at most {self._budget_bytes / 1e6:.1f} MB"

    @property
    def pinned_bytes(self) -> int:
        """Bytes of page-locked memory in slots."""
        return sum(ring.pinned_bytes for ring in self._living_rings())

    def open(self, current_stream: Callable[[], Any], depth: int, start: Start = FIRST_BATCH) -> FeedIterator:
        """Begin an iteration over the wrapped loader.

        Args:
            current_stream: Function that returns the handle of the calling thread's current stream.
            depth: Maximum number of batches to work on ahead. The ring has slots for at least this number of batches.
            start: Start of the iteration.

        Raises:
            Exception: Any error of ``iter(loader)``.
            GpuAugError: If ``feed`` is ``"ring"`` and the memory of the ring cannot be allocated.
        """
        spare_forked_children()  # from the deletion of CUDA objects, before this iteration starts workers
        workers = _workers_of(self.loader)
        if self._process != os.getpid():
            # In a forked process, the ring and the workers belong to the parent. Deleting the proxy would end the workers.
            self._objects_of_parent = (self._objects_of_parent, self._proxy)
            self._process = os.getpid()
            self._proxy = self._ring = None
        if workers != self.workers:  # the user has changed num_workers
            self._proxy = self._ring = None
            self.workers = workers
        ring = None if self.reason else self._ring_for(self._slots_per_worker(depth))
        if ring is not None and not ring.has_writers:
            ring.free_slots_of_ended_workers()
        begin: BeginFunction = partial(self.source.begin, start=start)
        if self._begin_with is not None:
            begin = partial(self._begin_with, begin)
        receive: Receive | None = None  # converts what the loader returns to (batch, slots)
        if ring is not None:
            receive = ring.receive if workers else partial(_receive_staged, self._staging, ring)
            receive = receive if self._uses_cuda else partial(_receive_copy, receive)
        token = reads_for_feed.set(True)  # for this thread, in which ``iter`` may read batches, and for the background thread
        try:
            iteration = open_feed_iterator(self._iterated_loader(ring), current_stream, receive, begin)
        finally:
            reads_for_feed.reset(token)
        # ``draws_ahead`` records random numbers that the sampler draws while the feed reads it ahead: a new object for this
        # iteration, if the source reads a sampler. A loop of Accelerate (``begin_with``) reads one batch ahead, too, so one
        # item more counts as read before the first ``next``.
        iteration.draws_ahead = self.source.draws_ahead
        iteration.draws_ahead.items_before_first += self._begin_with is not None
        if ring is not None:
            if self._ring_iterator is not None and not _overrides_iteration(self.loader):
                # Persistent workers have finished the batches of the last epoch, so they write into the newest slots only.
                ring.release_old_generations()
            self._last_iteration = weakref.ref(iteration)
            self._last_thread = getattr(iteration, "thread", None)
        return iteration

    def _ring_for(self, slots_per_worker: int) -> Ring | None:
        """Return the ring for an iteration that begins now; ``None`` if its batches arrive without slots."""
        if not has_persistent_workers(self.loader):
            last = self._last_iteration() if self._last_iteration is not None else None
            if last is not None and last.end_message is None:
                return None  # the last iteration is open and uses the slots, and a second ring would double the memory
            # The thread of the last iteration may still be inside the loader's next(), and it or workers may write into slots.
            is_written = self._last_thread is not None and self._last_thread.is_alive()
            # A ring is replaced after an increase of ``depth``, but not the ring that persistent workers have mapped.
            if is_written or (self._ring is not None and self._ring.slots_per_worker < slots_per_worker):
                self._ring = None
        if self._ring is None:
            try:
                self._ring = Ring(max(self.workers, 1), slots_per_worker, self._budget_bytes)
                self._rings = [*map(weakref.ref, self._living_rings()), weakref.ref(self._ring)]
            except OSError as error:  # its memory cannot be allocated
                self._disable_ring(error)
        if self._ring is not None:
            self._ring.add_slots(slots_per_worker)
        return self._ring

    def _iterated_loader(self, ring: Ring | None) -> Any:
        """Return the object to iterate: with workers, the proxy of the wrapped loader, whose workers collate into ``ring``."""
        if not self.workers:
            return self.loader
        if self._proxy is None:
            owns_workers = ring is not None and self.loader.persistent_workers
            self._proxy = proxy_of(self.loader, _get_iterator=None, **({"_iterator": None} if owns_workers else {}))
        self._proxy._get_iterator = partial(_start_workers, self.loader, ring)
        return self._proxy

    @property
    def _ring_iterator(self) -> Any:
        """Iterator of the wrapped loader whose persistent workers collate into the ring; ``None`` if none are running."""
        # Other proxies have no ``_iterator`` of their own: they share the attribute of the user's loader.
        return self._proxy._iterator if self._proxy is not None and "_iterator" in type(self._proxy).__slots__ else None

    @property
    def has_running_workers(self) -> bool:
        """Whether persistent workers are running."""
        return has_running_workers(self.loader) or self._ring_iterator is not None

    def prepare(self, pulled: Pulled) -> None:
        """Page-lock slots in use that are not page-locked yet. Call before the copy, on the training thread.

        If the first batch of a source without workers is not page-locked, later batches are copied into slots.
        """
        if not self._uses_cuda:
            return
        if pulled.slot is not None:
            pulled.slot.ring.page_lock()
        elif not self._checked_pinning and not self.workers:
            self._checked_pinning = True
            if any(can_be_stored(leaf) and not leaf.is_pinned() for leaf in batches.tensors(pulled.batch)):
                self._staging.set()

    def free_after(self, pulled: Pulled, event: Event) -> None:
        """Keep the slots of a batch in use until ``event``, recorded after the copy of the batch, has passed. Does not wait."""
        if pulled.slot is not None:
            pulled.slot.ring.free_after(pulled.slot, event)
            pulled.slot = None

    def free_read_slots(self) -> None:
        """Free slots whose copies have ended. Does not wait."""
        for ring in self._living_rings():
            ring.free_read_slots()

    def close(self) -> None:
        """End persistent workers and drop the ring. The next iteration creates new ones."""
        self.end_persistent_workers()
        for ring in self._living_rings():
            ring.close()
        self._proxy = self._ring = None

    def end_persistent_workers(self) -> None:
        """End persistent workers, and iterations that read their batches. The next iteration starts new workers."""
        if has_persistent_workers(self.loader):
            iterators = self.loader._iterator, self._ring_iterator
            self.loader._iterator = self._proxy = None  # first: after an interrupt, the next iteration starts new workers
            for iterator in iterators:
                for iteration in iterations_of(iterator):  # first: its next() would wait forever for workers that have ended
                    iteration.close()
                end_workers(iterator)

    def _living_rings(self) -> list[Ring]:
        """Return the current ring, and older rings that are still in use."""
        return [ring for reference in self._rings if (ring := reference()) is not None]

    def _slots_per_worker(self, depth: int) -> int:
        """Return the number of slots per worker, or of a source without workers. ``depth``: see ``open``."""
        prefetch_factor = (getattr(self.loader, "prefetch_factor", None) or 2) if self.workers else 0
        # In addition to batches that workers prefetch: batches that wait for the training thread (``QUEUED``), batches whose
        # copy is queued on the device or being queued (``depth + 3``), and the batch that is read ahead for Accelerate.
        num_received = QUEUED + depth + 3 + (self._begin_with is not None)
        return int(prefetch_factor + 1 + math.ceil(num_received / max(self.workers, 1)))

    def _disable_ring(self, error: OSError) -> None:
        """Let batches travel without slots from now on, and warn. ``error``: reason why the ring cannot be created.

        Raises:
            GpuAugError: Instead of the warning, if ``feed`` is ``"ring"``.
        """
        mapped_bytes = MAX_GENERATIONS * self._budget_bytes  # addresses for all generations of slots
        why = f"{mapped_bytes / 1e6:.1f} MB, {MAX_GENERATIONS} times feed_bytes, cannot be mapped ({error})"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            way_out = "Raise the limit of open files: ulimit -n."
        else:
            way_out = "Lower feed_bytes, or raise the limits of the process: ulimit -v and ulimit -f."
        if self._requires_ring:
            raise GpuAugError(f"The ring cannot be created, because {why}. {way_out}") from error
        self.reason = f"the memory of the ring cannot be allocated: {error}"
        warn(f"Batches travel without page-locked slots, which is slower, because {why}. {way_out}")


# The next two functions may run on the background thread, which makes no CUDA calls. The ring is an argument, because an
# iteration uses its ring until its end, even if the feed has created another ring.


def _start_workers(loader: Any, ring: Ring | None) -> Any:
    """Return a new iterator of a ``DataLoader``, whose workers send errors, and collate into ``ring``.

    Only the workers of one iterator can write into the ring: workers of a second iterator have no slots.
    """
    # In the context, tensors are sent to new workers without /dev/shm. It admits one thread at a time, so that no two iterators
    # get the ring.
    with sending_memfd():
        memory = None
        processes: list[weakref.ref[BaseProcess]] = []  # filled when the workers start
        if ring is not None and not ring.has_writers:
            memory = ring.memory
            ring.writers = processes
        files = opened_files(loader)
        init = SendsErrors(loader.worker_init_fn, sends_states(loader), files)
        attributes: dict[str, Any] = {"multiprocessing_context": worker_context(loader, processes), "worker_init_fn": init}
        if memory is not None:
            collate = SlotCollate(loader.collate_fn, memory, for_loader=_overrides_iteration(loader))
            attributes |= {"collate_fn": collate, "pin_memory": False}
        iterator = type(loader)._get_iterator(proxy_of(loader, **attributes))
        if files is not None:
            with suppress(AttributeError):  # an iterator of the user's that accepts no attributes
                iterator.opened_files = files
        return iterator


def _receive_staged(staging: threading.Event, ring: Ring, batch: Batch) -> tuple[Batch, Slots | None]:
    """Return (batch, slots) for a batch of a source without workers, copied into a slot if a slot is free."""
    # 0: the index of this thread, the only writer. Without a free slot, or if no tensor fits, the batch itself is returned.
    writer = ring.memory.take_slot(0) if staging.is_set() and ring.make_room(batch) else None
    description = None if writer is None else writer.describe(batch)
    return (batch, None) if description is None else ring.receive(description.received())


def _receive_copy(receive: Receive, batch: Batch) -> tuple[Batch, Slots | None]:
    """Return (copy of the batch, slots). For a CPU, because the user's tensors must not share the memory of slots."""
    batch, slots = receive(batch)
    return cloned(batch) if slots else batch, slots


def _workers_of(loader: Any) -> int:
    """Return the number of worker processes of a ``DataLoader``; 0 for other loaders."""
    return loader.num_workers if isinstance(loader, DataLoader) else 0


def _overrides_iteration(loader: Any) -> bool:
    """Return whether the class of a ``DataLoader`` overrides the iteration of torch, and of torchdata."""
    return not (uses_iteration_of(loader, DataLoader) or keeps_state(loader))


def _reason_without_slots(loader: Any, device: torch.device, *, requires_ring: bool) -> str:
    """Return the reason why batches do not travel in slots, or an empty string. ``requires_ring``: ``feed`` is ``"ring"``."""
    if reason := unsupported_reason():
        return reason
    if device.type != "cuda" and not (device.type == "cpu" and requires_ring):
        return f"the device is {device.type}"
    if type(loader) in {list, tuple}:
        return "the batches of a list are in memory already"
    if not isinstance(loader, DataLoader):
        return ""
    if not loader.num_workers and loader.pin_memory:
        return "the loader page-locks its batches itself"
    if sends_states(loader):  # a loader of torchdata
        return "persistent workers hold the state of the loader" if loader.persistent_workers else ""
    if loader.num_workers and runs_workers(loader):
        return "the loader's workers are running already"
    return ""
