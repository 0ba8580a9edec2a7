"""One small run of every suite, and what is true of all."""

import importlib
import json

import pytest
from support.bench.commands import TINY, assert_runs_on_a_gpu, measure_suite, rows_by_case, run_suites

from bench import __main__
from bench.figures import tables
from bench.suites import SUITES
from bench.suites.augmentation import detection, kernels, ragged, views
from bench.suites.training import classifier, encoder_decoder, profiles
from bench.suites.transport import lifetimes

# Suite, flags that make it small, and the rows that must be there on a CPU.
WINDOWED = [
    ("encoder_decoder", "--width 4", {"serial", "streamed", "streamed, eager encoder", "resident", "loader"}),
    ("encoder_decoder_sizes", "--width 4", {"serial", "streamed"}),
    ("encoder_decoder_resident", "--width 4", {"serial", "encoder alone", "training alone", "feature stage"}),
    ("encoder_decoder_alike", "--width 4", {"own lanes, 1", "own lanes, 6", "same lanes, 1", "same lanes, 4"}),
    ("frozen_resnet", "--model resnet18", {"serial", "captured, in line", "feature stage", "feature stage, eager"}),
    ("classifier", "--width 1", {"serial", "workers", "streamed", "streamed, fused", "resident", "loader"}),
    ("classifier_sizes", "--width 1", {"serial", "workers", "streamed", "streamed, fused"}),
    ("resnet_step", "--model squeezenet1_1", {"serial", "streamed", "resident", "loader"}),
    ("launch_bound", "--model squeezenet1_1", {"resident", "DataLoader, pinned", "StreamedLoader", "StreamedLoader, fused"}),
    ("chain", "--width 4", {"serial", "one lane, eager", "two lanes", "two lanes, four ahead"}),
    ("branches", "", {"serial", "one module", "branches", "branches, eager"}),
    ("latents", "--width 8 --layers 1", {"serial", "training alone", "feature stages", "feature stages, eager"}),
]
BY_CASE = [
    (
        "items",
        "--model squeezenet1_1",
        {
            f"{source}{ending}": {"serial", "streamed"}
            for source in ("workers", "no workers, Python", "no workers, torch")
            for ending in ("", ", .item()")
        },
    ),
    (
        "ragged",
        "--size 16 --sides 20,40",
        {
            "on the card": {"Kornia, image by image", "gpuaug"},
            "on the card, antialiased": {"gpuaug"},
            "from the host": {"gpuaug, workers", "gpuaug"},
            "from the host, antialiased": {"torchvision, workers", "gpuaug, workers", "gpuaug"},
        },
    ),
    ("views", "--size 32", {None: {"Kornia", "gpuaug, a call for each", "gpuaug"}}),
    (
        "detection",
        "--size 24 --side 48",
        {
            case: {"torchvision, workers", "Kornia, image by image", "gpuaug, workers", "gpuaug"}
            for case in ("images", "boxes", "boxes and masks")
        },
    ),
]
OTHERS = {
    "accuracy",
    "augment",
    "augment_presets",
    "clips",
    "clips_files",
    "feeds",
    "files",
    "handover",
    "lifetimes",
    "priorities",
    "profiles",
    "recipes",
    "waits",
}
"""Suites of another form: below, or in test files of their own."""

LONG = ("classifier_sizes", "encoder_decoder_sizes")
"""Suites that share module and flags with another suite."""


@pytest.mark.parametrize(
    ("name", "flags", "variants"),
    [pytest.param(*suite, id=suite[0], marks=[pytest.mark.slow] * (suite[0] in LONG)) for suite in WINDOWED],
)
def test_measures_every_variant(name, flags, variants, tmp_path):
    result = measure_suite(name, tmp_path, "--quick", *flags.split())
    assert variants <= {row["name"] for row in result["rows"]}
    assert all(row["batch_size"] == 2 for row in result["rows"])
    assert result["settings"]["baseline"] in variants
    assert set(result["settings"]["ours"]) & variants


@pytest.mark.parametrize(("name", "flags", "variants"), [pytest.param(*suite, id=suite[0]) for suite in BY_CASE])
def test_measures_every_case(name, flags, variants, tmp_path):
    result = measure_suite(name, tmp_path, *flags.split())
    assert {case: set(rows) for case, rows in rows_by_case(result).items()} == variants


def test_handover_times_each_next(tmp_path):
    result = measure_suite("handover", tmp_path, "--calls", "20")
    assert {row["case"] for row in result["rows"]} == {"two tensors, large", "two tensors, small", "many leaves"}
    assert all(row["median_us"] > 0 and row["calls"] == 20 for row in result["rows"])


def assert_figures_follow_from_parts(rows):
    """The figures of a case are those of its own parts and loops."""
    *parts, in_line, streamed, whole = rows
    load, *_, step = (row["wall_ms"] for row in parts)
    assert parts[-1]["host_ms"] == step, "of the step it is the windows that count"
    on_thread = sum(row["host_ms"] for row in parts[1:])
    assert whole["bound_ms"] == whole["full_ms"] == pytest.approx(max(load, on_thread))
    assert whole["serial_ms"] == pytest.approx(sum(row["wall_ms"] for row in parts))
    assert (whole["in_line_ms"], whole["streamed_ms"]) == (in_line["wall_ms"], streamed["wall_ms"])
    assert whole["cached_ms"] == step
    assert whole["headspace"] == pytest.approx(streamed["wall_ms"] / step)


