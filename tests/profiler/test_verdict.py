"""What a verdict says: for each thing that can bound a loop, the sentence that names it."""

import pytest
from support.profiler.profiler_reports import CPU, copy, load, part, report, spread, step

from gpuaug.profiler.report import Part
from gpuaug.profiler.verdict import verdict

PAYS = "Overlap pays here: 6 ms per batch in line, 5 ms streamed, 1.20x."


def said(*parts, **known):
    return list(verdict(report(*parts, **known)))


def test_bounded_by_the_loader_with_workers():
    assert said(load(10), copy(), step(), streamed=10.2, in_line=14) == [
        "Bounded by the loader: 8 workers load 2 GB/s, a batch every 10 ms; the rest of the loop needs 4 ms. "
        "Use more workers, decode less in them, or cache results that do not change.",
        "Overlap pays here: 14 ms per batch in line, 10.2 ms streamed, 1.37x.",
    ]


def test_bounded_by_the_loader_without_workers():
    assert said(load(40), copy(), step(), streamed=40.2, in_line=44, workers=0)[0] == (
        "Bounded by the loader: without workers it loads 500 MB/s, a batch every 40 ms; the rest of the loop needs 4 ms. "
        "Pass num_workers to the DataLoader, or cache results that do not change."
    )


def test_bounded_by_the_link():
    assert said(load(), copy(device=5), step(), streamed=5.1, in_line=9) == [
        "Bounded by the link: 20 MB per batch take 5 ms at 4 GB/s. "
        "Copy fewer bytes: uint8 images, and no values that the device can compute.",
        "Overlap pays here: 9 ms per batch in line, 5.1 ms streamed, 1.76x.",
    ]


def test_bounded_by_the_engines():
    decode = Part("stage/decode", spread(6), kind="engines")
    assert said(load(), decode, copy(), step(), streamed=6.1, in_line=12)[0] == (
        "Bounded by decoding: the JPEG engines are busy for 6 ms per batch; the rest of the loop needs 4 ms. "
        "Store smaller files, or store decoded images."
    )


def test_bounded_by_the_video_engines():
    decode = Part("stage/decode", spread(6), kind="video engines")
    assert said(load(), decode, copy(), step(), streamed=6.1, in_line=12)[0] == (
        "Bounded by decoding: the video engines are busy for 6 ms per batch; the rest of the loop needs 4 ms. "
        "Store smaller videos, or videos with more key frames."
    )


@pytest.mark.parametrize(
    ("kind", "way_out"),
    [
        (
            "beside engines",
            "The JPEG engines do not decode these files: convert them to baseline JPEG, or give the process more cores.",
        ),
        ("hybrid decoder", "Use a card with JPEG engines, or give the process more cores."),
        ("clip decoder", "Use videos that a GPU decodes (H.264, HEVC or VP9 of 8 bits), or give the process more cores."),
        ("cpu decoder", "Use a card with JPEG engines, pass min_side= to the DecodeStage, or give the process more cores."),
    ],
)
def test_bounded_by_decoding_on_the_cpu(kind, way_out):
    decode = Part("stage/decode", spread(60), kind=kind)
    assert said(load(), decode, copy(), step(), streamed=61, in_line=66)[0] == (
        f"Bounded by decoding: the host's cores are busy for 60 ms per batch; the rest of the loop needs 4 ms. {way_out}"
    )


def test_bounded_by_launches_in_a_kornia_transform():
    stage = part("stage/augment", host=6, device=1, launches=1234, kind="kornia")
    assert said(load(), copy(), stage, step(), streamed=6.7, in_line=8.04)[0] == (
        "Bounded by launches on the training thread: 1234 of them in transform 'augment' (6 of 6.6 ms). "
        "gpuaug.fuse runs a Kornia pipeline in a few launches."
    )


@pytest.mark.parametrize("kind", ["", "fused"])
def test_bounded_by_launches_in_another_transform(kind):
    stage = part("stage/noise", host=6, device=1, launches=300, kind=kind)
    assert said(load(), copy(), stage, step(), streamed=6.7)[0] == (
        "Bounded by launches on the training thread: 300 of them in transform 'noise' (6 of 6.6 ms). "
        "Use fewer and larger operations in the transform, or compile it with torch.compile."
    )


def test_bounded_by_launches_in_an_eager_encoder():
    stage = part("stage/encode", host=6, device=1, launches=700, kind="eager encoder")
    assert said(load(), copy(), stage, step(), streamed=6.7)[0] == (
        "Bounded by launches on the training thread: 700 of them in encoder 'encode' (6 of 6.6 ms). "
        "Run the encoder from a CUDA graph: pass capture='auto'; a warning names what prevents the capture."
    )


