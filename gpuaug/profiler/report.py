"""What ``gpuaug.profile`` found: where a batch's time goes, the bounds that follow from it, and what they say."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from gpuaug.core.errors import ArgumentError, shown
from gpuaug.core.notebook import html_lines, html_table
from gpuaug.profiler.measure import Spread, figure
from gpuaug.profiler.timeline import Timeline

LOAD, COPY, STEP = "load", "copy", "step"
DECODERS = ("engines", "cpu decoder")
"""Kinds of parts that decode."""
ANOTHER_ITERATOR = "plain (another iterator has the slots)"
"""The feed of a loader that is profiled while it is iterated over."""

_WAITS = {
    "wait for loader": "for the loader",
    "wait for decoding": "for images to be decoded",
    "hold back": "for the device, to which it was ahead",
}
"""Spans in which the training thread waits, and the words for each."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the work on a batch, measured by itself."""

    name: str
    """``load``, ``copy``, ``stage/<name>`` or ``step``."""
    wall: Spread
    """From one to the next, in milliseconds."""
    host: Spread | None = None
    """What of that the training thread needs to queue it on an idle device. ``None``: it is not that thread's work."""
    device_ms: float | None = None
    """How long the device works on it. ``None``: on the training thread, or not measured."""
    launches: int | None = None
    """Calls that queue it."""
    waits_at: str | None = None
    """Where the training thread waits in it for the device, as ``file:line``."""
    kind: Literal["", "fused", "kornia", "captured", "eager encoder", "engines", "cpu decoder"] = ""
    """What it is, where that matters for what can be done about it."""
    runs: str = ""
    """What a stage runs, where it was given no name of its own."""


