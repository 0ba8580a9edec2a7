"""What a verdict says: for each thing that can bound a loop, the sentence that names it."""

import pytest
from support.profiler.profiler_reports import CPU, copy, load, part, report, spread, step

from gpuaug.profiler.report import Part
from gpuaug.profiler.verdict import verdict

PAYS = "Overlap pays here: 6 ms a batch in line, 5 streamed, 1.20x."


def said(*parts, **known):
    return list(verdict(report(*parts, **known)))


def test_bounded_by_the_loader_with_workers():
    assert said(load(10), copy(), step(), streamed=10.2, in_line=14) == [
        "Bounded by the loader: 8 workers give 2 GB/s, a batch every 10 ms; all else needs 4 ms. "
        "Give it more workers, or less to decode, or cache what does not change.",
        "Overlap pays here: 14 ms a batch in line, 10.2 streamed, 1.37x.",
    ]


def test_bounded_by_the_loader_without_workers():
    assert said(load(40), copy(), step(), streamed=40.2, in_line=44, workers=0)[0] == (
        "Bounded by the loader: it gives, without workers, 500 MB/s, a batch every 40 ms; all else needs 4 ms. "
        "Give the DataLoader num_workers, or cache what does not change."
    )


def test_bounded_by_the_link():
    assert said(load(), copy(device=5), step(), streamed=5.1, in_line=9) == [
        "Bounded by the link: 20 MB a batch take 5 ms at 4 GB/s. "
        "Send less: uint8 images, and what can be computed on the device computed there.",
        "Overlap pays here: 9 ms a batch in line, 5.1 streamed, 1.76x.",
    ]


def test_bounded_by_the_engines():
    decode = Part("stage/decode", spread(6), kind="engines")
    assert said(load(), decode, copy(), step(), streamed=6.1, in_line=12)[0] == (
        "Bounded by decoding: the JPEG engines are full, a batch takes them 6 ms; all else needs 4 ms. "
        "Shrink the files once on disk, or decode them before."
    )


@pytest.mark.parametrize(
    ("kind", "way_out"),
    [
        ("beside engines", "Make baseline JPEGs of files that the JPEG engines do not take, or give the process more cores."),
        ("hybrid decoder", "Use a card with JPEG engines, or give the process more cores."),
        ("cpu decoder", "Use a card with JPEG engines, pass min_side= to the DecodeStage, or give the process more cores."),
    ],
)
def test_bounded_by_decoding_on_the_cpu(kind, way_out):
    decode = Part("stage/decode", spread(60), kind=kind)
    assert said(load(), decode, copy(), step(), streamed=61, in_line=66)[0] == (
        f"Bounded by decoding: the host's cores are full, a batch takes them 60 ms; all else needs 4 ms. {way_out}"
    )


def test_bounded_by_launches_in_a_kornia_transform():
    stage = part("stage/augment", host=6, device=1, launches=1234, kind="kornia")
    assert said(load(), copy(), stage, step(), streamed=6.7, in_line=8.04)[0] == (
        "Bounded by launches on the training thread: 1234 of them in transform 'augment' (6 of 6.6 ms). "
        "gpuaug.fuse runs a Kornia pipeline in a handful: use it."
    )


@pytest.mark.parametrize("kind", ["", "fused"])
def test_bounded_by_launches_in_another_transform(kind):
    stage = part("stage/noise", host=6, device=1, launches=300, kind=kind)
    assert said(load(), copy(), stage, step(), streamed=6.7)[0] == (
        "Bounded by launches on the training thread: 300 of them in transform 'noise' (6 of 6.6 ms). "
        "Write it with fewer and larger operations, or compile it."
    )


def test_bounded_by_launches_in_an_eager_encoder():
    stage = part("stage/encode", host=6, device=1, launches=700, kind="eager encoder")
    assert said(load(), copy(), stage, step(), streamed=6.7)[0] == (
        "Bounded by launches on the training thread: 700 of them in encoder 'encode' (6 of 6.6 ms). "
        "Have it captured in a graph: capture='auto', and what a warning says stands in its way."
    )


def test_bounded_by_the_launches_of_the_step():
    assert said(load(), copy(), step(host=6, launches=900), streamed=6.2)[0] == (
        "Bounded by launches on the training thread: 900 of them in the training step (6 of 6.1 ms). "
        "torch.compile with mode='reduce-overhead', larger batches and fused optimizers launch less."
    )


def test_bounded_by_launches_without_a_count():
    stage = part("stage/noise", host=6, device=None)
    assert said(load(), copy(), stage, step(), streamed=6.7)[0].startswith(
        "Bounded by launches on the training thread: in transform 'noise' (6 of 6.6 ms). "
    )


def on_cpu(*parts, **known):
    return said(load(0.5), part("copy", 0.1), *parts, device=CPU, **known)


