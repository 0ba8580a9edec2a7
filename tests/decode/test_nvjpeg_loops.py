"""Loops over files that call nvJPEG's functions by address: compiled, without the interpreter's lock, and in Python."""

import ctypes
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from gpuaug.decode import c_calls, nvjpeg, nvjpeg_loops

ARGUMENTS = {
    "image_info": 7,
    "set_window": 5,
    "parse": 6,
    "dimensions": 3,
    "set_format": 2,
    "host": 5,
    "transfer": 5,
    "device": 5,
    "initialize": 5,
    "batch": 6,
    "batch of windows": 7,
    "synchronize": 1,
}
"""Number of arguments of each function of nvJPEG, in the order of ``NAMES``, and of one of CUDA."""


class Functions:
    """C functions that note their calls. A status is set by (function, state or stream that the call is for)."""

    def __init__(self):
        self.reset()
        self._functions = [self._function(name, number) for name, number in ARGUMENTS.items()]
        self.addresses = np.array([ctypes.cast(function, ctypes.c_void_p).value for function in self._functions])

    def reset(self):
        self.calls, self.statuses, self.size = [], {}, (40, 30)

    def _function(self, name, number):
        def called(*arguments):
            if name == "dimensions":
                for address, side in zip(arguments[1:], self.size, strict=True):
                    ctypes.c_uint32.from_address(address).value = side
                arguments = arguments[:1]
            if name == "image_info":
                _, address, length, components, subsampling, widths, heights = arguments
                for field, value in ((components, 3), (subsampling, 2)):
                    ctypes.c_int.from_address(field).value = value
                (ctypes.c_int * 4).from_address(widths)[:] = [address, address // 2, 1, 0]
                (ctypes.c_int * 4).from_address(heights)[:] = [length, length // 2, 1, 0]
            if name == "device":
                data = ctypes.string_at(arguments[3], nvjpeg_loops.OUTPUT.itemsize)
                record = np.frombuffer(data, nvjpeg_loops.OUTPUT)[0]
                outputs = record["channel"].tolist(), record["pitch"].tolist()
                arguments = (*arguments[:3], outputs, arguments[4])
            if name.startswith("batch"):  # in place of each array, the field of the third file
                library, state, *arrays, stream = arguments
                sizes = (8, 8, nvjpeg_loops.OUTPUT.itemsize, 8)
                fields = [
                    ctypes.c_int64.from_address(array + 2 * size).value for array, size in zip(arrays, sizes, strict=False)
                ]
                arguments = (library, state, *fields, stream)
            self.calls.append((name, *arguments))
            return next((status for (of, value), status in self.statuses.items() if of == name and value in arguments), 0)

        return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * number)(called)


@pytest.fixture(scope="module")
def shared_functions():
    return Functions()


@pytest.fixture(params=["compiled", "in Python"])
def functions(request, shared_functions, monkeypatch):
    if request.param == "in Python":
        monkeypatch.setattr(nvjpeg, "loops", lambda: c_calls.in_python(nvjpeg_loops.define_loops))
    else:
        pytest.importorskip("numba")
    shared_functions.reset()
    return shared_functions


@pytest.fixture
def decoder(functions):
    """A decoder of the package whose library is ``functions``."""
    decoder = object.__new__(nvjpeg.PhasedDecoder)
    decoder._addresses = functions.addresses
    return decoder


STATES = [nvjpeg.PhasedState((number, number + 1, number + 2, number + 3, number + 4), 0, 0) for number in (10, 20, 30)]


def files():
    made = np.zeros(3, nvjpeg_loops.FILE)
    made["address"], made["length"], made["height"], made["width"] = (2**40, 2**40 + 1, 2**46), (7, 8, 9), 30, 40
    made["top"], made["left"], made["window_height"], made["window_width"], made["form"] = 1, 2, 3, 4, nvjpeg.OUTPUT_RGBI
    made["output"]["channel"][:, 0], made["output"]["pitch"][:, 0] = 2**41, 99
    return made


def host_calls(state, file, until="host"):
    library, decoder, single, parameters, stream = state.handles
    calls = [
        ("parse", library, file["address"], file["length"], 0, 0, stream),
        ("dimensions", stream),
        ("set_format", parameters, nvjpeg.OUTPUT_RGBI),
        ("set_window", parameters, 2, 1, 4, 3),
        ("host", library, decoder, single, parameters, stream),
    ]
    return calls[: [name for name, *_ in calls].index(until) + 1]


@pytest.mark.parametrize("fails", [None, "parse", "dimensions", "set_format", "set_window", "host"])
def test_a_file_that_fails_ends_no_other(functions, decoder, fails):
    functions.statuses = {(fails, 23): 3, (fails, 24): 3}  # decoding parameters and parsed file of the second state
    outcomes = decoder.host_phases(STATES, files())
    assert outcomes == ["", "nvJPEG finds: bad JPEG" if fails else "", ""]
    ends = "host", fails or "host", "host"
    expected = zip(STATES, files(), ends, strict=True)
    assert functions.calls == [call for state, file, end in expected for call in host_calls(state, file, end)]


def test_a_status_that_no_file_causes_is_an_error_of_its_image(functions, decoder):
    functions.statuses["host", 20] = 6
    first, error, last = decoder.host_phases(STATES, files())
    assert (first, last) == ("", "")
    assert isinstance(error, nvjpeg.NvJpegError)
    assert error.status == 6
    assert str(error).startswith("nvjpegDecodeJpegHost must succeed")


def test_a_file_of_another_size_than_its_header_says_is_not_decoded(functions, decoder):
    others = files()
    others["height"][1], others["width"][2] = 31, 41
    assert decoder.host_phases(STATES, others) == [
        "",
        "nvJPEG finds 40x30 pixels and its header 40x31",
        "nvJPEG finds 40x30 pixels and its header 41x30",
    ]
    assert [name for name, *_ in functions.calls].count("host") == 1


@pytest.mark.parametrize(("fails", "status"), [("transfer", 3), ("device", 10), ("transfer", 6), ("device", 8)])
def test_card_phases_of_other_images_follow_one_that_fails(functions, decoder, fails, status):
    functions.statuses[fails, 20] = status
    first, outcome, last = decoder.card_phases(STATES, files(), 77)
    assert (first, last) == ("", "")
    if status in nvjpeg.OF_THE_FILE:
        assert outcome == f"nvJPEG finds: {nvjpeg.STATUS[status]}"
    else:
        assert outcome.status == status
    calls = []
    for state in STATES:
        library, decoder_, single, _, stream = state.handles
        calls.append(("transfer", library, decoder_, single, stream, 77))
        if (library, fails) != (20, "transfer"):
            calls.append(("device", library, decoder_, single, ([2**41, 0, 0, 0], [99, 0, 0, 0]), 77))
    assert functions.calls == calls
    assert decoder.card_phases([], files()[:0], 77) == []


@pytest.fixture
def engines(functions):
    """A ``BatchDecoder`` of the package whose library is ``functions``."""
    decoder = object.__new__(nvjpeg.BatchDecoder)
    decoder._addresses, decoder._handle = functions.addresses, SimpleNamespace(value=77)
    decoder._idle_parameters = [100, 101, 102, 103]
    decoder._synchronize = int(functions.addresses[-1])
    decoder._states, decoder._first_state = {}, 10
    states = iter((11,))

    def created(name, *arguments):
        for state in states:
            return state
        raise nvjpeg.NvJpegError(name, 5)

    decoder._create_object = created
    return decoder


def engine_calls(state, length, parameters=()):
    """Calls of three files, by the fields of the last file, and the wait after them."""
    name = "batch of windows" if parameters else "batch"
    fields = (2**40 + 2, length, 2**41, *parameters)
    return [("initialize", 77, state, 3, 1, nvjpeg.OUTPUT_RGBI), (name, 77, state, *fields, 55), ("synchronize", 55)]


def group_of(number, length=9):
    table = files()
    table["group"], table["length"] = number, length
    table["address"] = 2**40 + np.arange(3)
    return table


def test_each_call_of_the_engines_has_the_state_of_its_group_and_is_waited_for(functions, engines):
    """The third group has the first state, because no more can be created."""
    windows = group_of(5, 40)
    engines.set_windows(windows)
    functions.calls.clear()
    groups = [group_of(3, 20), group_of(4, 30), windows, group_of(3, 50)]
    assert engines.decode(groups, 55) == [0, 0, 0, 0]
    assert functions.calls == [
        *engine_calls(10, 20),
        *engine_calls(11, 30),
        *engine_calls(10, 40, windows["parameters"].tolist()[-1:]),
        *engine_calls(10, 50),
    ]


@pytest.mark.parametrize("function", ["initialize", "batch"])
@pytest.mark.parametrize("status", [3, 6])
def test_a_call_of_the_engines_that_fails_ends_no_other(functions, engines, function, status):
    groups = [group_of(3, 20), group_of(4, 30)]
    functions.statuses[function, 10] = status
    if status in nvjpeg.OF_THE_FILE:
        assert engines.decode(groups, 55) == [status, 0]
    else:
        with pytest.raises(nvjpeg.NvJpegError, match="execution failed"):
            engines.decode(groups, 55)
    failed = [call for call in engine_calls(10, 20) if function == "batch" or not call[0].startswith("batch")]
    assert functions.calls == [*failed, *engine_calls(11, 30)]


def test_sizes_of_files_are_those_of_their_first_component_or_zero(functions, engines):
    table = files()
    table["address"], table["length"] = (500, 600, 700), (20, 30, 40)
    functions.statuses["image_info", 600] = 3
    engines.find_sizes(table)
    assert table[["found_height", "found_width"]].tolist() == [(20, 500), (0, 0), (40, 700)]
    assert [arguments[0] for _, *arguments in functions.calls] == [77] * 3


def test_windows_are_set_as_left_top_width_and_height(functions, engines):
    table = files()
    engines.set_windows(table)
    calls = [(("set_format", number, nvjpeg.OUTPUT_RGBI), ("set_window", number, 2, 1, 4, 3)) for number in (103, 102, 101)]
    assert functions.calls == [*itertools.chain(*calls)]
    assert engines._idle_parameters == [100]
    engines.put_back(table)
    assert engines._idle_parameters == [100, 103, 102, 101]


@pytest.mark.parametrize("fails", ["set_format", "set_window"])
def test_parameters_that_nvjpeg_refuses_are_an_error(functions, engines, fails):
    functions.statuses[fails, 102] = 2
    with pytest.raises(nvjpeg.NvJpegError, match=r"nvjpegDecodeParamsSetROI must succeed, got status 2 \(invalid parameter\)"):
        engines.set_windows(files())


def test_compiled_loops_do_not_hold_the_interpreters_lock():
    pytest.importorskip("numba")
    assert all(loop.targetoptions["nogil"] for loop in nvjpeg.loops())
