"""nvJPEG without a card: which library is loaded, what is said without one, and the text of its errors."""

import contextlib
import ctypes
import os
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from support.files.nvjpeg_double import BatchDecoder, PhasedDecoder

from gpuaug import DecodeStage, DeviceError, GpuAugError, GpuAugWarning
from gpuaug.decode import c_calls, nvjpeg, nvjpeg_loops
from gpuaug.decode.decoders import registry

CARD = torch.device("cuda", 0)


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """Installs wheels of nvJPEG, and says which of the libraries are loaded."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(nvjpeg.importlib.util, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[tmp_path]))
    nvjpeg.library.cache_clear()

    def install(*majors):
        for major in majors:
            folder = tmp_path / f"cu{major}" / "lib"
            folder.mkdir(parents=True)
            (folder / f"libnvjpeg.so.{major}").touch()

    yield install
    nvjpeg.library.cache_clear()


def loads(monkeypatch, fits):
    asked = []

    def load(name):
        asked.append(name)
        if not fits(name):
            raise OSError(name)
        return SimpleNamespace(name=name, **dict.fromkeys(nvjpeg_loops.NAMES))

    monkeypatch.setattr(c_calls, "ctypes", SimpleNamespace(CDLL=load))
    return asked


def test_the_wheel_for_torchs_cuda_is_loaded_first(wheels, monkeypatch, tmp_path):
    wheels(12, 13)
    asked = loads(monkeypatch, lambda name: True)
    assert nvjpeg.library().name == str(tmp_path / "cu13" / "lib" / "libnvjpeg.so.13")
    assert len(asked) == 1
    assert nvjpeg.other_majors() == ["12"]


def test_the_systems_library_is_loaded_where_no_wheel_can_be(wheels, monkeypatch):
    wheels(12, 13)
    asked = loads(monkeypatch, lambda name: "/" not in name)
    assert nvjpeg.library().name == "libnvjpeg.so.13"
    assert len(asked) == 2


def test_without_a_library_there_is_none(wheels, monkeypatch):
    loads(monkeypatch, lambda name: False)
    assert nvjpeg.library() is None
    monkeypatch.setattr(nvjpeg.importlib.util, "find_spec", lambda name: None)
    assert nvjpeg.other_majors() == []


@pytest.fixture
def none_made(monkeypatch):
    """Decoders of cards are made anew."""
    monkeypatch.setattr(registry, "_created", {})
    monkeypatch.setattr(nvjpeg, "queues", 32)


def refuse(monkeypatch, status, *refused):
    """Replace nvJPEG by doubles. Setting up the doubles named in ``refused`` fails with ``status``."""
    for double in (BatchDecoder, PhasedDecoder):

        class Refusing(double):
            def __init__(self, *arguments):
                if type(self).__name__ in refused:
                    raise nvjpeg.NvJpegError("nvjpegCreateEx", status)

        Refusing.__name__ = double.__name__
        monkeypatch.setattr(nvjpeg, double.__name__, Refusing)


def names(found):
    return [each.name for each in registry.usable(found)]


@pytest.mark.usefixtures("none_made")
@pytest.mark.parametrize(("majors", "got"), [((), "nvJPEG is not installed"), ((12,), "nvJPEG is installed only for CUDA 12")])
def test_a_missing_library_is_warned_about_with_what_to_install(wheels, monkeypatch, majors, got):
    wheels(*majors)
    loads(monkeypatch, lambda name: False)
    with pytest.warns(GpuAugWarning, match=rf"because the card does not decode: {got}\..*gpuaug\[decode-cu13\]"):
        found = registry.find("auto", CARD)
    assert names(found) == ["cpu"]
    assert {found["engines"].advice, found["hybrid"].advice} == {"Run pip install 'gpuaug[decode-cu13]'"}
    for backend in ("engines", "hybrid"):
        with pytest.raises(DeviceError, match=f"got '{backend}': {got}"):
            registry.find(backend, CARD)


CARDS = {
    "with engines": ((), {"auto": ["engines", "hybrid"], "engines": ["engines"], "hybrid": ["hybrid"], "cpu": []}),
    "without": (("BatchDecoder",), {"auto": ["hybrid"], "engines": None, "hybrid": ["hybrid"], "cpu": []}),
    "with engines only": (("PhasedDecoder",), {"auto": ["engines"], "engines": ["engines"], "hybrid": None, "cpu": []}),
}


@pytest.mark.usefixtures("none_made")
@pytest.mark.parametrize("backend", ["auto", "engines", "hybrid", "cpu"])
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("status", [7, 9])
def test_each_backend_finds_the_decoders_of_a_card(wheels, monkeypatch, caplog, card, backend, status):
    loads(monkeypatch, lambda name: True)
    refused, wanted = CARDS[card]
    refuse(monkeypatch, status, *refused)
    caplog.set_level("INFO", "gpuaug")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if wanted[backend] is None:
            reasons = {"engines": rf"the card has no JPEG engines \({status}\)", "hybrid": r"nvJPEG cannot be set up \("}
            with pytest.raises(DeviceError, match=f"got '{backend}': {reasons[backend]}"):
                registry.find(backend, CARD)
        else:
            assert names(registry.find(backend, CARD)) == [*wanted[backend], "cpu"]
    told = f"Images are decoded by host threads and the card together, because the card has no JPEG engines ({status})."
    assert (told in caplog.text) == ((card, backend) == ("without", "auto"))


@pytest.mark.usefixtures("none_made")
def test_a_library_that_cannot_be_set_up_is_warned_about(wheels, monkeypatch):
    loads(monkeypatch, lambda name: True)
    refuse(monkeypatch, 5, "BatchDecoder", "PhasedDecoder")
    with pytest.warns(
        GpuAugWarning, match=r"cannot be set up \(allocator failure\)\. Free memory of the card that other processes use"
    ):
        assert names(registry.find("auto", CARD)) == ["cpu"]
    refuse(monkeypatch, 5)
    assert names(registry.find("auto", CARD)) == ["engines", "hybrid", "cpu"], "it is tried again"


@pytest.mark.usefixtures("none_made")
def test_decoders_of_a_card_are_made_once(wheels, monkeypatch):
    made = []

    class Counted(BatchDecoder):
        def __init__(self, device):
            made.append(device)

    loads(monkeypatch, lambda name: True)
    refuse(monkeypatch, 0)
    monkeypatch.setattr(nvjpeg, "BatchDecoder", Counted)
    first, second = (registry.find("auto", CARD)["engines"] for _ in range(2))
    assert first is second
    other, same = (registry.find("auto", torch.device("cuda", 1))["engines"] for _ in range(2))
    assert other is same is not first
    assert made == [CARD, torch.device("cuda", 1)]


def test_no_card_decodes_for_a_cpu():
    found = registry.find("auto", torch.device("cpu"))
    assert names(found) == ["cpu"]
    assert (found["engines"].words, found["engines"].advice) == ("the device is cpu", "")


@pytest.mark.usefixtures("none_made")
def test_the_table_says_what_decodes_what_and_why_the_rest_does_not(wheels, monkeypatch):
    loads(monkeypatch, lambda name: True)
    refuse(monkeypatch, 7, "BatchDecoder")
    lines = str(registry.DecoderTable(registry.find("auto", CARD))).splitlines()
    assert lines[0] == "engines  not used: the card has no JPEG engines (7)"
    assert lines[1].startswith("hybrid   nvJPEG double: baseline JPEG in one scan, or progressive JPEG")
    assert lines[2].startswith("cpu ")
    assert lines[2].endswith(": all other files")


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


@pytest.mark.usefixtures("none_made")
def test_engines_with_too_few_hardware_queues_are_warned_about(wheels, monkeypatch):
    loads(monkeypatch, lambda name: True)
    refuse(monkeypatch, 7)
    monkeypatch.setattr(nvjpeg, "queues", 8)
    with pytest.warns(GpuAugWarning, match="because CUDA_DEVICE_MAX_CONNECTIONS is 8: decoding waits .*CONNECTIONS=32"):
        registry.find("auto", CARD)


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
    assert nvjpeg_loops.OUTPUT.itemsize == 4 * ctypes.sizeof(ctypes.c_void_p) + 4 * ctypes.sizeof(ctypes.c_size_t)
    assert sys.byteorder == "little"
    assert repr(DecodeStage()) == "DecodeStage(backend='auto', on_error='raise')"


class Calls:
    """A double of the C library. Calls return the status for their name, or 0."""

    def __init__(self, patch, **statuses):
        self.statuses, self.names = statuses, []
        patch.setattr(nvjpeg, "library", lambda: self)
        patch.setattr(nvjpeg.ctypes, "CDLL", lambda path: self)
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())

    def __getattr__(self, name):
        def call(*arguments):
            self.names.append(name)
            return self.statuses.get(name, 0)

        return call


STATE_PARTS = ["JpegState", "BufferPinned", "BufferDevice", "JpegStream", "DecodeParams"]


@pytest.mark.parametrize(
    ("fails", "destroyed"),
    [
        ("nvjpegDecoderStateCreate", 0),
        ("nvjpegBufferDeviceCreate", 2),
        ("nvjpegBufferPinnedResize", 5),
        ("nvjpegBufferDeviceResize", 5),
        ("nvjpegStateAttachDeviceBuffer", 5),
    ],
)
def test_a_state_that_cannot_be_made_is_destroyed(monkeypatch, fails, destroyed):
    calls = Calls(monkeypatch)
    decoder = nvjpeg.PhasedDecoder(CARD)
    decoder.state(2**21, 2**22)
    assert not any(name.endswith("Destroy") for name in calls.names)
    calls.statuses[fails] = 5
    with pytest.raises(nvjpeg.NvJpegError, match=f"{fails} must succeed, got status 5"):
        decoder.state(2**21, 2**22)
    gone = [name for name in calls.names if name.endswith("Destroy")]
    assert gone == [f"nvjpeg{part}Destroy" for part in reversed(STATE_PARTS[:destroyed])]


@pytest.mark.usefixtures("none_made")
def test_engines_that_fail_are_logged_where_the_hybrid_decoder_takes_their_files(wheels, monkeypatch, caplog):
    loads(monkeypatch, lambda name: True)
    refuse(monkeypatch, 5, "BatchDecoder")
    caplog.set_level("INFO", "gpuaug")
    assert names(registry.find("auto", CARD)) == ["hybrid", "cpu"]
    assert "together, because nvJPEG cannot be set up (allocator failure)." in caplog.text
