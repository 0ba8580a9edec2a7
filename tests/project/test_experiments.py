import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.profiler_sources import again

from gpuaug.benchkit import results

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
TINY = ["--device", "cpu", "--size", "32", "--batch", "2", "--seconds", "0.02", "--repeats", "1", "--workers", "0"]

# Suite, flags that make it small, and the variants that must be there on a CPU.
WINDOWED = [
    (
        "encoder_decoder",
        "--width 4",
        {"serial", "streamed", "streamed, auto", "streamed, eager encoder", "resident", "loader"},
    ),
    ("encoder_decoder_sizes", "--width 4", {"serial", "streamed"}),
    ("encoder_decoder_depths", "--width 4", {"serial", "streamed", "streamed, auto"}),
    ("encoder_decoder_resident", "--width 4", {"serial", "encoder alone", "training alone", "feature stage"}),
    ("encoder_decoder_alike", "--width 4", {"own lanes, 1", "own lanes, 6", "same lanes, 1", "same lanes, 4"}),
    ("frozen_resnet", "--model resnet18", {"serial", "captured, in line", "feature stage", "feature stage, eager"}),
    ("classifier", "--width 1", {"serial", "workers", "streamed", "streamed, auto", "streamed, fused", "resident", "loader"}),
    ("classifier_sizes", "--width 1", {"serial", "workers", "streamed", "streamed, fused"}),
    ("classifier_depths", "--width 1", {"serial", "streamed", "streamed, auto"}),
    ("resnet_step", "--model squeezenet1_1", {"serial", "streamed", "streamed, auto", "resident", "loader"}),
    ("chain", "--width 4", {"serial", "one lane, eager", "two lanes", "two lanes, four ahead"}),
    ("branches", "", {"serial", "one module", "branches", "branches, eager"}),
]

# Suites of another form have tests of their own: below, and in tests/bench.
OTHERS = {"items", "handover", "lifetimes", "lanes", "feeds", "augment", "ragged", "views", "detection", "accuracy", "profiles"}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    # The experiments are scripts beside the package, found from the root of the repository.
    monkeypatch.syspath_prepend(str(ROOT))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def experiment(name):
    return importlib.import_module(f"bench.{name}")


@pytest.mark.parametrize(("name", "flags", "variants"), WINDOWED, ids=lambda value: value if isinstance(value, str) else "")
def test_measures_every_variant(name, flags, variants, tmp_path):
    assert experiment("run").main([name, *TINY, "--quick", *flags.split(), "--results", str(tmp_path)]) == 0
    made = json.loads((tmp_path / f"{name}.json").read_text())
    results.check(made)
    assert made["suite"] == name
    assert variants <= {row["name"] for row in made["rows"]}
    assert all(row["batch_size"] == 2 for row in made["rows"])
    assert made["settings"]["baseline"] in variants
    assert set(made["settings"]["ours"]) & variants
    # What it chose: on a CPU all is in line.
    assert [(row["name"], row["depth"]) for row in made["rows"] if "depth" in row] == [
        (name, 0) for name in ("streamed, auto",) if name in variants
    ]


def test_every_suite_is_measured_by_a_test():
    tested = [name for name, _, _ in WINDOWED] + sorted(OTHERS)
    assert sorted(tested) == sorted(experiment("run").EXPERIMENTS)


def test_rows_chooses_variants_and_keeps_the_baseline(tmp_path):
    made = experiment("chain").main([*TINY, "--width", "4", "--rows", "two lanes;one lane, eager"])
    assert [row["name"] for row in made["rows"]] == ["serial", "one lane, eager", "two lanes"]
    with pytest.raises(SystemExit, match=r"--rows must be among serial; .*, got three lanes"):
        experiment("chain").main([*TINY, "--width", "4", "--rows", "three lanes"])


