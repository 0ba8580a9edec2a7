"""Kernels of a call on a GPU, and operations on a CPU that would be kernels on a GPU."""

from contextlib import contextmanager

import torch
from torch.autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def synchronisation_is_error():
    """Within the ``with`` statement, an operation of torch that waits for the GPU is an error."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def kernels_of(call):
    """Return the names of the kernels that a call launches, sorted. Fails if the call waits for the GPU."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        with synchronisation_is_error():
            call()
        torch.cuda.synchronize()
    on_device = [event.name for event in profile.events() if event.device_type == DeviceType.CUDA]
    return sorted(name for name in on_device if not name.startswith("Mem"))


class Launches(TorchDispatchMode):
    """Counts the operations that would be kernels on a GPU, and refuses those for which the host would wait."""

    VIEWS = ("slice", "select", "view", "unsqueeze", "expand", "permute", "alias", "reshape", "detach", "split")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "index", "is_nonzero", "equal"), f"{name} waits"
        if not name.strip("_").startswith(self.VIEWS):
            self.names.append(name)
        return function(*args, **(kwargs or {}))
