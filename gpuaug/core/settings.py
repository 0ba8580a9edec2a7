"""Settings of torch that a program may change: autocast, the default device and the default dtype.

gpuaug passes ``device`` and ``dtype`` whenever it creates a tensor, so the settings do not change its results. This module
protects calls of other libraries, which may not pass both.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

_DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu")


def autocasts() -> bool:
    """Return whether autocast is on for any type of device. Takes less than 1 µs."""
    return any(map(torch.is_autocast_enabled, _DEVICE_TYPES))


@contextmanager
def without_autocast() -> Iterator[None]:
    """Context manager in which autocast is off for all types of devices."""
    with ExitStack() as stack:
        for device_type in _DEVICE_TYPES:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def default_device() -> torch.device:
    """Return the device of tensors that are created without ``device=``.

    ``torch.get_default_device()`` is not used: in torch 2.8 it raises an error after a default device was set and unset.
    """
    return torch.empty(0).device


def on_host() -> AbstractContextManager[Any]:
    """Return a context manager in which the CPU is this thread's default device."""
    return nullcontext() if default_device().type == "cpu" else torch.device("cpu")


@contextmanager
def initial_settings() -> Iterator[None]:
    """Context manager with torch's initial settings, for modules that create tensors without ``device`` and ``dtype``.

    The default dtype belongs to the whole process, so other threads see the change.
    """
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(on_host())
        stack.enter_context(without_autocast())
        if dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        yield