def test_bounded_by_the_training_thread_on_a_cpu_in_a_stage():
    assert on_cpu(part("stage/blur", 6), part("step", 2), streamed=8.2) == [
        "Bounded by the training thread, most of all by transform 'blur' (6 of 8.1 ms). "
        "Workers of the DataLoader could run it beside the step."
    ]


def test_bounded_by_the_training_thread_on_a_cpu_in_a_kornia_stage():
    assert on_cpu(part("stage/blur", 6, kind="kornia"), part("step", 2), streamed=8.2) == [
        "Bounded by the training thread, most of all by transform 'blur' (6 of 8.1 ms). "
        "gpuaug.fuse makes a Kornia pipeline cheaper; workers of the DataLoader could run it beside the step."
    ]


def test_bounded_by_the_training_thread_on_a_cpu_in_an_encoder():
    assert on_cpu(part("stage/encode", 6, kind="captured"), part("step", 2), streamed=8.2)[0].startswith(
        "Bounded by the training thread, most of all by encoder 'encode' (6 of 8.1 ms). "
    )


def test_bounded_by_the_training_thread_on_a_cpu_in_the_step():
    assert on_cpu(part("stage/blur", 2), part("step", 6), streamed=8.2) == [
        "Bounded by the training thread, most of all by the training step (6 of 8.1 ms). "
        "There is nothing left for a loader to give."
    ]


def test_gpu_saturated():
    stage = part("stage/encode", host=0.2, device=3)
    assert said(load(), copy(), stage, step(), streamed=7.1, in_line=7.2) == [
        "GPU saturated: stages (3 ms) and the step (4 ms) need 7 ms of the device, and a batch takes 7.1. "
        "Streams have nothing left to give; only cheaper kernels do.",
        "Overlap makes no difference here, as far as windows agree: 7.2 ms a batch in line, 7.1 streamed.",
    ]


@pytest.mark.parametrize(("stage_ms", "named", "ms"), [(3, "the training step", 4), (5, "encoder 'encode'", 5)])
def test_bounded_by_the_longest_part_on_the_device(stage_ms, named, ms):
    stage = part("stage/encode", host=0.2, device=stage_ms, kind="captured")
    assert said(load(), copy(), stage, step())[0] == (
        f"Bounded by {named} on the device: it takes {ms} ms of it, and a batch takes 5; "
        "the rest of the device's work runs beside it."
    )


def test_bounded_by_the_training_step():
    stage = part("stage/flip", host=0.1, device=0.1)
    assert said(load(), copy(), stage, step(), streamed=4.2, in_line=4.3)[0] == (
        "Bounded by the training step: it takes 4 ms of the device, and a batch takes 4.2. "
        "There is nothing left for a loader to give; a faster step is what would help."
    )


TAIL = (0.0, 0.0, 7.0, 0.0, 0.0, 5.0)


@pytest.mark.parametrize(
    ("workers", "way_out"), [(0, "give the DataLoader num_workers"), (1, "raise prefetch_factor"), (8, "raise prefetch_factor")]
)
def test_slow_batches_that_the_average_hides(workers, way_out):
    assert said(load(), copy(), step(), streamed=4.2, in_line=4.2, workers=workers, waits_for_loader_ms=TAIL)[:2] == [
        "Bounded by the training step: it takes 4 ms of the device, and a batch takes 4.2. A faster step is what would help.",
        "One batch in 3 waited 5 ms or more for the loader, which gives one every 0.5 ms on average: "
        f"look for slow samples, or {way_out}.",
    ]


def test_slow_batches_on_a_cpu():
    assert on_cpu(part("step", 6), streamed=7.2, cached=6, waits_for_loader_ms=(0, 0, 7)) == [
        "Bounded by the training thread, most of all by the training step (6 of 6.1 ms).",
        "One batch in 3 waited 7 ms or more for the loader, which gives one every 0.5 ms on average: "
        "look for slow samples, or raise prefetch_factor.",
    ]


def test_slow_batches_explain_the_time_that_no_part_does():
    assert "none of the parts" not in "".join(said(load(), copy(), step(), streamed=6, in_line=6, waits_for_loader_ms=TAIL))


def test_waits_of_most_batches():
    assert "Most batches waited 5 ms or more for the loader, " in "".join(
        said(load(), copy(), step(), waits_for_loader_ms=(5.0, 5.0, 6.0))
    )


@pytest.mark.parametrize("waits_ms", [(), (0.0, 3.9)], ids=["none", "less than a step"])
def test_short_waits_are_not_mentioned(waits_ms):
    first, *others = said(load(), copy(), step(), streamed=4.2, waits_for_loader_ms=waits_ms)
    assert "nothing left for a loader" in first
    assert "slow samples" not in "".join(others)


def test_waits_are_not_mentioned_twice_where_the_loader_bounds_the_loop():
    assert "slow samples" not in "".join(said(load(10), copy(), step(), streamed=10.2, waits_for_loader_ms=TAIL))


