"""The checker on traces written by hand: for each rule, the smallest that is ordered and the smallest that is not."""

import pytest
from support.gpu.stream_history import CHANGED, FREED, OVERWAITED, OVERWRITTEN, REUSED, UNREADY, History


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


# A read comes after the write.


def test_read_on_writing_stream_is_ordered(written):
    written.read("lane", "x")
    assert not written.rules()


def test_read_behind_wait_is_ordered(written):
    order(written, "lane", "consumer")
    written.read("consumer", "x")
    assert not written.rules()


def test_read_without_wait_is_unready(written):
    written.read("consumer", "x")
    assert written.rules() == [UNREADY]
    assert written.violations[0].text == "consumer reads x, and nothing orders it after: lane writes x"


def test_read_of_unwritten_buffer_is_unready(history):
    history.alloc("x", block=1)
    history.read("lane", "x")
    assert history.rules() == [UNREADY]
    assert history.violations[0].text == "lane reads x, which nothing has written"


def wait_then_write(history):
    history.record("early", "lane")
    history.write("lane", "x")
    history.wait("consumer", "early")


def wait_then_record_again(history):
    history.record("event", "idle")
    history.wait("consumer", "event")
    history.record("event", "lane")


def record_on_another_stream(history):
    history.record("event", "lane")
    history.record("event", "idle")
    history.wait("consumer", "event")


NO_ORDER = {
    "an event before the last write": wait_then_write,
    "a wait of another stream": lambda history: order(history, "lane", "other"),
    "an event that is not recorded": lambda history: history.wait("consumer", "never"),
    "an event that is recorded again after the wait": wait_then_record_again,
    "an event that another stream has recorded again": record_on_another_stream,
    "an event for which nobody waits": lambda history: history.record("event", "lane"),
}


@pytest.mark.parametrize("steps", NO_ORDER.values(), ids=NO_ORDER)
def test_read_that_nothing_orders_is_unready(written, steps):
    steps(written)
    written.read("consumer", "x")
    order(written, "lane", "consumer", "too late")
    assert written.rules() == [UNREADY]


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


def test_order_is_transitive_over_streams_and_events(written):
    order(written, "lane", "middle", "first")
    order(written, "middle", "consumer", "second")
    written.read("consumer", "x")
    assert not written.rules()


def test_each_buffer_of_a_batch_needs_its_own_order(written):
    written.alloc("labels", block=2)
    written.write("other lane", "labels")
    order(written, "lane", "consumer")
    written.read("consumer", "x")
    written.read("consumer", "labels")
    assert written.rules() == [UNREADY]
    assert "labels" in written.violations[0].text


# An event that is recorded again means the newer place, for waits from then on.


def test_wait_uses_last_recording_of_event(written):
    written.record("event", "idle")
    written.record("event", "lane")
    written.wait("consumer", "event")
    written.read("consumer", "x")
    assert not written.rules()


# The host orders what it launches after it has waited.


def test_launch_after_host_synchronize_is_ordered(written):
    written.record("event", "lane")
    assert not written.passed("event")
    written.synchronize("event")
    assert written.passed("event")
    written.read("consumer", "x")
    assert not written.rules()
    assert written.syncs == 1


# A write comes after every reader and writer before it.


def test_write_behind_reader_is_ordered(written):
    order(written, "lane", "consumer")
    written.read("consumer", "x")
    order(written, "consumer", "lane")
    written.write("lane", "x")
    assert not written.rules()


def test_write_under_reader_is_overwritten(written):
    order(written, "lane", "consumer")
    written.read("consumer", "x")
    written.write("lane", "x")
    assert written.rules() == [OVERWRITTEN]
    assert written.violations[0].text == "lane writes x, and nothing orders it after: consumer reads x"


def test_write_waits_for_each_reader(written):
    for reader in ("one", "two"):
        order(written, "lane", reader)
        written.read(reader, "x")
    order(written, "one", "lane")
    written.write("lane", "x")
    assert [violation.text.endswith("two reads x") for violation in written.violations] == [True]


def test_two_writers_need_order(written):
    written.write("other", "x")
    assert written.rules() == [OVERWRITTEN]


