import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.bench.small_models import use_small_model

from bench.harness.result_check import check_result
from gpuaug import cli
from gpuaug.benchkit import loops, uses, windows

ROOT = Path(__file__).parents[2]
TINY = ["bench", "--device", "cpu", "--batch-size", "2", "--seconds", "0.05", "--repeats", "1"]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_bench_prints_one_table_and_writes_a_good_result(class_folder, tmp_path, capsys, monkeypatch, workers):
    monkeypatch.chdir(tmp_path)  # a longer path would be broken into lines
    use_small_model(monkeypatch)
    setup_for = loops.setup_for
    small_images = {"source_px": 48, "crop_px": 32}
    monkeypatch.setattr(
        loops, "setup_for", lambda *arguments, **options: replace(setup_for(*arguments, **options), **small_images)
    )
    monkeypatch.setattr(loops.Setup, "discard", 0)
    monkeypatch.setattr(windows, "interleave", partial(windows.interleave, warmup=1))
    path = Path("uses.json")
    command = [*TINY, "--seconds", "0.01", "--workers", str(workers), "--data", str(class_folder), "--json", str(path)]
    assert cli.main(command) == 0
    result = json.loads(path.read_text())
    check_result(result)
    assert result["settings"]["workers"] == workers
    assert result["settings"]["data"] == "the user's"
    assert str(class_folder) not in path.read_text()
    cases = [row["case"] for row in result["rows"]]
    assert sorted(set(cases), key=cases.index) == ["train resnet18", "train a head on frozen resnet18", "augment alone"]
    assert [row["batch_size"] for row in result["rows"]] == [2] * len(cases)
    assert all(row["images_per_s"] == pytest.approx(2 * row["steps_per_s"]) for row in result["rows"])
    printed = capsys.readouterr().out
    assert printed.count("steps/s  images/s") == 1
    progress = "measuring in at most 3 minutes; preparing the photographs\nmeasuring 1 of 3: train resnet18\n  round 1 of 1\n"
    assert printed.startswith(f"{progress}measuring 2 of 3: "), "progress, in a file too"
    for row in result["rows"]:
        assert row["name"] in printed
    *compared, in_line, next_step = " ".join(re.split(r"took \S+ minutes\n\n", printed)[1].split()).split(" - ")
    assert [sentence.removeprefix("- ").split(":")[0] for sentence in compared if "a single round" in sentence] == [
        "train resnet18",
        "train a head on frozen resnet18",
        "augment alone",
    ]
    assert in_line.startswith("On cpu stages run on the processor that trains, so nothing overlaps")
    assert next_step.endswith("gpuaug profile train.py:make.")


@pytest.mark.parametrize("step_s", [0.01, 0.1, 0.3, 0.6, 0.9, 1.2])
def test_bench_takes_at_most_the_time_that_it_announces(step_s, class_folder, capsys, monkeypatch):
    rounds, announced_min, taken_min, over, late = _run_with_planted_steps(step_s, class_folder, capsys, monkeypatch)
    assert (announced_min, over) == (3, "")
    assert not late or len(rounds) < 15
    assert 0 < taken_min <= announced_min
    assert len(rounds) == 15 if step_s <= 0.3 else 3 <= len(rounds) < 15
    assert rounds == sorted(rounds, key=rounds.index), "each round is printed once, in order"
    if len(rounds) < 15:
        assert taken_min > announced_min / 2, "the limit, and nothing else, ends the measurement"


def test_bench_says_if_one_round_takes_longer_than_the_time_that_it_announces(class_folder, capsys, monkeypatch):
    rounds, announced_min, taken_min, over, late = _run_with_planted_steps(5, class_folder, capsys, monkeypatch)
    assert len(rounds) == len(late) == 3, "a line at the end of each use, not only of the command"
    assert taken_min > announced_min
    assert over == ": one round of each loop takes longer than the time limit here"


