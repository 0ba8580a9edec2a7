"""Sentences about a profile: the *bound* of the loop (the part of the work that limits its speed), and advice.

A loop is measured *streamed* (batches are launched ahead) and *in line* (all work runs one after the other). The *step* is the
training step. The *link* is the connection from host to device, which copies use. A *window* is a measurement over consecutive
batches. Times are in milliseconds per batch.
"""

from collections.abc import Callable, Iterator
from statistics import fmean

from gpuaug.profiler.measure import figure_text
from gpuaug.profiler.report import COPY, DECODING, LOAD, PLAIN_BESIDE_ITERATOR, SLOWER_THAN_ENGINES, STEP, Part, Report, size_of

TOLERANCE = 0.1
"""Relative difference below which two times count as equal: repeated measurements of one loop differ by as much."""
ENCODER_KINDS = ("captured", "eager encoder")
"""Values of ``Part.kind`` for encoders."""
MIN_MS = 0.5
"""Minimum time, in milliseconds per batch, that is worth a sentence."""


def verdict(report: Report) -> Iterator[str]:
    """Yield sentences about a report, the most important first."""
    if report.plain_torch is not None:
        yield report.plain_torch
    yield _bound_sentence(report)
    yield from _obstacle_sentences(report)
    yield from _overlap_sentences(report)
    yield from _priority_sentences(report)
    yield from _encoder_sentences(report)
    yield from _cache_sentences(report)
    streamed_ms = report.streamed.median
    waited_ms = fmean(report.waits_for_loader_ms) if _long_waits(report) else 0.0
    unexplained_ms = streamed_ms - report.full_ms - report.epoch_ms - waited_ms
    if unexplained_ms > max(2 * TOLERANCE * streamed_ms, MIN_MS):
        advice = " Try fewer workers." if report.settings["workers"] > 1 and _longest_name(report) != LOAD else ""
        yield (
            f"{figure_text(unexplained_ms)} of the {figure_text(streamed_ms)} ms are not in the times of the parts: in the "
            "loop, parts slow each other down, because threads share Python's interpreter and workers share the cores."
            f"{advice}"
        )


def _longest_name(report: Report) -> str:
    """Return the name of the longest time per batch, which bounds the loop.

    ``"load"``: the user's loader. ``"copy"``: the link. ``"decode"``: the decoders. ``"host"``: the training thread.
    ``"device"``: the stages and the step on the device. ``"epoch"``: starting epochs.
    """
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
    """Return the waits for the loader that are longer than a step, in milliseconds.

    Empty if the loader or the start of epochs is the bound, so that such waits are expected.
    """
    if _longest_name(report) in (LOAD, "epoch"):
        return []
    return [ms for ms in report.waits_for_loader_ms if ms > max(report.cached.median, MIN_MS)]


def _bound_sentence(report: Report) -> str:
    """Return the sentence that names the bound of the loop."""
    bounds: dict[str, Callable[[Report], str]] = {
        "epoch": lambda report: f"Bounded by the beginning of epochs: {_epoch_text(report)}",
        LOAD: _bound_by_loader,
        "decode": _bound_by_decoder,
        COPY: _bound_by_link,
        "host": _bound_by_thread,
        "device": _bound_by_device,
    }
    return bounds[_longest_name(report)](report)


def _bound_by_link(report: Report) -> str:
    """Return the sentence if the copy takes longest."""
    copy_text = f"the copy of a batch takes {figure_text(report.copy_ms)} ms"
    if report.copy_gb_per_s is not None:
        size, rate = size_of(report.batch_bytes), figure_text(report.copy_gb_per_s)
        copy_text = f"{size} per batch take {figure_text(report.copy_ms)} ms at {rate} GB/s"
    return f"Bounded by the link: {copy_text}. Copy fewer bytes: uint8 images, and no values that the device can compute."


