"""Lanes: named CUDA streams, the order of work between them, and the order in which memory is reused.

This is the only file that names ``torch.cuda.Stream`` and ``torch.cuda.Event``. A *lane* is a stream with a name. An *event*
marks a point in the work of a stream. The *consumer* is the stream that trains. A batch is *handed over* when ``next()``
returns it. On a device other than CUDA (a CPU, MPS, XPU) all work runs *in line*, on the calling thread, and waits do nothing.

**Order of work.** Every batch passes the lanes in the same order: copy, then each stage. The lane of a stage waits for the
event of the lane before it, and the consumer waits for the event of the last lane. A lane waits only for work on the same
batch, never for work on a later batch. Consecutive stages may run side by side if none of them writes what another reads. The
lane of the last of these stages then waits for the other lanes.

**Order of reuse.** When a tensor is freed, PyTorch's caching allocator returns its block at once to the stream that allocated
the block, even if another stream is still reading it. So before a lane allocates memory again, it must wait for every reader of
tensors that were freed. All work on a batch follows its copy, so waits on the copy lane are enough for all lanes. Before batch
``n`` is copied, the copy lane waits for

1. the last stage of batch ``n - 2``, after which the intermediate tensors of that batch are freed;
2. all work queued on each stream on which a batch was handed over. This work may read tensors that the user has freed.

``record_stream`` is not used for these tensors: it must be called for each tensor, and frees memory only after the host has
queried an event. So it reserves more memory the further the host runs ahead (``bench run lifetimes`` measures both).
``record_stream`` is used only for tensors that the wrapped loader returned on the device, whose memory gpuaug did not allocate.

Rule 2 does not cover a batch that is read on a stream on which ``next()`` was never called. Nor does it cover a batch that
another *thread* reads and frees while ``next()`` is running. In both cases the user must call ``record_stream``, as for any
tensor that is used on several streams or threads.
"""

import functools
import gc
import os
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import cuda

from gpuaug.core.devices import resolve

MAX_INTERMEDIATES = 2
"""Maximum number of batches whose intermediate tensors are kept.

With 1, the copy of a batch would wait for the stages of the batch before it.
"""

URGENT_PRIORITY = -1
"""Priority of lanes whose kernels must not wait for the kernels of the training step. Other lanes have priority 0, the lowest.

CUDA starts blocks of streams with smaller numbers first. The default stream has priority 0 too.
"""

STEP_PRIORITY = -1
"""Priority of the streams of ``step_first``."""


class Event:
    """A point in the work of a lane, for which other lanes and the host can wait.

    An object of this class is an event of a device without CUDA streams, which has passed as soon as it is recorded. CUDA's
    events have the same methods.
    """

    at_s = 0.0
    """Time of the event, from ``time.perf_counter``."""

    def record(self, _stream: Any) -> None:
        """Store the time."""
        self.at_s = time.perf_counter()

    def wait(self, _stream: Any) -> None:
        """Make later work on a stream start after the event."""

    def query(self) -> bool:
        """Return whether the device has passed the event."""
        return True

    def synchronize(self) -> None:
        """Make the host wait until the device has passed the event."""

    def elapsed_time(self, later: Any) -> float:
        """Return the milliseconds on the device from this timed event to a later one. The device must have passed both."""
        return float(later.at_s - self.at_s) * 1e3


# The functions of torch._C are called directly, because the Python functions of torch.cuda around them make ``next()`` slower.
# This file is the only place for them. Tried with torch 2.14.1.
_CudaEvent: Any = torch._C._CudaEventBase


def _switch_to(stream: cuda.Stream | None) -> Callable[[], None]:
    """Return a function that makes ``stream`` current. For ``None`` it does nothing."""
    if stream is None:
        return lambda: None
    return functools.partial(torch._C._cuda_setStream, stream.stream_id, stream.device_index, stream.device_type)


class Lane:
    """A CUDA stream with a name; on a device without CUDA streams, a name alone.

    Without a stream, work runs when it is called, or on the device's only queue, in which earlier work comes first.
    """

    def __init__(self, name: str, stream: cuda.Stream | None = None) -> None:
        self.name = name
        self.stream = stream
        self.in_line = stream is None
        self.switch = _switch_to(stream)
        self.handle = 0 if stream is None else int(stream.cuda_stream)
        """Handle of the stream, for C libraries."""

    def __repr__(self) -> str:
        return f"Lane({self.name!r})"

    def make_current(self) -> None:
        """Make this lane the calling thread's current stream, until the context of ``Lanes.launching`` ends."""
        self.switch()

    def record_event(self, *, timed: bool = False) -> Event:
        """Record an event after the work that is queued on this lane. ``timed``: it stores the time, for ``elapsed_time``."""
        # ``synchronize`` of a blocking event leaves the core to the loader's workers.
        event: Event = Event() if self.in_line else _CudaEvent(blocking=True, enable_timing=timed)
        event.record(self.stream)
        return event

    def wait(self, event: Event) -> None:
        """Make later work on this lane start after ``event``. The host does not wait."""
        event.wait(self.stream)

    def reads(self, tensor: Any) -> None:
        """Call ``record_stream``: the memory of ``tensor``, of another stream, is not reused before this lane has read it."""
        if not self.in_line:
            tensor.record_stream(self.stream)

    def copy_parts(self, target: torch.Tensor, source: torch.Tensor, parts: Iterable[tuple[int, int, int]]) -> None:
        """Copy parts of one flat tensor into another, in one call that releases the interpreter's lock once.

        Args:
            target: Flat tensor on the device.
            source: Flat tensor on the host.
            parts: (start in ``target``, start in ``source``, length) per part.
        """
        targets, sources = list[torch.Tensor](), list[torch.Tensor]()
        for target_start, source_start, length in parts:
            targets.append(target[target_start : target_start + length])
            sources.append(source[source_start : source_start + length])
        with nullcontext() if self.stream is None else cuda.stream(self.stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)


