"""The loops over phases of JPEGs that Numba compiles: the calls of single phases, without the interpreter's lock."""

import ctypes
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from gpuaug.decode import nvjpeg
from gpuaug.decode.decoders import phase_loop

ARGUMENTS = {"parse": 6, "dimensions": 3, "set_format": 2, "set_window": 5, "host": 5, "transfer": 5, "device": 5}
"""Number of arguments of each function of nvJPEG, in the order of ``addresses``."""

HANDLES = {10: (1001, 1002), 20: (2001, 2002), 30: (1001, 1002)}
"""Handles of nvJPEG and of its decoder, by state."""


class Functions:
    """C functions that note their calls. A status is set by (function, state or stream that the call is for)."""

    def __init__(self):
        self.reset()
        self._functions = [self._function(name, number) for name, number in ARGUMENTS.items()]
        self.addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in self._functions]

    def reset(self):
        self.calls, self.statuses, self.size = [], {}, (40, 30)

    def _function(self, name, number):
        def called(*arguments):
            if name == "dimensions":
                for address, side in zip(arguments[1:], self.size, strict=True):
                    ctypes.c_uint32.from_address(address).value = side
                arguments = arguments[:1]
            self.calls.append((name, *arguments))
            return next((status for (of, value), status in self.statuses.items() if of == name and value in arguments), 0)

        return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * number)(called)


@pytest.fixture(scope="module")
def shared_functions():
    return Functions()


@pytest.fixture
def functions(shared_functions):
    shared_functions.reset()
    return shared_functions


@pytest.fixture(scope="module")
def loop(shared_functions):
    """Compiled once for all tests, for the addresses of the functions."""
    try:
        return phase_loop.PhaseLoop(phase_loop.compile_phases(shared_functions.addresses))
    except ImportError:
        pytest.skip("no Numba")


def state(number):
    return SimpleNamespace(
        decoder=SimpleNamespace(handles=HANDLES[number]),
        state=number,
        parameters=number + 1,
        stream=number + 2,
        output_of=lambda address, pitch: (address, pitch) and number + 3,
    )


STATES = [state(10), state(20), state(30)]
FILES = [(address, 7 + address, 30, 40, nvjpeg.OUTPUT_RGBI, (1, 2, 3, 4)) for address in (2**40, 2**40 + 1, 2**46)]


def host_calls(number, file, until="host"):
    address, length, _, _, form, (top, left, height, width) = file
    calls = [
        ("parse", HANDLES[number][0], address, length, 0, 0, number + 2),
        ("dimensions", number + 2),
        ("set_format", number + 1, form),
        ("set_window", number + 1, left, top, width, height),
        ("host", *HANDLES[number], number, number + 1, number + 2),
    ]
    return calls[: list(ARGUMENTS).index(until) + 1]


def test_host_phases_call_as_single_ones_do(functions, loop):
    assert loop.host_phases(STATES, FILES) == ["", "", ""]
    assert functions.calls == [*host_calls(10, FILES[0]), *host_calls(20, FILES[1]), *host_calls(30, FILES[2])]


@pytest.mark.parametrize("fails", ["parse", "dimensions", "host"])
def test_a_file_that_fails_ends_no_other(functions, loop, fails):
    functions.statuses[fails, 22] = 3
    assert loop.host_phases(STATES, FILES) == ["", "nvJPEG finds: bad JPEG", ""]
    assert functions.calls == [*host_calls(10, FILES[0]), *host_calls(20, FILES[1], until=fails), *host_calls(30, FILES[2])]


def test_a_status_that_no_file_causes_is_an_error_of_its_image(functions, loop):
    functions.statuses["host", 20] = 6
    first, error, last = loop.host_phases(STATES, FILES)
    assert (first, last) == ("", "")
    assert isinstance(error, nvjpeg.NvJpegError)
    assert error.status == 6
    assert str(error).startswith("nvjpegDecodeJpegHost must succeed")


def test_a_file_of_another_size_than_its_header_says_is_not_decoded(functions, loop):
    files = [FILES[0], (*FILES[1][:2], 31, *FILES[1][3:]), (*FILES[2][:3], 41, *FILES[2][4:])]
    assert loop.host_phases(STATES, files) == [
        "",
        "nvJPEG finds 40x30 pixels and its header 40x31",
        "nvJPEG finds 40x30 pixels and its header 41x30",
    ]
    assert [name for name, *_ in functions.calls].count("host") == 1


@pytest.mark.parametrize(("fails", "status"), [("transfer", 3), ("device", 10), ("transfer", 6), ("device", 8)])
def test_card_phases_call_as_single_ones_do(functions, loop, fails, status):
    functions.statuses[fails, 20] = status
    first, outcome, last = loop.card_phases(STATES, [(1, 2)] * 3, 77)
    assert (first, last) == ("", "")
    if status in nvjpeg.OF_THE_FILE:
        assert outcome == f"nvJPEG finds: {nvjpeg.STATUS[status]}"
    else:
        assert outcome.status == status
    calls = []
    for number in (10, 20, 30):
        calls.append(("transfer", *HANDLES[number], number, number + 2, 77))
        if (number, fails) != (20, "transfer"):
            calls.append(("device", *HANDLES[number], number, number + 3, 77))
    assert functions.calls == calls


def test_loops_do_not_hold_the_interpreters_lock(loop):
    for function in (loop._run_host_phases, loop._run_card_phases):
        assert function.targetoptions["nogil"]


def test_the_output_of_a_state_is_a_record_of_one_plane():
    made = nvjpeg.PhasedState(None, *range(5))
    record = np.frombuffer((ctypes.c_byte * nvjpeg.OUTPUT.itemsize).from_address(made.output_of(2**40, 99)), nvjpeg.OUTPUT)[0]
    assert record["channel"].tolist() == [2**40, 0, 0, 0]
    assert record["pitch"].tolist() == [99, 0, 0, 0]


def test_without_numba_phases_run_one_by_one(monkeypatch):
    numbers = count()
    decoder = SimpleNamespace(addresses=[], host_phase=lambda *_: str(next(numbers)), card_phase=lambda *_: str(next(numbers)))
    monkeypatch.setattr(phase_loop, "compiled_or_none", lambda *_: None)
    phases = phase_loop.phases(decoder)
    assert phases.most_images == 1
    states = [SimpleNamespace(decoder=decoder)] * 3
    assert phases.host_phases(states, FILES) == ["0", "1", "2"]
    assert phases.card_phases(states, [(1, 2)] * 3, 77) == ["3", "4", "5"]
