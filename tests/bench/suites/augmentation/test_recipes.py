import pytest
import torch
from support.bench.commands import assert_runs_on_a_gpu, measure_suite, rows_by_case

import gpuaug
from bench.figures import tables
from bench.harness import measurement
from bench.peers import dali
from bench.suites.augmentation import recipes
from bench.suites.augmentation.recipes import CASES, KORNIA, ONE_BY_ONE, OURS, TORCHVISION


def test_every_recipe_has_the_row_of_its_library_and_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(measurement, "release", lambda device: None)
    result = measure_suite("recipes", tmp_path)
    missing = {row["case"] for row in result["settings"]["skipped"] if row["name"] == OURS}
    assert missing <= {"timm", "timm, validation"}
    assert rows_by_case(result) == {
        name: [ONE_BY_ONE if case.keys else KORNIA if case.uses_kornia else TORCHVISION, OURS]
        for name, case in CASES.items()
        if name not in missing
    }
    assert all(row["ratio"] == 1 for row in result["rows"] if row["name"] != OURS)
    assert all(row["host_ms"] > 0 and row["ratio"] > 0 for row in result["rows"] if row["name"] == OURS)
    text = tables.markdown(result, by_case=True, names=[ONE_BY_ONE, TORCHVISION, OURS], cases=["RT-DETR", "MAE"])
    assert text.splitlines()[1] == "| images/s | torchvision v2, image by image | torchvision v2 | gpuaug |"
    assert [line.split(" | ")[0] for line in text.splitlines()[3:5]] == ["| RT-DETR", "| MAE"]
    assert "the ratio to the row at 1.00" in text


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.dali])
def test_dali_gives_the_views_of_a_recipe(name):
    pytest.importorskip("nvidia.dali")
    case = CASES[name]
    if case.package:
        pytest.importorskip(case.package)
    images = torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8)
    outputs = dali.build(case.dali, images, None, torch.float32)()
    views = [gpuaug.fuse(make())(images) for make, count in case.views(64) for _ in range(count)]
    assert [tuple(view.shape) for view in (outputs if isinstance(outputs, list) else [outputs])] == [
        tuple(view.shape) for view in views
    ]


def test_a_recipe_that_is_not_there_ends_the_suite():
    with pytest.raises(
        SystemExit, match=r"--cases must be among references; .*, got BYOL;MoCo\. Leave it out to measure all of them\."
    ):
        recipes.main(["--device", "cpu", "--cases", "BYOL;MoCo"])


@pytest.mark.gpu
def test_recipes_run_on_a_gpu():
    assert_runs_on_a_gpu(recipes.main, "--cases", "references;references, ssdlite;torchgeo, L8 Biome")