def test_bounded_by_the_launches_of_the_step():
    assert said(load(), copy(), step(host=6, launches=900), streamed=6.2)[0] == (
        "Bounded by launches on the training thread: 900 of them in the training step (6 of 6.1 ms). "
        "torch.compile with mode='reduce-overhead', larger batches and fused optimizers need fewer launches."
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
        "Workers of the DataLoader could do this work during the step."
    ]


def test_bounded_by_the_training_thread_on_a_cpu_in_a_kornia_stage():
    assert on_cpu(part("stage/blur", 6, kind="kornia"), part("step", 2), streamed=8.2) == [
        "Bounded by the training thread, most of all by transform 'blur' (6 of 8.1 ms). "
        "gpuaug.fuse runs a Kornia pipeline faster; workers of the DataLoader could run it during the step."
    ]


def test_bounded_by_the_training_thread_on_a_cpu_in_an_encoder():
    assert on_cpu(part("stage/encode", 6, kind="captured"), part("step", 2), streamed=8.2)[0].startswith(
        "Bounded by the training thread, most of all by encoder 'encode' (6 of 8.1 ms). "
    )


def test_bounded_by_the_training_thread_on_a_cpu_in_the_step():
    assert on_cpu(part("stage/blur", 2), part("step", 6), streamed=8.2) == [
        "Bounded by the training thread, most of all by the training step (6 of 8.1 ms). "
        "A faster loader cannot speed up the loop further."
    ]


def test_gpu_saturated():
    stage = part("stage/encode", host=0.2, device=3)
    assert said(load(), copy(), stage, step(), streamed=7.1, in_line=7.2) == [
        "GPU saturated: stages (3 ms) and the step (4 ms) keep the device busy for 7 ms, and a batch takes 7.1 ms. "
        "Streams cannot speed up the loop further; only cheaper kernels can.",
        "Overlap makes no measurable difference here: 7.2 ms per batch in line, 7.1 ms streamed.",
    ]


@pytest.mark.parametrize(("stage_ms", "named", "ms"), [(3, "the training step", 4), (5, "encoder 'encode'", 5)])
def test_bounded_by_the_longest_part_on_the_device(stage_ms, named, ms):
    stage = part("stage/encode", host=0.2, device=stage_ms, kind="captured")
    assert said(load(), copy(), stage, step())[0] == (
        f"Bounded by {named}: it keeps the device busy for {ms} ms, and a batch takes 5 ms; "
        "other work of the device runs at the same time."
    )


def test_bounded_by_the_training_step():
    stage = part("stage/flip", host=0.1, device=0.1)
    assert said(load(), copy(), stage, step(), streamed=4.2, in_line=4.3)[0] == (
        "Bounded by the training step: it keeps the device busy for 4 ms, and a batch takes 4.2 ms. "
        "A faster loader cannot speed up the loop further; only a faster step can."
    )


TAIL = (0.0, 0.0, 7.0, 0.0, 0.0, 5.0)


@pytest.mark.parametrize(
    ("workers", "way_out"),
    [(0, "pass num_workers to the DataLoader"), (1, "raise prefetch_factor"), (8, "raise prefetch_factor")],
)
def test_slow_batches_that_the_average_hides(workers, way_out):
    assert said(load(), copy(), step(), streamed=4.2, in_line=4.2, workers=workers, waits_for_loader_ms=TAIL)[:2] == [
        "Bounded by the training step: it keeps the device busy for 4 ms, and a batch takes 4.2 ms. A faster step would help.",
        "The training thread waited 5 ms or more for one batch in 3, although the loader loads a batch every 0.5 ms on "
        "average. "
        f"Look for slow samples, or {way_out}.",
    ]


def test_slow_batches_on_a_cpu():
    assert on_cpu(part("step", 6), streamed=7.2, cached=6, waits_for_loader_ms=(0, 0, 7)) == [
        "Bounded by the training thread, most of all by the training step (6 of 6.1 ms).",
        "The training thread waited 7 ms or more for one batch in 3, although the loader loads a batch every 0.5 ms on "
        "average. "
        "Look for slow samples, or raise prefetch_factor.",
    ]


def test_slow_batches_explain_the_time_that_no_part_does():
    assert "not in the times of the parts" not in "".join(
        said(load(), copy(), step(), streamed=6, in_line=6, waits_for_loader_ms=TAIL)
    )