def test_host_synchronisation_in_a_stage():
    stage = part("stage/crop", host=6, device=1, waits_at="/home/me/crop.py:12")
    assert said(load(), copy(), stage, step(), streamed=6.7, in_line=8.04) == [
        "Bounded by the training thread, which waits for the device in transform 'crop' (6 of 6.6 ms), at /home/me/crop.py:12.",
        "Host synchronisation inside transform 'crop', at /home/me/crop.py:12: 6 ms a batch. "
        "Keep it on the device: streams cannot overlap what the host waits for.",
        "Overlap pays here: 8.04 ms a batch in line, 6.7 streamed, 1.20x.",
    ]


def test_host_synchronisation_in_the_step():
    waiting = step(host=6, waits_at="/home/me/train.py:34")
    assert said(load(), copy(), waiting, streamed=6.2, in_line=7.44) == [
        "Bounded by the training thread, which waits for the device in the training step (6 of 6.1 ms), "
        "at /home/me/train.py:34.",
        "Host synchronisation inside the training step, at /home/me/train.py:34: 6 ms a batch.",
        "Overlap pays here: 7.44 ms a batch in line, 6.2 streamed, 1.20x.",
    ]


def test_host_synchronisation_that_does_not_bound_the_loop():
    stage = part("stage/crop", host=0.3, device=0.1, waits_at="/home/me/crop.py:12")
    assert said(load(), copy(), stage, step(), streamed=4.2, in_line=5.04)[1] == (
        "Host synchronisation inside transform 'crop', at /home/me/crop.py:12: 0.3 ms a batch. "
        "Keep it on the device: streams cannot overlap what the host waits for."
    )


def test_pageable_source():
    assert said(load(), copy(), step(), pageable_bytes=19_500_000)[1:] == [
        "Pageable source: 19.5 MB a batch are not page-locked, so their copy holds the training thread up. "
        "Pass pin_memory=True to the DataLoader, or leave feed='auto'.",
        PAYS,
    ]


@pytest.mark.parametrize(
    ("in_line", "text"),
    [
        (6.0, PAYS),
        (5.25, "Overlap pays here: 5.25 ms a batch in line, 5 streamed, 1.05x."),
        (5.2, "Overlap makes no difference here, as far as windows agree: 5.2 ms a batch in line, 5 streamed."),
        (4.8, "Overlap makes no difference here, as far as windows agree: 4.8 ms a batch in line, 5 streamed."),
        (4.75, "Overlap costs here: 4.75 ms a batch in line, 5 streamed. Use depth=0."),
        (4.0, "Overlap costs here: 4 ms a batch in line, 5 streamed. Use depth=0."),
    ],
)
def test_overlap_pays_costs_or_makes_no_difference(in_line, text):
    assert said(load(), copy(), step(), in_line=in_line)[1] == text


@pytest.mark.parametrize(("in_line", "by"), [(6.0, 0.1), (4.0, 0.12)])
def test_overlap_verdict_needs_windows_that_agree(in_line, by):
    assert said(load(), copy(), step(), in_line=in_line, by=by)[1] == (
        f"Overlap makes no difference here, as far as windows agree: {in_line:g} ms a batch in line, 5 streamed."
    )


def test_overlap_is_not_mentioned_on_a_cpu():
    assert len(on_cpu(part("step", 6), streamed=6.2, in_line=60)) == 1


def test_unexplained_time():
    assert said(load(), copy(), step(), streamed=5.2, in_line=5.2)[-1] == (
        "1.2 of the 5.2 ms are in none of the parts alone: together they slow each other down, as threads do that share "
        "Python's interpreter, and workers that share the cores: try fewer."
    )
    assert said(load(), copy(), step(), streamed=5.2, in_line=5.2, workers=1)[-1].endswith(" share the cores.")
    assert said(load(4.5), copy(), step(), streamed=6, in_line=6)[-1].endswith(" share the cores."), "more are asked for"
    assert "none of the parts" not in "".join(said(load(0.1), copy(0.1), step(device=0.4), streamed=0.8)), "not worth it"
    assert "none of the parts" not in "".join(said(load(), copy(), step(), streamed=4.9))


def test_short_epochs():
    assert said(load(2), copy(), step(), streamed=12, in_line=12, epoch_ms=7)[0] == (
        "Bounded by the beginning of epochs, which takes 7 of the 12 ms a batch in epochs as short as these: "
        "pass persistent_workers=True to the DataLoader; if it has that, make them longer."
    )
    first, second, *_ = said(load(2), copy(), step(), streamed=6, in_line=6, epoch_ms=2, workers=0)
    assert first.startswith("Bounded by the training step")
    assert second == (
        "Short epochs: a new one begins again and again, which takes 2 of the 6 ms a batch in epochs as short as these: "
        "make them longer."
    )
    assert "epochs" not in "".join(said(load(2), copy(), step(), streamed=6, in_line=6, epoch_ms=0.5))
