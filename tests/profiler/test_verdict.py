"""What a report says: for each thing that can bound a loop, the sentence that names it, and the figures it rests on."""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from support.profiler_reports import CPU, copy, load, part, report, step

from gpuaug.benchkit import results
from gpuaug.profiler.report import size_of
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


def test_bounded_by_the_loader_with_one_worker():
    assert said(load(10), copy(), step(), streamed=10.2, in_line=14, workers=1)[0] == (
        "Bounded by the loader: 1 worker gives 2 GB/s, a batch every 10 ms; all else needs 4 ms. "
        "Give it more workers, or less to decode, or cache what does not change."
    )


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


def test_launches_that_were_not_counted_are_not_numbered():
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


def test_the_gpu_is_saturated():
    stage = part("stage/encode", host=0.2, device=3)
    assert said(load(), copy(), stage, step(), streamed=7.1, in_line=7.2) == [
        "GPU saturated: stages (3 ms) and the step (4 ms) need 7 ms of the device, and a batch takes 7.1. "
        "Streams have nothing left to give; only cheaper kernels do.",
        "Overlap makes no difference here, as far as windows agree: 7.2 ms a batch in line, 7.1 streamed.",
    ]


@pytest.mark.parametrize(("stage_ms", "named", "ms"), [(3, "the training step", 4), (5, "encoder 'encode'", 5)])
def test_the_longest_of_what_runs_side_by_side_on_the_device(stage_ms, named, ms):
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


def test_a_stage_that_waits_for_the_device():
    stage = part("stage/crop", host=6, device=1, waits_at="/home/me/crop.py:12")
    assert said(load(), copy(), stage, step(), streamed=6.7, in_line=8.04) == [
        "Bounded by the training thread, which waits for the device in transform 'crop' (6 of 6.6 ms), at /home/me/crop.py:12.",
        "Host synchronisation inside transform 'crop', at /home/me/crop.py:12: 6 ms a batch. "
        "Keep it on the device: streams cannot overlap what the host waits for.",
        "Overlap pays here: 8.04 ms a batch in line, 6.7 streamed, 1.20x.",
    ]


def test_a_step_that_waits_for_the_device():
    waiting = step(host=6, waits_at="/home/me/train.py:34")
    assert said(load(), copy(), waiting, streamed=6.2, in_line=7.44) == [
        "Bounded by the training thread, which waits for the device in the training step (6 of 6.1 ms), "
        "at /home/me/train.py:34.",
        "Host synchronisation inside the training step, at /home/me/train.py:34: 6 ms a batch.",
        "Overlap pays here: 7.44 ms a batch in line, 6.2 streamed, 1.20x.",
    ]


def test_a_wait_that_does_not_bound_the_loop_is_said_too():
    stage = part("stage/crop", host=0.3, device=0.1, waits_at="/home/me/crop.py:12")
    assert said(load(), copy(), stage, step(), streamed=4.2, in_line=5.04)[1] == (
        "Host synchronisation inside transform 'crop', at /home/me/crop.py:12: 0.3 ms a batch. "
        "Keep it on the device: streams cannot overlap what the host waits for."
    )


def test_a_pageable_source():
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
        (4.75, "Overlap costs here: 4.75 ms a batch in line, 5 streamed. Use depth='auto', or depth=0."),
        (4.0, "Overlap costs here: 4 ms a batch in line, 5 streamed. Use depth='auto', or depth=0."),
    ],
)
def test_whether_overlap_pays(in_line, text):
    assert said(load(), copy(), step(), in_line=in_line)[1] == text


@pytest.mark.parametrize(("in_line", "by"), [(6.0, 0.1), (4.0, 0.12)])
def test_windows_that_differ_by_more_than_the_loops_do_say_nothing(in_line, by):
    assert said(load(), copy(), step(), in_line=in_line, by=by)[1] == (
        f"Overlap makes no difference here, as far as windows agree: {in_line:g} ms a batch in line, 5 streamed."
    )


def test_a_cpu_has_no_overlap_to_speak_of():
    assert len(on_cpu(part("step", 6), streamed=6.2, in_line=60)) == 1


def test_time_that_no_part_explains():
    assert said(load(), copy(), step(), streamed=5.2, in_line=5.2)[-1] == (
        "1.2 of the 5.2 ms are in none of the parts alone: together they slow each other down, as threads do that share "
        "Python's interpreter, and workers that share the cores: try fewer."
    )
    assert said(load(), copy(), step(), streamed=5.2, in_line=5.2, workers=1)[-1].endswith(" share the cores.")
    assert said(load(4.5), copy(), step(), streamed=6, in_line=6)[-1].endswith(" share the cores."), "more are asked for"
    assert "none of the parts" not in "".join(said(load(0.1), copy(0.1), step(device=0.4), streamed=0.8)), "not worth it"
    assert "none of the parts" not in "".join(said(load(), copy(), step(), streamed=4.9))


