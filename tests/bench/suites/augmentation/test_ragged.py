import pytest
from support.bench.commands import assert_runs_on_a_gpu, measure_suite, rows_by_case

from bench.suites.augmentation import ragged


def test_ragged_has_its_rows_in_both_places(tmp_path):
    made = measure_suite("ragged", tmp_path, "--size", "16", "--sides", "20,40")
    ours = ["gpuaug, workers", "gpuaug"]
    assert rows_by_case(made) == {
        "on the card": ["Kornia, image by image", "gpuaug"],
        "on the card, antialiased": ["gpuaug"],
        "from the host": ours,
        "from the host, antialiased": ["torchvision, workers", *ours],
    }
    assert {row["reason"] for row in made["settings"]["skipped"] if row["name"] == "DALI"} == {"needs a GPU"}
    assert len(made["settings"]["skipped"]) == 4
    assert {row["name"] for row in made["rows"] if "host_ms" in row} == {"Kornia, image by image", "gpuaug"}


@pytest.mark.gpu
def test_ragged_runs_on_a_gpu():
    assert_runs_on_a_gpu(ragged.main, "--sides", "40,80")
