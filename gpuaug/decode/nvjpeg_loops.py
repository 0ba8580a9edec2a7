"""Loops over files that call nvJPEG's functions by address, for ``nvjpeg.py``.

Numba compiles the loops if it is installed. A thread then takes the interpreter's lock once per loop. With one call from Python
per image, threads waited for the lock: of 16 cores, 10 were busy.

The *host phase* of an image runs on a CPU thread; then its *card phase* is queued on a CUDA stream of the GPU (*card*). The
*JPEG engines* are the JPEG decoding hardware of some GPUs. A *window* is the part of an image that is decoded.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuaug.decode.c_calls import LOW, compile_once, compiled_or_python

OUTPUT = np.dtype([("channel", np.uint64, 4), ("pitch", np.uint64, 4)])
"""``nvjpegImage_t``: device addresses of the planes, and their pitches in bytes."""

FILE = np.dtype(
    [
        ("output", OUTPUT),
        *((name, np.int64) for name in ("work", "index", "address", "length", "height", "width")),
        *((name, np.int64) for name in ("top", "left", "window_height", "window_width")),
        *((name, np.int64) for name in ("form", "group", "parameters", "status")),
        *((name, np.uint32) for name in ("components", "subsampling", "found_width")),
        ("other_widths", np.uint32, 3),
        ("found_height", np.uint32),
        ("other_heights", np.uint32, 3),
    ]
)
"""Structured dtype: arguments and results of decoding one file of a batch. Sizes and windows are in pixels.

- ``output``: device memory for the pixels
- ``work``, ``index``: number of the member of the batch (only set for the JPEG engines), and index of the image in the member
- ``address``, ``length``: host address of the file, and its number of bytes
- ``height``, ``width``: size in the header of the file
- ``top``, ``left``, ``window_height``, ``window_width``: part of the image to decode
- ``form``: output format, ``OUTPUT_Y`` or ``OUTPUT_RGBI`` of ``nvjpeg.py``
- ``group``, ``parameters``: for the JPEG engines, group and handle of decoding parameters (``nvjpeg.BatchDecoder``)
- ``status``, ``found_width``, ``found_height``: results of the loops: status, and size by nvJPEG's parser
- ``components``, ``subsampling``, ``other_widths``, ``other_heights``: further results of ``nvjpegGetImageInfo``, not used
"""

CALL = np.dtype(
    [
        *((name, np.int64) for name in ("state", "count", "form")),
        *((name, np.int64) for name in ("address", "length", "output", "parameters", "status")),
    ]
)
"""Structured dtype: arguments and result of one call of the JPEG engines.

- ``state``: handle of the decoding state (``nvjpegJpegState_t``)
- ``count``, ``form``: number of files, and their output format
- ``address``, ``length``, ``output``, ``parameters``: addresses of contiguous arrays with these fields of the files.
  ``parameters`` is 0 if the files are decoded whole
- ``status``: result
"""

OTHER_SIZE = -1
"""Status of a file whose size, by nvJPEG's parser, differs from the size in its header."""


class Loops(NamedTuple):
    """The loops. For their arguments see ``define_loops``."""

    find_sizes: Callable[..., None]
    """Parse the files, and store their sizes in ``files``."""
    set_windows: Callable[..., None]
    """Set the output formats and windows of the files in their decoding parameters, and store the statuses in ``files``."""
    decode_batches: Callable[..., None]
    """Make calls of the JPEG engines one after the other, each after the GPU work of the call before, and store statuses."""
    host_phases: Callable[..., None]
    """Run the host phases of the files, and store their statuses in ``files``."""
    card_phases: Callable[..., None]
    """Queue the card phases of the files, and store their statuses in ``files``."""


NAMES = (
    *("nvjpegGetImageInfo", "nvjpegDecodeParamsSetROI", "nvjpegJpegStreamParse", "nvjpegJpegStreamGetFrameDimensions"),
    *(
        "nvjpegDecodeParamsSetOutputFormat",
        "nvjpegDecodeJpegHost",
        "nvjpegDecodeJpegTransferToDevice",
        "nvjpegDecodeJpegDevice",
    ),
    *("nvjpegDecodeBatchedInitialize", "nvjpegDecodeBatched", "nvjpegDecodeBatchedEx"),
)
"""Names of the functions that the loops call. The argument ``functions`` of a loop has their addresses, in this order."""

_FILE_BYTES, _FOUND_OFFSET = FILE.itemsize, FILE.itemsize - 40
"""Number of bytes of a ``FILE``, and offset of its field ``components``, the first of ten numbers of 4 bytes."""


@compile_once
def loops() -> Loops:
    """Return the loops, compiled by Numba if it is installed.

    Cost:
        Two seconds in the first call of a process with Numba.
    """
    result = compiled_or_python("call nvJPEG", define_loops)
    assert result is not None  # nvJPEG exists for supported machines only
    return result


