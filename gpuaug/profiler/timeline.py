"""``Timeline`` of a profiled run: the work on each batch against time, one row per *lane* (CUDA stream or host thread).

A *span* is the work of one lane on one batch. A timeline is drawn as a picture, or written as a trace that Perfetto and
``chrome://tracing`` open.
"""

import json
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gpuaug.core.errors import ArgumentError, ArgumentTypeError, shown
from gpuaug.core.plotting import BAND, FAINT, INK, drawing, shortened, text_width_in

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gpuaug.core.figure import Figure

_PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
_MIN_WIDTH_IN = 6.0  # the longest labels and titles fit into this width
_MAX_WIDTH_IN = 400.0  # matplotlib draws at most 2**16 pixels
_MAX_LABEL = 24  # characters of a label
_MIN_BAR_PT = 1.2  # smallest width of a bar, so that a launch of microseconds is visible beside a step of seconds

# In units of a row: margin above and below the bars of a lane, height of a bar, height of a sub-row, gap between sub-rows. Bars
# that overlap with another bar of the lane are drawn in a sub-row below it.
_MARGIN, _BAR, _NESTED, _GAP = 0.16, 0.68, 0.46, 0.05

# Petroff's ten colours, distinguishable with colour blindness, in an order in which neighbours differ.
_COLOURS = ("#3f90da", "#a96b59", "#ffa90e", "#94a4a2", "#bd1f01", "#832db6", "#e76300", "#92dadd", "#717581", "#b9ac70")

# With a fixed salt and without dates, the same picture gives the same file.
_STYLE = {"svg.hashsalt": "gpuaug", "hatch.linewidth": 0.6}
_METADATA_WITHOUT_DATE = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


@dataclass(frozen=True, slots=True)
class Span:
    """Work of one lane on one batch, or a wait."""

    lane: str
    """``loader`` (the background thread), ``thread`` (the training thread), ``copy``, ``stage/…``, ``consumer`` (the step)."""
    name: str
    """Name of the work, such as ``load``, ``step`` or ``wait for loader``."""
    batch: int
    """Index of the batch in the recording, from 0."""
    start_ms: float
    """Start in milliseconds."""
    end_ms: float
    """End in milliseconds, on the same clock."""
    waits: bool = False
    """Whether the lane waited instead of working."""


@dataclass(frozen=True)
class Timeline:
    """Spans of a run, for pictures and traces, which begin at the first span. Times may have any origin."""

    SUFFIXES: ClassVar[tuple[str, ...]] = (*_PICTURE_SUFFIXES, ".json")
    """File suffixes that ``save`` accepts: pictures, and a trace."""

    spans: tuple[Span, ...]
    """Spans in any order."""
    device: str
    """Name of the device, for the title."""
    depth: int
    """Depth of the loader, for the title."""

    def figure(self, width_in: float = 12.0) -> "Figure":
        """Draw one row per lane against time, in one colour per batch. Waits are pale and hatched.

        Spans that overlap within a lane are drawn below each other.

        Args:
            width_in: Width in inches. The height depends on the number of lanes.

        Returns:
            A new figure, which is not registered with pyplot.

        Raises:
            ArgumentError: If the picture is too narrow or too wide, or matplotlib is missing.
        """
        is_number = isinstance(width_in, Real) and not isinstance(width_in, bool)
        if not is_number or not _MIN_WIDTH_IN <= width_in <= _MAX_WIDTH_IN:
            rule = f"a number from {_MIN_WIDTH_IN:g} to {_MAX_WIDTH_IN:g}"
            raise ArgumentError(f"width_in must be {rule}, got {shown(width_in)}. Lane names need this width.")
        with _drawing():
            return _figure(self, float(width_in))

    def chrome_trace(self) -> dict[str, Any]:
        """Return the spans in Chrome's trace event format. Overlapping spans of a lane are on several threads of the trace."""
        events = [_metadata("process_name", 0, name=self.title())]
        origin_ms = _origin(self)
        num_threads = 0  # in the trace so far
        for lane, spans in self.lanes().items():
            first_thread = num_threads + 1
            for span, sub_row in zip(spans, _sub_rows(spans), strict=True):
                thread = first_thread + sub_row
                if thread > num_threads:
                    num_threads = thread
                    events.append(_metadata("thread_name", thread, name=lane))
                    events.append(_metadata("thread_sort_index", thread, sort_index=thread))
                # Rounded to nanoseconds, as viewers do, so that neighbouring spans do not overlap by a nanosecond.
                start_ns, end_ns = (round((at_ms - origin_ms) * 1e6) for at_ms in (span.start_ms, span.end_ms))
                times = {"ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
                args = {"batch": span.batch, "waits": span.waits}
                events.append({"ph": "X", "name": span.name, "pid": 1, "tid": thread, **times, "args": args})
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, path: str | os.PathLike[str], *, width_in: float = 12.0) -> None:
        """Write a picture or, if the suffix is ``.json``, a trace. Missing folders are created.

        Files of the same timeline are equal, byte for byte.

        Args:
            path: Path of the file. Its suffix, one of ``SUFFIXES``, determines the format.
            width_in: Width of a picture in inches.

        Raises:
            ArgumentTypeError: If ``path`` is not a path.
            ArgumentError: If the suffix is not one of ``SUFFIXES``, the picture is too narrow, or matplotlib is missing.
        """
        if not isinstance(path, str | os.PathLike):
            raise ArgumentTypeError(f"path must be a str or a path of pathlib, got {shown(path)}. Write 'timeline.png'.")
        path = Path(path)
        suffix = path.suffix.lower()
        if suffix not in self.SUFFIXES:
            rule = f"a name that ends with {', '.join(_PICTURE_SUFFIXES)} or .json"
            raise ArgumentError(f"path must be {rule}, got {shown(str(path))}. The suffix selects the format.")
        if suffix == ".json":
            text = json.dumps(self.chrome_trace(), allow_nan=False)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        figure = self.figure(width_in)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _drawing():
            figure.savefig(path, format=suffix[1:], dpi=150, metadata=_METADATA_WITHOUT_DATE.get(suffix))

    def title(self) -> str:
        """Return the title: number of batches, device and depth."""
        count = len({span.batch for span in self.spans})
        return f"{count} {'batch' if count == 1 else 'batches'} on {self.device}, depth {self.depth}"

    def _repr_png_(self) -> bytes | None:
        try:
            return self.figure()._repr_png_()
        except ArgumentError:  # without matplotlib, a notebook shows the text
            return None

    def lanes(self) -> dict[str, list[Span]]:
        """Return lane → spans, sorted by start. Lanes are in the order of the work on a batch, unknown lanes last."""
        by_lane: dict[str, list[Span]] = {}
        for span in sorted(self.spans, key=lambda span: (span.start_ms, -span.end_ms)):
            by_lane.setdefault(span.lane, []).append(span)
        return {lane: by_lane[lane] for lane in sorted(by_lane, key=_lane_order)}


