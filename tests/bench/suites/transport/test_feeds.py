import json
import multiprocessing
import sys
from types import SimpleNamespace

import pytest

from bench.figures import plot, tables
from bench.suites.transport import feeds as suite
from gpuaug.benchkit import results

linux = pytest.mark.skipif(sys.platform != "linux", reason="the ring is for Linux")
TINY = ["--device", "cpu", "--size", "32", "--batch", "2", "--workers", "1", "--seconds", "0.05", "--repeats", "2"]
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
def measured(feeds, tmp_path):
    def of(name, case, options, *, host):
        rate = {"DataLoader, unpinned": 10.0, "StreamedLoader": 40.0}.get(name, 5.0) * case.workers
        found = {"batches_per_s": rate, "next_ms": 1.0, "cpu_ms": 0.25}
        return found | ({"slot_share": 0.75} if name in OURS else {}) | ({"host_ms": 0.125} if host else {})

    def run(*flags):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(feeds, "measure", of)
            return feeds.main([*TINY, "--rows", ";".join(ON_CPU), "--json", str(tmp_path / "feeds.json"), *flags])

    return run


@linux
def test_measures_every_row_there_is_on_a_cpu_and_leaves_no_worker(feeds, tmp_path, capsys):
    path = tmp_path / "feeds.json"
    made = feeds.main([*TINY, "--json", str(path)])
    results.check(json.loads(path.read_text()))
    assert [row["name"] for row in made["rows"]] == ON_CPU
    by_name = {row["name"]: row for row in made["rows"]}
    for row in made["rows"]:
        assert min(row["gb_per_s"], row["batches_per_s"], row["next_ms"], row["cpu_ms"], row["host_ms"], row["ratio"]) > 0
        assert (row["case"], row["batch_size"], len(row["rounds"])) == ("1 workers", 2, 2)
        assert row["gb_per_s"] == pytest.approx(row["batches_per_s"] * 2 * (3 * 32 * 32 + 8) / 1e9)
    assert by_name["DataLoader, unpinned"]["ratio"] == 1
    assert "slot_share" not in by_name["DataLoader, unpinned"]
    assert by_name["StreamedLoader, plain"]["slot_share"] == 0
    assert by_name["StreamedLoader"]["slot_share"] > 0
    assert {row["name"] for row in made["settings"]["skipped"]} == {"SPDL", "FFCV"}
    assert "SPDL skipped: not installed" in capsys.readouterr().out
    assert not multiprocessing.active_children()


@linux
def test_a_row_that_fails_leaves_the_others_and_no_worker(feeds, monkeypatch):
    def broken(case, device, stack):
        batches = rows["StreamedLoader"](case, device, stack).batches

        def some():
            for _ in range(3):
                yield next(batches)
            raise ZeroDivisionError("broken on purpose\nand explained at length")

        return feeds.OpenFeeder(some())

    rows = feeds.FEEDERS
    monkeypatch.setattr(feeds, "FEEDERS", rows | {"SPDL": broken})
    made = feeds.main([*TINY, "--rows", "SPDL"])
    assert [row["name"] for row in made["rows"]] == ["DataLoader, unpinned"]
    reason = "ZeroDivisionError: broken on purpose"
    labels = {"case": "1 workers", "batch_size": 2, "size": 32}
    assert made["settings"]["skipped"] == [labels | {"name": "SPDL", "reason": reason}]
    assert not multiprocessing.active_children()


def test_ratios_are_taken_within_a_repeat(feeds):
    case = SimpleNamespace(batch_size=10, sample_bytes=1_000_000)
    found = {
        "base": [{"batches_per_s": rate, "next_ms": 1.0} for rate in (1.0, 2.0, 4.0)],
        "ours": [{"batches_per_s": rate, "next_ms": 1.0, "slot_share": 1.0} for rate in (3.0, 10.0, 16.0)],
    }
    row = feeds.figures(case, "ours", found, "base")
    assert (row["ratio"], row["ratio_low"], row["ratio_high"]) == (4, 3, 5)
    assert row["gb_per_s"] == pytest.approx(0.1)
    assert row["rounds"] == pytest.approx([0.03, 0.1, 0.16])
    assert "ratio" not in feeds.figures(case, "ours", {"ours": found["ours"]}, "base")