def test_waits_of_most_batches():
    assert "The training thread waited 5 ms or more for most batches, " in "".join(
        said(load(), copy(), step(), waits_for_loader_ms=(5.0, 5.0, 6.0))
    )


@pytest.mark.parametrize("waits_ms", [(), (0.0, 3.9)], ids=["none", "less than a step"])
def test_short_waits_are_not_mentioned(waits_ms):
    first, *others = said(load(), copy(), step(), streamed=4.2, waits_for_loader_ms=waits_ms)
    assert "A faster loader cannot" in first
    assert "slow samples" not in "".join(others)


def test_waits_are_not_mentioned_twice_where_the_loader_bounds_the_loop():
    assert "slow samples" not in "".join(said(load(10), copy(), step(), streamed=10.2, waits_for_loader_ms=TAIL))


def test_host_synchronisation_in_a_stage():
    stage = part("stage/crop", host=6, device=1, waits_at="/home/me/crop.py:12")
    assert said(load(), copy(), stage, step(), streamed=6.7, in_line=8.04) == [
        "Bounded by the training thread, which waits for the device in transform 'crop' (6 of 6.6 ms), at /home/me/crop.py:12.",
        "Host synchronisation inside transform 'crop', at /home/me/crop.py:12: 6 ms per batch. "
        "Keep values on the device: streams cannot overlap work that the host waits for.",
        "Overlap pays here: 8.04 ms per batch in line, 6.7 ms streamed, 1.20x.",
    ]


def test_host_synchronisation_in_the_step():
    waiting = step(host=6, waits_at="/home/me/train.py:34")
    assert said(load(), copy(), waiting, streamed=6.2, in_line=7.44) == [
        "Bounded by the training thread, which waits for the device in the training step (6 of 6.1 ms), "
        "at /home/me/train.py:34.",
        "Host synchronisation inside the training step, at /home/me/train.py:34: 6 ms per batch.",
        "Overlap pays here: 7.44 ms per batch in line, 6.2 ms streamed, 1.20x.",
    ]


def test_host_synchronisation_that_does_not_bound_the_loop():
    stage = part("stage/crop", host=0.3, device=0.1, waits_at="/home/me/crop.py:12")
    assert said(load(), copy(), stage, step(), streamed=4.2, in_line=5.04)[1] == (
        "Host synchronisation inside transform 'crop', at /home/me/crop.py:12: 0.3 ms per batch. "
        "Keep values on the device: streams cannot overlap work that the host waits for."
    )


def test_pageable_source():
    assert said(load(), copy(), step(), pageable_bytes=19_500_000)[1:] == [
        "Pageable source: 19.5 MB per batch are not page-locked, so the training thread waits for the copy. "
        "Pass pin_memory=True to the DataLoader, or leave feed='auto'.",
        PAYS,
    ]


@pytest.mark.parametrize(
    ("in_line", "text"),
    [
        (6.0, PAYS),
        (5.25, "Overlap pays here: 5.25 ms per batch in line, 5 ms streamed, 1.05x."),
        (5.2, "Overlap makes no measurable difference here: 5.2 ms per batch in line, 5 ms streamed."),
        (4.8, "Overlap makes no measurable difference here: 4.8 ms per batch in line, 5 ms streamed."),
        (4.75, "Overlap costs here: 4.75 ms per batch in line, 5 ms streamed. Use depth=0."),
        (4.0, "Overlap costs here: 4 ms per batch in line, 5 ms streamed. Use depth=0."),
    ],
)
def test_overlap_pays_costs_or_makes_no_difference(in_line, text):
    assert said(load(), copy(), step(), in_line=in_line)[1] == text


@pytest.mark.parametrize(("in_line", "by"), [(6.0, 0.1), (4.0, 0.12)])
def test_overlap_verdict_needs_windows_that_agree(in_line, by):
    assert said(load(), copy(), step(), in_line=in_line, by=by)[1] == (
        f"Overlap makes no measurable difference here: {in_line:g} ms per batch in line, 5 ms streamed."
    )


def test_overlap_is_not_mentioned_on_a_cpu():
    assert len(on_cpu(part("step", 6), streamed=6.2, in_line=60)) == 1


STAGES = (load(), copy(), part("stage/augment", device=2.0), step())


@pytest.mark.parametrize(
    ("first", "by", "gains"), [(4.8, 0.01, True), (4.95, 0.001, False), (4.8, 0.03, False), (5.2, 0.01, False)]
)
def test_step_first_is_advised_if_all_its_windows_are_faster(first, by, gains):
    sentences = said(*STAGES, step_first=spread(first, by), by=by)
    advice = [sentence for sentence in sentences if "step_first" in sentence]
    text = "Stages delay the step: 5 ms per batch streamed, 4.8 ms with the step first, 1.04x. "
    assert advice == ([f"{text}Run the training loop inside gpuaug.step_first()."] if gains else [])


