"""What is true of every suite."""

import pytest
from support.bench.commands import measure_suite

from bench.suites import SUITES
from bench.suites.training import classifier, encoder_decoder

# Suite, flags that make it small, and the variants that must be there on a CPU.
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


# Suites of another form have test files of their own.
OTHERS = {
    "items",
    "handover",
    "lifetimes",
    "lanes",
    "feeds",
    "augment",
    "augment_presets",
    "ragged",
    "views",
    "detection",
    "accuracy",
    "profiles",
    "files",
}


LONG = ("classifier_sizes",)
"""Suites that share module and flags with another suite, which is measured in less time."""


@pytest.mark.parametrize(
    ("name", "flags", "variants"),
    [pytest.param(*suite, id=suite[0], marks=[pytest.mark.slow] * (suite[0] in LONG)) for suite in WINDOWED],
)
def test_measures_every_variant(name, flags, variants, tmp_path):
    made = measure_suite(name, tmp_path, "--quick", *flags.split())
    assert variants <= {row["name"] for row in made["rows"]}
    assert all(row["batch_size"] == 2 for row in made["rows"])
    assert made["settings"]["baseline"] in variants
    assert set(made["settings"]["ours"]) & variants


def test_every_suite_is_measured_by_a_test():
    tested = [name for name, _, _ in WINDOWED] + sorted(OTHERS)
    assert sorted(tested) == sorted(SUITES)


def test_file_of_a_suite_is_named_like_its_result():
    files = {module.rpartition(".")[2] for module, _ in SUITES.values()}
    assert files <= set(SUITES)
    assert all(any(name.startswith(file) for file in files) for name in SUITES)


@pytest.mark.gpu
def test_published_loops_run_on_a_gpu():
    flags = ["--device", "cuda", "--size", "32", "--batch", "2", "--seconds", "0.05", "--repeats", "1", "--workers", "2"]
    for suite in (encoder_decoder, classifier):
        made = suite.main(flags)
        assert "two streams, as published" in {row["name"] for row in made["rows"]}
