"""Sentences about a profile: the bound of the loop, and advice."""

from collections.abc import Iterator
from statistics import fmean

from gpuaug.profiler.measure import figure
from gpuaug.profiler.report import ANOTHER_ITERATOR, BESIDE_ENGINES, COPY, DECODING, LOAD, STEP, Part, Report, size_of

SLACK = 0.1
"""Relative difference below which two times count as equal, because windows of one loop differ by as much."""
ENCODERS = ("captured", "eager encoder")
"""Values of ``Part.kind`` of encoders."""
MIN_MS = 0.5
"""Shortest time, in milliseconds, that is reported in a sentence."""


def verdict(report: Report) -> Iterator[str]:
    """Sentences about a report, the most important first."""
    if report.plain_torch is not None:
        yield report.plain_torch
    yield _bound(report)
    yield from _obstacles(report)
    yield from _overlap(report)
    yield from _encoders(report)
    took = report.streamed.median
    waited = fmean(report.waits_for_loader_ms) if _long_waits(report) else 0.0
    unexplained = took - report.full_ms - report.epoch_ms - waited
    if unexplained > max(2 * SLACK * took, MIN_MS):
        fewer = report.settings["workers"] > 1 and _longest(report) != LOAD
        yield (
            f"{figure(unexplained)} of the {figure(took)} ms are in none of the parts alone: together they slow each other "
            "down, as threads do that share Python's interpreter, and workers that share the cores"
            f"{': try fewer' if fewer else ''}."
        )


def _longest(report: Report) -> str:
    times_ms = {
        LOAD: report.load_ms,
        COPY: report.copy_ms,
        "decode": report.decode_ms,
        "host": report.host_ms,
        "device": report.device_ms,
        "epoch": report.epoch_ms,
    }
    return max(times_ms, key=lambda name: times_ms[name])


def _long_waits(report: Report) -> list[float]:
    """Waits for the loader that are longer than a step, in milliseconds. Empty if the loader is the bound on average."""
    if _longest(report) in (LOAD, "epoch"):
        return []
    return [ms for ms in report.waits_for_loader_ms if ms > max(report.cached.median, MIN_MS)]


def _bound(report: Report) -> str:
    longest = _longest(report)
    if longest == "epoch":
        return f"Bounded by the beginning of epochs, {_epochs(report)}"
    if longest == LOAD:
        return _by_loader(report)
    if longest == "decode":
        return _by_decoder(report)
    if longest == COPY:
        if report.copy_gb_per_s is None:
            took = f"the copy of a batch takes {figure(report.copy_ms)} ms"
        else:
            size, rate = size_of(report.batch_bytes), figure(report.copy_gb_per_s)
            took = f"{size} a batch take {figure(report.copy_ms)} ms at {rate} GB/s"
        return f"Bounded by the link: {took}. Send less: uint8 images, and what can be computed on the device computed there."
    return _by_thread(report) if longest == "host" else _by_device(report)


def _by_device(report: Report) -> str:
    takes = f"a batch takes {figure(report.streamed.median)}"
    most = max((part for part in report.parts if part.name != COPY), key=lambda part: part.device_ms or 0.0)
    longest, step = most.device_ms or 0.0, report.part(STEP).device_ms or 0.0
    stages = report.device_ms - step
    if stages <= SLACK * step:
        advice = "A faster loader cannot speed it up further; only a faster step can."
        if _long_waits(report):
            advice = "A faster step would help."
        return f"Bounded by the training step: it takes {figure(step)} ms of the device, and {takes}. {advice}"
    if report.streamed.median < (1 - SLACK) * report.device_ms:
        return (
            f"Bounded by {_named(most)} on the device: it takes {figure(longest)} ms of it, and {takes}; "
            "the rest of the device's work runs beside it."
        )
    return (
        f"GPU saturated: stages ({figure(stages)} ms) and the step ({figure(step)} ms) need {figure(report.device_ms)} ms "
        f"of the device, and {takes}. Streams cannot speed it up further; only cheaper kernels can."
    )


