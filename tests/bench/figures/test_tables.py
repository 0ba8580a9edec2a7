"""Tables of the documentation, from results."""

import pytest
import torch

from bench.figures import plot, sheets, show, tables
from gpuaug.benchkit import results

TEXT = """Before.
<!-- table: encoder_decoder -->
stale
<!-- end -->
Between.
<!-- table: lifetimes -->
<!-- end -->
<!-- table: unmeasured -->
kept
<!-- end -->
After.
"""


def test_tables_are_rewritten_from_the_results(measured, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(TEXT)
    flags = [str(page), "--results", str(measured)]
    assert tables.main([*flags, "--check"]) == 1
    assert page.read_text() == TEXT
    assert "out of date" in capsys.readouterr().out
    assert tables.main(flags) == 0
    text = page.read_text()
    assert "| streamed | 131 (1.31x) | 131 (1.31x) |" in text
    assert "| *resident* (ceiling) | 150 (1.50x) |" in text
    assert "| serial | 100 | 100 |" in text
    assert "| short | record_stream | 1.25 | 512 | 0 |" in text
    assert "stale" not in text
    assert "kept" in text
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")
    assert tables.main([*flags, "--check"]) == 0


# Pictures


def test_plot_draws_each_result(measured, tmp_path):
    paths = plot.main(["--results", str(measured), "--images", str(tmp_path / "images")])
    assert sorted(path.name for path in paths) == ["encoder_decoder.png", "lifetimes.png"]
    assert all(path.stat().st_size > 1000 for path in paths)


def test_sheets_and_pictures_are_drawn(tmp_path, photograph_cache):
    flags = ["--images", str(tmp_path), "--side", "24"]
    targets = [*sheets.main([*flags, "--only", "segmentation", "--device", "cpu"]), *show.main(flags)]
    assert len(targets) == 4
    assert all(path.stat().st_size > 1000 for path in targets)


def test_a_case_that_no_row_has_is_refused():
    result = results.result(
        "augment", rows=[{"case": "crop", "name": "ours", "images_per_s": 1.0}], settings={}, device=torch.device("cpu")
    )
    with pytest.raises(ValueError, match=r"A case must be one that 'augment' has here, got \['hue'\]\. Correct the page\."):
        tables.markdown(result, cases=["crop", "hue"])
