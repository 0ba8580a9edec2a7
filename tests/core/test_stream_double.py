"""The checker on traces written by hand, where protocols, whole and broken, do not show what it finds: parts, its report."""

import pytest
from support.gpu.stream_history import OVERWRITTEN, REUSED, UNREADY, History


@pytest.fixture
def history():
    return History()


def order(history, earlier, later, event="event"):
    """Let ``later`` wait for all that ``earlier`` has launched."""
    history.record(event, earlier)
    history.wait(later, event)


@pytest.fixture
def written(history):
    """A history in which the stream ``lane`` has written the buffer ``x``."""
    history.alloc("x", block=1)
    history.write("lane", "x")
    return history


@pytest.mark.parametrize("awaited", [{"first"}, {"second"}, {"first", "second"}])
def test_read_waits_for_writes_to_every_part(history, awaited):
    history.alloc("x", block=1)
    for lane in ("first", "second"):
        history.write(lane, "x", part=lane)
    for lane in awaited:
        order(history, lane, "consumer", event=lane)
    history.read("consumer", "x")
    assert history.rules() == [UNREADY] * (2 - len(awaited))


@pytest.mark.parametrize("parts", [("a", "a"), ("a", None), (None, "a")])
def test_unordered_writes_to_one_part_are_overwritten(history, parts):
    history.alloc("x", block=1)
    for lane, part in zip(("first", "second"), parts, strict=True):
        history.write(lane, "x", part)
    assert history.rules() == [OVERWRITTEN]


def test_write_to_part_waits_for_readers(written):
    order(written, "lane", "other")
    written.read("lane", "x")
    written.write("other", "x", part="a")
    assert written.rules() == [OVERWRITTEN]


def test_write_to_part_waits_for_last_use_of_memory(written):
    written.free("x")
    written.alloc("y", block=1)
    written.write("other", "y", part="a")
    assert written.rules() == [REUSED]


def test_report_shows_violations_and_trace(written):
    written.read("consumer", "x")
    written.free("x")
    assert written.report().splitlines() == [
        "unready: consumer reads x, and nothing orders it after: lane writes x",
        "",
        "alloc x in block 1",
        "lane writes x",
        "consumer reads x",
        "    ^ unready",
        "free x",
    ]