STAGES = part("stage/a", host=1, device=2), part("stage/b", host=0.5, device=3)


def test_epochs_that_begin_again_and_again():
    assert said(load(2), copy(), step(), streamed=12, in_line=12, epoch_ms=7)[0] == (
        "Bounded by the beginning of epochs, which takes 7 of the 12 ms a batch in epochs as short as these: "
        "pass persistent_workers=True to the DataLoader."
    )
    first, second, *_ = said(load(2), copy(), step(), streamed=6, in_line=6, epoch_ms=2, workers=0)
    assert first.startswith("Bounded by the training step")
    assert second == (
        "Short epochs: a new one begins again and again, which takes 2 of the 6 ms a batch in epochs as short as these: "
        "make them longer."
    )
    assert "epochs" not in "".join(said(load(2), copy(), step(), streamed=6, in_line=6, epoch_ms=0.5))


def test_the_bounds():
    found = report(load(1), copy(device=2.5, host=0.25), *STAGES, step(host=1.5, device=4))
    assert (found.load_ms, found.copy_ms) == (1, 2.5)
    assert found.host_ms == 0.25 + 1 + 0.5 + 1.5
    assert found.device_ms == 2 + 3 + 4
    assert found.serial_ms == 1 + 2.5 + 2 + 3 + 4
    assert found.bound_ms == 4
    assert found.full_ms == 9
    assert found.copy_gb_per_s == 8
    assert found.part("stage/b") is STAGES[1]


@pytest.mark.parametrize(
    ("longest", "ms"),
    [
        ({"load": 20}, 20),
        ({"copy": 20}, 20),
        ({"host": 20}, 21.25),  # of the training thread it is all parts together
        ({"stage": 20}, 20),
        ({"step": 20}, 20),
    ],
)
def test_the_bound_is_the_longest(longest, ms):
    of = {"load": 1, "copy": 1, "host": 1, "stage": 1, "step": 1} | longest
    stage = part("stage/a", host=0.25, device=of["stage"])
    found = report(load(of["load"]), copy(device=of["copy"], host=0), stage, step(host=of["host"] + 1, device=of["step"]))
    assert found.bound_ms == max(ms, 2.25)
    assert found.full_ms >= found.bound_ms


def test_on_a_cpu_the_bound_is_the_loader_or_the_training_thread():
    found = report(load(5), part("copy", 1), part("stage/a", 2), part("step", 3), device=CPU)
    assert (found.copy_ms, found.device_ms, found.copy_gb_per_s) == (0, 0, None)
    assert found.bound_ms == found.full_ms == found.host_ms == 6
    assert found.serial_ms == 11


@pytest.mark.parametrize(("streamed", "efficiency"), [(4, 1), (2, 1), (12.5, 0), (30, 0), (8.25, 0.5)])
def test_overlap_efficiency_is_from_none_to_all_of_what_can_be_saved(streamed, efficiency):
    found = report(load(1), copy(device=2.5), *STAGES, step(), streamed=streamed)
    assert found.serial_ms - found.bound_ms == 8.5
    assert found.overlap_efficiency == pytest.approx(efficiency)


def test_there_may_be_nothing_to_overlap():
    found = report(load(0), part("copy", 0.01), part("step", 6), device=CPU)
    assert found.overlap_efficiency is None
    assert "nothing to overlap; " in str(found)
    assert "overlap_efficiency" not in found.rows()[-1]


def test_what_is_exposed_beside_the_step():
    found = report(load(), copy(), step(), streamed=5, cached=4)
    assert (found.exposed_ms, found.headspace) == (1, 1.25)
    faster = report(load(), copy(), step(), streamed=3.9, cached=4)
    assert (faster.exposed_ms, faster.headspace) == (0, pytest.approx(0.975))


WHOLE = report(
    load(1),
    copy(device=2.5, host=0.25),
    part("stage/augment", host=1, device=2, launches=12, kind="fused"),
    part("stage/encode", host=0.5, device=3, launches=3, kind="captured"),
    step(host=1.5, device=4),
    streamed=9.2,
    in_line=13.8,
    thread_ms={"pull": 0.5, "hold back": 1.25, "copy": 0.3, "stage/augment": 1.2, "wait": 0.02, "step": 1.6},
)
WHOLE = replace(WHOLE, verdict=tuple(verdict(WHOLE)))