def assert_figures_follow_from_parts(rows):
    """The figures of a case are those of its own parts and loops."""
    *parts, in_line, streamed, whole = rows
    load, *_, step = (row["wall_ms"] for row in parts)
    assert parts[-1]["host_ms"] == step, "of the step it is the windows that count"
    on_thread = sum(row["host_ms"] for row in parts[1:])
    assert "device_ms" not in {name for row in parts for name in row}, "on a CPU all but loading is the thread's work"
    assert whole["bound_ms"] == whole["full_ms"] == pytest.approx(max(load, on_thread))
    assert whole["serial_ms"] == pytest.approx(sum(row["wall_ms"] for row in parts))
    assert (whole["in_line_ms"], whole["streamed_ms"]) == (in_line["wall_ms"], streamed["wall_ms"])
    assert whole["cached_ms"] == step
    assert whole["headspace"] == pytest.approx(streamed["wall_ms"] / step)


def test_profiles_has_the_parts_the_loops_and_a_verdict_of_each_case(tmp_path):
    small = ["--size", "32", "--batch", "2", "--workers", "0", "--width", "4", "--model", "squeezenet1_1", "--repeats", "1"]
    flags = [*small, "--batches", "8", "--timelines", str(tmp_path), "--json", str(tmp_path / "profiles.json")]

    def bounded(made):
        return all(row["streamed_ms"] >= 0.8 * row["bound_ms"] for row in made["rows"] if row["name"] == "bounds")

    # What bounds a loop is measured apart from it, so another process may have the cores for the one and not for the other.
    made = again(lambda: experiment("profiles").main(flags), bounded)
    cases = list(dict.fromkeys(row["case"] for row in made["rows"]))
    assert cases == ["classifier, Kornia", "classifier, fused", "encoder-decoder", "ResNet-50, fused"]
    assert list(made["settings"]["verdicts"]) == [f"{case}, B=2" for case in cases]
    assert [row["name"] for row in made["rows"] if row["case"] == cases[2]] == [
        *("load", "copy", "stage/encode", "step"),
        *("loop, in line", "loop, streamed", "bounds"),
    ]
    for case in cases:
        assert_figures_follow_from_parts([row for row in made["rows"] if row["case"] == case])
    assert "timelines" not in made["settings"]
    assert {path.suffix for path in tmp_path.glob("timeline_*")} == {".png", ".json"}
    assert len(list(tmp_path.glob("timeline_*"))) == 8
    page, results = tmp_path / "page.md", tmp_path / "results"
    results.mkdir()
    (tmp_path / "profiles.json").rename(results / "profiles.json")
    page.write_text("<!-- table: profiles -->\n<!-- end -->\n")
    assert experiment("tables").main([str(page), "--results", str(results)]) == 0
    _, heading, _, *lines = page.read_text().splitlines()[1:]
    assert heading == f"| ms a batch | {' | '.join(cases)} |"
    names = [line.split(" | ")[0].removeprefix("| ") for line in lines[: lines.index("")]]
    assert names[:5] == ["load", "copy", "stage/augment", "stage/encode", "step"]
    assert names[-5:] == ["*bound, ms*", "*full, ms*", "*serial, ms*", "*exposed, ms*", "*headspace*"]
    assert f"- *{cases[2]}, B=2*: {' '.join(made['settings']['verdicts'][f'{cases[2]}, B=2'])}" in lines


def test_items_has_both_datasets_and_both_endings(tmp_path):
    made = experiment("items").main([*TINY, "--model", "squeezenet1_1", "--json", str(tmp_path / "items.json")])
    assert {row["case"] for row in made["rows"]} == {
        f"{source}{ending}" for source in ("workers", "no workers, Python", "no workers, torch") for ending in ("", ", .item()")
    }
    assert all(row["name"] in ("serial", "streamed") for row in made["rows"])


def test_handover_times_each_next(tmp_path):
    made = experiment("handover").main([*TINY, "--calls", "20", "--json", str(tmp_path / "handover.json")])
    assert {row["case"] for row in made["rows"]} == {"two tensors, large", "two tensors, small", "many leaves"}
    assert all(row["median_us"] > 0 and row["calls"] == 20 for row in made["rows"])
    results.check(made)


def test_lifetimes_is_skipped_without_a_gpu(capsys):
    assert experiment("lifetimes").main([*TINY]) is None
    assert "skipped" in capsys.readouterr().out


