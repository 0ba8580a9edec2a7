import copy
import json
from pathlib import Path

import pytest
import torch

from bench.harness.result_check import check_result
from gpuaug.benchkit import results
from gpuaug.benchkit.windows import Row
from gpuaug.core import devices

CPU = torch.device("cpu")
ROW = Row("serial", 12.5, 200.0, 80.0, 1.0, 0.9, 1.1, [12.5, 12.4]).record(case="train", batch_size=16)
RECORDED = Path(__file__).parents[2] / "bench" / "results"


@pytest.fixture
def good():
    return results.result("uses", rows=[dict(ROW)], settings={"workers": 2}, device=CPU)


def test_a_result_says_why_fused_pipelines_ran_in_plain_torch(good, monkeypatch):
    assert good["environment"]["plain_torch"] is None
    monkeypatch.setitem(devices.TRITON_FAILURES, CPU, "no compiler")
    later = results.result("uses", rows=[dict(ROW)], settings={}, device=CPU, environment=good["environment"])
    assert later["environment"]["plain_torch"] == "no compiler"


def test_a_made_result_is_good_and_survives_the_file(good, tmp_path):
    check_result(good)
    path = tmp_path / "new" / "folder" / "uses.json"
    results.write(path, good)
    assert json.loads(path.read_text()) == good
    assert path.read_text().endswith("}\n")
    assert [entry.name for entry in path.parent.iterdir()] == ["uses.json"]


def test_not_a_number_becomes_null_and_then_fails_the_check(good, tmp_path):
    good["rows"][0] |= {"host_ms": float("nan"), "rounds": [1.0, float("inf")]}
    results.write(tmp_path / "nan.json", good)
    written = json.loads((tmp_path / "nan.json").read_text())
    assert written["rows"][0]["host_ms"] is None
    assert written["rows"][0]["rounds"] == [1.0, None]
    with pytest.raises(ValueError, match=r"rows\[0\]\.host_ms must be a finite number, got None"):
        check_result(written)


def test_a_failed_write_leaves_the_old_result(good, tmp_path):
    path = tmp_path / "uses.json"
    results.write(path, good)
    good["settings"]["oops"] = object()
    with pytest.raises(TypeError):
        results.write(path, good)
    assert "oops" not in path.read_text()
    assert [entry.name for entry in tmp_path.iterdir()] == ["uses.json"]


def _without(key):
    return lambda made: made.pop(key)


def _row(**values):
    return lambda made: made["rows"][0].update(values)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (_without("settings"), r"keys of a result must be \['env.*\], got \['env.*\]. The difference is 'settings'."),
        (lambda made: made.update(extra=1), "The difference is 'extra'"),
        (lambda made: made.update(schema=0), "schema must be 1, got 0. Make results with gpuaug.benchkit.results.result."),
        (lambda made: made.update(suite=""), "suite must be a name, got ''"),
        (lambda made: made.update(rows=[]), r"rows must be a list that is not empty, got \[\]"),
        (lambda made: made["environment"].pop("commit"), "environment.commit must be present"),
        (_row(name=None), r"rows\[0\].name must be a name, got None"),
        (_row(steps_per_s=0.0), r"rows\[0\].steps_per_s must be positive, got 0.0"),
        (_row(ratio=-1.0), r"rows\[0\].ratio must be positive, got -1.0"),
        (_row(images_per_s=float("nan")), r"rows\[0\].images_per_s must be a finite number, got nan"),
        (_row(rounds=[]), r"rows\[0\].rounds must be positive numbers, got \[\]"),
        (_row(rounds=[1.0, None]), r"rows\[0\].rounds must be positive numbers"),
        (lambda made: made.update(rows=[{"name": "a", "rate": 3}]), r"rows\[0\] must be a row with a figure"),
        (lambda made: made.update(rows=["a"]), r"rows\[0\] must be a dict, got 'a'"),
    ],
)
def test_check_names_the_faulty_key(good, spoil, text):
    spoilt = copy.deepcopy(good)
    spoil(spoilt)
    with pytest.raises(ValueError, match=text):
        check_result(spoilt)


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.json")), ids=lambda path: str(path.relative_to(RECORDED)))
def test_recorded_results_are_good(path):
    check_result(json.loads(path.read_text()))