@pytest.mark.parametrize(("first", "end"), [(5.5, "Cheaper kernels would help."), (6.1, "only cheaper kernels can.")])
def test_saturated_device_does_not_contradict_the_advice_on_priority(first, end):
    sentences = said(*STAGES, step_first=spread(first, 0.01), streamed=6.0, in_line=7.0)
    assert sentences[0].startswith("GPU saturated")
    assert sentences[0].endswith(end)


def test_unexplained_time():
    assert said(load(), copy(), step(), streamed=5.2, in_line=5.2)[-1] == (
        "1.2 of the 5.2 ms are not in the times of the parts: in the loop, parts slow each other down, because threads share "
        "Python's interpreter and workers share the cores. Try fewer workers."
    )
    assert said(load(), copy(), step(), streamed=5.2, in_line=5.2, workers=1)[-1].endswith(" share the cores.")
    assert said(load(4.5), copy(), step(), streamed=6, in_line=6)[-1].endswith(" share the cores."), "more are asked for"
    assert "not in the times of the parts" not in "".join(said(load(0.1), copy(0.1), step(device=0.4), streamed=0.8)), (
        "not worth it"
    )
    assert "not in the times of the parts" not in "".join(said(load(), copy(), step(), streamed=4.9))


def test_short_epochs():
    assert said(load(2), copy(), step(), streamed=12, in_line=12, epoch_ms=7)[0] == (
        "Bounded by the beginning of epochs: 7 of the 12 ms per batch are spent on starting epochs. "
        "Pass persistent_workers=True to the DataLoader, or make epochs longer."
    )
    first, second, *_ = said(load(2), copy(), step(), streamed=6, in_line=6, epoch_ms=2, workers=0)
    assert first.startswith("Bounded by the training step")
    assert second == ("Short epochs: 2 of the 6 ms per batch are spent on starting epochs. Make epochs longer.")
    assert "epochs" not in "".join(said(load(2), copy(), step(), streamed=6, in_line=6, epoch_ms=0.5))


def encoder(wall=3.0, host=0.3, device=3.0, eager_host=6.0, kind="captured", name="encode"):
    eager = part(f"stage/{name}", host=eager_host, device=device, kind="eager encoder") if kind == "captured" else None
    return Part(f"stage/{name}", spread(wall), spread(host), device, launches=1, kind=kind, eager=eager)


GAIN = (
    "The CUDA graph of encoder 'encode' takes 3 ms per batch, 0.3 ms of them on the training thread; "
    "the encoder without the graph takes 6 ms, 6 ms on the training thread."
)


@pytest.mark.parametrize(
    ("streamed", "sentence"),
    [
        (4.0, "Encoding ('encode') and the step overlap by 100% of the shorter time: alone, they take 3 and 4 ms."),
        (5.5, "Encoding ('encode') and the step overlap by 50% of the shorter time: alone, they take 3 and 4 ms."),
        (
            6.9,
            "Encoding ('encode') and the step do not overlap, because the device is busy all the time: alone, they "
            "take 3 and 4 ms.",
        ),
    ],
)
def test_encoder_and_step_overlap_or_not(streamed, sentence):
    found = said(load(), copy(), encoder(), step(), streamed=streamed, in_line=7)
    assert found[-2:] == [sentence, GAIN]


def test_two_encoders_and_a_busy_thread():
    encoders = [encoder(device=0.5, kind="eager encoder", name=name, host=3.0) for name in ("vae", "text")]
    found = said(load(), copy(), *encoders, step(host=4.0, device=1.0), streamed=9.9, in_line=10)
    assert found[-1] == (
        "Encoding ('vae' and 'text') and the step do not overlap, because the training thread queues the kernels of "
        "both: alone, they take 6 and 4 ms."
    )


def test_nothing_is_said_of_encoders_where_something_else_bounds_or_there_are_no_lanes():
    slow = said(load(30), copy(), encoder(), step(), streamed=30, in_line=37)
    assert slow[-1] == GAIN
    assert not [each for each in slow if "Encoding" in each]
    on_cpu = said(load(), copy(device=None), encoder(kind="captured"), step(device=None), streamed=7, in_line=7, device=CPU)
    assert not [each for each in on_cpu if "ncod" in each and "graph" in each]
