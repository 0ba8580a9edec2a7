"""Lanes: named CUDA streams, the order of work between them, and the order in which memory is reused.

This is the only file that names ``torch.cuda.Stream`` and ``torch.cuda.Event``. A *lane* is a stream with a name. An *event*
marks a point in the work of a stream. The *consumer* is the stream that trains. On a device other than CUDA (a CPU, MPS, XPU)
everything runs in line, and waits do nothing.

**Order of work.** Every batch passes the lanes in the same order: copy, then each stage. The lane of a stage waits for the
event of the lane before it, and the consumer waits for the event of the last lane. A lane waits only for work on the same
batch, never for work on a later batch. Consecutive stages that only read members which none of them writes run side by side;
the lane of the last of them then waits for all of them.

**Order of reuse.** When a tensor is freed, PyTorch's caching allocator returns its block at once to the stream that allocated
it, even if another stream is still reading the block. So before a lane allocates memory again, it must wait for every reader of
tensors that were freed. All work on a batch follows its copy, so waits on the copy lane are enough for all lanes. Before batch
``n`` is copied, the copy lane waits

1. for the last stage of batch ``n - 2``, after which the intermediate tensors of that batch are freed, and 2. for the work that
is queued on each stream on which a batch was handed over: tensors that the user has freed since were read there.
   This includes tensors inside objects that have their own ``to`` method.

``record_stream`` is not used for these tensors. It must be called for each tensor, and it frees memory only after the host has
queried an event. So it reserves more memory the further the host runs ahead, by an amount that changes from run to run (``bench
run lifetimes`` measures both). It is used for memory that gpuaug did not allocate: tensors that the wrapped loader returned on
the device.

Rule 2 does not cover a batch that is read on a stream on which ``next()`` was never called, nor a batch that is given to
another *thread* which queues work on it and frees it while ``next()`` is running. As for any tensor that is used on another
stream or thread, the user must call ``record_stream`` in these cases.
"""

import functools
import gc
import os
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import cuda

from gpuaug.core.devices import current_device

INTERMEDIATES_KEPT = 2
"""Number of batches whose intermediate tensors are kept.

With one, the copy of a batch would wait for the stages of the last batch.
"""


class Event(Protocol):
    """A point in the work of a lane, for which other lanes and the host can wait."""

    def query(self) -> bool:
        """Return whether the device has passed the event."""
        ...

    def synchronize(self) -> None:
        """Make the host wait until the device has passed the event."""
        ...


# The functions of torch._C are called directly, because the Python functions of torch.cuda around them make ``next()`` slower.
_CudaEvent: Any = torch._C._CudaEventBase


def _switch_to(stream: cuda.Stream) -> Callable[[], None]:
    """Return a function that makes ``stream`` current."""
    return functools.partial(torch._C._cuda_setStream, stream.stream_id, stream.device_index, stream.device_type)


class Lane:
    """A CUDA stream with a name."""

    in_line = False

    def __init__(self, name: str, stream: cuda.Stream) -> None:
        self.name = name
        self.stream = stream
        self.switch = _switch_to(stream)
        self.number = int(stream.cuda_stream)
        """Handle of the stream, for C libraries."""

    def __repr__(self) -> str:
        return f"Lane({self.name!r})"

    def make_current(self) -> None:
        """Queue later launches of this thread on this lane, until ``Lanes.launching`` ends."""
        self.switch()

    def record_event(self, *, timed: bool = False, spin: bool = False) -> Event:
        """Record an event after the work that is queued on this lane.

        Args:
            timed: Whether the event stores the time, for ``ms_between``.
            spin: Whether ``synchronize`` keeps its core busy while it waits, which reduces the latency.
        """
        # By default the event is blocking: a thread that waits for it leaves its core to the loader's workers.
        event = _CudaEvent(blocking=not spin, enable_timing=timed)
        event.record(self.stream)
        return event  # type: ignore[no-any-return]

    def wait(self, event: Event) -> None:
        """Make work that is queued on this lane after this call start after ``event``. The host does not wait."""
        event.wait(self.stream)  # type: ignore[attr-defined]

    def reads(self, tensor: Any) -> None:
        """Prevent that memory which another stream allocated is reused before this lane has read ``tensor``."""
        tensor.record_stream(self.stream)

    def copy_parts(self, target: torch.Tensor, source: torch.Tensor, parts: Iterable[tuple[int, int, int]]) -> None:
        """Copy parts of one flat tensor into another. A part is (start in ``target``, start in ``source``, length)."""
        with cuda.stream(self.stream):
            for target_start, source_start, length in parts:
                part = source[source_start : source_start + length]
                target[target_start : target_start + length].copy_(part, non_blocking=True)