@pytest.mark.gpu
def test_lifetimes_finds_no_wrong_pixel():
    made = experiment("lifetimes").main(["--device", "cuda", "--size", "64", "--batch", "4", "--seconds", "0.1"])
    assert [row["wrong"] for row in made["rows"]] == [0] * 12


@pytest.mark.gpu
def test_published_loops_run_on_a_gpu():
    flags = ["--device", "cuda", "--size", "32", "--batch", "2", "--seconds", "0.05", "--repeats", "1", "--workers", "2"]
    for name in ("encoder_decoder", "classifier"):
        made = experiment(name).main(flags)
        assert "two streams, as published" in {row["name"] for row in made["rows"]}


def test_lanes_has_a_span_for_each_lane_and_draws_it(tmp_path):
    path, image = tmp_path / "lanes.json", tmp_path / "lanes.png"
    lanes = experiment("lanes")
    lanes.main([*TINY, "--width", "4", "--json", str(path)])
    assert path.stat().st_size < 200_000
    made = json.loads(path.read_text())
    results.check(made)
    for case in ("serial", "streamed"):
        rows = [row for row in made["rows"] if row["case"] == case]
        assert {row["lane"] for row in rows} == set(lanes.LANES)
        assert all(0 <= row["start_ms"] <= row["end_ms"] for row in rows)
    lanes.main(["--draw", str(path), "--image", str(image)])
    assert image.read_bytes().startswith(b"\x89PNG")


def trace():
    """Steps of a GPU trace, 3 ms each: kernels run 1 ms after their launches, and autograd launches from its own thread."""
    for step in range(12):
        start = 3000.0 * step
        yield {"cat": "user_annotation", "name": "gpuaug/copy", "tid": 1, "ts": start, "dur": 100.0}
        yield {"cat": "user_annotation", "name": "train", "tid": 1, "ts": start + 200, "dur": 1000.0}
        launches = {"copy": (1, start + 50, 13), "forward": (1, start + 300, 7), "backward": (2, start + 800, 7)}
        for number, (tid, ts, stream) in enumerate(launches.values()):
            correlation = {"correlation": 10 * step + number}
            yield {"cat": "cuda_runtime", "name": "launch", "tid": tid, "ts": ts, "dur": 5.0, "args": correlation}
            lane = {"cat": "gpu_memcpy" if stream == 13 else "kernel", "name": "work", "tid": stream}
            yield {**lane, "ts": ts + 1000, "dur": 500.0, "args": {**correlation, "stream": stream}}
        yield {"cat": "kernel", "name": "not launched in a range", "ts": start, "dur": 1.0, "args": {"stream": 7}}


def test_spans_follow_kernels_to_the_range_that_launched_them():
    made = experiment("lanes").spans(trace())
    train = [span for span in made if span["lane"] == "train"]
    assert [span["batch"] for span in train] == [5, 6, 7, 8, 9, 10]
    assert {(span["stream"], round(span["end_ms"] - span["start_ms"], 3)) for span in train} == {(7, 1.0)}
    assert train[1]["start_ms"] == 3.0
    copies = [span for span in made if span["lane"] == "copy"]
    assert {span["stream"] for span in copies} == {13}
    # The picture begins in the middle of a copy.
    assert {round(span["end_ms"] - span["start_ms"], 3) for span in copies} == {0.25, 0.5}