# Memory that is used again.


def reuse(history):
    """``x`` is read by the consumer and given back, and ``y`` takes its block."""
    order(history, "lane", "consumer", "ready")
    history.read("consumer", "x")
    history.free("x")
    history.alloc("y", block=1)


def test_reuse_behind_reader_is_ordered(written):
    reuse(written)
    order(written, "consumer", "lane")
    written.write("lane", "y")
    assert not written.rules()


def test_reuse_without_reverse_wait_is_reused(written):
    reuse(written)
    written.write("lane", "y")
    assert written.rules() == [REUSED]
    assert written.violations[0].text == (
        "lane writes y in block 1, and nothing orders it after the memory's last use: consumer reads x"
    )


@pytest.mark.parametrize(("earlier", "later"), [("consumer", "other lane"), ("other consumer", "lane")])
def test_reverse_wait_of_another_stream_is_reused(written, earlier, later):
    reuse(written)
    order(written, earlier, later)
    written.write("lane", "y")
    assert written.rules() == [REUSED]


def test_reverse_wait_for_some_reads_is_reused(written):
    order(written, "lane", "consumer", "ready")
    written.read("consumer", "x")
    written.record("after the first read", "consumer")
    reuse(written)
    written.wait("lane", "after the first read")
    written.write("lane", "y")
    assert written.rules() == [REUSED]


def test_reuse_is_ordered_after_unread_occupants(written):
    written.free("x")
    written.alloc("y", block=1)
    written.write("other lane", "y")
    assert written.rules() == [REUSED]


def test_alloc_alone_is_no_access(written):
    reuse(written)
    assert not written.rules()


def test_access_after_free_is_freed(written):
    written.free("x")
    written.read("lane", "x")
    assert written.rules() == [FREED]


# A batch is handed over behind its own work, not behind that of later ones.


@pytest.fixture
def two_batches(history):
    """Batches 0 and 1, written in turn on ``lane``, which the event of each number marks."""
    for batch in (0, 1):
        history.alloc(f"batch {batch}", block=batch, batch=batch)
        history.write("lane", f"batch {batch}")
        history.record(batch, "lane")
    return history


def test_receive_behind_own_batch_is_ordered(two_batches):
    for batch in (0, 1):
        two_batches.wait("consumer", batch)
        two_batches.receive("consumer", batch)
        two_batches.read("consumer", f"batch {batch}")
    assert not two_batches.rules()


def test_receive_behind_later_batch_is_overwaited(two_batches):
    order(two_batches, "lane", "consumer")
    two_batches.receive("consumer", 0)
    assert two_batches.rules() == [OVERWAITED]
    assert two_batches.violations[0].text == "consumer receives batch 0 behind the work of lane on batch 1"


def test_earlier_batch_after_received_later_one_is_no_overwait(two_batches):
    two_batches.wait("consumer", 1)
    two_batches.receive("consumer", 1)
    two_batches.receive("consumer", 0)  # of another iterator
    assert not two_batches.rules()


def test_host_synchronize_with_later_batch_is_overwaited(two_batches):
    two_batches.synchronize(1)
    two_batches.receive("consumer", 0)
    assert two_batches.rules() == [OVERWAITED]


def test_what_the_host_waited_for_with_the_device_is_no_overwait(two_batches):
    two_batches.synchronize_device()
    two_batches.receive("consumer", 0)
    two_batches.read("consumer", "batch 0")
    assert not two_batches.rules()
    two_batches.write("lane", "batch 1")
    order(two_batches, "lane", "consumer")
    two_batches.receive("consumer", 0)
    assert two_batches.rules() == [OVERWAITED]


def test_write_to_what_was_handed_over_is_a_change(two_batches):
    two_batches.wait("consumer", 0)
    two_batches.receive("consumer", 0, ["batch 0"])
    two_batches.write("consumer", "batch 1")  # which is unordered, and not handed over
    assert two_batches.rules() == [OVERWRITTEN]
    two_batches.write("lane", "batch 0")
    assert two_batches.rules() == [OVERWRITTEN, CHANGED]
    assert two_batches.violations[1].text == "lane writes batch 0, which had been handed over"


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