class InLineLane(Lane):
    """Lane of a device without CUDA streams: work runs when it is called, or on the device's only queue."""

    in_line = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = 0

    def make_current(self) -> None:
        """Do nothing."""

    def record_event(self, *, timed: bool = False, spin: bool = False) -> Event:
        """Return an event that has passed already."""
        return _PassedEvent(time.perf_counter()) if timed else _PASSED_EVENT

    def wait(self, event: Event) -> None:
        """Do nothing: earlier work has run, or is earlier in the same queue."""

    def reads(self, tensor: Any) -> None:
        """Do nothing: there is no other queue on which the memory could be reused."""

    def copy_parts(self, target: torch.Tensor, source: torch.Tensor, parts: Iterable[tuple[int, int, int]]) -> None:
        """Copy parts of one flat tensor into another."""
        for target_start, source_start, length in parts:
            target[target_start : target_start + length] = source[source_start : source_start + length]


class _PassedEvent:
    """Event of work that has run already. ``at_s``: time of the event, by ``time.perf_counter``."""

    def __init__(self, at_s: float = 0.0) -> None:
        self.at_s = at_s

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


_PASSED_EVENT = _PassedEvent()


def ms_between(first: Any, second: Any) -> float:
    """Return the milliseconds on the device from one timed event to another. The device must have passed both."""
    if isinstance(first, _PassedEvent):
        return (float(second.at_s) - first.at_s) * 1e3
    elapsed: float = first.elapsed_time(second)
    return elapsed


_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(slots=True)
class _Streams:
    """Streams of one loader, and the state that orders reuse of the memory allocated on them."""

    by_priority: defaultdict[int, list[cuda.Stream]] = field(default_factory=lambda: defaultdict(list))
    """Priority → streams, in the order in which they were created."""
    consumers: dict[int, Lane] = field(default_factory=dict)
    """Handle → stream on which batches were handed over, as a lane."""
    intermediates: deque[tuple[Any, Event]] = field(default_factory=deque)
    """(intermediate tensors of a batch, event of their last reader) per batch."""


_idle: defaultdict[torch.device, list[_Streams]] = defaultdict(list)
"""Device → streams of loaders that were deleted."""


