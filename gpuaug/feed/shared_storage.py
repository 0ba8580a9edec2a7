"""Shared memory of tensors that workers send without the ring: anonymous files in place of ``/dev/shm``.

The first batches of an epoch, batches that fit into no slot, and all batches of a plain feed travel as torch sends tensors: in
shared memory, whose descriptor is sent. torch takes that memory from ``/dev/shm``, which has 64 MB in a container by default,
and a worker that cannot get memory there ends with a bus error. A memfd is the same kind of memory without that limit.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch import UntypedStorage
from torch.multiprocessing import get_sharing_strategy, reductions

from gpuaug.core.errors import GpuAugError

_is_supported = sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(UntypedStorage, "_new_using_fd_cpu")


def use_memfd() -> None:
    """Have this process, a worker, allocate shared tensors in memfds, and send others in them."""
    if _is_supported:
        ForkingPickler.register(UntypedStorage, _reduced)
        UntypedStorage._new_using_fd_cpu = classmethod(_allocated)  # type: ignore[assignment,method-assign]


@contextmanager
def sending_memfd() -> Iterator[None]:
    """A block in which this process sends tensors in memfds, such as the tensors of a dataset to spawned workers."""
    reducers: dict[Any, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    own = reducers.get(UntypedStorage)
    if _is_supported:
        ForkingPickler.register(UntypedStorage, _reduced)
    try:
        yield
    finally:
        if own is not None:
            reducers[UntypedStorage] = own


def _allocated(cls: Any, size: int) -> UntypedStorage:
    """A storage of ``size`` bytes in a memfd, which torch takes for shared.

    Raises:
        GpuAugError: If the memory cannot be had.
    """
    try:
        fd = os.memfd_create("gpuaug-tensor")
        try:
            os.ftruncate(fd, size)
            storage: UntypedStorage = cls._new_shared_fd_cpu(fd, size)  # with a copy of the descriptor
            return storage
        finally:
            os.close(fd)
    except (OSError, RuntimeError) as error:
        raise GpuAugError(
            f"A worker could not send a batch, because {size / 1e6:.1f} MB of memory cannot be had ({error}). Lower "
            "batch_size, prefetch_factor or num_workers of the DataLoader."
        ) from error


def _reduced(storage: Any) -> Any:
    """Reduce a storage for pickling: to the descriptor of a memfd with its bytes, unless it is shared already."""
    plain = storage.device.type == "cpu" and storage.nbytes() and get_sharing_strategy() == "file_descriptor"
    if not plain or storage.is_shared():
        return reductions.reduce_storage(storage)
    # Kept with the storage: a process that is spawned after this inherits the descriptor, which must be open until then.
    copy = getattr(storage, "_gpuaug_copy", None)
    if copy is None:
        copy = storage._gpuaug_copy = _allocated(UntypedStorage, storage.nbytes())
    copy.copy_(storage)
    return reductions.reduce_storage(copy)