def _bound_by_device(report: Report) -> str:
    """Return the sentence if the stages and the step on the device take longest."""
    loop_text = f"a batch takes {figure_text(report.streamed.median)} ms"
    longest = max((part for part in report.parts if part.name != COPY), key=lambda part: part.device_ms or 0.0)
    step_ms = report.part(STEP).device_ms or 0.0
    stages_ms = report.device_ms - step_ms
    if stages_ms <= TOLERANCE * step_ms:
        advice = "A faster loader cannot speed up the loop further; only a faster step can."
        if _long_waits(report):
            advice = "A faster step would help."
        return (
            f"Bounded by the training step: it keeps the device busy for {figure_text(step_ms)} ms, and {loop_text}. {advice}"
        )
    if report.streamed.median < (1 - TOLERANCE) * report.device_ms:
        return (
            f"Bounded by {_description(longest)}: it keeps the device busy for {figure_text(longest.device_ms or 0.0)} ms, and "
            f"{loop_text}; other work of the device runs at the same time."
        )
    advice = "Streams cannot speed up the loop further; only cheaper kernels can."
    return (
        f"GPU saturated: stages ({figure_text(stages_ms)} ms) and the step ({figure_text(step_ms)} ms) keep the device busy "
        f"for {figure_text(report.device_ms)} ms, and {loop_text}. "
        f"{'Cheaper kernels would help.' if _gains_from_priority(report) else advice}"
    )


def _bound_by_loader(report: Report) -> str:
    """Return the sentence if the user's loader takes longest."""
    other_ms = max(report.copy_ms, report.decode_ms, report.host_ms, report.device_ms)
    workers = report.settings["workers"]
    rate = f"{size_of(report.batch_bytes / report.load_ms * 1e3)}/s, " if report.batch_bytes else ""
    loading = f"{workers} worker{'s' * (workers != 1)} load{'s' * (workers == 1)}" if workers else "without workers it loads"
    way_out = "Use more workers, decode less in them" if workers else "Pass num_workers to the DataLoader"
    return (
        f"Bounded by the loader: {loading} {rate}a batch every {figure_text(report.load_ms)} ms; the rest of the loop needs "
        f"{figure_text(other_ms)} ms. {way_out}, or cache results that do not change."
    )


def _bound_by_decoder(report: Report) -> str:
    """Return the sentence if the decoders take longest."""
    part = max((part for part in report.parts if part.kind in DECODING), key=lambda part: part.wall.median)
    other_ms = figure_text(max(report.load_ms, report.copy_ms, report.host_ms, report.device_ms))
    times = f"for {figure_text(part.wall.median)} ms per batch; the rest of the loop needs {other_ms} ms"
    processors = {"engines": "the JPEG engines", "video engines": "the video engines"}.get(part.kind, "the host's cores")
    return f"Bounded by decoding: {processors} are busy {times}. {_DECODING_ADVICE[part.kind]}"


_DECODING_ADVICE = {
    "engines": "Store smaller files, or store decoded images.",
    "video engines": "Store smaller videos, or videos with more key frames.",
    SLOWER_THAN_ENGINES: (
        "The JPEG engines do not decode these files: convert them to baseline JPEG, or give the process more cores."
    ),
    "hybrid decoder": "Use a card with JPEG engines, or give the process more cores.",
    "clip decoder": "Use videos that a GPU decodes (H.264, HEVC or VP9 of 8 bits), or give the process more cores.",
    "cpu decoder": "Use a card with JPEG engines, pass min_side= to the DecodeStage, or give the process more cores.",
}
"""``Part.kind`` of a decoding stage that is the bound → advice."""


def _bound_by_thread(report: Report) -> str:
    """Return the sentence if the training thread takes longest."""
    parts = [part for part in report.parts if part.host is not None]
    longest = max(parts, key=lambda part: part.host.median if part.host else 0.0)
    assert longest.host is not None
    where = f"{_description(longest)} ({figure_text(longest.host.median)} of {figure_text(report.host_ms)} ms)"
    if longest.waits_at is not None and longest.kind != "kornia":
        return f"Bounded by the training thread, which waits for the device in {where}, at {longest.waits_at}."
    if not report.lanes:
        way_out = _cpu_advice(longest, report)
        return f"Bounded by the training thread, most of all by {where}. {way_out}".rstrip()
    count = "" if longest.launches is None else f"{longest.launches} of them "
    advice = _LAUNCH_ADVICE.get(longest.kind or longest.name, _OTHER_LAUNCH_ADVICE)
    return f"Bounded by launches on the training thread: {count}in {where}. {advice}"


