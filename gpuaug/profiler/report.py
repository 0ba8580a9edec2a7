"""The report of ``gpuaug.profile``: times of the parts of a batch, and the bounds that follow."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from gpuaug.core.errors import ArgumentError, shown
from gpuaug.core.plotting import html_lines, html_table
from gpuaug.profiler.measure import Spread, figure
from gpuaug.profiler.timeline import Timeline

LOAD, COPY, STEP = "load", "copy", "step"
Kind = Literal[
    "",
    "fused",
    "kornia",
    "captured",
    "eager encoder",
    "engines",
    "beside engines",
    "hybrid decoder",
    "cpu decoder",
    "video engines",
    "clip decoder",
]
"""Kind of a stage, where the advice depends on it."""

DECODERS: Final[Mapping[str, Kind]] = {
    "engines": "engines",
    "hybrid": "hybrid decoder",
    "cpu": "cpu decoder",
    "nvdec": "video engines",
    "pyav": "clip decoder",
}
"""Kind of a part that decodes, by the name of the decoder that its batches wait for longest."""

BESIDE_ENGINES: Final = "beside engines"
"""Kind of a part that decodes where engines are used and batches wait for another decoder."""
DECODING = (*DECODERS.values(), BESIDE_ENGINES)
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
    """Milliseconds from one call to the next."""
    host: Spread | None = None
    """Milliseconds of the training thread to queue it on an idle device. ``None``: work of other threads."""
    device_ms: float | None = None
    """Milliseconds in which the device is busy with it. ``None``: work of the host, or not measured."""
    launches: int | None = None
    """Launches that queue it."""
    waits_at: str | None = None
    """``file:line`` at which the training thread waits for the device in it, or ``None``."""
    kind: Kind = ""
    """Kind of the stage, where the advice depends on it."""
    runs: str = ""
    """Name of the transform that an unnamed stage runs."""
    eager: "Part | None" = None
    """The same encoder without its CUDA graph, if it has one."""


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
    """The step alone, on one batch that is on the device: no loader can be faster."""
    thread_ms: dict[str, float]
    """Milliseconds a batch of the training thread in the streamed loop, by part and by wait, such as ``wait for loader``."""
    batch_bytes: int
    """Bytes of a batch's tensors. Tensors hidden in objects of other kinds are not counted."""
    pageable_bytes: int
    """Of these, bytes in memory that is not page-locked."""
    link_gb_per_s: float | None
    """GB/s of this machine's link alone; ``None`` without a GPU."""
    lanes: bool
    """Whether the device has lanes. Without, as on a CPU, all is done in line on the training thread."""
    settings: dict[str, Any]
    """``device``, ``depth``, ``feed``, ``workers``, ``batches``, ``rounds``."""
    timeline: Timeline = field(repr=False)
    """Some ten batches of the streamed loop."""
    epoch_ms: float = 0.0
    """Part of ``streamed`` for beginning epochs: starting workers, and waiting for the first batch."""
    verdict: tuple[str, ...] = ()
    """What bounds the loop, in words, with what to do next; the most important first."""
    waits_for_loader_ms: tuple[float, ...] = field(default=(), repr=False)
    """Wait of the training thread for the loader, for each batch of the streamed windows but the first of an epoch."""
    plain_torch: str | None = None
    """Why ``gpuaug.fuse`` runs without Triton on the device, which is slow, and what to install; ``None`` where it does not."""

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
        """Work of the training thread for a batch: launches, and its own computation."""
        return sum(part.host.median for part in self.parts if part.host is not None)

    @property
    def device_ms(self) -> float:
        """Busy time of the device for the stages and the step, added up."""
        return sum(part.device_ms or 0.0 for part in self.parts if part.name != COPY)

    @property
    def decode_ms(self) -> float:
        """Time of the decoders for a batch, on their own threads."""
        return max((part.wall.median for part in self.parts if part.kind in DECODING), default=0.0)

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
        """Share of the time that overlap could save that it saved, from 0 to 1; ``None`` if it could save none."""
        possible = self.serial_ms - self.bound_ms
        if possible < 0.02 * self.serial_ms:
            return None
        return min(1.0, max(0.0, (self.serial_ms - self.streamed.median) / possible))

    @property
    def exposed_ms(self) -> float:
        """Time of a batch beyond the step alone: not hidden behind training."""
        return max(0.0, self.streamed.median - self.cached.median)

    @property
    def headspace(self) -> float:
        """The streamed loop's time over that of the step alone: 1 is all that a loader can give."""
        return self.streamed.median / self.cached.median

    @property
    def copy_gb_per_s(self) -> float | None:
        """GB/s of the copies of batches."""
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
        """The report as rows of a result file: the parts, the loops, and the figures of the whole."""
        rows: list[dict[str, Any]] = []
        for part in self.parts:
            row = {"name": part.name, "wall_ms": part.wall.median, "low_ms": part.wall.low, "high_ms": part.wall.high}
            more = {
                "host_ms": part.host and part.host.median,
                "device_ms": part.device_ms,
                "launches": part.launches,
                "thread_ms": self.thread_ms.get(part.name),
                "eager_ms": part.eager and part.eager.wall.median,
                "eager_host_ms": part.eager and part.eager.host and part.eager.host.median,
            }
            rows.append(row | {key: value for key, value in more.items() if value is not None})
        for name, loop in self._loops():
            rows.append({"name": name, "wall_ms": loop.median, "low_ms": loop.low, "high_ms": loop.high})
        rows.append({"name": "bounds"} | {key: value for key, value in self.figures().items() if value is not None})
        return rows

    def _loops(self) -> tuple[tuple[str, Spread], ...]:
        return ("loop, in line", self.in_line), ("loop, streamed", self.streamed)

    def lines(self) -> Iterator[tuple[str, ...]]:
        """The table, heading first: a part or a loop, its time with its spread, and its share of thread and device."""
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
