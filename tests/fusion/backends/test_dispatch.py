"""The error with which Triton cannot run, shown in the warning, ``explain`` and results."""

import os
import re
import shutil
import sys
import uuid
import warnings
from pathlib import Path

import kornia.augmentation as K
import pytest
import torch

pytest.importorskip("triton")

import triton
from support import internals
from support.comparison.replay import photographs
from support.gpu.compiled import CompileOnly
from triton.runtime import build

import gpuaug
from gpuaug.core import devices
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.backends.triton import backend, cache, launch

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
SLOW = "gpuaug.fuse runs in plain torch on cpu, about 50 times slower, because Triton cannot run a kernel there"
MODULE = """#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "helper", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_helper(void) { return PyModule_Create(&module); }
"""


def compile_c():
    """Have Triton build and load C code that is not in its cache, as it does for its launchers."""
    build.compile_module_from_src(f"// {uuid.uuid4()}\n{MODULE}", "helper")


def compile_kernel():
    """Have Triton compile a kernel for a GPU."""
    CompileOnly(launch._empty_kernel, {}).warmup(grid=(1,), enable_fp_fusion=True)


def forget_compiler():
    """Triton 3.8 looks for a compiler once in a process."""
    if hasattr(build, "_find_compiler"):
        build._find_compiler.cache_clear()


@pytest.fixture(autouse=True)
def no_probes(monkeypatch, tmp_path):
    """No device has been probed, and Triton's cache is empty. A probe runs ``work``, on a CPU."""
    monkeypatch.setattr(dispatch, "_BACKENDS", {})
    monkeypatch.setattr(dispatch, "TRITON_FAILURES", known := {})
    monkeypatch.setattr(devices, "TRITON_FAILURES", known)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("GPUAUG_REQUIRE_TRITON", raising=False)
    forget_compiler()
    yield
    forget_compiler()


@pytest.fixture
def works(monkeypatch):
    """Sets what a probe has Triton do in place of running a kernel."""
    return lambda work: monkeypatch.setattr(backend, "compile_and_run", lambda launch, other: work())


def ptxas_at(monkeypatch, path):
    """Have Triton find the ptxas of a path alone."""
    tool = triton.knobs.NvidiaTool
    found = tool.from_path
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(path))
    monkeypatch.setattr(tool, "from_path", staticmethod(lambda each: found(each) if each == str(path) else None))


def script(path, text, mode=0o755):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(mode)
    return path


def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)


def ptxas_that_fails(monkeypatch, tmp_path):
    ptxas_at(monkeypatch, script(tmp_path / "ptxas", '[ "$1" = --version ] && echo release 12.8, V12.8.93 || exit 3'))