class Lanes:
    """The lanes of one loader on one device, and the order in which their memory is reused.

    PyTorch has a pool of 32 streams, and keeps a memory cache and workspaces of libraries for each stream. So a lane is created
    once per name, and another loader reuses the streams after this object was deleted. It gets all of them, in the order in
    which they were created (the copy stream first), and the streams on which batches were handed over, because a user may keep
    a batch for longer than its loader. For the order of reuse, the two loaders are one loader whose stages have changed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.in_line = device.type != "cuda"
        self._gpu = -1 if self.in_line else int(device.index)
        streams, idle = _Streams(), _idle[device]
        if not self.in_line:
            spare_forked_children()
            with suppress(IndexError):  # the list is empty. Not tested before, because another thread may take the last entry
                streams = idle.pop()
            # When this object is deleted, no work is queued any more: every object that queues work on the lanes refers to it.
            weakref.finalize(self, idle.append, streams).atexit = False
        self._streams = streams
        self._unused = {priority: deque(created) for priority, created in streams.by_priority.items()}
        self._consumers, self._intermediates = streams.consumers, streams.intermediates
        self._lanes: dict[str, Lane] = {}
        self.copy = self.lane("copy")

    def lane(self, name: str, *, urgent: bool = False) -> Lane:
        """Return the lane with a name, created on first use. The kernels of an ``urgent`` lane have priority."""
        if name not in self._lanes:
            self._lanes[name] = InLineLane(name) if self.in_line else Lane(name, self._stream(-1 if urgent else 0))
        return self._lanes[name]

    def _stream(self, priority: int) -> cuda.Stream:
        """Return the next unused stream of an earlier loader, or a new stream."""
        if self._unused.get(priority):
            return self._unused[priority].popleft()
        stream = cuda.Stream(self.device, priority)
        self._streams.by_priority[priority].append(stream)
        return stream

    def consumer(self) -> Lane:
        """Return the calling thread's current stream as a lane."""
        if self.in_line:
            return self.copy
        lane = self._consumers.get(current_stream(self._gpu))
        return lane or Lane("consumer", cuda.current_stream(self.device))

    def launching(self, consumer: Lane) -> AbstractContextManager[Any]:
        """Return a context manager in which lanes can be made current. At its end ``consumer`` is current again.

        The training thread would need several times as long for one ``with torch.cuda.stream(…)`` per lane.
        """
        if self.in_line:
            return _NOTHING
        if current_device() == self._gpu:
            return _Restored(consumer.switch)
        return _Restored(consumer.switch, _switch_to(cuda.current_stream()))

    def current_stream(self) -> int:
        """Return the handle of the calling thread's current stream. Makes no CUDA call."""
        return current_stream(self._gpu)

    def follow(self, number: int) -> Lane:
        """Make the copy lane wait for the work queued on the stream with handle ``number``, and return that stream as a lane.

        Used for batches that the wrapped loader returns on the device, whose tensors were written on that stream.
        """
        source = self.copy if self.in_line else Lane("source", cuda.ExternalStream(number, self.device))
        self.copy.wait(source.record_event())
        return source

    def hand_over(self, ready: Event, consumer: Lane) -> None:
        """Make ``consumer`` wait for a batch's ``ready`` event. Call immediately before the batch is handed over."""
        consumer.wait(ready)
        if not self.in_line:
            self._consumers[consumer.number] = consumer

    def wait_for_consumers(self, consumer: Lane, event: Event) -> None:
        """Rule 2: make the copy lane wait for the work that is queued on all streams on which batches were handed over.

        Then the memory of a freed batch is not overwritten while it is read.

        Args:
            consumer: Current stream, as a lane.
            event: Event that was recorded on ``consumer`` after the last work.
        """
        self.copy.wait(event)
        for other in list(self._consumers.values()):
            if other is not consumer:
                self.copy.wait(other.record_event())

    def retire(self, values: Any, read_by: Event) -> None:
        """Keep a batch's intermediate tensors until the copy lane waits for ``read_by``, the event of their last reader."""
        if self.in_line:
            return  # freed memory may be reused: its last reader has run, or is earlier in the only queue
        self._intermediates.append((values, read_by))

    def reclaim(self, keep: int = INTERMEDIATES_KEPT - 1) -> None:
        """Rule 1: make the copy lane wait for the last readers of intermediate tensors, and free these tensors.

        Args:
            keep: Number of batches whose intermediate tensors are kept.
        """
        while len(self._intermediates) > keep:
            values, read_by = self._intermediates.popleft()
            self.copy.wait(read_by)
            del values  # after the wait, because their memory may be reused at once

    def settle(self) -> None:
        """Make the copy lane wait for all lanes.

        Call after an interrupt, which may have prevented that an event was recorded.
        """
        for lane in self._lanes.values():
            self.copy.wait(lane.record_event())


@functools.cache
def spare_forked_children() -> None:
    """Prevent that forked processes collect garbage of this process.

    The garbage may contain events and graphs. Destroying one of them aborts a process without access to the device, such as a
    worker. So objects of the parent process are never freed in a forked process. This takes no memory, because the pages are
    shared.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=gc.freeze)


class _Restored:
    """Context manager that calls functions at its end. Each function makes one stream and its device current."""

    __slots__ = ("_switches",)

    def __init__(self, *switches: Callable[[], None]) -> None:
        self._switches = switches

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        for switch in self._switches:
            switch()


def current_stream(gpu: int) -> int:
    """Return the handle of the calling thread's current stream on the GPU with index ``gpu``; 0 if ``gpu`` is -1, for a CPU."""
    # Triton also calls this function of torch._C, at each launch. torch.cuda.current_stream takes ten times as long.
    return int(torch._C._cuda_getCurrentRawStream(gpu)) if gpu >= 0 else 0