@pytest.fixture
def short_windows(monkeypatch):
    """Measure two batches per window, and draw two, since nobody reads the figures of a smoke run."""
    profile = importlib.import_module("gpuaug.profiler.profile")
    monkeypatch.setattr(profile, "MIN_WINDOW_BATCHES", 2)
    monkeypatch.setattr(profile, "TIMELINE_BATCHES", 2)


def run_profiles(folder, *flags):
    flags = ["--width", "4", "--model", "squeezenet1_1", "--batches", "2", "--results", str(folder), *flags]
    assert run_suites(["profiles"], *TINY[:6], "--workers", "0", "--repeats", "1", *flags) == 0


@pytest.mark.usefixtures("short_windows")
def test_profiles_has_the_parts_the_loops_and_a_verdict_of_each_case(tmp_path):
    folder = tmp_path / "results"
    run_profiles(folder)
    result = json.loads((folder / "profiles.json").read_text())
    cases = list(dict.fromkeys(row["case"] for row in result["rows"]))
    assert cases == ["classifier, Kornia", "classifier, fused", "encoder-decoder", "ResNet-50, fused"]
    for case in cases:
        assert_figures_follow_from_parts([row for row in result["rows"] if row["case"] == case])
    page = tmp_path / "page.md"
    page.write_text("<!-- table: profiles -->\n<!-- end -->\n")
    assert tables.main([str(page), "--results", str(folder)]) == 0
    assert f"| ms a batch | {' | '.join(cases)} |" in page.read_text()
    assert f"- *{cases[2]}, B=2*: {' '.join(result['settings']['verdicts'][f'{cases[2]}, B=2'])}" in page.read_text()


@pytest.mark.usefixtures("short_windows")
def test_profiles_writes_a_picture_and_a_trace_of_a_case(tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "CASES", {"encoder-decoder": profiles.CASES["encoder-decoder"]})
    run_profiles(tmp_path, "--timelines", str(tmp_path))
    names = ["timeline_encoder_decoder_2.json", "timeline_encoder_decoder_2.png"]
    assert sorted(path.name for path in tmp_path.glob("timeline_*")) == names


def test_rows_chooses_variants_and_what_needs_a_gpu_is_skipped_with_the_reason(capsys):
    flags = [*TINY, "--width", "1", "--rows"]
    result = classifier.main([*flags, "timm PrefetchLoader;DALI"])
    assert [row["name"] for row in result["rows"]] == ["serial"]
    skipped = [(row["name"], row["reason"]) for row in result["settings"]["skipped"]]
    assert skipped == [("timm PrefetchLoader", "needs a GPU"), ("DALI", "needs a GPU")]
    assert "timm PrefetchLoader skipped: needs a GPU" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"--rows must be among serial; .*, got three lanes"):
        classifier.main([*flags, "three lanes"])


def test_every_suite_is_measured_by_a_test():
    tested = [name for name, _, _ in WINDOWED + BY_CASE] + sorted(OTHERS)
    assert sorted(tested) == sorted(SUITES)


def test_file_of_a_suite_is_named_like_its_result():
    files = {module.rpartition(".")[2] for module, _ in SUITES.values()}
    assert files <= set(SUITES)
    assert all(any(name.startswith(file) for file in files) for name in SUITES)


def test_help_names_every_command_that_is_no_suite(capsys):
    with pytest.raises(SystemExit):
        __main__.main(["--help"])
    shown = capsys.readouterr().out
    suites = {module.rpartition(".")[2] for module, _ in SUITES.values()}
    assert all(f"python -m bench {command} " in shown for command in set(__main__.COMMANDS) - suites)


def test_a_suite_that_fails_does_not_stop_the_others(tmp_path, capsys):
    assert run_suites(["branches", "handover"], *TINY, "--calls", "2", "--results", str(tmp_path)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["handover.json"]
    assert "failed: branches\n" in capsys.readouterr().err


@pytest.mark.gpu
def test_published_loops_run_on_a_gpu():
    flags = ["--device", "cuda", "--size", "32", "--batch", "2", "--seconds", "0.05", "--repeats", "1", "--workers", "2"]
    for suite, names in ((encoder_decoder, {"two streams, both waits"}), (classifier, set())):
        result = suite.main(flags)
        assert {"two streams, as published"} | names <= {row["name"] for row in result["rows"]}


@pytest.mark.gpu
@pytest.mark.parametrize(("suite", "flags"), [(detection, ["--side", "80"]), (ragged, ["--sides", "40,80"]), (views, [])])
def test_suites_of_calls_run_on_a_gpu(suite, flags):
    assert_runs_on_a_gpu(suite.main, *flags)


@pytest.mark.gpu
def test_kernels_have_a_row_for_each_pass():
    result = kernels.main(["--device", "cuda", "--size", "64", "--batch", "4"])
    assert all(row["gpu_us"] > 0 for row in result["rows"])


@pytest.mark.gpu
def test_lifetimes_finds_no_wrong_pixel():
    result = lifetimes.main(["--device", "cuda", "--size", "64", "--batch", "4", "--seconds", "0.1"])
    assert [row["wrong"] for row in result["rows"]] == [0] * 12
