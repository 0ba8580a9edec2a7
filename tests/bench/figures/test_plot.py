"""Pictures of results."""

from bench.figures import plot, sheets, show


def test_plot_draws_each_result(measured, tmp_path):
    paths = plot.main(["--results", str(measured), "--images", str(tmp_path / "images")])
    assert sorted(path.name for path in paths) == ["encoder_decoder.png", "lifetimes.png"]
    assert all(path.stat().st_size > 1000 for path in paths)


def test_sheets_and_pictures_are_drawn(tmp_path, photograph_cache):
    flags = ["--images", str(tmp_path), "--side", "24"]
    targets = [*sheets.main([*flags, "--only", "segmentation", "--device", "cpu"]), *show.main(flags)]
    assert len(targets) == 4
    assert all(path.stat().st_size > 1000 for path in targets)
