"""Rows that are one call, and suites whose rates are of images."""

import json
from functools import partial

import pytest
import torch

from bench.figures import tables
from bench.harness import call_rows, flags, measurement, optional_rows
from bench.harness.result_check import check_result
from gpuaug.benchkit import windows
from gpuaug.benchkit.windows import Variant

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that only calls move."""

    class Clock:
        now = 0.0

        def call(self, seconds):
            self.now += seconds

    fake_clock = Clock()
    for module in (windows, call_rows):
        monkeypatch.setattr(module, "perf_counter", lambda: fake_clock.now)
    return fake_clock


@pytest.fixture
def measure(tmp_path):
    """A suite of one case of 8 images that counts images."""

    def measured(rows, baseline="whole"):
        arguments = ["--device", "cpu", "--seconds", "10", "--repeats", "2", "--json", str(tmp_path / "made.json")]
        options = flags.parse(flags.parser("made", "", batch="8"), arguments)
        figures = partial(call_rows.batch_figures, device=CPU)
        result = measurement.measure(
            "made", options, [({"batch_size": 8}, lambda stack: rows)], baseline=baseline, ours=("part",), figures=figures
        )
        check_result(json.loads((tmp_path / "made.json").read_text()))
        return {row["name"]: row for row in result["rows"]}

    return measured


def test_a_row_that_does_a_part_of_a_batch_is_compared_by_images(clock, measure):
    whole = call_rows.call_row("whole", partial(clock.call, 1.0), 8)
    part = call_rows.call_row("part", partial(clock.call, 0.25), 8, images=4)
    rows = measure([whole, part])
    assert (rows["whole"]["images_per_s"], rows["part"]["images_per_s"]) == (8.0, 16.0)
    assert (rows["part"]["ratio"], rows["part"]["rounds"]) == (2.0, [16.0, 16.0])
    # Of a whole batch, whatever a call does of it.
    assert (rows["whole"]["host_ms"], rows["part"]["host_ms"]) == (1000.0, 500.0)
    assert not any("steps_per_s" in row for row in rows.values())


def test_rows_where_others_take_part_have_no_time_of_the_host(clock, measure):
    def steps():
        while True:
            clock.call(0.5)
            yield 8

    rows = measure([call_rows.call_row("whole", partial(clock.call, 1.0), 8), Variant("workers", steps)])
    assert "host_ms" not in rows["workers"]
    assert rows["workers"]["ratio"] == 2.0


def test_without_the_baseline_there_are_no_ratios(clock, measure, tmp_path):
    rows = measure(
        [optional_rows.SkippedRow("DALI", "not installed"), call_rows.call_row("part", partial(clock.call, 1.0), 8)], "DALI"
    )
    assert rows["part"]["ratio"] is None
    page = tmp_path / "page.md"
    page.write_text("<!-- table: made -->\n<!-- end -->\n<!-- table: made.host_ms -->\n<!-- end -->\n")
    assert tables.main([str(page), "--results", str(tmp_path)]) == 0
    text = page.read_text()
    assert "| images/s | B=8 |" in text
    assert "| part | 8 |" in text
    assert "| host, ms | B=8 |" in text
    assert "| part | 1,000 |" in text
    assert "In brackets" not in text


def test_the_time_of_a_call_leaves_the_windows_out(clock):
    durations = iter([3.0, 1.0, 2.0, *[100.0] * 100])
    figures = call_rows.call_figures(lambda: clock.call(next(durations)), CPU, launches=None)
    assert figures == {"host_ms": 2000.0}