@dataclass(slots=True)
class _Streams:
    """Streams of one loader, and the state that orders reuse of the memory allocated on them."""

    by_priority: defaultdict[int, list[cuda.Stream]] = field(default_factory=lambda: defaultdict(list))
    """Priority → streams, in the order in which they were created."""
    consumers: dict[int, Lane] = field(default_factory=dict)
    """Handle of each stream on which batches were handed over → the stream as a lane."""
    intermediates: deque[tuple[Any, Event]] = field(default_factory=deque)
    """(intermediate tensors of a batch, event of their last reader) per batch."""


_idle: defaultdict[torch.device, list[_Streams]] = defaultdict(list)
"""Device → streams of loaders that were deleted."""


class Lanes:
    """The lanes of one loader on one device, and the order in which their memory is reused.

    PyTorch has a pool of 32 streams, with a memory cache and workspaces of libraries for each stream. So a lane is created once
    per name, and another loader reuses the streams after this object was deleted. The other loader gets all streams, in the
    order of their creation (the copy stream first). It also gets the streams on which batches were handed over, because a user
    may keep a batch for longer than its loader. For the order of reuse, the two loaders are one loader whose stages changed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.in_line = device.type != "cuda"
        self._gpu = -1 if self.in_line else int(device.index)  # index of the GPU; -1 if there is none, as in ``current_stream``
        self._urgent_priority = URGENT_PRIORITY
        streams = _Streams()
        idle = _idle[device]
        if not self.in_line:
            spare_forked_children()
            with suppress(IndexError):  # an empty list. No test before pop(): another thread could pop the last entry meanwhile
                streams = idle.pop()
            # Every object that queues work on the lanes refers to this object, so its deletion means that no more work follows.
            weakref.finalize(self, idle.append, streams).atexit = False
        self._streams = streams
        self._unused = {priority: deque(created) for priority, created in streams.by_priority.items()}
        """Priority → streams of an earlier loader that are no lanes of this object yet, in the order of their creation."""
        self._consumers = streams.consumers
        self._intermediates = streams.intermediates
        self._lanes: dict[str, Lane] = {}
        self.copy = self.lane("copy")
        """Lane on which batches are copied, and whose waits order the reuse of memory."""

    def lane(self, name: str, *, urgent: bool = False) -> Lane:
        """Return the lane ``name``, created on first use. ``urgent``: the lane has a higher priority than other streams."""
        if name not in self._lanes:
            stream = None if self.in_line else self._stream(self._urgent_priority if urgent else 0)
            self._lanes[name] = Lane(name, stream)
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
        lane = self._consumers.get(current_stream(self._gpu))  # ``hand_over`` adds a lane here, so that it is created once
        return lane or Lane("consumer", cuda.current_stream(self.device))

    def launching(self, consumer: Lane) -> "_Restoring":
        """Return a context manager in which lanes can be made current. At its end ``consumer`` is current again.

        One ``with torch.cuda.stream(…)`` per lane would take the training thread several times as long.
        """
        if self.in_line or current_device() == self._gpu:
            return _Restoring(consumer.switch)
        # Another GPU is current: its stream is made current last, which makes that GPU current again.
        return _Restoring(consumer.switch, _switch_to(cuda.current_stream()))

    def current_stream(self) -> int:
        """Return the handle of the calling thread's current stream. Makes no CUDA call."""
        return current_stream(self._gpu)

    def follow(self, handle: int) -> Lane:
        """Make the copy lane wait for the work queued on the stream ``handle``, and return the stream as a lane.

        On this stream the wrapped loader has written tensors of a batch that it returned on the device.
        """
        source = self.copy if self.in_line else Lane("source", cuda.ExternalStream(handle, self.device))
        self.copy.wait(source.record_event())
        return source

    def hand_over(self, ready: Event, consumer: Lane) -> None:
        """Make ``consumer`` wait for a batch's ``ready`` event. Call immediately before the batch is handed over."""
        consumer.wait(ready)
        self._consumers[consumer.handle] = consumer

    def wait_for_consumers(self, consumer: Lane, event: Event) -> None:
        """Rule 2: make the copy lane wait for the work that is queued on all streams on which batches were handed over.

        Args:
            consumer: Current stream, as a lane.
            event: Event that was recorded on ``consumer`` after the training step.
        """
        self.copy.wait(event)
        for other in list(self._consumers.values()):
            if other is not consumer:
                self.copy.wait(other.record_event())

    def retire(self, values: Any, read_by: Event) -> None:
        """Keep a batch's intermediate tensors until the copy lane waits for ``read_by``, the event after their last reader."""
        if self.in_line:
            return  # the tensors may be freed: their last reader has run, or is earlier in the device's only queue
        self._intermediates.append((values, read_by))

    def reclaim(self, keep: int = MAX_INTERMEDIATES - 1) -> None:
        """Rule 1: make the copy lane wait for the last readers of intermediate tensors, and free these tensors.

        Args:
            keep: Number of batches whose intermediate tensors are kept.
        """
        while len(self._intermediates) > keep:
            values, read_by = self._intermediates.popleft()
            self.copy.wait(read_by)
            del values  # after the wait, because their memory may be reused at once

    def wait_for_all_lanes(self) -> None:
        """Make the copy lane wait for all lanes. Call after an interrupt: work may be queued without an event after it."""
        for lane in self._lanes.values():
            self.copy.wait(lane.record_event())


