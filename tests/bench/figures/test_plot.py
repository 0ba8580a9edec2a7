"""Pictures of results."""

from bench.figures import plot


def test_plot_draws_each_result(measured, tmp_path):
    drawn = plot.main(["--results", str(measured), "--images", str(tmp_path / "images")])
    assert sorted(path.name for path in drawn) == ["encoder_decoder.png", "lifetimes.png"]
    assert all(path.stat().st_size > 1000 for path in drawn)
