"""Shared memory of tensors that workers send without the ring: anonymous files (memfd) instead of ``/dev/shm``.

The ring is gpuaug's shared memory for batches, divided into slots. Batches that are sent before the ring has slots, batches
that do not fit into a slot, and all batches with ``feed="plain"`` are sent in torch's shared memory. torch allocates this
memory in ``/dev/shm``, which has 64 MB in a container by default. A worker that exceeds this limit is killed by a bus error. A
memfd is shared memory without the limit.
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
    """Make this process, a worker, allocate shared tensors in memfds, and copy other tensors that it sends to memfds."""
    if _is_supported:
        ForkingPickler.register(UntypedStorage, _reduce_storage)
        UntypedStorage._new_using_fd_cpu = classmethod(_allocated)  # type: ignore[assignment,method-assign]


@contextmanager
def sending_memfd() -> Iterator[None]:
    """Context manager in which this process sends tensors in memfds, such as tensors of a dataset to spawned workers."""
    reducers: dict[Any, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    saved = reducers.get(UntypedStorage)
    if _is_supported:
        ForkingPickler.register(UntypedStorage, _reduce_storage)
    try:
        yield
    finally:
        if saved is not None:
            reducers[UntypedStorage] = saved


def _allocated(cls: Any, size: int) -> UntypedStorage:
    """Allocate a storage of ``size`` bytes in a memfd, which torch treats as shared memory.

    Raises:
        GpuAugError: If the memory cannot be allocated.
    """
    try:
        fd = os.memfd_create("gpuaug-tensor")
        try:
            os.ftruncate(fd, size)
            storage: UntypedStorage = cls._new_shared_fd_cpu(fd, size)  # duplicates the descriptor
            return storage
        finally:
            os.close(fd)
    except (OSError, RuntimeError) as error:
        raise GpuAugError(
            f"A worker could not send a batch, because {size / 1e6:.1f} MB of memory cannot be allocated ({error}). Lower "
            "batch_size, prefetch_factor or num_workers of the DataLoader."
        ) from error


def _reduce_storage(storage: Any) -> Any:
    """Reduce a storage for pickling to the descriptor of its shared memory. Copy a storage in other memory to a memfd."""
    can_be_shared = storage.device.type == "cpu" and storage.nbytes() and get_sharing_strategy() == "file_descriptor"
    if not can_be_shared or storage.is_shared():
        return reductions.reduce_storage(storage)
    # Stored as an attribute of the original, because the copy's descriptor must stay open until a spawned process inherits it.
    copy = getattr(storage, "_gpuaug_copy", None)
    if copy is None:
        copy = storage._gpuaug_copy = _allocated(UntypedStorage, storage.nbytes())
    copy.copy_(storage)
    return reductions.reduce_storage(copy)
