"""The Chrome trace of a timeline."""

import random
from itertools import pairwise

import pytest
from support.profiler.timelines import events, of, run

from gpuaug.profiler.timeline import Span


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
