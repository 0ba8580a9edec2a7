"""Tables of the documentation, from results."""

from bench.figures import tables

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