def test_every_size_has_every_number_of_workers(measured):
    made = measured("--sizes", "16,32", "--workers", "1,3", "--batch", "2,4")
    cases = [(row["case"], row["batch_size"]) for row in made["rows"] if row["name"] == "StreamedLoader"]
    counts = [f"{workers} workers, {size} px" for size in (16, 32) for workers in (1, 3)]
    assert cases == [(case, batch_size) for case in counts for batch_size in (2, 4)]
    assert made["settings"]["workers"] == (1, 3)
    fused = [row["batch_size"] for row in made["rows"] if row["name"] == "StreamedLoader, fused"]
    assert fused == [4] * 4, "with the largest batches only"


def test_stops_before_a_repeat_that_would_take_too_long(measured, capsys):
    made = measured("--repeats", "9", "--limit", "0")
    assert all(len(row["rounds"]) == 1 for row in made["rows"])
    assert made["settings"]["repeats"] == 1
    assert "stopped after 1 of 9 repeats" in capsys.readouterr().out


def test_wrong_rows_are_named_before_anything_is_measured(feeds):
    with pytest.raises(SystemExit, match=r"--rows must be among DataLoader, unpinned; .*, got DataLoader, pinned"):
        feeds.main([*TINY, "--rows", "DataLoader, pinned"])


@linux
def test_no_row_that_can_be_measured_ends_it(feeds, monkeypatch):
    def broken(name, case, options, *, host):
        raise ZeroDivisionError("broken on purpose")

    monkeypatch.setattr(feeds, "measure", broken)
    with pytest.raises(SystemExit, match=r"--rows must name a way that can be measured here, got none\. See above why each"):
        feeds.main(TINY)


TEXT = """<!-- table: feeds -->
<!-- end -->
<!-- table: feeds.cpu_ms -->
<!-- end -->
<!-- table: feeds.host_ms -->
<!-- end -->
<!-- table: feeds.slot_share -->
<!-- end -->
<!-- table: feeds.unknown -->
kept
<!-- end -->
"""


def test_tables_and_plot_show_it(measured, tmp_path):
    measured("--workers", "1,2", "--size", "256", "--batch", "64,256")
    page = tmp_path / "page.md"
    page.write_text(TEXT)
    tables.main([str(page), "--results", str(tmp_path)])
    text = page.read_text()
    heading = "1 workers, B=64 | 1 workers, B=256 | 2 workers, B=64 | 2 workers, B=256 |"
    assert f"| GB/s | {heading}" in text
    assert "| DataLoader, unpinned | 0.126 | 0.503 | 0.252 | 1.01 |" in text
    assert "| StreamedLoader | 0.503 (4.00x) | 2.01 (4.00x) | 1.01 (4.00x) | 4.03 (4.00x) |" in text
    assert f"| cpu, ms | {heading}" in text
    assert "| StreamedLoader | 0.25 | 0.25 | 0.25 | 0.25 |" in text
    assert f"| host, ms | {heading}" in text
    assert "| StreamedLoader | 0.125 | 0.125 | 0.125 | 0.125 |" in text
    assert f"| slot share | {heading}" in text
    assert "kept" in text
    assert text.count("paired within rounds") == 1
    (drawn,) = plot.main(["--results", str(tmp_path), "--images", str(tmp_path / "images")])
    assert drawn.name == "feeds.png"
    assert drawn.stat().st_size > 1000


@pytest.mark.gpu
def test_measures_the_gpu(feeds, tmp_path):
    flags = ["--size", "64", "--batch", "8", "--workers", "2", "--seconds", "0.1", "--repeats", "1"]
    made = feeds.main(["--device", "cuda", *flags, "--json", str(tmp_path / "feeds.json")])
    results.check(made)
    assert {*ON_CPU, "DataLoader, pinned", "pinned, copy stream"} <= {row["name"] for row in made["rows"]}
    assert made["settings"]["link_gb_per_s"] > 0
    assert next(row for row in made["rows"] if row["name"] == "StreamedLoader")["slot_share"] > 0
    assert not multiprocessing.active_children()
