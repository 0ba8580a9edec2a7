import json

import pytest
from support.bench.commands import TINY, run_suites
from support.bench.file_corpora import file_corpora

from bench.harness.loops import FIRST
from bench.harness.result_check import check_result
from bench.peers import file_cases
from bench.suites.training import priorities

__all__ = ["file_corpora"]

SMALL = {
    "encoder-decoder": ("--width 4", ("streamed", "resident")),
    "frozen vit": ("--model resnet18", ("serial", "feature stage")),
}


@pytest.fixture
def small_cases(monkeypatch, file_corpora):
    for name, (flags, rows) in SMALL.items():
        case = priorities.SUITE_CASES[name]._replace(flags=flags, rows=rows)
        monkeypatch.setitem(priorities.SUITE_CASES, name, case)
    monkeypatch.setattr(priorities, "FILE_CASES", ("small/squeezenet1_1",))
    monkeypatch.setitem(priorities._DALI_LOAD, "small", 1.0)
    monkeypatch.setattr(priorities, "_WORKERS", 0)


@pytest.mark.filterwarnings("ignore::gpuaug.GpuAugWarning")
def test_each_row_is_measured_on_both_streams_and_compared(small_cases, tmp_path):
    names = [*SMALL, "small/squeezenet1_1"]
    assert run_suites(["priorities"], *TINY, "--cases", ",".join(names), "--results", str(tmp_path)) == 0
    result = json.loads((tmp_path / "priorities.json").read_text())
    check_result(result)
    rows = {(row["case"], row["name"]): row for row in result["rows"]}
    measured = {name: rows_of for name, (_, rows_of) in SMALL.items()}
    measured |= {names[-1]: (*priorities.CONVERSIONS, file_cases.STEP_ALONE)}
    assert set(rows) == {(case, name + end) for case, listed in measured.items() for name in listed for end in ("", FIRST)}
    for (case, name), row in rows.items():
        assert ("gain" in row) == name.endswith(FIRST)
        if name.endswith(FIRST):
            other = rows[case, name.removesuffix(FIRST)]
            ratios = [rate / base for rate, base in zip(row["rounds"], other["rounds"], strict=True)]
            assert row["gain_low"] == min(ratios) <= row["gain"] <= max(ratios) == row["gain_high"]
    path = tmp_path / "priorities.json"
    priorities.main([*TINY, "--cases", "encoder-decoder", "--keep", "--json", str(path)])
    kept = [(row["case"], row["name"]) for row in json.loads(path.read_text())["rows"]]
    assert sorted(kept) == sorted(rows)
    assert {(row["case"], row["name"]) for row in result["settings"]["skipped"]} == {
        (names[-1], "DALI"),
        (names[-1], file_cases.STEP_BESIDE),
    }
