"""Order of the work inside and outside of ``step_first``, by happens-before."""

import threading

import pytest
from protocol.scenarios import Source, make_stage
from support.gpu.stream_history import REUSED, UNREADY

import gpuaug
from gpuaug import StreamedLoader
from gpuaug.core import batch, streams
from gpuaug.core.streams import Lane


def train(cuda, epochs=3, fail_in=None):
    """Train inside of ``step_first`` and evaluate outside, with tensors of each that are read and freed in the other."""
    loader = StreamedLoader(Source(cuda, 4), [make_stage(cuda, "augment")], device="cuda")
    weights, kept = cuda.new("weights", 0), []
    for epoch in range(epochs):
        temporary = cuda.new("outside", 0)
        try:
            with gpuaug.step_first():
                for received in loader:
                    cuda.read(*batch.leaves(received), weights, temporary, *kept)
                    cuda.write(weights)
                    loss = cuda.new("loss", 0)
                    if epoch == fail_in:
                        raise RuntimeError("the step failed")
                kept[:] = [cuda.new("inside", 0)]
                del temporary
        except RuntimeError:
            pass
        # A checkpoint, and the metrics of the epoch. The next epoch reuses the memory of the tensors.
        cuda.read(weights, loss, *kept)
        del loss
    return cuda.history, loader


@pytest.mark.parametrize("fail_in", [None, 0, 1])
def test_work_inside_is_ordered_with_work_before_and_after(cuda, fail_in):
    history, loader = train(cuda, fail_in=fail_in)
    assert not history.violations, history.report()
    assert history.syncs == loader.stats().held_back


def leave_out_waits_of(name, monkeypatch):
    real = Lane.wait
    monkeypatch.setattr(Lane, "wait", lambda lane, event: None if lane.name == name else real(lane, event))


def test_without_the_wait_at_the_entry_the_step_reads_weights_too_early(cuda, monkeypatch):
    leave_out_waits_of("step", monkeypatch)
    assert {UNREADY, REUSED} & set(train(cuda)[0].rules())


@pytest.mark.parametrize("fail_in", [None, 0])
def test_without_the_wait_at_the_exit_the_checkpoint_reads_weights_too_early(cuda, monkeypatch, fail_in):
    leave_out_waits_of("outer", monkeypatch)
    assert UNREADY in train(cuda, fail_in=fail_in)[0].rules()


def test_stream_is_made_once_per_thread_and_current_inside_alone(cuda):
    def inside():
        with gpuaug.step_first():
            current = cuda.current_stream()
            with gpuaug.step_first():
                assert cuda.current_stream() is current
            assert cuda.current_stream() is current
            with cuda.stream(other), gpuaug.step_first():
                assert cuda.current_stream() is current
        assert cuda.current_stream() is cuda.default
        return current

    other, in_thread = cuda.Stream(priority=-1), []
    first = inside()
    assert first is inside()
    assert first not in (cuda.default, other)
    thread = threading.Thread(target=lambda: in_thread.append(inside()))
    thread.start()
    thread.join()
    assert in_thread[0] not in (first, other)
    assert {first, in_thread[0], other} == set(cuda._streams[streams.STEP_PRIORITY])


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_other_devices_have_no_stream(cuda, device):
    with gpuaug.step_first(device):
        assert cuda.current_stream() is cuda.default
    assert not cuda.history.log
