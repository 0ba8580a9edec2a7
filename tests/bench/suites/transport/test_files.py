import json
import multiprocessing
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.bench.commands import rows_by_case
from support.bench.file_corpora import file_corpora

from bench import __main__
from bench.peers import decoders, file_loaders
from bench.suites.transport import files as suite
from gpuaug.benchkit import results
from gpuaug.benchkit.environment import allowed_cores

__all__ = ["file_corpora"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

TINY = ["--device", "cpu", "--size", "32", "--batch", "2", "--workers", "0", "--seconds", "0.02", "--search", "0.01"]
ONCE = [*TINY, "--repeats", "1"]
ON_CPU = ["torchvision, workers", "workers decode, fuse", "gpuaug", "gpuaug, CPU"]
CORES = f"{allowed_cores()} core{'s' * (allowed_cores() > 1)}"


@pytest.fixture
def files(monkeypatch, file_corpora):
    """The suite, where no peer is installed."""
    for name in ("nvidia", "nvidia.dali", "spdl", "spdl.io", "torchcodec", "torchcodec.decoders"):
        monkeypatch.setitem(sys.modules, name, None)
    return suite


@pytest.fixture
def measured(files, tmp_path, monkeypatch):
    """The suite, where each window has a figure of its own at once."""
    path, windows = tmp_path / "files.json", []

    def once(loader, case, settings, seconds, rate=None):
        name = next(name for name, spec in case.loaders.items() if spec is loader)
        windows.append((case.title, name, settings, seconds, rate))
        base = {"DALI": 100.0, "gpuaug": 80.0, "engines alone": 200.0, "step alone": 160.0}.get(name, 10.0)
        tuned = base * (1 + settings.get("workers", 0) / 10 + settings.get("load", 0) + (settings.get("ahead") == 3))
        if seconds == 1.0:  # a window, and no search
            tuned *= 1 + len(windows) % 2
        return {"images_per_s": tuned, "cpu_ms_per_image": 0.5, "cores_busy": 2.0}

    def run(*more):
        monkeypatch.setattr(files, "measure", once)
        for loaders, name in (
            (file_loaders.LOADERS, "DALI"),
            (file_loaders.WITHOUT_ENGINES, "DALI"),
            (decoders.DECODERS, "engines alone"),
        ):
            monkeypatch.setitem(loaders, name, replace(loaders[name], needs_gpu=False))
        return files.main(["--device", "cpu", "--size", "16", "--batch", "2", "--json", str(path), *more])

    return run, path, windows


@pytest.mark.parametrize("left_out", [("camera", "mix", "decode", "squeezenet1_1"), pytest.param((), marks=pytest.mark.slow)])
def test_measures_the_rows_that_there_are_on_a_cpu_and_leaves_no_worker(files, tmp_path, capsys, left_out):
    cases = ",".join(case for case in ("small", "camera", "mix", "decode", "squeezenet1_1", "raw") if case not in left_out)
    assert __main__.main(["run", "files", *ONCE, "--cases", cases, "--results", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "files.json").read_text())
    results.check(result)
    expected = {
        f"small, {CORES}": ON_CPU,
        f"camera, {CORES}": [*ON_CPU, "gpuaug, min_side"],
        f"mix, {CORES}": ON_CPU,
        f"decode, {CORES}": ["gpuaug alone", "gpuaug, CPU alone", "torchvision alone"],
        f"squeezenet1_1, {CORES}": ["workers decode, fuse", "gpuaug", "step alone"],
        f"raw, {CORES}": ["memory-mapped"],
    }
    assert rows_by_case(result) == {case: rows for case, rows in expected.items() if case.split(",")[0] not in left_out}
    assert left_out or {row["batch_size"] for row in result["rows"]} == {1, 2}, (
        "an eighth of the batch for a camera's images, one at least"
    )
    assert all(row["cores"] == allowed_cores() and min(row["images_per_s"], row["cores_busy"]) > 0 for row in result["rows"])
    raw = result["rows"][-1]
    assert raw["gb_per_s"] == pytest.approx(raw["images_per_s"] * 3 * 24 * 24 / 1e9)
    assert left_out or result["settings"]["files"][f"mix, {CORES}"]["count"] == 41
    reasons = {row["name"]: row["reason"] for row in result["settings"]["skipped"] if row["case"].startswith("small")}
    assert {name for name, reason in reasons.items() if reason == "needs a GPU"} == {"DALI", "gpuaug, engines", "engines alone"}
    assert {name for name, reason in reasons.items() if "not installed: " in reason} == {"DALI, CPU", "SPDL, fuse"}
    assert f"files: small, {CORES}: SPDL, fuse skipped: not installed" in capsys.readouterr().out
    assert not multiprocessing.active_children()


def test_each_set_has_settings_of_its_own(measured):
    run, path, windows = measured
    run(
        "--cases",
        "web,plain,web/resnet18,plain/no-engines",
        "--rows",
        "DALI;gpuaug, CPU",
        "--workers",
        "1,2",
        "--search",
        "0.125",
    )
    tried = {
        title: [window[2] for window in windows if window[:2] == (title, "DALI") and window[3] == 0.125]
        for title, *_ in windows
    }
    assert len(tried[f"web, resnet18, {CORES}"]) == 3, "the best three for these files, though others were searched after them"
    assert tried[f"web, resnet18, {CORES}"][0]["ahead"] == 3
    assert {settings["load"] for settings in tried[f"plain, no engines, {CORES}"]} == {0.0}
    stored = json.loads(path.read_text())["settings"]["tried"]
    assert stored[f"plain, no engines, {CORES}"]["gpuaug, CPU"] == {"workers 1": 11.0, "workers 2": 12.0}
    assert len(stored[f"web, {CORES}"]["DALI"]) == len(tried[f"web, {CORES}"])


def test_a_row_is_measured_with_its_best_settings(measured):
    run, path, windows = measured
    flags = ["--cases", "small,resnet18", "--rows", "gpuaug;gpuaug, CPU;DALI", "--workers", "1,3,2"]
    run(*flags, "--repeats", "2", "--search", "0.125")
    rows = {(row["case"].split(",")[0], row["name"]): row for row in json.loads(path.read_text())["rows"]}
    assert rows["small", "gpuaug"]["chosen"] == "workers 3"
    assert rows["small", "gpuaug, CPU"]["chosen"] == "workers 3"
    assert rows["small", "DALI"]["chosen"].endswith("load 1.0, region True, ahead 3")
    tried = {
        name: [window[2] for window in windows if window[1] == name and window[3] == 0.125]
        for name in ("gpuaug", "gpuaug, CPU")
    }
    assert tried["gpuaug, CPU"] == [], "it takes those of the other one"
    assert tried["gpuaug"] == [{"workers": count} for count in (1, 3, 2, 3, 2, 1)], "and a step those that were best"


def test_ratios_are_taken_within_a_repeat(measured):
    run, path, _ = measured
    run("--cases", "small", "--rows", "DALI;gpuaug;engines alone", "--workers", "0", "--repeats", "3")
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    ours, dali, ceiling = rows["gpuaug"], rows["DALI"], rows["engines alone"]
    ratios = [rate / dali_rate for rate, dali_rate in zip(ours["rounds"], dali["rounds"], strict=True)]
    assert (ours["ratio_low"], ours["ratio_high"]) == (min(ratios), max(ratios))
    assert ours["of_ceiling"] == sorted(a / b for a, b in zip(ours["rounds"], ceiling["rounds"], strict=True))[1]
    assert dali["ratio"] == 1
    assert "of_ceiling" not in ceiling


@pytest.mark.skipif(allowed_cores() < 2, reason="needs two cores")
def test_each_number_of_cores_has_a_process_that_never_had_more(files, monkeypatch, tmp_path, capsys):
    started = []

    def run(command, check):
        started.append((command[1:4], len(os.sched_getaffinity(0))))
        files.main(command[4:])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(files, "subprocess", SimpleNamespace(run=run))
    flags = ["--cases", "small,decode", "--rows", "gpuaug, CPU", "--json", str(tmp_path / "files.json")]
    result = files.main([*ONCE, *flags, "--cores", "2,1"])
    assert capsys.readouterr().out.count("from encoded files to the card") == 1, "one table at the end"
    assert started == [(["-m", "bench", "files"], 2), (["-m", "bench", "files"], 1)]
    assert {
        case: (rows, result["rows"][index]["cores"]) for index, (case, rows) in enumerate(rows_by_case(result).items())
    } == {
        "small, 2 cores": (["gpuaug, CPU"], 2),
        "decode, 2 cores": (["gpuaug, CPU alone"], 2),
        "small, 1 core": (["gpuaug, CPU"], 1),
    }
    monkeypatch.setattr(files, "subprocess", SimpleNamespace(run=lambda command, check: SimpleNamespace(returncode=3)))
    with pytest.raises(SystemExit, match="because a process on 1 cores ended with status 3"):
        files.main([*ONCE, "--cores", "1"])


@pytest.mark.gpu
@pytest.mark.usefixtures("file_corpora")
def test_measures_the_gpu(tmp_path):
    # Peers and the engines alone do not wait between calls of nvJPEG's, and may wait for ever beside other tests that decode.
    rows = {*ON_CPU, "gpuaug alone", "gpuaug, CPU alone", "step alone"}
    flags = ["--device", "cuda", "--size", "32", "--batch", "8", "--workers", "2", "--seconds", "0.05", "--repeats", "1"]
    cases = ["--cores", str(allowed_cores()), "--cases", "small,decode,resnet18", "--rows", ";".join(rows)]
    result = suite.main([*flags, *cases, "--json", str(tmp_path / "files.json")])
    results.check(result)
    assert not multiprocessing.active_children()
    assert {row["name"] for row in result["rows"]} == rows
