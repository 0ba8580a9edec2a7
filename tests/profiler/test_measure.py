"""What is read from a trace, where a wait is placed, and what a piece of work costs by itself."""

import time
import traceback
import warnings
from pathlib import Path

import pytest
import torch

import gpuaug
from gpuaug.core.streams import Lanes
from gpuaug.profiler.measure import OnDevice, Spread, alone, figure, link_gb_per_s, on_device, place, read_trace, waits_at

CPU = torch.device("cpu")


def event(category, start_us, took_us, name="name"):
    return {"ph": "X", "cat": category, "name": name, "ts": start_us, "dur": took_us}


def test_kernels_that_overlap_count_once():
    events = [
        event("kernel", 4000, 1000),  # by itself, and earlier in the trace than it ran
        event("kernel", 1000, 1000),
        event("kernel", 1500, 1000),  # half of it beside the one before
        event("kernel", 1600, 100),  # within both
        event("kernel", 2500, 500),  # right after
    ]
    assert read_trace(events, 1) == OnDevice(3.0, 0)


def test_copies_and_fills_are_work_too_and_waits_are_not():
    events = [event("gpu_memcpy", 0, 1000), event("gpu_memset", 5000, 500)]
    others = [event("cuda_runtime", 9000, 700, "cudaStreamSynchronize"), event("gpu_user_annotation", 0, 9000)]
    assert read_trace(events + others, 1) == OnDevice(1.5, 0)


def test_launches_are_the_calls_that_queue_something():
    names = ["cudaLaunchKernel", "cudaLaunchKernelExC", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaGraphLaunch"]
    others = ["cudaStreamSynchronize", "cudaEventRecord", "cudaStreamWaitEvent", "cudaStreamIsCapturing", "cudaMalloc"]
    events = [event("cuda_runtime", 0, 5, name) for name in names + others] + [event("cuda_driver", 0, 5, "cuLaunchKernel")]
    assert read_trace(events, 1) == OnDevice(0.0, 6)
    assert read_trace([event("cpu_op", 0, 5, "aten::LaunchAsync")], 1).launches == 0


def test_a_trace_of_several_calls_is_shared_out():
    events = [event("kernel", 1000 * call, 600) for call in range(3)]
    events += [event("cuda_runtime", 1000 * call, 5, "cudaLaunchKernel") for call in range(3) for _ in range(7)]
    assert read_trace(events, 3) == OnDevice(pytest.approx(0.6), 7)


def test_a_trace_without_work_or_times_is_read():
    metadata = {"ph": "M", "name": "process_name", "args": {"name": "python"}}
    assert read_trace([metadata], 3) == OnDevice(0.0, 0)


def stack(*files):
    return [traceback.FrameSummary(str(name), line, "f", lookup_line=False) for line, name in enumerate(files, 1)]


TORCH, PACKAGE = Path(torch.__file__).parent, Path(gpuaug.__file__).parent


def test_a_place_is_the_innermost_code_that_is_the_users():
    frames = stack("/me/train.py", "/me/crop.py", TORCH / "_tensor.py", PACKAGE / "stages.py", warnings.__file__, "<frozen x>")
    assert place(frames) == "/me/crop.py:2"


def test_a_place_may_be_in_another_package():
    assert place(stack("/me/train.py", "/lib/kornia/geometry.py", TORCH / "_tensor.py")) == "/lib/kornia/geometry.py:2"


@pytest.mark.parametrize("package", [TORCH, PACKAGE])
def test_names_that_only_begin_like_torchs_or_this_packages_are_others(package):
    own = f"{package}_train.py"
    assert place(stack("/me/train.py", own)) == f"{own}:2"
    beside = package.with_name(f"{package.name}vision") / "ops.py"
    assert place(stack("/me/train.py", beside)) == f"{beside}:2"


def test_a_place_of_nobodys_is_the_innermost_of_all():
    assert place(stack(TORCH / "a.py", PACKAGE / "b.py")) == f"{PACKAGE / 'b.py'}:2"


def test_work_alone_takes_what_it_takes_and_is_called_so_often():
    calls = []

    def work():
        calls.append(time.sleep(0.01 if len(calls) < 4 else 0.02))

    wall, host = alone(work, CPU, 5)
    assert len(calls) == 5
    assert wall == host, "on a CPU it is all the training thread's"
    assert 10 <= wall.low <= wall.median
    assert wall.median < wall.high
    assert wall.high >= 20


def test_a_spread_has_the_median_and_the_ends():
    assert Spread.of([3.0, 1.0, 7.0]) == Spread(3.0, 1.0, 7.0)
    assert str(Spread(3.14159, 1.0, 7123.4)) == "3.14 (1-7,123)"
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.01234, "0.0123"), (12.34, "12.3"), (999.4, "999"), (1234.5, "1,234"), (1e6, "1,000,000")]
)
def test_figures_have_three_digits_and_no_exponent(value, text):
    assert figure(value) == text


def test_on_a_cpu_there_is_no_device_to_probe():
    def never():
        raise AssertionError

    assert on_device(never, CPU) is None
    assert waits_at(never, CPU) is None
    assert link_gb_per_s(Lanes(CPU)) is None
