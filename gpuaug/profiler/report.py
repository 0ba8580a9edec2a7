"""Report of ``gpuaug.profile``: times of the parts of the work on a batch, and the bounds that follow from these times.

The loop is measured *streamed* (batches are launched ahead) and *in line* (``depth=0``: all work runs one after the other).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from gpuaug.core.errors import ArgumentError, shown
from gpuaug.core.plotting import html_lines, html_table
from gpuaug.profiler.measure import Spread, figure_text
from gpuaug.profiler.timeline import Timeline

LOAD, COPY, STEP = "load", "copy", "step"
"""Names of the parts that are no stages."""

DecodeKind = Literal["engines", "hybrid decoder", "cpu decoder", "video engines", "clip decoder", "beside engines"]

DECODERS: Final[Mapping[str, DecodeKind]] = {
    "engines": "engines",
    "hybrid": "hybrid decoder",
    "cpu": "cpu decoder",
    "nvdec": "video engines",
    "pyav": "clip decoder",
}
"""Name of the decoder that takes longest per batch → ``Part.kind``."""

SLOWER_THAN_ENGINES: Final = "beside engines"
"""``Part.kind`` of a decoding stage that uses the JPEG engines, and another decoder that takes longer per batch."""
DECODING = (*DECODERS.values(), SLOWER_THAN_ENGINES)
"""Values of ``Part.kind`` of decoding stages."""
PLAIN_BESIDE_ITERATOR = "plain (another iterator has the slots)"
"""Text for the feed if an open iterator of the user has the slots (page-locked memory), so that the profile has none."""

_WAIT_TEXTS = {
    "wait for loader": "for the loader",
    "wait for decoding": "for images to be decoded",
    "wait for boxes": "for the number of boxes",
    "hold back": "for the device, because depth + 2 batches were queued",
}
"""Name of a span in which the training thread waits → text for the report."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the work on a batch, measured alone."""

    name: str
    """``load``, ``copy``, ``stage/<name>`` or ``step``."""
    wall: Spread
    """Time from one call to the next, in milliseconds."""
    host: Spread | None = None
    """Time of the training thread to queue the part on an idle device, in milliseconds. ``None``: other threads do the work."""
    device_ms: float | None = None
    """Time in which the device is busy with the part, in milliseconds. ``None``: no work on a device, or not measured."""
    launches: int | None = None
    """Number of launches. ``None``: not measured."""
    waits_at: str | None = None
    """``file:line`` at which the part makes the training thread wait for the device; ``None`` without such a wait."""
    kind: Literal["", "fused", "kornia", "captured", "eager encoder"] | DecodeKind = ""
    """Type of the stage's work, on which the advice in the verdict depends."""
    runs: str = ""
    """Name of the transform if the user has not named the stage; else an empty string."""
    eager: "Part | None" = None
    """Times of the encoder without its CUDA graph; ``None`` for a part without a graph."""
    has_cache: bool = False
    """Whether the results of the encoder are stored in a feature cache."""


