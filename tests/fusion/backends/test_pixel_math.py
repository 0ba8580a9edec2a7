"""The order of a tile's pixels, which decides what the threads of a warp read together."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")

from gpuaug.fusion.backends.triton import backend, pixel_math

TILES = {(*tile, 128) for tile in (*backend.TILES.values(), backend.MEAN_TILE)} | {(1, backend.ANTIALIASED_TILE[1], 32)}
"""Height and width of each tile that is made at once, and the threads of its block."""


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("height", "width", "threads"), sorted(TILES))
def test_a_warp_lies_along_a_row_and_a_thread_has_both_pixels_of_a_pair(height, width, threads, paired, monkeypatch):
    monkeypatch.setattr(pixel_math, "tl", SimpleNamespace(arange=np.arange))
    x, y = pixel_math.tile_pixels.fn(100, 7, height, width, paired)
    assert {*zip(x.tolist(), y.tolist(), strict=True)} == {(100 + i, 7 + j) for i in range(width) for j in range(height)}
    by_warp_x, by_warp_y = x.reshape(-1, 32), y.reshape(-1, 32)
    # A pair's row is half as wide: that of a narrow tile is half a warp.
    row = min(32, width // (1 + paired))
    assert (np.diff(by_warp_x[:, :row]) == 1 + paired).all()
    assert (by_warp_y[:, :row] == by_warp_y[:, :1]).all()
    if paired:
        half = len(x) // 2
        assert half % threads == 0
        assert (x[half:] == x[:half] + 1).all()
        assert (y[half:] == y[:half]).all()
