"""The double's allocator, events and graphs, where no protocol shows what they do."""

import pytest
from support.gpu.stream_double import FakeCuda, HostBuffer


@pytest.fixture
def cuda():
    return FakeCuda()


def block_of(buffer):
    return buffer._block


def test_allocator_hands_out_the_smallest_block_that_is_large_enough_and_not_much_larger(cuda):
    cuda.bytes_of = lambda batch: batch
    buffers = [cuda.new("x", batch=size) for size in (8, 2, 4, 4)]
    blocks = [block_of(buffer) for buffer in buffers]
    assert (cuda.live_bytes, cuda.reserved_bytes) == (18, 18)
    while buffers:
        buffers.pop(0)
    again = [cuda.new("y", batch=size) for size in (3, 4, 4, 9, 3)]
    assert [block_of(buffer) for buffer in again] == [blocks[3], blocks[2], blocks[0], 4, 5]
    assert (cuda.live_bytes, cuda.most_live_bytes, cuda.reserved_bytes) == (23, 23, 30)


def test_record_stream_on_consumer_keeps_memory_until_host_knows(cuda):
    consumer, ready, buffer = cuda.Stream(), cuda.Event(), cuda.new("x", batch=0)
    ready.record()
    ready.wait(consumer)
    buffer.record_stream(consumer)
    with cuda.stream(consumer):
        cuda.read(buffer)
    block = block_of(buffer)
    del buffer
    second = cuda.new("second", batch=1)
    assert block_of(second) != block
    done = cuda.Event()
    done.record(consumer)
    assert not done.query()
    done.synchronize()
    assert block_of(cuda.new("third", batch=2)) == block
    assert not cuda.history.rules()


def test_record_stream_takes_effect_on_free(cuda):
    consumer, done = cuda.Stream(), cuda.Event()
    buffer = cuda.new("x", batch=0)
    ready = cuda.Event()
    ready.record()
    ready.wait(consumer)
    buffer.record_stream(consumer)
    done.record(consumer)
    with cuda.stream(consumer):
        cuda.read(buffer)  # after the call, but before the memory goes back
    block = block_of(buffer)
    del buffer
    done.synchronize()  # the host knows of the consumer's work up to before the read
    assert block_of(cuda.new("y", batch=1)) != block
    assert not cuda.history.rules()


def test_buffer_dropped_within_operation_is_freed_after_it(cuda):
    first, second = cuda.new("first", batch=0), cuda.new("second", batch=0)
    block = block_of(first)
    with cuda.operation() as history:
        del first  # as a collection of garbage would, in the middle of anything
        assert "free first#0" not in history.log
    cuda.read(second)
    assert cuda.history.log[-2:] == ["free first#0", "default reads second#1"]
    assert block_of(cuda.new("third", batch=1)) == block


def captured(cuda, pool):
    """A graph that reads memory of its lane and writes its own, and both buffers."""
    graph, source = cuda.CUDAGraph(), cuda.new("source", batch=0)
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    cuda.read(source)
    result = cuda.new("result", batch=0)
    graph.capture_end()
    return graph, source, result


def test_memory_of_a_graph_stays_in_its_pool_until_the_cache_is_emptied(cuda):
    pool = cuda.graph_pool_handle()
    graph, _, result = captured(cuda, pool)
    block = block_of(result)
    del result
    assert block_of(captured(cuda, pool)[2]) != block  # the graph writes it at each replay
    del graph
    assert block_of(cuda.new("another", batch=0)) != block
    cuda.empty_cache()
    with cuda.stream(cuda.Stream()):
        assert block in {block_of(each) for each in [cuda.new("another", batch=0) for _ in range(4)]}


# The clock


def test_events_measure_elapsed_time(cuda):
    cuda.keeps_up = False
    first, last, silent = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True), cuda.Event()
    for event in (first, last, silent):
        cuda.write(HostBuffer(cuda, "x", []).to("cuda"))
        event.record()
        cuda.now_ms += 3
    with pytest.raises(RuntimeError, match="not ready"):
        first.elapsed_time(last)
    silent.synchronize()
    assert first.elapsed_time(last) == 3
    with pytest.raises(ValueError, match="enable_timing"):
        first.elapsed_time(silent)
