"""nvJPEG without a card: which library is loaded, what is said without one, and the text of its errors."""

import ctypes
import os
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from support.nvjpeg_double import Engines

from gpuaug import DecodeStage, DeviceError, GpuAugError, GpuAugWarning
from gpuaug.decode import nvjpeg

CARD = torch.device("cuda", 0)


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """Installs wheels of nvJPEG, and says which of the libraries are loaded."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(nvjpeg.importlib.util, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[tmp_path]))
    nvjpeg.find_library.cache_clear()

    def install(*majors):
        for major in majors:
            folder = tmp_path / f"cu{major}" / "lib"
            folder.mkdir(parents=True)
            (folder / f"libnvjpeg.so.{major}").touch()

    yield install
    nvjpeg.find_library.cache_clear()


def loads(monkeypatch, fits):
    asked = []

    def load(name):
        asked.append(name)
        if not fits(name):
            raise OSError(name)

    monkeypatch.setattr(nvjpeg, "ctypes", SimpleNamespace(CDLL=load, PyDLL=load))
    return asked


def test_the_wheel_for_torchs_cuda_is_loaded_first(wheels, monkeypatch, tmp_path):
    wheels(12, 13)
    asked = loads(monkeypatch, lambda name: True)
    assert nvjpeg.find_library() == str(tmp_path / "cu13" / "lib" / "libnvjpeg.so.13")
    assert len(asked) == 1
    assert nvjpeg.other_majors() == ["12"]


def test_the_systems_library_is_loaded_where_no_wheel_can_be(wheels, monkeypatch):
    wheels(12, 13)
    asked = loads(monkeypatch, lambda name: "/" not in name)
    assert nvjpeg.find_library() == "libnvjpeg.so.13"
    assert len(asked) == 2


def test_without_a_library_there_is_none(wheels, monkeypatch):
    loads(monkeypatch, lambda name: False)
    assert nvjpeg.find_library() is None
    monkeypatch.setattr(nvjpeg.importlib.util, "find_spec", lambda name: None)
    assert nvjpeg.other_majors() == []


@pytest.mark.parametrize(("majors", "got"), [((), "no nvJPEG"), ((12,), "nvJPEG for CUDA 12 alone")])
def test_a_missing_library_is_warned_about_with_what_to_install(wheels, monkeypatch, majors, got):
    wheels(*majors)
    loads(monkeypatch, lambda name: False)
    with pytest.warns(GpuAugWarning, match=rf"because there are no JPEG engines: {got}\..*gpuaug\[decode-cu13\]"):
        assert not nvjpeg.find_engines("auto", CARD)
    with pytest.raises(DeviceError, match=f"got 'engines' and {got}"):
        nvjpeg.find_engines("engines", CARD)


@pytest.mark.parametrize("backend", ["auto", "engines", "cpu"])
def test_a_card_without_engines_is_no_reason_to_warn(wheels, monkeypatch, caplog, backend):
    def refuse(device):
        raise nvjpeg.NvJpegError("nvjpegCreateEx", 7)

    loads(monkeypatch, lambda name: True)
    monkeypatch.setattr(nvjpeg, "Engines", refuse)
    caplog.set_level("INFO", "gpuaug")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if backend == "engines":
            with pytest.raises(DeviceError, match=r"got 'engines' and a card without them \(7\)"):
                nvjpeg.find_engines(backend, CARD)
        else:
            assert not nvjpeg.find_engines(backend, CARD)
    assert ("Images are decoded on the CPU: a card without them (7)." in caplog.text) == (backend == "auto")


def test_engines_that_cannot_be_set_up_are_warned_about(wheels, monkeypatch):
    def refuse(device):
        raise nvjpeg.NvJpegError("nvjpegCreateEx", 5)

    loads(monkeypatch, lambda name: True)
    monkeypatch.setattr(nvjpeg, "Engines", refuse)
    with pytest.warns(GpuAugWarning, match=r"that cannot be set up \(allocator failure\)\. See what else uses the card"):
        assert not nvjpeg.find_engines("auto", CARD)


def test_engines_are_used_where_there_are_some(wheels, monkeypatch):
    loads(monkeypatch, lambda name: True)
    monkeypatch.setattr(nvjpeg, "Engines", Engines)
    monkeypatch.setattr(nvjpeg, "queues", 32)
    assert isinstance(nvjpeg.find_engines("auto", CARD), Engines)
    assert not nvjpeg.find_engines("cpu", CARD)
    assert not nvjpeg.find_engines("auto", torch.device("cpu"))


@pytest.mark.parametrize(
    ("told", "started", "found", "left"),
    [(None, False, 32, "32"), (None, True, 8, None), ("4", False, 4, "4"), ("4", True, 4, "4"), ("some", False, 8, "some")],
)
def test_hardware_queues_are_asked_for_unless_cuda_has_started_or_the_user_has(monkeypatch, told, started, found, left):
    if told is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    else:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", told)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    assert nvjpeg.ask_for_queues() == found
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == left


def test_engines_with_too_few_hardware_queues_are_warned_about(wheels, monkeypatch):
    loads(monkeypatch, lambda name: True)
    monkeypatch.setattr(nvjpeg, "Engines", Engines)
    monkeypatch.setattr(nvjpeg, "queues", 8)
    with pytest.warns(GpuAugWarning, match="because CUDA_DEVICE_MAX_CONNECTIONS is 8: decoding waits .*CONNECTIONS=32"):
        assert isinstance(nvjpeg.find_engines("auto", CARD), Engines)


def test_an_error_names_the_call_and_its_status():
    error = nvjpeg.NvJpegError("nvjpegDecodeBatched", 6)
    assert isinstance(error, GpuAugError)
    assert (str(error), error.status) == (
        "nvjpegDecodeBatched must succeed, got status 6 (execution failed). "
        "If it is the same each time, decode with DecodeStage(backend='cpu').",
        6,
    )
    assert "got status 99 (unknown)." in str(nvjpeg.NvJpegError("nvjpegCreateEx", 99))


def test_records_of_outputs_are_as_nvjpeg_has_them():
    assert nvjpeg.OUTPUT.itemsize == 4 * ctypes.sizeof(ctypes.c_void_p) + 4 * ctypes.sizeof(ctypes.c_size_t)
    assert sys.byteorder == "little"
    assert repr(DecodeStage()) == "DecodeStage(backend='auto', on_error='raise')"
