"""Lanes: named CUDA streams, the order of work between them, and the order in which memory is reused.

This is the only file that names ``torch.cuda.Stream`` and ``torch.cuda.Event``. A lane is a stream with a name; an event
marks a point in its work. On a device other than CUDA (a CPU, MPS, XPU) everything runs in line and waits do nothing.

**Order of work.** Every batch passes the lanes in the same order: copy, then each stage. A stage waits for the event of
the lane before it, and the consumer (the stream that trains) for the last one: each for its own batch, never for a later one.
Stages in a row that only read members which none of them writes run side by side; the last one's lane then waits for all.

**Order of reuse.** The caching allocator gives a freed block back to the stream that allocated it, at once, whoever may still
be reading it. So before a lane allocates again it must wait for every reader of what has been dropped. All work on batch ``n``
follows its copy, so one wait on the copy lane covers every lane: before batch ``n`` is copied, the copy lane waits

1. for the last stage of batch ``n - 2``, after which the intermediate tensors of that batch are dropped, and
2. for the work queued so far on each stream that a batch was handed over on: tensors that the user has dropped by now were
   read there. This includes objects that were moved by a ``to`` of their own and hide their tensors.

Why not ``record_stream``: it needs to see each tensor, frees memory only when an event is seen to have passed, and so reserves
more the further the host runs ahead, by an amount that changes from run to run (``bench run lifetimes`` measures both). It is
used where memory is not ours to order: tensors that were on the device before they came to us.

Two things are outside rule 2 and need what any tensor needs that crosses streams or threads: a batch that is read on a stream
under which ``next()`` was never called, and a batch that is given to a *thread* which queues work on it and drops it while
another is inside ``next()``. ``record_stream`` covers both.
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
"""Batches whose private intermediates are alive at once. With one, copying a batch would wait for the stages of the last."""


class Event(Protocol):
    """A point in a lane's work that others can wait for."""

    def query(self) -> bool:
        """Whether the device has passed the event."""
        ...

    def synchronize(self) -> None:
        """Make the host wait until the device has passed the event."""
        ...


# torch.cuda has one or two Python functions around each of these, which behind a training step lengthen a ``next()``.
_CudaEvent: Any = torch._C._CudaEventBase


def _switch_to(stream: cuda.Stream) -> Callable[[], None]:
    """A call that makes ``stream`` current."""
    return functools.partial(torch._C._cuda_setStream, stream.stream_id, stream.device_index, stream.device_type)


class Lane:
    """A CUDA stream with a name."""

    in_line = False

    def __init__(self, name: str, stream: cuda.Stream) -> None:
        self.name = name
        self.stream = stream
        self.switch = _switch_to(stream)
        self.number = int(stream.cuda_stream)
        """The stream's handle, as C libraries take it."""

    def __repr__(self) -> str:
        return f"Lane({self.name!r})"

    def make_current(self) -> None:
        """Queue later launches of this thread on this lane, until ``Lanes.launching`` ends."""
        self.switch()

    def record_event(self, *, timed: bool = False, spin: bool = False) -> Event:
        """Record an event after the work that is queued so far.

        ``timed`` adds a timestamp, for ``ms_between``. ``spin`` makes ``synchronize`` busy-wait: less latency, one core busy.
        """
        # Blocking: a host that waits leaves its core to the loader's workers. Most waits are batches ahead of need.
        event = _CudaEvent(blocking=not spin, enable_timing=timed)
        event.record(self.stream)
        return event  # type: ignore[no-any-return]

    def wait(self, event: Event) -> None:
        """Make work that is queued from now on start after ``event``. The host does not wait."""
        event.wait(self.stream)  # type: ignore[attr-defined]

    def reads(self, tensor: Any) -> None:
        """Keep memory that this package did not allocate from being used again before this lane has read ``tensor``."""
        tensor.record_stream(self.stream)

    def copy_parts(self, target: torch.Tensor, source: torch.Tensor, parts: Iterable[tuple[int, int, int]]) -> None:
        """Copy parts of one flat tensor into another. A part is (start in ``target``, start in ``source``, length)."""
        with cuda.stream(self.stream):
            for to, start, length in parts:
                target[to : to + length].copy_(source[start : start + length], non_blocking=True)


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
        """Do nothing: earlier work has run, or is queued before."""

    def reads(self, tensor: Any) -> None:
        """Do nothing: the memory is not reused on another queue."""

    def copy_parts(self, target: torch.Tensor, source: torch.Tensor, parts: Iterable[tuple[int, int, int]]) -> None:
        """Copy parts of one flat tensor into another."""
        for to, start, length in parts:
            target[to : to + length] = source[start : start + length]


class _PassedEvent:
    def __init__(self, at_s: float = 0.0) -> None:
        self.at_s = at_s

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


_PASSED_EVENT = _PassedEvent()


def ms_between(first: Any, second: Any) -> float:
    """Milliseconds on the device from one timed event to another. Both must have been passed."""
    if isinstance(first, _PassedEvent):
        return (float(second.at_s) - first.at_s) * 1e3
    elapsed: float = first.elapsed_time(second)
    return elapsed


_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(slots=True)
class _Streams:
    """Streams of one loader, and the state that orders reuse of the memory allocated on them."""

    by_priority: defaultdict[int, list[cuda.Stream]] = field(default_factory=lambda: defaultdict(list))
    consumers: dict[int, Lane] = field(default_factory=dict)
    intermediates: deque[tuple[Any, Event]] = field(default_factory=deque)


