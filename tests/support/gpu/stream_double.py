"""A double of the stream layer: it runs nothing and records everything in a ``History``.

``FakeCuda`` stands in for ``torch.cuda`` where lanes and graphs are made, with an allocator like PyTorch's: a freed block
goes back at once to the stream that it was allocated on, whoever may still be reading it. ``HostBuffer`` and ``Buffer`` are
the leaves of its batches. What a stream launches while it captures is noted in a ``FakeGraph``, whose replay launches it on
the stream that is current.
"""

import itertools
import threading
from collections import defaultdict, deque
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from support.gpu.stream_history import History

STREAMS = 32
"""Streams of each priority, which are handed out in turns, as PyTorch does."""


class FakeCuda:
    """Stands in for the module ``torch.cuda``. Nothing completes before the host has waited for it.

    Args:
        keeps_up: Whether the device has passed every event by the time that the host asks.
    """

    def __init__(self, *, keeps_up=False):
        self.history = History()
        self.keeps_up = keeps_up
        self.now_ms = 0.0
        """The device's clock, which stands still but for tests that turn it."""
        self.lock = threading.RLock()
        self._numbers = defaultdict(itertools.count)
        self._pools = defaultdict(list)
        self._streams = defaultdict(list)
        self._held = []
        self._released = []  # blocks that any stream may be given
        self.block_bytes = []
        self.bytes_of = lambda batch: 1
        """The size of each buffer of a batch, given its number."""
        self.shape_of = lambda batch: ()
        """The shape of each buffer of a batch, given its number."""
        self.live_bytes = self.most_live_bytes = 0
        self.captures = {}
        """The graph that each capturing stream is captured in."""
        # Filled by finalisers, which may run anywhere, also within an operation; emptied when the next one begins.
        self.dropped = deque()
        self._thread = threading.local()
        self.streams = {}
        """All streams by their handles."""
        self.default = FakeStream(self, "default")

    def is_available(self):
        return True

    def device_count(self):
        return 1

    def current_device(self):
        return 0

    def Stream(self, device=None, priority=0):
        made, number = self._streams[priority], self.number(f"stream of priority {priority}")
        if number < STREAMS:
            made.append(FakeStream(self, f"stream {self.number('stream')}"))
        return made[number % STREAMS]

    def ExternalStream(self, number, device=None):
        return self.streams[number]

    def Event(self, enable_timing=False, **_):
        return FakeEvent(self, f"event {self.number('event')}", enable_timing)

    def current_stream(self, device=None):
        return getattr(self._thread, "stream", self.default)

    def set_stream(self, stream):
        self._thread.stream = stream

    @contextmanager
    def stream(self, stream):
        previous = self.current_stream()
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(previous)

    def CUDAGraph(self):
        return FakeGraph(self, f"graph {self.number('graph')}")

    def graph_pool_handle(self):
        return f"pool {self.number('pool')}"

    def synchronize(self):
        with self.operation() as history:
            history.synchronize_device()

    def empty_cache(self):
        """Memory that came back goes to whoever asks next: the device does not wait for those who used it."""
        with self.operation():
            for pool in self._pools.values():
                self._released.extend(pool)
                pool.clear()

    def memory_stats_as_nested_dict(self):
        return {}

    def memory_snapshot(self):
        return []

    def get_sync_debug_mode(self):
        return 0

    def set_sync_debug_mode(self, mode):
        pass

    def number(self, kind):
        return next(self._numbers[kind])

    def read(self, *buffers):
        """A kernel on the current stream that reads."""
        for buffer in buffers:
            self.launch(History.read, buffer.key)

    def write(self, buffer):
        """A kernel on the current stream that writes."""
        self.launch(History.write, buffer.key)

    def launch(self, access, key):
        """A kernel on the current stream, or in the graph that this is captured in."""
        stream = self.current_stream()
        if stream in self.captures:
            self.captures[stream].kernels.append((access, key))
            return
        with self.operation() as history:
            access(history, stream, key)

    def new(self, name, batch):
        """Memory of the current stream, written by a kernel there."""
        buffer = Buffer(self, name, batch)
        self.write(buffer)
        return buffer

    def host_batch(self):
        """What a loader yields."""
        ticket = []
        return HostBuffer(self, "images", ticket), HostBuffer(self, "labels", ticket)

    @contextmanager
    def operation(self):
        """One step of the history. What was dropped before it is given back first."""
        with self.lock:
            while self.dropped:
                self._free(*self.dropped.popleft())
            yield self.history

    @property
    def reserved_bytes(self):
        return sum(self.block_bytes)

    def allocate(self, buffer):
        """A block for ``buffer``: the one in its pool that fits best, one that nobody has, or a new one."""
        with self.operation() as history:
            for held in [held for held in self._held if all(map(history.passed, held[2]))]:
                self._held.remove(held)
                self._pools[held[1]].append(held[0])
            block = self._taken(self._pools[buffer.pool], buffer.num_bytes)
            if block is None:
                block = self._taken(self._released, buffer.num_bytes)
            if block is None:
                block = len(self.block_bytes)
                self.block_bytes.append(buffer.num_bytes)
            history.alloc(buffer.key, block, buffer.batch)
            self.live_bytes += buffer.num_bytes
            self.most_live_bytes = max(self.most_live_bytes, self.live_bytes)
            return block

    def _taken(self, pool, num_bytes):
        """The smallest block of ``pool`` that is large enough, of these the last that came back; or ``None``.

        PyTorch would split one that is much larger.
        """
        sizes = [self.block_bytes[block] for block in pool]
        fitting = [at for at in reversed(range(len(pool))) if num_bytes <= sizes[at] <= 2 * num_bytes]
        return pool.pop(min(fitting, key=sizes.__getitem__)) if fitting else None

    def _free(self, key, num_bytes, block, home, users):
        self.history.free(key)
        self.live_bytes -= num_bytes
        events = [f"end of {key} on {user}" for user in users]
        for event, user in zip(events, users, strict=True):
            self.history.record(event, user)
        if events:
            self._held.append((block, home, events))
        else:
            self._pools[home].append(block)


