"""Suites at their smallest, as on a command line."""

import json

from bench import __main__
from bench.harness.result_check import check_result

TINY = ["--device", "cpu", "--size", "32", "--batch", "2", "--seconds", "0.02", "--repeats", "1", "--workers", "0"]


def run_suites(names, *flags):
    """The exit status of ``python -m bench run``."""
    return __main__.main(["run", *names, *flags])


def measure_suite(name, folder, *flags):
    """The result of one suite on a CPU, as ``python -m bench run`` writes it into ``folder``."""
    assert run_suites([name], *TINY, *flags, "--results", str(folder)) == 0
    result = json.loads((folder / f"{name}.json").read_text())
    check_result(result)
    assert name.startswith(result["suite"])
    assert all(row["images_per_s"] > 0 for row in result["rows"] if "images_per_s" in row)
    return result


def assert_runs_on_a_gpu(main, *flags, name="gpuaug"):
    """A suite of calls gives the time of the rows called ``name``, on the host and on the GPU."""
    common_flags = ["--device", "cuda", "--size", "64", "--batch", "4", "--seconds", "0.02", "--repeats", "1", "--workers", "2"]
    result = main([*common_flags, *flags])
    check_result(result)
    ours = [row for row in result["rows"] if row["name"] == name]
    assert all(row["host_ms"] > 0 for row in ours)
    assert any(row["gpu_ms"] > 0 for row in ours)


def rows_by_case(result):
    names_by_case = {}
    for row in result["rows"]:
        names_by_case.setdefault(row.get("case"), []).append(row["name"])
    return names_by_case