@dataclass(frozen=True)
class Report:
    """Where a step's time goes, what bounds it, and whether overlap pays here. Times are milliseconds a batch."""

    parts: tuple[Part, ...]
    """In the order of the work: load, copy, stages, step."""
    in_line: Spread
    """The loop with an immediate wait for everything but the wrapped loader, ``depth=0``."""
    streamed: Spread
    """The loop with batches on their way ahead."""
    cached: Spread
    """The step alone, on one batch that is there: what no loader can beat."""
    thread_ms: dict[str, float]
    """What the training thread did in the streamed loop, by part; waits by their own names."""
    batch_bytes: int
    """Bytes of a batch, those left out that cannot be seen inside objects of other kinds."""
    pageable_bytes: int
    """Of these, bytes in memory that is not page-locked."""
    link_gb_per_s: float | None
    """What this machine's link does by itself; ``None`` without one."""
    lanes: bool
    """Whether the device has lanes. Without, as on a CPU, all is done in line on the training thread."""
    settings: dict[str, Any]
    """``device``, ``depth``, ``feed``, ``workers``, ``batches``, ``rounds``."""
    timeline: Timeline = field(repr=False)
    """Some ten batches of the streamed loop."""
    epoch_ms: float = 0.0
    """What of the streamed loop went into beginning epochs, shared among its batches: starting workers, and the first batch."""
    verdict: tuple[str, ...] = ()
    """What bounds the loop, in words, with what to do next; the most important first."""
    waits_for_loader_ms: tuple[float, ...] = field(default=(), repr=False)
    """Wait of the training thread for the loader, for each batch of the streamed windows but the first of an epoch."""

    def part(self, name: str) -> Part:
        """One part of the work on a batch.

        Args:
            name: ``load``, ``copy``, ``stage/<name>`` or ``step``.

        Returns:
            The part of that name.

        Raises:
            ArgumentError: If there is none.
        """
        found = [part for part in self.parts if isinstance(name, str) and part.name == name]
        if not found:
            known = ", ".join(part.name for part in self.parts)
            raise ArgumentError(f"name must be that of a part, got {shown(name)}. This report has {known}.")
        return found[0]

    @property
    def load_ms(self) -> float:
        """The wrapped loader by itself."""
        return self.part(LOAD).wall.median

    @property
    def copy_ms(self) -> float:
        """The copy on the link; 0 where it is the training thread's work, as on a CPU."""
        return self.part(COPY).device_ms or 0.0

    @property
    def host_ms(self) -> float:
        """What the training thread has to do for a batch: launches, and what it computes itself."""
        return sum(part.host.median for part in self.parts if part.host is not None)

    @property
    def device_ms(self) -> float:
        """What the stages and the step take of the device, added up."""
        return sum(part.device_ms or 0.0 for part in self.parts if part.name != COPY)

    @property
    def decode_ms(self) -> float:
        """What decoders need for a batch, on threads of their own."""
        return max((part.wall.median for part in self.parts if part.kind in DECODERS), default=0.0)

    @property
    def serial_ms(self) -> float:
        """``T_serial``: the parts by themselves, one after the other."""
        return sum(part.wall.median for part in self.parts)

    @property
    def bound_ms(self) -> float:
        """``T_bound``: the longest of the loader, the link, the decoders, the training thread and each stage on the device.

        No overlap can be faster.
        """
        devices = (part.device_ms or 0.0 for part in self.parts)
        return max(self.load_ms, self.copy_ms, self.decode_ms, self.host_ms, *devices)

    @property
    def full_ms(self) -> float:
        """``T_full``: the same if stages and step share a device that one of them fills, so that their times add up."""
        return max(self.load_ms, self.copy_ms, self.decode_ms, self.host_ms, self.device_ms)

    @property
    def overlap_efficiency(self) -> float | None:
        """How much of what overlap could save it did save, from 0 to 1; ``None`` where there is nothing to save."""
        possible = self.serial_ms - self.bound_ms
        if possible < 0.02 * self.serial_ms:
            return None
        return min(1.0, max(0.0, (self.serial_ms - self.streamed.median) / possible))

    @property
    def exposed_ms(self) -> float:
        """What a batch takes longer than the step alone: what is not hidden behind training."""
        return max(0.0, self.streamed.median - self.cached.median)

    @property
    def headspace(self) -> float:
        """The streamed loop's time over that of the step alone: 1 is all that a loader can give."""
        return self.streamed.median / self.cached.median

    @property
    def copy_gb_per_s(self) -> float | None:
        """What the copies of batches reach."""
        return self.batch_bytes / self.copy_ms / 1e6 if self.copy_ms and self.batch_bytes else None

    def figures(self) -> dict[str, float | None]:
        """The figures of the whole, by name, with their units."""
        return {
            "streamed_ms": self.streamed.median,
            "in_line_ms": self.in_line.median,
            "cached_ms": self.cached.median,
            "serial_ms": self.serial_ms,
            "bound_ms": self.bound_ms,
            "full_ms": self.full_ms,
            "exposed_ms": self.exposed_ms,
            "epoch_ms": self.epoch_ms,
            "headspace": self.headspace,
            "overlap_efficiency": self.overlap_efficiency,
            "copy_gb_per_s": self.copy_gb_per_s,
            "link_gb_per_s": self.link_gb_per_s,
        }

    def rows(self) -> list[dict[str, Any]]:
        """All of it as rows of a result file: the parts, the loops, and the figures of the whole."""
        rows: list[dict[str, Any]] = []
        for part in self.parts:
            row = {"name": part.name, "wall_ms": part.wall.median, "low_ms": part.wall.low, "high_ms": part.wall.high}
            more = {
                "host_ms": part.host and part.host.median,
                "device_ms": part.device_ms,
                "launches": part.launches,
                "thread_ms": self.thread_ms.get(part.name),
            }
            rows.append(row | {key: value for key, value in more.items() if value is not None})
        for name, loop in self._loops():
            rows.append({"name": name, "wall_ms": loop.median, "low_ms": loop.low, "high_ms": loop.high})
        rows.append({"name": "bounds"} | {key: value for key, value in self.figures().items() if value is not None})
        return rows

    def _loops(self) -> tuple[tuple[str, Spread], ...]:
        return ("loop, in line", self.in_line), ("loop, streamed", self.streamed)

    def lines(self) -> Iterator[tuple[str, ...]]:
        """The table, heading first: a part or a loop, its time with its spread, and what of it is where."""
        yield ("ms a batch", "alone", "thread", "device", "launches", "in loop")
        for part in self.parts:
            yield (
                part.name,
                str(part.wall),
                "" if part.host is None else figure(part.host.median),
                "" if part.device_ms is None else figure(part.device_ms),
                "" if part.launches is None else str(part.launches),
                figure(self.thread_ms[part.name]) if part.name in self.thread_ms else "",
            )
        for name, loop in self._loops():
            yield (name, str(loop), "", "", "", "")

    def summary(self) -> Iterator[str]:
        """The figures of the whole, a line each."""
        yield (
            f"bounds: {figure(self.bound_ms)} ms if all overlaps, {figure(self.full_ms)} if stages and step fill the device, "
            f"{figure(self.serial_ms)} one after the other"
        )
        efficiency = self.overlap_efficiency
        hidden = "nothing to overlap" if efficiency is None else f"overlap {efficiency:.0%} of what it could be"
        yield f"{hidden}; {figure(self.exposed_ms)} ms exposed beside the step; headspace {self.headspace:.2f}"
        if self.copy_gb_per_s is not None and self.link_gb_per_s is not None:
            rates = f"{figure(self.copy_gb_per_s)} GB/s, of the {figure(self.link_gb_per_s)} that the link does by itself"
            yield f"copy: {size_of(self.batch_bytes)} a batch at {rates}"
        for name, reason in _WAITS.items():
            ms = self.thread_ms.get(name)
            if ms is not None and ms >= 0.005 * self.streamed.median:
                yield f"the training thread waited {figure(ms)} ms a batch {reason}"
        yield ", ".join(f"{key}: {value}" for key, value in self.settings.items())

    def __str__(self) -> str:
        lines = list(self.lines())
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        table = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
        return "\n".join([*table, "", *self.summary(), "", *(f"- {said}" for said in self.verdict)])

    def _repr_html_(self) -> str:
        return html_table(self.lines()) + html_lines((*self.verdict, *self.summary()))

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        heading, *lines = self.lines()
        table = Table(box=None, pad_edge=False)
        for index, title in enumerate(heading):
            table.add_column(title, justify="right" if index else "left", no_wrap=index > 0, overflow="fold")
        for line in lines:
            table.add_row(*map(Text, line))
        said = (Text(f"- {text}", style="bold" if index == 0 else "") for index, text in enumerate(self.verdict))
        return Group(table, Text(), *map(Text, self.summary()), Text(), *said)


def size_of(num_bytes: float) -> str:
    """A number of bytes for people."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{figure(num_bytes / size)} {unit}"
    return f"{num_bytes:.0f} bytes"
