"""What the user says of the depth, and what a device without lanes makes of it."""

import pytest
import torch
from support.depth_tuning import ALL, MEASURING, Training, augment, auto, decided, measured

from gpuaug import ArgumentError, ArgumentTypeError, StreamedLoader
from gpuaug.loader.depth import AHEAD


@pytest.mark.parametrize("change", ["depth", "stages"])
def test_new_depth_or_stages_restart_tuning(cuda, change):
    training = measured(cuda, 8, 10)
    loader = training.loader
    assert decided(loader) == "'auto' (streamed: 10 ms a batch in line, 8 streamed)"
    if change == "depth":
        loader.depth = "auto"
    else:
        loader.stages = [augment(cuda)]
    assert (loader.depth, decided(loader)) == ("auto", MEASURING)
    again = Training(cuda, loader, 10, 8)
    again.epoch()
    assert decided(loader) == "'auto' (in line: 8 ms a batch in line, 10 streamed)"
    loader.depth = "auto"
    next(iter(loader))
    assert loader.stats().depth == AHEAD, "what was in line is streamed until it has been measured"


def test_depth_number_ends_tuning(cuda):
    loader = auto(cuda, 8)
    next(iter(loader))
    loader.depth = 3
    assert (loader.depth, decided(loader)) == (3, "3")
    loader.stages = [augment(cuda)]
    assert loader.depth == 3
    ready = [loader.stats().ready for _ in loader]
    assert ready == [3, 3, 3, 3, 3, 2, 1, 0]
    assert loader.stats().depth == 3


WAY_OUT = "Use 0 for the in-line reference, 2 to overlap, 'auto' to have the faster."


@pytest.mark.parametrize(
    ("given", "kind", "rule"),
    [
        ("Auto", ArgumentTypeError, "a whole number"),
        ("2", ArgumentTypeError, "a whole number"),
        (None, ArgumentTypeError, "a whole number"),
        (1.5, ArgumentTypeError, "a whole number"),
        (-1, ArgumentError, "0 or more"),
    ],
)
def test_invalid_depth_is_refused_and_changes_nothing(given, kind, rule):
    loader = StreamedLoader([torch.zeros(1)], device="cpu", depth="auto")
    list(loader)
    before = decided(loader)
    with pytest.raises(kind) as caught:
        loader.depth = given
    assert str(caught.value) == f"depth must be {rule}, got {given!r}. {WAY_OUT}"
    assert (loader.depth, decided(loader)) == ("auto", before)
    with pytest.raises(kind):
        StreamedLoader([], device="cpu", depth=given)


# A device without lanes


def test_depth_auto_on_cpu():
    loader = StreamedLoader(list(torch.arange(ALL + 10)), [lambda x: x + 1], device="cpu", depth="auto")
    assert decided(loader) == MEASURING
    for _ in range(2):
        assert [batch.item() for batch in loader] == list(range(1, ALL + 11))
    assert decided(loader) == "'auto' (a cpu runs everything in line)"
    assert loader._depth.now == AHEAD
    assert loader._depth.streamed_ms == []