def _run_with_planted_steps(step_s, class_folder, capsys, monkeypatch):
    """Run ``gpuaug bench`` on a planted clock, which steps of about ``step_s`` seconds move.

    Returns:
        (Pairs of use and round that were printed, minutes announced, minutes taken by the planted clock, remark at the end,
        lines about delays).
    """
    clock, generator = SimpleNamespace(now_s=7.0), random.Random(0)
    monkeypatch.setattr(cli, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    monkeypatch.setattr(windows, "perf_counter", lambda: clock.now_s)

    def planted_steps():
        while True:
            clock.now_s += step_s * generator.uniform(0.7, 1.3)
            yield 2

    real_uses = uses.three_uses
    monkeypatch.setattr(
        uses,
        "three_uses",
        lambda setup: [
            replace(use, variants=[replace(variant, steps=planted_steps) for variant in use.variants])
            for use in real_uses(setup)
        ],
    )
    assert cli.main(["bench", "--device", "cpu", "--workers", "1", "--data", str(class_folder)]) == 0
    printed = capsys.readouterr().out
    rounds, use = [], ""
    for line in printed.splitlines():
        use = line if line.startswith("measuring ") else use
        if line.startswith("  round "):
            rounds.append((use, line))
    announced_min = float(re.search(r"measuring in at most (\S+) minutes", printed)[1])
    printed_min, over = re.search(r"^took (\S+) minutes(.*)$", printed, re.MULTILINE).groups()
    taken_min = (clock.now_s - 7) / 60
    assert float(printed_min) == pytest.approx(taken_min, rel=0.01)
    return rounds, announced_min, taken_min, over, re.findall(r"^  \S+ minutes late, .*$", printed, re.MULTILINE)


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"gpuaug {metadata.version('gpuaug')}\n"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--data", "/no/such/folder"], "--data must be a folder of class folders with images in them, got '/no/such"),
        (["--batch-size", "0"], "value must be a whole number of at least 1, got '0'. Leave it out for the default."),
        (["--seconds", "nan"], "value must be a number of at least 0.001, got 'nan'."),
        (["--workers", "many"], "value must be a whole number of at least 0, got 'many'."),
        (["--device", "abacus"], "device must be a device that torch can use here, got 'abacus'"),
        (["--json", "/"], "value must be a file that can be written, got '/'. Pass a path such as out.json."),
    ],
)
def test_a_bad_flag_is_one_clear_line_and_status_2(flags, text, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([*TINY, *flags])
    assert left.value.code == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys):
    found = cli.importlib.util.find_spec
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == "skimage" else found(name))
    assert cli.main(TINY) == 2
    printed = capsys.readouterr().err
    assert printed == ("gpuaug bench cannot run, because skimage cannot be imported. Run: pip install 'gpuaug[bench]'\n")


@pytest.mark.slow
@pytest.mark.usefixtures("interrupts")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in /proc")
def test_ctrl_c_ends_the_workers_and_leaves_no_traceback(class_folder):
    command = [*TINY, "--seconds", "60", "--workers", "2", "--data", str(class_folder)]
    process = subprocess.Popen(
        [sys.executable, "-m", "gpuaug.cli", *command], cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 120
        while len(workers := _children(process.pid)) < 5 * 2:  # of the five variants that have workers
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(2)  # or it meets a worker that is being forked, and Python itself prints what it drops
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the workers too
        _, printed = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, printed
    assert "Traceback" not in printed
    assert printed.endswith("interrupted\n")
    assert not [worker for worker in workers if Path(f"/proc/{worker}").exists()]


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_that_python_drops_still_ends_as_interrupted(monkeypatch, capsys):
    def bench(parser, options):
        with contextlib.suppress(KeyboardInterrupt):  # as Python does in a finaliser or around a fork
            signal.raise_signal(signal.SIGINT)
        raise RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")

    monkeypatch.setattr(cli, "_bench", bench)
    before = signal.getsignal(signal.SIGINT)
    assert cli.main(TINY) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(signal.SIGINT) is before


def _children(pid):
    listed = (path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [child for children in listed for child in children]


@pytest.mark.gpu
def test_bench_runs_on_a_gpu(class_folder, tmp_path):
    path = tmp_path / "uses.json"
    command = [*TINY, "--device", "cuda", "--workers", "1", "--data", str(class_folder), "--json", str(path)]
    assert cli.main(command) == 0
    result = json.loads(path.read_text())
    check_result(result)
    assert result["environment"]["gpu"]["name"]
    assert (result["settings"]["half"], result["settings"]["pin_memory"]) == (True, True)
