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


def many_figures():
    """Two cases at two batch sizes; one row is measured at one size only, and one has no GPU time."""
    rows = [
        {
            "case": case,
            "name": name,
            "batch_size": size,
            "images_per_s": rate * size,
            "ratio": rate / 10.0,
            "gpu_ms": 10.0 / rate,
        }
        for case in ("crop", "blur")
        for name, rate in (("peer", 10.0), ("gpuaug", 70.0), ("compiled", 20.0))
        for size in (32, 64)
        if name != "compiled" or size == 32
    ]
    del rows[0]["gpu_ms"]
    settings = {"baseline": "peer", "columns": ["name", "images_per_s", "gpu_ms"]}
    return results.result("augment", rows=rows, settings=settings, device=torch.device("cpu"))


def test_cases_that_are_named_are_lines_with_a_column_for_each_row():
    result = many_figures()
    page = "<!-- table: augment by case rows: gpuaug; peer cases: blur; crop -->\n<!-- end -->\n"
    rewritten = tables.rewrite(page, {"augment": result})
    assert "| images/s, B=32 | gpuaug | peer |\n| --- | ---: | ---: |\n" in rewritten
    assert "| blur | 2,240 (7.00x) | 320 |\n| crop | 2,240 (7.00x) | 320 |\n" in rewritten
    assert tables.rewrite(rewritten, {"augment": result}) == rewritten
    alone = tables.rewrite("<!-- table: augment cases: blur -->\n<!-- end -->\n", {"augment": result})
    assert "| images/s, B=32 | blur |\n" in alone
    with pytest.raises(ValueError, match=r"A case must be one that 'augment' has here, got \['hue'\]\. Correct the page\."):
        tables.markdown(result, cases=["crop", "hue"])


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
