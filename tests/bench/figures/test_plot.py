"""Pictures of results."""

import torch
from support.bench.sample_results import sweep

from bench.figures import plot, sheets, show
from gpuaug.benchkit import results


def test_plot_draws_each_result(measured, tmp_path):
    paths = plot.main(["--results", str(measured), "--images", str(tmp_path / "images")])
    assert sorted(path.name for path in paths) == ["encoder_decoder.png", "lifetimes.png"]
    assert all(path.stat().st_size > 1000 for path in paths)


def test_plot_draws_what_a_process_held(tmp_path):
    rows = [
        {"name": "private memory", "growth_bytes": 0, "took_s": 1.0, "readings": [[100, 2_000_000], [200, 2_100_000]]},
        {"name": "threads", "growth": 0, "took_s": 1.0, "readings": [[100, 3], [200, 3]]},
    ]
    result = results.result("soak", rows=rows, settings={"batches_per_s": 100.0}, device=torch.device("cpu"))
    figure = plot.draw(result)
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["private memory, MB", "threads"]
    assert [list(axis.lines[0].get_ydata()) for axis in figure.axes] == [[2.0, 2.1], [3, 3]]


def test_many_batch_sizes_are_drawn_as_lines():
    ratios, _ = plot.draw(sweep()).axes
    lines = [set(line.get_ydata()) for line in ratios.lines if len(line.get_xdata()) > 2]
    assert lines == [{0.4}, {1.1}, {3.0}], "the baseline is the line at 1"


def test_sheets_and_pictures_are_drawn(tmp_path, photograph_cache):
    flags = ["--images", str(tmp_path), "--side", "24"]
    targets = [*sheets.main([*flags, "--only", "segmentation", "--device", "cpu"]), *show.main(flags)]
    assert len(targets) == 4
    assert all(path.stat().st_size > 1000 for path in targets)