def define_loops(call: Any, call_unlocked: Any, compile_function: Any) -> Loops:
    """Define the loops. For the arguments of this function see ``compiled_or_python``.

    Arguments of the loops, in which addresses and handles are integers: ``functions``, the addresses of the functions
    ``NAMES``; ``files``, (n,) ``FILE``; ``address``, the address of ``files``;
    ``states``, (n, 5) handles per file (``nvjpeg.PhasedState.handles``); ``calls``, (n,) ``CALL``; ``synchronize``, the address
    of ``cudaStreamSynchronize``.
    """

    @compile_function  # type: ignore[untyped-decorator]
    def find_sizes(functions: NDArray[np.int64], handle: int, files: NDArray[np.void], address: int) -> None:
        for index in range(len(files)):
            file: Any = files[index]
            found = address + index * _FILE_BYTES + _FOUND_OFFSET
            # The last four arguments are the addresses of ``components`` and ``subsampling``, and of four widths and heights.
            arguments = (handle, file["address"], file["length"], found, found + 4, found + 8, found + 24)
            if call(functions[0], arguments) & LOW:  # nvjpegGetImageInfo
                file["found_width"] = file["found_height"] = 0

    @compile_function  # type: ignore[untyped-decorator]
    def set_window(functions: NDArray[np.int64], parameters: int, file: Any) -> Any:
        # nvjpegDecodeParamsSetOutputFormat
        status = call(functions[4], (parameters, file["form"])) & LOW
        if status == 0:
            # nvjpegDecodeParamsSetROI
            left, top, width, height = file["left"], file["top"], file["window_width"], file["window_height"]
            status = call(functions[1], (parameters, left, top, width, height)) & LOW
        return status

    @compile_function  # type: ignore[untyped-decorator]
    def set_windows(functions: NDArray[np.int64], files: NDArray[np.void]) -> None:
        for index in range(len(files)):
            files[index]["status"] = set_window(functions, files[index]["parameters"], files[index])

    @compile_function  # type: ignore[untyped-decorator]
    def decode_batches(
        functions: NDArray[np.int64], calls: NDArray[np.void], handle: int, cuda_stream: int, synchronize: int
    ) -> None:
        for index in range(len(calls)):
            record: Any = calls[index]
            batch = (handle, record["state"], record["address"], record["length"], record["output"])
            # nvjpegDecodeBatchedInitialize, which takes about 15 µs. The 1 is the number of CPU threads.
            status = call_unlocked(functions[8], (handle, record["state"], record["count"], 1, record["form"])) & LOW
            if status == 0 and record["parameters"]:
                # nvjpegDecodeBatchedEx
                status = call_unlocked(functions[10], (*batch, record["parameters"], cuda_stream)) & LOW
            elif status == 0:
                # nvjpegDecodeBatched
                status = call_unlocked(functions[9], (*batch, cuda_stream)) & LOW
            # The GPU work of a call, a colour conversion of less than 1 ms, must not overlap the next call.
            call_unlocked(synchronize, (cuda_stream,))
            record["status"] = status

    @compile_function  # type: ignore[untyped-decorator]
    def host_phases(functions: NDArray[np.int64], states: NDArray[np.int64], files: NDArray[np.void], address: int) -> None:
        for index in range(len(files)):
            file: Any = files[index]
            handle, decoder, state = states[index, 0], states[index, 1], states[index, 2]
            parameters, parsed_file = states[index, 3], states[index, 4]
            # nvjpegJpegStreamParse. The zeros: no copies of the metadata and of the file are kept.
            status = call_unlocked(functions[2], (handle, file["address"], file["length"], 0, 0, parsed_file)) & LOW
            if status == 0:
                found = address + index * _FILE_BYTES + _FOUND_OFFSET
                # nvjpegJpegStreamGetFrameDimensions writes ``found_width`` and ``found_height``.
                status = call(functions[3], (parsed_file, found + 8, found + 24)) & LOW
            if status == 0 and (file["found_width"] != file["width"] or file["found_height"] != file["height"]):
                status = OTHER_SIZE
            if status == 0:
                status = set_window(functions, parameters, file)
            if status == 0:
                # nvjpegDecodeJpegHost
                status = call_unlocked(functions[5], (handle, decoder, state, parameters, parsed_file)) & LOW
            file["status"] = status

    @compile_function  # type: ignore[untyped-decorator]
    def card_phases(
        functions: NDArray[np.int64], states: NDArray[np.int64], files: NDArray[np.void], address: int, cuda_stream: int
    ) -> None:
        for index in range(len(files)):
            handle, decoder, state, parsed_file = states[index, 0], states[index, 1], states[index, 2], states[index, 4]
            output = address + index * _FILE_BYTES  # address of ``output``, the first field of ``FILE``
            # nvjpegDecodeJpegTransferToDevice
            status = call_unlocked(functions[6], (handle, decoder, state, parsed_file, cuda_stream)) & LOW
            if status == 0:
                # nvjpegDecodeJpegDevice
                status = call_unlocked(functions[7], (handle, decoder, state, output, cuda_stream)) & LOW
            files[index]["status"] = status

    return Loops(find_sizes, set_windows, decode_batches, host_phases, card_phases)
