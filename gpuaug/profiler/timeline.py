"""The picture of a profiled run: the work on each batch, by lane, against time.

A timeline is drawn as one row a lane against time, or written as a trace that Perfetto and ``chrome://tracing`` open. It knows
nothing of loaders and devices: whoever profiles a run gives it the spans.
"""

import json
import os
from collections.abc import Iterator
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

_PICTURES = (".png", ".svg", ".pdf")
_NARROWEST_IN = 6.0  # room for the longest labels and titles
_WIDEST_IN = 400.0  # matplotlib draws at most 2**16 pixels
_LONGEST = 24  # characters of a label
_SHORTEST_PT = 1.2  # no bar is drawn narrower, so that a launch of microseconds is seen beside a step of seconds

# In rows: what is free above and below the bars of a lane, a bar, and from one sub-row to the next.
_FREE, _BAR, _NESTED, _GAP = 0.16, 0.68, 0.46, 0.05

# Petroff's ten colours, which eyes of every kind tell apart, in an order that puts unlike ones next to each other.
_COLOURS = ("#3f90da", "#a96b59", "#ffa90e", "#94a4a2", "#bd1f01", "#832db6", "#e76300", "#92dadd", "#717581", "#b9ac70")

# With the salt and without dates, a picture is the same file each time.
_STYLE = {"svg.hashsalt": "gpuaug", "hatch.linewidth": 0.6}
_UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


@dataclass(frozen=True, slots=True)
class Span:
    """One lane's work on one batch, or its wait for it."""

    lane: str
    """``loader`` (the background thread), ``thread`` (the training thread), ``copy``, ``stage/…``, ``consumer`` (the step)."""
    name: str
    """The kind of work, such as ``load``, ``step`` or ``wait for loader``."""
    batch: int
    """Number of the batch, from 0. It counts batches that are trained on and is no index into the dataset."""
    start_ms: float
    """When it began, in milliseconds."""
    end_ms: float
    """When it ended, on the same clock."""
    waits: bool = False
    """Whether it waited instead of working."""


@dataclass(frozen=True)
class Timeline:
    """The spans of a run, for pictures and traces. Times may count from any moment: a drawing begins at the first span."""

    SUFFIXES: ClassVar[tuple[str, ...]] = (*_PICTURES, ".json")
    """Suffixes of files that ``save`` writes: pictures, and a trace."""

    spans: tuple[Span, ...]
    """All of the run, in any order."""
    device: str
    """Name of the device, for the title."""
    depth: int
    """Depth of the loader, for the title."""

    def figure(self, width_in: float = 12.0) -> "Figure":
        """Draw one row a lane against time, a colour for each batch. Waits are pale and hatched.

        Spans that overlap within a lane are drawn below each other.

        Args:
            width_in: Width in inches. The height follows from the lanes.

        Returns:
            A figure of its own, which no pyplot state knows.

        Raises:
            ArgumentError: If the picture is too narrow or too wide, or matplotlib is missing.
        """
        is_number = isinstance(width_in, Real) and not isinstance(width_in, bool)
        if not is_number or not _NARROWEST_IN <= width_in <= _WIDEST_IN:
            rule = f"a number from {_NARROWEST_IN:g} to {_WIDEST_IN:g}"
            raise ArgumentError(f"width_in must be {rule}, got {shown(width_in)}. Names of lanes need room.")
        with _drawing():
            return _figure(self, width_in)

    def chrome_trace(self) -> dict[str, Any]:
        """The spans in Chrome's trace event format, a thread for each lane, ready for ``json.dump``."""
        events = [_metadata("process_name", 0, name=self.title())]
        origin_ms = _origin(self)
        used = 0
        for lane, spans in self.lanes().items():
            first = used + 1
            for span, track in _nested(spans):
                thread = first + track
                if thread > used:
                    used = thread
                    events.append(_metadata("thread_name", thread, name=lane))
                    events.append(_metadata("thread_sort_index", thread, sort_index=thread))
                # Both ends are rounded to what viewers keep, or neighbours might overlap by a nanosecond.
                start_ns, end_ns = (round((at_ms - origin_ms) * 1e6) for at_ms in (span.start_ms, span.end_ms))
                times = {"ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
                args = {"batch": span.batch, "waits": span.waits}
                events.append({"ph": "X", "name": span.name, "pid": 1, "tid": thread, **times, "args": args})
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, path: str | os.PathLike[str], *, width_in: float = 12.0) -> None:
        """Write a picture or, where the name ends with ``.json``, a trace. The folder is made if there is none.

        The same timeline gives the same file, byte for byte.

        Args:
            path: Of the file. Its end, one of ``SUFFIXES``, says what is written.
            width_in: Width of a picture in inches.

        Raises:
            ArgumentTypeError: If ``path`` is no path.
            ArgumentError: If the name ends otherwise, the picture is too narrow, or matplotlib is missing.
        """
        if not isinstance(path, str | os.PathLike):
            raise ArgumentTypeError(f"path must be a str or a path of pathlib, got {shown(path)}. Write 'timeline.png'.")
        path = Path(path)
        suffix = path.suffix.lower()
        if suffix not in self.SUFFIXES:
            rule = f"a name that ends with {', '.join(_PICTURES)} or .json"
            raise ArgumentError(f"path must be {rule}, got {shown(str(path))}. The end says what is written.")
        if suffix == ".json":
            text = json.dumps(self.chrome_trace(), allow_nan=False)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        figure = self.figure(width_in)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _drawing():
            figure.savefig(path, format=suffix[1:], dpi=150, metadata=_UNDATED.get(suffix))

    def title(self) -> str:
        """Title: number of batches, device and depth."""
        count = len({span.batch for span in self.spans})
        return f"{count} {'batch' if count == 1 else 'batches'} on {self.device}, depth {self.depth}"

    def _repr_png_(self) -> bytes | None:
        try:
            return self.figure()._repr_png_()
        except ArgumentError:  # without matplotlib a notebook shows the text
            return None

    def lanes(self) -> dict[str, list[Span]]:
        """Spans of each lane by their start. Lanes in the order of a batch's way, unknown ones last."""
        found: dict[str, list[Span]] = {}
        for span in sorted(self.spans, key=lambda span: (span.start_ms, -span.end_ms)):
            found.setdefault(span.lane, []).append(span)
        return {lane: found[lane] for lane in sorted(found, key=_place)}