def _epoch_text(report: Report) -> str:
    """Return the rest of a sentence about the time of starting epochs, and advice."""
    way_out = "Pass persistent_workers=True to the DataLoader, or make" if report.settings["workers"] else "Make"
    times = f"{figure_text(report.epoch_ms)} of the {figure_text(report.streamed.median)} ms per batch"
    return f"{times} are spent on starting epochs. {way_out} epochs longer."


def _obstacle_sentences(report: Report) -> Iterator[str]:
    """Yield sentences about slow samples, short epochs, waits for the device, and memory that is not page-locked."""
    if waits := _long_waits(report):
        interval = round(len(report.waits_for_loader_ms) / len(waits))
        which = f"one batch in {interval}" if interval > 1 else "most batches"
        way_out = "raise prefetch_factor" if report.settings["workers"] else "pass num_workers to the DataLoader"
        yield (
            f"The training thread waited {figure_text(min(waits))} ms or more for {which}, although the loader loads a batch "
            f"every {figure_text(report.load_ms)} ms on average. Look for slow samples, or {way_out}."
        )
    if report.epoch_ms > max(TOLERANCE * report.streamed.median, MIN_MS) and _longest_name(report) != "epoch":
        yield f"Short epochs: {_epoch_text(report)}"
    for part in report.parts:
        if part.waits_at is not None and part.host is not None:
            advice = (
                "" if part.name == STEP else " Keep values on the device: streams cannot overlap work that the host waits for."
            )
            host_ms = figure_text(part.host.median)
            yield f"Host synchronisation inside {_description(part)}, at {part.waits_at}: {host_ms} ms per batch.{advice}"
    if report.pageable_bytes:
        way_out = "Pass pin_memory=True to the DataLoader, or leave feed='auto'."
        if report.settings["feed"] == PLAIN_BESIDE_ITERATOR:
            way_out = "Profile the loader while none of its iterators is open."
        yield (
            f"Pageable source: {size_of(report.pageable_bytes)} per batch are not page-locked, so the training thread waits "
            f"for the copy. {way_out}"
        )


def _overlap_sentences(report: Report) -> Iterator[str]:
    """Yield a sentence that compares the loops in line and streamed."""
    if not report.lanes:
        return  # without lanes nothing overlaps
    in_line, streamed = report.in_line, report.streamed
    times = f"{figure_text(in_line.median)} ms per batch in line, {figure_text(streamed.median)} ms streamed"
    # The loops differ only if all windows of one loop are faster than all windows of the other.
    if streamed.high < in_line.low and in_line.median >= (1 + TOLERANCE / 2) * streamed.median:
        yield f"Overlap pays here: {times}, {in_line.median / streamed.median:.2f}x."
    elif in_line.high < streamed.low and in_line.median <= (1 - TOLERANCE / 2) * streamed.median:
        yield f"Overlap costs here: {times}. Use depth=0."
    else:
        yield f"Overlap makes no measurable difference here: {times}."


def _gains_from_priority(report: Report) -> bool:
    """Return whether the loop is faster inside ``gpuaug.step_first()``, where the step has priority over the stages.

    All windows inside must be faster than all windows outside.
    """
    streamed, inside = report.streamed, report.step_first
    return inside is not None and inside.high < streamed.low and streamed.median >= (1 + TOLERANCE / 5) * inside.median


def _priority_sentences(report: Report) -> Iterator[str]:
    """Yield a sentence if ``gpuaug.step_first()`` makes the loop faster."""
    if report.step_first is not None and _gains_from_priority(report):
        streamed_ms, first_ms = report.streamed.median, report.step_first.median
        yield (
            f"Stages delay the step: {figure_text(streamed_ms)} ms per batch streamed, {figure_text(first_ms)} ms with the "
            f"step first, {streamed_ms / first_ms:.2f}x. Run the training loop inside gpuaug.step_first()."
        )


