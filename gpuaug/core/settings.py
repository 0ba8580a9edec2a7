"""Settings of torch that a program may change: autocast, the default device and the default dtype.

They are the program's own business, and change nothing in what gpuaug gives. Code of gpuaug says on which device and of which
dtype a tensor is made; what follows is for where it cannot.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for operations on ``device``."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def on_host() -> AbstractContextManager[Any]:
    """A block in which tensors are made on the host where nothing says where: the thread's default device is the CPU."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


@contextmanager
def initial_settings(device: torch.device) -> Iterator[None]:
    """A block with the settings that torch starts with, for modules that make tensors of their own and work on ``device``.

    The default dtype is that of the whole process: another thread sees it, too.
    """
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(on_host())
        for kind in {device.type, "cpu"}:
            if autocasts(torch.device(kind)):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        yield