class FakeStream:
    def __init__(self, cuda, name):
        self._cuda = cuda
        self.name = name
        self.cuda_stream = cuda.number("handle")
        cuda.streams[self.cuda_stream] = self
        self.device = "cuda:0"

    def __str__(self):
        return self.name


class FakeEvent:
    def __init__(self, cuda, name, timed=False):
        self._cuda = cuda
        self._name = name
        self.timed = timed

    def __str__(self):
        return self._name

    def record(self, stream=None):
        with self._cuda.operation() as history:
            history.record(self, stream or self._cuda.current_stream())
            self._at_ms = self._cuda.now_ms

    def wait(self, stream):
        with self._cuda.operation() as history:
            history.wait(stream, self)

    def elapsed_time(self, end):
        """As on the device, an error unless both tell the time and have been passed, as far as the host can know."""
        if not (self.timed and end.timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.query() and end.query()):
            raise RuntimeError("device not ready")
        return end._at_ms - self._at_ms

    def query(self):
        with self._cuda.operation() as history:
            if self._cuda.keeps_up:
                history.learn(self)
            return history.passed(self)

    def synchronize(self):
        with self._cuda.operation() as history:
            history.synchronize(self)


class HostBuffer:
    """A leaf of a host batch, moved as objects with a ``to`` of their own are. Leaves of one batch share a ticket."""

    def __init__(self, cuda, name, ticket):
        self._cuda = cuda
        self.name = name
        self._ticket = ticket

    def to(self, device, non_blocking=False):
        if not self._ticket:  # batches are numbered in the order in which they are launched
            self._ticket.append(self._cuda.number("batch"))
        return self._cuda.new(self.name, self._ticket[0])


class FakeGraph:
    """Kernels that were captured, and the memory that was allocated meanwhile, which is kept for as long as they are."""

    def __init__(self, cuda, name):
        self._cuda = cuda
        self._name = name
        self.kernels = []
        self.memory = []

    def capture_begin(self, pool, capture_error_mode):
        self.pool = pool
        self._cuda.captures[self._cuda.current_stream()] = self

    def capture_end(self):
        del self._cuda.captures[self._cuda.current_stream()]

    def replay(self):
        stream = self._cuda.current_stream()
        with self._cuda.operation() as history:
            history.log.append(f"{stream} replays {self._name}")
            for buffer in self.memory:
                buffer.batch = history.latest_batch(stream)
        for access, key in self.kernels:
            self._cuda.launch(access, key)


class Buffer:
    """A tensor on the device: memory that is given back when the last reference goes."""

    is_cuda = True
    ndim, dtype, nbytes = 0, "of the double", 1
    layout, is_nested = torch.strided, False

    def __init__(self, cuda, name, batch, num_bytes=None):
        self._cuda = cuda
        self._users = []
        self.batch = batch
        self.shape = cuda.shape_of(batch)
        self.num_bytes = cuda.bytes_of(batch) if num_bytes is None else num_bytes
        self.stream = self.pool = cuda.current_stream()
        self.key = f"{name}#{cuda.number('buffer')}"
        if self.stream in cuda.captures:
            graph = cuda.captures[self.stream]
            graph.memory.append(self)
            self.pool = graph.pool
        self._block = cuda.allocate(self)

    def stride(self):
        return ()

    def untyped_storage(self):
        return SimpleNamespace(data_ptr=lambda: id(self), nbytes=lambda: self.nbytes)

    def like(self, name):
        """Memory of the current stream that nothing has written."""
        return Buffer(self._cuda, name, self.batch)

    def copy_(self, source):
        self._cuda.read(source)
        self._cuda.write(self)
        self.batch = source.batch

    def clone(self):
        self._cuda.read(self)
        return self._cuda.new("clone", self.batch)

    def record_stream(self, stream):
        """Takes effect when the memory is given back, and on its own stream not at all."""
        if stream is not self.stream and stream not in self._users:
            self._users.append(stream)

    def __del__(self):
        self._cuda.dropped.append((self.key, self.num_bytes, self._block, self.pool, self._users))
