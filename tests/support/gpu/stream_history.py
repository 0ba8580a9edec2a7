"""What the streams of a double did, in host order, and what nothing orders.

``History`` checks accesses by happens-before, with a vector clock for each stream and one for the host.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

UNREADY = "unready"  # a read that may come before the write of what it reads
OVERWRITTEN = "overwritten"  # a write to a buffer that something may still be reading or writing
REUSED = "reused"  # the same, where that something used another buffer in the same block of memory
FREED = "freed"  # a use of a buffer that had been given back
OVERWAITED = "overwaited"  # a batch handed over behind the work on a later one
CHANGED = "changed"  # a write to a buffer that had been handed over, in whatever order


@dataclass(frozen=True)
class Violation:
    rule: str
    text: str


@dataclass(frozen=True)
class _Access:
    stream: Any
    count: int  # how many the stream had made with this one
    buffer: Any
    verb: str
    part: Any = None  # the part of the buffer that is written; None for all of it

    def beside(self, other):  # both are writes to different parts of one buffer
        return self.buffer == other.buffer and None not in (self.part, other.part) and self.part != other.part

    def __str__(self):
        part = "" if self.part is None else f" at {self.part}"
        return f"{self.stream} {self.verb} {self.buffer}{part}"


@dataclass
class _Occupant:
    """A buffer in a block."""

    block: Any
    batch: int
    written: list[_Access] = field(default_factory=list)  # the latest to the whole, and those to parts since
    freed: bool = False
    handed_over: bool = False


class History:
    """What was launched, in host order, and which of it is ordered. Streams, events and buffers may be any hashable."""

    def __init__(self):
        self.violations = []
        self.log = []
        self.syncs = 0
        self._host = {}
        self._device_waits = {}  # of each stream, what it had launched when the host last waited for the device
        self._clocks = defaultdict(dict)
        self._events = {}
        self._buffers = {}
        self._users = {}  # of each block, since a buffer in it was last written as a whole, that write included
        self._batches = defaultdict(list)  # of each stream, after each access: the latest batch that it has worked on
        self._latest_received = -1

    def alloc(self, buffer, block, batch=0):
        """``buffer`` now means the memory of ``block``. Allocating launches nothing."""
        self.log.append(f"alloc {buffer} in block {block}")
        self._buffers[buffer] = _Occupant(block, batch)

    def free(self, buffer):
        self.log.append(f"free {buffer}")
        self._buffers[buffer].freed = True

    def write(self, stream, buffer, part=None):
        """``part``: a name. Parts of different names do not overlap."""
        occupant, now = self._access(stream, buffer, "writes", part)
        block = occupant.block
        if occupant.handed_over:
            self._violate(CHANGED, f"{now}, which had been handed over")
        for earlier in self._users.get(block, ()):
            if self._ordered(earlier, stream) or now.beside(earlier):
                continue
            if earlier.buffer == buffer:
                self._violate(OVERWRITTEN, f"{now}, and nothing orders it after: {earlier}")
            else:
                self._violate(REUSED, f"{now} in block {block}, and nothing orders it after the memory's last use: {earlier}")
        if part is None:
            occupant.written, self._users[block] = [], []
        occupant.written.append(now)
        self._users.setdefault(block, []).append(now)

    def read(self, stream, buffer):
        occupant, now = self._access(stream, buffer, "reads")
        if not occupant.written:
            self._violate(UNREADY, f"{now}, which nothing has written")
        for written in occupant.written:
            if not self._ordered(written, stream):
                self._violate(UNREADY, f"{now}, and nothing orders it after: {written}")
        self._users.setdefault(occupant.block, []).append(now)

    def record(self, event, stream):
        """Recording again moves the event: waits from now on see the newer place, earlier ones do not."""
        self.log.append(f"{stream} records {event}")
        self._events[event] = dict(self._known_to(stream))

    def wait(self, stream, event):
        """As on the device, an event that was never recorded holds nothing up."""
        self.log.append(f"{stream} waits for {event}")
        _join(self._clocks[stream], self._events.get(event, {}))

    def synchronize(self, event):
        self.log.append(f"host waits for {event}")
        self.syncs += 1
        self.learn(event)

    def synchronize_device(self):
        """The host waits for all that was launched. Neither ``syncs`` counts that nor is a batch overwaited for it."""
        self.log.append("host waits for the device")
        for clock in self._clocks.values():
            _join(self._device_waits, clock)
        _join(self._host, self._device_waits)

    def learn(self, event):
        """The host knows that the device has passed ``event``: whatever it launches from now on comes after."""
        _join(self._host, self._events.get(event, {}))

    def passed(self, event):
        """Whether the host can know that the device has passed ``event``. It assumes nothing about speed."""
        return all(self._host.get(stream, 0) >= count for stream, count in self._events.get(event, {}).items())

    def receive(self, stream, batch, buffers=()):
        """``batch`` was handed over on ``stream``, which must not wait for work on batches that come later.

        Its ``buffers`` must not be written any more.
        """
        self.log.append(f"{stream} receives batch {batch}")
        self._latest_received = max(self._latest_received, batch)
        for buffer in buffers:
            self._buffers[buffer].handed_over = True
        for lane, count in self._known_to(stream).items():
            if count > self._device_waits.get(lane, 0) and self._batches[lane][count - 1] > self._latest_received:
                text = f"{stream} receives batch {batch} behind the work of {lane} on batch {self._batches[lane][count - 1]}"
                self._violate(OVERWAITED, text)

    def latest_batch(self, stream):
        """The latest batch that ``stream`` has worked on, or -1."""
        return self._batches[stream][-1] if self._batches[stream] else -1

    def rules(self):
        return [violation.rule for violation in self.violations]

    def report(self):
        """The violations, and what was launched before the last of them, for a failing test to show."""
        found = [f"{violation.rule}: {violation.text}" for violation in self.violations]
        return "\n".join([*found, "", *self.log[-60:]])

    def _access(self, stream, buffer, verb, part=None):
        occupant = self._buffers[buffer]
        clock, batches = self._known_to(stream), self._batches[stream]
        clock[stream] = clock.get(stream, 0) + 1
        batches.append(max(occupant.batch, self.latest_batch(stream)))
        now = _Access(stream, clock[stream], buffer, verb, part)
        self.log.append(str(now))
        if occupant.freed:
            self._violate(FREED, f"{now}, which had been given back")
        return occupant, now

    def _known_to(self, stream):
        """The clock of what ``stream`` launches next: after all it waited for, and after all the host knew."""
        clock = self._clocks[stream]
        _join(clock, self._host)
        return clock

    def _ordered(self, earlier, stream):
        return self._clocks[stream].get(earlier.stream, 0) >= earlier.count

    def _violate(self, rule, text):
        self.violations.append(Violation(rule, text))
        self.log.append(f"    ^ {rule}")


def _join(clock, other):
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)
