"""The picture of a timeline: what is in it, and that it can be read."""

import io
import json
import random
import sys
from itertools import combinations, pairwise

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from PIL import Image
from support.profiler.timelines import events, of, run

from gpuaug.core.errors import ArgumentError
from gpuaug.profiler.timeline import Span, Timeline

LONG = "stage/a_very_long_name_of_a_feature_stage_with_many_words"
SIGNS = {".png": b"\x89PNG\r\n", ".svg": b"<?xml", ".pdf": b"%PDF-"}


def drawn(figure):
    """The axes of a figure, the names of its rows, and its bars: lane by lane, each from left to right."""
    (axes,) = figure.axes
    return axes, [label.get_text() for label in axes.get_yticklabels()], [bar for bar in axes.patches if bar.get_zorder() == 2]


def bars(timeline, width_in=12.0):
    """Each span with its bar."""
    spans = [span for lane in timeline.lanes().values() for span in lane]
    return list(zip(spans, drawn(timeline.figure(width_in))[2], strict=True))


def colour(bar):
    """What tells the batch: the outline of what waits, or else the filling."""
    return to_hex(bar.get_edgecolor() if bar.get_hatch() else bar.get_facecolor())


def box(figure, artist):
    canvas = figure.canvas if isinstance(figure.canvas, FigureCanvasAgg) else FigureCanvasAgg(figure)
    return artist.get_window_extent(canvas.get_renderer())


def test_lanes_are_in_the_order_of_a_batchs_way():
    lanes = ["zoo", "consumer", "stage/z", "copy", "stage/a", "ant", "thread", "loader"]
    timeline = of(*(Span(lane, "it", 0, start, start + 1) for start, lane in enumerate(lanes)))
    rows = ["loader", "thread", "copy", "stage/z", "stage/a", "consumer", "zoo", "ant"]
    assert list(timeline.lanes()) == rows
    axes, labels, _ = drawn(timeline.figure())
    assert labels == rows
    assert list(axes.get_yticks()) == sorted(axes.get_yticks())
    assert axes.yaxis_inverted()


def test_bars_are_at_their_spans_times_and_in_their_lanes_row():
    timeline = run(3, at=123456.0)
    axes, rows, _ = drawn(timeline.figure())
    origin = min(span.start_ms for span in timeline.spans)
    for span, bar in bars(timeline):
        assert bar.get_x() == pytest.approx(span.start_ms - origin)
        assert bar.get_width() == pytest.approx(span.end_ms - span.start_ms)
        assert bar.get_snap() is False, "it is drawn to the pixel where it is"
        middle = bar.get_y() + bar.get_height() / 2
        assert rows[min(range(len(rows)), key=lambda row: abs(axes.get_yticks()[row] - middle))] == span.lane


def test_colour_of_a_batch_is_the_same_in_all_lanes_and_repeats_after_ten():
    seen = {}
    for span, bar in bars(run(11)):
        seen.setdefault(span.batch, set()).add(colour(bar))
    assert all(len(colours) == 1 for colours in seen.values())
    assert len(set.union(*(seen[batch] for batch in range(10)))) == 10
    assert seen[10] == seen[0]


def test_waits_are_hatched_and_in_the_legend():
    timeline = run(3)
    for span, bar in bars(timeline):
        assert bool(bar.get_hatch()) == span.waits
        assert (min(bar.get_facecolor()[:3]) >= 0.8) == span.waits
        assert bar.get_linewidth() > 0 or not span.waits
    (legend,) = timeline.figure().legends
    assert [text.get_text() for text in legend.get_texts()] == ["works", "waits"]
    assert [bool(patch.get_hatch()) for patch in legend.get_patches()] == [False, True]
    assert not of(Span("copy", "copy", 0, 0, 1)).figure().legends


