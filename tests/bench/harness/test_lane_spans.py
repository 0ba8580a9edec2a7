"""From a profiler's trace to the spans of the lanes."""

from bench.harness import lane_spans


def trace():
    """Steps of a GPU trace, 3 ms each: kernels run 1 ms after their launches, and autograd launches from its own thread."""
    for step in range(12):
        start = 3000.0 * step
        yield {"cat": "user_annotation", "name": "gpuaug/copy", "tid": 1, "ts": start, "dur": 100.0}
        yield {"cat": "user_annotation", "name": "train", "tid": 1, "ts": start + 200, "dur": 1000.0}
        launches = {"copy": (1, start + 50, 13), "forward": (1, start + 300, 7), "backward": (2, start + 800, 7)}
        for number, (tid, ts, stream) in enumerate(launches.values()):
            correlation = {"correlation": 10 * step + number}
            yield {"cat": "cuda_runtime", "name": "launch", "tid": tid, "ts": ts, "dur": 5.0, "args": correlation}
            lane = {"cat": "gpu_memcpy" if stream == 13 else "kernel", "name": "work", "tid": stream}
            yield {**lane, "ts": ts + 1000, "dur": 500.0, "args": {**correlation, "stream": stream}}
        yield {"cat": "kernel", "name": "not launched in a range", "ts": start, "dur": 1.0, "args": {"stream": 7}}


def test_spans_follow_kernels_to_the_range_that_launched_them():
    made = lane_spans.spans(trace())
    train = [span for span in made if span["lane"] == "train"]
    assert [span["batch"] for span in train] == [5, 6, 7, 8, 9, 10]
    assert {(span["stream"], round(span["end_ms"] - span["start_ms"], 3)) for span in train} == {(7, 1.0)}
    assert train[1]["start_ms"] == 3.0
    copies = [span for span in made if span["lane"] == "copy"]
    assert {span["stream"] for span in copies} == {13}
    # The picture begins in the middle of a copy.
    assert {round(span["end_ms"] - span["start_ms"], 3) for span in copies} == {0.25, 0.5}
