"""The checker on traces written by hand: for each rule, the smallest that is ordered and the smallest that is not."""

import pytest
from support.stream_double import FREED, OVERWAITED, OVERWRITTEN, REUSED, UNREADY, FakeCuda, History


@pytest.fixture
def history():
    return History()


@pytest.fixture
def cuda():
    return FakeCuda()


def rules(history):
    return [violation.rule for violation in history.violations]


def block_of(buffer):
    return buffer._block


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


def test_a_read_on_the_writing_stream_is_ready(written):
    written.read("lane", "x")
    assert not rules(written)


def test_a_read_behind_a_wait_is_ready(written):
    order(written, "lane", "consumer")
    written.read("consumer", "x")
    assert not rules(written)


def test_a_read_without_a_wait_is_not_ready(written):
    written.read("consumer", "x")
    assert rules(written) == [UNREADY]
    assert written.violations[0].text == "consumer reads x, and nothing orders it after: lane writes x"


def test_a_read_of_what_was_never_written_is_not_ready(history):
    history.alloc("x", block=1)
    history.read("lane", "x")
    assert rules(history) == [UNREADY]
    assert history.violations[0].text == "lane reads x, which nothing has written"


def test_a_wait_for_an_event_recorded_before_the_last_write_is_not_enough(written):
    written.record("early", "lane")
    written.write("lane", "x")
    written.wait("consumer", "early")
    written.read("consumer", "x")
    assert rules(written) == [UNREADY]


def test_a_wait_on_another_stream_than_the_reading_one_is_not_enough(written):
    order(written, "lane", "other")
    written.read("consumer", "x")
    assert rules(written) == [UNREADY]


def test_a_wait_behind_the_read_is_too_late(written):
    written.read("consumer", "x")
    order(written, "lane", "consumer")
    assert rules(written) == [UNREADY]


def test_order_passes_through_streams_and_events(written):
    order(written, "lane", "middle", "first")
    order(written, "middle", "consumer", "second")
    written.read("consumer", "x")
    assert not rules(written)


def test_an_event_that_was_never_recorded_holds_nothing_up(written):
    written.wait("consumer", "never")
    written.read("consumer", "x")
    assert rules(written) == [UNREADY]


def test_labels_without_an_order_of_their_own_are_not_ready(written):
    written.alloc("labels", block=2)
    written.write("other lane", "labels")
    order(written, "lane", "consumer")
    written.read("consumer", "x")
    written.read("consumer", "labels")
    assert rules(written) == [UNREADY]
    assert "labels" in written.violations[0].text


# An event that is recorded again means the newer place, for waits from then on.


def test_a_wait_sees_the_event_as_it_was_recorded_last(written):
    written.record("event", "idle")
    written.record("event", "lane")
    written.wait("consumer", "event")
    written.read("consumer", "x")
    assert not rules(written)


def test_recording_again_does_not_move_waits_that_were_queued_before(written):
    written.record("event", "idle")
    written.wait("consumer", "event")
    written.record("event", "lane")
    written.read("consumer", "x")
    assert rules(written) == [UNREADY]


def test_recording_again_on_another_stream_loses_the_first(written):
    written.record("event", "lane")
    written.record("event", "idle")
    written.wait("consumer", "event")
    written.read("consumer", "x")
    assert rules(written) == [UNREADY]


# The host orders what it launches after it has waited.


def test_what_the_host_launches_after_waiting_is_ordered(written):
    written.record("event", "lane")
    assert not written.passed("event")
    written.synchronize("event")
    assert written.passed("event")
    written.read("consumer", "x")
    assert not rules(written)
    assert written.syncs == 1


def test_launching_later_is_no_order(written):
    written.record("event", "lane")
    written.read("consumer", "x")
    written.synchronize("event")
    assert rules(written) == [UNREADY]


# A write comes after every reader and writer before it.


def test_a_write_behind_the_reader_is_ordered(written):
    order(written, "lane", "consumer")
    written.read("consumer", "x")
    order(written, "consumer", "lane")
    written.write("lane", "x")
    assert not rules(written)