@pytest.mark.parametrize("width_in", [6, 12])
def test_batch_numbers_are_within_their_bars(width_in):
    timeline = run(batches=12)
    figure = timeline.figure(width_in)
    axes, _, found = drawn(figure)
    owners, outers = {}, [box(figure, bar) for bar in found]
    for text in axes.texts:
        inside = box(figure, text)
        around = [bar for bar, outer in zip(found, outers, strict=True) if outer.x0 < inside.x0 and inside.x1 < outer.x1
                  and outer.y0 < inside.y0 and inside.y1 < outer.y1]  # fmt: skip
        assert len(around) == 1, text
        owners[around[0]] = text.get_text()
    spans = [span for lane in timeline.lanes().values() for span in lane]
    for span, bar in zip(spans, found, strict=True):
        *did, number = owners.get(bar, str(span.batch)).split()
        assert number == str(span.batch)
        assert did in ([], [span.name.removeprefix("stage/")] if span.name != span.lane else [])
    assert width_in == 6 or {"step 5", "load 6"} <= set(owners.values()), "there is room to say what was done"
    steps = [bar for span, bar in zip(spans, found, strict=True) if span.name == "step"]
    assert all(bar in owners for bar in steps), "there is room in these"
    assert len(owners) < len(found), "and none in some"


def test_overlapping_spans_of_a_lane_have_rows_of_their_own():
    spans = [Span("thread", "launch", 0, 0, 10), Span("thread", "a", 0, 1, 4), Span("thread", "b", 0, 2, 3)]
    spans += [Span("thread", "c", 0, 5, 12), Span("copy", "copy", 0, 0, 10)]
    found = [bar for _, bar in bars(of(*spans))]
    for one, other in combinations(found, 2):
        across = min(one.get_x() + one.get_width(), other.get_x() + other.get_width()) - max(one.get_x(), other.get_x())
        down = min(one.get_y() + one.get_height(), other.get_y() + other.get_height()) - max(one.get_y(), other.get_y())
        assert across <= 0 or down <= 0
    assert len({bar.get_y() for bar in found}) == 4, "what fits beside an earlier bar shares its row"


def test_nested_span_is_below_the_outer_one():
    for start in (0, 1):
        inner, outer = Span("thread", "copy", 0, start, 4), Span("thread", "launch", 0, 0, 10)
        (above, top), (below, under) = bars(of(inner, outer))
        assert (above, below) == (outer, inner)
        assert top.get_y() < under.get_y()


def test_invisible_overlap_opens_no_row():
    found = bars(of(*(Span("copy", "copy", batch, batch * 10.0, batch * 10 + 10.001) for batch in range(5))))
    assert len({bar.get_y() for _, bar in found}) == 1


@pytest.mark.parametrize("width_in", [6, 20])
def test_shortest_spans_are_visible(width_in):
    spans = [Span("consumer", "step", 0, 0, 1000)]
    spans += [Span("copy", "copy", batch, start, start + 1e-3) for batch, start in enumerate((0, 500, 999.999))]
    figure = of(*spans, Span("copy", "copy", 3, 1000, 1000)).figure(width_in)
    axes, _, found = drawn(figure)
    for bar in found:
        assert box(figure, bar).width / figure.dpi * 72 > 1.1
        assert box(figure, bar).x1 <= box(figure, axes).x1 + 0.1, "it would be cut off"


@pytest.mark.parametrize("width_in", [6, 20])
def test_long_lane_names_are_shortened(width_in):
    figure = of(Span(LONG, LONG, 0, 0, 1), Span("stage/with_24_characters", "it", 0, 1, 2)).figure(width_in)
    axes, (short, whole), _ = drawn(figure)
    assert whole == "stage/with_24_characters"
    assert len(short) == 24
    assert LONG.startswith(short.split("…")[0])
    assert LONG.endswith(short.split("…")[1])
    assert axes.get_position().width > 0.6
    assert all(box(figure, label).x0 >= 0 for label in axes.get_yticklabels())


