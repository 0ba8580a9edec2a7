"""pytest plugin for ``TORCH_CUDA_SANITIZER=1``: what PyTorch's sanitizer must know about memory and threads.

The sanitizer stores accesses by the address of a tensor's first element. It forgets the accesses at an address when memory that
begins there is freed or allocated. An image of a ragged batch begins inside of allocated memory. Without this plugin, accesses
to the image would be compared with accesses to an image of a later batch at the same address, although the allocator orders
both batches. The plugin forgets the accesses at all addresses of memory that is freed or allocated.

The sanitizer takes ``unsafe_split``, which returns views, for a kernel that writes, because the signature names no aliases.
"""

import bisect
import functools
import re
import threading


class Memory:
    """Addresses of allocated memory, in order, and the accesses that the sanitizer stores."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.starts = []

    def allocated(self, address):
        index = bisect.bisect_left(self.starts, address)
        if self.starts[index : index + 1] != [address]:
            self.starts.insert(index, address)
        self.forget_inside(index)

    def freed(self, address):
        index = bisect.bisect_left(self.starts, address)
        if self.starts[index : index + 1] == [address]:
            self.forget_inside(index)
            del self.starts[index]

    def forget_inside(self, index):
        """Forget accesses between the start of the memory with this index and the next start."""
        start, *following = self.starts[index : index + 2]
        end = following[0] if following else float("inf")
        for address in [address for address in list(self.tensors.accesses) if start < address < end]:
            self.tensors.accesses.pop(address, None)


def one_at_a_time(method, lock):
    """Return a method that waits for the lock: the sanitizer is called by all threads, and does not expect them."""

    @functools.wraps(method)
    def locked(*arguments):
        with lock:
            return method(*arguments)

    return locked


def pytest_configure():
    """Extend the sanitizer, which ``import torch`` has enabled."""
    from torch.cuda import _gpu_trace, _sanitizer

    handler = _sanitizer.cuda_sanitizer.dispatch.event_handler
    memory, lock = Memory(handler.tensors_accessed), threading.RLock()
    _gpu_trace.register_callback_for_memory_allocation(one_at_a_time(memory.allocated, lock))
    _gpu_trace.register_callback_for_memory_deallocation(one_at_a_time(memory.freed, lock))
    pattern = _sanitizer.FACTORY_FUNCTION_REGEX.pattern
    _sanitizer.FACTORY_FUNCTION_REGEX = re.compile(f"(?:{pattern})|aten::unsafe_split")  # reads and writes no values
    for name, method in list(vars(_sanitizer.StreamSynchronizations).items()):
        if not name.startswith("__"):
            setattr(_sanitizer.StreamSynchronizations, name, one_at_a_time(method, lock))
