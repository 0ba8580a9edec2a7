import pytest
import torch
from support.bench.commands import assert_runs_on_a_gpu, measure_suite, rows_by_case

from bench.harness import flags
from bench.suites.augmentation import views


def test_views_has_kornia_and_both_ways_of_ours(tmp_path):
    made = measure_suite("views", tmp_path, "--size", "32")
    assert rows_by_case(made) == {None: ["Kornia", "gpuaug, a call for each", "gpuaug"]}
    assert all(row["host_ms"] > 0 and row["ratio"] > 0 for row in made["rows"])


def test_all_ways_make_the_same_views():
    options = flags.read(flags.parser("views", "", batch="2"), ["--device", "cpu", "--size", "32"])
    kornia, one_by_one, together = (row.call() for row in views.variants(options, 2, None))
    shapes = [(2, 3, 28, 28)] * 2 + [(2, 3, 12, 12)] * 8
    assert [tuple(view.shape) for view in kornia] == [tuple(view.shape) for view in one_by_one] == shapes
    assert [tuple(view.shape) for view in together] == [(4, 3, 28, 28), (16, 3, 12, 12)]
    assert {view.dtype for view in [*kornia, *one_by_one, *together]} == {torch.bfloat16}


@pytest.mark.gpu
def test_views_runs_on_a_gpu():
    assert_runs_on_a_gpu(views.main)