def _by_loader(report: Report) -> str:
    others = max(report.copy_ms, report.decode_ms, report.host_ms, report.device_ms)
    workers = report.settings["workers"]
    rate = f"{size_of(report.batch_bytes / report.load_ms * 1e3)}/s, " if report.batch_bytes else ""
    who = f"{workers} worker{'s' * (workers != 1)} give{'s' * (workers == 1)}" if workers else "it gives, without workers,"
    way_out = "Give it more workers, or less to decode" if workers else "Give the DataLoader num_workers"
    return (
        f"Bounded by the loader: {who} {rate}a batch every {figure(report.load_ms)} ms; all else needs "
        f"{figure(others)} ms. {way_out}, or cache what does not change."
    )


def _by_decoder(report: Report) -> str:
    part = max(
        (part for part in report.parts if part.kind in DECODING),
        key=lambda part: part.wall.median,
    )
    others = figure(max(report.load_ms, report.copy_ms, report.host_ms, report.device_ms))
    takes = f"a batch takes them {figure(part.wall.median)} ms; all else needs {others} ms"
    if part.kind == "engines":
        return f"Bounded by decoding: the JPEG engines are full, {takes}. Shrink the files once on disk, or decode them before."
    if part.kind == "video engines":
        return f"Bounded by decoding: the video engines are full, {takes}. Make videos smaller, or with more key frames."
    way_out = {
        BESIDE_ENGINES: "Make baseline JPEGs of files that the JPEG engines do not take, or give the process more cores.",
        "hybrid decoder": "Use a card with JPEG engines, or give the process more cores.",
        "clip decoder": "Have a GPU decode H.264, HEVC or VP9 of 8 bits, or give the process more cores.",
        "cpu decoder": "Use a card with JPEG engines, pass min_side= to the DecodeStage, or give the process more cores.",
    }[part.kind]
    return f"Bounded by decoding: the host's cores are full, {takes}. {way_out}"


def _by_thread(report: Report) -> str:
    parts = [part for part in report.parts if part.host is not None]
    most = max(parts, key=lambda part: part.host.median if part.host else 0.0)
    assert most.host is not None
    share = f"{figure(most.host.median)} of {figure(report.host_ms)} ms"
    if most.waits_at is not None and most.kind != "kornia":
        return f"Bounded by the training thread, which waits for the device in {_named(most)} ({share}), at {most.waits_at}."
    if not report.lanes:
        way_out = _cheaper_on_cpu(most, report)
        return f"Bounded by the training thread, most of all by {_named(most)} ({share}). {way_out}".rstrip()
    count = "" if most.launches is None else f"{most.launches} of them "
    return f"Bounded by launches on the training thread: {count}in {_named(most)} ({share}). {_cheaper(most)}"


def _epochs(report: Report) -> str:
    persist = "pass persistent_workers=True to the DataLoader; if it has that, " if report.settings["workers"] else ""
    share = f"{figure(report.epoch_ms)} of the {figure(report.streamed.median)} ms a batch"
    return f"which takes {share} in epochs as short as these: {persist}make them longer."


def _obstacles(report: Report) -> Iterator[str]:
    if waits := _long_waits(report):
        every = round(len(report.waits_for_loader_ms) / len(waits))
        who = f"One batch in {every}" if every > 1 else "Most batches"
        way_out = "raise prefetch_factor" if report.settings["workers"] else "give the DataLoader num_workers"
        yield (
            f"{who} waited {figure(min(waits))} ms or more for the loader, which gives one every {figure(report.load_ms)} ms "
            f"on average: look for slow samples, or {way_out}."
        )
    if report.epoch_ms > max(SLACK * report.streamed.median, MIN_MS) and _longest(report) != "epoch":
        yield f"Short epochs: a new one begins again and again, {_epochs(report)}"
    for part in report.parts:
        if part.waits_at is not None and part.host is not None:
            what = "" if part.name == STEP else " Keep it on the device: streams cannot overlap what the host waits for."
            took = figure(part.host.median)
            yield f"Host synchronisation inside {_named(part)}, at {part.waits_at}: {took} ms a batch.{what}"
    if report.pageable_bytes:
        busy = report.settings["feed"] == ANOTHER_ITERATOR
        way_out = "Pass pin_memory=True to the DataLoader, or leave feed='auto'."
        yield (
            f"Pageable source: {size_of(report.pageable_bytes)} a batch are not page-locked, so their copy holds the "
            f"training thread up. {'Profile the loader while no iterator of it is open.' if busy else way_out}"
        )


