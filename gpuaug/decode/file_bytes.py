"""Access to the bytes of an image or a video, in a file or in memory."""

import errno
import os
import stat
from io import FileIO
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.decode.limits import MAX_FILE_BYTES, LimitError

_NOT_REGULAR = "it is not a regular file"

_OPEN_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
"""Flags that open a FIFO without waiting for its writer, and a terminal without making it the process's controlling one."""


def open_file(path: str) -> FileIO:
    """Open a regular file for reading, without waiting for the writer of a FIFO.

    Raises:
        LimitError: If the file is not a regular file, such as a FIFO or a device.
        OSError: If the file does not exist, or cannot be opened.
        ValueError: If the path contains a null character.
    """
    try:
        file = FileIO(path, opener=lambda name, flags: os.open(name, flags | _OPEN_FLAGS))
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise LimitError(_NOT_REGULAR) from None
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise LimitError(_NOT_REGULAR)
    return file


def check_size(size: int) -> int:
    """Return the size of a file in bytes.

    Raises:
        LimitError: If the file is too large to be read.
    """
    if size > MAX_FILE_BYTES:
        raise LimitError(f"its {size} bytes exceed the limit of {MAX_FILE_BYTES} bytes")
    return size


def file_problem(error: Exception) -> str:
    """Return the reason why a file cannot be read, without its path, which the error message names."""
    if isinstance(error, OSError) and error.errno:
        return f"[Errno {error.errno}] {error.strerror}"
    return str(error) or type(error).__name__


def is_bytes(value: Any) -> bool:
    """Return whether ``value`` is bytes, or a uint8 tensor or array (n,) on the host."""
    if isinstance(value, bytes | bytearray | memoryview):
        return True
    if isinstance(value, Tensor):
        return value.dtype is torch.uint8 and value.ndim == 1 and value.is_cpu
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 1


def bytes_view(value: Any) -> memoryview:
    """Return the bytes of a value for which ``is_bytes`` is true, without a copy if they are contiguous."""
    view = memoryview(value.numpy() if isinstance(value, Tensor) else value)  # type: ignore[arg-type]
    return view if view.format == "B" and view.ndim == 1 else memoryview(view.tobytes())
