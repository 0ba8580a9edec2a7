import pytest
import torch
from support.replay import left_to_kornia

from bench.harness import timing
from bench.peers import augmenters
from bench.suites.augmentation import kernels
from gpuaug.benchkit import results

pytestmark = left_to_kornia  # RandAugment as its users have it, equalize and auto_contrast included


def test_kernels_are_gathered_by_the_pass_that_launches_them(monkeypatch):
    case = next(case for case in augmenters.cases(32) if case.name == "cls")
    batch = augmenters.sample(case, 4, 32, torch.device("cpu"))
    (line,) = (augment := augmenters.fused(case, augmenters.OURS)).explain(batch.images.shape).lines
    assert augment.explain(batch.images.shape).launches == 2
    trace = [{"name": name, "ts": ts, "dur": 3.0} for ts, name in enumerate(["mean", "gather"] * 8)]
    monkeypatch.setattr(timing, "launched_kernels", lambda call, calls: trace)
    (row,) = kernels.passes(case, batch, bandwidth=1e12)
    assert (row["kernels"], row["gpu_us"], row["moved_bytes"]) == ("mean + gather", 6.0, line.read_bytes + line.written_bytes)
    assert row["share_of_copy"] == pytest.approx(row["moved_bytes"] / 6e-6 / 1e12)
    monkeypatch.setattr(timing, "launched_kernels", lambda call, calls: trace[:-1])
    assert [row["name"] for row in kernels.passes(case, batch, bandwidth=1e12)] == ["mean", "gather"]


def test_kernels_are_skipped_without_a_gpu(capsys):
    assert kernels.main(["--device", "cpu"]) is None
    assert "skipped" in capsys.readouterr().out


@pytest.mark.gpu
def test_kernels_have_a_row_for_each_pass():
    made = kernels.main(["--device", "cuda", "--size", "64", "--batch", "4"])
    results.check(made)
    assert {row["case"] for row in made["rows"]} == {case.name for case in augmenters.cases(64) if not case.preset}
    assert all(row["gpu_us"] > 0 for row in made["rows"])
