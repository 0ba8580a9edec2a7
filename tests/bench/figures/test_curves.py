"""Lines over the batch size."""

import pytest
from support.bench.sample_results import SIZES, sweep

from bench.figures import curves, plot


def test_many_batch_sizes_are_drawn_as_lines():
    figure = plot.draw(sweep())
    figure.draw_without_rendering()
    ratios, rates = figure.axes
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["ratio to serial", "images/s"]
    lines = [line for line in ratios.lines if len(line.get_xdata()) > 2]
    assert [list(line.get_xdata()) for line in lines] == [[8, 16, 32], [*SIZES], [*SIZES]], "the baseline is the line at 1"
    assert [set(line.get_ydata()) for line in lines] == [{0.4}, {1.1}, {3.0}]
    assert len(ratios.collections) == 3
    bands = [band.get_paths()[0].vertices[:, 1] for band in ratios.collections]
    assert [(band.min().round(3), band.max().round(3)) for band in bands] == [
        (round(rate / 1.1, 3), round(rate / 0.9, 3)) for rate in (0.4, 1.1, 3.0)
    ]
    assert ratios.get_xscale() == rates.get_xscale() == "log"
    by_name = dict(zip(["serial", "workers", "streamed", "streamed, fused"], rates.lines, strict=True))
    assert list(by_name["streamed"].get_ydata()) == [110.0] * 4
    assert len({line.get_marker() for line in rates.lines}) == len({line.get_color() for line in rates.lines}) == 4
    for name, line in by_name.items():
        red, green, blue = (int(line.get_color()[at : at + 2], 16) for at in (1, 3, 5))
        assert (green > red + 30) == name.startswith("streamed"), line.get_color()
        assert name.startswith("streamed") or max(red, green, blue) - min(red, green, blue) < 20


@pytest.mark.parametrize("spoil", ["three sizes", "cases", "two rows of a name"])
def test_other_results_stay_bars(spoil):
    result = sweep(sizes=SIZES[:3]) if spoil == "three sizes" else sweep()
    if spoil == "cases":
        for row in result["rows"]:
            row["case"] = "one"
    elif spoil == "two rows of a name":
        result["rows"].append(dict(result["rows"][0]))
    assert not curves.fits(result)
    assert curves.fits(sweep())
    assert len(plot.draw(result).axes) != 2
