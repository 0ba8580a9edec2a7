"""Timelines made by hand."""

import random

from gpuaug.profiler.timeline import Span, Timeline


def run(batches=12, at=1000.0, scale=1.0, stages=("stage/augment", "stage/encode")):
    """A run of which each batch passes each lane, with waits in two lanes and launches within launches."""
    spans = []
    for batch in range(batches):
        start = at + 8 * batch * scale
        rows = [("consumer", "wait", 6, 7, True), ("consumer", "step", 7, 14, False), ("copy", "copy", 1, 3, False)]
        rows += [("thread", "wait", 0, 1, True), ("thread", "launch", 1, 4, False), ("loader", "load", -7, 1, False)]
        for index, stage in enumerate(stages):
            rows += [(stage, stage, 3 + index, 3.9 + index, False), ("thread", stage, 2 + index / 2, 2.4 + index / 2, False)]
        spans += [Span(lane, name, batch, start + a * scale, start + b * scale, waits) for lane, name, a, b, waits in rows]
    random.Random(0).shuffle(spans)
    return Timeline(tuple(spans), "NVIDIA H200", 2)


def of(*spans):
    return Timeline(spans, "CPU", 2)


def events(timeline, phase):
    return [event for event in timeline.chrome_trace()["traceEvents"] if event["ph"] == phase]
