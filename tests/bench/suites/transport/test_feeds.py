import json
import multiprocessing
import sys

import pytest

from bench.harness.result_check import check_result
from bench.suites.transport import feeds as suite

linux = pytest.mark.skipif(sys.platform != "linux", reason="the ring needs Linux")
TINY = ["--device", "cpu", "--size", "32", "--batch", "2", "--workers", "1", "--seconds", "0.02", "--repeats", "2"]
OURS = ["StreamedLoader, plain", "StreamedLoader", "StreamedLoader, fused"]
ON_CPU = ["DataLoader, unpinned", *OURS, "stacking alone"]


@pytest.fixture
def feeds(monkeypatch):
    """The suite, where neither peer is installed and pauses are few."""
    for name in ("spdl", "spdl.io", "spdl.pipeline", "ffcv", "ffcv.fields"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(suite, "_NEXT_CALLS", 2)
    return suite


@pytest.fixture
def no_pause(monkeypatch):
    """Measure without a pause, in which slots would be page-locked. Queued batches are discarded, however long that takes."""
    discard = suite._discard
    monkeypatch.setattr(suite, "_discard", lambda batches, count, _: discard(batches, count, 60.0))
    monkeypatch.setattr(suite, "_FILL_SECONDS", 0.0)


@linux
@pytest.mark.usefixtures("no_pause")
def test_measures_every_row_there_is_on_a_cpu_and_leaves_no_worker(feeds, tmp_path):
    path = tmp_path / "feeds.json"
    result = feeds.main([*TINY, "--json", str(path)])
    check_result(json.loads(path.read_text()))
    assert [row["name"] for row in result["rows"]] == ON_CPU
    slots = {row["name"]: row["slot_share"] for row in result["rows"] if "slot_share" in row}
    assert slots["StreamedLoader"] > 0 == slots["StreamedLoader, plain"]
    assert not multiprocessing.active_children()


@pytest.mark.gpu
def test_measures_the_gpu(feeds, tmp_path):
    flags = ["--size", "64", "--batch", "8", "--workers", "2", "--seconds", "0.1", "--repeats", "1"]
    result = feeds.main(["--device", "cuda", *flags, "--json", str(tmp_path / "feeds.json")])
    check_result(result)
    assert {*ON_CPU, "DataLoader, pinned", "pinned, copy stream"} <= {row["name"] for row in result["rows"]}
    assert result["settings"]["link_gb_per_s"] > 0
    assert next(row for row in result["rows"] if row["name"] == "StreamedLoader")["slot_share"] > 0
    assert not multiprocessing.active_children()