def test_lane_names_are_no_formulas():
    timeline = Timeline((Span("stage/$x^2^2$", "it", 0, 0, 1), Span(" ", "it", 0, 0, 1), Span("", "it", 0, 0, 1)), "$x^2^2$", 2)
    figure = timeline.figure()
    assert drawn(figure)[1] == ["stage/$x^2^2$", " ", ""]
    figure.savefig(io.BytesIO())


@pytest.mark.parametrize(("scale", "unit", "end"), [(1e-4, "µs", 10.2), (1.0, "ms", 102.0), (1e3, "s", 102.0)])
def test_time_axis_unit_and_origin(scale, unit, end):
    figure = run(3, scale=scale).figure()
    assert [text.get_text() for text in figure.texts] == [f"time in {unit}; one colour and number per batch"]
    first, last = drawn(figure)[0].get_xlim()
    assert first == 0
    assert last == pytest.approx(37 * scale * {"µs": 1e3, "ms": 1, "s": 1e-3}[unit], rel=0.01)


def test_title_has_batches_device_and_depth():
    assert drawn(run().figure())[0].get_title(loc="left") == "12 batches on NVIDIA H200, depth 2"
    assert drawn(of(Span("copy", "copy", 7, 0, 1)).figure())[0].get_title(loc="left") == "1 batch on CPU, depth 2"


@pytest.mark.parametrize("lanes", [2, 12])
def test_texts_do_not_overlap(lanes):
    timeline = run(batches=4, stages=[f"{LONG}_{index}" for index in range(lanes)])
    timeline = Timeline(timeline.spans, "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 2)
    figure = timeline.figure(6)
    axes = drawn(figure)[0]
    title = axes.findobj(lambda artist: getattr(artist, "get_text", str)() == timeline.title())
    last = axes.get_xlim()[1]
    times = [label for at, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True) if 0 <= at <= last]
    boxes = [box(figure, text) for text in (*title, *times, *figure.texts, *axes.get_yticklabels(), *figure.legends)]
    assert len(boxes) >= 1 + 4 + 1 + (4 + lanes) + 1
    assert all(one.x0 >= 0 and one.x1 <= figure.bbox.x1 and one.y0 >= 0 and one.y1 <= figure.bbox.y1 for one in boxes)
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]


@pytest.mark.parametrize(
    ("timeline", "suffix"),
    [
        *((run(2), suffix) for suffix in (".png", ".svg", ".pdf", ".json")),
        *((timeline, suffix) for timeline in (of(), of(Span("copy", "copy", 0, 5, 5))) for suffix in (".PNG", ".json")),
    ],
)
def test_save_makes_the_folder_and_a_readable_file(tmp_path, suffix, timeline):
    path = tmp_path / "new" / "folder" / f"run{suffix}"
    timeline.save(str(path), width_in=6)
    if suffix == ".json":
        assert json.loads(path.read_text()) == timeline.chrome_trace()
    else:
        assert path.read_bytes().startswith(SIGNS[suffix.lower()])
    if suffix in (".png", ".PNG"):
        with Image.open(path) as image:
            image.load()
            assert image.width == 900
    assert [other.name for other in path.parent.iterdir()] == [path.name]


def test_figure_without_spans():
    axes, labels, found = drawn(of().figure())
    assert (labels, found) == ([], [])
    assert axes.get_title(loc="left") == "0 batches on CPU, depth 2"
    assert [text.get_text() for text in axes.texts] == ["no spans"]
    assert [event["name"] for event in of().chrome_trace()["traceEvents"]] == ["process_name"]


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_save_is_deterministic_whatever_the_users_style(tmp_path, suffix, monkeypatch):
    paths = [tmp_path / f"{name}{suffix}" for name in "ab"]
    run(1).save(paths[0], width_in=6)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")  # the time is another one now
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 20, "svg.hashsalt": None, "axes.grid": True}):
        before = dict(matplotlib.rcParams)
        run(1).save(paths[1], width_in=6)
        assert dict(matplotlib.rcParams) == before
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_notebook_shows_the_picture(monkeypatch):
    with matplotlib.rc_context({"savefig.facecolor": "black", "savefig.bbox": "tight"}):
        picture = Image.open(io.BytesIO(run(2)._repr_png_()))
    width_in, height_in = run(2).figure().get_size_inches()
    assert picture.size == pytest.approx((100 * width_in, 100 * height_in), abs=1)
    assert picture.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    assert run()._repr_png_() is None