TEXT = """\
ms a batch         alone             thread  device  launches  in loop
load               1 (0.9-1.1)
copy               2.5 (2.25-2.75)   0.25    2.5     2         0.3
stage/augment      2 (1.8-2.2)       1       2       12        1.2
stage/encode       3 (2.7-3.3)       0.5     3       3
step               4 (3.6-4.4)       1.5     4       100       1.6
loop, in line      13.8 (13.7-13.9)
loop, streamed     9.2 (9.11-9.29)

bounds: 4 ms if all overlaps, 9 if stages and step fill the device, 12.5 one after the other
overlap 39% of what it could be; 5.2 ms exposed beside the step; headspace 2.30
copy: 20 MB a batch at 8 GB/s, of the 54.3 that the link does by itself
the training thread waited 0.5 ms a batch for the loader
the training thread waited 1.25 ms a batch for the device, to which it was ahead
device: NVIDIA H200, depth: 2, feed: ring, workers: 8, batches: 40, rounds: 3

- GPU saturated: stages (5 ms) and the step (4 ms) need 9 ms of the device, and a batch takes 9.2. \
Streams have nothing left to give; only cheaper kernels do.
- Overlap pays here: 13.8 ms a batch in line, 9.2 streamed, 1.50x."""


def words(text):
    return [line.split() for line in text.splitlines()]


def test_the_report_as_text():
    assert words(str(WHOLE)) == words(TEXT)
    table = str(WHOLE).split("\n\n")[0].splitlines()
    for title in ("alone", "thread", "device", "launches", "in loop"):
        column = table[0].index(title)
        assert all(line[column - 1 : column] in ("", " ") for line in table), f"{title} is a column"
    assert table[4][table[0].index("device")] == "3"


def shown(found, width=80):
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(found)
    return file.getvalue()


def test_the_report_in_a_terminal_of_80_columns_is_whole():
    lines = shown(WHOLE).splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines[:8]]
    assert rows == words(TEXT)[:8], "a row of the table is one line, and nothing is left out"
    assert " ".join(" ".join(lines[8:]).split()) == " ".join(TEXT.split("\n\n", 1)[1].split())


@pytest.mark.parametrize("name", ["stage/augment_two_views", "stage/" + "a_name_of_many_words_" * 4])
def test_long_names_and_times_are_whole_in_80_columns(name):
    found = report(load(1234), copy(), part(name, host=234.5, device=1234, launches=12345), step(), streamed=1234)
    found = replace(found, thread_ms={name: 234.5})
    table = shown(found).split("\n \n")[0].split("\n\n")[0].splitlines()
    at = next(index for index, line in enumerate(table) if line.startswith("stage"))
    assert table[at].split()[1:] == ["1,234", "(1,111-1,357)", "234", "1,234", "12345", "234"]
    assert max(map(len, table)) <= 80
    width = table[at].index(" ")
    last = next(index for index, line in enumerate(table) if line.startswith("step"))
    assert "".join(line[:width].strip() for line in table[at:last]) == name, "a name that is too long is folded"
    assert (last == at + 1) == (len(name) < 30)


def test_what_is_said_is_not_taken_for_markup():
    found = replace(report(load(), copy(), part("stage/[bold]x[/bold]"), step()), verdict=("see [red]a.py[/red]:3",))
    assert "stage/[bold]x[/bold]" in shown(found)
    assert "- see [red]a.py[/red]:3" in shown(found)


@pytest.mark.parametrize("found", [WHOLE, report(load(0), part("copy", 0.01), part("step", 6), device=CPU)], ids=["gpu", "cpu"])
def test_the_rows_are_those_of_a_result(found):
    result = results.result("profile", rows=found.rows(), settings=found.settings, device=torch.device("cpu"))
    results.check(result)
    names = [row["name"] for row in found.rows()]
    loops = ["loop, in line", "loop, streamed", "bounds"]
    assert names == [each.name for each in found.parts] + loops
    assert found.rows()[-1]["bound_ms"] == found.bound_ms


def test_the_rows_hold_the_figures():
    assert WHOLE.rows()[2] == {
        "name": "stage/augment",
        "wall_ms": 2,
        "low_ms": pytest.approx(1.8),
        "high_ms": pytest.approx(2.2),
        "host_ms": 1,
        "device_ms": 2,
        "launches": 12,
        "thread_ms": 1.2,
    }
    assert WHOLE.rows()[0] == {"name": "load", "wall_ms": 1, "low_ms": 0.9, "high_ms": 1.1}
    assert WHOLE.rows()[6]["wall_ms"] == 9.2


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (19_500_000, "19.5 MB"), (2.5e9, "2.5 GB"), (4.2e12, "4,200 GB")],
)
def test_sizes(num_bytes, text):
    assert size_of(num_bytes) == text