def test_a_write_under_a_reader_is_not(written):
    order(written, "lane", "consumer")
    written.read("consumer", "x")
    written.write("lane", "x")
    assert rules(written) == [OVERWRITTEN]
    assert written.violations[0].text == "lane writes x, and nothing orders it after: consumer reads x"


def test_a_write_must_wait_for_each_reader(written):
    for reader in ("one", "two"):
        order(written, "lane", reader)
        written.read(reader, "x")
    order(written, "one", "lane")
    written.write("lane", "x")
    assert [violation.text.endswith("two reads x") for violation in written.violations] == [True]


def test_two_writers_must_be_ordered(written):
    written.write("other", "x")
    assert rules(written) == [OVERWRITTEN]


# Memory that is used again.


def reuse(history):
    """``x`` is read by the consumer and given back, and ``y`` takes its block."""
    order(history, "lane", "consumer", "ready")
    history.read("consumer", "x")
    history.free("x")
    history.alloc("y", block=1)


def test_reuse_behind_the_reader_is_ordered(written):
    reuse(written)
    order(written, "consumer", "lane")
    written.write("lane", "y")
    assert not rules(written)


def test_reuse_without_a_reverse_wait_is_not(written):
    reuse(written)
    written.write("lane", "y")
    assert rules(written) == [REUSED]
    assert written.violations[0].text == (
        "lane writes y in block 1, and nothing orders it after the memory's last use: consumer reads x"
    )


def test_a_reverse_wait_on_the_wrong_stream_is_not_enough(written):
    reuse(written)
    order(written, "consumer", "other lane")
    written.write("lane", "y")
    assert rules(written) == [REUSED]


def test_a_reverse_wait_for_the_wrong_stream_is_not_enough(written):
    reuse(written)
    order(written, "other consumer", "lane")
    written.write("lane", "y")
    assert rules(written) == [REUSED]


def test_a_reverse_wait_for_less_than_all_reads_is_not_enough(written):
    order(written, "lane", "consumer", "ready")
    written.read("consumer", "x")
    written.record("after the first read", "consumer")
    reuse(written)
    written.wait("lane", "after the first read")
    written.write("lane", "y")
    assert rules(written) == [REUSED]


def test_reuse_is_ordered_after_occupants_that_were_never_read(written):
    written.free("x")
    written.alloc("y", block=1)
    written.write("other lane", "y")
    assert rules(written) == [REUSED]


def test_allocating_alone_touches_nothing(written):
    reuse(written)
    assert not rules(written)


def test_a_buffer_that_was_given_back_must_not_be_used(written):
    written.free("x")
    written.read("lane", "x")
    assert rules(written) == [FREED]


# A batch is handed over behind its own work, not behind that of later ones.


@pytest.fixture
def two_batches(history):
    """Batches 0 and 1, written in turn on ``lane``, which the event of each number marks."""
    for batch in (0, 1):
        history.alloc(f"batch {batch}", block=batch, batch=batch)
        history.write("lane", f"batch {batch}")
        history.record(batch, "lane")
    return history


def test_waiting_for_the_own_batch_is_right(two_batches):
    for batch in (0, 1):
        two_batches.wait("consumer", batch)
        two_batches.receive("consumer", batch)
        two_batches.read("consumer", f"batch {batch}")
    assert not rules(two_batches)


def test_waiting_for_the_tail_is_too_much(two_batches):
    order(two_batches, "lane", "consumer")
    two_batches.receive("consumer", 0)
    assert rules(two_batches) == [OVERWAITED]
    assert two_batches.violations[0].text == "consumer receives batch 0 behind the work of lane on batch 1"


def test_an_earlier_batch_may_follow_a_later_one_that_was_received(two_batches):
    two_batches.wait("consumer", 1)
    two_batches.receive("consumer", 1)
    two_batches.receive("consumer", 0)  # of another iterator
    assert not rules(two_batches)


def test_waiting_on_the_host_for_the_tail_is_too_much(two_batches):
    two_batches.synchronize(1)
    two_batches.receive("consumer", 0)
    assert rules(two_batches) == [OVERWAITED]


def test_a_report_shows_the_violations_and_the_trace(written):
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


# The double's allocator, streams and events.


