import sys

import pytest

from bench.suites.transport import bucket as suite

FLAGS = ["--device", "cpu", "--batch", "2", "--size", "16", "--workers", "1", "--seconds", "0.05", "--repeats", "1"]
BY_LITDATA = [suite.LITDATA, suite.OURS, suite.BYTES]


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore")
def test_loaders_of_a_bucket_are_measured(class_folder):
    pytest.importorskip("litdata")
    pytest.importorskip("s3fs")
    result = suite.main([*FLAGS, "--data", str(class_folder), "--store-processes", "2"])
    assert {row["name"] for row in result["rows"]} == {*BY_LITDATA, suite.STORE}


def test_without_litdata_its_rows_are_skipped_with_the_reason(class_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "litdata", None)
    result = suite.main([*FLAGS, "--data", str(class_folder)])
    assert [row["name"] for row in result["rows"]] == [suite.STORE]
    assert [row["name"] for row in result["settings"]["skipped"]] == BY_LITDATA
    assert all(row["reason"].startswith("not installed") for row in result["settings"]["skipped"])
