"""Sentences of a verdict, listed in ``verdicts.txt`` for each cause that can bound a loop.

To approve new or changed sentences, run ``PYTHONPATH=tests:. python tests/profiler/test_verdict.py`` and read the difference.
"""

from dataclasses import replace
from pathlib import Path

from support.profiler.profiler_reports import CPU, copy, load, part, report, spread, step

from gpuaug.profiler.report import Part
from gpuaug.profiler.verdict import verdict

LISTING = Path(__file__).with_name("verdicts.txt")


def said(*parts, **known):
    return list(verdict(report(*parts, **known)))


def on_gpu(*parts, **known):
    """The verdict about a loop whose loader, copy and step are short."""
    return said(load(), copy(), *parts, **known)


def on_cpu(*parts, **known):
    return said(load(0.5), part("copy", 0.1), *parts, device=CPU, **known)


def decoded(kind, ms):
    return said(load(), Part("stage/decode", spread(ms), kind=kind), copy(), step(), streamed=ms + 0.1, in_line=ms + 6)


def launched(kind, name="noise"):
    return on_gpu(part(f"stage/{name}", host=6, device=1, launches=300, kind=kind), step(), streamed=6.7, in_line=8.04)


def encoder(wall=3.0, host=0.3, device=3.0, eager_host=6.0, kind="captured", name="encode"):
    eager = part(f"stage/{name}", host=eager_host, device=device, kind="eager encoder") if kind == "captured" else None
    return Part(f"stage/{name}", spread(wall), spread(host), device, launches=1, kind=kind, eager=eager)


def step_first(first, by=0.01, **known):
    parts = part("stage/augment", device=2.0), step()
    return on_gpu(*parts, step_first=spread(first, by), by=by, **known)