def _lane_order(lane: str) -> int:
    """Return the sort key of a lane. Stages have the same key, so they keep the order of their first spans."""
    return 3 if lane.startswith("stage/") else {"loader": 0, "thread": 1, "copy": 2, "consumer": 4}.get(lane, 5)


def _origin(timeline: Timeline) -> float:
    """Return the start of the first span, in milliseconds."""
    return min((span.start_ms for span in timeline.spans), default=0.0)


def _metadata(name: str, thread: int, /, **args: Any) -> dict[str, Any]:
    """Return an event of a Chrome trace that describes a thread, or as thread 0 the process."""
    return {"ph": "M", "name": name, "pid": 1, "tid": thread, "args": args}


def _sub_rows(spans: list[Span], slack_ms: float = 0.0) -> list[int]:
    """Return, for each span of a lane, the index of the first sub-row that is free when the span starts.

    Args:
        spans: Spans of the lane, sorted by start.
        slack_ms: Overlap in milliseconds, too short to be visible, with which two spans share a sub-row.
    """
    ends: list[float] = []  # end of the last span in each sub-row
    sub_rows = []
    for span in spans:
        sub_row = next((index for index, end in enumerate(ends) if end <= span.start_ms + slack_ms), len(ends))
        ends[sub_row : sub_row + 1] = [span.end_ms]
        sub_rows.append(sub_row)
    return sub_rows


def _drawing() -> AbstractContextManager[None]:
    """Return the context in which matplotlib draws a timeline. It raises the error about a missing matplotlib."""
    return drawing("a timeline", ", or save as .json, which does not need it", _STYLE)