def test_figure_needs_matplotlib_and_trace_does_not(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (run().figure, lambda: run().save(tmp_path / "new" / "run.png")):
        with pytest.raises(ArgumentError) as caught:
            draw()
        what, way_out = str(caught.value).split(", because matplotlib cannot be imported: ")
        assert what == "Drawing a timeline failed"
        assert way_out.endswith(". Run pip install matplotlib, or save as .json, which does not need it.")
        assert isinstance(caught.value.__cause__, ImportError)
    assert not list(tmp_path.iterdir())
    run().save(tmp_path / "run.json")


# Chrome trace


def test_trace_has_named_threads_for_each_lane_in_the_order_of_rows():
    timeline = run()
    trace = timeline.chrome_trace()
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] == "ms"
    assert all(set(event) == {"ph", "name", "pid", "tid", "args"} for event in events(timeline, "M"))
    assert len({event["pid"] for event in trace["traceEvents"]}) == 1
    told = {}
    for event in events(timeline, "M"):
        told.setdefault(event["name"], []).append((event["tid"], *event["args"].values()))
    assert [name for _, name in told["process_name"]] == ["12 batches on NVIDIA H200, depth 2"]
    names, order = dict(told["thread_name"]), dict(told["thread_sort_index"])
    assert list(dict.fromkeys(names[thread] for thread in sorted(names, key=order.get))) == list(timeline.lanes())


def test_trace_has_every_span_in_microseconds():
    timeline = run(at=5e8, scale=0.01)
    names = {event["tid"]: event["args"]["name"] for event in events(timeline, "M") if event["name"] == "thread_name"}
    found = events(timeline, "X")
    assert all(set(event) == {"ph", "name", "pid", "tid", "ts", "dur", "args"} for event in found)
    assert min(event["ts"] for event in found) == 0
    origin = min(span.start_ms for span in timeline.spans)
    told = {(names[event["tid"]], event["name"], event["args"]["batch"], event["args"]["waits"]): event for event in found}
    assert len(told) == len(found) == len(timeline.spans)
    for span in timeline.spans:
        event = told[span.lane, span.name, span.batch, span.waits]
        assert event["ts"] == pytest.approx((span.start_ms - origin) * 1e3, abs=1e-3)
        assert event["dur"] == pytest.approx((span.end_ms - span.start_ms) * 1e3, abs=2e-3)


def test_trace_spans_of_a_thread_do_not_overlap():
    draw = random.Random(0)
    starts = [draw.uniform(0, 20) for _ in range(99)]
    spans = [Span("thread", "it", 0, start, start + draw.expovariate(0.5)) for start in starts]
    spans += [Span("copy", "it", batch, batch / 6, (batch + 1) / 6) for batch in range(500)]
    found = {}
    for event in events(of(*spans), "X"):
        found.setdefault(event["tid"], []).append((round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)))
    assert sum(map(len, found.values())) == len(spans)
    assert all(end <= start for times in found.values() for (_, end), (start, _) in pairwise(times))
    assert len(list(found.values())[-1]) == 500, "spans that do not overlap share a thread"


@pytest.mark.parametrize(("batch", "end"), [(0, float("nan")), (float("nan"), 1)])
def test_trace_is_strict_json_or_refused(tmp_path, batch, end):
    with pytest.raises(ValueError, match=r"(?i)nan|Out of range float"):
        of(Span("copy", "copy", batch, 0, end)).save(tmp_path / "run.json")
    assert not list(tmp_path.iterdir())
