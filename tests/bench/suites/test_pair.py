from argparse import Namespace
from contextlib import ExitStack

import pytest
import torch

from bench.harness.result_check import check_result
from bench.suites import pair, pair_child


def test_a_process_imports_the_gpuaug_of_its_checkout(tmp_path, monkeypatch):
    (tmp_path / "gpuaug").mkdir()
    (tmp_path / "gpuaug" / "__init__.py").write_text("raise SystemExit(3)")
    (tmp_path / "torch.py").write_text("import gpuaug")  # comes before gpuaug, and torch itself takes seconds
    monkeypatch.chdir(pair.ROOT)
    child = pair.Child(tmp_path, Namespace(device="cpu", workers=0, size=32, batch=4, rows="augment, cls", files=None))
    with pytest.raises(SystemExit, match="because a process ended with status 3"):
        child.answer()


@pytest.mark.parametrize("name", pair_child.ROWS)
def test_every_row_runs_on_a_cpu(name, class_folder, monkeypatch):
    monkeypatch.setattr(pair_child, "TRAINING_BATCH", 4)
    monkeypatch.setattr(
        pair_child.models, "Classifier", lambda classes, _, build=pair_child.models.Classifier: build(classes, 1)
    )
    make, case, _ = pair_child.ROWS[name]
    options = Namespace(device=torch.device("cpu"), workers=0, size=32, batch=4, files=class_folder)
    with ExitStack() as stack:
        assert next(make(case, options, stack)) > 0


@pytest.mark.slow
def test_two_checkouts_are_measured_in_alternation(class_folder):
    small = ["--device", "cpu", "--size", "32", "--batch", "4", "--workers", "0", "--seconds", "0.01", "--rounds", "1"]
    rows = ["detection", "files", "encoder-decoder"]
    flags = [*small, "--processes", "1", "--files", str(class_folder), "--rows", ";".join(rows)]
    result = pair.main([str(pair.ROOT), *flags])
    check_result(result)
    assert [row["name"] for row in result["rows"]] == rows
    assert str(class_folder) not in str(result), "results are published"