def _encoder_sentences(report: Report) -> Iterator[str]:
    """Yield sentences about the overlap of encoders and step, and about the gain from the encoders' CUDA graphs."""
    encoders = [part for part in report.parts if part.kind in ENCODER_KINDS]
    if not report.lanes or not encoders:
        return
    streamed = report.streamed.median
    encoding_ms = sum(part.wall.median for part in encoders)
    step_ms = report.cached.median
    shorter = min(encoding_ms, step_ms)
    if _longest_name(report) not in (LOAD, COPY, "decode", "epoch") and shorter >= MIN_MS:
        names = " and ".join(repr(part.name.removeprefix("stage/")) for part in encoders)
        overlap = min(1.0, (report.in_line.median - streamed) / shorter)
        times = f"alone, they take {figure_text(encoding_ms)} and {figure_text(step_ms)} ms"
        if overlap >= TOLERANCE:
            yield f"Encoding ({names}) and the step overlap by {overlap:.0%} of the shorter time: {times}."
        else:
            is_device_busy = report.device_ms >= (1 - 2 * TOLERANCE) * streamed
            reason = "the device is busy all the time" if is_device_busy else "the training thread queues the kernels of both"
            yield f"Encoding ({names}) and the step do not overlap, because {reason}: {times}."
    for part in encoders:
        if part.eager is None or part.eager.host is None or part.host is None:
            continue
        yield (
            f"The CUDA graph of {_description(part)} takes {figure_text(part.wall.median)} ms per batch, "
            f"{figure_text(part.host.median)} ms of them on the training thread; the encoder without the graph takes "
            f"{figure_text(part.eager.wall.median)} ms, {figure_text(part.eager.host.median)} ms on the training thread."
        )


def _cache_sentences(report: Report) -> Iterator[str]:
    """Yield a sentence about the time that a feature cache of the last encoder would save."""
    encoders = [part for part in report.parts if part.kind in ENCODER_KINDS]
    if not encoders or encoders[-1].has_cache or _longest_name(report) in (LOAD, COPY, "epoch"):
        return
    streamed_ms = report.streamed.median
    saved_ms = streamed_ms - report.cached.median
    if saved_ms >= max(2 * TOLERANCE * streamed_ms, MIN_MS):
        yield (
            f"A feature cache would save up to {figure_text(saved_ms)} of the {figure_text(streamed_ms)} ms per batch in "
            f"epochs that read it: pass cache=gpuaug.FeatureCache(folder) to the FeatureStage of {_description(encoders[-1])}."
        )


def _description(part: Part) -> str:
    """Return the name of a part as it appears in a sentence."""
    if part.name == STEP:
        return "the training step"
    if part.name == COPY:
        return "the copy"
    kind = "encoder" if part.kind in ENCODER_KINDS else "transform"
    runs = f" ({part.runs})" if part.runs else ""
    return f"{kind} {part.name.removeprefix('stage/')!r}{runs}"


_LAUNCH_ADVICE = {
    "kornia": "gpuaug.fuse runs a Kornia pipeline in a few launches.",
    "eager encoder": "Run the encoder from a CUDA graph: pass capture='auto'; a warning names what prevents the capture.",
    STEP: "torch.compile with mode='reduce-overhead', larger batches and fused optimizers need fewer launches.",
}
"""``Part.kind``, or name of the step → advice if the launches of the part are the bound."""
_OTHER_LAUNCH_ADVICE = "Use fewer and larger operations in the transform, or compile it with torch.compile."
"""Advice for all other parts."""


def _cpu_advice(part: Part, report: Report) -> str:
    """Return advice if ``part`` is the longest on a training thread that does all work itself; it may be empty."""
    if part.kind == "kornia":
        return "gpuaug.fuse runs a Kornia pipeline faster; workers of the DataLoader could run it during the step."
    if part.name == STEP:
        return "" if _long_waits(report) else "A faster loader cannot speed up the loop further."
    return "Workers of the DataLoader could do this work during the step."