def _figure(timeline: Timeline, width_in: float) -> "Figure":
    """Draw the timeline. Positions are computed here, not by matplotlib, because labels must fit into bars."""
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    from gpuaug.core.figure import Figure

    lanes = timeline.lanes()
    origin = _origin(timeline)
    size = 7 + width_in / 8
    extent_ms = max((span.end_ms for span in timeline.spans), default=origin) - origin
    unit, scale = ("s", 1e-3) if extent_ms >= 2000 else ("µs", 1e3) if 0 < extent_ms < 1 else ("ms", 1.0)
    end = extent_ms * scale or 1.0
    sub_rows = [_sub_rows(spans, extent_ms / 2000) for spans in lanes.values()]
    heights = [1 + _NESTED * max(sub_rows_of_lane) for sub_rows_of_lane in sub_rows]
    tops = [sum(heights[:index]) for index in range(len(heights))]
    rows = max(sum(heights), 2.0)  # height of all lanes, in rows

    em = size / 72  # font size in inches
    labels = [shortened(lane, _MAX_LABEL) for lane in lanes]
    left_in = max((text_width_in(label, size) for label in labels), default=0.0) + 2 * em  # for the names of lanes
    across_in = width_in - left_in - 1.5 * em  # width of the axes
    down_in = 3.4 * em * rows  # height of the axes
    above_in = 2.4 * em
    below_in = 4.2 * em
    height_in = above_in + down_in + below_in
    figure = Figure(figsize=(width_in, height_in))
    axes = figure.add_axes((left_in / width_in, below_in / height_in, across_in / width_in, down_in / height_in))
    shortest = end * _MIN_BAR_PT / 72 / across_in  # smallest width of a bar, in the unit of time
    axes.set(xlim=(0, end + shortest), ylim=(rows, 0))  # the last bar may be drawn longer than its span

    for index, (spans, sub_rows_of_lane) in enumerate(zip(lanes.values(), sub_rows, strict=True)):
        if index % 2 == 0:
            axes.axhspan(tops[index], tops[index] + heights[index], color=BAND, linewidth=0, zorder=0)
        for span, sub_row in zip(spans, sub_rows_of_lane, strict=True):
            left = (span.start_ms - origin) * scale
            width = max((span.end_ms - span.start_ms) * scale, shortest)
            _bar(axes, span, left, width, tops[index], sub_row, across_in * width / end, 0.85 * size)

    axes.set_yticks([top + height / 2 for top, height in zip(tops, heights, strict=True)], labels, parse_math=False)
    axes.xaxis.set_major_locator(MaxNLocator(max(4, int(across_in / (5 * em))), steps=[1, 2, 5, 10]))
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=size, labelcolor=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    footer = f"time in {unit}; one colour and number per batch"
    figure.text(left_in / width_in, 1.3 * em / height_in, footer, va="center", fontsize=size, color=INK)
    title = axes.set_title(timeline.title(), loc="left", fontsize=1.2 * size, color=INK, parse_math=False)
    title.set_x((0.8 * em - left_in) / across_in)
    if not timeline.spans:
        axes.text(0.5, 0.5, "no spans", transform=axes.transAxes, ha="center", va="center", fontsize=size, color=INK,
                  backgroundcolor="white")  # fmt: skip
    if any(span.waits for span in timeline.spans):
        patches = [Patch(**_bar_style(_COLOURS[0], waits), label="waits" if waits else "works") for waits in (False, True)]
        corner = (1 - 1.5 * em / width_in, 1.3 * em / height_in)
        figure.legend(handles=patches, loc="center right", bbox_to_anchor=corner, ncols=2, frameon=False, borderpad=0,
                      borderaxespad=0, columnspacing=1.2, handletextpad=0.5, fontsize=size, labelcolor=INK)  # fmt: skip
    return figure


def _bar(axes: "Axes", span: Span, left: float, width: float, top: float, sub_row: int, room_in: float, size: float) -> None:
    """Draw a span in its sub-row, with its name and batch index if they fit.

    Args:
        axes: Axes with the unit of time horizontally, and of a row vertically.
        span: The span.
        left: Left edge of the bar, in the unit of time.
        width: Width of the bar, in the unit of time.
        top: Top of the row of the lane.
        sub_row: Index of the sub-row.
        room_in: Width of the bar in inches.
        size: Font size in points.
    """
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Rectangle

    top += _MARGIN
    height = _BAR
    if sub_row > 0:
        top += _BAR + _GAP + _NESTED * (sub_row - 1)
        height = _NESTED - _GAP
    colour = _COLOURS[span.batch % len(_COLOURS)]
    style = _bar_style(colour, span.waits)
    if not span.waits and room_in * 72 > 2 * _MIN_BAR_PT:
        style |= {"edgecolor": "white", "linewidth": 0.6}  # separates neighbouring bars of one batch
    # Not snapped to pixels, which would make the white edges of short bars irregular.
    axes.add_patch(Rectangle((left, top), width, height, zorder=2, snap=False, **style))
    number = str(span.batch)
    name = span.name.removeprefix("stage/")
    # The name of a span that is named after its lane is left out.
    candidates = (number,) if span.name == span.lane else (f"{name} {number}", number)
    text = next((text for text in candidates if text_width_in(text, size) + 0.5 * size / 72 <= room_in), None)
    if text is None:
        return
    red, green, blue = to_rgb(colour)
    needs_dark_text = span.waits or 0.299 * red + 0.587 * green + 0.114 * blue > 0.6
    box = {"facecolor": style["facecolor"], "linewidth": 0, "boxstyle": "square,pad=0.12"} if span.waits else None
    axes.text(left + width / 2, top + height / 2, text, ha="center", va="center_baseline", fontsize=size,
              color=INK if needs_dark_text else "white", bbox=box, zorder=3)  # fmt: skip


def _bar_style(colour: str, waits: bool) -> dict[str, Any]:
    """Return matplotlib's arguments for the fill and outline of a bar."""
    from matplotlib.colors import to_rgb

    if not waits:
        return {"facecolor": colour, "linewidth": 0.0}
    return {"facecolor": [0.2 * part + 0.8 for part in to_rgb(colour)], "edgecolor": colour, "hatch": "/////", "linewidth": 0.8}
