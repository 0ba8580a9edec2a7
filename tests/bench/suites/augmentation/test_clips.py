import pytest
import torch
from support.bench.commands import assert_runs_on_a_gpu, measure_suite, rows_by_case

from bench.harness import flags
from bench.suites.augmentation import clips

ROWS = ["torchvision v2, clip by clip", "gpuaug, images", "gpuaug, clips"]


def test_clips_has_torchvision_and_both_ways_of_ours(tmp_path):
    made = measure_suite("clips", tmp_path, "--size", "32", "--frames", "2")
    assert rows_by_case(made) == dict.fromkeys(clips.CASES, ROWS)
    assert all(row["host_ms"] > 0 and row["ratio"] > 0 for row in made["rows"])


@pytest.mark.parametrize("case", clips.CASES)
def test_all_ways_make_the_same_clips(case):
    parser = flags.parser("clips", "", batch="2")
    parser.add_argument("--frames", type=int)
    options = flags.parse(parser, ["--device", "cpu", "--size", "32", "--frames", "3"])
    by_torchvision, images, together = (row.call() for row in clips.variants(options, 2, case, None))
    assert [tuple(clip.shape) for clip in by_torchvision] == [(3, 3, 28, 28)] * 2
    assert images.shape == (6, 3, 28, 28)
    assert together.shape == (2, 3, 3, 28, 28)
    assert {made.dtype for made in (*by_torchvision, images, together)} == {torch.bfloat16}


@pytest.mark.gpu
def test_clips_runs_on_a_gpu():
    assert_runs_on_a_gpu(clips.main)