_idle: defaultdict[torch.device, list[_Streams]] = defaultdict(list)
"""Streams whose loaders are gone."""


class Lanes:
    """The lanes of one loader on one device, made once, and the order in which their memory is used again.

    PyTorch hands out streams from a pool of 32 and keeps a memory cache and library workspaces for each. So lanes are made once
    per name and kept, and their streams go to the next loader when this one is garbage. All of them go together, the copy
    stream first, with the streams that batches were handed over on: a batch may be kept for longer than its loader. To the
    lanes, the next loader is the same one with other stages.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.in_line = device.type != "cuda"
        self._gpu = -1 if self.in_line else int(device.index)
        streams, idle = _Streams(), _idle[device]
        if not self.in_line:
            spare_forked_children()
            with suppress(IndexError):  # no test of emptiness before: another thread may take the last streams
                streams = idle.pop()
            # Every object that may still queue work on these lanes holds a reference to this object.
            weakref.finalize(self, idle.append, streams).atexit = False
        self._streams = streams
        self._unused = {priority: deque(created) for priority, created in streams.by_priority.items()}
        self._consumers, self._intermediates = streams.consumers, streams.intermediates
        self._lanes: dict[str, Lane] = {}
        self.copy = self.lane("copy")

    def lane(self, name: str, *, urgent: bool = False) -> Lane:
        """Lane with the given name, created on first use. The kernels of an ``urgent`` lane have priority."""
        if name not in self._lanes:
            self._lanes[name] = InLineLane(name) if self.in_line else Lane(name, self._stream(-1 if urgent else 0))
        return self._lanes[name]

    def _stream(self, priority: int) -> cuda.Stream:
        """Stream of an earlier loader, in the order in which that loader created them, or a new stream."""
        if self._unused.get(priority):
            return self._unused[priority].popleft()
        stream = cuda.Stream(self.device, priority)
        self._streams.by_priority[priority].append(stream)
        return stream

    def consumer(self) -> Lane:
        """Lane of the calling thread's current stream."""
        if self.in_line:
            return self.copy
        known = self._consumers.get(current_stream(self._gpu))
        return known or Lane("consumer", cuda.current_stream(self.device))

    def launching(self, consumer: Lane) -> AbstractContextManager[Any]:
        """Context manager within which lanes are made current. At its end ``consumer`` is current again.

        A ``with torch.cuda.stream(…)`` around each lane costs the training thread several times as much.
        """
        if self.in_line:
            return _NOTHING
        if current_device() == self._gpu:
            return _Restored(consumer.switch)
        return _Restored(consumer.switch, _switch_to(cuda.current_stream()))

    def current_stream(self) -> int:
        """Handle of the calling thread's current stream. Reads thread-local state; makes no CUDA call."""
        return current_stream(self._gpu)

    def follow(self, number: int) -> Lane:
        """Make the copy lane wait for the work queued on the stream with handle ``number``, and return that stream as a lane.

        For batches that arrive on the device: their tensors were written on that stream.
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
        """Rule 2: make the copy lane wait for the work queued so far on all streams that received batches.

        Memory of a freed batch is then not overwritten while it is read. ``event`` was just recorded on ``consumer``.
        """
        self.copy.wait(event)
        for other in list(self._consumers.values()):
            if other is not consumer:
                self.copy.wait(other.record_event())

    def retire(self, values: Any, read_by: Event) -> None:
        """Hold a batch's intermediate tensors until the copy lane waits for ``read_by``, the event of their last reader."""
        if self.in_line:
            return  # the last reader of freed memory has run, or was queued before the work that reuses the memory
        self._intermediates.append((values, read_by))

    def reclaim(self, keep: int = INTERMEDIATES_KEPT - 1) -> None:
        """Rule 1: make the copy lane wait for the last readers of intermediates and drop them, except for ``keep`` batches."""
        while len(self._intermediates) > keep:
            values, read_by = self._intermediates.popleft()
            self.copy.wait(read_by)
            del values  # only now: after the wait their memory may be used again

    def settle(self) -> None:
        """Make the copy lane wait for all lanes, after an interrupt that may have kept readers from recording an event."""
        for lane in self._lanes.values():
            self.copy.wait(lane.record_event())


@functools.cache
def spare_forked_children() -> None:
    """Keep forked processes from collecting the garbage of this process.

    The garbage may hold events and graphs, and destroying one aborts a process that cannot reach the device: a worker that
    happened to collect garbage would die. Objects of the parent are never freed in a child, which costs no memory: the pages
    are shared.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=gc.freeze)


class _Restored:
    """Context manager that makes streams current at its end. The device of the last stream becomes current too."""

    __slots__ = ("_switches",)

    def __init__(self, *switches: Callable[[], None]) -> None:
        self._switches = switches

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        for switch in self._switches:
            switch()


def current_stream(gpu: int) -> int:
    """Handle of the current stream of the GPU with index ``gpu``; 0 for -1, the index of a CPU."""
    # Triton makes this call at each launch. torch.cuda.current_stream takes ten times as long.
    return int(torch._C._cuda_getCurrentRawStream(gpu)) if gpu >= 0 else 0
