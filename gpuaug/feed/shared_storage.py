"""Shared memory of tensors that workers send without the ring: anonymous files (memfd) instead of ``/dev/shm``.

The ring is gpuaug's shared memory for batches, divided into slots. Batches that are sent before the ring has slots, batches
that do not fit into a slot, and all batches with ``feed="plain"`` are sent in torch's shared memory. torch allocates this
memory in ``/dev/shm``, which has 64 MB in a container by default. A worker that exceeds this limit is killed by a bus error. A
memfd is shared memory without the limit.

Private names, tried with torch 2.8 and 2.14: ``UntypedStorage._new_using_fd_cpu``, which torch calls to allocate shared memory,
``_new_shared_fd_cpu``, and ``ForkingPickler._extra_reducers``, to restore a reducer.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing import get_sharing_strategy, reductions

from gpuaug.core.batch import cached_by_id
from gpuaug.core.errors import GpuAugError

_is_supported = sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(UntypedStorage, "_new_using_fd_cpu")

_LARGE_BYTES = 2**20
"""Size of a large storage. A tensor with less than half of a large storage is sent without the rest of the storage."""


def use_memfd() -> None:
    """Make this process, a worker, allocate shared tensors in memfds, and copy other tensors that it sends to memfds.

    Every batch has separate memory: a tensor that is sent again does not change the batch that was sent before.
    """
    if _is_supported:
        ForkingPickler.register(Tensor, _reduce_tensor)
        ForkingPickler.register(UntypedStorage, _reduce_storage)
        UntypedStorage._new_using_fd_cpu = classmethod(_allocated)  # type: ignore[assignment,method-assign]


_lock = threading.RLock()
"""Lock that a thread holds in ``sending_memfd``, because the context replaces a reducer of the process."""


@contextmanager
def sending_memfd() -> Iterator[None]:
    """Context manager in which this process sends tensors in memfds, such as tensors of a dataset to spawned workers.

    All workers that are started in the context share one copy of a storage. Other threads wait before they enter the context.
    """
    in_memfd_once = cached_by_id(_in_memfd)  # keeps the copies, because a spawned process inherits their descriptors

    def reduce_once(storage: Any) -> Any:
        return reductions.reduce_storage(in_memfd_once(storage))

    reducers: dict[Any, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    with _lock:
        saved = reducers.get(UntypedStorage)
        if _is_supported:
            ForkingPickler.register(UntypedStorage, reduce_once)
        try:
            yield
        finally:
            if saved is not None:
                reducers[UntypedStorage] = saved


def private_memfd(name: str) -> int:
    """Return the descriptor of a new memfd that only processes of the same user can open, through ``/proc``."""
    fd = os.memfd_create(name)  # with mode 0777
    os.fchmod(fd, 0o600)
    return fd


def _allocated(cls: Any, size: int) -> UntypedStorage:
    """Allocate a storage of ``size`` bytes in a memfd, which torch treats as shared memory.

    Raises:
        GpuAugError: If the memory cannot be allocated.
    """
    try:
        fd = private_memfd("gpuaug-tensor")
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


def _in_memfd(storage: Any) -> Any:
    """Return a copy of a storage in a memfd; ``storage`` itself if its memory is shared already, or cannot be."""
    can_be_shared = storage.device.type == "cpu" and storage.nbytes() and get_sharing_strategy() == "file_descriptor"
    if not can_be_shared or storage.is_shared():
        return storage
    return _allocated(UntypedStorage, storage.nbytes()).copy_(storage)


def _reduce_storage(storage: Any) -> Any:
    """Reduce a storage for pickling to the descriptor of its shared memory. Copy a storage in other memory to a memfd."""
    return reductions.reduce_storage(_in_memfd(storage))


def _reduce_tensor(tensor: Tensor) -> Any:
    """Reduce a tensor for pickling. A small part of a large storage, such as a row of a dataset, is sent without the rest."""
    is_simple = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.requires_grad)
    if is_simple and not (tensor.is_conj() or tensor.is_neg()) and tensor.device.type == "cpu":
        storage = tensor.untyped_storage()
        if storage.nbytes() > max(_LARGE_BYTES, 2 * tensor.nbytes) and not storage.is_shared():
            copy = tensor.clone()
            if copy.stride() == tensor.stride():
                tensor = copy
    return reductions.reduce_tensor(tensor)
