"""The program that runs kernels under sanitizers: it counts what they report. A script stands in for NVIDIA's tool."""

import json
from types import SimpleNamespace

import pytest
from support.gpu import sanitizers, torch_sanitizer

from bench.harness.result_check import check_result

REPORTS = {
    "nothing": ("echo '========= ERROR SUMMARY: 0 errors'; echo '3 passed in 1s'", 0),
    "two of two processes": ("echo '========= ERROR SUMMARY: 1 error'; echo '========= ERROR SUMMARY: 1 error'", 2),
    "hazards": ("echo '========= RACECHECK SUMMARY: 4 hazards displayed (4 errors, 0 warnings)'", 4),
    "a failed test": ("echo '1 failed in 1s'; exit 1", 1),
    "too slow": ("echo '========= ERROR SUMMARY: 1 error'; exec sleep 60", 1),
}


@pytest.mark.parametrize("report", REPORTS)
def test_reports_are_counted(report, tmp_path, monkeypatch, capsys):
    script, errors = REPORTS[report]
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    path = tmp_path / "result.json"
    seconds = "1" if report == "too slow" else "60"
    assert sanitizers.main(["racecheck", "--seconds", seconds, "--json", str(path)]) == bool(errors)
    result = json.loads(path.read_text())
    check_result(result)
    (row,) = result["rows"]
    assert (row["name"], row["errors"]) == ("racecheck", errors)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"sanitizers: racecheck: {errors} errors, ")
    assert ("ended after 1 s" in last) == (report == "too slow")


def test_a_tool_that_is_not_installed_is_skipped(monkeypatch):
    monkeypatch.setattr(sanitizers, "find_sanitizer", lambda: None)
    assert "not installed" in sanitizers.run("memcheck", 1, 0)["outcome"]


def test_accesses_inside_of_freed_memory_are_forgotten():
    accesses = SimpleNamespace(accesses=dict.fromkeys((100, 150, 199, 200, 250)))
    memory = torch_sanitizer.Memory(accesses)
    memory.starts = [100, 200]
    memory.freed(100)
    assert list(accesses.accesses) == [100, 200, 250]  # the sanitizer forgets the first address itself
    accesses.accesses[160] = None
    memory.allocated(150)
    assert list(accesses.accesses) == [100, 200, 250]
    assert memory.starts == [150, 200]
