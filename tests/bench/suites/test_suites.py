"""One small run of every suite, and what is true of all."""

import json

import pytest
from support.bench.commands import TINY, assert_runs_on_a_gpu, measure_suite, rows_by_case, run_suites
from support.bench.file_corpora import file_corpora
from support.comparison.replay import left_to_kornia

from bench import __main__
from bench.suites import SUITES
from bench.suites.augmentation import augment, clips, detection, kernels, ragged, recipes, views
from bench.suites.training import classifier, encoder_decoder
from bench.suites.transport import lifetimes

__all__ = ["file_corpora"]

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
    (
        "modules",
        "--side 32 --cases RandomJigsaw;AugMix",
        {case: {"library", "gpuaug"} for case in ("RandomJigsaw", "AugMix")},
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

OTHERS = [
    ("accuracy", "--epochs 1 --batch 8 --data {folder}"),
    ("augment", "--quick"),
    ("augment_presets", ""),
    ("clips", "--frames 2"),
    ("handover", "--calls 20"),
    ("profiles", "--width 4 --model squeezenet1_1 --batches 2 --timelines {results}"),
    ("recipes", ""),
    ("waits", "--case small/squeezenet1_1"),
]
"""Suites with rows of another form, and flags that make them small."""

APART = [
    *("bucket", "cache", "cache_accuracy", "cache_disk", "clips_files", "feeds", "files", "lifetimes", "mosaics"),
    *("priorities", "processors"),
]
"""Suites with a test file of their own, or that need a GPU."""

LONG = ("classifier_sizes", "encoder_decoder_sizes", "profiles")
"""Suites that share module and flags with another suite, and the one of ``gpuaug.profile``, which has tests of its own."""


def params(suites):
    return [pytest.param(*suite, id=suite[0], marks=[pytest.mark.slow] * (suite[0] in LONG)) for suite in suites]


@pytest.mark.parametrize(("name", "flags", "variants"), params(WINDOWED))
def test_measures_every_variant(name, flags, variants, tmp_path):
    result = measure_suite(name, tmp_path, "--quick", *flags.split())
    assert variants <= {row["name"] for row in result["rows"]}
    assert all(row["batch_size"] == 2 for row in result["rows"])
    assert result["settings"]["baseline"] in variants
    assert set(result["settings"]["ours"]) & variants


@pytest.mark.parametrize(("name", "flags", "variants"), params(BY_CASE))
def test_measures_every_case(name, flags, variants, tmp_path):
    result = measure_suite(name, tmp_path, *flags.split())
    assert {case: set(rows) for case, rows in rows_by_case(result).items()} == variants


@left_to_kornia
@pytest.mark.filterwarnings("ignore::gpuaug.GpuAugWarning")
@pytest.mark.usefixtures("file_corpora")
@pytest.mark.parametrize(("name", "flags"), params(OTHERS))
def test_runs(name, flags, class_folder, tmp_path):
    result = measure_suite(name, tmp_path, *flags.format(folder=class_folder, results=tmp_path).split())
    assert str(class_folder) not in json.dumps(result), "results are published"


def test_every_suite_is_measured_by_a_test():
    tested = [name for name, *_ in WINDOWED + BY_CASE + OTHERS]
    assert sorted([*tested, *APART]) == sorted(SUITES)


def test_rows_chooses_variants_and_what_needs_a_gpu_is_skipped_with_the_reason(capsys):
    flags = [*TINY, "--width", "1", "--rows"]
    result = classifier.main([*flags, "timm PrefetchLoader;DALI"])
    assert [row["name"] for row in result["rows"]] == ["serial"]
    skipped = [(row["name"], row["reason"]) for row in result["settings"]["skipped"]]
    assert skipped == [("timm PrefetchLoader", "needs a GPU"), ("DALI", "needs a GPU")]
    assert "timm PrefetchLoader skipped: needs a GPU" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"--rows must be among serial; .*, got three lanes"):
        classifier.main([*flags, "three lanes"])


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
@pytest.mark.parametrize(
    ("suite", "flags"),
    [
        (augment, ["--cases", "cls,ssl", "--rows", "torchvision v2;gpuaug;gpuaug, streamed"]),
        (clips, []),
        (detection, ["--side", "80"]),
        (ragged, ["--sides", "40,80"]),
        (recipes, ["--cases", "references;references, ssdlite;torchgeo, L8 Biome"]),
        (views, []),
    ],
)
def test_suites_of_calls_run_on_a_gpu(suite, flags):
    assert_runs_on_a_gpu(suite.main, *flags, name="gpuaug, clips" if suite is clips else "gpuaug")


@pytest.mark.gpu
def test_kernels_have_a_row_for_each_pass():
    result = kernels.main(["--device", "cuda", "--size", "64", "--batch", "4"])
    assert all(row["gpu_us"] > 0 for row in result["rows"])


@pytest.mark.gpu
def test_lifetimes_finds_no_wrong_pixel():
    result = lifetimes.main(["--device", "cuda", "--size", "64", "--batch", "4", "--seconds", "0.1"])
    assert [row["wrong"] for row in result["rows"]] == [0] * 12