def no_triton(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gpuaug.fusion.backends.triton", None)


@pytest.mark.parametrize(
    ("broken", "work", "error"),
    [
        (no_compiler, compile_c, "RuntimeError: Failed to find C compiler"),
        (ptxas_that_fails, compile_kernel, "PTXASError: "),
        (no_triton, compile_c, "ModuleNotFoundError: import of gpuaug"),
    ],
)
def test_the_warning_quotes_the_error_and_names_the_page(broken, work, error, works, monkeypatch, tmp_path):
    works(work)
    with monkeypatch.context() as patch:
        broken(patch, tmp_path)
        with pytest.warns(gpuaug.GpuAugWarning, match="plain torch") as warned:
            assert [internals.triton_backend(CPU) for _ in range(2)] == [None] * 2
    (text,) = (str(each.message) for each in warned)
    assert text.startswith(f"{SLOW} ({error}")
    assert re.search(r"\)\. See what Triton needs, such as a C compiler: https:\S+#what-triton-needs\.$", text)
    assert devices.plain_torch_reason(CPU) == text
    # With what it needs, as the advice says, Triton works.
    forget_compiler()
    dispatch._BACKENDS.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert internals.triton_backend(CPU) is backend
    assert devices.plain_torch_reason(CPU) is None


def test_the_compiler_that_cc_names_is_used(works, monkeypatch, tmp_path):
    works(compile_c)
    compiler = build.shutil.which("gcc") or build.shutil.which("clang")
    no_compiler(monkeypatch, tmp_path)
    monkeypatch.setenv("CC", str(script(tmp_path / "cc", f'PATH={os.path.dirname(compiler)} exec {compiler} "$@"')))
    assert internals.triton_backend(CPU) is backend


@pytest.mark.parametrize("value", ["1", "true"])
def test_a_program_that_requires_triton_gets_an_error_in_every_call(value, works, monkeypatch, tmp_path):
    works(compile_c)
    monkeypatch.setenv("GPUAUG_REQUIRE_TRITON", value)
    with monkeypatch.context() as patch:
        no_compiler(patch, tmp_path)
        for _ in range(2):
            with pytest.raises(gpuaug.DeviceError, match="cannot run on cpu with GPUAUG_REQUIRE_TRITON set, because Triton"):
                internals.triton_backend(CPU)
        assert devices.plain_torch_reason(CPU).endswith("#what-triton-needs.")
    assert internals.triton_backend(CPU) is backend
    assert devices.plain_torch_reason(CPU) is None


def test_a_required_triton_stops_the_first_call_and_nothing_that_describes_it(monkeypatch):
    def broken(device, first):
        raise RuntimeError("no driver")

    monkeypatch.setattr(backend, "probe", broken)
    monkeypatch.setenv("GPUAUG_REQUIRE_TRITON", "1")
    with pytest.raises(gpuaug.DeviceError, match="no driver"):
        dispatch.backend_name(CUDA)
    assert dispatch.backend_name(CUDA) == "torch"


@pytest.mark.parametrize("value", ["0", ""])
def test_triton_is_not_required_unless_asked_for(value, works, monkeypatch, tmp_path):
    works(compile_c)
    no_compiler(monkeypatch, tmp_path)
    monkeypatch.setenv("GPUAUG_REQUIRE_TRITON", value)
    with pytest.warns(gpuaug.GpuAugWarning, match=SLOW):
        assert internals.triton_backend(CPU) is None


def test_cpu_needs_no_triton(monkeypatch):
    monkeypatch.setenv("GPUAUG_REQUIRE_TRITON", "1")
    monkeypatch.setattr(backend, "probe", None)
    assert dispatch.backend_name(CPU) == "torch"
    gpuaug.fuse(K.RandomInvert())(photographs(2))


def test_a_cache_that_cannot_be_written_is_replaced(works, monkeypatch):
    works(compile_c)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/dev/null/cache")
    text = (
        r"its cache /dev/null/cache cannot be written \(NotADirectoryError: .*\)\. Set TRITON_CACHE_DIR to a folder that lasts"
    )
    with pytest.warns(gpuaug.GpuAugWarning, match=text):
        assert internals.triton_backend(CPU) is backend
    folder = os.environ["TRITON_CACHE_DIR"]
    assert [path.name.partition(".")[0] for path in Path(folder).rglob("*.so")] == ["helper"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.use_writable_cache()
    assert os.environ["TRITON_CACHE_DIR"] == folder
    shutil.rmtree(folder)


def make_read_only(monkeypatch, folder):
    why_not = cache._unusable_reason
    monkeypatch.setattr(cache, "_unusable_reason", lambda path: "is read-only" if path == str(folder) else why_not(path))


def test_what_a_read_only_cache_holds_is_used(works, monkeypatch, tmp_path):
    module = f"// {uuid.uuid4()}\n{MODULE}"
    build.compile_module_from_src(module, "helper")
    old = tmp_path / "cache"
    make_read_only(monkeypatch, old)
    no_compiler(monkeypatch, tmp_path)
    works(lambda: build.compile_module_from_src(module, "helper"))
    with pytest.warns(gpuaug.GpuAugWarning, match="is read-only"):
        assert internals.triton_backend(CPU) is backend
    assert os.environ["TRITON_CACHE_DIR"] != str(old)
    shutil.rmtree(os.environ["TRITON_CACHE_DIR"])  # which has links to the old one
    assert list(old.rglob("*.so"))


def test_what_a_cache_holds_that_is_mounted_noexec_is_left(works, monkeypatch, tmp_path):
    compile_c()
    monkeypatch.setattr(cache, "is_noexec", lambda path: path == str(tmp_path / "cache"))
    works(compile_c)
    with pytest.warns(gpuaug.GpuAugWarning, match="is on a file system that is mounted noexec"):
        assert internals.triton_backend(CPU) is backend
    assert len(os.listdir(os.environ["TRITON_CACHE_DIR"])) == 1


def test_a_cache_of_another_user_is_replaced(works, monkeypatch, tmp_path):
    def refused(path):
        raise PermissionError(13, "Permission denied", path)

    make_read_only(monkeypatch, tmp_path / "cache")
    works(compile_c)
    monkeypatch.setattr(os, "listdir", refused)
    with pytest.warns(gpuaug.GpuAugWarning, match="is read-only"):
        assert internals.triton_backend(CPU) is backend


def test_a_cache_that_can_be_written_is_left_alone(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.use_writable_cache()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "cache")


def test_explain_says_why_the_last_call_ran_in_plain_torch(monkeypatch):
    augment = gpuaug.fuse(K.RandomInvert())
    augment(photographs(2))
    before = augment.explain()
    monkeypatch.setitem(devices.TRITON_FAILURES, CPU, f"{SLOW} …")
    assert augment.explain().notes == (f"{SLOW} …", *before.notes)
    assert f"\n{SLOW} …" in str(augment.explain())
    assert SLOW not in str(gpuaug.fuse(K.RandomInvert()).explain())
