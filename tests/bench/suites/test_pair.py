import io
import json
import math
from argparse import Namespace

import pytest

from bench.suites import pair, pair_child

FLAGS = ["--device", "cpu", "--size", "32", "--batch", "4", "--workers", "0"]


def test_ratio_is_that_of_the_pairs_of_processes_with_its_interval():
    rounds = [[[100.0, 110.0], [200.0, 220.0], [1.0, 9.0]], [[100.0, 121.0], [100.0, 100.0]]]
    row = pair.record("augment, cls", {"rates": rounds, "counts": [{"kernels": 2.0}, {"kernels": 3.0}]})
    first, second = math.log(1.1), math.log((1.21 + 1.0) / 2)  # the medians of each pair's rounds
    assert row["ratio"] == pytest.approx(math.exp((first + second) / 2))
    half = 12.706 * (second - first) / 2  # of two: the deviation over the root is half of the difference
    assert math.log(row["ratio_high"] / row["ratio"]) == pytest.approx(half, rel=1e-3)
    assert math.log(row["ratio"] / row["ratio_low"]) == pytest.approx(half, rel=1e-3)
    assert (row["other_images_per_s"], row["this_images_per_s"]) == (100.0, 110.0)
    assert (row["other_kernels"], row["this_kernels"]) == (2.0, 3.0)
    one = pair.record("x", {"rates": rounds[:1], "counts": [{}, {}]})
    assert one["ratio"] == one["ratio_low"] == one["ratio_high"] == pytest.approx(1.1)


@pytest.mark.parametrize(
    "name",
    ["augment, cls", "ragged", *(pytest.param(name, marks=pytest.mark.slow) for name in ("classifier", "launch-bound, fused"))],
)
def test_a_process_answers_windows_of_its_rows(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["pair_child", *FLAGS, "--rows", name])
    requests = [{"row": name, "seconds": 0.01}, {"row": name, "count": True}]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(json.dumps(request) + "\n" for request in requests)))
    monkeypatch.setattr(pair_child, "CLASSIFIER_BATCH", 2)
    pair_child.main()
    groups, rate, counts = (json.loads(line)["answer"] for line in capsys.readouterr().out.splitlines())
    assert sorted(groups) == [[], [name]]
    assert rate > 0
    assert counts == {}


def test_a_process_imports_the_gpuaug_of_its_checkout(tmp_path, monkeypatch):
    (tmp_path / "gpuaug").mkdir()
    (tmp_path / "gpuaug" / "__init__.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(pair.ROOT)
    child = pair.Child(tmp_path, Namespace(device="cpu", workers=0, size=32, batch=4, rows="augment, cls"))
    with pytest.raises(SystemExit, match="because a process ended with status 3"):
        child.answer()


def test_wrong_checkouts_and_rows_are_named(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        pair.main([str(tmp_path)])
    assert f"other must be a checkout of gpuaug, got {tmp_path}. Pass the folder that holds the folder gpuaug." in " ".join(
        capsys.readouterr().err.split()
    )
    monkeypatch.setattr("sys.argv", ["pair_child", *FLAGS, "--rows", "seed"])
    with pytest.raises(
        SystemExit, match=r"--rows must be among augment, seed; .*, got seed\. Leave it out to measure all of them\."
    ):
        pair_child.main()


@pytest.mark.slow
def test_this_checkout_beside_itself(tmp_path):
    flags = [
        "--rounds",
        "1",
        "--processes",
        "1",
        "--seconds",
        "0.01",
        "--rows",
        "augment, cls",
        "--json",
        str(tmp_path / "pair.json"),
    ]
    made = pair.main([str(pair.ROOT), *FLAGS, *flags])
    (row,) = made["rows"]
    assert row["ratio"] > 0
    assert json.loads((tmp_path / "pair.json").read_text())["rows"] == [row]


@pytest.mark.slow
def test_a_process_that_ends_is_an_error():
    with pytest.raises(SystemExit, match="nothing was measured, because a process ended with status 1"):
        pair.main([str(pair.ROOT), *FLAGS, "--rounds", "1", "--processes", "1", "--rows", "none"])
