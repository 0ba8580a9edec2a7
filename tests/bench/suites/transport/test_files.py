import json
import multiprocessing
import sys

import pytest
from support.bench.commands import rows_by_case
from support.bench.file_corpora import file_corpora

from bench import __main__
from bench.harness.result_check import check_result
from bench.suites.transport import files as suite
from gpuaug.benchkit.environment import allowed_cores

__all__ = ["file_corpora"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

TINY = ["--device", "cpu", "--size", "32", "--batch", "2", "--workers", "0", "--seconds", "0.02", "--search", "0.01"]
ONCE = [*TINY, "--repeats", "1"]
ON_CPU = ["torchvision, workers", "workers decode, fuse", "gpuaug", "gpuaug, CPU"]
CORES = f"{allowed_cores()} core{'s' * (allowed_cores() > 1)}"


@pytest.fixture
def files(monkeypatch, file_corpora):
    """The suite, where no peer is installed."""
    for name in ("nvidia", "nvidia.dali", "spdl", "spdl.io", "torchcodec", "torchcodec.decoders"):
        monkeypatch.setitem(sys.modules, name, None)
    return suite


@pytest.mark.parametrize("cases", ["small,raw", pytest.param("camera,mix,decode,squeezenet1_1", marks=pytest.mark.slow)])
def test_measures_the_rows_that_there_are_on_a_cpu_and_leaves_no_worker(files, tmp_path, cases):
    assert __main__.main(["run", "files", *ONCE, "--cases", cases, "--results", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "files.json").read_text())
    check_result(result)
    expected = {
        f"small, {CORES}": ON_CPU,
        f"camera, {CORES}": [*ON_CPU, "gpuaug, min_side"],
        f"mix, {CORES}": ON_CPU,
        f"decode, {CORES}": ["gpuaug alone", "gpuaug, CPU alone", "torchvision alone"],
        f"squeezenet1_1, {CORES}": ["workers decode, fuse", "gpuaug", "step alone"],
        f"raw, {CORES}": ["memory-mapped"],
    }
    assert rows_by_case(result) == {case: rows for case, rows in expected.items() if case.split(",")[0] in cases.split(",")}
    reasons = {row["name"]: row["reason"] for row in result["settings"]["skipped"]}
    assert reasons["DALI"] == "needs a GPU"
    assert not multiprocessing.active_children()


@pytest.mark.gpu
@pytest.mark.usefixtures("file_corpora")
def test_measures_the_gpu(tmp_path):
    # Peers and the engines alone do not wait between calls of nvJPEG's, and may wait for ever beside other tests that decode.
    rows = {*ON_CPU, "gpuaug alone", "gpuaug, CPU alone", "step alone"}
    flags = ["--device", "cuda", "--size", "32", "--batch", "8", "--workers", "2", "--seconds", "0.05", "--repeats", "1"]
    cases = ["--cores", str(allowed_cores()), "--cases", "small,decode,resnet18", "--rows", ";".join(rows)]
    result = suite.main([*flags, *cases, "--json", str(tmp_path / "files.json")])
    check_result(result)
    assert not multiprocessing.active_children()
    assert {row["name"] for row in result["rows"]} == rows
