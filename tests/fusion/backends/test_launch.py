"""When kernels are compiled and launched: side by side before the first run, once for each form, and then directly."""

import pkgutil
from functools import partial
from importlib import import_module
from threading import Barrier, current_thread, main_thread
from types import SimpleNamespace

import kornia.augmentation as K
import pytest
import torch

pytest.importorskip("triton")

from support import internals
from support.comparison.replay import photographs

import gpuaug
from gpuaug.fusion.backends import triton as kernels
from gpuaug.fusion.backends.triton import backend, launch
from gpuaug.fusion.backends.triton.filters import blur, frame
from gpuaug.fusion.ops.base import Size

KERNELS = {"gather_kernel": backend, "blur_columns_kernel": blur, "filter_kernel": frame}


class WaitingKernel:
    """Stands in for a kernel. In a thread, it compiles only together with as many others as its barrier waits for."""

    function, packed_metadata = 0, None

    def __init__(self, name, barrier, ran, monkeypatch):
        self.name, self.barrier, self.ran = name, barrier, ran
        self.arg_names = getattr(KERNELS[name], name).arg_names
        monkeypatch.setattr(KERNELS[name], name, self)

    def warmup(self, *args, grid, **constants):
        if current_thread() is not main_thread():
            self.barrier.wait(timeout=60)
            self.ran.append("compiled")
        return self

    def __getitem__(self, grid):
        return lambda *args, **constants: self.ran.append(self.name)

    def run(self, *args):
        grid, stream, function, metadata, hooks, rest = args[:3], *args[3:6], args[6:9], args[9:]
        assert (stream, function, metadata, hooks) == (0, self.function, self.packed_metadata, (None, None, None))
        assert all(type(number) is int for number in grid)
        assert len(rest) == len(self.arg_names)
        assert type(rest[0]) is int  # an address
        self.ran.append(self.name)


@pytest.fixture
def no_driver(monkeypatch):
    """Leaves out Triton's first compilation, which needs a driver."""
    monkeypatch.setattr(launch, "_empty_kernel", SimpleNamespace(warmup=lambda **options: None))


def center_crop_run(blur, side=48):
    """A run of a new plan: a crop, and a blur where there is one."""
    augment, images = gpuaug.fuse([K.CenterCrop(32), *blur]), photographs(2, 3, side, side)
    plan = internals.program(augment).segments.at(0, Size(*images.shape), masks=False).plan
    return partial(backend.run, plan, images, torch.zeros(2, plan.width), torch.float32, torch.contiguous_format)


def test_kernels_of_a_plan_are_compiled_side_by_side_before_the_first_one_runs(monkeypatch):
    names, ran = ["gather_kernel", "blur_columns_kernel", "filter_kernel"], []
    barrier = Barrier(len(names))
    for name in names:
        WaitingKernel(name, barrier, ran, monkeypatch)
    run = center_crop_run([K.RandomGaussianBlur((23, 23), (0.1, 2.0))])
    run()
    assert ran == ["compiled"] * 3 + names
    run()
    assert ran == ["compiled"] * 3 + names + names


def test_kernels_of_the_first_run_are_compiled_beside_the_probe(no_driver, monkeypatch):
    names, ran = ["gather_kernel", "blur_columns_kernel", "filter_kernel"], []
    barrier = Barrier(1 + len(names))
    for name in names:
        WaitingKernel(name, barrier, ran, monkeypatch)
    run = center_crop_run([K.RandomGaussianBlur((23, 23), (0.1, 2.0))])
    backend.probe(torch.device("cpu"), run.args)
    assert ran == ["compiled"] * 4 + ["gather_kernel"]
    run()
    assert ran[5:] == names


def test_probe_runs_whatever_the_first_run_raises(no_driver, monkeypatch):
    ran = []
    WaitingKernel("gather_kernel", Barrier(1), ran, monkeypatch)
    run = center_crop_run([])
    monkeypatch.setattr(backend, "MOST_SAMPLES", 1)
    backend.probe(torch.device("cpu"), run.args)
    assert ran == ["compiled", "gather_kernel"]
    with pytest.raises(gpuaug.ArgumentError, match="at most 1 samples"):
        run()


def test_no_kernel_has_more_arguments_than_its_launcher_parses_fast():
    found = {}
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        members = vars(import_module(module.name))
        found |= {name: len(kernel.arg_names) for name, kernel in members.items() if name.endswith("_kernel")}
    assert {"gather_kernel", "filter_kernel"} <= set(found)
    assert {name for name, count in found.items() if count > launch.MOST_ARGUMENTS} == set()


def test_launches_go_to_the_current_gpu_alone(monkeypatch):
    monkeypatch.setattr(launch, "current_device", lambda: 1)
    assert [launch.is_current(torch.device(name)) for name in ("cuda:0", "cuda:1", "cpu")] == [False, True, True]


def test_launches_of_one_form_are_compiled_once(monkeypatch):
    ran = []
    WaitingKernel("gather_kernel", Barrier(1), ran, monkeypatch)
    with launch.compile_in_parallel():
        center_crop_run([])()
        center_crop_run([])()
    assert ran == ["compiled"]


def test_kernels_of_an_interpreter_that_compiles_nothing_are_launched(monkeypatch):
    ran = []
    WaitingKernel("gather_kernel", Barrier(1), ran, monkeypatch)
    monkeypatch.delattr(WaitingKernel, "warmup")
    center_crop_run([])()
    assert ran == ["gather_kernel"]
    monkeypatch.setattr(launch, "_empty_kernel", SimpleNamespace())
    backend.probe(torch.device("cpu"))
    assert ran == ["gather_kernel"] * 2


def test_kernels_that_have_been_compiled_for_another_size_need_no_thread(monkeypatch):
    ran = []
    WaitingKernel("gather_kernel", Barrier(1), ran, monkeypatch)
    # The first size is compiled in, and all others share a kernel.
    for side in (48, 50):
        center_crop_run([], side)()
    ran.clear()
    center_crop_run([], 52)()
    assert ran == ["gather_kernel"]


def test_kernel_that_a_thread_could_not_compile_is_compiled_where_it_is_launched(monkeypatch):
    barrier, ran = Barrier(1), []
    barrier.abort()
    WaitingKernel("gather_kernel", barrier, ran, monkeypatch)
    center_crop_run([])()
    assert ran == ["gather_kernel"]