WAITING = part("stage/crop", host=6, device=1, waits_at="/home/me/crop.py:12")
BRIEFLY = part("stage/crop", host=0.3, device=0.1, waits_at="/home/me/crop.py:12")
TAIL = (0.0, 0.0, 7.0, 0.0, 0.0, 5.0)
SITUATIONS = {
    "the loader, with workers": said(load(10), copy(), step(), streamed=10.2, in_line=14),
    "the loader, without workers": said(load(40), copy(), step(), streamed=40.2, in_line=44, workers=0),
    "the link": said(load(), copy(device=5), step(), streamed=5.1, in_line=9),
    **{f"decoding, {kind}": decoded(kind, 6) for kind in ("engines", "video engines")},
    **{f"decoding, {kind}": decoded(kind, 60) for kind in ("beside engines", "hybrid decoder", "clip decoder", "cpu decoder")},
    **{f"launches, transform '{kind}'": launched(kind) for kind in ("kornia", "", "fused")},
    "launches, eager encoder": launched("eager encoder", "encode"),
    "launches, step": on_gpu(step(host=6, launches=900), streamed=6.2),
    "launches without a count": on_gpu(part("stage/noise", host=6, device=None), step(), streamed=6.7),
    "CPU, a stage": on_cpu(part("stage/blur", 6), part("step", 2), streamed=8.2),
    "CPU, a stage of Kornia's": on_cpu(part("stage/blur", 6, kind="kornia"), part("step", 2), streamed=8.2),
    "CPU, an encoder": on_cpu(part("stage/encode", 6, kind="captured"), part("step", 2), streamed=8.2),
    "CPU, the step": on_cpu(part("stage/blur", 2), part("step", 6), streamed=8.2),
    "CPU, overlap is not mentioned": on_cpu(part("step", 6), streamed=6.2, in_line=60),
    "a saturated GPU": on_gpu(part("stage/encode", host=0.2, device=3), step(), streamed=7.1, in_line=7.2),
    **{
        f"the longest part on the device, of {ms} and 4 ms": on_gpu(
            part("stage/encode", host=0.2, device=ms, kind="captured"), step()
        )
        for ms in (3, 5)
    },
    "the step": on_gpu(part("stage/flip", host=0.1, device=0.1), step(), streamed=4.2, in_line=4.3),
    **{
        f"slow batches that the average hides, {workers} workers": on_gpu(
            step(), streamed=4.2, in_line=4.2, workers=workers, waits_for_loader_ms=TAIL
        )
        for workers in (0, 1, 8)
    },
    "CPU, slow batches": on_cpu(part("step", 6), streamed=7.2, cached=6, waits_for_loader_ms=(0, 0, 7)),
    "slow batches explain the time that no part does": on_gpu(step(), streamed=6, in_line=6, waits_for_loader_ms=TAIL),
    "waits of most batches": on_gpu(step(), waits_for_loader_ms=(5.0, 5.0, 6.0)),
    "no waits": on_gpu(step(), streamed=4.2, waits_for_loader_ms=()),
    "waits shorter than a step are not mentioned": on_gpu(step(), streamed=4.2, waits_for_loader_ms=(0.0, 3.9)),
    "waits are mentioned once": said(load(10), copy(), step(), streamed=10.2, waits_for_loader_ms=TAIL),
    "host synchronisation in a stage": on_gpu(WAITING, step(), streamed=6.7, in_line=8.04),
    "host synchronisation in the step": on_gpu(step(host=6, waits_at="/home/me/train.py:34"), streamed=6.2, in_line=7.44),
    "host synchronisation that does not bound the loop": on_gpu(BRIEFLY, step(), streamed=4.2, in_line=5.04),
    "a pageable source": on_gpu(step(), pageable_bytes=19_500_000),
    **{f"overlap, {ms} ms in line": on_gpu(step(), in_line=ms) for ms in (6.0, 5.25, 5.2, 4.8, 4.75, 4.0)},
    **{f"overlap, {ms} ms, windows apart by {by}": on_gpu(step(), in_line=ms, by=by) for ms, by in ((6.0, 0.1), (4.0, 0.12))},
    **{
        f"step first, {first} ms, windows apart by {by}": step_first(first, by)
        for first, by in ((4.8, 0.01), (4.95, 0.001), (4.8, 0.03), (5.2, 0.01))
    },
    **{f"a saturated GPU, step first {ms} ms": step_first(ms, streamed=6.0, in_line=7.0) for ms in (5.5, 6.1)},
    "time that no part explains": on_gpu(step(), streamed=5.2, in_line=5.2),
    "time that no part explains, 1 worker": on_gpu(step(), streamed=5.2, in_line=5.2, workers=1),
    "time that no part explains beside a slow loader": said(load(4.5), copy(), step(), streamed=6, in_line=6),
    "time that no part explains, too short": said(load(0.1), copy(0.1), step(device=0.4), streamed=0.8),
    "time that no part explains, a small share": on_gpu(step(), streamed=4.9),
    "short epochs bound the loop": said(load(2), copy(), step(), streamed=12, in_line=12, epoch_ms=7),
    "short epochs": said(load(2), copy(), step(), streamed=6, in_line=6, epoch_ms=2, workers=0),
    "epochs that cost little": said(load(2), copy(), step(), streamed=6, in_line=6, epoch_ms=0.5),
    **{f"an encoder and the step, {ms} ms": on_gpu(encoder(), step(), streamed=ms, in_line=7) for ms in (4.0, 5.5, 6.9)},
    "two encoders and a busy thread": on_gpu(
        *(encoder(device=0.5, kind="eager encoder", name=name, host=3.0) for name in ("vae", "text")),
        step(host=4.0, device=1.0),
        streamed=9.9,
        in_line=10,
    ),
    "an encoder with a cache": on_gpu(replace(encoder(), has_cache=True), step(), streamed=6.9, in_line=7),
    "an encoder that costs little": on_gpu(encoder(wall=0.8, device=0.8), step(), streamed=4.9, in_line=4.9),
    "an encoder behind a slow loader": said(load(30), copy(), encoder(), step(), streamed=30, in_line=37),
    "CPU, nothing of graphs": said(load(), copy(device=None), encoder(), step(device=None), streamed=7, in_line=7, device=CPU),
}
"""Sentences of reports without a missing figure."""


def listed():
    return "".join(f"{name}\n" + "".join(f"    {each}\n" for each in sentences) for name, sentences in SITUATIONS.items())


def test_sentences_are_those_of_the_listing():
    assert listed() == LISTING.read_text()


if __name__ == "__main__":
    LISTING.write_text(listed())
