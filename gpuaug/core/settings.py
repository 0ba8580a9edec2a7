"""Settings of torch that a program may change: autocast, the default device and the default dtype.

They are the program's own business, and change nothing in what gpuaug gives. Code of gpuaug says on which device and of which
dtype a tensor is made; what follows is for where it cannot.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

_KINDS = ("cpu", "cuda", "mps", "xpu")


def autocasts() -> bool:
    """Whether autocast is on for a type of device, in a fraction of a microsecond."""
    return torch._C._is_any_autocast_enabled()


@contextmanager
def without_autocast() -> Iterator[None]:
    """A block in which autocast is off for all types of devices."""
    with ExitStack() as stack:
        for kind in _KINDS:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def default_device() -> torch.device:
    """The device of tensors that are made without ``device=``.

    ``torch.get_default_device()`` of torch 2.8 raises once a default was set and unset.
    """
    return torch.empty(0).device


def on_host() -> AbstractContextManager[Any]:
    """A block in which this thread's default device is the CPU."""
    return nullcontext() if default_device().type == "cpu" else torch.device("cpu")


@contextmanager
def initial_settings() -> Iterator[None]:
    """A block with the settings that torch starts with, for modules that make tensors of their own.

    The default dtype is that of the whole process: another thread sees it, too.
    """
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(on_host())
        stack.enter_context(without_autocast())
        if dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        yield