def _place(lane: str) -> int:
    """Sort key of a lane. Stages keep the order of their first spans."""
    return 3 if lane.startswith("stage/") else {"loader": 0, "thread": 1, "copy": 2, "consumer": 4}.get(lane, 5)


def _origin(timeline: Timeline) -> float:
    return min((span.start_ms for span in timeline.spans), default=0.0)


def _metadata(name: str, thread: int, /, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": 1, "tid": thread, "args": args}


def _nested(spans: list[Span]) -> Iterator[tuple[Span, int]]:
    """Each span of a lane, and the first track on which it lies within or beside all others.

    Viewers drop a span that overlaps another of its thread without lying within it.
    """
    tracks: list[list[float]] = []  # the ends of the spans that are open on each
    for span in spans:
        for track, ends in enumerate([*tracks, []]):  # noqa: B007 - the last one always fits
            around = [end for end in ends if end > span.start_ms]
            if not around or span.end_ms <= around[-1]:
                break
        tracks[track : track + 1] = [[*around, span.end_ms]]
        yield span, track


def _levels(spans: list[Span], slack_ms: float) -> list[int]:
    """Sub-row of each span of a lane: the first free one. Overlaps up to ``slack_ms`` are invisible and allowed."""
    ends: list[float] = []
    levels = []
    for span in spans:
        level = next((level for level, end in enumerate(ends) if end <= span.start_ms + slack_ms), len(ends))
        ends[level : level + 1] = [span.end_ms]
        levels.append(level)
    return levels


def _drawing() -> AbstractContextManager[None]:
    return drawing("a timeline", ", or save as .json, which needs nothing", _STYLE)


def _figure(timeline: Timeline, width_in: float) -> "Figure":
    """Draw. The layout is made by hand, because a bar has to know how much text fits into it."""
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    from gpuaug.core.figure import Figure

    lanes = timeline.lanes()
    origin = _origin(timeline)
    size = 7 + width_in / 8
    extent_ms = max((span.end_ms for span in timeline.spans), default=origin) - origin
    unit, scale = ("s", 1e-3) if extent_ms >= 2000 else ("µs", 1e3) if 0 < extent_ms < 1 else ("ms", 1.0)
    end = extent_ms * scale or 1.0
    levels = [_levels(spans, extent_ms / 2000) for spans in lanes.values()]
    heights = [1 + _NESTED * max(found) for found in levels]
    tops = [sum(heights[:index]) for index in range(len(heights))]
    rows = max(sum(heights), 2.0)

    em = size / 72
    labels = [shortened(lane, _LONGEST) for lane in lanes]
    left_in = max((text_width_in(label, size) for label in labels), default=0.0) + 2 * em
    across_in = width_in - left_in - 1.5 * em
    down_in = 3.4 * em * rows
    above_in = 2.4 * em
    below_in = 4.2 * em
    height_in = above_in + down_in + below_in
    figure = Figure(figsize=(width_in, height_in))
    axes = figure.add_axes((left_in / width_in, below_in / height_in, across_in / width_in, down_in / height_in))
    shortest = end * _SHORTEST_PT / 72 / across_in
    axes.set(xlim=(0, end + shortest), ylim=(rows, 0))  # a bar that is drawn longer than it is may be the last

    for index, (spans, found) in enumerate(zip(lanes.values(), levels, strict=True)):
        if index % 2 == 0:
            axes.axhspan(tops[index], tops[index] + heights[index], color=BAND, linewidth=0, zorder=0)
        for span, level in zip(spans, found, strict=True):
            left = (span.start_ms - origin) * scale
            width = max((span.end_ms - span.start_ms) * scale, shortest)
            _bar(axes, span, left, width, tops[index], level, across_in * width / end, 0.85 * size)

    axes.set_yticks([top + height / 2 for top, height in zip(tops, heights, strict=True)], labels, parse_math=False)
    axes.xaxis.set_major_locator(MaxNLocator(max(4, int(across_in / (5 * em))), steps=[1, 2, 5, 10]))
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=size, labelcolor=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    foot = f"time in {unit}; a colour and a number for each batch"
    figure.text(left_in / width_in, 1.3 * em / height_in, foot, va="center", fontsize=size, color=INK)
    title = axes.set_title(timeline.title(), loc="left", fontsize=1.2 * size, color=INK, parse_math=False)
    title.set_x((0.8 * em - left_in) / across_in)
    if not timeline.spans:
        axes.text(0.5, 0.5, "no spans", transform=axes.transAxes, ha="center", va="center", fontsize=size, color=INK,
                  backgroundcolor="white")  # fmt: skip
    if any(span.waits for span in timeline.spans):
        shown = [Patch(**_look(_COLOURS[0], waits), label="waits" if waits else "works") for waits in (False, True)]
        corner = (1 - 1.5 * em / width_in, 1.3 * em / height_in)
        figure.legend(handles=shown, loc="center right", bbox_to_anchor=corner, ncols=2, frameon=False, borderpad=0,
                      borderaxespad=0, columnspacing=1.2, handletextpad=0.5, fontsize=size, labelcolor=INK)  # fmt: skip
    return figure


def _bar(axes: "Axes", span: Span, left: float, width: float, top: float, level: int, room_in: float, size: float) -> None:
    """Draw a span into its sub-row, with its name and batch number if they fit into ``room_in`` inches."""
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Rectangle

    top, height = (top + _FREE, _BAR) if level == 0 else (top + _FREE + _BAR + _GAP + _NESTED * (level - 1), _NESTED - _GAP)
    colour = _COLOURS[span.batch % len(_COLOURS)]
    look = _look(colour, span.waits)
    if not span.waits and room_in * 72 > 2 * _SHORTEST_PT:
        look |= {"edgecolor": "white", "linewidth": 0.6}  # or neighbours of one batch would look like one bar
    # Snapped to pixels, the white between short bars would come and go.
    axes.add_patch(Rectangle((left, top), width, height, zorder=2, snap=False, **look))
    number = str(span.batch)
    did = span.name.removeprefix("stage/")
    # A lane that does one thing is called after that.
    said = (number,) if span.name == span.lane else (f"{did} {number}", number)
    text = next((text for text in said if text_width_in(text, size) + 0.5 * size / 72 <= room_in), None)
    if text is None:
        return
    red, green, blue = to_rgb(colour)
    dark = span.waits or 0.299 * red + 0.587 * green + 0.114 * blue > 0.6
    box = {"facecolor": look["facecolor"], "linewidth": 0, "boxstyle": "square,pad=0.12"} if span.waits else None
    axes.text(left + width / 2, top + height / 2, text, ha="center", va="center_baseline", fontsize=size,
              color=INK if dark else "white", bbox=box, zorder=3)  # fmt: skip


def _look(colour: str, waits: bool) -> dict[str, Any]:
    """Fill and outline of a bar."""
    from matplotlib.colors import to_rgb

    if not waits:
        return {"facecolor": colour, "linewidth": 0.0}
    return {"facecolor": [0.2 * part + 0.8 for part in to_rgb(colour)], "edgecolor": colour, "hatch": "/////", "linewidth": 0.8}
