"""Tables of the documentation, from results."""

import torch

from bench.figures import tables
from bench.harness.result_rows import shown_rows
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


def test_tables_leave_text_alone_without_results(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(TEXT)
    assert tables.main([str(page), "--results", str(tmp_path / "none"), "--check"]) == 0


def test_a_case_of_one_row_is_left_out_beside_cases_of_several():
    rows = [{"case": case, "name": name, "images_per_s": rate} for case, name, rate in [
        ("load", "peer", 100.0), ("load", "gpuaug", 200.0), ("train", "peer", 7.0),
    ]]  # fmt: skip
    made = results.result("files", rows=rows, settings={}, device=torch.device("cpu"))
    assert "| images/s | load |" in tables.markdown(made)
    assert shown_rows(made) == rows[:2]
    assert "| peer | 7 |" in tables.markdown(made, "train")
    alone = made | {"rows": rows[2:]}
    assert "| images/s | train |" in tables.markdown(alone)
    assert shown_rows(alone) == rows[2:]
