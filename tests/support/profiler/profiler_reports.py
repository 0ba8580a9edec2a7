"""Reports made by hand, of which each figure is known."""

from gpuaug.profiler.measure import Spread
from gpuaug.profiler.report import Part, Report
from gpuaug.profiler.timeline import Span, Timeline

H200, CPU = "NVIDIA H200", "CPU"


def spread(ms, by=0.1):
    return Spread(ms, (1 - by) * ms, (1 + by) * ms)


def part(name, host=0.1, device=None, **known):
    """A part by itself: what the training thread and the device need for it, in milliseconds."""
    return Part(name, spread(max(host or 0.0, device or 0.0)), spread(host) if host is not None else None, device, **known)


def load(ms=0.5):
    return Part("load", spread(ms))


def copy(device=0.5, host=0.1):
    return part("copy", host, device, launches=2)


def step(host=0.5, device=4.0, launches=100, **known):
    return part("step", host, device, launches=launches, **known)


def report(*parts, streamed=5.0, in_line=6.0, cached=4.0, by=0.01, device=H200, workers=8, **known):
    settings = {"device": device, "depth": 2, "feed": "ring", "workers": workers, "batches": 40, "rounds": 3}
    figures = {
        "in_line": spread(in_line, by),
        "streamed": spread(streamed, by),
        "cached": spread(cached, by),
        "thread_ms": {},
        "batch_bytes": 20_000_000,
        "pageable_bytes": 0,
        "link_gb_per_s": None if device == CPU else 54.3,
        "lanes": device != CPU,
        "settings": settings,
        "timeline": Timeline((Span("copy", "copy", 0, 0.0, 1.0),), device, 2),
    }
    return Report(parts, **{**figures, **known})