@functools.cache
def spare_forked_children() -> None:
    """Keep forked processes from freeing objects of this process in a garbage collection. Takes effect once per process.

    Such an object may hold CUDA events or graphs. A process that cannot use the device, such as a worker, is aborted when it
    destroys an event or a graph. A decoder of PyAV has threads, which a forked process does not have: destroying the decoder
    would wait for them forever. The objects take no memory in a forked process, which shares the pages of its parent.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=gc.freeze)


class _Restoring:
    """Context manager that makes streams, and their devices, current at its end. ``switches``: one function per stream."""

    __slots__ = ("_switches",)

    def __init__(self, *switches: Callable[[], None]) -> None:
        self._switches = switches

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        for switch in self._switches:
            switch()


_step_lanes = threading.local()
"""Attributes: GPU → stream of ``step_first``, created on first use.

Threads do not share streams, or their steps would not overlap.
"""


@contextmanager
def step_first(device: torch.device | str | int | None = None) -> Iterator[None]:
    """Run a training loop on a CUDA stream whose kernels the GPU starts before the kernels of the loader's stages.

    PyTorch's default stream has the lowest priority. So the augmentation and encoding of later batches delay the kernels of a
    training step on the default stream. Inside this context the current stream has priority -1. It is created once per GPU and
    thread, and waits for the stream that was current before the context. When the context ends, also by an error, that stream
    is current again and waits for the training loop: a checkpoint that is saved after the context has the final weights. The
    host waits for neither.

    Enter the context once, around all epochs, and wrap the model in ``DistributedDataParallel`` inside the context. Without
    CUDA, and inside another ``step_first``, the context does nothing. ``step_first()`` also works as a decorator of a function.

    Tensors that were allocated inside may be used outside, on the stream that is current there, and tensors from outside may be
    used inside. As with any stream, call ``record_stream`` for tensors that other streams or threads use.

    Args:
        device: GPU of the training loop, which is the current GPU in the context. Default: the current GPU.

    Returns:
        A context manager.

    Raises:
        ArgumentError, DeviceError: If ``device`` is not a device of this machine. Raised when the context is entered.

    Cost:
        Two events and two waits per context, none per batch. PyTorch caches memory per stream: memory that a step outside of
        the context has cached is not used inside, and is freed when memory runs out.

    Examples:
        >>> from gpuaug import StreamedLoader, step_first
        >>> loader = StreamedLoader([torch.ones(2), torch.zeros(1)], [lambda x: x * 3], device="cpu")
        >>> with step_first(loader.device):
        ...     for batch in loader:
        ...         print(batch.sum().item())
        6.0
        0.0
    """
    device = resolve(device)
    if device.type != "cuda":
        yield
        return
    outer = Lane("outer", cuda.current_stream(device))
    lanes: dict[Any, Lane] = vars(_step_lanes)
    if device not in lanes:
        lanes[device] = Lane("step", cuda.Stream(device, STEP_PRIORITY))
    lane = lanes[device]
    if outer.handle == lane.handle:
        yield
        return
    lane.wait(outer.record_event())
    try:
        with cuda.stream(lane.stream):
            yield
    finally:
        outer.wait(lane.record_event())


def current_device() -> int:
    """Return the index of the calling thread's current GPU. CUDA must have been initialised."""
    return int(torch._C._cuda_getDevice())


def current_stream(gpu: int) -> int:
    """Return the handle of the calling thread's current stream on the GPU with index ``gpu``; 0 if ``gpu`` is -1, for a CPU."""
    # Triton also calls this function of torch._C, at each launch. torch.cuda.current_stream takes ten times as long.
    return int(torch._C._cuda_getCurrentRawStream(gpu)) if gpu >= 0 else 0