def test_run_goes_on_after_a_failure_and_names_it(tmp_path, capsys):
    run = experiment("run")
    monkeyed = {**run.EXPERIMENTS, "missing": ("no_such_experiment", [])}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "EXPERIMENTS", monkeyed)
        flags = [*TINY, "--width", "4", "--rows", "two lanes", "--results", str(tmp_path)]
        assert run.main(["missing", "branches", "chain", *flags]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["chain.json"]
    error = capsys.readouterr().err
    assert "failed: missing, branches\n" in error
    assert "No module named 'bench.no_such_experiment'" in error
    assert "unrecognized arguments: --width 4" in error


def test_run_without_suites_runs_all_of_them(tmp_path, monkeypatch):
    run, ran = experiment("run"), []
    module = SimpleNamespace(main=lambda argv: ran.append(argv))
    monkeypatch.setattr(run, "importlib", SimpleNamespace(import_module=lambda name: module))
    monkeypatch.setattr(run.common, "release", lambda device: None)
    assert run.main(["--quick", "--results", str(tmp_path)]) == 0
    assert [argv[-1] for argv in ran] == [str(tmp_path / f"{name}.json") for name in run.EXPERIMENTS]
    assert all("--quick" in argv for argv in ran)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("chain nonsense", "suites must be among encoder_decoder, .*, got nonsense. See --list."),
        ("--quick chain", "suites must come before flags, got chain after --quick. Name them first."),
    ],
)
def test_run_refuses_what_it_does_not_know(words, text, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        experiment("run").main([*words.split(), "--results", str(tmp_path)])
    assert stop.value.code == 2
    assert re.search(text, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_run_lists_suites_with_what_they_measure(capsys):
    run = experiment("run")
    assert run.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert "chain                     A chain of lanes: copy" in listed
    assert listed.count("--suite classifier_sizes") == 1
    assert {line.split()[0] for line in listed.splitlines() if not line.startswith(" ")} == set(run.EXPERIMENTS)


def test_every_experiment_that_run_names_exists():
    run = experiment("run")
    assert {module for module, _ in run.EXPERIMENTS.values()} <= {path.stem for path in (ROOT / "bench").glob("*.py")}


@pytest.fixture
def measured(tmp_path):
    rows = [
        {"name": name, "batch_size": batch_size, "steps_per_s": rate, "ratio": rate / 100.0, "rounds": [rate, rate + 1]}
        for batch_size in (8, 32)
        for name, rate in (("serial", 100.0), ("streamed", 131.4), ("resident", 150.0))
    ]
    settings = {"baseline": "serial", "ours": ["streamed"], "ceilings": ["resident"], "workers": 4}
    made = results.result("encoder_decoder", rows=rows, settings=settings, device=torch.device("cpu"))
    flat = [
        {"case": "short", "name": policy, "step_ms": 1.25, "peak_reserved_bytes": 512_000_000, "wrong": 0}
        for policy in ("record_stream", "reverse waits")
    ]
    folder = tmp_path / "results"
    results.write(folder / "encoder_decoder.json", made)
    results.write(folder / "lifetimes.json", results.result("lifetimes", rows=flat, settings={}, device=torch.device("cpu")))
    return folder


TEXT = """Before.
<!-- table: encoder_decoder -->
stale
<!-- end -->
Between.
<!-- table: lifetimes -->
<!-- end -->
<!-- table: unmeasured -->
kept
<!-- end -->
After.
"""


def test_tables_are_rewritten_from_the_results(measured, tmp_path, capsys):
    tables = experiment("tables")
    page = tmp_path / "page.md"
    page.write_text(TEXT)
    flags = [str(page), "--results", str(measured)]
    assert tables.main([*flags, "--check"]) == 1
    assert page.read_text() == TEXT
    assert "out of date" in capsys.readouterr().out
    assert tables.main(flags) == 0
    text = page.read_text()
    assert "| streamed | 131 (1.31x) | 131 (1.31x) |" in text
    assert "| *resident* (ceiling) | 150 (1.50x) |" in text
    assert "| serial | 100 | 100 |" in text
    assert "| short | record_stream | 1.25 | 512 | 0 |" in text
    assert "stale" not in text
    assert "kept" in text
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")
    assert tables.main([*flags, "--check"]) == 0


def test_tables_leave_text_alone_without_results(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(TEXT)
    assert experiment("tables").main([str(page), "--results", str(tmp_path / "none"), "--check"]) == 0


def test_plot_draws_each_result(measured, tmp_path):
    drawn = experiment("plot").main(["--results", str(measured), "--images", str(tmp_path / "images")])
    assert sorted(path.name for path in drawn) == ["encoder_decoder.png", "lifetimes.png"]
    assert all(path.stat().st_size > 1000 for path in drawn)


def test_help_says_what_is_measured(capsys):
    with pytest.raises(SystemExit) as stop:
        experiment("encoder_decoder").main(["--help"])
    assert stop.value.code == 0
    assert "Segmentation with a frozen encoder" in capsys.readouterr().out
    assert "bench" in sys.modules