@dataclass(frozen=True)
class Report:
    """Times of the parts of a training step, the bound of the loop, and the gain from overlap. Times are per batch."""

    parts: tuple[Part, ...]
    """Parts in the order of the work: load, copy, stages, step."""
    in_line: Spread
    """Time of the loop with ``depth=0``: copy, stages and step run one after the other."""
    streamed: Spread
    """Time of the loop with batches launched ahead."""
    cached: Spread
    """Time of the step alone, on one batch that is on the device: a lower limit for every loader."""
    thread_ms: dict[str, float]
    """Part or wait, such as ``wait for loader`` → time of the training thread in the streamed loop, in milliseconds."""
    batch_bytes: int
    """Size of a batch's tensors in bytes, including attributes and items of objects with a ``to`` method."""
    pageable_bytes: int
    """Part of ``batch_bytes`` in memory that is not page-locked."""
    link_gb_per_s: float | None
    """Bandwidth of the link from host to device, in GB/s; ``None`` without a GPU."""
    lanes: bool
    """Whether the device has lanes (CUDA streams). Without lanes, as on a CPU, the training thread does all work."""
    settings: dict[str, Any]
    """``device``, ``depth``, ``feed``, ``workers``, ``batches``, ``rounds``."""
    timeline: Timeline = field(repr=False)
    """About ten batches of the streamed loop."""
    epoch_ms: float = 0.0
    """Time of the beginnings of epochs, included in ``streamed``: starting workers, and waiting for the first batch."""
    verdict: tuple[str, ...] = ()
    """Sentences about the bound of the loop, with advice, the most important first."""
    waits_for_loader_ms: tuple[float, ...] = field(default=(), repr=False)
    """Wait of the training thread for the loader, per batch of the streamed windows, without the first batch of an epoch."""
    plain_torch: str | None = None
    """Reason why ``gpuaug.fuse`` does not use Triton on the device, with advice; ``None`` if it uses Triton."""
    step_first: Spread | None = None
    """Time of the streamed loop inside ``gpuaug.step_first``; ``None`` without lanes or stages."""

    def part(self, name: str) -> Part:
        """Return the part with a given name.

        Args:
            name: ``load``, ``copy``, ``stage/<name>`` or ``step``.

        Returns:
            The part.

        Raises:
            ArgumentError: If no part has this name.
        """
        matches = [part for part in self.parts if isinstance(name, str) and part.name == name]
        if not matches:
            names = ", ".join(part.name for part in self.parts)
            raise ArgumentError(f"name must be the name of a part, got {shown(name)}. This report has {names}.")
        return matches[0]

    @property
    def load_ms(self) -> float:
        """Time of the wrapped loader alone."""
        return self.part(LOAD).wall.median

    @property
    def copy_ms(self) -> float:
        """Time of the copy on the link; 0 if the training thread copies, as on a CPU."""
        return self.part(COPY).device_ms or 0.0

    @property
    def host_ms(self) -> float:
        """Time of the training thread: launches and computation on the host."""
        return sum(part.host.median for part in self.parts if part.host is not None)

    @property
    def device_ms(self) -> float:
        """Sum of the device's busy times for the stages and the step."""
        return sum(part.device_ms or 0.0 for part in self.parts if part.name != COPY)

    @property
    def decode_ms(self) -> float:
        """Time of the decoders, on separate threads."""
        return max((part.wall.median for part in self.parts if part.kind in DECODING), default=0.0)

    @property
    def serial_ms(self) -> float:
        """``T_serial``: sum of the times of all parts."""
        return sum(part.wall.median for part in self.parts)

    @property
    def bound_ms(self) -> float:
        """``T_bound``: maximum of the times of the loader, link, decoders, training thread, and of each part on the device.

        It is a lower limit for the time per batch, reached if all work overlaps.
        """
        devices = (part.device_ms or 0.0 for part in self.parts)
        return max(self.load_ms, self.copy_ms, self.decode_ms, self.host_ms, *devices)

    @property
    def full_ms(self) -> float:
        """``T_full``: like ``T_bound``, but with the sum of the device's times, for stages and a step that fill the device."""
        return max(self.load_ms, self.copy_ms, self.decode_ms, self.host_ms, self.device_ms)

    @property
    def overlap_efficiency(self) -> float | None:
        """Fraction, in [0, 1], that overlap saves of the time that it could save. ``None`` if it could save less than 2 %."""
        possible = self.serial_ms - self.bound_ms
        if possible < 0.02 * self.serial_ms:
            return None
        return min(1.0, max(0.0, (self.serial_ms - self.streamed.median) / possible))

    @property
    def exposed_ms(self) -> float:
        """Time of the streamed loop minus the time of the step alone: work that does not overlap with the step."""
        return max(0.0, self.streamed.median - self.cached.median)

    @property
    def headspace(self) -> float:
        """Time of the streamed loop divided by the time of the step alone. 1 is the optimum."""
        return self.streamed.median / self.cached.median

    @property
    def copy_gb_per_s(self) -> float | None:
        """Bandwidth of the copies of batches, in GB/s; ``None`` if it is not known."""
        return self.batch_bytes / self.copy_ms / 1e6 if self.copy_ms and self.batch_bytes else None

    def figures(self) -> dict[str, float | None]:
        """Return name with unit, such as ``streamed_ms`` → value for the whole loop; ``None`` if it was not measured."""
        return {
            "streamed_ms": self.streamed.median,
            "step_first_ms": None if self.step_first is None else self.step_first.median,
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
        """Return the rows of a result file: the parts, the loops, and the figures of the whole loop."""
        rows: list[dict[str, Any]] = []
        for part in self.parts:
            row = {"name": part.name, "wall_ms": part.wall.median, "low_ms": part.wall.low, "high_ms": part.wall.high}
            optional = {
                "host_ms": part.host and part.host.median,
                "device_ms": part.device_ms,
                "launches": part.launches,
                "thread_ms": self.thread_ms.get(part.name),
                "eager_ms": part.eager and part.eager.wall.median,
                "eager_host_ms": part.eager and part.eager.host and part.eager.host.median,
            }
            rows.append(row | {key: value for key, value in optional.items() if value is not None})
        for name, loop in self._loops():
            rows.append({"name": name, "wall_ms": loop.median, "low_ms": loop.low, "high_ms": loop.high})
        rows.append({"name": "bounds"} | {key: value for key, value in self.figures().items() if value is not None})
        return rows

    def _loops(self) -> Iterator[tuple[str, Spread]]:
        """Yield (name, time per batch) of each loop that was measured."""
        yield "loop, in line", self.in_line
        yield "loop, streamed", self.streamed
        if self.step_first is not None:
            yield "loop, step first", self.step_first

    def lines(self) -> Iterator[tuple[str, ...]]:
        """Yield the lines of the table, heading first.

        Columns: name, time alone with its range, times of the training thread and the device alone, launches, and time of the
        training thread in the streamed loop.
        """
        yield ("ms per batch", "alone", "thread", "device", "launches", "in loop")
        for part in self.parts:
            host_ms = None if part.host is None else part.host.median
            times_ms = (host_ms, part.device_ms, self.thread_ms.get(part.name))
            host, device, in_loop = ("" if ms is None else figure_text(ms) for ms in times_ms)
            yield part.name, str(part.wall), host, device, "" if part.launches is None else str(part.launches), in_loop
        for name, loop in self._loops():
            yield (name, str(loop), "", "", "", "")

    def summary(self) -> Iterator[str]:
        """Yield lines of text with the figures of the whole loop."""
        yield (
            f"bounds: {figure_text(self.bound_ms)} ms if everything overlaps, {figure_text(self.full_ms)} ms if stages and "
            f"step fill the device, {figure_text(self.serial_ms)} ms without overlap"
        )
        efficiency = self.overlap_efficiency
        overlap = "nothing to overlap" if efficiency is None else f"overlap saves {efficiency:.0%} of the time that it can save"
        yield f"{overlap}; exposed: {figure_text(self.exposed_ms)} ms beyond the step; headspace: {self.headspace:.2f}"
        if self.copy_gb_per_s is not None and self.link_gb_per_s is not None:
            copy_rate, link_rate = figure_text(self.copy_gb_per_s), figure_text(self.link_gb_per_s)
            yield f"copy: {size_of(self.batch_bytes)} per batch at {copy_rate} GB/s; 64 MB copies reach {link_rate} GB/s"
        for name, reason in _WAIT_TEXTS.items():
            ms = self.thread_ms.get(name)
            if ms is not None and ms >= 0.005 * self.streamed.median:
                yield f"the training thread waited {figure_text(ms)} ms per batch {reason}"
        yield ", ".join(f"{key}: {value}" for key, value in self.settings.items())

    def __str__(self) -> str:
        lines = list(self.lines())
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        table = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
        return "\n".join([*table, "", *self.summary(), "", *(f"- {sentence}" for sentence in self.verdict)])

    def _repr_html_(self) -> str:
        return html_table(self.lines()) + html_lines((*self.verdict, *self.summary()))


def size_of(num_bytes: float) -> str:
    """Format a number of bytes, in GB, MB, kB or bytes."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{figure_text(num_bytes / size)} {unit}"
    return f"{num_bytes:.0f} bytes"
