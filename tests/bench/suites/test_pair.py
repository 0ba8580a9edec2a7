import math
from argparse import Namespace

import pytest

from bench.suites import pair


def test_ratio_is_that_of_the_pairs_of_processes_with_its_interval():
    rounds = [[[100.0, 110.0], [200.0, 220.0], [1.0, 9.0]], [[100.0, 121.0], [100.0, 100.0]]]
    row = pair.create_row("augment, cls", {"rates": rounds, "counts": [{"kernels": 2.0}, {"kernels": 3.0}]})
    first, second = math.log(1.1), math.log((1.21 + 1.0) / 2)  # the medians of each pair's rounds
    assert row["ratio"] == pytest.approx(math.exp((first + second) / 2))
    half = 12.706 * (second - first) / 2  # of two: the deviation over the root is half of the difference
    assert math.log(row["ratio_high"] / row["ratio"]) == pytest.approx(half, rel=1e-3)
    assert math.log(row["ratio"] / row["ratio_low"]) == pytest.approx(half, rel=1e-3)
    assert (row["other_images_per_s"], row["this_images_per_s"]) == (100.0, 110.0)
    assert (row["other_kernels"], row["this_kernels"]) == (2.0, 3.0)
    one = pair.create_row("x", {"rates": rounds[:1], "counts": [{}, {}]})
    assert one["ratio"] == one["ratio_low"] == one["ratio_high"] == pytest.approx(1.1)


def test_a_process_imports_the_gpuaug_of_its_checkout(tmp_path, monkeypatch):
    (tmp_path / "gpuaug").mkdir()
    (tmp_path / "gpuaug" / "__init__.py").write_text("raise SystemExit(3)")
    (tmp_path / "torch.py").write_text("import gpuaug")  # comes before gpuaug, and torch itself takes seconds
    monkeypatch.chdir(pair.ROOT)
    child = pair.Child(tmp_path, Namespace(device="cpu", workers=0, size=32, batch=4, rows="augment, cls"))
    with pytest.raises(SystemExit, match="because a process ended with status 3"):
        child.answer()
