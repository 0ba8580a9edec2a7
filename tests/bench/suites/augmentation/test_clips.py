import pytest
import torch
from support.bench.commands import assert_runs_on_a_gpu, measure_suite, rows_by_case

from bench.harness import flags
from bench.suites.augmentation import clips

ROWS = ["torchvision v2, clip by clip", "gpuaug, images", "gpuaug, clips"]


def test_clips_has_the_rows_of_torchvision_and_gpuaug(tmp_path):
    made = measure_suite("clips", tmp_path, "--size", "32", "--frames", "2")
    assert rows_by_case(made) == dict.fromkeys(clips.CASES, ROWS)
    assert all(row["host_ms"] > 0 and row["ratio"] > 0 for row in made["rows"])


@pytest.mark.parametrize("case", clips.CASES)
def test_all_rows_make_clips_of_the_same_shape(case):
    parser = flags.parser("clips", "", batch="2")
    parser.add_argument("--frames", type=int)
    options = flags.parse(parser, ["--device", "cpu", "--size", "32", "--frames", "3"])
    torchvision_clips, image_output, clip_output = (row.call() for row in clips.variants(options, 2, case, None))
    assert [tuple(clip.shape) for clip in torchvision_clips] == [(3, 3, 28, 28)] * 2
    assert image_output.shape == (6, 3, 28, 28)
    assert clip_output.shape == (2, 3, 3, 28, 28)
    assert {output.dtype for output in (*torchvision_clips, image_output, clip_output)} == {torch.bfloat16}


@pytest.mark.gpu
def test_clips_runs_on_a_gpu():
    assert_runs_on_a_gpu(clips.main, name="gpuaug, clips")