def test_memory_goes_back_to_its_stream_as_soon_as_it_is_dropped(cuda):
    first = cuda.new("first", batch=0)
    block = block_of(first)
    del first
    assert block_of(cuda.new("second", batch=1)) == block


def test_memory_that_came_back_last_is_handed_out_first(cuda):
    buffers = [cuda.new("x", batch=0) for _ in range(3)]
    blocks = [block_of(buffer) for buffer in buffers]
    while buffers:
        buffers.pop(0)
    again = [cuda.new("y", batch=1) for _ in range(3)]
    assert [block_of(buffer) for buffer in again] == blocks[::-1]


def test_memory_never_changes_stream(cuda):
    first = cuda.new("first", batch=0)
    block = block_of(first)
    del first
    with cuda.stream(cuda.Stream()):
        assert block_of(cuda.new("second", batch=1)) != block


def test_memory_dropped_under_another_stream_goes_back_to_its_own(cuda):
    lane = cuda.Stream()
    with cuda.stream(lane):
        first = cuda.new("first", batch=0)
    block = block_of(first)
    del first
    with cuda.stream(lane):
        assert block_of(cuda.new("second", batch=1)) == block


def read_elsewhere(cuda, record_on=None):
    """The block of a buffer that another stream has read, and that stream. ``record_on`` is given to ``record_stream``."""
    consumer = cuda.Stream()
    buffer = cuda.new("x", batch=0)
    ready = cuda.Event()
    ready.record()
    consumer.wait_event(ready)
    if record_on is not None:
        buffer.record_stream({"consumer": consumer, "producer": cuda.default}[record_on])
    with cuda.stream(consumer):
        cuda.read(buffer)
    return block_of(buffer), consumer


@pytest.mark.parametrize("record_on", [None, "producer"])
def test_recording_on_the_producer_does_nothing(cuda, record_on):
    block, _ = read_elsewhere(cuda, record_on)
    assert block_of(cuda.new("y", batch=1)) == block
    assert rules(cuda.history) == [REUSED]


def test_recording_on_the_consumer_keeps_memory_until_the_host_knows(cuda):
    block, consumer = read_elsewhere(cuda, "consumer")
    second = cuda.new("second", batch=1)
    assert block_of(second) != block
    done = cuda.Event()
    done.record(consumer)
    assert not done.query()
    done.synchronize()
    assert block_of(cuda.new("third", batch=2)) == block
    assert not rules(cuda.history)


def test_recording_takes_effect_when_the_memory_is_given_back(cuda):
    consumer, done = cuda.Stream(), cuda.Event()
    buffer = cuda.new("x", batch=0)
    ready = cuda.Event()
    ready.record()
    consumer.wait_event(ready)
    buffer.record_stream(consumer)
    done.record(consumer)
    with cuda.stream(consumer):
        cuda.read(buffer)  # after the call, but before the memory goes back
    block = block_of(buffer)
    del buffer
    done.synchronize()  # the host knows of the consumer's work up to before the read
    assert block_of(cuda.new("y", batch=1)) != block
    assert not rules(cuda.history)


def test_a_buffer_dropped_within_an_operation_is_given_back_before_the_next(cuda):
    first, second = cuda.new("first", batch=0), cuda.new("second", batch=0)
    block = block_of(first)
    with cuda.operation() as history:
        del first  # as a collection of garbage would, in the middle of anything
        assert "free first#0" not in history.log
    cuda.read(second)
    assert cuda.history.log[-2:] == ["free first#0", "default reads second#1"]
    assert block_of(cuda.new("third", batch=1)) == block


def test_a_device_that_keeps_up_has_passed_whatever_is_asked():
    cuda = FakeCuda(keeps_up=True)
    cuda.new("x", batch=0)
    event = cuda.Event()
    event.record()
    assert event.query()
    assert cuda.history.syncs == 0


def test_the_current_stream_is_the_threads_own_and_is_put_back(cuda):
    outer, inner = cuda.Stream(), cuda.Stream()
    assert cuda.current_stream() is cuda.default
    with cuda.stream(outer):
        with cuda.stream(inner):
            assert cuda.current_stream() is inner
        assert cuda.current_stream() is outer
    assert cuda.current_stream() is cuda.default