def _overlap(report: Report) -> Iterator[str]:
    if not report.lanes:
        return  # everything is in line
    in_line, streamed = report.in_line, report.streamed
    took = f"{figure(in_line.median)} ms a batch in line, {figure(streamed.median)} streamed"
    # Where windows differ by more than the two loops do, they say nothing about these.
    if streamed.high < in_line.low and in_line.median >= (1 + SLACK / 2) * streamed.median:
        yield f"Overlap pays here: {took}, {in_line.median / streamed.median:.2f}x."
    elif in_line.high < streamed.low and in_line.median <= (1 - SLACK / 2) * streamed.median:
        yield f"Overlap costs here: {took}. Use depth=0."
    else:
        yield f"Overlap makes no difference here, as far as windows agree: {took}."


def _encoders(report: Report) -> Iterator[str]:
    """Whether encoders run beside the step, and the gain of their graphs."""
    encoders = [part for part in report.parts if part.kind in ENCODERS]
    if not report.lanes or not encoders:
        return
    streamed = report.streamed.median
    encoding = sum(part.wall.median for part in encoders)
    step = report.cached.median
    shorter = min(encoding, step)
    if _longest(report) not in (LOAD, COPY, "decode", "epoch") and shorter >= MIN_MS:
        who = " and ".join(part.name.removeprefix("stage/").join("''") for part in encoders)
        hidden = min(1.0, (report.in_line.median - streamed) / shorter)
        took = f"{figure(encoding)} and {figure(step)} ms alone"
        if hidden >= SLACK:
            yield f"Encoding ({who}) and the step overlap by {hidden:.0%} of the shorter: {took}."
        else:
            full = report.device_ms >= (1 - 2 * SLACK) * streamed
            why = "the device is full" if full else "the training thread queues both"
            yield f"Encoding ({who}) and the step do not overlap, because {why}: {took}."
    for part in encoders:
        if part.eager is None or part.eager.host is None or part.host is None:
            continue
        yield (
            f"The graph of {_named(part)} takes {figure(part.host.median)} ms of the training thread, its kernels launched one "
            f"by one {figure(part.eager.host.median)}: a batch takes {figure(part.wall.median)} ms alone, and "
            f"{figure(part.eager.wall.median)} without it."
        )


def _named(part: Part) -> str:
    if part.name == STEP:
        return "the training step"
    if part.name == COPY:
        return "the copy"
    kind = "encoder" if part.kind in ENCODERS else "transform"
    runs = f" ({part.runs})" if part.runs else ""
    return f"{kind} {part.name.removeprefix('stage/')!r}{runs}"


def _cheaper(part: Part) -> str:
    if part.kind == "kornia":
        return "gpuaug.fuse runs a Kornia pipeline in a handful: use it."
    if part.kind == "eager encoder":
        return "Have it captured in a graph: capture='auto', and what a warning says stands in its way."
    if part.name == STEP:
        return "torch.compile with mode='reduce-overhead', larger batches and fused optimizers launch less."
    return "Write it with fewer and larger operations, or compile it."


def _cheaper_on_cpu(part: Part, report: Report) -> str:
    if part.kind == "kornia":
        return "gpuaug.fuse makes a Kornia pipeline cheaper; workers of the DataLoader could run it beside the step."
    if part.name == STEP:
        return "" if _long_waits(report) else "A faster loader cannot speed it up further."
    return "Workers of the DataLoader could run it beside the step."
