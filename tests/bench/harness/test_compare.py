import copy
import json

import pytest
import torch

from bench.harness import compare
from gpuaug.benchkit import results


def row(name, rate, rounds, **labels):
    return labels | {"name": name, "host_ms": 3.0, "images_per_s": 8 * rate, "steps_per_s": rate, "rounds": rounds}


@pytest.fixture
def before():
    rows = [
        row("serial", 100.0, [98.0, 102.0], batch_size=8),
        row("streamed", 120.0, [118.0, 124.0], batch_size=8),
        row("gone", 5.0, [5.0], batch_size=8),
        row("serial", 50.0, [49.0, 51.0], batch_size=32),
    ]
    result = results.result("classifier", rows=rows, settings={}, device=torch.device("cpu"))
    result["environment"] |= {"commit": "a" * 40, "dirty": False}
    return result


@pytest.fixture
def after(before):
    result = copy.deepcopy(before)
    result["rows"] = [
        row("serial", 103.0, [101.0, 105.0], batch_size=8),
        row("streamed", 180.0, [125.0, 190.0], batch_size=8),
        row("serial", 50.0, [49.0, 51.0], batch_size=32),
        row("new", 7.0, [7.0], batch_size=32),
    ]
    result["environment"] |= {"commit": "b" * 40, "dirty": True}
    return result


@pytest.fixture
def run(tmp_path):
    def compare_files(a, b, *flags):
        results.write(tmp_path / "a.json", a)
        results.write(tmp_path / "b.json", b)
        return compare.main([str(tmp_path / "a.json"), str(tmp_path / "b.json"), *flags])

    return compare_files


def test_rows_are_matched_by_case_batch_size_and_name(run, before, after, tmp_path, capsys):
    comparison = run(before, after, "--json", str(tmp_path / "made.json"))
    assert [tuple(row.values()) for row in comparison["rows"]] == [
        (8, "serial", "steps_per_s", 100.0, 103.0, 1.03, True),
        (8, "streamed", "steps_per_s", 120.0, 180.0, 1.5, False),
        (32, "serial", "steps_per_s", 50.0, 50.0, 1.0, True),
    ]
    assert list(comparison["rows"][0]) == ["batch_size", "name", "figure", "a", "b", "ratio", "within_spread"]
    assert comparison["only_a"] == [{"batch_size": 8, "name": "gone"}]
    assert comparison["only_b"] == [{"batch_size": 32, "name": "new"}]
    assert comparison["warnings"] == []
    assert json.loads((tmp_path / "made.json").read_text()) == comparison
    output = capsys.readouterr().out
    assert "only in A: B=8, gone\n" in output
    assert "only in B: B=32, new\n" in output
    assert f"A: {tmp_path / 'a.json'}: CPU, " in output
    assert "commit aaaaaaaaa, measured " in output
    assert "commit bbbbbbbbb with changes, measured " in output
    (line,) = (line for line in output.splitlines() if "streamed" in line)
    assert line.split() == ["8", "streamed", "steps/s", "120", "180", "1.500", "outside"]


def test_other_hardware_is_warned_of_in_words(run, before, after, capsys):
    after["environment"]["gpu"] = {"name": "NVIDIA H200"}
    after["environment"]["cpu"]["cores_allowed"] = 99
    after["environment"]["versions"]["torch"] = "3.0"
    warnings = run(before, after)["warnings"]
    assert len(warnings) == 3
    assert warnings[0].startswith("the GPUs differ: CPU and NVIDIA H200.")
    assert "99" in warnings[1]
    assert "3.0" in warnings[2]
    assert "warning: the GPUs differ: CPU and NVIDIA H200." in capsys.readouterr().out
