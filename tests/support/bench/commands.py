"""Suites at their smallest, as on a command line."""

import json

from bench import __main__
from gpuaug.benchkit import results

TINY = ["--device", "cpu", "--size", "32", "--batch", "2", "--seconds", "0.02", "--repeats", "1", "--workers", "0"]


def run_suites(names, *flags):
    """The exit status of ``python -m bench run``."""
    return __main__.main(["run", *names, *flags])


def measure_suite(name, folder, *flags):
    """The result of one suite on a CPU, as ``python -m bench run`` writes it into ``folder``."""
    assert run_suites([name], *TINY, *flags, "--results", str(folder)) == 0
    made = json.loads((folder / f"{name}.json").read_text())
    results.check(made)
    assert made["suite"] == name
    assert all(row["images_per_s"] > 0 for row in made["rows"] if "images_per_s" in row)
    return made


def assert_runs_on_a_gpu(main, *flags, name="gpuaug"):
    """A suite of calls gives the time of the rows called ``name``, on the host and on the GPU."""
    usual = ["--device", "cuda", "--size", "64", "--batch", "4", "--seconds", "0.02", "--repeats", "1", "--workers", "2"]
    made = main([*usual, *flags])
    results.check(made)
    ours = [row for row in made["rows"] if row["name"] == name]
    assert all(row["host_ms"] > 0 for row in ours)
    assert any(row["gpu_ms"] > 0 for row in ours)


def rows_by_case(made):
    found = {}
    for row in made["rows"]:
        found.setdefault(row.get("case"), []).append(row["name"])
    return found
